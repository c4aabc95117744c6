"""Trees drafted level by level: what every kind that runs a model shares.

A kind gives the logits behind the text and a pass over the nodes of a level; which nodes there are, their children and
laws, and how many a row has are the same for all. A rows, n nodes of a level, N nodes, D levels, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from inference.models.passes import Tree
from inference.proposers.base import Proposal, Round, Siblings
from inference.proposers.topology import levels
from inference.verify.tree import depths_of, ranks_of

Follow = Callable[[Tensor, Tree], Tensor]


class Branching:
    """A static shape of trees, drafted with one pass a level.

    parents: node i hangs on parents[i] < i, on the anchor where that is -1; siblings are tried in their order, which
    stays when nodes are numbered level by level (`parents` of this object). depth: levels. counts: nodes within each
    depth 0 .. depth. trees: the shape down to each depth 1 .. depth. Raises ValueError for no nodes, for a node before
    its parent and for more nodes than a pass takes.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = by_level(tuple(parents))
        depths = depths_of(self.parents)
        self.depth = max(depths, default=0)
        self.counts = [sum(own <= depth for own in depths) for depth in range(self.depth + 1)]
        Tree(self.parents)
        self.trees = [Tree(self.parents[:count]) for count in self.counts[1:]]

    def require(self, vocabulary: int) -> None:
        """Raise ValueError where a node has more children than there are tokens."""
        most = max(ranks_of(self.parents)) + 1
        if most > vocabulary:
            raise ValueError(f"shape: a node has {most} children, the vocabulary {vocabulary} tokens; leave some out")

    def nodes(self, k: Sequence[int]) -> list[int]:
        """Nodes of each row that is to draft k levels: all of these."""
        return [self.counts[min(levels, self.depth)] for levels in k]

    def draft(
        self, turn: Round, k: Sequence[int], logits: Tensor, follow: Follow, likeliest: bool = False,
        depth: int | None = None,
    ) -> Proposal:  # fmt: skip
        """Trees of k levels a row, all drafted to the deepest of these, or to `depth`. logits (A, V) behind each text;
        follow(ids (A, n), tree) -> logits (A, n, V) behind the last n nodes of `tree`, one level. likeliest: children
        are the likeliest tokens, else drawn without replacement (see `Round.children`)."""
        depth = min(max(k) if depth is None else depth, self.depth)
        x, q, behind = logits.new_empty(len(logits), 0, dtype=torch.int64), [], logits.unsqueeze(1)
        for level, step in enumerate(_steps(self.parents, logits.device)[:depth]):
            if level:
                behind = follow(x[:, self.counts[level - 1] :], self.trees[level - 1])
            ids, laws = turn.children(step.of_parents(behind), x, step.siblings, likeliest)
            parent, rank = step.parent.to(ids.device), step.rank.to(ids.device)
            x = torch.cat((x, ids[:, parent, rank].to(x.device)), 1)
            q.append(laws[:, parent, rank])
        return Proposal(x, torch.cat(q, 1), self.nodes(k), self.trees[depth - 1])


class Step(NamedTuple):
    """A level: the nodes above that have children; where these stand in the level above, None: all do; of each node,
    which of them its parent is, and how many siblings stand before it."""

    siblings: Siblings
    inner: Tensor | None
    parent: Tensor
    rank: Tensor

    def of_parents(self, logits: Tensor) -> Tensor:
        """Logits of a level -> of those of its nodes that have children."""
        return logits if self.inner is None else logits.index_select(1, self.inner)


def by_level(parents: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its nodes numbered level by level, siblings in their order."""
    depths = depths_of(parents)
    order = sorted(range(len(parents)), key=depths.__getitem__)
    place = {node: number for number, node in enumerate(order)}
    return tuple(place[parents[node]] if parents[node] >= 0 else -1 for node in order)


@lru_cache(maxsize=64)
def _steps(parents: tuple[int, ...], device: torch.device) -> tuple[Step, ...]:
    """Kept by shape, so that no round copies it to the device again."""
    found: list[Step] = []
    above: tuple[int, ...] = (-1,)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for level in levels(parents):
        inner = sorted(set(level.above))
        own = [above[place] for place in inner]
        first = tuple(parents.index(node) for node in own)
        keys = torch.tensor([node + 1 for node in own], device=device)
        siblings = Siblings(max(level.rank) + 1, tuple(paths[node] for node in own), first, keys)
        paths |= {node: (*paths[parents[node]], node) for node in level.nodes}
        places = [inner, [inner.index(place) for place in level.above], list(level.rank)]
        here, parent, rank = (torch.tensor(part, device=device) for part in places)
        found.append(Step(siblings, None if len(inner) == len(above) else here, parent, rank))
        above = level.nodes
    return tuple(found)
