"""Drafting of trees level by level and of chains token by token, for every kind of draft that runs a model.

A kind of draft provides the logits after the text, and a pass over the nodes of a level (`Follow`). The tree's shape
decides which nodes each row drafts.

A rows, n nodes of a level, C children, N nodes, D levels, V vocabulary.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inference.models.markov import Term
from inference.models.step import Follow, Nodes, after_anchor, by_round, one_by_one
from inference.proposers.base import Proposal, Round, Siblings
from inference.verify.tree import Tree, depths_of, levels, node_paths, ranks_of


def from_one_pass(
    round: Any,
    logits: Tensor,
    shape: "StaticTrees | None",
    greedy: bool,
    anchor: Tensor,
    term: Term | None,
) -> tuple[Tensor, Tensor]:
    """Return drafts, (A, K) or (A, N) for trees, and the distributions (A, K or N, V) that they were drawn from.

    round: the `Round` to draft for. logits (A, K, V): of one pass; column j is for all drafts at depth j (0-based).
    shape: the trees to draft, None for chains. greedy: whether to draft the likeliest tokens. anchor (A,): the texts'
    last tokens. term: the function that returns what the preceding token adds to a draft's logits, or None.
    """
    if shape:
        return shape.grown(round, logits.shape[1], *after_anchor(logits, anchor, term), greedy)
    return one_by_one(logits.shape[1], *after_anchor(logits, anchor, term), by_round(round, greedy))


TreeShape = Sequence[int] | None


def trees_of(shape: TreeShape) -> "StaticTrees | None":
    """Return the drafter of trees of this shape, or None if `shape` is None or has no nodes, for chains. shape: the
    parent of each node, -1 for the text. Raises ValueError for more nodes than a pass supports, and if a node comes
    before its parent."""
    return StaticTrees(shape) if shape else None


class StaticTrees:
    """A drafter of trees of one shape. It runs one pass per level.

    parents: node i has parent parents[i] < i, or -1 if its parent is the text's last token (the anchor). Siblings are
    verified in the order of their numbers. Nodes are renumbered level by level (the attribute `parents`), and siblings
    stay in order. depth: number of levels. counts: number of nodes in the first 0, 1, ..., depth levels. trees: the
    tree of the first 1, ..., depth levels. Raises ValueError if there are no nodes or more than a pass supports, and if
    a node comes before its parent.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = by_level(tuple(parents))
        depths = depths_of(self.parents)
        self.depth = max(depths, default=0)
        self.counts = [sum(own <= depth for own in depths) for depth in range(self.depth + 1)]
        Tree(self.parents)
        self.trees = [Tree(self.parents[:count]) for count in self.counts[1:]]

    def require(self, vocabulary: int, depths: int | None = None) -> None:
        """Raise ValueError if a node has more children than there are tokens in the vocabulary, or if there are more
        levels than `depths` (None for no limit)."""
        most = max(ranks_of(self.parents)) + 1
        if most > vocabulary:
            raise ValueError(
                f"shape: a node has {most} children, but the vocabulary has {vocabulary} tokens: give it at most "
                f"{vocabulary}"
            )
        if depths is not None and self.depth > depths:
            raise ValueError(
                f"shape: the tree has {self.depth} levels, but the draft has at most {depths}: give at most "
                f"{depths} levels"
            )

    def nodes(self, k: Sequence[int]) -> list[int]:
        """Return the number of nodes that each row drafts. k: the number of levels that each row drafts."""
        return [self.counts[min(levels, self.depth)] for levels in k]

    def grown(
        self, round: Round, depth: int, logits: Tensor, follow: Follow, likeliest: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the ids (A, N) drafted at the nodes of the first `depth` levels (at least 1), and the distributions
        (A, N, V) that they were drawn from. This is a function of tensors.

        round: the `Round` to draft for. logits (A, V): after each text. follow: maps the ids (A, n) of a level and
        their `Nodes` to the logits (A, n, V) after them. likeliest: whether children are the likeliest tokens;
        otherwise they are drawn without replacement.
        """
        x, q, above = logits.new_empty(len(logits), 0, dtype=torch.int64), [], logits.unsqueeze(1)
        steps = _steps(self.parents, logits.device)
        for level, step in enumerate(steps[:depth]):
            if level:
                nodes = Nodes(level, steps[level - 1].above, self.trees[level - 1])
                above = follow(x[:, self.counts[level - 1] :], nodes)
            ids, distributions = round.children(step.of_parents(above), x, step.siblings, likeliest)
            parent, rank = step.parent.to(ids.device), step.rank.to(ids.device)
            x = torch.cat((x, ids[:, parent, rank].to(x.device)), 1)
            q.append(distributions[:, parent, rank])
        return x, torch.cat(q, 1)

    def stored(self, path: Tensor, depth: int) -> Tensor:
        """Return the accepted nodes `path` (A, D), with -1 in place of nodes of the last level. No pass of the draft
        has read that level. depth: the number of levels drafted."""
        return torch.where(path < self.counts[min(depth, self.depth) - 1], path, -1)

    def proposal(self, k: Sequence[int], x: Tensor, q: Tensor) -> Proposal:
        """Return the round's proposal: drafts and distributions with the tree of the levels drafted. k: the number of
        levels of each row. x (A, N), q (A, N, V): the nodes' ids and their distributions."""
        return Proposal(x, q, self.nodes(k), self.trees[self.counts.index(x.shape[1]) - 1])


class LevelStep(NamedTuple):
    """How one level of a static tree follows the level above it.

    siblings: the nodes of the level above that have children. inner: indices of these nodes in the level above; None if
    all its nodes have children. For each of the n nodes of this level: parent (n,), the index of its parent among the
    nodes with children; rank (n,), its number of earlier siblings; above (1, n), the index of its parent in the level
    above.
    """

    siblings: Siblings
    inner: Tensor | None
    parent: Tensor
    rank: Tensor
    above: Tensor

    def of_parents(self, logits: Tensor) -> Tensor:
        """Return logits (A, n, V) after the n nodes of the level above that have children. logits (A, m, V): after all
        m nodes of that level."""
        return logits if self.inner is None else logits.index_select(1, self.inner)


def by_level(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the parents of the same tree with its nodes numbered level by level; siblings stay in order."""
    depths = depths_of(parents)
    order = sorted(range(len(parents)), key=depths.__getitem__)
    number = {node: index for index, node in enumerate(order)}
    return tuple(number[parents[node]] if parents[node] >= 0 else -1 for node in order)


@cache  # CUDA graphs may read these tensors, so none is dropped
def _steps(parents: tuple[int, ...], device: torch.device) -> tuple[LevelStep, ...]:
    """Return the steps of a tree, one per level. The result is cached by shape and device, so that no round copies it
    to the device again."""
    steps: list[LevelStep] = []
    above: tuple[int, ...] = (-1,)
    paths: list[tuple[int, ...]] = [*node_paths(parents), ()]  # the last one is that of the anchor, node -1
    for level in levels(parents):
        inner = sorted(set(level.above))
        own = [above[index] for index in inner]
        first = tuple(parents.index(node) for node in own)
        keys = torch.tensor([node + 1 for node in own], device=device)
        siblings = Siblings(max(level.rank) + 1, tuple(paths[node] for node in own), first, keys)
        lists = [inner, [inner.index(index) for index in level.above], list(level.rank), list(level.above)]
        here, parent, rank, indices = (torch.tensor(part, device=device) for part in lists)
        steps.append(
            LevelStep(siblings, None if len(inner) == len(above) else here, parent, rank, indices.unsqueeze(0))
        )
        above = level.nodes
    return tuple(steps)
