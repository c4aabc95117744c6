"""A few texts of the measured pair, recorded round by round for the page."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cotrain.bench.measurement import Plan
from cotrain.bench.tree_planner import served_tree
from inference.report.recorder import Recorder

ROWS, TOKENS = 4, 64


def recorded(plan: Plan, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts of those that time what is exported, decoded together in the plan's regime, as the `extra` of a report
    says that it was measured; see `inference.report.replay`."""
    tree = served_tree(extra)
    engine = replace(plan, tree=tree).engine(tree.depth if tree else extra["planned_k"], ROWS)
    engine.record = Recorder()
    tokens = min(TOKENS, plan.bench.new_tokens)
    engine.generate(plan.final(0, ROWS), max_new_tokens=tokens, sampling=plan.sampling, seed=plan.bench.seed)
    return engine.record.replay(plan.tokenizer)
