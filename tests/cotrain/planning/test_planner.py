"""What draft lengths, tables of costs and the cells of tables are made of: every number comes from where it should."""

from dataclasses import replace
from math import nan
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.planning import planner
from cotrain.planning.planner import MeasuredCosts, advice
from inference.measure.costs import Costs, RealRound
from inference.measure.timing import Interval
from tests.bench_stubs import REGIME, chains_of, plan_of, rates_of
from tests.cotrain.bench.test_reports import ALONE
from tests.encoder_decoders import t5
from tests.settings import resized


def test_costs_of_an_encoder_decoder_are_those_of_short_texts_after_whole_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(planner, "measure_costs", lambda *_, **settings: asked.append(settings))
    prompts, size = SimpleNamespace(ranking=[[1] * 20, [2] * 10]), SimpleNamespace(new_tokens=8)
    plan: Any = SimpleNamespace(
        target=t5(),
        prompts=prompts,
        bench=size,
        depths=[2],
        sampling=REGIME,
        proposer=lambda: None,
        engine=lambda k: SimpleNamespace(target=None),
    )
    planner.costs_of(plan)
    assert (asked[0]["context"], asked[0]["source"]) == (1 + 4, 15)  # the decoder's start, half of the new tokens


def test_the_last_length_that_was_run_is_chosen_with_its_cost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(bench=resized(plan_of().bench, depths=[2, 3, 4]))
    dear = {k: RealRound(50.0 * k, 40.0 * k, 1.0) for k in (2, 3, 4)}
    monkeypatch.setattr(planner, "rounds_of", lambda plan, lengths, until: {k: dear[k] for k in lengths})

    def as_run(alone: Costs, rounds: Any) -> Costs:
        return replace(
            alone, target=tuple(rounds[k].target if k in rounds else one for k, one in enumerate(alone.target))
        )

    monkeypatch.setattr(planner, "calibrated", as_run)
    length, table = planner.plan_length(plan, MeasuredCosts(ALONE, ALONE, {}), rates_of((1.2, 3.0, 5.0, 9.0)))
    assert set(table.rounds) == {2, 3, 4} and length.k == 1 and length.speedups[4] < 1


@pytest.mark.parametrize(
    ("low", "high", "predicted", "said"),
    [
        (1.1, 1.3, 1.2, None),
        (1.1, 1.3, 0.9, None),  # shown, whatever was predicted
        (0.9, 1.3, 1.2, "no speed-up is shown: 1.10x at k = 2"),
        (1.0, 1.3, 1.2, "no speed-up is shown"),
        (0.9, 1.3, 1.0, "no speed-up is shown: 1.10x at k = 2, 1.00x predicted"),  # never "faster" beside 1.10x
        (1.0, 1.3, 1.0, "no speed-up is shown"),
        (0.8, 0.9, 1.2, "plain decoding is faster here"),
        (nan, nan, 1.2, "too few batches for an interval: 1.10x at k = 2"),
    ],
)
def test_what_is_said_where_drafting_does_not_pay(low: float, high: float, predicted: float, said: str | None) -> None:
    chosen = chains_of(2, (1.0, 7.0, predicted, 9.0))
    value = 1.1 if not high < 1 else 0.85
    result = advice(chosen, Interval(value, low, high))
    assert (result is None and said is None) or (said is not None and result is not None and result.startswith(said))
    tree: Any = SimpleNamespace(speedup=predicted, words=lambda: "a tree")
    with_tree = replace(chains_of(2, (1.0, 7.0, 5.0, 9.0)), tree=tree, serves_tree=True)
    again = advice(with_tree, Interval(value, low, high))
    assert again == (result and result.replace("at k = 2", "with a tree"))
