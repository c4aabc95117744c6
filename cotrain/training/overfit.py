"""Learns one text of each domain until its acceptance is high. A draft that can learn at all does so
within a minute. One that cannot has a wrong pipeline: its data, template, layers, loss or learning rate."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cotrain.config.settings import TrainConfig, truncation
from cotrain.data.texts import shared_texts
from cotrain.errors import UserError
from cotrain.evaluation.held_out import HeldOut, held_out
from cotrain.students.base import Student
from cotrain.training.assembly import shares_of, trained_by
from cotrain.training.deadline import Deadline
from cotrain.training.job import Job
from cotrain.training.module import Distillation, alpha_of
from cotrain.training.preconditions import require
from cotrain.training.run import train

ENOUGH = 0.95  # acceptance of the first draft at which a text counts as learnt
STEPS, EVERY = 400, 20  # most steps, and steps between evaluations


def overfit(cfg: TrainConfig) -> str:
    """Train the draft of `cfg` on one text of each domain until the mean acceptance of the first draft there is ENOUGH.
    Return a line for the user. Nothing is kept.

    Raises UserError as `preconditions.require` does, for a draft that is not trained alone, for greedy drafts, whose
    acceptance the target's own distribution bounds, and if the acceptance is not reached within STEPS steps."""
    if not cfg.draft.trained or cfg.mode != "distil" or cfg.objective != "sampled_draft":
        raise UserError(
            f"overfit=true: it is for a draft that is trained alone, with mode=distil and objective=sampled_draft, not "
            f"for draft={cfg.draft.kind} mode={cfg.mode} objective={cfg.objective}"
        )
    began, cfg = time.monotonic(), _settings(cfg)
    with TemporaryDirectory() as place:
        sources = require(cfg).sources
        figures = train(cfg, Path(place), Deadline(None, began), sources, build=_on_its_own_texts, write=_figures)
    line = (
        f"overfit: acceptance {figures['alpha']:.3f} after {figures['steps']} steps on {figures['texts']} texts, "
        f"{time.monotonic() - began:.0f} s"
    )
    if figures["alpha"] < ENOUGH:
        raise UserError(
            f"{line}, and not {ENOUGH}: the pipeline is wrong (look at the prompts of check=true), optimizer.lr="
            f"{cfg.optimizer.lr:g} does not fit, or the draft is too small for one text (draft.vocabulary=)"
        )
    return f"{line}: the draft learns what it is shown"


def _settings(cfg: TrainConfig) -> TrainConfig:
    """Return settings of the same draft, data, loss and regime, for few texts and many evaluations."""
    cfg = cfg.model_copy(deep=True)
    cfg.measure, cfg.minutes = False, None
    rollout, trainer = cfg.rollout, cfg.trainer
    rollout.texts = rollout.held_out_texts = rollout.rounds = 1
    rollout.temperatures, rollout.train_temperatures, rollout.folder = [cfg.regime.temperature], [], None
    trainer.steps, trainer.validations, trainer.corpus_steps, trainer.minutes = STEPS, STEPS // EVERY, 0, None
    trainer.batch, trainer.accumulate, trainer.devices, trainer.nodes = 2, 1, 1, 1
    cfg.optimizer.warmup, cfg.optimizer.decay = 0.05, 0.9  # at a constant rate, rounding of Adam's steps stays
    trainer.strategy, trainer.ema, trainer.cache = "auto", 0.0, None
    return cfg


class _Overfitting(Distillation):
    """Ends the training when the texts are learnt."""

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        alpha = _alpha(self)
        print(f"overfit: step {self.trainer.global_step}, acceptance {alpha:.3f}")
        self.trainer.should_stop = self.trainer.should_stop or alpha >= ENOUGH


def _alpha(module: Distillation) -> float:
    return alpha_of(module.scores()[module.temperature])


def _on_its_own_texts(job: Job, student: Student, _: dict[float, HeldOut]) -> Distillation:
    """Return the module that trains the student and judges it on the texts that it learns."""
    temperature = job.cfg.regime.temperature
    learnt = shared_texts(job.texts("train", temperature), shares_of(job.cfg))
    texts = held_out(job.read, learnt, temperature, truncation(job.cfg.regime))
    return trained_by(job, student, {temperature: texts}, _Overfitting)


def _figures(job: Job, module: Distillation, steps: int, *_: Any) -> dict[str, Any]:
    return {"alpha": _alpha(module), "steps": steps, "texts": len(module.held_out[module.temperature].texts)}
