"""Distillation of a draft. Each checkpoint is measured with the real engine, and the checkpoint of the highest tau is
exported."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.loggers import Logger
from omegaconf import OmegaConf
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.bench import measurement
from cotrain.bench.measurement import prepare, recorded, sample_text
from cotrain.board import curves
from cotrain.board.curves import others, tensorboard
from cotrain.config.settings import TrainConfig, from_target, learnt, sampling
from cotrain.data.prompt_rows import Source
from cotrain.data.splits import SPLITS, in_split, shared
from cotrain.errors import UserError
from cotrain.evaluation import comparison, profile
from cotrain.evaluation.held_out import DEPTHS, HeldOut
from cotrain.evaluation.profile import Provenance
from cotrain.planning import exits
from cotrain.planning.planner import served_tree
from cotrain.ranks import rank
from cotrain.rollout.self_prompts import content
from cotrain.rollout.training_texts import Sampled, regime
from cotrain.run_folder import numbered
from cotrain.students.base import Student, student_class
from cotrain.training.assembly import coverage, foreign, held_out_texts, new_student, prune, stages, trained_by
from cotrain.training.callbacks import MeasureSpeed
from cotrain.training.fit import as_served, fit
from cotrain.training.interrupts import Signals, listening
from cotrain.training.job import Job, loss_name, models, objective, sample_prompts, settle
from cotrain.training.module import Distillation, alpha_of
from cotrain.training.preconditions import read_texts, refuse_run, require_texts
from cotrain.training.progress import prompt_seconds
from inference.drafts import moved_target
from inference.drafts.atomic import write_atomic
from inference.drafts.compatibility import hash_target, hash_weights
from inference.drafts.draft_folder import REPORT, Metadata, ServedAs, save
from inference.drafts.gguf_target import about
from inference.measure.environment import environment
from inference.report import replay


def distil(
    cfg: TrainConfig, folder: Path, sources: Mapping[str, Source] | None = None, start: float | None = None,
    train_texts: Callable[[PreTrainedModel, PreTrainedTokenizerBase], Sampled] | None = None,
    sampled_prompts: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run or resume the job in `folder`. Return the report of the exported draft.

    cfg: settings that `preconditions.require` has checked. With measure=false the weights of the last step are exported
    and the report is {}. sources: texts that have been read already. start: the start of the run by time.monotonic(),
    from which minutes= counts; None: now. train_texts: a function from target and tokenizer to the training texts, if
    another target sampled them. sampled_prompts: the rows of data.path=, if another target sampled them for data=self.
    Raises Interrupted when a signal ends the run; the same command resumes it.
    """
    with listening() as signals, others(cfg, folder) as loggers:
        begin = time.monotonic() if start is None else start
        return _distilled(cfg, folder, dict(sources or {}), signals, loggers, begin, train_texts, sampled_prompts)


def _distilled(
    cfg: TrainConfig, folder: Path, sources: dict[str, Source], signals: Signals, loggers: list[Logger], start: float,
    train_texts: Callable[[PreTrainedModel, PreTrainedTokenizerBase], Sampled] | None, sampled_prompts: str | None,
) -> dict[str, Any]:  # fmt: skip
    assert cfg.policy.k is not None
    settle(cfg.trainer.threads, cfg.trainer.seed)
    target, tokenizer = models(cfg)
    if from_target(cfg.data):
        place, timed = Path(cfg.rollout.folder or folder / "rollouts"), cfg.bench.prompts * cfg.measure
        file = sample_prompts(cfg, target, tokenizer, place, timed, prompt_seconds(cfg))
        sampled_prompts = file.read_text(encoding="utf-8")  # another run may replace the file of a shared folder
        sources = require_texts(cfg, target, tokenizer)
    sources = sources or read_texts(cfg, target, tokenizer)
    job = Job(cfg, folder, target, tokenizer, sources, signals=signals, loggers=loggers, start=start,
              sampled_prompts=sampled_prompts,
              train_texts=train_texts(target, tokenizer) if train_texts else None)  # fmt: skip
    job.shape = exits.planned(job)
    student = new_student(cfg, target, job.vocabulary)
    if not student_class(cfg.draft.kind).trained:
        return untrained(job, student)
    job.reads = student.reads
    losses = stages(cfg.loss)
    refuse_run(job, student, losses)
    texts = held_out_texts(job)  # `fit` samples the texts to learn from, phase by phase
    prune(job, student)
    if not bool(student.known.all()):
        count, covered = int(student.known.sum()), coverage(texts[cfg.regime.temperature], student.known)
        print(f"the draft's vocabulary has {count} tokens: {100 * covered:.2f} % of held-out texts")
    module = trained_by(job, student, losses, texts)
    given = foreign(job)
    speed = ranking(job, module)
    steps = fit(job, module, [speed] if cfg.measure else [])
    if rank():
        return {}
    keep_figures(job, module, steps)
    report: dict[str, Any] = {}
    if cfg.measure:
        choose_best(job, module, speed)
        report = export(job, module, speed, given)
    else:
        with as_served(job, module):
            unmeasured(job, module.draft, _training(job, module, steps))
    alpha = alpha_of(module.scores()[module.temperature], objective(cfg.objective))
    tau = ranking_tau(job, module)()
    curves.write_final(cfg, [tensorboard(job.folder), *loggers], steps, curves.final_figures(alpha, tau, report))
    return report


def ranking(job: Job, module: Distillation) -> MeasureSpeed:
    """Return the callback that measures each checkpoint and ranks checkpoints by tau on the held-out texts."""
    cfg, k, tau = job.cfg, job.cfg.policy.k, ranking_tau(job, module)
    assert k is not None
    return MeasureSpeed(
        lambda draft: measurement.quick(job.plan(draft), k), tau, job.folder / "checkpoints", cfg.trainer.patience,
        lambda draft: sample_text(job.plan(draft), k),
    )  # fmt: skip


def ranking_tau(job: Job, module: Distillation) -> Callable[[], float]:
    """Return a function that gives tau by the latest scores, at the configured draft length and rule."""
    return partial(module.tau, job.cfg.policy.k or DEPTHS, objective(job.cfg.objective), job.cfg.verify)


def keep_figures(job: Job, module: Distillation, steps: int) -> None:
    """Write the file for `cotrain compare`, which has figures of the last step for each held-out text. steps: the last
    step, which may be less than trainer.steps because of patience or a budget of time."""
    figures = {"label": job.cfg.label or loss_name(job.cfg.loss), "seed": job.cfg.trainer.seed, "steps": steps,
               "tau": ranking_tau(job, module)(),
               "texts": comparison.per_text(module.scores(), module.held_out),
               "environment": environment()}  # fmt: skip
    write_atomic(job.folder / comparison.FIGURES, json.dumps(figures) + "\n")


def choose_best(job: Job, module: Distillation, speed: MeasureSpeed) -> None:
    """Load the weights of the checkpoint to export into the module's draft. They are quantised if the draft is served
    so."""
    chosen = speed.best()
    print(f"measuring the checkpoint of the highest tau (step {chosen.step}) on prompts that did not rank checkpoints")
    if chosen.step < job.cfg.trainer.steps or job.cfg.draft.quantisation != "none":
        try:
            best = type(module.student).load(chosen.path, job.target, job.vocabulary)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{chosen.path} cannot be read ({reason}): delete {chosen.path.parent}, and the same "
                            "command starts the training again") from error  # fmt: skip
        module.draft.load_state_dict(best.network.state_dict())
        module.judge()


def export(
    job: Job, module: Distillation, speed: MeasureSpeed, others: tuple[HeldOut, Provenance] | None = None
) -> dict[str, Any]:
    """Measure the module's draft and write the draft folder. Return its report. others: texts of the user that the
    target did not sample, as `foreign` returns them."""
    plan, training = job.plan(module.draft), _training(job, module, speed.checkpoints[-1].step)
    extra: dict[str, Any] = {
        "held_out": module.acceptance() | module.without_markov(),
        "checkpoints": [{"step": one.step, "speedup": one.speedup, "tau": one.tau} for one in speed.checkpoints],
        "exported_step": speed.best().step,
        "profiles": _profiles(module),
        "divergence": module.divergence(lambda ids: str(job.tokenizer.decode(list(ids)))),
        "training": training,
        "given_texts": biased(module, others) if others else None,
    }
    extra |= {"exit_plan": job.shape} if job.shape else {}
    return measured(job, plan, training, extra)


def _profiles(module: Distillation) -> dict[str, Any]:
    """Return acceptance by draft temperature and context, for each target temperature, and print one line per
    temperature."""
    profiles = module.profiles()
    print("\n".join(profile.line(t, one) for t, one in profiles.items()))
    return {f"{t:g}": one for t, one in profiles.items()}


def biased(module: Distillation, others: tuple[HeldOut, Provenance]) -> dict[str, Any]:
    """Return acceptance on texts that the target did not sample, which is biased, and on the target's texts. Print
    both."""
    held, origin = others
    alpha = module.on(held)["all"].alpha
    own = module.judged[module.temperature]["all"].alpha
    print(
        f"acceptance is {alpha:.3f} on the given texts, which the target did not sample; on its texts it is {own:.3f}"
    )
    return asdict(origin) | {"alpha": alpha, "alpha_own": own}


def _training(job: Job, module: Distillation, steps: int) -> dict[str, Any]:
    """Return the settings and the length of a training, for the draft folder and its report."""
    loss = job.cfg.loss
    return {
        "loss": {
            "first": loss.first,
            "then": loss.then,
            "switch": loss.switch,
            "decay": loss.decay,
        },
        "temperatures": learnt(job.cfg),
        "steps": steps,
        "minutes": module.progress.minutes if module.progress else None,
        "seconds": module.progress.elapsed if module.progress else None,  # without validations and sampling
        "rounds": job.cfg.rollout.rounds,
        "adapter": job.cfg.target.adapter,
        "gguf": about(job.cfg.target.path),
        "moved": moved_target.about(job.cfg.target.path, job.cfg.target.adapter),
        "draft_quantisation": job.cfg.draft.quantisation,
        "draft_vocabulary": _pruned(job, module),
        "learnt": {
            "completions": job.chats,
            "template": OmegaConf.to_container(cast(Any, job.cfg.data.template)),
            "chat_template": _digest(job.tokenizer) if job.chats else None,
        },
        "init": {"kind": job.cfg.init.kind, "layers": list(job.cfg.init.layers)},
    }


def served_as(cfg: TrainConfig, messages: bool) -> ServedAs:
    """Return how the draft is measured, for its folder. messages: whether prompts are messages of the target's chat
    template."""
    return ServedAs(
        verify=cfg.verify,
        dtype=cfg.target.dtype,
        quantisation=cfg.quantisation.kind,
        prompt_tokens=cfg.rollout.prompt_tokens if cfg.data.path else cfg.bench.prompt_tokens,
        messages=messages,
        template=cast(dict[str, Any], OmegaConf.to_container(cast(Any, cfg.data.template))),
        chat=cfg.data.chat,
    )


def _pruned(job: Job, module: Distillation) -> dict[str, Any] | None:
    """Return the number of tokens of a pruned draft vocabulary and their share of the held-out texts in the regime.
    Return None if the vocabulary is not pruned."""
    held, known = module.held_out[job.cfg.regime.temperature], module.student.known
    return None if bool(known.all()) else {"tokens": int(known.sum()), "coverage": coverage(held, known)}


def _digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the chat template with which the draft was trained."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def untrained(job: Job, student: Student) -> dict[str, Any]:
    """Write the folder of a draft that is not trained, and measure it unless measure=false. Return its report."""
    figures = {"label": job.cfg.label or job.cfg.draft.kind, "seed": job.cfg.trainer.seed, "steps": 0, "texts": {},
               "environment": environment()}  # fmt: skip
    if rank():
        return {}
    target = job.cfg.target
    origin = {"adapter": target.adapter, "gguf": about(target.path)}
    if not job.cfg.measure:
        write_atomic(job.folder / comparison.FIGURES, json.dumps(figures) + "\n")
        unmeasured(job, student.network, origin)
        return {}
    report = measured(job, job.plan(student.network), origin, {})
    figures["tau"] = report["acceptance"]["tau"]["measured"]
    write_atomic(job.folder / comparison.FIGURES, json.dumps(figures) + "\n")
    return report


def measured(job: Job, plan: measurement.Plan, origin: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Measure a plan, write its draft folder and return the report. origin: how the draft was trained."""
    prepare(plan)
    report = measurement.measure(plan, extra)
    replay.write(recorded(plan, report["extra"]), job.folder / replay.FILE)
    origin = {"environment": report["environment"], "advice": report["extra"]["advice"], **origin}
    _write_draft(job, plan, origin, report["extra"]["planned_k"], report)
    return report


def unmeasured(job: Job, draft: PreTrainedModel, origin: dict[str, Any]) -> None:
    """Write the run's draft folder without a report, with the draft length of the settings. A measured draft of fewer
    steps that is there is kept beside it, with its replay."""
    plan = job.plan_with(draft, None)
    k, most = job.cfg.policy.k or DEPTHS, plan.proposer(counted=True).depths
    place, shown = job.folder / "draft", job.folder / replay.FILE
    if (place / REPORT).exists():
        place.rename(earlier := numbered(place))
        if shown.exists():
            shown.rename(earlier / replay.FILE)
        print(f"the draft that was measured before is kept in {earlier}, with its report; {place} has none")
    shown.unlink(missing_ok=True)  # it shows weights of an earlier run
    _write_draft(job, plan, {"environment": environment(), **origin}, min(k, most or k), None)


def _write_draft(
    job: Job, plan: measurement.Plan, origin: dict[str, Any], k: int, report: dict[str, Any] | None
) -> None:
    asked = job.cfg.target
    metadata = Metadata(
        target={
            "name": asked.path,
            **hash_target(job.target.config, job.tokenizer),
            "weights": hash_weights(asked.path, asked.adapter),
        },
        k=k,
        objective=objective(job.cfg.objective),
        regime=regime(sampling(job.cfg.regime)),
        origin=origin,
        int8=plan.int8,
        kind=job.cfg.draft.kind,
        tree=served_tree(report["extra"]) if report else None,
        served=served_as(job.cfg, job.messages),
    )
    save(plan.served, job.tokenizer, job.folder / "draft", metadata, report, replace=True, prompts=unseen_prompts(job))


def unseen_prompts(job: Job) -> str:
    """Return the rows of the final split of the prompts that the target sampled (data=self), to be stored in the draft
    folder. Prompts that are shared with the other splits are left out, as in `Job.prompts`. Return "" for prompts of
    other sources, and if fewer than two rows remain, since a measurement needs one to rank and one to time."""
    if job.sampled_prompts is None:
        return ""
    rows = [json.loads(line) for line in job.sampled_prompts.splitlines()]
    tokens = job.cfg.rollout.prompt_tokens
    *others, final = (job.source(split).each(tokens) for split in SPLITS)
    common = {tuple(prompt) for prompt in shared(final, [prompt for part in others for prompt in part if prompt])}
    own = (rows[row] for row in in_split([content(row) for row in rows], SPLITS[-1]))
    unseen = {tuple(prompt): row for row, prompt in zip(own, final, strict=True) if prompt}
    lines = [json.dumps(row) + "\n" for prompt, row in unseen.items() if prompt not in common]
    return "".join(lines) if len(lines) > 1 else ""
