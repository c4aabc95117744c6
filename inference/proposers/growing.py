"""Trees whose shape each row's own distributions decide, round by round (EAGLE-2: Li et al. 2024, 2406.16858).

A candidate's score is the log probability of its path under the draft. Of every level the `width` likeliest candidates
are read, in one pass, and each gives `children` candidates of the next; of all candidates the `nodes` likeliest are
verified. Children are always the likeliest tokens: which token a child is must not decide whether it is one, and of
likeliest ones both follow from the text alone, so that rules for trees stay exact at any temperature.
A rows, w nodes of a pass, C children, M candidates, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.models.passes import MOST_NODES, Tree
from inference.proposers.base import Proposal, Round
from inference.proposers.branching import Branching, Follow, Nodes
from inference.proposers.topology import best, child_scores, likeliest, pruned
from inference.sampling import wide


@dataclass(frozen=True)
class Dynamic:
    """nodes: of a round, all that are verified; depth: levels; width: nodes of a level that are read; children: of
    each. Raises ValueError for sizes below 1 and for more nodes than a pass takes."""

    nodes: int
    depth: int
    width: int
    children: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"shape: {name}={value}; 1 or more")
        for name, value in {"nodes": self.nodes, "(depth - 1) * width": (self.depth - 1) * self.width}.items():
            if value > MOST_NODES:
                raise ValueError(f"shape: {name} is {value}; at most {MOST_NODES} nodes are read at once")


class Growing:
    """As `branching.Branching`, of a `Dynamic` shape. depth: levels; widths: nodes of each pass, that of the anchor
    first; counts: candidates within each depth 0 .. depth."""

    unread = 1  # of an accepted path, how many nodes at its end the draft may not have read

    def __init__(self, shape: Dynamic) -> None:
        self.shape, self.depth = shape, shape.depth
        self.widths, self.counts = [1], [0, shape.children]
        for _ in range(1, shape.depth):
            self.widths.append(min(shape.width, self.widths[-1] * shape.children))
            self.counts.append(self.counts[-1] + self.widths[-1] * shape.children)
        self.room = sum(self.widths[1:])  # slots of the draft that a round may take
        # (A, N) of the last round's nodes, their numbers among those that were read, -1: it was not
        self.passes: Tensor

    def require(self, vocabulary: int, depths: int | None = None) -> None:
        """Raise ValueError for more children than tokens, and for more levels than `depths`."""
        if self.shape.children > vocabulary:
            raise ValueError(f"shape: a node has {self.shape.children} children, the vocabulary {vocabulary} tokens")
        if depths is not None and self.depth > depths:
            raise ValueError(f"shape: its trees have {self.depth} levels, the draft guesses {depths}; leave some out")

    def nodes(self, k: Sequence[int]) -> list[int]:
        """Nodes of each row that is to draft k levels."""
        return [min(self.counts[min(levels, self.depth)], self.shape.nodes) for levels in k]

    def numbers(self, k: Sequence[int]) -> dict[str, list[int]]:
        """What `grown` needs on the device: levels of each row."""
        return {"levels": list(k)}

    def grown(
        self, round: Round, depth: int, logits: Tensor, follow: Follow, likeliest: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Ids and parents (A, N) of the nodes, of at most `depth` levels, from logits (A, V) behind each text; none of
        a row is deeper than its own levels. Children are the likeliest, also where that is not asked."""
        levels, candidates = round.send()["levels"].to(logits.device), Candidates(logits, round)
        behind, C = logits.unsqueeze(1), self.shape.children
        for level in range(depth):
            if level:
                ids, nodes = candidates.expand(self.widths[level], C)
                behind = follow(ids, nodes)
            candidates.add(behind, C, level < levels)
        x, parents, self.passes = candidates.kept(min(self.shape.nodes, self.counts[depth]))
        return x, parents

    def proposal(self, k: Sequence[int], x: Tensor, parents: Tensor) -> Proposal:
        """Of rows that were to draft k levels, from what was `grown`."""
        return Proposal(x, None, self.nodes(k), Tree(parents))

    def stored(self, path: Tensor, depth: int) -> Tensor:
        """Nodes path (A, D) that were accepted, as their pass numbered them; -1: it was not read, or there is none."""
        return torch.where(path < 0, -1, self.passes.gather(1, path.clamp(min=0)))


Shape = Sequence[int] | Dynamic | None


def trees_of(shape: Shape) -> Branching | Growing | None:
    """How trees of a shape are drafted; None for chains. Raises as `Branching`."""
    if isinstance(shape, Dynamic):
        return Growing(shape)
    return Branching(shape) if shape else None


class Candidates:
    """What one round's tree is chosen from: ids x, scores and parents (A, M), level after level."""

    def __init__(self, logits: Tensor, round: Round) -> None:
        A, self.round = len(logits), round
        self.x, self.parents, self.read = (logits.new_empty(A, 0, dtype=torch.int64) for _ in range(3))
        self.score = wide(logits).new_empty(A, 0)
        self.above, self.reading = self.x.new_full((A, 1), -1), wide(logits).new_zeros(A, 1)  # of the last pass
        self.within = self.read  # parents of the nodes that were read, among themselves
        self.level, self.depth = 0, 0  # candidates before the newest level; its depth

    def add(self, logits: Tensor, C: int, allowed: Tensor) -> None:
        """C children of each node of the last pass, logits (A, w, V); none of rows that are not allowed (A,)."""
        self.round.left_out(logits, C, 1)
        score = child_scores(self.reading, wide(logits).softmax(-1).clamp(max=1), C).flatten(1)
        score = torch.where(allowed.unsqueeze(1), score.nan_to_num(-torch.inf, neginf=-torch.inf), -torch.inf)
        self.level, self.depth = self.x.shape[1], self.depth + 1
        self.x = torch.cat((self.x, likeliest(logits, C).flatten(1)), 1)
        self.score = torch.cat((self.score, score), 1)
        self.parents = torch.cat((self.parents, self.above.repeat_interleave(C, 1)), 1)

    def expand(self, width: int, C: int) -> tuple[Tensor, Nodes]:
        """The candidates (A, width) of the newest level that the next pass reads."""
        self.round.left_out(self.score[:, self.level :], width, self.depth)
        places = best(self.score[:, self.level :], width)
        above, before = places // C, self.within.shape[1] - self.above.shape[1]  # read before the last pass
        parents = above + before if self.depth > 1 else torch.full_like(above, -1)
        self.within = torch.cat((self.within, parents), 1)
        self.above, self.reading = places + self.level, self.score.gather(1, places + self.level)
        self.read = torch.cat((self.read, self.above), 1)
        return self.x.gather(1, self.above), Nodes(self.depth, above, Tree(self.within))

    def kept(self, N: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the N likeliest, (A, N) each: ids, parents, and their numbers among the nodes that were read or -1."""
        self.round.left_out(self.score, N, self.depth)
        nodes, parents = pruned(self.parents, self.score, N)
        order = torch.arange(self.read.shape[1], device=nodes.device).expand_as(self.read)
        passes = torch.full_like(self.parents, -1).scatter(1, self.read, order).gather(1, nodes)
        return self.x.gather(1, nodes), parents, passes
