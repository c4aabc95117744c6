"""The main job: distil a draft, measure each checkpoint with the real engine, export the one of the highest tau."""

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
from cotrain.bench.recorded_replay import recorded
from cotrain.bench.tree_planner import served_tree
from cotrain.board import final_figures
from cotrain.board.loggers import others, tensorboard
from cotrain.board.marked_text import marked
from cotrain.config.regimes import learnt, sampling
from cotrain.config.settings import TrainConfig
from cotrain.errors import UserError
from cotrain.evaluation import comparison, profile
from cotrain.evaluation.held_out import DEPTHS, HeldOut
from cotrain.evaluation.provenance import Provenance
from cotrain.ranks import rank
from cotrain.rollout.training_texts import Source, regime
from cotrain.students.base import UNTRAINED, Student, prepare, shape
from cotrain.training.assembly import (
    begun,
    coverage,
    foreign,
    held_out_texts,
    prune,
    refuse_run,
    stages,
    trained_by,
)
from cotrain.training.callbacks import MeasureSpeed
from cotrain.training.fit import as_served, fit
from cotrain.training.interrupts import Signals, listening
from cotrain.training.job import Job, models, objective, settle, source
from cotrain.training.module import Distillation, alpha_of
from cotrain.training.names import of_loss
from cotrain.training.preconditions import fill_prompt_tokens
from inference.drafts.atomic import write_atomic
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import Metadata, save
from inference.measure.environment import environment
from inference.report import replay


def distil(
    cfg: TrainConfig, folder: Path, sources: Mapping[str, Source] | None = None, start: float | None = None
) -> dict[str, Any]:
    """Run or resume the job in `folder`, whose settings `preconditions.require` passed; returns the report of the
    exported draft, nothing with measure=false, which exports the weights of the last step. sources: texts that were
    read already; start: when the run began, by time.monotonic(), now when None: minutes= counts from there.

    Raises Interrupted when a signal ends it: what is done is kept.
    """
    with listening() as signals, others(cfg, folder) as loggers:
        begin = time.monotonic() if start is None else start
        return _distilled(cfg, folder, dict(sources or {}), signals, loggers, begin)


def _distilled(
    cfg: TrainConfig, folder: Path, sources: dict[str, Source], signals: Signals, loggers: list[Logger], start: float
) -> dict[str, Any]:
    assert cfg.policy.k is not None
    settle(cfg.trainer.threads, cfg.trainer.seed)
    target, tokenizer = models(cfg)
    if cfg.data.path and "train" not in sources:
        sources["train"] = source(cfg, "train", target, tokenizer)
    fill_prompt_tokens(cfg, target, sources.get("train"))
    job = Job(cfg, folder, target, tokenizer, sources, signals=signals, loggers=loggers, start=start)
    job.shape = shape(job)
    student = begun(cfg, target, job.vocabulary)
    if cfg.draft.kind in UNTRAINED:
        return untrained(job, student)
    job.reads = student.reads
    losses = stages(cfg.loss)
    refuse_run(job, student, losses)
    texts = held_out_texts(job)  # those that are learnt from are sampled phase by phase
    prune(job, student)
    if not bool(student.known.all()):
        count, covered = int(student.known.sum()), coverage(texts[cfg.regime.temperature], student.known)
        print(f"the draft knows {count} tokens, which are {100 * covered:.2f} % of held-out texts")
    module = trained_by(job, student, losses, texts)
    others = foreign(job)
    speed = ranking(job, module)
    steps = fit(job, module, [speed] if cfg.measure else [])
    if rank():
        return {}
    keep_figures(job, module, steps)
    report: dict[str, Any] = {}
    if cfg.measure:
        choose_best(job, module, speed)
        report = export(job, module, speed, others)
    else:
        with as_served(job, module):
            unmeasured(job, module.draft, _training(job, module, steps))
    alpha = alpha_of(module.scores()[module.temperature], objective(cfg.objective))
    tau = ranking_tau(job, module)()
    final_figures.write(cfg, [tensorboard(job.folder), *loggers], steps, final_figures.figures(alpha, tau, report))
    return report


def ranking(job: Job, module: Distillation) -> MeasureSpeed:
    """Measures each checkpoint, which tau of the held-out texts ranks."""
    cfg, k, tau = job.cfg, job.cfg.policy.k, ranking_tau(job, module)
    assert k is not None
    return MeasureSpeed(
        lambda draft: measurement.quick(job.plan(draft), k), tau, job.folder / "checkpoints", cfg.trainer.patience,
        lambda draft: marked(job.plan(draft), k),
    )  # fmt: skip


def ranking_tau(job: Job, module: Distillation) -> Callable[[], float]:
    """Of the draft as it was last judged, at the draft length and by the rule of the settings."""
    return partial(module.tau, job.cfg.policy.k or DEPTHS, objective(job.cfg.objective), job.cfg.verify)


def choose_best(job: Job, module: Distillation, speed: MeasureSpeed) -> None:
    """Give the module's draft the weights of the checkpoint that is exported, as it is served."""
    chosen = speed.best()
    print(f"measuring the checkpoint of the highest tau, step {chosen.step}, on other prompts")
    if chosen.step < job.cfg.trainer.steps or job.cfg.draft.quantisation != "none":
        try:
            best = type(module.student).load(chosen.path, job.target, job.vocabulary)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{chosen.path} cannot be read ({reason}): delete {chosen.path.parent}, and the same "
                            "command trains anew from the beginning") from error  # fmt: skip
        module.draft.load_state_dict(best.network.state_dict())
        module.judge()


def _digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the chat template, which decides what was learnt."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def keep_figures(job: Job, module: Distillation, steps: int) -> None:
    """What `cotrain compare` reads: held-out figures of the last step, text by text. steps: that were taken; patience
    or a budget of time may have ended the run before trainer.steps."""
    found = {"label": job.cfg.label or of_loss(job.cfg.loss), "seed": job.cfg.trainer.seed, "steps": steps,
             "tau": ranking_tau(job, module)(),
             "texts": comparison.per_text(module.scores()), "environment": environment()}  # fmt: skip
    write_atomic(job.folder / comparison.FIGURES, json.dumps(found) + "\n")


def biased(module: Distillation, others: tuple[HeldOut, Provenance]) -> dict[str, Any]:
    """What acceptance would seem to be on texts that the target did not sample, beside what it is."""
    held, found = others
    alpha = module.on(held)["all"].alpha
    own = module.judged[module.temperature]["all"].alpha
    print(f"on given texts, which the target did not sample, acceptance is {alpha:.3f}; on its own {own:.3f}")
    return asdict(found) | {"alpha": alpha, "alpha_own": own}


def _pruned(job: Job, module: Distillation) -> dict[str, Any] | None:
    """Of a draft that knows some tokens alone, how many, and their share of held-out texts in the regime."""
    held, known = module.held_out[job.cfg.regime.temperature], module.student.known
    return None if bool(known.all()) else {"tokens": int(known.sum()), "coverage": coverage(held, known)}


def _profiles(module: Distillation) -> dict[str, Any]:
    """Acceptance by draft temperature and context, at each temperature of the target, and said."""
    found = module.profiles()
    print("\n".join(profile.line(t, one) for t, one in found.items()))
    return {f"{t:g}": one for t, one in found.items()}


def export(
    job: Job, module: Distillation, speed: MeasureSpeed, others: tuple[HeldOut, Provenance] | None = None
) -> dict[str, Any]:
    """Measure the module's draft afresh and write the draft folder; returns its report."""
    plan, made = job.plan(module.draft), _training(job, module, speed.kept[-1].step)
    extra: dict[str, Any] = {
        "held_out": module.acceptance(),
        "checkpoints": [{"step": kept.step, "speedup": kept.speedup, "tau": kept.tau} for kept in speed.kept],
        "exported_step": speed.best().step,
        "profiles": _profiles(module),
        "divergence": module.divergence(lambda ids: str(job.tokenizer.decode(list(ids)))),
        "training": made,
        "given_texts": biased(module, others) if others else None,
    }
    extra |= {"exit_plan": job.shape} if job.shape else {}
    return measured(job, plan, made, extra)


def _training(job: Job, module: Distillation, steps: int) -> dict[str, Any]:
    """How a draft was trained, for its folder and its report."""
    loss = job.cfg.loss
    return {
        "loss": {
            "first": loss.first,
            "then": loss.then,
            "switch": loss.switch,
            "hardest": loss.hardest,
            "decay": loss.decay,
        },
        "temperatures": learnt(job.cfg),
        "steps": steps,
        "minutes": module.progress.minutes if module.progress else None,
        "seconds": module.progress.elapsed if module.progress else None,  # of training alone
        "rounds": job.cfg.rollout.rounds,
        "on_draft": job.cfg.rollout.on_draft,
        "top": job.cfg.trainer.top,
        "adapter": job.cfg.target.adapter,
        "draft_quantisation": job.cfg.draft.quantisation,
        "served": served_as(job.cfg),
        "draft_vocabulary": _pruned(job, module),
        "learnt": {
            "completions": job.chats,
            "template": OmegaConf.to_container(cast(Any, job.cfg.data.template)),
            "chat_template": _digest(job.tokenizer) if job.chats else None,
        },
        "init": {"kind": job.cfg.init.kind, "layers": list(job.cfg.init.layers), "cosine": job.cfg.init.cosine},
    }


def served_as(cfg: TrainConfig) -> dict[str, Any]:
    """What `cotrain bench` and its like measure with unless other settings are typed, see `served_pair.as_trained`."""
    return {
        "verify": cfg.verify,
        "prompt_tokens": cfg.rollout.prompt_tokens if cfg.data.path else cfg.bench.prompt_tokens,
        "quantisation": cfg.quantisation.kind,
        "chat": cfg.data.chat,
        "template": OmegaConf.to_container(cast(Any, cfg.data.template)),
    }


def untrained(job: Job, student: Student) -> dict[str, Any]:
    """Write the folder of a draft that has nothing to learn, measured unless measure=false; returns its report."""
    found = {"label": job.cfg.label or job.cfg.draft.kind, "seed": job.cfg.trainer.seed, "steps": 0, "texts": {},
             "environment": environment()}  # fmt: skip
    if rank():
        return {}
    made = {"adapter": job.cfg.target.adapter, "served": served_as(job.cfg)}
    if not job.cfg.measure:
        write_atomic(job.folder / comparison.FIGURES, json.dumps(found) + "\n")
        unmeasured(job, student.network, made)
        return {}
    report = measured(job, job.plan(student.network), made, {})
    found["tau"] = report["acceptance"]["tau"]["measured"]
    write_atomic(job.folder / comparison.FIGURES, json.dumps(found) + "\n")
    return report


def measured(job: Job, plan: measurement.Plan, made: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """The report of a plan, written with its draft as the run's draft folder."""
    prepare(plan)
    report = measurement.measure(plan, extra)
    replay.write(recorded(plan, report["extra"]), job.folder / replay.FILE)
    made = {"environment": report["environment"], "advice": report["extra"]["advice"], **made}
    _write_draft(job, plan, made, report["extra"]["planned_k"], report)
    return report


def unmeasured(job: Job, draft: PreTrainedModel, made: dict[str, Any]) -> None:
    """Write the run's draft folder without a report, at the draft length of the settings, and say so."""
    plan = job.plan_with(draft, None)
    k, most = job.cfg.policy.k or DEPTHS, plan.proposer(counted=True).depths
    _write_draft(job, plan, {"environment": environment(), **made}, min(k, most or k), None)
    (job.folder / replay.FILE).unlink(missing_ok=True)  # of weights that were measured before these


def _write_draft(job: Job, plan: measurement.Plan, made: dict[str, Any], k: int, report: dict[str, Any] | None) -> None:
    metadata = Metadata(
        target={"name": job.cfg.target.path, **hash_target(job.target.config, job.tokenizer)},
        k=k,
        objective=objective(job.cfg.objective),
        regime=regime(sampling(job.cfg.regime)),
        origin=made,
        int8=plan.int8,
        kind=job.cfg.draft.kind,
        tree=served_tree(report["extra"]) if report else None,
    )
    save(plan.served, job.tokenizer, job.folder / "draft", metadata, report, replace=True)
