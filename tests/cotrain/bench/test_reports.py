"""A report's own figures and the cells of a matrix: each from the part that it is of."""

from dataclasses import asdict, replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.bench import measurement
from cotrain.planning import planner
from cotrain.planning.forecast import TreeForecast
from cotrain.planning.planner import MeasuredCosts
from inference.measure.adaptive import Reached
from inference.measure.costs import Costs, RealRound
from inference.models.lm import LM
from tests.bench_stubs import REGIME, SPEEDS, TREE, Timed, chains_of, met, plan_of, rates_of  # noqa: F401
from tests.settings import resized
from tests.tiny import tiny

ALONE = Costs((1.0, 1.5, 2.5, 3.0, 3.5), 0.5, (0.1, 0.2, 0.3, 0.4, 0.5), 3, 40, first=0.25)
REAL = replace(ALONE, draft=0.75, rest=(0.2, 0.2, 0.3, 0.4, 0.5))
MORE = replace(REAL, draft=0.875)
FLOOR = {"seconds": 0.02, "read_seconds": 0.015, "share": 0.75}
REACHED = Reached(0.1, None, True, 2, 3, 4.0, None, 8)


LINE = "a plain step takes 20.0 ms; reading the target's weights once takes 15.0 ms here, 75% of it"


def reported(monkeypatch: pytest.MonkeyPatch, tree: Any = None, own: Any = None, **changed: Any) -> Any:
    """What a measurement gives `build`, and what its parts were asked."""
    asked: dict[str, Any] = {}
    plan = replace(plan_of(**changed), tree=own)
    here = replace(plan, tree=None)
    chosen = chains_of(4, (1.0, 0.9, 1.3, 1.1, 1.2), rates_of((1, 1, 1, 2.5)))

    def part(name: str, result: Any) -> Any:
        return lambda *given, **others: (asked.__setitem__(name, given), result)[1]

    rounds = {4: RealRound(1, 2, 3), 0: RealRound(0, 5, 6)}
    timing = Timed([SimpleNamespace(name=name) for name in SPEEDS], [], 3, 0)
    verdict = SimpleNamespace(text=SimpleNamespace(explained=0.375))
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: 100.0)
    monkeypatch.setattr(measurement, "measured_costs", part("costs", MeasuredCosts(REAL, ALONE, {})))
    monkeypatch.setattr(measurement, "plain_texts", part("plain_texts", "texts"))
    monkeypatch.setattr(planner, "measure_acceptance", part("measure_acceptance", chosen.acceptance))
    monkeypatch.setattr(planner, "measured_costs", part("measured", MeasuredCosts(REAL, ALONE, {})))
    monkeypatch.setattr(planner, "plan_length", part("plan_length", (chosen, MeasuredCosts(MORE, ALONE, rounds))))
    monkeypatch.setattr(planner, "best_tree", part("best_tree", tree))
    monkeypatch.setattr(measurement, "_timed", part("_timed", (timing, REACHED, 0.25)))
    monkeypatch.setattr(measurement, "plain_floor", part("plain_floor", FLOOR))
    monkeypatch.setattr(measurement, "check", part("check", verdict))
    monkeypatch.setattr(measurement, "advice", part("advice", "advice"))
    monkeypatch.setattr(measurement, "parity", part("parity", "parity"))
    monkeypatch.setattr(measurement, "measure_greedy", part("greedy", "greedy"))
    built: dict[str, Any] = {}
    monkeypatch.setattr(measurement, "build", lambda *given, **settings: built.update(settings, given=given) or built)
    result = measurement.measure(plan, {"own": 1})
    return result, asked, plan, here, timing, verdict, chosen


def test_a_plain_step_beside_the_time_of_reading_the_weights() -> None:
    timing = Timed([SimpleNamespace(name=name) for name in SPEEDS], [], 3, 0)
    floor, none = (measurement.plain_floor(3, timing, read) for read in (0.25, 0))
    assert floor["seconds"] == 3 / timing.speed("plain", decode=True)
    assert measurement.read_seconds(LM(tiny(), 1)) > 0 and none is None
    assert floor["read_seconds"] == 0.25 == pytest.approx(floor["share"] * floor["seconds"])


def test_a_report_is_put_together_of_its_parts(met: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    size = resized(plan_of().bench, minutes=10)
    result, asked, plan, here, timing, verdict, chosen = reported(monkeypatch, bench=size)
    assert asked["costs"][1] == 100 + 0.25 * 600 == asked["plan_length"][3] == asked["best_tree"][3]
    assert asked["plain_texts"] == (here, 32) and asked["measure_acceptance"] == (here, "texts")
    assert asked["measured"][0].bench.rows == 1 and asked["measured"][1] == 100 + 0.25 * 600
    assert asked["plan_length"][0] == here and asked["plan_length"][1].costs == MORE  # again, for batches alone
    assert asked["plan_length"][2] is chosen.acceptance and asked["plan_length"][4] == REAL.rounds
    assert asked["best_tree"][1:3] == (chosen, "texts")
    engine = asked["_timed"][1]
    assert asked["_timed"][0] == here and asked["_timed"][2] == 100 + 0.65 * 600
    assert (engine.policy.k, engine.rows, engine.verify) == (4, 3, "block")
    assert asked["check"][0] is engine and asked["check"][1].prompts == [["speculative"]]
    assert asked["check"][2:] == (REGIME, 6, 17, 32)
    assert asked["advice"] == (chosen, timing.ratio("speculative", "plain"))
    assert asked["parity"] == (here, 4, 100 + 0.85 * 600, 0.375) and asked["greedy"] == (here, 4, False)
    given, extra = result.pop("given"), result.pop("extra")
    assert given == (timing, engine, "speculative", "plain")
    assert result == {"sampling": REGIME, "max_new_tokens": 6, "target": "t", "draft": "d", "verdict": verdict}
    rounds = {"0": asdict(RealRound(0, 5, 6)), "4": asdict(RealRound(1, 2, 3))}
    assert extra["planned_k"] == 4 and extra["costs"] == asdict(MORE) and extra["costs_alone"] == asdict(ALONE)
    assert extra["rounds"] == rounds and extra["plain_step"] == FLOOR
    assert extra["said"] == ["advice", LINE, *measurement.adaptive.reached_lines(REACHED)]


def test_a_tree_that_is_served_is_what_is_measured(met: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The plan's own tree is one to consider: nothing before is measured with it."""
    served = TreeForecast(TREE, 1.5, 1.0, 0.9, 0.125, 0.0)
    result, asked, plan, here, timing, *_ = reported(monkeypatch, served, own=TREE)
    assert asked["costs"][0].tree is None and asked["best_tree"][0] == replace(here, tree=TREE)
    assert asked["costs"][1] == inf == asked["_timed"][2] == asked["parity"][2]
    assert {asked[name][0].tree for name in ("_timed", "parity", "greedy")} == {TREE}
    assert asked["_timed"][1].policy.k == asked["parity"][1] == asked["greedy"][1] == TREE.depth == 2
    assert asked["_timed"][1].verify == "traversal" and asked["advice"][0].served is served
    extra = result["extra"]
    assert (extra["planned_k"], extra["planned_shape"], extra["planned_rule"]) == (4, [-1, -1, 0], "traversal")
    assert extra["planned_likeliest"] is True and extra["plain_is_faster"] is True
    assert extra["planned_speedups"] == {"chain": 0.8, "tree": 0.9}
    assert extra["said"][0] == "advice" and extra["said"][2].startswith("a tree of 3 nodes in 2 levels")


def test_all_plans_of_a_measurement_share_one_network(met: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Each cast copy would take memory."""
    _, asked, plan, *_ = reported(monkeypatch, bench=resized(plan_of().bench, draft_dtype="float32"))
    given = asked["costs"][0]
    assert given.draft is plan.served is not plan.draft and replace(given, tree=TREE).served is plan.served
