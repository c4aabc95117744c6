"""Timing with a stopping rule: batches are timed until the confidence interval of the speed-up is narrow enough, or
until the time limit.

Timing stops by the relative width of the interval and by the clock, never by the value, so stopping does not bias the
measured speed-up. An interval may be narrow by chance. Therefore at least `LEAST` batches are timed first, and the
width is checked only after the number of batches has grown by a quarter.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from inference.measure.arms import Arm, ArmResult
from inference.measure.contention import contention_line, cores, others, reading
from inference.measure.timing import Timing, batches_of, turn, warm

LEAST = 8  # batches: a bootstrap over fewer is too narrow
FEWEST = 5  # batches, even past the time limit: a bootstrap over two has only three values
GROWTH = 1.25
Clock = Callable[[], float]
Say = Callable[[int, float], None]  # called with the number of batches timed, and `Interval.within`


@dataclass(frozen=True)
class Wanted:
    """The condition that ends a timing; `FEWEST` batches are timed in any case.

    batches: the least number of batches, if there is time. within: the largest allowed distance between the value and
    either end of the interval, relative to the value; inf to time exactly `batches`. until: the time limit, in seconds
    of the clock; inf for none. beside: number of batches in which arms beside the compared pair are timed.
    """

    batches: int
    within: float = inf
    until: float = inf
    beside: float = inf


@dataclass(frozen=True)
class Reached:
    """What a timing has reached. within: distance between the value and the farther end of the 95 % interval, relative
    to the value; None without one. wanted: the wanted distance, None for a fixed number of batches. enough: whether
    the wanted distance and number of batches were reached. batches: number of different batches that were timed. runs:
    number of times that a batch was timed, repeats included. seconds: wall seconds of the whole timing. others: mean
    number of cores that other processes used meanwhile, None if unknown. cores: number of cores that this process may
    use."""

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
    """Time the arms in turn, batch by batch, until the interval of the ratio speed(pair[0]) / speed(pair[1]) is as
    narrow as `wanted` says. Return the timing, and what it reached.

    prompts: token ids of each prompt. rows: prompts per batch. pair: names of two arms. seed: of the first run of each
    batch. After the last batch, the first one is timed again, with the next seed; the bootstrap draws all repeats of a
    batch together. say: called at each check with the number of batches timed and the distance reached. turned: called
    after each batch with the number of batches timed. clock: returns seconds. Raises ValueError if two arms have one
    name, if there is nothing to time, or if arms emit different numbers of tokens for a prompt.
    """
    batches = batches_of(arms, prompts, rows)
    start, before = clock(), reading()
    warm(arms, batches[0], seed)
    runs: list[list[dict[str, ArmResult]]] = []
    compared = [arm for arm in arms if arm.name in pair]
    done, least = 0, max(wanted.batches, LEAST if wanted.within < inf else 1)
    due = least
    while True:
        round, at = divmod(done, len(batches))
        result = turn(arms if done < wanted.beside else compared, batches[at], seed + round, done)
        if round:
            runs[at].append(result)
        else:
            runs.append([result])
        done += 1
        if done >= due:
            near = Timing(batches[: len(runs)], runs).ratio(*pair).within
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
    timing = Timing(batches[: len(runs)], runs)
    near = timing.ratio(*pair).within
    within = wanted.within if wanted.within < inf else None
    enough = near <= wanted.within and done >= least and (within is None or len(runs) >= LEAST)
    return timing, Reached(
        near if near < inf else None,
        within,
        enough,
        len(runs),
        done,
        clock() - start,
        others(before, reading()),
        cores(),
    )


def reached_lines(reached: Reached) -> list[str]:
    """Return the lines of a report about other work on the machine and about the width of the interval."""
    contended = contention_line(reached.others, reached.cores)
    if reached.wanted is None:
        return [contended]
    near = (
        "so few batches have no interval"
        if reached.within is None
        else f"the 95 % interval is within {100 * reached.within:.0f} % of the value"
    )
    runs = f"{reached.runs} runs of {reached.batches} batches took {reached.seconds:.0f} s"
    if reached.enough:
        return [contended, f"{near}, as wanted ({100 * reached.wanted:.0f} %): {runs}"]
    why = (
        "the time limit (bench.minutes=) was reached"
        if reached.batches >= LEAST
        else "an interval of so few batches is itself uncertain"
    )
    return [contended, f"{near}; {100 * reached.wanted:.0f} % was wanted, but {why}: {runs}"]
