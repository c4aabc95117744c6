"""The prompts that a plan is made with."""

import pytest

from cotrain.config.groups import Bench
from cotrain.data.splits import Prompts
from cotrain.planning.plan import Plan
from cotrain.planning.planner import measure_acceptance, rounds_of
from inference import Engine, Sampling
from tests.folders import network, tokenizer
from tests.settings import CHAINS


def test_plans_read_ranking_prompts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and rounds of a plan are those of prompts for ranking, never of final prompts."""
    ranking, final = ([[5 + i, side] for i in range(3)] for side in (7, 9))
    plan = Plan(
        network(),
        tokenizer(),
        network(layers=1, seed=1),
        Sampling(),
        "token",
        Bench(prompts=4, quick_prompts=2, prompt_tokens=8, new_tokens=4, parity_tokens=8, rows=2, minutes=0, **CHAINS),
        ("target", "draft"),
        given=Prompts(ranking, final, "own"),
    )
    decoded, generate = list[list[int]](), Engine.generate

    def noted(self, prompts, **settings):  # type: ignore[no-untyped-def]
        decoded.extend(map(list, prompts))
        return generate(self, prompts, **settings)

    monkeypatch.setattr(Engine, "generate", noted)
    assert len(measure_acceptance(plan).calls) == 3 and set(rounds_of(plan, (0, 2), until=0.0)) == {0, 2}
    assert {tuple(prompt) for prompt in decoded} == set(map(tuple, ranking))
