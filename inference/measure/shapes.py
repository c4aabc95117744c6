"""Which tree of drafts to serve: grown by the exact calls that each node saves on texts, under measured costs.

accept (B, T, C) or (B, T, K, C), lengths (B,): as in `verify.tree_prediction`, on texts of the target. parents: as in
`proposers.topology`. Rounds are verified by `verify.tree`; positional acceptance (`sequoia`) is there to compare with.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.measure.costs import Costs
from inference.proposers.topology import from_paths
from inference.verify.prediction import calls_from, starts
from inference.verify.tree import depths_of, ranks_of
from inference.verify.tree_prediction import of_rounds, reach_tree

Parents = tuple[int, ...]
Seconds = Callable[[Parents], float]  # of a round that drafts this tree; () drafts nothing


@dataclass(frozen=True)
class Shape:
    """parents of the nodes; tau: tokens per target call, exact on the texts given; seconds: of a token."""

    parents: Parents
    tau: float
    seconds: float


def round_seconds(costs: Costs) -> Seconds:
    """Seconds of a round from a measured table: a draft step a level, a target pass over the anchor and all nodes, the
    rest of the round. A draft pass over a level is taken to cost what one over one id does."""

    def seconds(parents: Parents) -> float:
        n = len(parents)
        if n >= len(costs.target):
            raise ValueError(f"costs of rounds are measured up to {len(costs.target) - 1} drafts, a tree has {n} nodes")
        return costs.drafting(max(depths_of(parents), default=0)) + costs.target[n] + costs.rest[n]

    return seconds


def grown(accept: Tensor, most: int, depths: Iterable[int], lengths: Tensor | None = None) -> list[Parents]:
    """Trees of every size up to `most`, grown within each of `depths` levels."""
    whole = [grow(accept, most, depth, lengths) for depth in depths]
    return list(dict.fromkeys(tree[:n] for tree in whole for n in range(1, len(tree) + 1)))


def grow(
    accept: Tensor, most: int, depth: int, lengths: Tensor | None = None, tries: int = 4, start: Parents = ()
) -> Parents:
    """A tree of `most` nodes in at most `depth` levels, its nodes in the order in which each saves the most calls: its
    first n nodes are the tree grown to n. Fewer nodes where accept has no more children to give. start: nodes that
    there are already.

    Of each step's candidates (the next child of every node) the `tries` with the largest first-order gain are rated
    exactly, and the one with the fewest calls is taken. All trees of n nodes within a depth cost the same, so costs
    decide between sizes and depths alone.
    """
    tables = [of_rounds(accept, level, lengths) for level in range(depth)]
    whole = torch.ones_like(of_rounds(accept, 0, lengths)[..., 0])
    parents = start
    for _ in range(most - len(start)):
        found = candidates(parents, tables, whole)
        if not found:
            break
        saved = gains(accept, parents, found, lengths)
        order = sorted(found, key=saved.__getitem__, reverse=True)[:tries]
        parents = (*parents, min(order, key=lambda parent: _calls(accept, (*parents, parent), lengths)))
    return parents


def candidates(parents: Parents, tables: Sequence[Tensor], whole: Tensor) -> dict[int, tuple[int, Tensor]]:
    """By parent, the depth of its next child and P(a round that starts at t reaches it | text) (B, T)."""
    depths, ranks = (0, *depths_of(parents)), ranks_of(parents)
    chances = [whole]
    for parent, depth, rank in zip(parents, depths[1:], ranks, strict=True):
        chances.append(chances[parent + 1] * tables[depth - 1][..., rank])
    found = {}
    for node, depth in enumerate(depths, -1):
        rank = parents.count(node)
        if depth < len(tables) and rank < tables[0].shape[-1]:
            found[node] = depth + 1, chances[node + 1] * tables[depth][..., rank]
    return found


def gains(
    accept: Tensor, parents: Parents, found: dict[int, tuple[int, Tensor]], lengths: Tensor | None
) -> dict[int, float]:
    """Calls that each candidate saves, to first order: a round at t that reaches it goes on at t + depth + 1 in place
    of t + depth, sum_t s_t chance_t (E_{t+depth} - E_{t+depth+1}) with E the calls that remain."""
    reach = reach_tree(accept, parents, lengths)
    s, left = starts(reach), calls_left(reach, lengths)  # (B, T), (B, T + K + 1)
    T = s.shape[1]
    left = F.pad(left, (0, T))
    return {
        node: float((s * chance * (left[:, depth : depth + T] - left[:, depth + 1 : depth + 1 + T])).sum())
        for node, (depth, chance) in found.items()
    }


def calls_left(reach: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Expected calls E_t from a round that starts at t to the text's end, 0 past it: (B, T, K+1) -> (B, T + K + 1).

    E_t = 1 + sum_n P(n accepted) E_{t+n+1}.
    """
    B, T, depths = reach.shape
    exactly = reach - F.pad(reach[..., 1:], (0, 1))
    left = reach.new_zeros(B, T + depths)
    end = torch.full((B,), T, device=reach.device) if lengths is None else lengths.to(reach.device)
    for t in reversed(range(T)):
        now = 1 + (exactly[:, t] * left[:, t + 1 : t + 1 + depths]).sum(-1)
        left[:, t] = torch.where(t < end, now, 0.0)
    return left


def _calls(accept: Tensor, parents: Parents, lengths: Tensor | None) -> float:
    return float(calls_from(reach_tree(accept, parents, lengths), lengths).sum())


def tokens_of(accept: Tensor, lengths: Tensor | None) -> int:
    """Tokens of all texts."""
    return accept.shape[0] * accept.shape[1] if lengths is None else int(lengths.sum())


def positional(accept: Tensor, lengths: Tensor | None = None) -> tuple[float, ...]:
    """Chance that a node's child number c is accepted, c = 0 .. C-1, whatever the context: the mean over tokens, of the
    first level where accept has one axis more."""
    first = of_rounds(accept, 0, lengths)
    return tuple((first.sum((0, 1)) / tokens_of(accept, lengths)).tolist())


def sequoia(chances: Sequence[float], nodes: int, depth: int) -> Parents:
    """The tree of at most `nodes` nodes and `depth` levels with the most accepted tokens if acceptance hung on the
    child's number alone (Chen et al. 2024, 2402.12374): F(n, d) = max over splits of n - 1 nodes among children of
    1 + sum_c chances[c] F(n_c, d - 1)."""

    @cache
    def subtree(n: int, d: int) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """Value and paths of n nodes, their top one included, with at most d levels below it."""
        value, paths = shared(n - 1, 0, d)
        return 1 + value, paths

    @cache
    def shared(n: int, child: int, d: int) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """Value and paths of n nodes among children number child, child + 1, ..."""
        if n == 0 or d == 0 or child == len(chances):
            return 0.0, ()
        best: tuple[float, tuple[tuple[int, ...], ...]] = (-1.0, ())
        for own in range(1, n + 1):
            (here, inside), (there, others) = subtree(own, d - 1), shared(n - own, child + 1, d)
            if chances[child] * here + there > best[0] + 1e-15:
                below = ((child,), *((child, *path) for path in inside))
                best = chances[child] * here + there, below + others
        return best

    return from_paths(shared(nodes, 0, depth)[1])
