"""Shapes of draft trees: their expected target calls on texts, their seconds per round, and trees that are grown to
save expected calls.

accept (B, T, C) or (B, T, K, C), lengths (B,) and the reach: as in `verify.predict_tree`, on texts of the target. B
texts, T tokens of the longest, N nodes, S trees, D levels. parents: as in `verify.tree`. Rounds are verified by the
rule `tree`, unless stated otherwise.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inference.measure.costs import Costs, RealRound, not_negative
from inference.verify.predict_chain import calls_from, jumps_of, round_starts
from inference.verify.predict_tree import of_rounds, reach_tree, reached
from inference.verify.tree import chain, depths_of, from_paths, full, paths_of

TOGETHER = 64  # shapes whose recursions run side by side
TRIES = 4  # candidates of a step that are rated exactly
PROBES = (chain(2), full((2,)), full((2, 1)), full((4, 1)), full((2, 2, 1)), full((4, 2)), full((8, 1)), full((8, 2)))

Parents = tuple[int, ...]
Seconds = Callable[[Parents], float]  # seconds of a round that drafts this tree, () for no drafts


def grown_trees(accept: Tensor, most: int, depths: Iterable[int], lengths: Tensor | None = None) -> list[Parents]:
    """Return the parents of trees of every size up to `most` nodes, grown within each of the depths (numbers of levels)
    so that each added node saves the most expected calls. accept (B, T, C) or (B, T, K, C): P(the text's token is
    accepted as child c). lengths (B,): tokens in each text, None for T."""
    whole = [grow(accept, most, depth, lengths) for depth in depths]
    return list(dict.fromkeys(tree[:n] for tree in whole for n in range(1, len(tree) + 1)))


def grow(accept: Tensor, most: int, depth: int, lengths: Tensor | None = None, start: Parents = ()) -> Parents:
    """Return the parents of a tree of `most` nodes in at most `depth` levels. Each step adds the node that saves the
    most expected calls, so the first n nodes are the tree grown to n nodes. The tree is smaller if no node can have
    another child. start: the parents of the first nodes.

    The candidates of a step are the next child of every node. The `TRIES` candidates with the largest first-order gain
    are rated exactly, and the one with the fewest calls is added. All trees of n nodes within a depth take equally many
    seconds per round, so seconds matter only for the choice of size and depth. accept (B, T, C) or (B, T, K, C): P(the
    text's token is accepted as child c), see the module. lengths (B,): tokens in each text, None for T.
    """
    tables = [of_rounds(accept, level, lengths) for level in range(depth)]
    whole = torch.ones_like(of_rounds(accept, 0, lengths)[..., 0])
    parents = start
    for _ in range(most - len(start)):
        nexts = candidates(parents, tables, whole)
        if not nexts:
            break
        saved = gains(accept, parents, nexts, lengths)
        order = sorted(nexts, key=saved.__getitem__, reverse=True)[:TRIES]
        parents = (*parents, min(order, key=lambda parent: _calls(accept, (*parents, parent), lengths)))
    return parents


def candidates(parents: Parents, tables: Sequence[Tensor], whole: Tensor) -> dict[int, tuple[int, Tensor]]:
    """Return the next child that could be added to each node: by node, the child's depth (1-based) and its chances (B,
    T).

    Node -1 is the text's last token (the anchor). tables: for each level, the result of `predict_tree.of_rounds`. whole
    (B, T): ones. chances: P(a round that starts at t accepts the child | the text). Nodes at the largest depth, and
    nodes that already have all their children, are left out. parents: of the tree's nodes.
    """
    chances = [whole, *reached(tables, whole, parents).unbind(-1)]
    children = {}
    for node, depth in enumerate((0, *depths_of(parents)), -1):
        rank = parents.count(node)
        if depth < len(tables) and rank < tables[0].shape[-1]:
            children[node] = depth + 1, chances[node + 1] * tables[depth][..., rank]
    return children


def gains(
    accept: Tensor, parents: Parents, nexts: dict[int, tuple[int, Tensor]], lengths: Tensor | None
) -> dict[int, float]:
    """Return the calls that each candidate saves, to first order, by the node that gets it. nexts: the result of
    `candidates`.

    If a round at t accepts the candidate, the next round starts at t + depth + 1 instead of t + depth. This saves sum_t
    s_t chance_t (E_{t+depth} - E_{t+depth+1}), with E the expected remaining calls and s_t the probability that a round
    starts at t. parents: of the present tree's nodes. lengths (B,): tokens in each text, None for T. accept (B, T, C)
    or (B, T, K, C): P(the text's token is accepted as child c).
    """
    reach = reach_tree(accept, parents, lengths)
    s, left = round_starts(reach), calls_left(reach, lengths)  # (B, T), (B, T + K + 1)
    T = s.shape[1]
    left = F.pad(left, (0, T))
    return {
        node: float((s * chance * (left[:, depth : depth + T] - left[:, depth + 1 : depth + 1 + T])).sum())
        for node, (depth, chance) in nexts.items()
    }


def calls_left(reach: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the expected calls E_t from a round that starts at t to the text's end, (B, T + K + 1); 0 past the end.
    reach (B, T, K+1): P(a round that starts at t accepts at least n drafts).

    E_t = 1 + sum_n P(n accepted) E_{t+n+1}. lengths (B,): tokens in each text, None for T.
    """
    B, T, depths = reach.shape
    exactly = jumps_of(reach)
    left = reach.new_zeros(B, T + depths)
    end = torch.full((B,), T, device=reach.device) if lengths is None else lengths.to(reach.device)
    for t in reversed(range(T)):
        now = 1 + (exactly[:, t] * left[:, t + 1 : t + 1 + depths]).sum(-1)
        left[:, t] = torch.where(t < end, now, 0.0)
    return left


def _calls(accept: Tensor, parents: Parents, lengths: Tensor | None) -> float:
    return float(calls_from(reach_tree(accept, parents, lengths), lengths).sum())


class Paths(NamedTuple):
    """The probabilities of paths of child numbers. A node's effect on a round depends only on its path, not on the rest
    of the tree.

    columns: by path of child numbers, the path's index in `chances`. chances (B, T, N): for each path, P(a round that
    starts at t follows the text to the end of the path | the text). lengths (B,): number of tokens of each text.
    """

    columns: dict[tuple[int, ...], int]
    chances: Tensor
    lengths: Tensor


def union(shapes: Iterable[Parents]) -> Parents:
    """Return the parents of the smallest tree that contains all these trees."""
    return from_paths({path for shape in shapes for path in paths_of(shape)})


def products(accept: Tensor, whole: Parents, lengths: Tensor) -> Tensor:
    """Return the probabilities (B, T, N) of a tree's nodes under the rule `tree`: for each node, the product of
    `accept` over the child numbers of its path. whole: the tree's parents. accept (B, T, C) or (B, T, K, C): P(the
    text's token is accepted as child c). lengths (B,): tokens in each text."""
    tables = [of_rounds(accept, level, lengths) for level in range(max(depths_of(whole)))]
    return reached(tables, torch.ones_like(tables[0][..., 0]), whole)


def calls_of(paths: Paths, shapes: Sequence[Parents]) -> Tensor:
    """Return the expected calls (S, B) with each of S trees on each of B texts. paths: the probabilities of all paths
    of these trees. shapes: the parents of each tree's nodes."""
    T, parts = paths.chances.shape[1], []
    for low in range(0, len(shapes), TOGETHER):
        some = shapes[low : low + TOGETHER]
        calls = calls_from(_reach(paths, some).flatten(0, 1), paths.lengths.repeat(len(some)))
        parts.append(calls.view(len(some), -1))
    return torch.cat(parts) if parts else paths.chances.new_zeros(0, len(paths.lengths)) + T


def _reach(paths: Paths, shapes: Sequence[Parents]) -> Tensor:
    """Return the reach (S, B, T, D+1) of each tree, with D levels of the deepest tree."""
    named = [paths_of(shape) for shape in shapes]
    deepest = max((len(path) for one in named for path in one), default=0)
    reach = paths.chances.new_zeros(len(shapes), *paths.chances.shape[:2], deepest + 1)
    reach[..., 0] = 1
    for number, one in enumerate(named):
        for path in one:
            reach[number, ..., len(path)] += paths.chances[..., paths.columns[path]]
    return reach


def _nexts(own: list[tuple[int, ...]], depth: int) -> list[tuple[int, ...]]:
    """Return the path of the next child of the text and of every node, within `depth` levels. own: the paths of the
    tree's nodes."""
    return [(*above, sum(path[:-1] == above for path in own)) for above in [(), *own] if len(above) < depth]


def climbed(paths: Paths, most: int, depth: int) -> list[Parents]:
    """Return the parents of trees of 1, 2, ..., `most` nodes within `depth` levels. Each is the previous tree with one
    more node: the path in `paths` that saves the most calls. There are fewer trees if `paths` has no further path."""
    own: list[tuple[int, ...]] = []
    trees: list[Parents] = []
    for _ in range(most):
        more = [from_paths([*own, path]) for path in _nexts(own, depth) if path in paths.columns]
        if not more:
            break
        trees.append(more[int(calls_of(paths, more).sum(1).argmin())])
        own = paths_of(trees[-1])
    return trees


def every(most: int, children: int, depth: int) -> list[Parents]:
    """Return the parents of every tree of 1 to `most` nodes, once each, with at most `children` children per node and
    `depth` levels. Nodes are numbered level by level."""
    trees: dict[Parents, None] = {}
    edge: list[Parents] = [()]
    for _ in range(most):
        more = [(own, path) for own in map(paths_of, edge) for path in _nexts(own, depth) if path[-1] < children]
        edge = list(dict.fromkeys(from_paths([*own, path]) for own, path in more))
        trees |= dict.fromkeys(edge)
    return list(trees)


def probes(most: int, depth: int) -> list[Parents]:
    """Return the parents of trees to time, with at most `most` nodes and `depth` levels. Some are deep, some wide, some
    both; the first is a chain."""
    trees = {chain(min(most, depth)): None} | dict.fromkeys(PROBES)
    return [tree for tree in trees if len(tree) <= most and max(depths_of(tree)) <= depth]


def fitted_seconds(table: Costs, rounds: Mapping[Parents, RealRound]) -> Seconds:
    """Return a function from a tree's parents to the seconds of a round that drafts the tree. table: costs of rounds of
    chains. rounds: timed rounds, by the tree's parents.

    Drafting takes first + step * levels + node * (nodes that the draft reads in addition to one per level). The three
    coefficients are fitted to the timed rounds by least squares, none below 0. The target pass and the rest take the
    table's seconds for equally many ids, times the ratio of real to table seconds, interpolated between the timed
    trees. The function raises ValueError for trees with more nodes than the table covers.
    """
    drafting = not_negative(np.array([_features(tree) for tree in rounds]), [one.draft for one in rounds.values()])
    target = _scaled(table.target, {tree: one.target for tree, one in rounds.items()})
    rest = _scaled(table.rest, {tree: one.rest for tree, one in rounds.items()})

    def seconds(parents: Parents) -> float:
        n = len(parents)
        if n >= len(table.target):
            raise ValueError(
                f"costs of rounds were measured up to {len(table.target) - 1} drafts, but this tree has {n} nodes: "
                "give a smaller tree"
            )
        return float(drafting @ _features(parents)) + target(n) + rest(n)

    return seconds


def _features(parents: Parents) -> np.ndarray:
    """Return three numbers for a tree: 1 if it has nodes, else 0; its number of levels; and the number of nodes above
    its last level, minus one per such level."""
    depths = depths_of(parents)
    levels = max(depths, default=0)
    return np.array([float(levels > 0), levels, sum(depth < levels for depth in depths) - max(levels - 1, 0)])


def _scaled(table: Sequence[float], rounds: Mapping[Parents, float]) -> Callable[[int], float]:
    """Return a function from n to the seconds for a tree with n nodes: table[n] times the ratio of real to table
    seconds. The ratio is the mean over the timed trees of a size, interpolated between sizes. rounds: real seconds, by
    the timed tree's parents."""
    factors: dict[int, list[float]] = {}
    for tree, seconds in rounds.items():
        factors.setdefault(len(tree), []).append(seconds / table[len(tree)])
    known = sorted(factors)
    means = [float(np.mean(factors[n])) for n in known]
    return lambda n: float(table[n] * np.interp(n, known, means))
