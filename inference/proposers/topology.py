"""Shapes of trees of drafts, and the children of their nodes: pure functions of distributions and noise.

A shape is its parents: node i hangs on parents[i] < i, on the anchor where that is -1; siblings are tried in the order
of their numbers. A static shape is a tuple, whose levels are drafted with one pass each (`levels`); a dynamic one is
grown level by level, a tensor (A, N) with a shape a row (`best`, `pruned`).

A rows, n nodes of a level, C or m children of a node, N nodes, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inference.sampling import wide
from inference.verify.tree import depths_of, ranks_of


class Level(NamedTuple):
    """Nodes of one depth: their numbers; of each, the place of its parent in the level above (0 for the anchor) and how
    many siblings stand before it. Children (A, n, m) of the level above give its ids: [:, above, rank]."""

    nodes: tuple[int, ...]
    above: tuple[int, ...]
    rank: tuple[int, ...]


def chain(n: int) -> tuple[int, ...]:
    """n drafts in a row."""
    return tuple(range(-1, n - 1))


def full(widths: Sequence[int]) -> tuple[int, ...]:
    """widths[d] children of every node of depth d, the anchor's depth being 0."""
    parents: list[int] = []
    above = [-1]
    for width in widths:
        first = len(parents)
        parents += [node for node in above for _ in range(width)]
        above = list(range(first, len(parents)))
    return tuple(parents)


def from_paths(paths: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The tree whose nodes have these paths of child numbers, as Medusa's `choices` name them, e.g. (0,), (1,), (0, 0).

    Paths that a path runs through, and siblings before it, are nodes too. Nodes are numbered level by level.
    """
    wanted = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    nodes = {(*path[:-1], rank) for path in wanted for rank in range(path[-1] + 1)}
    order = sorted(nodes, key=lambda path: (len(path), path))
    number = {path: place for place, path in enumerate(order)}
    return tuple(number[path[:-1]] if len(path) > 1 else -1 for path in order)


def paths_of(parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Child numbers from the anchor down to each node: what `from_paths` takes."""
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(parents, ranks_of(parents), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths


def levels(parents: tuple[int, ...]) -> tuple[Level, ...]:
    """Nodes by depth, each level one pass of a draft."""
    depths, ranks = depths_of(parents), ranks_of(parents)
    found, above = [], [-1]
    for depth in range(1, max(depths, default=0) + 1):
        nodes = [node for node, own in enumerate(depths) if own == depth]
        places = tuple(above.index(parents[node]) for node in nodes)
        found.append(Level(tuple(nodes), places, tuple(ranks[node] for node in nodes)))
        above = nodes
    return tuple(found)


def sampled(probs: Tensor, g: Tensor, m: int) -> Tensor:
    """m children of each node drawn without replacement, in the order in which they would be drawn one by one.

    distribution (A, n, V), g (A, n, V) Gumbel noise, see `noise.children_states` -> ids (A, n, m): the m largest of log
    q + g, the largest first (Kool et al. 2019, 1903.06059). Where fewer than m tokens have mass, what comes behind them
    has none, and the rules for trees never accept it.
    """
    return (probs.to(g.dtype).log() + g).topk(m, dim=-1).indices


def likeliest(probs: Tensor, m: int) -> Tensor:
    """The m likeliest tokens of each distribution, or of logits, in falling order, of equal ones the lower id first:
    (..., V) -> (..., m), the tokens with `tree_prediction.rank_of` 0 .. m - 1."""
    left, found = wide(probs).clone(), []
    for _ in range(m):
        found.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)


def child_scores(score: Tensor, probs: Tensor, C: int) -> Tensor:
    """Log path probability of each node's first C children, by the draft's own distribution (EAGLE-2, Li et al. 2024,
    2406.16858): the node's score plus the log of the distribution's c-th largest mass. score (A, n), distribution (A,
    n, V) -> (A, n, C).

    Of the likeliest children this is their own probability. Of sampled ones it is a guess that reads distributions
    alone: which token a child is must not decide whether it is a child.
    """
    return score.unsqueeze(-1) + wide(probs).topk(C, dim=-1).values.log()


def best(score: Tensor, width: int) -> Tensor:
    """Places (A, width), in rising order, of the highest scores (A, M), of equal ones the first: which nodes a level
    expands, or which children (A, n * C) it gets, node by node, so that no child stands without those before it."""
    return score.sort(dim=-1, descending=True, stable=True).indices[:, :width].sort(dim=-1).values


def pruned(parents: Tensor, score: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """The N nodes of highest score of a tree of likeliest children (EAGLE-2's second step): their numbers in rising
    order and their parents among themselves, (A, N) each.

    parents, score (A, M); a score is never above its parent's, so that parents stay. Never of sampled children: a
    child that is drawn, looked at and then left out makes the text's distribution another.
    """
    nodes = best(score, N)
    place = torch.full_like(parents, -1).scatter(1, nodes, torch.arange(N, device=nodes.device).expand_as(nodes))
    above = parents.gather(1, nodes)
    return nodes, torch.where(above >= 0, place.gather(1, above.clamp(min=0)), -1)
