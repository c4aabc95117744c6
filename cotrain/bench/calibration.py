"""Choices that a kind of draft leaves to measurements: its layers before it trains, its settings before it is timed."""

from dataclasses import replace
from typing import Any

from cotrain.bench.exit_planner import TrainingJob, planned
from cotrain.bench.plan import Plan
from cotrain.students.base import Trials, student_class
from inference import Engine
from inference.proposers.base import Proposer


def shape(job: TrainingJob) -> dict[str, Any] | None:
    """Choose the layers of a draft if its settings leave them open; returns the reasons for the report, None if there
    was no choice."""
    return planned(job) if student_class(job.cfg.draft.kind).open_layers else None


def prepare(plan: Plan) -> None:
    """Calibrate a kind that wants it on ranking prompts, none of which is timed later, and store the settings in the
    draft's config."""
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
