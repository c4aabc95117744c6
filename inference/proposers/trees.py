"""Drafting of trees level by level and of chains token by token, for every kind of draft that runs a model.

A kind of draft provides the logits after the text, and a pass over the nodes of a level (`Follow`). The shape decides
which nodes and children each row has. `StaticTrees` has a fixed shape. In `DynamicTrees` the distributions of each row
decide the shape in each round (EAGLE-2: Li et al. 2024, 2406.16858).

A rows, n nodes of a level, w nodes of a pass, C children, M candidates, N nodes, D levels, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from inference.models.markov import Term
from inference.models.step import Choose, by_round, in_order
from inference.proposers.base import Proposal, Round, Siblings
from inference.sampling import wide
from inference.verify.tree import MOST_NODES, Tree, best, child_scores, depths_of, levels, likeliest, pruned, ranks_of


class Nodes(NamedTuple):
    """The drafts that one pass reads. All of them have one depth.

    depth: 1 or more. above (1 or A, n): for each node, the index of its parent among the nodes of the previous pass;
    None if both passes have one node. tree: a tree whose last n nodes are these; None for a chain.
    """

    depth: int
    above: Tensor | None = None
    tree: Tree | None = None

    def of_parents(self, values: Tensor) -> Tensor:
        """Return the values (A, n, ...) of these nodes' parents, from the values (A, m, ...) of the nodes of the
        previous pass."""
        if self.above is None:
            return values
        return values[torch.arange(len(values), device=values.device).unsqueeze(1), self.above]


# ids (A, n) of nodes -> logits (A, n, V) after them; called level after level
Follow = Callable[[Tensor, Nodes], Tensor]


def one_by_one(
    K: int, logits: Tensor, follow: Follow, choose: Choose, goes_on: Callable[[int], bool] = lambda depth: True
) -> tuple[Tensor, Tensor]:
    """Draft a chain, one token after the other. Returns drafts (A, K) and the distributions (A, K, V) they were drawn
    from. logits (A, V): after the texts. goes_on: see `Round.goes_on`; fewer tokens are drafted if it returns False."""
    drafts: list[Tensor] = []
    distributions: list[Tensor] = []
    for depth in range(K):
        if depth and not goes_on(depth - 1):
            break
        last = logits if depth == 0 else follow(drafts[-1].to(logits.device).unsqueeze(1), Nodes(depth))[:, 0]
        ids, probs = choose(last, drafts)
        drafts.append(ids)
        distributions.append(probs)
    return torch.stack(drafts, 1), torch.stack(distributions, 1)


def of_depths(logits: Tensor, term: Term | None = None) -> Follow:
    """Return a `Follow` for logits (A, K, V) of one pass. Entry j is for all nodes of depth j; the term of each node is
    added."""

    def follow(ids: Tensor, nodes: Nodes) -> Tensor:
        of_depth = logits[:, nodes.depth : nodes.depth + 1]
        return of_depth.expand(-1, ids.shape[1], -1) if term is None else of_depth + term(ids)

    return follow


def after_anchor(logits: Tensor, anchor: Tensor, term: Term | None) -> tuple[Tensor, Follow]:
    """Return the logits (A, V) of the first drafts, and the `Follow` of later ones, from logits (A, K, V) of one pass.
    anchor (A,): the tokens before the first drafts."""
    first = logits[:, 0]
    return first if term is None else first + term(anchor.unsqueeze(1))[:, 0], of_depths(logits, term)


def from_one_pass(
    round: Round, logits: Tensor, shape: "StaticTrees | DynamicTrees | None", greedy: bool,
    anchor: Tensor, term: Term | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return drafts and the distributions they were drawn from, given logits (A, K, V) of one pass. They are trees of a
    shape, or chains. anchor (A,): the last tokens of the texts. term: adds a term for the token before each draft to
    its logits."""
    if shape:
        return shape.grown(round, logits.shape[1], *after_anchor(logits, anchor, term), greedy)
    return in_order(by_round(round, greedy), logits, anchor, term)


@dataclass(frozen=True)
class Dynamic:
    """The sizes of a dynamic shape. nodes: number of nodes that a round verifies. depth: number of levels. width: how
    many nodes of a level the draft reads. children: number of children per node that is read. Raises ValueError for
    sizes below 1 and for more nodes than a pass supports."""

    nodes: int
    depth: int
    width: int
    children: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"shape: {name}={value} must be at least 1")
        for name, value in {"nodes": self.nodes, "(depth - 1) * width": (self.depth - 1) * self.width}.items():
            if value > MOST_NODES:
                raise ValueError(f"shape: {name} is {value}; a pass reads at most {MOST_NODES} nodes")


TreeShape = Sequence[int] | Dynamic | None


def trees_of(shape: TreeShape) -> "StaticTrees | DynamicTrees | None":
    """Return the drafter of trees of a shape, or None for chains. Raises the errors of `StaticTrees`."""
    if isinstance(shape, Dynamic):
        return DynamicTrees(shape)
    return StaticTrees(shape) if shape else None


class StaticTrees:
    """A drafter of trees with a static shape. It runs one pass per level.

    parents: node i has parent parents[i] < i, -1 for the anchor; siblings are verified in their order. Nodes are
    renumbered level by level (`parents` of this object), and siblings stay in order. depth: number of levels. counts:
    number of nodes within each depth 0 .. depth. trees: the shape down to each depth 1 .. depth. Raises ValueError for
    a tree without nodes, for a node before its parent and for more nodes than a pass supports.
    """

    unread = 0  # nodes of an accepted path, above the last level, that the draft may not have read

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = by_level(tuple(parents))
        depths = depths_of(self.parents)
        self.depth = max(depths, default=0)
        self.counts = [sum(own <= depth for own in depths) for depth in range(self.depth + 1)]
        self.room = self.counts[-1]  # slots of the draft that a round may use
        Tree(self.parents)
        self.trees = [Tree(self.parents[:count]) for count in self.counts[1:]]

    def require(self, vocabulary: int, depths: int | None = None) -> None:
        """Raise ValueError if a node has more children than there are tokens, or if there are more levels than
        `depths`."""
        most = max(ranks_of(self.parents)) + 1
        if most > vocabulary:
            raise ValueError(f"shape: a node has {most} children, but there are {vocabulary} tokens: give it fewer")
        if depths is not None and self.depth > depths:
            raise ValueError(f"shape: its trees have {self.depth} levels, the draft at most {depths}: give fewer")

    def nodes(self, k: Sequence[int]) -> list[int]:
        """Return the number of nodes of each row that drafts k levels: all nodes of these levels."""
        return [self.counts[min(levels, self.depth)] for levels in k]

    def numbers(self, k: Sequence[int]) -> dict[str, list[int]]:
        """Return the numbers that `grown` needs on the device, besides the number of nodes of each row. A static shape
        needs none."""
        return {}

    def grown(
        self, round: Round, depth: int, logits: Tensor, follow: Follow, likeliest: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the nodes (A, N) of the first `depth` levels, 1 or more, and the distributions (A, N, V) they were
        drawn from. This is a function of tensors. logits (A, V): after each text. likeliest: children are the likeliest
        tokens; otherwise they are drawn without replacement (see `Round.children`)."""
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
        """Return the accepted nodes path (A, D), with -1 for nodes of the last of `depth` levels, which no pass
        read."""
        return torch.where(path < self.counts[min(depth, self.depth) - 1], path, -1)

    def proposal(self, k: Sequence[int], x: Tensor, q: Tensor) -> Proposal:
        """Return the proposal of rows that draft k levels, from the results of `grown`."""
        return Proposal(x, q, self.nodes(k), self.trees[self.counts.index(x.shape[1]) - 1])


class LevelStep(NamedTuple):
    """A level of a static shape.

    siblings: the nodes of the level above that have children. inner: their indices in that level, None for all of its
    nodes. parent: for each node of this level, the index of its parent among those nodes. rank: for each node, the
    number of siblings before it. above (1, n): as in `Nodes`.
    """

    siblings: Siblings
    inner: Tensor | None
    parent: Tensor
    rank: Tensor
    above: Tensor

    def of_parents(self, logits: Tensor) -> Tensor:
        """Return the logits of those nodes of the level above that have children, given the logits of that level."""
        return logits if self.inner is None else logits.index_select(1, self.inner)


def by_level(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with its nodes numbered level by level, siblings in their order."""
    depths = depths_of(parents)
    order = sorted(range(len(parents)), key=depths.__getitem__)
    number = {node: index for index, node in enumerate(order)}
    return tuple(number[parents[node]] if parents[node] >= 0 else -1 for node in order)


@cache  # CUDA graphs may read these tensors, so none is dropped
def _steps(parents: tuple[int, ...], device: torch.device) -> tuple[LevelStep, ...]:
    """Return the levels of a shape. The result is cached by shape, so that no round copies it to the device again."""
    steps: list[LevelStep] = []
    above: tuple[int, ...] = (-1,)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for level in levels(parents):
        inner = sorted(set(level.above))
        own = [above[index] for index in inner]
        first = tuple(parents.index(node) for node in own)
        keys = torch.tensor([node + 1 for node in own], device=device)
        siblings = Siblings(max(level.rank) + 1, tuple(paths[node] for node in own), first, keys)
        paths |= {node: (*paths[parents[node]], node) for node in level.nodes}
        lists = [inner, [inner.index(index) for index in level.above], list(level.rank), list(level.above)]
        here, parent, rank, indices = (torch.tensor(part, device=device) for part in lists)
        steps.append(
            LevelStep(siblings, None if len(inner) == len(above) else here, parent, rank, indices.unsqueeze(0))
        )
        above = level.nodes
    return tuple(steps)


class DynamicTrees:
    """A drafter of trees with a `Dynamic` shape, the counterpart of `StaticTrees`. depth: number of levels. widths:
    nodes of each pass, the anchor's pass first. counts: candidates within each depth 0 .. depth.

    A candidate's score is the log probability of its path under the draft. One pass per level reads the `width`
    candidates of highest score, and each of them gives `children` candidates for the next level. Of all candidates, the
    `nodes` with the highest scores are verified.

    Children are always the likeliest tokens. These follow from the text alone, so rules for trees are exact at any
    temperature. With sampled children, the drawn token would decide whether a node is in the tree.
    """

    unread = 1  # nodes at the end of an accepted path that the draft may not have read

    def __init__(self, shape: Dynamic) -> None:
        self.shape, self.depth = shape, shape.depth
        self.widths, self.counts = [1], [0, shape.children]
        for _ in range(1, shape.depth):
            self.widths.append(min(shape.width, self.widths[-1] * shape.children))
            self.counts.append(self.counts[-1] + self.widths[-1] * shape.children)
        self.room = sum(self.widths[1:])  # slots of the draft that a round may use
        # (A, N): for the nodes of the last round, their numbers among the nodes that were read, -1: not read
        self.passes: Tensor

    def require(self, vocabulary: int, depths: int | None = None) -> None:
        """Raise ValueError if a node has more children than there are tokens, or if there are more levels than
        `depths`."""
        if self.shape.children > vocabulary:
            raise ValueError(f"shape: children={self.shape.children}, but there are {vocabulary} tokens: give fewer")
        if depths is not None and self.depth > depths:
            raise ValueError(f"shape: its trees have {self.depth} levels, the draft at most {depths}: give fewer")

    def nodes(self, k: Sequence[int]) -> list[int]:
        """Return the number of nodes of each row that drafts k levels."""
        return [min(self.counts[min(levels, self.depth)], self.shape.nodes) for levels in k]

    def numbers(self, k: Sequence[int]) -> dict[str, list[int]]:
        """Return the numbers that `grown` needs on the device: the levels of each row."""
        return {"levels": list(k)}

    def grown(
        self, round: Round, depth: int, logits: Tensor, follow: Follow, likeliest: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return ids and parents (A, N) of the nodes in at most `depth` levels, given logits (A, V) after each text. No
        node of a row is deeper than the row's own levels. `likeliest` is ignored, since children are always the
        likeliest tokens."""
        levels, candidates = round.send()["levels"].to(logits.device), Candidates(logits, round)
        above, C = logits.unsqueeze(1), self.shape.children
        for level in range(depth):
            if level:
                ids, nodes = candidates.expand(self.widths[level], C)
                above = follow(ids, nodes)
            candidates.add(above, C, level < levels)
        x, parents, self.passes = candidates.select(min(self.shape.nodes, self.counts[depth]))
        return x, parents

    def proposal(self, k: Sequence[int], x: Tensor, parents: Tensor) -> Proposal:
        """Return the proposal of rows that draft k levels, from the results of `grown`."""
        return Proposal(x, None, self.nodes(k), Tree(parents))

    def stored(self, path: Tensor, depth: int) -> Tensor:
        """Return the accepted nodes path (A, D), by their numbers among the nodes that were read. -1 means not read, or
        no node."""
        return torch.where(path < 0, -1, self.passes.gather(1, path.clamp(min=0)))


class Candidates:
    """The candidates of one round's dynamic tree. x, score, parents (A, M): their ids, scores and parents, level after
    level."""

    def __init__(self, logits: Tensor, round: Round) -> None:
        A, self.round = len(logits), round
        self.x, self.parents, self.read = (logits.new_empty(A, 0, dtype=torch.int64) for _ in range(3))
        self.score = wide(logits).new_empty(A, 0)
        self.above, self.reading = self.x.new_full((A, 1), -1), wide(logits).new_zeros(A, 1)  # of the last pass
        self.within = self.read  # parents of the nodes that were read, among themselves
        self.level, self.depth = 0, 0  # candidates before the newest level; its depth

    def add(self, logits: Tensor, C: int, allowed: Tensor) -> None:
        """Add C children of each node of the last pass. logits (A, w, V): of that pass. allowed (A,): the rows that get
        children."""
        self.round.left_out(logits, C, 1)
        score = child_scores(self.reading, wide(logits).softmax(-1).clamp(max=1), C).flatten(1)
        score = torch.where(allowed.unsqueeze(1), score.nan_to_num(-torch.inf, neginf=-torch.inf), -torch.inf)
        self.level, self.depth = self.x.shape[1], self.depth + 1
        self.x = torch.cat((self.x, likeliest(logits, C).flatten(1)), 1)
        self.score = torch.cat((self.score, score), 1)
        self.parents = torch.cat((self.parents, self.above.repeat_interleave(C, 1)), 1)

    def expand(self, width: int, C: int) -> tuple[Tensor, Nodes]:
        """Return the candidates (A, width) of the newest level that the next pass reads."""
        self.round.left_out(self.score[:, self.level :], width, self.depth)
        chosen = best(self.score[:, self.level :], width)
        above, before = chosen // C, self.within.shape[1] - self.above.shape[1]  # read before the last pass
        parents = above + before if self.depth > 1 else torch.full_like(above, -1)
        self.within = torch.cat((self.within, parents), 1)
        self.above, self.reading = chosen + self.level, self.score.gather(1, chosen + self.level)
        self.read = torch.cat((self.read, self.above), 1)
        return self.x.gather(1, self.above), Nodes(self.depth, above, Tree(self.within))

    def select(self, N: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the N likeliest candidates, (A, N) each: ids, parents, and their numbers among the nodes that were
        read, or -1."""
        self.round.left_out(self.score, N, self.depth)
        nodes, parents = pruned(self.parents, self.score, N)
        order = torch.arange(self.read.shape[1], device=nodes.device).expand_as(self.read)
        passes = torch.full_like(self.parents, -1).scatter(1, self.read, order).gather(1, nodes)
        return self.x.gather(1, nodes), parents, passes
