"""What a round costs that drafts a tree, from rounds with a few trees that were run and the table of passes.

parents: as in `proposers.topology`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from inference.measure.costs import Costs
from inference.measure.real_costs import RealRound
from inference.measure.shapes import Parents, Seconds
from inference.proposers.topology import chain, full
from inference.verify.tree import depths_of

PROBES = (chain(2), full((2,)), full((2, 1)), full((4, 1)), full((2, 2, 1)), full((4, 2)), full((8, 1)), full((8, 2)))


def probes(most: int, depth: int) -> list[Parents]:
    """Trees to run: of at most `most` nodes and `depth` levels, deep, wide and both; the first is a chain."""
    asked = {chain(min(most, depth)): None} | dict.fromkeys(PROBES)
    return [tree for tree in asked if len(tree) <= most and max(depths_of(tree)) <= depth]


def fitted(table: Costs, rounds: Mapping[Parents, RealRound]) -> Seconds:
    """Seconds of a round that drafts a tree, `rounds` being some that were run. Drafting is first + step * levels +
    node * (nodes that the draft reads beyond one a level), least squares, none below 0. The target's pass and the rest
    are those of the table over as many ids, times what rounds took of these, in between on a line. Raises ValueError
    for more nodes than the table has passes over."""
    drafting = _least(np.array([_features(tree) for tree in rounds]), [one.draft for one in rounds.values()])
    target = _scaled(table.target, {tree: one.target for tree, one in rounds.items()})
    rest = _scaled(table.rest, {tree: one.rest for tree, one in rounds.items()})

    def seconds(parents: Parents) -> float:
        n = len(parents)
        if n >= len(table.target):
            raise ValueError(f"costs of rounds are measured up to {len(table.target) - 1} drafts, a tree has {n} nodes")
        return float(drafting @ _features(parents)) + target(n) + rest(n)

    return seconds


def _features(parents: Parents) -> np.ndarray:
    """1 where anything is drafted, levels, and nodes above the last level beyond one a level."""
    depths = depths_of(parents)
    levels = max(depths, default=0)
    return np.array([float(levels > 0), levels, sum(depth < levels for depth in depths) - max(levels - 1, 0)])


def _least(features: np.ndarray, seconds: Sequence[float]) -> np.ndarray:
    """Least squares with no part below 0: those that would be are left out, one after the other."""
    kept = list(range(features.shape[1]))
    found = np.zeros(features.shape[1])
    while kept:
        parts = np.linalg.lstsq(features[:, kept], np.array(seconds), rcond=None)[0]
        if parts.min() >= 0:
            found[kept] = parts
            break
        kept.pop(int(parts.argmin()))
    return found


def _scaled(table: Sequence[float], took: Mapping[Parents, float]) -> Callable[[int], float]:
    """The table by nodes, times the mean factor of the trees of as many nodes that were run, in between on a line."""
    factors: dict[int, list[float]] = {}
    for tree, seconds in took.items():
        factors.setdefault(len(tree), []).append(seconds / table[len(tree)])
    known = sorted(factors)
    means = [float(np.mean(factors[n])) for n in known]
    return lambda n: float(table[n] * np.interp(n, known, means))
