"""Trees on targets whose weights are rounded: the whole verdict, logits of passes over trees included."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.teacher.target_model import load_pair
from inference import Engine, Sampling
from inference.exactness.agreement import MOST, most, step
from inference.exactness.checks import check
from inference.measure.timing import Emitted
from inference.policy import Fixed
from inference.proposers.independent import Independent
from tests.folders import network, target_folder

ON_CPU, ON_GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = (-1, -1, 0, 0, 1, 2)
PROMPTS = [[3, 5, 7, 3], [9], [11, 12]] * 2


@pytest.mark.parametrize(
    ("device", "flags", "unit"),
    [
        (ON_CPU, (False, False), torch.float32),
        (ON_CPU, (True, False), torch.bfloat16),
        (ON_CPU, (False, True), torch.bfloat16),
        (ON_GPU, (True, False), torch.bfloat16),
        (ON_GPU, (False, True), torch.float32),
    ],
)
def test_rounded_weights_are_judged_by_the_dtype_of_their_products(
    device: torch.device, flags: tuple[bool, bool], unit: torch.dtype
) -> None:
    """bitsandbytes multiplies 8 bits by 8 bits everywhere, and one row by 4 bits in bfloat16 on CPUs that can."""
    model: Any = SimpleNamespace(
        dtype=torch.float32, device=device, is_loaded_in_8bit=flags[0], is_loaded_in_4bit=flags[1]
    )
    assert (most(model), step(model)) == (MOST[unit], torch.finfo(unit).eps)


@pytest.mark.parametrize(("quantisation", "rule"), [("nf4", "tree"), ("int8", "traversal")])
def test_the_verdict_of_trees_on_rounded_targets(quantisation: str, rule: str, tmp_path: Path) -> None:
    target, _ = load_pair(str(target_folder(tmp_path)), quantisation)
    draft = Independent(network().to(target.dtype), shape=SHAPE)
    engine = Engine(target, draft, verify=rule, policy=Fixed(3), rows=3)
    out = engine.generate(PROMPTS, max_new_tokens=16, sampling=Sampling(), seed=5, ids=range(6), ignore_eos=True)
    found = check(engine, Emitted(PROMPTS, list(range(6)), out.tokens, out.stats.rows), Sampling(), 16)
    assert found.passed and found.calls and found.logits, found.lines()
    assert sum(out.stats.accepted[1:]) > 3
