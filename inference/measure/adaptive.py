"""Timing batches until the confidence interval of the speed-up is narrow enough, or time is over.

When it stops depends on how wide the interval is, relative to its value, and on the clock; never on where the value
lies, so a fast or a slow draft is not stopped at a lucky moment. An interval that is narrow by chance would stop it too
early: at least `LEAST` batches come first, and the width is looked at only when the batches have grown by a quarter.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from inference.measure import contention
from inference.measure.arms import Arm, ArmResult
from inference.measure.contention import cores, others, reading
from inference.measure.timing import Batch, Timing, batched, turn, warm

LEAST = 8  # batches: a bootstrap over fewer is too narrow
FEWEST = 5  # timed when time is over already: of two, a bootstrap has three values and says nothing
GROWTH = 1.25
Clock = Callable[[], float]
Say = Callable[[int, float], None]  # batches timed, and how near the ends of the interval are to the value


@dataclass(frozen=True)
class Wanted:
    """within: the interval's ends as near to the value, as a share of it; until: when time is over, on the clock; at
    least `batches` are timed if there is time, and FEWEST in any case. within = inf: exactly `batches`."""

    batches: int
    within: float = inf
    until: float = inf


@dataclass(frozen=True)
class Reached:
    """within: how near the ends of the 95 % interval came to the value, None for one batch; wanted: how near they
    should have come, None if that was not asked for; enough: whether they did, over as many batches as were asked for;
    batches, runs of them, seconds; others: cores that other processes used meanwhile, None if unknown, of `cores`.
    """

    within: float | None
    wanted: float | None
    enough: bool
    batches: int
    runs: int
    seconds: float
    others: float | None
    cores: int


def until_known(
    arms: Sequence[Arm],
    prompts: Sequence[list[int]],
    rows: int,
    pair: tuple[str, str],
    wanted: Wanted,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    say: Say | None = None,
    turned: Callable[[int], None] | None = None,
) -> tuple[Timing, Reached]:
    """Time the arms as `measure.interleave` does, on as many batches of prompts as it takes to know the ratio of
    speeds pair[0] / pair[1]. Behind the last prompt the first comes again, with the next seed: repeats of a batch are
    one draw of the bootstrap. turned: told, behind each batch, how many were timed.

    Raises ValueError as `measure.interleave`.
    """
    batches = batched(arms, prompts, rows)
    start, before = clock(), reading()
    warm(arms, batches[0], seed)
    runs: list[list[dict[str, ArmResult]]] = []
    done, least = 0, max(wanted.batches, LEAST if wanted.within < inf else 1)
    due = least
    while True:
        round, at = divmod(done, len(batches))
        result = turn(arms, batches[at], seed + round, done)
        if round:
            runs[at].append(result)
        else:
            runs.append([result])
        done += 1
        if done >= due:
            near = _timing(batches, runs).ratio(*pair).within
            if say:
                say(done, near)
        if turned:
            turned(done)
        if done >= due:
            if near <= wanted.within and len(runs) >= min(least, LEAST, len(batches)):
                break
            due = max(done + 1, int(done * GROWTH))
        spent = clock() - start
        if done >= FEWEST and clock() + spent / (done + 1) > wanted.until:
            break
    timing = _timing(batches, runs)
    near = timing.ratio(*pair).within
    asked = wanted.within if wanted.within < inf else None
    enough = near <= wanted.within and done >= least and (asked is None or len(runs) >= LEAST)
    return timing, Reached(near if near < inf else None, asked, enough, len(runs), done,
                           clock() - start, others(before, reading()), cores())  # fmt: skip


def _timing(batches: list[Batch], runs: list[list[dict[str, ArmResult]]]) -> Timing:
    return Timing(batches[: len(runs)], runs)


def lines(found: Reached) -> list[str]:
    """Whether other work went on beside, and what was reached, in words."""
    beside = contention.line(found.others, found.cores)
    return [beside] if found.wanted is None else [beside, _reached(found, found.wanted)]


def _reached(found: Reached, wanted: float) -> str:
    near = "one batch, no interval" if found.within is None else f"within {100 * found.within:.0f} % of the value"
    runs = f"{found.runs} runs of {found.batches} batches, {found.seconds:.0f} s"
    if found.enough:
        return f"interval {near}, {100 * wanted:.0f} % asked for: {runs}"
    why = "time was over (bench.minutes=)" if found.batches >= LEAST else "there are too few prompts for an interval"
    return f"interval {near}, {why} before {100 * wanted:.0f} % was reached for sure: {runs}"
