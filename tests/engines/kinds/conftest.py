"""What tests of kinds share: what plain serving says, and a report of their own."""

from collections.abc import Iterator
from typing import Any

import pytest

from cotrain.planning.plan import Plan
from cotrain.teacher.target_model import load_pair
from inference import Sampling
from inference.drafts.bundled_target import resolve
from tests.engines.conftest import OUTPUT, reported
from tests.engines.conftest import SIZE as vllm_size
from tests.engines.kinds.exported import server
from tests.settings import resized

SIZE = resized(vllm_size, prompts=32, new_tokens=96)


@pytest.fixture(scope="session")
def found(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    """Figures by case."""
    yield from reported("engines_kinds", pytestconfig)


@pytest.fixture(scope="session")
def plain(found: dict[str, Any]) -> dict[str, Any]:
    """The target served without a draft: its greedy texts; and a plan whose draft is still to be set."""
    target, tokenizer = load_pair("bundled")
    plan = Plan(target, tokenizer, target, Sampling(), "token", SIZE, ("bundled", "none"))
    with server(resolve("bundled"), None, OUTPUT / "plain kinds.log") as vllm:
        answer = vllm.generate(plan.final(0, SIZE.prompts), SIZE.new_tokens, 0.0, SIZE.seed)
        found["vllm"] = vllm.version
    return {"plan": plan, "texts": answer["tokens"]}
