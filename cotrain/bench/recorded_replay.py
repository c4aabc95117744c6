"""A few texts of the measured pair, recorded round by round for the page."""

from typing import Any

from cotrain.bench.measurement import Plan
from inference.report.recorder import Recorder

ROWS, TOKENS = 4, 64


def recorded(plan: Plan, k: int) -> dict[str, Any]:
    """Prompts of those that time what is exported, decoded together in the plan's regime, by its rule, at draft length
    k; see `inference.report.replay`."""
    engine = plan.engine(k, ROWS)
    engine.record = Recorder()
    tokens = min(TOKENS, plan.bench.new_tokens)
    engine.generate(plan.final(0, ROWS), max_new_tokens=tokens, sampling=plan.sampling, seed=plan.bench.seed)
    return engine.record.replay(plan.tokenizer)
