"""Figures of a timing, each computed once more by hand."""

import math

import numpy as np
import pytest

from inference.measure.arms import ArmResult
from inference.measure.timing import Interval, Timing, together
from inference.output import Counts, Emitted
from tests.inference.test_stats import stats


def test_texts_of_several_timings_join_every_part() -> None:
    parts = [Emitted([[n]], [n + 10], [[n, n]], [Counts(n)]) for n in range(3)]
    assert together(parts) == Emitted(
        [[0], [1], [2]], [10, 11, 12], [[0, 0], [1, 1], [2, 2]], [Counts(n) for n in range(3)]
    )


def timing() -> Timing:
    """Two batches, of two prompts and one; the second was run once more. Tokens and seconds all different."""
    runs: list[list[dict[str, ArmResult]]] = []
    for batch, (prompts, repeats) in enumerate([(2, 1), (1, 2)]):
        runs.append([])
        for repeat in range(repeats):
            arms = {}
            for n, name in enumerate(("plain", "ours")):
                seconds, one = 1.0 + batch + 0.25 * repeat + 2 * n + n * batch, stats(30 * n + 10 * batch + repeat)
                tokens = [[0] * (5 + batch)] * prompts
                arms[name] = ArmResult(tokens, seconds, 0.75 * seconds - 0.1 * batch, one, prompts * (4 + batch) - n)
            runs[-1].append(arms)
    return Timing([([[1], [2]], [0, 1]), ([[3]], [2])], runs)


def test_an_interval_is_that_of_batches_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.measure.timing.FEW", 2)
    timed, x = timing(), []
    for batch in timed.runs:
        x.append(
            [
                sum(values)
                for name in ("ours", "plain")
                for values in zip(*(r[name].paid(True) for r in batch), strict=True)
            ]
        )
    drawn = np.random.default_rng(4).integers(2, size=(50, 2))
    sums = [[sum(x[i][part] for i in one) for part in range(4)] for one in drawn]
    ratios = sorted((a / b) / (c / d) for a, b, c, d in sums)
    interval = timed.ratio("ours", "plain", decode=True, resamples=50, seed=4)
    place = 0.025 * 49  # of 50 in order, on a line between the two around it
    assert interval.low == pytest.approx(ratios[1] + (place - 1) * (ratios[2] - ratios[1]))
    assert interval.high == pytest.approx(ratios[48] - (place - 1) * (ratios[48] - ratios[47]))
    assert Interval(2.0, 1.0, 2.5).within == 0.5 and Interval(2.0, 1.5, 3.0).within == 0.5
    assert Interval(2.0, math.nan, math.nan).within == math.inf
