"""Interleaved timing: every arm continues the same prompts in turn, and speeds are compared in pairs.

A machine's speed drifts, so no arm finishes before the next begins. For each batch of prompts every arm runs once, in a
rotating order. Intervals come from resampling whole batches; the results of both arms for a batch stay together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from inference.measure.arms import Arm, ArmResult
from inference.output import Emitted, Stats, pooled
from inference.sampling.noise import row_ids

FEW = 4  # batches: a bootstrap over fewer is far too narrow
RESAMPLES, LEVEL = 2000, 0.95
Batch = tuple[list[list[int]], list[int]]  # prompts, and the keys of their noise


class Interval(NamedTuple):
    """A value and its 95 % bootstrap interval. For fewer than `FEW` batches, low and high are nan."""

    value: float
    low: float
    high: float

    @property
    def within(self) -> float:
        """Return the distance between the value and the farther end of the interval, relative to the value; infinite
        without an interval."""
        far = max(self.value - self.low, self.high - self.value) / self.value
        return far if far == far else float("inf")

    @property
    def faster(self) -> bool | None:
        """For a ratio of speeds: return True if the whole interval is above 1, False if it is below 1, None if it
        contains 1 or there is none. Pages and cards use this for what they state about a speed-up."""
        return True if self.low > 1 else False if self.high < 1 else None


def together(parts: Sequence[Emitted]) -> Emitted:
    """Return the texts of several timings as one list, in order."""
    return Emitted(*(list(chain.from_iterable(lists)) for lists in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Timing:
    """The results of interleaved runs. batches: for each batch, its prompts and the keys of their random numbers.
    runs[batch][repeat][arm name]: one result. Some batches may have one repeat more than others; the first has a result
    of every arm, others may lack some."""

    batches: list[Batch]
    runs: list[list[dict[str, ArmResult]]]

    @property
    def arms(self) -> list[str]:
        """Return the names of the arms."""
        return list(self.runs[0][0])

    def results(self, arm: str) -> list[ArmResult]:
        """Return all results of one arm, batch by batch. Raises ValueError for an arm that was not timed."""
        if arm not in self.runs[0][0]:
            raise ValueError(f"{arm!r} was not timed; the timed arms are {', '.join(self.arms)}")
        return [repeat[arm] for batch in self.runs for repeat in batch if arm in repeat]

    def speed(self, arm: str, decode: bool = False) -> float:
        """Return an arm's tokens per second: sum of tokens / sum of wall seconds, prefill included. decode: whether to
        leave the prefill out."""
        return float(ratio_of_sums(self._paid(arm, decode)))

    def ratio(self, a: str, b: str, decode: bool = False, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
        """Return speed(a) / speed(b) of two arms over the runs that have both, with the 95 % percentile interval of a
        paired bootstrap over batches. decode: whether to leave the prefill out. The interval is nan for fewer than
        `FEW` batches.

        Each of the `resamples` draws takes batches with replacement (all repeats of a batch together), and computes
        both arms' speeds from the same batches. seed: of these draws.
        """
        x, y = self._paid(a, decode, b), self._paid(b, decode, a)  # (batches, 2)
        return bootstrapped(lambda at: ratio_of_sums(x[at]) / ratio_of_sums(y[at]), len(x), resamples, seed)

    def stats(self, arm: str) -> Stats | None:
        """Return the counts and clocks of all runs of an arm, or None for an arm without counts."""
        parts = [result.stats for result in self.results(arm) if result.stats]
        return pooled(parts) if parts else None

    def texts(self, arm: str) -> Emitted:
        """Return the prompts, keys of random numbers, emitted ids and counts of all runs of an arm. The arm must have
        counts."""
        return together(
            [
                Emitted(prompts, ids, result.tokens, result.stats.rows if result.stats else [])
                for (prompts, ids), repeats in zip(self.batches, self.runs, strict=True)
                for result in (repeat[arm] for repeat in repeats)
            ]
        )

    def _paid(self, arm: str, decode: bool, other: str | None = None) -> np.ndarray:
        """Return each batch's tokens and seconds, (batches, 2), prefill included. decode: whether to leave the prefill
        out. other: an arm that the counted runs have, too. Batches without such a run are left out."""
        self.results(arm)  # raises for an arm that was not timed
        both = {arm, other or arm}
        paid = [[repeat[arm].paid(decode) for repeat in repeats if both <= {*repeat}] for repeats in self.runs]
        return np.array([np.sum(each, axis=0) for each in paid if each], dtype=np.float64)


def bootstrapped(figure: Callable[[np.ndarray], np.ndarray], batches: int, resamples: int, seed: int) -> Interval:
    """Return the value of `figure` for all batches, with its percentile bootstrap interval at `LEVEL`. The ends are nan
    for fewer than `FEW` batches. figure: maps batch numbers (..., batches) to values (...). batches: how many there
    are. resamples: how often they are drawn, with replacement."""
    value = float(figure(np.arange(batches)))
    if batches < FEW:
        return Interval(value, float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(batches, size=(resamples, batches))
    low, high = np.quantile(figure(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high))


def ratio_of_sums(pairs: np.ndarray) -> np.ndarray:
    """Return (...): the sum of the first numbers over that of the second ones. pairs (..., N, 2): of each batch or
    prompt, such as its tokens and seconds."""
    total = pairs.sum(-2)
    return np.asarray(total[..., 0] / total[..., 1])


def interleave(
    arms: Sequence[Arm],
    prompts: Sequence[list[int]],
    rows: int,
    seed: int = 0,
    repeats: int = 1,
    warmup: int = 1,
) -> Timing:
    """Return the timing of all arms on prompts (lists of ids), `rows` prompts at a time. Each batch runs `repeats`
    times, with seeds seed, seed + 1, ... In each run all arms decode the batch in turn, in a rotating order.

    warmup: number of unrecorded runs of each arm on the first batch. Raises ValueError if two arms have one name, if
    there is nothing to time, or if arms emit different numbers of tokens for a prompt, so that their speeds are not
    comparable.
    """
    batches = batches_of(arms, prompts, rows, repeats)
    warm(arms, batches[0], seed, warmup)
    runs: list[list[dict[str, ArmResult]]] = [[] for _ in batches]
    for repeat in range(repeats):
        for index, batch in enumerate(batches):
            runs[index].append(turn(arms, batch, seed + repeat, index + repeat))
    return Timing(batches, runs)


def batches_of(arms: Sequence[Arm], prompts: Sequence[list[int]], rows: int, repeats: int = 1) -> list[Batch]:
    """Return the prompts in batches of `rows`, with the keys of their random numbers. repeats: how often each batch is
    to run, at least 1. Raises ValueError if two arms have one name, or if there is nothing to time."""
    if not arms or len({arm.name for arm in arms}) < len(arms):
        raise ValueError(f"arms: give at least one arm, each with its own name, not {[arm.name for arm in arms]}")
    if not prompts or rows < 1 or repeats < 1:
        raise ValueError(
            f"there is nothing to time with {len(prompts)} prompts, rows={rows} and repeats={repeats}; give at least 1 "
            "of each"
        )
    keys = row_ids(prompts)
    return [(list(prompts[i : i + rows]), keys[i : i + rows]) for i in range(0, len(prompts), rows)]


def warm(arms: Sequence[Arm], batch: Batch, seed: int, times: int = 1) -> None:
    """Run every arm `times` times on a batch, without recording the results. batch: its prompts and the keys of their
    random numbers. seed: of these numbers."""
    for _ in range(times):
        for arm in arms:
            arm.run(*batch, seed)


def turn(arms: Sequence[Arm], batch: Batch, seed: int, number: int) -> dict[str, ArmResult]:
    """Run every arm once on one batch (its prompts and the keys of their random numbers), and return the results by the
    arm's name. seed: of the random numbers. Arm number `number` (modulo the number of arms) runs first. Raises
    ValueError if arms emit different numbers of tokens."""
    first = number % len(arms)
    results = {arm.name: arm.run(*batch, seed) for arm in [*arms[first:], *arms[:first]]}
    lengths = {name: [len(text) for text in result.tokens] for name, result in results.items()}
    (leader, expected), *others = lengths.items()
    for name, emitted in others:
        if emitted != expected:
            raise ValueError(
                f"{name!r} emitted {emitted} tokens, but {leader!r} {expected}, so their speeds cannot be compared: "
                "let every arm emit max_new_tokens for each prompt"
            )
    return {arm.name: results[arm.name] for arm in arms}
