"""Drafts of every exported kind in a real vLLM: accepted as often as here and as predicted, and the target's text."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cotrain.bench import server_parity as checked
from tests.engines.conftest import OUTPUT, require_same
from tests.engines.drafts import K, load
from tests.engines.kinds.exported import ROWS, asking, exported, server
from tests.engines.test_vllm import TEMPERATURES, in_regime, same_text

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


class Case(NamedTuple):
    """draft: of `drafts`; drafting: as vLLM does it, sampled or greedy; settings: of the export."""

    draft: str
    drafting: str
    settings: tuple[str, ...] = ()


CASES = {
    "parallel": Case("parallel", "sampled"),
    "medusa": Case("medusa", "greedy"),
    "eagle3": Case("eagle", "sampled", ("layout=eagle3",)),
    "eagle3, d2t": Case("eagle, pruned", "sampled", ("layout=eagle3",)),
    "speculators": Case("eagle", "sampled", ("layout=speculators",)),
    "block": Case("block", "sampled", ("layout=dflash",)),
    "block, causal, d2t": Case("block, causal", "sampled", ("layout=dflash",)),
    "p_eagle": Case("p_eagle", "sampled", ("layout=eagle3",)),
    "p_eagle, speculators": Case("p_eagle", "sampled", ("layout=speculators",)),
}


@pytest.fixture(scope="module")
def served() -> dict[Any, Any]:
    """By draft and temperature: the texts that vLLM served in one layout, and their figures."""
    return {}


@pytest.mark.parametrize("name", CASES)
def test_a_draft_is_accepted_as_here(
    name: str, plain: dict[str, Any], found: dict[str, Any], served: dict[Any, Any], tmp_path: Path
) -> None:
    """A draft whose texts and rounds in another layout are the same is not compared once more."""
    case, figures = CASES[name], found.setdefault(name, {})
    command = exported(case.draft, tmp_path / "served", *case.settings)
    network, metadata = load(case.draft)
    network.markov_head = None  # no layout has one
    plan = replace(plain["plan"], draft=network, objective=case.drafting, kind=metadata.kind)
    kept: list[list[list[int]]] = []
    with server(command.target, command.speculative, OUTPUT / f"{name}.log") as vllm:
        for temperature in TEMPERATURES:
            regime, key = in_regime(plan, temperature), (case.draft, temperature)
            answer = asking(vllm, regime, kept)(regime.final(0, regime.bench.prompts), ROWS)
            rounds = (answer[0], answer[2])
            if served.get(key, (None,))[0] != rounds:
                served[key] = rounds, checked.server_parity(regime, lambda *_, answer=answer: answer, K, at_once=ROWS)
            parity = served[key][1]
            figures[f"temperature {temperature:g}"] = parity.report()
            print(f"\nvllm, {name}, temperature {temperature:g}: {parity.line()}")
            assert parity.passed and parity.served > 1.1, parity.line()
    require_same(same_text(plan, plain["texts"], kept[TEMPERATURES.index(0.0)]), figures)
