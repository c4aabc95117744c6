"""The prompts that a plan is made with."""

from dataclasses import replace

import pytest

from cotrain.planning.planner import measure_acceptance, rounds_of
from inference import Engine
from tests.cotrain.bench.test_measurement import plan
from tests.settings import resized


def test_plans_read_ranking_prompts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and rounds of a plan are those of prompts for ranking, never of final prompts."""
    asked = replace(plan(), bench=resized(plan().bench, prompts=4, parity_tokens=8))
    decoded, generate = list[list[int]](), Engine.generate

    def noted(self, prompts, **settings):  # type: ignore[no-untyped-def]
        decoded.extend(map(list, prompts))
        return generate(self, prompts, **settings)

    monkeypatch.setattr(Engine, "generate", noted)
    assert len(measure_acceptance(asked).calls) == 3 and set(rounds_of(asked, (0, 2), until=0.0)) == {0, 2}
    assert {tuple(prompt) for prompt in decoded} == set(map(tuple, asked.prompts.ranking))
