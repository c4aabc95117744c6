"""Costs of real rounds, the length they call for, timing until it is known, and other work on the machine."""

import itertools
import os
import subprocess
import sys
import time
from functools import partialmethod
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cotrain import cli
from cotrain.bench import measurement, planner
from cotrain.bench.planner import Compiled, Length, Measured, advice, choose, planned
from inference import Engine, Output, Sampling
from inference.measure import adaptive, contention
from inference.measure.adaptive import FEWEST, LEAST, Wanted, until_known
from inference.measure.arms import Arm, ArmResult
from inference.measure.contention import Reading, disturbed, others, set_waiting
from inference.measure.costs import Costs
from inference.measure.real_costs import RealRound, calibrated, measure_rounds, of_stats
from inference.measure.timing import Interval, Timing
from inference.policy import Fixed
from inference.proposers import Independent
from inference.stats import Stats
from tests.tiny import near, tiny

TABLE = Costs((1.0, 1.2, 2.0, 2.0, 2.0), 0.1, (0.1,) * 5, first=0.2)
SLOW = {0: RealRound(0, 1.0, 0.1), 2: RealRound(0.8, 2.0, 0.2), 4: RealRound(1.6, 2.0, 0.3)}


# --- costs of real rounds


def test_rounds_are_timed_in_real_calls_of_the_engine() -> None:
    """A draft that is quick alone and slow in a run costs what it takes in the run."""
    target = tiny()
    proposer, propose = Independent(near(target)), Independent.propose

    class Disturbed(Independent):
        def propose(self, round):  # as when a pass of the target has pushed its weights out of the caches
            time.sleep(0.004 * max(round.k))
            return propose(proposer, round)

    slow = Disturbed(proposer.model)
    slow.open, slow.admit, slow.commit, slow.move = proposer.open, proposer.admit, proposer.commit, proposer.move
    plain, engine = Engine(target, rows=1), Engine(target, slow, rows=1, policy=Fixed(3))
    engines, prompts = {0: plain, 1: engine, 4: engine}, [[1, 2, 3], [4, 5]]
    found = measure_rounds(engines, prompts, sampling=Sampling(), max_new_tokens=40, until=0.0)
    assert list(found) == [0, 1, 4] and engine.policy == Fixed(3)
    # The last rounds of a text draft fewer tokens, or none, so a mean round sleeps a little less than a full one.
    assert found[0].draft == 0 and found[1].draft > 0.003 and found[4].draft > 0.012
    assert found[4].draft > 2 * found[1].draft and found[4].draft > found[4].target
    assert calibrated(TABLE, found).drafting(4) == pytest.approx(found[4].draft)


def test_the_call_that_warms_up_is_not_counted() -> None:
    """As one that compiles does; medians of two would be moved by it."""
    calls = itertools.count()

    def generate(*_, **__):
        stats = Stats(seconds=dict.fromkeys(("prefill", "draft", "verify", "other"), 0.0))
        stats.seconds["target"], stats.times["target"] = (9.0 if next(calls) == 0 else 1.0 + next(calls)), 1
        return Output([], None, [], stats)

    engine = SimpleNamespace(generate=generate, policy=Fixed(2), rows=1)
    found = measure_rounds({2: engine}, [[1]], sampling=Sampling(), max_new_tokens=4, until=-1.0)  # type: ignore
    assert found[2].target == (3.0 + 5.0) / 2


def test_a_mean_round_holds_every_phase_but_the_prefill() -> None:
    stats = Stats(seconds={"prefill": 9.0, "draft": 2.0, "target": 4.0, "verify": 1.0, "other": 0.5})
    stats.times["target"] = 2
    assert of_stats(stats, 3) == RealRound(1.0, 2.0, 0.75)
    assert of_stats(stats, 0) == RealRound(0.0, 2.0, 1.75)


def test_the_table_keeps_its_shape_at_the_level_of_real_rounds() -> None:
    found = calibrated(TABLE, SLOW)
    assert found.target == pytest.approx((1.0, 1.2, 2.0, 2.0, 2.0))  # as measured at 0, 2 and 4; the cliff stays
    assert found.rest == pytest.approx((0.1, 0.15, 0.2, 0.25, 0.3))
    assert (found.draft, found.first) == (pytest.approx(0.4), pytest.approx(0.0, abs=1e-9))
    for k, round in SLOW.items():
        assert found.round(k) == pytest.approx(round.seconds)
    assert calibrated(TABLE, {0: SLOW[0], 2: SLOW[2]}).drafting(4) == pytest.approx(
        2 * 0.6
    )  # the table's line, doubled


# --- the draft length


def test_plain_decoding_and_one_draft_are_considered_whatever_the_depths() -> None:
    sure = dict(enumerate((1.3, 1.32, 1.33, 1.33), 1)).__getitem__
    assert choose(Costs((1.0,) * 5, 0.2, (0.0,) * 5), sure, [3, 4]).k == 1
    dear = choose(Costs((1.0,) * 5, 0.6, (0.0,) * 5), sure, [3, 4])
    assert (dear.k, dear.drafting) == (0, 1) and dear.speedups[0] == 1 > dear.speedups[1] > dear.speedups[3]


def test_a_length_that_was_chosen_is_run_before_it_is_believed(monkeypatch) -> None:
    """By the line through 0, 2 and 4 the third is best; run, it is not."""
    tau = dict(enumerate((1.5, 2.0, 3.4, 3.5), 1)).__getitem__
    ran = []

    def rounds_of(plan, lengths, until):
        ran.extend(lengths)
        return {k: RealRound(9.0, 2.0, 0.3) for k in lengths}

    monkeypatch.setattr(planner, "rounds_of", rounds_of)
    start = Measured(calibrated(TABLE, SLOW), TABLE, SLOW)
    assert choose(start.costs, tau, [2, 3, 4]).drafting == 3
    length, found = planned(SimpleNamespace(depths=[2, 3, 4]), start, tau)
    assert ran[0] == 3 and 3 in found.rounds and length.speedups[3] < choose(start.costs, tau, [3]).speedups[3]


def test_a_slow_down_is_said_in_words() -> None:
    length = Length(0, 1, (1.0, 0.9))
    said = advice(length, Interval(0.8, 0.7, 0.9))
    assert said is not None and said.startswith("plain decoding is faster here: 0.80x at k = 1, 0.90x predicted")
    assert "no speed-up is shown" in str(advice(Length(2, 2, (1.0, 1.1, 1.2)), Interval(1.1, 0.9, 1.3)))
    assert "train a smaller or better draft" in str(advice(length, Interval(1.1, 0.9, 1.3)))
    assert "plain decoding is faster" in str(advice(length, Interval(0.9, nan, nan)))
    assert advice(Length(2, 2, (1.0, 1.1, 1.2)), Interval(1.2, 1.1, 1.3)) is None


@pytest.fixture
def ran(monkeypatch) -> list[Compiled]:
    """What was compiled when rounds were run: alone the compiled draft is faster, in a run its target."""
    found = []

    def rounds_of(plan, lengths, until):
        found.append(plan.compiled)
        draft, target = (3.0, 0.5) if plan.compiled.draft else (1.0, 2.0)
        return {k: RealRound(draft * (k > 0), target, 0.1) for k in lengths}

    def costs_of(plan):
        return Costs((1.0,) * 5, 0.01 if plan.compiled.draft else 0.5, (0.1,) * 5)

    monkeypatch.setattr(planner, "rounds_of", rounds_of)
    monkeypatch.setattr(planner, "costs_of", costs_of)
    monkeypatch.setattr(measurement.Plan, "depths", [2, 3, 4])
    monkeypatch.setattr(measurement.Plan, "proposer", lambda self: SimpleNamespace(depths=None))
    return found


def compiling() -> measurement.Plan:
    return measurement.Plan(*[None] * 5, SimpleNamespace(compile=True), ("t", "d"))  # type: ignore[arg-type]


def test_each_part_runs_compiled_where_real_rounds_are_faster_so(ran) -> None:
    plan, found = planner.settled(compiling())
    assert plan.compiled == Compiled(plain=True, target=True, draft=False)
    assert ran == [Compiled(), Compiled(True, True, True), plan.compiled]  # the engine that serves is run too
    assert found.costs.target[0] == pytest.approx(2.0)


@pytest.mark.parametrize(("until", "tried"), [(59.0, False), (61.0, True)])
def test_nothing_is_compiled_that_there_is_no_time_to_measure(until, tried, ran, monkeypatch, capsys) -> None:
    """The parts as they are took until 30; as long again ends at 60."""
    times = iter((0.0, 30.0))
    monkeypatch.setattr(planner, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    plan, _ = planner.settled(compiling(), until)
    assert (Compiled(True, True, True) in ran) is tried and ("for want of time" in capsys.readouterr().out) is not tried
    assert tried or plan.compiled == Compiled()


# --- timing until it is known


def arm(name: str, seconds) -> Arm:
    return Arm(name, lambda prompts, ids, seed: ArmResult([[0]] * len(prompts), spent := next(seconds), spent))


def noisy(ratio: float, spread: float, seed: int):
    rng = np.random.default_rng(seed)
    draws = [(1 / ratio) * rng.lognormal(0, spread, 500), rng.lognormal(0, spread, 500)]
    return [arm(name, iter(values)) for name, values in zip(("a", "b"), draws, strict=True)]


PROMPTS = [[i, i] for i in range(40)]


def timed(arms, wanted, prompts=PROMPTS, clock=lambda: 0.0):
    return until_known(arms, prompts, 1, ("a", "b"), wanted, clock=clock)


def test_timing_goes_on_until_the_interval_is_narrow() -> None:
    _, quiet = timed(noisy(2.0, 0.01, 0), Wanted(3, 0.1))
    timing, loud = timed(noisy(2.0, 0.4, 0), Wanted(3, 0.1))
    assert quiet.batches == LEAST and quiet.enough and quiet.within < 0.02
    assert loud.runs > 4 * LEAST and loud.enough and loud.within <= 0.1
    assert timing.ratio("a", "b").within == loud.within
    assert loud.batches == len(PROMPTS) and max(map(len, timing.runs)) > 1  # the first prompts came again


def test_when_time_is_over_what_was_reached_is_said() -> None:
    ticks = itertools.count()
    timing, found = timed(noisy(2.0, 1.0, 0), Wanted(30, 0.01, until=10.0), clock=lambda: float(next(ticks)))
    assert not found.enough and FEWEST <= found.batches < LEAST and len(timing.runs) == found.batches
    assert "there are too few prompts for an interval before 1 % was reached for sure" in adaptive.lines(found)[1]
    many = timed(noisy(2.0, 1.0, 0), Wanted(30, 0.01, until=50.0), clock=lambda: float(next(ticks)))[1]
    assert "time was over (bench.minutes=) before 1 % was reached for sure" in adaptive.lines(many)[1]
    late = timed(noisy(2.0, 1.0, 0), Wanted(30, 0.01, until=-1.0))[1]
    assert late.batches == FEWEST
    few = timed(noisy(2.0, 0.0001, 0), Wanted(30, 0.1, until=-1.0))[1]
    assert few.within is not None and few.within < 0.1 and not few.enough  # so few know nothing for sure


def test_an_interval_is_never_of_two_batches() -> None:
    """Of two a bootstrap has three values, whatever they are."""
    late = timed(noisy(2.0, 1.0, 0), Wanted(30, 0.1, until=-1.0))[1]
    assert late.batches >= 5


def test_without_a_limit_exactly_what_is_asked_for_is_timed() -> None:
    for count in (1, 5):
        _, found = timed(noisy(2.0, 1.0, 0), Wanted(count))
        assert (found.batches, found.wanted, found.enough) == (count, None, True) and len(adaptive.lines(found)) == 1


def test_stopping_does_not_favour_fast_or_slow_drafts(monkeypatch) -> None:
    """The rule sees the width alone: values are right on average, and intervals hold the truth as often as said."""
    monkeypatch.setattr(Timing, "ratio", partialmethod(Timing.ratio, resamples=200))
    values, hits, runs = [], 0, 80
    for seed in range(runs):
        timing, _ = timed(noisy(1.5, 0.35, seed), Wanted(8, 0.12))
        found = timing.ratio("a", "b")
        values.append(np.log(found.value / 1.5))
        hits += found.low <= 1.5 <= found.high
    assert abs(np.mean(values)) < 3 * np.std(values) / runs**0.5
    assert hits / runs > 0.83


def test_arms_take_turns_in_going_on_too() -> None:
    order: list[str] = []
    arms = [Arm(n, lambda p, i, s, n=n: order.append(n) or ArmResult([[0]], 1.0, 1.0)) for n in "ab"]
    timed(arms, Wanted(3))
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]


# --- other work


def stat(path: Path, *ticks: int) -> Path:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    lines = [f"cpu{cores[0]} {' '.join(map(str, ticks))}", *(f"cpu{core} 0 0 0 9 0 0 0 0 0 0" for core in cores[1:])]
    path.write_text("\n".join([f"cpu {' '.join(['7'] * 10)}", *lines, "cpu9999 5 5 5 5 5 5 5 5 0 0"]))
    return path


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="other systems do not tell")
def test_busy_time_is_of_the_cores_of_this_process_and_holds_stolen_time(tmp_path: Path) -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    found = contention.reading(stat(tmp_path / "stat", 100, 20, 30, 4000, 500, 6, 7, 80, 9, 9))
    assert found.busy == pytest.approx((100 + 20 + 30 + 6 + 7 + 80) / hertz)
    assert contention.reading(tmp_path / "none").busy is None
    (tmp_path / "zeros").write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n")  # some containers
    assert contention.reading(tmp_path / "zeros").busy is None


def test_what_others_used_is_what_is_left() -> None:
    used = others(Reading(10.0, 1.0, 50.0), Reading(20.0, 16.0, 80.0))
    assert used == pytest.approx(1.5) and disturbed(used, 2) is True
    assert disturbed(others(Reading(0, 0, 0.0), Reading(10, 19, 19.5)), 2) is False
    assert others(Reading(0, 0, None), Reading(9, 9, None)) is None and disturbed(None, 2) is None
    assert "measured beside other work: other processes used 1.50 of 2 cores" in contention.line(1.5, 2)
    assert "unknown" in contention.line(None, 2) and "no other work" in contention.line(0.01, 2)


@pytest.mark.skipif(contention.reading().busy is None, reason="this system does not tell")
def test_another_process_is_seen() -> None:
    before = contention.reading()
    spin = "import time\nend = time.time() + .6\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", spin]):
        time.sleep(0.5)
        used = others(before, contention.reading())
    assert used is not None and used > 0.1


def test_threads_wait_passively_unless_the_machine_is_idle(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    for busy, found in ((True, "passive"), (False, "idle"), (None, "passive")):
        monkeypatch.setattr(contention, "others", lambda *_, busy=busy: None if busy is None else 2.0 * busy)
        environ: dict[str, str] = {}
        assert set_waiting(environ, stat(tmp_path / "stat", *range(10)), 0.0) == found
        assert environ.get("OMP_WAIT_POLICY") == (None if found == "idle" else "PASSIVE")
    assert set_waiting({"GOMP_SPINCOUNT": "5"}) == "chosen"
    assert set_waiting({}, tmp_path / "no such file") == "passive"


def test_the_command_line_decides_before_torch_is_there() -> None:
    code = (
        "import sys, cotrain.cli\nassert 'inference.measure.contention' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    source = Path(cli.__file__).read_text(encoding="utf-8")
    assert source.index("set_waiting()") < source.index("status = _hydra(name")


def test_a_budget_is_shared_out_and_none_is_no_limit() -> None:
    assert measurement.Budget(100.0, 5.0).until(0.25) == 30.0 and measurement.Budget(0, 5.0).until(0.25) == inf
