"""Timing until the interval of the speed-up is narrow."""

import itertools
from functools import partialmethod
from typing import Any

import numpy as np
import pytest

from inference.measure import adaptive
from inference.measure.adaptive import FEWEST, LEAST, Wanted, until_known
from inference.measure.arms import Arm, ArmResult
from inference.measure.timing import Timing


def test_prompts_that_come_again_have_other_noise() -> None:
    met: list[tuple[int, int]] = []

    def run(prompts: Any, ids: Any, seed: int) -> ArmResult:
        met.append((prompts[0][0], seed))
        return ArmResult([[0]], 1.0, 1.0)

    until_known([Arm("a", run)], [[1], [2], [3]], 1, ("a", "a"), Wanted(7), seed=5, clock=lambda: 0.0)
    warm, *timed = met
    assert warm == (1, 5) and timed == [(1, 5), (2, 5), (3, 5), (1, 6), (2, 6), (3, 6), (1, 7)]


def alternating(seconds: list[float]) -> list[Arm]:
    """Two that take turns; of the first, seconds run by run, over and over."""
    runs = iter(range(10**6))

    def timed(name: str) -> Arm:
        def run(prompts: Any, ids: Any, seed: int) -> ArmResult:
            took = seconds[next(runs) % len(seconds)] if name == "ours" else 1.0
            return ArmResult([[0] * 4 for _ in prompts], took, took)

        return Arm(name, run)

    return [timed("ours"), timed("plain")]


@pytest.mark.parametrize(
    ("prompts", "seconds", "until", "least", "batches", "enough"),
    [
        (40, [1.0], 1e9, 2, 8, True),
        (5, [1.0], 1e9, 2, 8, False),  # as near as asked for, over five batches alone
        (40, [1.0], 5.0, 2, 5, False),  # and over five, since time was over
        (40, [1.0], 9.5, 12, 9, False),  # and over nine of the twelve that were asked for
        (40, [0.5, 1.5, 0.7], 30.0, 2, 30, False),
    ],
)
def test_enough_means_a_narrow_interval_over_enough_batches(
    prompts: int, seconds: list[float], until: float, least: int, batches: int, enough: bool
) -> None:
    now, counts = [0.0], list[int]()

    def turned(done: int) -> None:
        now[0] += 1.0

    each = [[n] for n in range(prompts)]
    _, reached = until_known(
        alternating(seconds),
        each,
        1,
        ("ours", "plain"),
        Wanted(least, 1e-6, until),
        clock=lambda: now[0],
        say=lambda done, near: counts.append(done),
        turned=turned,
    )
    assert reached.enough == enough and reached.batches == min(batches, prompts)
    assert counts == [
        n for n in (8, 10, 12, 15, 18, 22, 27) if least <= n <= reached.runs
    ]  # by a quarter more each time


def arm(name: str, seconds) -> Arm:
    return Arm(name, lambda prompts, ids, seed: ArmResult([[0]] * len(prompts), spent := next(seconds), spent))


def noisy(ratio: float, spread: float, seed: int):
    rng = np.random.default_rng(seed)
    draws = [(1 / ratio) * rng.lognormal(0, spread, 500), rng.lognormal(0, spread, 500)]
    return [arm(name, iter(values)) for name, values in zip(("a", "b"), draws, strict=True)]


PROMPTS = [[i, i] for i in range(40)]


def timed(arms, wanted, prompts=PROMPTS, clock=lambda: 0.0):
    return until_known(arms, prompts, 1, ("a", "b"), wanted, clock=clock)


def test_the_width_is_reported_when_time_is_over() -> None:
    ticks = itertools.count()
    timing, reached = timed(noisy(2.0, 1.0, 0), Wanted(30, 0.01, until=10.0), clock=lambda: float(next(ticks)))
    assert not reached.enough and FEWEST <= reached.batches < LEAST and len(timing.runs) == reached.batches
    assert "1 % was wanted, but an interval of so few batches is itself uncertain" in adaptive.reached_lines(reached)[1]
    many = timed(noisy(2.0, 1.0, 0), Wanted(30, 0.01, until=50.0), clock=lambda: float(next(ticks)))[1]
    assert "1 % was wanted, but the time limit (bench.minutes=) was reached" in adaptive.reached_lines(many)[1]
    late = timed(noisy(2.0, 1.0, 0), Wanted(30, 0.01, until=-1.0))[1]
    assert late.batches == FEWEST
    few = timed(noisy(2.0, 0.0001, 0), Wanted(30, 0.1, until=-1.0))[1]
    assert few.within < 0.1 and not few.enough  # so few know nothing for sure


def test_without_a_limit_exactly_the_given_batches_are_timed() -> None:
    for count in (1, 5):
        _, reached = timed(noisy(2.0, 1.0, 0), Wanted(count))
        assert (reached.batches, reached.wanted, reached.enough) == (count, None, True) and len(
            adaptive.reached_lines(reached)
        ) == 1


def test_stopping_does_not_favour_fast_or_slow_drafts(monkeypatch) -> None:
    """The rule sees the width alone: values are right on average, and intervals hold the truth as often as said."""
    monkeypatch.setattr(Timing, "ratio", partialmethod(Timing.ratio, resamples=200))
    values, hits, runs = [], 0, 80
    for seed in range(runs):
        timing, _ = timed(noisy(1.5, 0.35, seed), Wanted(8, 0.12))
        reached = timing.ratio("a", "b")
        values.append(np.log(reached.value / 1.5))
        hits += reached.low <= 1.5 <= reached.high
    assert abs(np.mean(values)) < 3 * np.std(values) / runs**0.5
    assert hits / runs > 0.83


def test_arms_beside_the_pair_are_timed_in_the_first_batches_only() -> None:
    """And compared over the runs that both arms have."""
    runs = {"ours": iter([2.0] * 3 + [8.0] * 9), "plain": iter([4.0] * 3 + [8.0] * 9), "other": iter([1.0] * 12)}

    def arm(name: str) -> Arm:
        return Arm(name, lambda prompts, ids, seed: ArmResult([[0, 0]], took := next(runs[name]), took))

    wanted = Wanted(8, beside=2)
    timing, _ = until_known([*map(arm, runs)], [[n] for n in range(5)], 1, ("ours", "plain"), wanted, clock=lambda: 0.0)
    assert [len(timing.results(name)) for name in runs] == [8, 8, 2]
    assert timing.ratio("plain", "other").value == pytest.approx(1 / 4)
    assert timing.ratio("ours", "plain").value == pytest.approx((2 * 4 + 6 * 8) / (2 * 2 + 6 * 8))
    assert timing.speed("other") == 2.0
