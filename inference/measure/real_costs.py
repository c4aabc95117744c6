"""What a round costs where it is paid: in real calls of the engine that will serve, part by part.

`costs.measure_costs` times each part of a round alone and warm. In a run the parts push each other out of the caches,
threads are woken anew, and the host's own work stands between: there a draft can take two to five times as long. So the
table keeps its shape over draft lengths, and its level comes from here.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any, TypeVar

import numpy as np

from inference.engine import Engine
from inference.measure.costs import Costs
from inference.policy import Fixed
from inference.sampling import Sampling
from inference.stats import Stats

Key = TypeVar("Key", bound=Hashable)
LEAST, MOST = 2, 5  # calls at each length


@dataclass(frozen=True)
class RealRound:
    """Seconds of a round, of all its rows together: drafting, the target's pass, and all else (distributions,
    verification, draws, bookkeeping on the host)."""

    draft: float
    target: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.draft + self.target + self.rest


def of_stats(stats: Stats, k: int) -> RealRound:
    """The mean round of a call. Without drafts (k = 0) the phase that would draft counts as the rest."""
    rounds = stats.times["target"]
    draft, target, verify, other = (stats.seconds[name] / rounds for name in ("draft", "target", "verify", "other"))
    return RealRound(draft if k else 0.0, target, verify + other + (0.0 if k else draft))


def measure_rounds(
    engines: Mapping[int, Engine], prompts: Sequence[list[int]], **settings: Any
) -> dict[int, RealRound]:
    """Rounds at each draft length, by the engine that runs it, see `measure_drafting`."""
    return measure_drafting({k: (engine, k) for k, engine in engines.items()}, prompts, **settings)


def measure_drafting(
    engines: Mapping[Key, tuple[Engine, int]],
    prompts: Sequence[list[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int = 0,
    until: float = inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, RealRound]:
    """Rounds of engines that draft so many tokens, of trees so many levels: medians over calls that take turns, the
    first of each left out. As many prompts as there are rows are decoded, other ones in every call; policies are left
    as they were.

    until: when time is over, on the clock; each engine is run at least `LEAST` times. Raises ValueError without any,
    RuntimeError where a prompt ends in an error.
    """
    if not prompts or not engines:
        raise ValueError(f"{len(prompts)} prompts and {len(engines)} draft lengths: nothing to time")
    found: dict[Key, list[RealRound]] = {key: [] for key in engines}
    for repeat in range(MOST + 1):
        if repeat > LEAST and clock() > until:
            break
        for key, (engine, k) in engines.items():
            batch = [prompts[(repeat * engine.rows + row) % len(prompts)] for row in range(engine.rows)]
            with _drafting(engine, k):
                out = engine.generate(
                    batch, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed + repeat, ignore_eos=True
                ).whole()
            if repeat:  # the first makes graphs and warms up
                found[key].append(of_stats(out.stats, k))
    return {key: _middle(rounds) for key, rounds in found.items()}


@contextmanager
def _drafting(engine: Engine, k: int) -> Iterator[None]:
    own, engine.policy = engine.policy, Fixed(k)
    try:
        yield
    finally:
        engine.policy = own


def _middle(rounds: Sequence[RealRound]) -> RealRound:
    return RealRound(*(median(getattr(one, part) for one in rounds) for part in ("draft", "target", "rest")))


def calibrated(table: Costs, rounds: Mapping[int, RealRound]) -> Costs:
    """The table at the level of real rounds: target and rest times what they took there over what the table says at the
    lengths that were run, in between on a line, beyond as at the nearest; drafting the line nearest to those rounds."""
    lengths = range(len(table.target))
    known = sorted(k for k in rounds if k < len(table.target))

    def scaled(part: str, says: Sequence[float]) -> tuple[float, ...]:
        factors = [getattr(rounds[k], part) / says[k] for k in known]
        return tuple(float(value) for value in np.array(says) * np.interp(lengths, known, factors))

    first, step = _line(table, {k: rounds[k].draft for k in rounds if k})
    return replace(table, target=scaled("target", table.target), rest=scaled("rest", table.rest), draft=step,
                   first=first)  # fmt: skip


def _line(table: Costs, drafting: Mapping[int, float]) -> tuple[float, float]:
    """(first, step) of first + k step, least squares; the table's, scaled, for fewer than two lengths."""
    if not drafting:
        return table.first, table.draft
    if len(drafting) == 1:
        ((k, seconds),) = drafting.items()
        factor = seconds / table.drafting(k)
        return table.first * factor, table.draft * factor
    step, first = np.polyfit(list(drafting), list(drafting.values()), 1)
    return (float(first), float(step)) if step > 0 else (float(np.mean(list(drafting.values()))), 0.0)
