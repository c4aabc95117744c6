"""Trees on targets whose weights are rounded: the whole verdict, logits of passes over trees included."""

from pathlib import Path

import pytest

from cotrain.teacher.target_model import load_pair
from inference import Engine, Sampling
from inference.exactness.verdict import check
from inference.policy import Fixed
from inference.proposers.independent import Independent
from tests.folders import network, target_folder
from tests.tiny import emitted

SHAPE = (-1, -1, 0, 0, 1, 2)
PROMPTS = [[3, 5, 7, 3], [9], [11, 12]] * 2


@pytest.mark.thorough
@pytest.mark.parametrize(("quantisation", "rule"), [("nf4", "tree"), ("int8", "traversal"), ("int8_rows", "tree")])
def test_the_verdict_of_trees_on_rounded_targets(quantisation: str, rule: str, tmp_path: Path) -> None:
    target, _ = load_pair(str(target_folder(tmp_path)), quantisation)
    draft = Independent(network().to(target.dtype), shape=SHAPE)
    engine = Engine(target, draft, verify=rule, policy=Fixed(3), rows=3)
    texts = emitted(engine, PROMPTS, 16)
    result = check(engine, texts, Sampling(), 16)
    assert result.passed and result.calls and result.logits, result.lines()
    assert sum(sum(row.accepted[1:]) for row in texts.counts) > 3
