"""Trees drafted level by level, chains a token at a time: what every kind that runs a model shares.

A kind gives the logits behind the text and a pass over the nodes of a level (`Follow`); which nodes there are, their
children and distributions, and how many a row has are the same for all. A rows, n nodes of a level, N nodes, D levels,
V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from inference.models.passes import Tree
from inference.models.step import Choose
from inference.proposers.base import Proposal, Round, Siblings
from inference.proposers.topology import levels
from inference.verify.tree import depths_of, ranks_of


class Nodes(NamedTuple):
    """Drafts that one pass reads. depth: of them all, 1 or more; above (1 or A, n): where the parent of each stands
    among the nodes of the pass before, None: there is one of each; tree: whose last n nodes they are, None of a
    chain."""

    depth: int
    above: Tensor | None = None
    tree: Tree | None = None

    def of_parents(self, values: Tensor) -> Tensor:
        """Values (A, m, ...) of the nodes of the pass before -> (A, n, ...) of these nodes' parents."""
        if self.above is None:
            return values
        return values[torch.arange(len(values), device=values.device).unsqueeze(1), self.above]


# ids (A, n) of nodes -> logits (A, n, V) behind them; asked of level after level
Follow = Callable[[Tensor, Nodes], Tensor]


class Branching:
    """A static shape of trees, drafted with one pass a level.

    parents: node i hangs on parents[i] < i, on the anchor where that is -1; siblings are tried in their order, which
    stays when nodes are numbered level by level (`parents` of this object). depth: levels. counts: nodes within each
    depth 0 .. depth. trees: the shape down to each depth 1 .. depth. Raises ValueError for no nodes, for a node before
    its parent and for more nodes than a pass takes.
    """

    unread = 0  # of an accepted path above the last level, how many nodes the draft may not have read

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = by_level(tuple(parents))
        depths = depths_of(self.parents)
        self.depth = max(depths, default=0)
        self.counts = [sum(own <= depth for own in depths) for depth in range(self.depth + 1)]
        self.room = self.counts[-1]  # slots of the draft that a round may take
        Tree(self.parents)
        self.trees = [Tree(self.parents[:count]) for count in self.counts[1:]]

    def require(self, vocabulary: int, depths: int | None = None) -> None:
        """Raise ValueError where a node has more children than there are tokens, and for more levels than `depths`."""
        most = max(ranks_of(self.parents)) + 1
        if most > vocabulary:
            raise ValueError(f"shape: a node has {most} children, the vocabulary {vocabulary} tokens; leave some out")
        if depths is not None and self.depth > depths:
            raise ValueError(f"shape: its trees have {self.depth} levels, the draft guesses {depths}; leave some out")

    def nodes(self, k: Sequence[int]) -> list[int]:
        """Nodes of each row that is to draft k levels: all of these."""
        return [self.counts[min(levels, self.depth)] for levels in k]

    def numbers(self, k: Sequence[int]) -> dict[str, list[int]]:
        """What `grown` needs on the device beside the rows' nodes."""
        return {}

    def grown(
        self, round: Round, depth: int, logits: Tensor, follow: Follow, likeliest: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Nodes (A, N) of the first `depth` levels, 1 or more, and the distributions (A, N, V) that they were drawn
        from; a function of tensors. logits (A, V) behind each text. likeliest: children are the likeliest tokens, else
        drawn without replacement (see `Round.children`)."""
        x, q, behind = logits.new_empty(len(logits), 0, dtype=torch.int64), [], logits.unsqueeze(1)
        steps = _steps(self.parents, logits.device)
        for level, step in enumerate(steps[:depth]):
            if level:
                nodes = Nodes(level, steps[level - 1].above, self.trees[level - 1])
                behind = follow(x[:, self.counts[level - 1] :], nodes)
            ids, distributions = round.children(step.of_parents(behind), x, step.siblings, likeliest)
            parent, rank = step.parent.to(ids.device), step.rank.to(ids.device)
            x = torch.cat((x, ids[:, parent, rank].to(x.device)), 1)
            q.append(distributions[:, parent, rank])
        return x, torch.cat(q, 1)

    def stored(self, path: Tensor, depth: int) -> Tensor:
        """Nodes path (A, D) that were accepted, those of the last of `depth` levels, which no pass read, as -1."""
        return torch.where(path < self.counts[min(depth, self.depth) - 1], path, -1)

    def proposal(self, k: Sequence[int], x: Tensor, q: Tensor) -> Proposal:
        """Of rows that were to draft k levels, from what was `grown`."""
        return Proposal(x, q, self.nodes(k), self.trees[self.counts.index(x.shape[1]) - 1])


def one_by_one(K: int, logits: Tensor, follow: Follow, choose: Choose) -> tuple[Tensor, Tensor]:
    """A chain: K drafts (A, K) in turn and the distributions (A, K, V) that they were drawn from; logits (A, V) behind
    texts."""
    drafts: list[Tensor] = []
    distributions: list[Tensor] = []
    for depth in range(K):
        behind = logits if depth == 0 else follow(drafts[-1].to(logits.device).unsqueeze(1), Nodes(depth))[:, 0]
        ids, probs = choose(behind, drafts)
        drafts.append(ids)
        distributions.append(probs)
    return torch.stack(drafts, 1), torch.stack(distributions, 1)


def of_depths(logits: Tensor) -> Follow:
    """Where a distribution hangs on the depth alone: logits (A, K, V), entry j behind all nodes of depth j."""
    return lambda ids, nodes: logits[:, nodes.depth : nodes.depth + 1].expand(-1, ids.shape[1], -1)


class Step(NamedTuple):
    """A level: the nodes above that have children; where these stand in the level above, None: all do; of each node,
    which of them its parent is, how many siblings stand before it, and above (1, n) as of `Nodes`."""

    siblings: Siblings
    inner: Tensor | None
    parent: Tensor
    rank: Tensor
    above: Tensor

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
        places = [inner, [inner.index(place) for place in level.above], list(level.rank), list(level.above)]
        here, parent, rank, place = (torch.tensor(part, device=device) for part in places)
        found.append(Step(siblings, None if len(inner) == len(above) else here, parent, rank, place.unsqueeze(0)))
        above = level.nodes
    return tuple(found)
