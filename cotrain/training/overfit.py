"""Learns one text of each domain until its acceptance is high, and then drafts for it with the engine. A draft that can
learn at all does so within a minute or two. One that cannot has a wrong pipeline: its data, template, layers, loss or
learning rate. One that has learnt and drafts otherwise in the engine was trained for other positions or states than
those at which it is served."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cotrain.config.settings import TrainConfig, sampling, truncation
from cotrain.data.texts import Texts, shared_texts
from cotrain.errors import Interrupted, UserError
from cotrain.evaluation.held_out import DEPTHS, HeldOut, held_out
from cotrain.students.base import Student
from cotrain.training.assembly import shares_of, trained_by
from cotrain.training.deadline import Deadline
from cotrain.training.fit import as_served
from cotrain.training.job import Job
from cotrain.training.module import Distillation, alpha_of
from cotrain.training.preconditions import require
from cotrain.training.run import train
from inference import Engine
from inference.exactness.figures import expected
from inference.exactness.forced import forced
from inference.output import Emitted
from inference.policy import Fixed
from inference.proposers.base import Proposer

STEPS, EVERY = 800, 20  # most steps, and steps between evaluations
ALIKE = 0.02  # largest difference, as a share, between tau of the engine's drafts and of the learnt ones


def overfit(cfg: TrainConfig) -> str:
    """Train the draft of `cfg` on one text of each domain until the mean acceptance of the first draft there is
    `Student.memorises`. Then let the engine draft at every token of these texts. Return a line for the user. Nothing is
    kept.

    Raises UserError as `preconditions.require` does, for a draft that is not trained alone, for greedy drafts, whose
    acceptance the target's own distribution bounds, if the acceptance is not reached within STEPS steps, and if the
    engine's drafts are not those that were learnt."""
    if not cfg.draft.trained or cfg.mode != "distil" or cfg.objective != "sampled_draft":
        raise UserError(
            f"overfit=true: it is for a draft that is trained alone, with mode=distil and objective=sampled_draft, not "
            f"for draft={cfg.draft.kind} mode={cfg.mode} objective={cfg.objective}"
        )
    began, cfg = time.monotonic(), _settings(cfg)
    with TemporaryDirectory() as place:
        sources = require(cfg).sources
        try:
            figures = train(cfg, Path(place), Deadline(None, began), sources, build=_on_its_own_texts, write=_figures)
        except Interrupted as ended:
            raise Interrupted(ended.signum, "interrupted; overfit=true keeps nothing") from ended
    line = (
        f"overfit: acceptance {figures['alpha']:.3f} after {figures['steps']} steps on {figures['texts']} texts, "
        f"{time.monotonic() - began:.0f} s"
    )
    if figures["alpha"] < figures["enough"]:
        raise UserError(
            f"{line}, and not {figures['enough']}: the pipeline is wrong (look at the prompts of check=true), "
            f"optimizer.lr={cfg.optimizer.lr:g} does not fit, or the draft is too small for one text "
            "(draft.vocabulary=)"
        )
    learnt, drafted = figures["tau"], figures["drafted"]
    if drafted is not None and abs(drafted / learnt - 1) > ALIKE:
        raise UserError(
            f"{line}, but in the engine its drafts give tau {drafted:.3f} on these texts, not the {learnt:.3f} that it "
            f"learnt: draft={cfg.draft.kind} is not trained for the positions or states at which it drafts"
        )
    shown = "" if drafted is None else f", and its drafts in the engine give the same tau, {drafted:.3f}"
    return f"{line}: the draft learns what it is shown{shown}"


def _settings(cfg: TrainConfig) -> TrainConfig:
    """Return settings of the same draft, data, loss and regime, for few texts and many evaluations."""
    cfg = cfg.model_copy(deep=True)
    cfg.measure, cfg.minutes = False, None
    rollout, trainer = cfg.rollout, cfg.trainer
    rollout.texts = rollout.held_out_texts = 1
    rollout.temperatures, rollout.train_temperatures, rollout.folder = [cfg.regime.temperature], [], None
    trainer.steps, trainer.validations, trainer.corpus_steps, trainer.minutes = STEPS, STEPS // EVERY, 0, None
    trainer.batch, trainer.accumulate, trainer.devices, trainer.nodes = 2, 1, 1, 1
    cfg.optimizer.warmup, cfg.optimizer.decay = 0.05, 0.9  # at a constant rate, rounding of Adam's steps stays
    trainer.strategy, trainer.cache = "auto", None
    return cfg


class _Overfitting(Distillation):
    """Ends the training when the texts are learnt."""

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        alpha = _alpha(self)
        print(f"overfit: step {self.trainer.global_step}, acceptance {alpha:.3f}")
        self.trainer.should_stop = self.trainer.should_stop or alpha >= self.student.memorises


def _alpha(module: Distillation) -> float:
    return alpha_of(module.scores()[module.temperature])


def _on_its_own_texts(job: Job, student: Student, _: dict[float, HeldOut]) -> Distillation:
    """Return the module that trains the student and judges it on the texts that it learns."""
    temperature = job.cfg.regime.temperature
    learnt = shared_texts(job.texts("train", temperature), shares_of(job.cfg))
    texts = held_out(job.read, learnt, temperature, truncation(job.cfg.regime))
    return trained_by(job, student, {temperature: texts}, _Overfitting)


def _figures(job: Job, module: Distillation, steps: int, *_: Any) -> dict[str, Any]:
    """Return what `overfit` says of the trained draft. tau: that of the learnt distributions. drafted: that of the
    engine's drafts, or None for drafts by look-up, which need not be the model's, and if a server has the target."""
    held, k = module.held_out[module.temperature], job.cfg.policy.k or DEPTHS
    figures = {"alpha": _alpha(module), "enough": module.student.memorises, "steps": steps, "texts": len(held.texts)}
    drafted, k = None, module.judged[module.temperature]["all"].drafted(k)
    if not module.student.calibrated and not job.cfg.teacher.urls:
        with as_served(job, module):
            drafted = _drafted(job, held.texts, module.student.proposer(), k)
    return figures | {"tau": module.tau(k), "drafted": drafted}


def _drafted(job: Job, texts: Texts, proposer: Proposer, k: int) -> float | None:
    """Return tau at draft length k of the proposer's drafts, from rounds that begin at each new token of the texts."""
    ends, starts = texts.length.tolist(), texts.prompt.tolist()
    tokens = [row[start:end].tolist() for row, start, end in zip(texts.ids, starts, ends, strict=True)]
    engine = Engine(job.target, proposer, policy=Fixed(k), tokenizer=job.tokenizer, rows=len(tokens), graphs=False)
    texts_of_engine = Emitted(texts.prompts, list(range(len(tokens))), tokens, [])
    figures = forced(engine, texts_of_engine, sampling(job.cfg.regime), max(map(len, tokens)))
    predicted = expected(figures, "token")
    return sum(map(len, tokens)) / predicted.calls if predicted else None
