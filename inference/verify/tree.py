"""Trees of drafts: their shapes, the children of their nodes, and the rules that verify them. All are pure functions.

A or B rows, N nodes, V vocabulary, D levels, n nodes of a level, C or m children of a node. A node is a draft. Node i's
parent is node parents[i] < i, or the anchor (the text's last token) if parents[i] is -1. Siblings are tried in the
order of their numbers. A tree's shape is the tuple of its nodes' parents; each level is drafted with one pass
(`levels`).

Arguments of the rules: p (B, N+1, V): the target's distributions, after the anchor in column 0 and after node i in
column i + 1. q (B, N, V): the draft's distribution after node i's parent, equal for all children of this parent; None
if children are deterministic (the likeliest tokens), with one-hot distributions. x (B, N): drafted ids. u (B, N):
uniforms in [0, 1); node i passes if u[:, i] < threshold, strictly. k (B,): number of nodes in use; row b has the first
k[b] nodes, and later ones are not read.

Children of a parent are drawn without replacement. A node that has no mass under q (more children than tokens) is never
accepted and changes nothing. Results have the inputs' dtype, or float32 if that is wider; nothing is read on the host.
"""

import copy
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from inference.sampling.distributions import at_ids, is_missing, one_hot, wide
from inference.verify.chain import continued

MOST_NODES = 62  # of a tree: ancestors of a node are bits of one int64; one bit is for the anchor, the last is unused


class Tree:
    """The shape of a tree of drafts (SpecInfer: Miao et al. 2023, 2305.09781). Node i's parent is node parents[i] < i,
    or the anchor (the text's last token) if parents[i] is -1.

    parents: N numbers. In a pass, column 0 is the anchor and column i + 1 is node i. Attributes: shape, the numbers as
    a tuple; depths (1, N + 1), for each column its depth, 0 for the anchor; seen (1, N + 1), for each column the
    columns that it attends to (itself and its ancestors), as bits of an int64. Raises ValueError for more than
    `MOST_NODES` nodes and for a parent that does not come before its child.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        self.shape, self.nodes = tuple(parents), len(parents)
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"parents has {self.nodes} nodes: give a tree of 1 to {MOST_NODES} nodes")
        depths_of(self.shape)  # raises ValueError for wrong parents
        self._elsewhere: dict[torch.device, Tree] = {}
        self._put(torch.tensor(self.shape))

    def _put(self, parents: Tensor) -> None:
        self.parents = parents  # (N,) int64
        self.depths, self.seen = _ancestry(parents.unsqueeze(0))

    def on(self, device: torch.device) -> "Tree":
        """Return the tree with its tensors on a device. They are copied there once."""
        if self.parents.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = tree = copy.copy(self)
            tree._put(self.parents.to(device))
        return self._elsewhere[device]


def usable_lengths(p: Tensor, q: Tensor | None, k: Tensor, tree: Tree | None = None) -> Tensor:
    """Return the draft lengths (A,) of a chain or a `tree`, cut before the first draft that lacks a distribution: the
    draft's, or the target's before this draft.

    The cut depends only on the drafts before it, so the text's distribution does not change. p (A, N+1, V): the
    target's distributions. q (A, N, V): the draft's, None if drafts are deterministic. k (A,): number of drafts per
    row.
    """
    missing = is_missing(p)
    missing = missing[:, :-1] if tree is None else missing[:, tree.on(p.device).parents + 1]
    if q is not None and q.shape[1]:
        missing = missing | is_missing(q)
    return torch.minimum(k, (~missing).to(torch.int64).cumprod(1).sum(1))


def _ancestry(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each column of a tree's pass, its depth and the columns that it attends to (as bits of an int64),
    both (A, N + 1). parents (A, N). The method is doubling: each step adds the bits of a column's highest known
    ancestor to the column's bits, so the distance to the highest known ancestor doubles."""
    up = torch.nn.functional.pad(parents + 1, (1, 0))  # columns; the anchor is its own parent
    columns = torch.arange(up.shape[1], device=up.device).expand_as(up)
    depths, seen = (columns > 0).to(torch.int64), torch.ones_like(up) << columns
    for _ in range((up.shape[1] - 1).bit_length()):
        depths, seen = depths + depths.gather(1, up), seen | seen.gather(1, up)
        up = up.gather(1, up)
    return depths, seen


def depths_of(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the depth of each node: 1 for children of the anchor. parents: node i has parent parents[i] < i, or -1 for
    the anchor. Raises ValueError if a node comes before its parent."""
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"parents: the parent of node {node} is {parent}; give a node before it, or -1 for the anchor"
            )
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return tuple(depths)


def ranks_of(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Return, for each node, how many siblings come before it. parents: node i has parent parents[i] < i, or -1 for the
    anchor."""
    return tuple(parents[:node].count(parent) for node, parent in enumerate(parents))


class TreeLevel(NamedTuple):
    """The nodes of one depth. nodes: their numbers. above: for each node, the index of its parent in the level above (0
    for the anchor). rank: for each node, how many siblings come before it. If the nodes of the level above have
    children with the ids (A, n, m), this level's ids are [:, above, rank]."""

    nodes: tuple[int, ...]
    above: tuple[int, ...]
    rank: tuple[int, ...]


def chain(n: int) -> tuple[int, ...]:
    """Return the shape of a chain of n drafts."""
    return tuple(range(-1, n - 1))


def full(widths: Sequence[int]) -> tuple[int, ...]:
    """Return the parents of the tree in which every node of depth d has widths[d] children. The anchor has depth 0."""
    parents: list[int] = []
    above = [-1]
    for width in widths:
        first = len(parents)
        parents += [node for node in above for _ in range(width)]
        above = list(range(first, len(parents)))
    return tuple(parents)


def from_paths(paths: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the parents of the tree whose nodes have these paths of child numbers (0-based, like Medusa's `choices`),
    for example (0,), (1,), (0, 0).

    Ancestors of a path and its earlier siblings become nodes too. Nodes are numbered level by level.
    """
    wanted = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    nodes = {(*path[:-1], rank) for path in wanted for rank in range(path[-1] + 1)}
    order = sorted(nodes, key=lambda path: (len(path), path))
    number = {path: i for i, path in enumerate(order)}
    return tuple(number[path[:-1]] if len(path) > 1 else -1 for path in order)


def paths_of(parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return, for each node, the child numbers (0-based) on the path from the anchor down to it. This is the inverse of
    `from_paths`. parents: node i has parent parents[i] < i, or -1 for the anchor."""
    ranks = ranks_of(parents)
    return [tuple(ranks[node] for node in path) for path in node_paths(parents)]


def node_paths(parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return, for each node, the nodes on the path from the anchor down to it, the node itself included. parents: node
    i has parent parents[i] < i, or -1 for the anchor."""
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), node))
    return paths


def levels(parents: tuple[int, ...]) -> tuple[TreeLevel, ...]:
    """Return the nodes of each depth, from depth 1 on. A draft model runs one pass per level. parents: node i has
    parent parents[i] < i, or -1 for the anchor."""
    depths, ranks = depths_of(parents), ranks_of(parents)
    levels, above = [], [-1]
    for depth in range(1, max(depths, default=0) + 1):
        nodes = [node for node, own in enumerate(depths) if own == depth]
        parent = tuple(above.index(parents[node]) for node in nodes)
        levels.append(TreeLevel(tuple(nodes), parent, tuple(ranks[node] for node in nodes)))
        above = nodes
    return tuple(levels)


def sampled(probs: Tensor, g: Tensor, m: int) -> Tensor:
    """Return the ids (A, n, m) of m children of each node, drawn without replacement, in the order of drawing them one
    by one.

    probs (A, n, V): the draft's distributions q. g (A, n, V): standard Gumbel noise. The children are the m largest of
    log q + g, the largest first (Kool et al. 2019, 1903.06059). If fewer than m tokens have mass, the last children
    have none, and the rules for trees never accept them.
    """
    return (probs.to(g.dtype).log() + g).topk(m, dim=-1).indices


def likeliest(probs: Tensor, m: int) -> Tensor:
    """Return the ids (..., m) of the m likeliest tokens, the likeliest first. probs (..., V): distributions or logits.
    Equally likely tokens are in the order of their ids. These tokens have the ranks 0 to m - 1 of
    `predict_tree.rank_of`."""
    left, ids = wide(probs).clone(), []
    for _ in range(m):
        ids.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, ids[-1], -torch.inf)
    return torch.cat(ids, -1)


class TreeVerification(NamedTuple):
    """The result of a rule for trees. accepted (B,): number of accepted nodes, int64. path (B, D): their numbers from
    the anchor down, then -1, int64. probs (B, V): distribution of the token that is emitted after them."""

    accepted: Tensor
    path: Tensor
    probs: Tensor


class Steps(NamedTuple):
    """The order in which nodes are tested. parents (1, N): parent of each node. nodes: for each step, the nodes that
    are tested together; no two of them have the same parent. An earlier sibling is always in an earlier step. first:
    for each step, whether all its nodes are first children. depth: number of levels."""

    parents: Tensor
    nodes: tuple[Tensor, ...]
    first: tuple[bool, ...]
    depth: int


def tree(
    p: Tensor, q: Tensor | None, x: Tensor, parents: tuple[int, ...], u: Tensor, k: Tensor | None = None
) -> TreeVerification:
    """Verify a tree in several rounds, from the anchor down (Miao et al. 2024, 2305.09781; Chen et al. 2024,
    2402.12374).

    At a node with distributions p and q, the children are tried in order: child x is accepted if u < p(x) / q(x). A
    rejection changes p to norm(max(p - q, 0)), removes x from q and renormalises q. The token after the path is drawn
    from the last accepted node's p, as changed by its children's rejections. On a chain this is `chain.token`.

    p (B, N+1, V), q (B, N, V) or None, x (B, N), u (B, N), k (B,) or None: as the module describes them. Raises
    ValueError if x has another number of nodes than `parents`.
    """
    steps, there = steps_of(parents, x, by_level=False), used(x, k)
    chances, rest = _thresholds(p, q, x, steps, there, carry=False)
    return walk(there & (u < chances), rest, steps)


def traversal(
    p: Tensor, q: Tensor | None, x: Tensor, parents: tuple[int, ...], u: Tensor, k: Tensor | None = None
) -> TreeVerification:
    """Verify a tree by traversal, from the leaves up (Weng et al. 2025, 2505.12398).

    In expectation this emits at least as many tokens as `tree` if the subtree of each sibling contains the subtrees of
    its later siblings, as in trees that `cotrain plan` grows. If a later sibling is deeper, it may emit fewer, since
    earlier siblings reduce the acceptance of later ones.

    visit(node, w): visit each child x in order, with w_c = min(w p(x)/q(x), 1). If the child's subtree accepts, stop;
    else set R = max(w p - q, 0), w = sum R / (sum R + 1 - w) with 0/0 = 1, p = norm(R), and q as in `tree`. After the
    last child, accept the node if u < w, and draw the next token from p. Begin with visit(anchor, 1). On a chain this
    is `chain.block`. p (B, N+1, V), q (B, N, V) or None, x (B, N), u (B, N), k (B,) or None: as the module describes
    them.
    """
    steps, there = steps_of(parents, x, by_level=True), used(x, k)
    chances, rest = _thresholds(p, q, x, steps, there, carry=True)
    passed = there & (u < chances)
    return walk((subtrees(steps) & passed.unsqueeze(1)).any(-1), rest, steps)


def coupled(p: Tensor, x: Tensor, parents: tuple[int, ...], g: Tensor, k: Tensor | None = None) -> TreeVerification:
    """Verify a tree by the target's own draws with Gumbel noise: a child is accepted if its token equals y = argmax(log
    p + g) at its parent. The resulting distribution is one-hot at the first y that no child has. On a chain this is
    `chain.coupled`. The text equals the text of plain decoding with this noise.

    p (B, N+1, V): after the anchor (column 0) and after node i (column i + 1). x (B, N): drafted ids. g (B, N+1, V):
    Gumbel noise for the position after each column, equal for all nodes of one depth. k (B,): number of nodes in use,
    None for all.
    """
    y, steps = (wide(p).log() + g).argmax(-1), steps_of(parents, x, by_level=True)  # (B, N+1)
    wanted = y.gather(1, (steps.parents + 1).expand_as(x))
    return walk(used(x, k) & (x == wanted), one_hot(y, wide(p)), steps)


def _thresholds(
    p: Tensor, q: Tensor | None, x: Tensor, steps: Steps, there: Tensor, carry: bool
) -> tuple[Tensor, Tensor]:
    """Return the threshold of each node (B, N), and each column's p after its children were rejected (B, N+1, V). there
    (B, N): whether the row has the node. carry: whether weights w are passed down the tree and change with rejections,
    as in `traversal`; else w is 1 at every node. p, q, x: as the module describes them."""
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)  # (B, 1)
    x = torch.where(there, x, 0)
    rest = wide(p).clone()
    tried = None if q is None or all(steps.first) else torch.zeros_like(rest, dtype=torch.bool)
    w = torch.ones_like(rest[..., 0])  # (B, N+1)
    for nodes, first in zip(steps.nodes, steps.first, strict=True):
        at = steps.parents[:, nodes] + 1  # (1, n)
        here, token = rest[rows, at], x[:, nodes]
        before = None if tried is None or first else tried[rows, at]
        weight = w[rows, at] if carry else torch.ones_like(here[..., 0])
        chance, residual, has_mass = _one_child(here, _draft_probs(q, nodes, before), token, weight)
        real = there[:, nodes] & has_mass
        w[:, nodes + 1] = torch.where(real, chance, 0.0)
        rest[rows, at] = torch.where(real.unsqueeze(-1), _normalised(residual, here), here)
        if carry:
            w[rows, at] = torch.where(real, continued(residual.sum(-1), weight), weight)
        if tried is not None:
            tried[rows, at, token] |= real
    return w[:, 1:], rest


def _one_child(p: Tensor, q: Tensor | None, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors for one child x (B, n) of each of n nodes: its threshold min(w p(x)/q(x), 1), or 0 if p(x)
    is 0, (B, n); the residual max(w p - q, 0) after its rejection, (B, n, V); and whether q gives x mass, (B, n). p, q
    (B, n, V) and w (B, n): of the nodes."""
    px = at_ids(p, x)
    if q is None:
        left = (w.unsqueeze(-1) * p).scatter(-1, x.unsqueeze(-1), 0.0)
        return w * px, left, torch.ones_like(px, dtype=torch.bool)
    qx = at_ids(q, x)
    chance = torch.where((px > 0) & (w > 0), w * (px / qx), 0.0).clamp(max=1)
    return chance, (w.unsqueeze(-1) * p - q).clamp(min=0), qx > 0


def _draft_probs(q: Tensor | None, nodes: Tensor, tried: Tensor | None) -> Tensor | None:
    """Return the distributions (B, n, V) that the nodes (n,) were drawn from. q (B, N, V). tried (B, n, V) bool:
    siblings that were tried before, which are left out; None for none. Return None if q is None."""
    if q is None:
        return None
    probs = wide(q[:, nodes])
    if tried is None:
        return probs
    left = probs.masked_fill(tried, 0.0)
    return torch.where(tried.any(-1, keepdim=True), _normalised(left, 0.0), probs)


def _normalised(rest: Tensor, p: Tensor | float) -> Tensor:
    """Return rest (B, n, V) divided by its sum, or p, (B, n, V) or one number, if the sum is 0."""
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def walk(passed: Tensor, rest: Tensor, steps: Steps) -> TreeVerification:
    """Walk down from the anchor, at each node to the first child that passed, and return the verification. passed (B,
    N). rest (B, N+1, V): distribution of the next token if the walk ends at this column. passed (B, N): whether each
    node passed its test."""
    at, path = torch.full_like(passed[:, :1], -1, dtype=torch.int64), []
    for _ in range(steps.depth):
        fits = passed & (steps.parents == at)  # (B, N)
        moved, child = fits.any(-1, keepdim=True), fits.to(torch.uint8).argmax(-1, keepdim=True)
        path.append(torch.where(moved, child, -1))
        at = torch.where(moved, child, at)
    nodes = torch.cat(path, 1) if path else torch.empty_like(passed, dtype=torch.int64)
    end = at if path else torch.full_like(rest[:, :1, 0], -1, dtype=torch.int64)
    rows = torch.arange(rest.shape[0], device=rest.device)
    return TreeVerification((nodes >= 0).sum(-1), nodes, rest[rows, end.squeeze(-1) + 1])


def used(x: Tensor, k: Tensor | None) -> Tensor:
    """Return a bool tensor (B, N): whether each row has each node. x (B, N): the nodes' ids. k (B,): row b has its
    first k[b] nodes; None for all."""
    if k is None:
        return torch.ones_like(x, dtype=torch.bool)
    return torch.arange(x.shape[1], device=x.device) < k.unsqueeze(-1)


def subtrees(steps: Steps) -> Tensor:
    """Return a bool tensor (1, N, N): entry [_, i, j] is whether node j is node i or a descendant of node i."""
    N = steps.parents.shape[1]
    number = torch.arange(N, device=steps.parents.device)
    above = number.expand_as(steps.parents)  # (1, N)
    under = torch.zeros(len(above), N, N, dtype=torch.bool, device=above.device)
    for _ in range(steps.depth):
        under |= number.unsqueeze(-1) == above.unsqueeze(1)
        above = torch.where(above >= 0, steps.parents.gather(1, above.clamp(min=0)), -1)
    return under


def steps_of(parents: tuple[int, ...], x: Tensor, by_level: bool) -> Steps:
    """Return the steps in which a tree's nodes are tested. Each step has the nodes with one number among their
    siblings: the first children, then the second, and so on; with `by_level`, only the nodes of one level. parents:
    node i has parent parents[i] < i, or -1 for the anchor. Raises ValueError if x (B, N) has another number of nodes.
    """
    if len(parents) != x.shape[1]:
        raise ValueError(f"parents has {len(parents)} nodes, but x has {x.shape[1]}: give one parent per node")
    return _static_steps(parents, x.device, by_level)


@cache  # CUDA graphs may read these tensors, so none is dropped
def _static_steps(parents: tuple[int, ...], device: torch.device, by_level: bool) -> Steps:
    """Return the steps in which a tree's nodes are tested (`steps_of`), on a device. They are cached, so that no round
    copies them to the device again."""
    depths, ranks = depths_of(parents), ranks_of(parents)
    keys = [(depth if by_level else 0, rank) for depth, rank in zip(depths, ranks, strict=True)]
    steps = sorted(set(keys))
    nodes = tuple(torch.tensor([i for i, key in enumerate(keys) if key == step], device=device) for step in steps)
    above = torch.tensor([parents], dtype=torch.int64, device=device)
    return Steps(above, nodes, tuple(rank == 0 for _, rank in steps), max(depths, default=0))
