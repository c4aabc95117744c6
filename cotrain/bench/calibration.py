"""Choices that are made by measurement: the layers of a draft before training, and its own settings before it is
timed."""

from dataclasses import replace
from typing import Any

from cotrain.bench.exit_planner import TrainingJob, planned
from cotrain.bench.plan import Plan
from cotrain.students.base import Trials, student_class
from inference import Engine
from inference.proposers.base import Proposer


def shape(job: TrainingJob) -> dict[str, Any] | None:
    """Choose the layers of a draft by measurement, if its kind allows it and draft.layers is null. Return the figures
    of all candidates for the report, or None if nothing was chosen."""
    return planned(job) if student_class(job.cfg.draft.kind).open_layers else None


def prepare(plan: Plan) -> None:
    """Calibrate a draft whose kind needs it, and store the result in its config. The ranking prompts are used for it,
    which are not timed later."""
    if not student_class(plan.kind).calibrated:
        return
    size, replayed = plan.bench, plan.target.device.type == "cuda"
    served = replace(plan, compiled=plan.compiled._replace(plain=replayed, target=replayed, draft=replayed))

    def drafting(proposer: Proposer) -> Engine:
        return served.engine(max(size.depths), proposer=proposer)

    prompts = plan.ranking(0, max(4 * size.quick_prompts, size.rows))
    trials = Trials(drafting, served.plain, prompts, plan.sampling, size.new_tokens, size.seed)
    settings = plan.student(plan.draft).calibrate(served.proposer(), trials)
    for network in (plan.draft, plan.served, plan.running):
        network.config.update(settings)
