"""Rounds of sample, train, swap the draft: texts of the target, sampled ever faster by the draft that learns from them.

Speculative sampling leaves the target's distribution as it is, so texts are as much the target's with any draft. Where
plain
decoding measures faster (many rows on few cores), it goes on: see `rollout.samplers.Faster`.
"""

import math
from dataclasses import dataclass

from transformers import PreTrainedModel

from cotrain.config.settings import TrainConfig
from cotrain.rollout.samplers import Faster, Mixed, Own
from cotrain.training.job import Job
from inference import Engine
from inference.models.dtypes import widened
from inference.request import ends_of


@dataclass(frozen=True)
class Phase:
    """Steps first .. last, which learn from the texts of this round, counted from 0, and those before."""

    round: int
    first: int
    last: int


def phases_of(cfg: TrainConfig, every: int) -> list[Phase]:
    """As many as rounds, each ending at a validation, of which there is one `every` so many steps.

    Raises ValueError for more rounds than validations, and where this engine samples nothing.
    """
    rounds, steps = cfg.rollout.rounds, cfg.trainer.steps
    validations = math.ceil(steps / every)
    if not 1 <= rounds <= validations:
        raise ValueError(f"rollout.rounds: from 1 to as many as there are validations, {validations}, not {rounds}")
    share = cfg.rollout.on_draft
    if not 0 <= share <= 1 or (share and (rounds == 1 or cfg.rollout.folder)):
        raise ValueError("rollout.on_draft: a share of the prompts of every round but the first, and a run's own: give "
                         "rollout.rounds= above 1 and no rollout.folder=")  # fmt: skip
    if rounds > 1 and (cfg.rollout.url or cfg.data.on_target):
        raise ValueError("rollout.rounds: this engine samples no texts with rollout.url= or data.on_target=true")
    ends = [min(every * math.ceil(validations * (i + 1) / rounds), steps) for i in range(rounds)]
    return [Phase(i, first, last) for i, (first, last) in enumerate(zip([0, *ends], ends, strict=False))]


def swapped(job: Job, draft: PreTrainedModel) -> Faster | Mixed:
    """What samples the next texts: the target alone, or with the draft as it is now, or that draft itself."""
    k, rows, plan = job.cfg.policy.k, job.cfg.rollout.rows, job.plan(draft)
    assert k is not None
    faster = Faster({"plain": Own(plan.plain(rows)), "with the draft": Own(plan.engine(k, rows))})
    if not job.cfg.rollout.on_draft:
        return faster
    alone = Engine(widened(plan.served, copied=True), tokenizer=job.tokenizer, rows=rows)
    alone.ends = ends_of(job.target)  # a draft's own may be fewer
    return Mixed(faster, Own(alone), job.cfg.rollout.on_draft)
