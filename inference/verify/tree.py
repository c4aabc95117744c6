"""Verification of trees of drafts as pure functions: distributions, drafts and uniforms in, an accepted path and a
distribution out.

B rows, N nodes, V vocabulary, D levels. Node i hangs on node parents[i] < i, or on the anchor where that is -1; nodes
of one parent are siblings, tried in the order of their numbers. p (B, N+1, V): column 0 is the target's distribution
after the anchor, column i + 1 that after node i. q (B, N, V): the draft's distribution at node i's parent, the same for
all its children; None where children are deterministic (the likeliest ones), each child's distribution being one-hot
then. x (B, N) drafted ids. u (B, N) uniforms in [0, 1): node i is tested with u[:, i] and passes where u < threshold,
strictly. k (B,) nodes in
use: a row has its first k_b nodes, nothing past them is read. Children of a parent were drawn without replacement
unless `replacement` says so. A node whose own draft gives it no mass (more children than tokens) is never accepted and
changes nothing. Computed in the inputs' dtype, float32 at least; nothing is read on the host.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from inference.sampling import one_hot, wide
from inference.verify.chain import continued

Parents = tuple[int, ...] | Tensor


class TreeVerification(NamedTuple):
    """accepted (B,) int64 nodes accepted; path (B, D) int64 their numbers from the anchor down, -1 past the last;
    distribution (B, V) of the token emitted after them, summing to 1."""

    accepted: Tensor
    path: Tensor
    probs: Tensor


class Steps(NamedTuple):
    """parents (R, N) with R = 1 for all rows or B; nodes that are judged together, no two of one parent, none before
    its parent and earlier siblings; whether all of a step are first children; the number of levels."""

    parents: Tensor
    nodes: tuple[Tensor, ...]
    first: tuple[bool, ...]
    depth: int


def tree(
    p: Tensor, q: Tensor | None, x: Tensor, parents: Parents, u: Tensor, k: Tensor | None = None, *,
    replacement: bool = False,
) -> TreeVerification:  # fmt: skip
    """Multi-round verification from the anchor down (Miao et al. 2024, 2305.09781; Chen et al. 2024, 2402.12374).

    At a node with distributions p and q its children are tried in order: child x is accepted where u < p(x) / q(x); a
    refusal makes p = norm(max(p - q, 0)) and takes x out of q, renormalised, where children were drawn without
    replacement. The token emitted at the end has the p of the last accepted node after its children's refusals. On a
    chain this is `chain.token`. Shapes as above; parents: a tuple of N ints, whose siblings are judged at once, or (B,
    N) where rows differ ((1, N) or (N,) of all rows alike).
    """
    steps, there = steps_of(parents, x, by_level=False), used(x, k)
    chances, rest = _judge(p, q, x, steps, there, replacement, carry=False)
    return walk(there & (u < chances), rest, steps)


def traversal(
    p: Tensor, q: Tensor | None, x: Tensor, parents: Parents, u: Tensor, k: Tensor | None = None, *,
    replacement: bool = False,
) -> TreeVerification:  # fmt: skip
    """Traversal verification from the leaves up (Weng et al. 2025, 2505.12398).

    Never fewer tokens than `tree` where each sibling's subtree holds the shapes of later ones' (as grown shapes do);
    where a later sibling goes deeper it can be fewer, since an earlier one takes acceptance from it.

    visit(node, w): each child x in order is visited with w_c = min(w p(x)/q(x), 1); where its subtree accepts, done;
    else R = max(w p - q, 0), w = sum R / (sum R + 1 - w) with 0/0 = 1, p = norm(R), q as in `tree`. Then the node is
    accepted where u < w, and the token comes from p. visit(anchor, 1). On a chain this is `chain.block`.
    """
    steps, there = steps_of(parents, x, by_level=True), used(x, k)
    chances, rest = _judge(p, q, x, steps, there, replacement, carry=True)
    passed = there & (u < chances)
    return walk((subtrees(steps) & passed.unsqueeze(1)).any(-1), rest, steps)


def coupled(p: Tensor, x: Tensor, parents: Parents, g: Tensor, k: Tensor | None = None) -> TreeVerification:
    """Gumbel coupling on a tree: down to each child that is y = argmax(log p + g) at its parent; the distribution is
    the one-hot of the y where no child is. On a chain this is `chain.coupled`: the text is that of plain decoding with
    this noise.

    g (B, N+1, V) Gumbel noise of the place behind each column, the same for all nodes of one depth.
    """
    y, steps = (wide(p).log() + g).argmax(-1), steps_of(parents, x, by_level=True)  # (B, N+1)
    wanted = y.gather(1, (steps.parents + 1).expand_as(x))
    return walk(used(x, k) & (x == wanted), one_hot(y, wide(p)), steps)


def _judge(
    p: Tensor, q: Tensor | None, x: Tensor, steps: Steps, there: Tensor, replacement: bool, carry: bool
) -> tuple[Tensor, Tensor]:
    """Threshold of each node (B, N), and p (B, N+1, V) of each after its children were refused. carry: w goes down the
    tree and up with refusals, else it is 1 at every node that is tried."""
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)  # (B, 1)
    x = torch.where(there, x, 0)
    rest = wide(p).clone()
    tried = None if q is None or replacement or all(steps.first) else torch.zeros_like(rest, dtype=torch.bool)
    w = torch.ones_like(rest[..., 0])  # (B, N+1)
    for nodes, first in zip(steps.nodes, steps.first, strict=True):
        at = steps.parents[:, nodes] + 1  # (R, n)
        here, token = rest[rows, at], x[:, nodes]
        before = None if tried is None or first else tried[rows, at]
        weight = w[rows, at] if carry else torch.ones_like(here[..., 0])
        chance, refused, held = _round(here, _draft_probs(q, nodes, before), token, weight)
        real = there[:, nodes] & held
        w[:, nodes + 1] = torch.where(real, chance, 0.0)
        rest[rows, at] = torch.where(real.unsqueeze(-1), _normalised(refused, here), here)
        if carry:
            w[rows, at] = torch.where(real, continued(refused.sum(-1), weight), weight)
        if tried is not None:
            tried[rows, at, token] |= real
    return w[:, 1:], rest


def _round(p: Tensor, q: Tensor | None, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One child of each node: min(w p(x)/q(x), 1), 0 where p is 0; what a refusal leaves, max(w p - q, 0); whether q
    gives x mass. p, q (B, n, V), x, w (B, n)."""
    at = x.unsqueeze(-1)
    px = p.gather(-1, at).squeeze(-1)
    if q is None:
        left = (w.unsqueeze(-1) * p).scatter(-1, at, 0.0)
        return w * px, left, torch.ones_like(px, dtype=torch.bool)
    qx = q.gather(-1, at).squeeze(-1)
    chance = torch.where((px > 0) & (w > 0), w * (px / qx), 0.0).clamp(max=1)
    return chance, (w.unsqueeze(-1) * p - q).clamp(min=0), qx > 0


def _draft_probs(q: Tensor | None, nodes: Tensor, tried: Tensor | None) -> Tensor | None:
    """Distributions (B, n, V) that nodes were drawn from: their parent's, without the siblings `tried` (B, n, V) before
    them."""
    if q is None:
        return None
    probs = wide(q[:, nodes])
    if tried is None:
        return probs
    left = probs.masked_fill(tried, 0.0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(tried.any(-1, keepdim=True), torch.where(mass > 0, left / mass, 0.0), probs)


def _normalised(rest: Tensor, p: Tensor) -> Tensor:
    """norm(rest), p where no mass is left: (B, n, V)."""
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def walk(passed: Tensor, rest: Tensor, steps: Steps) -> TreeVerification:
    """Down from the anchor, always to the first child that passed (B, N), with the distribution where it ends."""
    at, path = torch.full_like(passed[:, :1], -1, dtype=torch.int64), []
    for _ in range(steps.depth):
        fits = passed & (steps.parents == at)  # (B, N)
        moved, child = fits.any(-1, keepdim=True), fits.to(torch.uint8).argmax(-1, keepdim=True)
        path.append(torch.where(moved, child, -1))
        at = torch.where(moved, child, at)
    found = torch.cat(path, 1) if path else torch.empty_like(passed, dtype=torch.int64)
    end = at if path else torch.full_like(rest[:, :1, 0], -1, dtype=torch.int64)
    rows = torch.arange(rest.shape[0], device=rest.device)
    return TreeVerification((found >= 0).sum(-1), found, rest[rows, end.squeeze(-1) + 1])


def used(x: Tensor, k: Tensor | None) -> Tensor:
    """Which of the N nodes each row has (B, N)."""
    if k is None:
        return torch.ones_like(x, dtype=torch.bool)
    return torch.arange(x.shape[1], device=x.device) < k.unsqueeze(-1)


def subtrees(steps: Steps) -> Tensor:
    """Whether node j is node i or hangs below it: (R, N, N) at i, j."""
    N = steps.parents.shape[1]
    number = torch.arange(N, device=steps.parents.device)
    above = number.expand_as(steps.parents)  # (R, N)
    under = torch.zeros(len(above), N, N, dtype=torch.bool, device=above.device)
    for _ in range(steps.depth):
        under |= number.unsqueeze(-1) == above.unsqueeze(1)
        above = torch.where(above >= 0, steps.parents.gather(1, above.clamp(min=0)), -1)
    return under


def steps_of(parents: Parents, x: Tensor, by_level: bool) -> Steps:
    """Of one topology: siblings' places, level by level where a level must wait for the one above it. Of topologies
    that differ by row: node after node."""
    if isinstance(parents, Tensor):
        nodes = torch.arange(x.shape[1], device=x.device).split(1)
        each = parents if parents.ndim == 2 else parents.unsqueeze(0)
        return Steps(each, nodes, tuple(i == 0 for i in range(len(nodes))), len(nodes))
    if len(parents) != x.shape[1]:
        raise ValueError(f"parents names {len(parents)} nodes, x has {x.shape[1]}: one parent a node")
    return _static_steps(parents, x.device, by_level)


@lru_cache(maxsize=256)
def _static_steps(parents: tuple[int, ...], device: torch.device, by_level: bool) -> Steps:
    """Kept by topology, so that no round copies it to the device again."""
    depths, ranks = depths_of(parents), ranks_of(parents)
    keys = [(depth if by_level else 0, rank) for depth, rank in zip(depths, ranks, strict=True)]
    steps = sorted(set(keys))
    nodes = tuple(torch.tensor([i for i, key in enumerate(keys) if key == step], device=device) for step in steps)
    above = torch.tensor([parents], dtype=torch.int64, device=device)
    return Steps(above, nodes, tuple(rank == 0 for _, rank in steps), max(depths, default=0))


def depths_of(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of each node, 1 for children of the anchor. Raises ValueError where a node stands before its parent."""
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}] = {parent}: a node hangs on an earlier one, or on the anchor, -1")
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return tuple(depths)


def ranks_of(parents: tuple[int, ...]) -> tuple[int, ...]:
    """How many siblings stand before each node."""
    return tuple(parents[:node].count(parent) for node, parent in enumerate(parents))
