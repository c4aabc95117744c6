"""Timing with fake clocks and arms, real arms on tiny models, measured costs."""

import math

import numpy as np
import pytest

from inference.measure.arms import Arm, ArmResult
from inference.measure.timing import Timing, interleave
from inference.sampling.noise import row_ids

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def fake(name, seconds, log=None, length=4):
    """An arm that says it took `seconds`, a number or an iterator of them."""
    clock = iter(lambda: seconds, None) if isinstance(seconds, int | float) else seconds

    def run(prompts, ids, seed):
        if log is not None:
            log.append((name, len(prompts), list(ids), seed))
        spent = next(clock)
        return ArmResult([[0] * length for _ in prompts], spent, spent / 2, decode_tokens=len(prompts))

    return Arm(name, run)


def timing(a, b, tokens=8):
    """A Timing of arms a and b from seconds of each batch."""
    text = [[0] * tokens]
    runs = [[{"a": ArmResult(text, x, x), "b": ArmResult(text, y, y)}] for x, y in zip(a, b, strict=True)]
    return Timing([([[1]], [i]) for i in range(len(runs))], runs)


def test_arms_take_turns_on_every_batch():
    log = []
    interleave([fake("a", 1, log), fake("b", 1, log)], PROMPTS, rows=2, seed=7, repeats=2, warmup=1)
    warm, timed = log[:2], log[2:]
    assert [name for name, *_ in warm] == ["a", "b"]
    assert [name for name, *_ in timed] == ["a", "b", "b", "a", "b", "a", "a", "b"]
    assert [seed for *_, seed in timed] == [7] * 4 + [8] * 4
    keys = row_ids(PROMPTS)
    assert [ids for _, _, ids, _ in timed[::2]] == [keys[:2], keys[2:]] * 2


def test_speed_is_tokens_over_seconds_with_prefill_and_without():
    result = interleave([fake("a", iter([9, 1.0, 3.0]))], PROMPTS, rows=2)
    assert result.speed("a") == 12 / 4
    assert result.speed("a", decode=True) == 3 / 2  # the fake pays decode seconds for one token a prompt


def test_ratio_is_of_sums_and_its_interval_is_paired():
    drift = np.random.default_rng(0).uniform(1, 100, 20)  # of the machine, the same for both arms
    paired = timing(drift, 2 * drift).ratio("a", "b")
    assert paired == pytest.approx((2, 2, 2))
    uneven = timing([1, 10] * 2, [4, 10] * 2)
    assert uneven.ratio("a", "b").value == pytest.approx(14 / 11)  # a mean of ratios would say 2.5
    assert uneven.ratio("a", "b") == uneven.ratio("a", "b")


def test_three_batches_have_no_interval():
    """A bootstrap over two or three is far too narrow: 2.5 [1.02, 3.44] was found where the draft loses."""
    few = timing([1, 2, 3], [2, 3, 4]).ratio("a", "b")
    assert few.value > 1 and math.isnan(few.low) and few.faster is None


def test_one_batch_has_no_interval_and_repeats_do_not_make_one():
    batch = {"a": ArmResult([[0]], 1, 1), "b": ArmResult([[0]], 2, 2)}
    result = Timing([([[1]], [1])], [[batch] * 5]).ratio("a", "b")
    assert result.value == 2 and math.isnan(result.low) and math.isnan(result.high)


def test_arms_of_other_lengths_are_an_error():
    with pytest.raises(ValueError, match="'b' emitted"):
        interleave([fake("a", 1), fake("b", 1, length=5)], PROMPTS, rows=2)
    with pytest.raises(ValueError, match="each with its own name"):
        interleave([fake("a", 1), fake("a", 1)], PROMPTS, rows=2)
    with pytest.raises(ValueError, match="'c' was not timed"):
        interleave([fake("a", 1)], PROMPTS, rows=2).speed("c")
