"""Writes the results of a run: the figures of its held-out texts, and the draft folder with its report."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from cotrain.bench import measurement
from cotrain.bench.measurement import prepare, recorded
from cotrain.config.settings import TrainConfig, learnt, sampling
from cotrain.data.splits import SPLITS, in_split, shared
from cotrain.evaluation import comparison, profile
from cotrain.evaluation.held_out import DEPTHS, HeldOut
from cotrain.evaluation.profile import Provenance
from cotrain.planning.planner import served_tree
from cotrain.rollout.self_prompts import split_content
from cotrain.rollout.training_texts import regime
from cotrain.run_folder import numbered
from cotrain.training.assembly import coverage
from cotrain.training.callbacks import MeasureSpeed
from cotrain.training.job import Job, loss_name, objective
from cotrain.training.module import Distillation
from inference.drafts import moved_target
from inference.drafts.atomic import write_json
from inference.drafts.compatibility import hash_target, hash_weights
from inference.drafts.draft_folder import REPORT, Metadata, ServedAs, save
from inference.drafts.gguf_target import about
from inference.measure.environment import environment
from inference.report import replay


def keep_figures(job: Job, steps: int, figures: dict[str, Any]) -> None:
    """Write the file that `cotrain compare` reads to the run's folder. steps: the last step, which is below
    trainer.steps if patience or a time limit ended the training. figures: tau, and the figures of each held-out text,
    as entries of the file."""
    cfg = job.cfg
    label = cfg.label or (loss_name(cfg.loss) if cfg.draft.trained else cfg.draft.kind)
    figures = {"label": label, "seed": cfg.trainer.seed, "steps": steps, **figures, "environment": environment()}
    write_json(job.folder / comparison.FIGURES, figures)


def export(
    job: Job,
    module: Distillation,
    steps: int,
    speed: MeasureSpeed,
    others: tuple[HeldOut, Provenance] | None = None,
) -> dict[str, Any]:
    """Measure the module's draft, write its draft folder, and return its report.

    steps: the last step of the training. speed: the measured checkpoints, whose figures the report includes. others:
    texts of the user that the target did not sample, and the evidence for this, from `foreign`; None if there are none.
    """
    profiles, origin, given = module.profiles(), training(job, module, steps), None
    print("\n".join(profile.profile_line(t, one) for t, one in profiles.items()))
    if others:
        held, provenance = others
        alpha, own = module.on(held)["all"].alpha, module.judged[module.temperature]["all"].alpha
        print(
            f"acceptance is {alpha:.3f} on the training texts that the target did not sample, and {own:.3f} on "
            "texts that it sampled"
        )
        given = asdict(provenance) | {"alpha": alpha, "alpha_own": own}
    extra: dict[str, Any] = {
        "held_out": module.acceptance() | module.without_markov(),
        "checkpoints": [{"step": one.step, "speedup": one.speedup, "tau": one.tau} for one in speed.checkpoints],
        "exported_step": speed.best().step,
        "profiles": {f"{t:g}": one for t, one in profiles.items()},
        "divergence": module.divergence(lambda ids: str(job.tokenizer.decode(list(ids)))),
        "training": origin,
        "given_texts": given,
    }
    return write_measured(job, module.draft, origin, extra | ({"exit_plan": job.shape} if job.shape else {}))


def training(job: Job, module: Distillation, steps: int) -> dict[str, Any]:
    """Return the settings and the length of a training, as the draft folder and its report store them. steps: the last
    step of the training."""
    cfg, progress, known = job.cfg, module.progress, module.student.known
    assert progress is not None
    pruned = (
        None
        if bool(known.all())
        else {"tokens": int(known.sum()), "coverage": coverage(module.held_out[cfg.regime.temperature], known)}
    )
    template = hashlib.sha256(str(job.tokenizer.chat_template).encode()).hexdigest()
    return {
        "loss": cfg.loss.model_dump(),
        "temperatures": learnt(cfg),
        "steps": steps,
        "minutes": progress.minutes,
        "seconds": progress.elapsed,  # without validations and sampling
        **about_target(job),
        "moved": moved_target.movement_of(cfg.target.path, cfg.target.adapter),
        "draft_quantisation": cfg.draft.quantisation,
        "draft_vocabulary": pruned,
        "learnt": {
            "completions": job.chats,
            "template": cfg.data.template,
            "chat_template": template if job.chats else None,
        },
        "init": cfg.init.model_dump(),
    }


def about_target(job: Job) -> dict[str, Any]:
    """Return the path of the target's adapter, and the origin of a GGUF target from its file; each is None if there is
    none."""
    return {"adapter": job.cfg.target.adapter, "gguf": about(job.cfg.target.path)}


def served_as(cfg: TrainConfig, messages: bool) -> ServedAs:
    """Return how the draft is measured, which its folder records. messages: whether prompts are messages that the
    target's chat template renders."""
    return ServedAs(
        verify=cfg.verify,
        dtype=cfg.target.dtype,
        quantisation=cfg.quantisation.kind,
        prompt_tokens=cfg.rollout.prompt_tokens if cfg.data.path else cfg.bench.prompt_tokens,
        messages=messages,
        template=cfg.data.template,
        chat=cfg.data.chat,
    )


def write_measured(job: Job, draft: PreTrainedModel, origin: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Measure a draft, write its folder, and return the report. Before the measurement the folder has no report, so
    that a run that is ended in it leaves the draft. origin: how the draft was trained. extra: further entries for the
    report's `extra`."""
    if not (job.folder / "draft" / REPORT).exists():  # an earlier training's lasts meanwhile
        unmeasured(job, draft, origin)
        print(f"draft: {job.folder / 'draft'}, which is measured now", flush=True)
    plan = job.plan(draft)
    prepare(plan)
    report = measurement.measure(plan, extra)
    replay.write_replay(recorded(plan, report["extra"]), job.folder / replay.FILE)
    origin = {"environment": report["environment"], "advice": report["extra"]["advice"], **origin}
    _write_draft(job, plan, origin, report["extra"]["planned_k"], report)
    return report


def unmeasured(job: Job, draft: PreTrainedModel, origin: dict[str, Any]) -> None:
    """Write the run's draft folder without a report, with the draft length of the settings. If the folder has a
    measured draft, from an earlier training, it is moved to a folder next to it, with its replay. origin: how the draft
    was trained."""
    plan = job.plan_with(draft, None)
    k, most = job.cfg.policy.k or DEPTHS, plan.proposer().depths
    place, shown = job.folder / "draft", job.folder / replay.FILE
    if (place / REPORT).exists():
        place.rename(earlier := numbered(place))
        if shown.exists():
            shown.rename(earlier / replay.FILE)
        print(f"the draft that was measured before is kept in {earlier}, with its report; {place} has none")
    shown.unlink(missing_ok=True)  # it shows weights of an earlier run
    _write_draft(job, plan, {"environment": environment(), "planned": False, **origin}, min(k, most or k), None)


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
    """Return prompts to store in the draft folder, one JSON row per line: the final split of the prompts that the
    target sampled (data=self), without prompts that share a prefix with a prompt of another split. Return "" for
    prompts from other sources, and if fewer than two rows remain, since a measurement needs one to rank drafts and one
    to time."""
    if job.sampled_prompts is None:
        return ""
    rows = [json.loads(line) for line in job.sampled_prompts.splitlines()]
    tokens = job.cfg.rollout.prompt_tokens
    *others, final = (job.source(split).each(tokens) for split in SPLITS)
    common = {tuple(prompt) for prompt in shared(final, [prompt for part in others for prompt in part if prompt])}
    own = (rows[row] for row in in_split([split_content(row) for row in rows], SPLITS[-1]))
    unseen = {tuple(prompt): row for row, prompt in zip(own, final, strict=True) if prompt}
    lines = [json.dumps(row) + "\n" for prompt, row in unseen.items() if prompt not in common]
    return "".join(lines) if len(lines) > 1 else ""
