"""The expected number of target calls for a text with trees of drafts, for trees of any shape, from distributions and
ranks.

Given the emitted text, a round follows the text for as long as it accepts. At a node whose path is the text so far, the
text's next token is accepted as child number c with some probability. Under `tree.tree` this probability depends only
on the distributions at this node (`by_rank`, `by_draw`), so one table of such probabilities gives `reach_tree` for
every tree; calls and their variance follow as for chains (`predict_chain`). Under `tree.traversal` a node's probability
depends on its path of child numbers (`reach_traversal`). The last functions predict single rounds from the
distributions at each level, for texts whose distributions are computed round by round.

B rows, T positions, C children, D levels, V vocabulary. accept (B, T, C): P(the text's token t is accepted as child c
(0-based) | the text, and the children of its parent are tried). accept (B, T, K, C) if this depends on the depth: entry
(t, j) is for token t as draft j (0-based) of the round that starts at t - j; entries with j > t are never read. Nor are
tokens past a row's length. lengths (B,): number of tokens of each text, T if None. parents: as in `tree`, the same for
all rounds. k: number of nodes in use in the round that starts at t: an int, (B,) or (B, T); None for all. The reach (B,
T, D+1) is P(a round that starts at token t accepts at least n nodes | the text), n = 0 to D.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.sampling import draw, up_to, wide
from inference.sampling.noise import REJECTED, uniform
from inference.verify.chain import continued
from inference.verify.tree import depths_of, ranks_of

CHUNK = 2**22  # entries of distributions that are processed at once
GOLDEN = 0.6180339887498949
SAMPLES = 8  # how often the rejected children are drawn


def rank_of(probs: Tensor, x: Tensor) -> Tensor:
    """Return, for each token x (...), how many tokens are likelier, (...) int64; 0 for the likeliest token. probs (...,
    V): distributions or logits. Of equally likely tokens the one with the lower id counts as likelier."""
    own = probs.gather(-1, x.unsqueeze(-1))
    lower = up_to(x, probs.shape[-1])
    return ((probs > own) | ((probs == own) & lower)).sum(-1)


def by_rank(rank: Tensor, children: int) -> Tensor:
    """Return accept (..., C), float64, for children that are the draft's C likeliest tokens, in order: 1 for the child
    that is the text's token, 0 for the others. Nothing here is random, since such children are not drawn.

    rank (...) int64: number of tokens that are likelier than the text's token under the draft (`rank_of`). children: C.
    """
    return (rank.unsqueeze(-1) == torch.arange(children, device=rank.device)).double()


def by_draw(p: Tensor, q: Tensor, x: Tensor, children: int, *, samples: int = SAMPLES, seed: int = 0) -> Tensor:
    """Return accept (..., C) for children drawn from q, under `tree.tree`. p, q (..., V): the target's and the draft's
    distributions of the text's tokens x (...). children: C.

    With Z = sum max(q - p, 0), p' = norm(max(p - q, 0)) and q'_y = q without y, renormalised: the first child is
    accepted with probability min(p, q)(x) / p(x), the second with sum_y max(q - p, 0)(y) min(p', q'_y)(x) / p(x).

    From the third child on, results are unbiased estimates. For these, the earlier rejected children are drawn
    `samples` times, stratified, from random numbers keyed by seed and position; only the last rejected child is summed
    over.
    """
    shape, chunk = x.shape, max(1, CHUNK // p.shape[-1])
    parts = [part.flatten(0, -2).split(chunk) for part in (p.expand(*shape, -1), q.expand(*shape, -1))]
    numbers = strata(x.numel(), max(children - 2, 0), samples, seed, x.device).split(chunk)
    accept = []
    for probs, draft, token, u in zip(*parts, x.flatten().split(chunk), numbers, strict=True):
        probs, draft, token = wide(probs), wide(draft), token.unsqueeze(-1)
        each = _accepted(probs, draft, token, children, u)
        own = probs.gather(-1, token)
        accept.append(torch.where(own > 0, torch.stack(each, -1) / own, 0.0))
    return torch.cat(accept).unflatten(0, shape) if accept else wide(p.new_zeros(*shape, children))


def reach_tree(
    accept: Tensor, parents: tuple[int, ...], lengths: Tensor | None = None, k: int | Tensor | None = None
) -> Tensor:
    """Return the reach (B, T, D+1) under `tree.tree`: P(a round that starts at token t accepts at least n nodes | the
    text).

    For each node of depth n, the probabilities in accept, (B, T, C) or (B, T, K, C), along its path are multiplied.
    These products are then summed over the nodes of this depth. parents: of the tree's nodes. lengths (B,): tokens in
    each text, None for T. k: number of nodes in use, an int, (B,) or (B, T); None for all. Raises ValueError if a node
    has more children, or the tree more levels, than `accept`.
    """
    depths, ranks = depths_of(parents), ranks_of(parents)
    levels, most = max(depths, default=0), max(ranks, default=-1) + 1
    if most > accept.shape[-1] or (accept.ndim == 4 and levels > accept.shape[2]):
        shape = f"(B, T{', K' * (accept.ndim == 4)}, C) = {tuple(accept.shape)}"
        raise ValueError(
            f"the tree has {levels} levels and up to {most} children of a node, but accept is {shape}: compute "
            "accept for as many"
        )
    whole = accept.new_ones(accept.shape[:2])
    tables = [of_rounds(accept, level, lengths) for level in range(levels)]
    return summed(reached(tables, whole, parents), parents, k)


def reached(tables: Sequence[Tensor], whole: Tensor, parents: tuple[int, ...]) -> Tensor:
    """Return P(a round that starts at t follows the text down to each node | the text), (B, T, N). tables: for each
    level (B, T, C), P(the text's token at this level is accepted as child c), by the round's start t. whole (B, T):
    ones. parents: of the tree's nodes."""
    chances: list[Tensor] = []
    for parent, depth, rank in zip(parents, depths_of(parents), ranks_of(parents), strict=True):
        chances.append((chances[parent] if parent >= 0 else whole) * tables[depth - 1][..., rank])
    return torch.stack([whole, *chances], -1)[..., 1:]


def of_rounds(accept: Tensor, level: int, lengths: Tensor | None) -> Tensor:
    """Return, by the round's start t, accept (B, T, C) of token t + level; 0 past the text's end. level: 0-based.
    lengths (B,): tokens in each text, None for T."""
    now = accept if accept.ndim == 3 else accept[:, :, level]
    if lengths is not None:
        inside = up_to(lengths.to(now.device), now.shape[1])
        now = torch.where(inside.unsqueeze(-1), now, 0.0)
    gone = min(level, now.shape[1])
    return F.pad(now[:, gone:], (0, 0, 0, gone))


def has_node(node: int, k: int | Tensor, like: Tensor) -> Tensor:
    """Return 1 for rounds that have this node, else 0: (), (B, 1) or (B, T), in the dtype of `like`. k: number of nodes
    in use, an int, (B,) or (B, T)."""
    limit = torch.as_tensor(k, device=like.device)
    return (node < (limit.unsqueeze(-1) if limit.ndim == 1 else limit)).to(like.dtype)


def _accepted(p: Tensor, q: Tensor, x: Tensor, children: int, u: Tensor) -> list[Tensor]:
    """Return, for each child c < C, P(child c is accepted and is the token x), (n,). p, q (n, V). x (n, 1). u (n, S,
    C-2): uniforms that draw the rejected children, S samples each."""
    parts = [torch.minimum(p, q).gather(-1, x).squeeze(-1), _second(p, q, x)][:children]
    totals = [torch.zeros_like(parts[0]) for _ in range(children - 2)]
    for sample in u.unbind(1):
        probs, draft, weight = p, q, torch.ones_like(p[:, 0])
        for total, number in zip(totals, sample.unbind(-1), strict=True):
            lack = (draft - probs).clamp(min=0)
            weight, y = weight * lack.sum(-1), draw(lack, number).unsqueeze(-1)
            probs, draft = normed((probs - draft).clamp(min=0)), normed(draft.scatter(-1, y, 0.0))
            total += weight * _second(probs, draft, x)
    return parts + [total / u.shape[1] for total in totals]


def _second(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """Return sum_y max(q - p, 0)(y) min(p'(x), q'_y(x)), (n,). p' is norm(max(p - q, 0)), and q'_y is q without y,
    renormalised. p, q (n, V): distributions. x (n, 1): tokens."""
    lack, left = (q - p).clamp(min=0), normed((p - q).clamp(min=0)).gather(-1, x)
    others = q.sum(-1, keepdim=True) - q
    drawn = torch.where(others > 0, q.gather(-1, x) / others, 0.0)  # of x, after y was removed
    return (lack * torch.minimum(left, drawn)).sum(-1)


def normed(rest: Tensor) -> Tensor:
    """Return rest (n, V) divided by its sum; 0 if the sum is 0."""
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, 0.0)


def strata(places: int, draws: int, samples: int, seed: int, device: torch.device) -> Tensor:
    """Return uniforms (places, samples, draws). For each place, the samples of the first draw are evenly spaced over
    [0, 1), after one random shift; samples of a later draw are shifted by multiples of the golden ratio."""
    row, depth = torch.arange(places, device=device), torch.arange(draws, device=device)
    u = uniform(seed, row, torch.zeros_like(row), depth, REJECTED).unsqueeze(1)  # (n, 1, draws)
    shift = torch.arange(samples, device=device).unsqueeze(-1) * torch.where(depth == 0, 1 / samples, GOLDEN * depth)
    return (u + shift) % 1


Distributions = tuple[Tensor, Tensor, Tensor]


def reach_traversal(
    p: Tensor,
    q: Tensor,
    x: Tensor,
    parents: tuple[int, ...],
    lengths: Tensor | None = None,
    k: int | Tensor | None = None,
    *,
    samples: int = SAMPLES,
) -> Tensor:
    """Return the reach (B, T, D+1) under `tree.traversal`, for children drawn from q: P(a round that starts at t
    accepts at least n nodes | the text). At each depth it is the sum of the probabilities of the nodes
    (`chances_traversal`). For likeliest children, use `by_rank` and `reach_tree`: they are accepted as under
    `tree.tree`.

    p (B, T, V): the target's distributions of the text's tokens x (B, T). q (B, T, V), or (B, T, K, V) by depth: the
    draft's. parents: of the tree's nodes. lengths (B,): tokens in each text, None for T. k: number of nodes in use, an
    int, (B,) or (B, T); None for all. samples: how often rejected children are drawn.
    """
    return summed(chances_traversal(p, q, x, parents, lengths, samples=samples), parents, k)


def chances_traversal(
    p: Tensor,
    q: Tensor,
    x: Tensor,
    parents: tuple[int, ...],
    lengths: Tensor | None = None,
    *,
    samples: int = SAMPLES,
) -> Tensor:
    """Return P(a round that starts at t follows the text down to each node | the text), (B, T, N), under
    `tree.traversal` and for children drawn from q. The probability depends only on the node's path of child numbers, so
    one table serves every tree within `parents`.

    p (B, T, V): the target's distributions of the text's tokens x (B, T). q: the draft's, (B, T, V), or (B, T, K, V) by
    depth: entry (t, j) is for token t as draft j (0-based). parents: of the tree's nodes. lengths (B,): tokens in each
    text, None for T. samples: how often rejected children are drawn.

    The children of a node with weight w on the text's path are tried in order. Each is rejected with probability sum
    max(q - w p, 0); a rejection changes w, p and q as in the rule. Child c then gets weight w_c = min(w p(x)/q(x), 1).
    The result is the mean of w_c prod q(x)/p(x) over draws of the rejected siblings. It is exact for first children and
    unbiased for others.
    """
    B, T, V = p.shape
    levels = max(depths_of(parents), default=0)
    rows, later = max(1, CHUNK // max(1, T * V)), len(parents) - len(set(parents))
    u = strata(B * T, later, samples, 0, x.device).view(B, T, samples, later)
    inside = torch.arange(T, device=x.device) < (T if lengths is None else lengths.to(x.device).unsqueeze(-1))
    parts = [part.split(rows) for part in (p, q, x, inside.expand(B, T), u)]
    chances = []
    for probs, draft, ids, within, number in zip(*parts, strict=True):
        distributions = [_at_level(probs, draft, ids, within, level) for level in range(levels)]
        chances.append(traversed(parents, distributions, number))
    return torch.cat(chances)


def summed(chances: Tensor, parents: tuple[int, ...], k: int | Tensor | None = None) -> Tensor:
    """Return the reach (B, T, D+1): at each depth, the sum of the probabilities of its nodes. chances (B, T, N): P(a
    round that starts at t follows the text down to the node). k: number of nodes in use, an int, (B,) or (B, T); None
    for all. parents: of the tree's nodes."""
    depths = depths_of(parents)
    reach = chances.new_zeros(*chances.shape[:2], max(depths, default=0) + 1)
    reach[..., 0] = 1
    for node, depth in enumerate(depths):
        chance = chances[..., node]
        reach[..., depth] += chance if k is None else chance * has_node(node, k, chance)
    return reach


def traversed(parents: tuple[int, ...], distributions: Sequence[Distributions], u: Tensor) -> Tensor:
    """Return P(a round that starts at t follows the text down to each node), (B, T, N), under `tree.traversal`.
    distributions: for each level p, q (B, T, V) and ids (B, T, 1) of the text's token at this level, by the round's
    start t. u (B, T, S, draws): uniforms that draw the rejected children, S samples. parents: of the tree's nodes."""
    depths = depths_of(parents)
    chances = torch.zeros(
        *u.shape[:2], len(parents), dtype=distributions[0][0].dtype if distributions else u.dtype, device=u.device
    )
    whole = torch.ones_like(chances[..., 0])
    for sample in u.unbind(2):
        numbers, entered = iter(sample.unbind(-1)), {-1: (whole, whole)}  # node -> (weight, probability)
        for parent in sorted(set(parents)):
            own = [node for node, above in enumerate(parents) if above == parent]
            level = depths[own[0]] - 1
            children = _children(*distributions[level], *entered[parent], len(own), numbers)
            entered |= dict(zip(own, children, strict=True))
            for node, (weight, chance) in zip(own, children, strict=True):
                chances[..., node] += weight * chance / u.shape[2]
    return chances


def _at_level(p: Tensor, q: Tensor, x: Tensor, inside: Tensor, level: int) -> Distributions:
    """Return, by the round's start t, the distributions p and q (B, T, V) and the id (B, T, 1) of token t + level. Past
    the text's end the distributions are zero. p (B, T, V), q (B, T, V) or (B, T, K, V), x (B, T): of the text's tokens.
    inside (B, T): whether the text has token t. level: 0-based."""
    drafts = wide(q if q.ndim == 3 else q[:, :, level])
    within, gone = inside.unsqueeze(-1), min(level, x.shape[1])
    distributions = [torch.where(within, probs, 0.0)[:, gone:] for probs in (wide(p), drafts)]
    p, q = (F.pad(probs, (0, 0, 0, gone)) for probs in distributions)
    return p, q, F.pad(torch.where(inside, x, 0)[:, gone:], (0, gone)).unsqueeze(-1)


def _children(
    p: Tensor, q: Tensor, x: Tensor, w: Tensor, chance: Tensor, count: int, numbers: Iterator[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return, for each of a node's `count` children, its weight and its probability if it is the text's token, both (B,
    T). p, q (B, T, V), x (B, T, 1): distributions at the node, and the text's next token. w, chance (B, T): the node's
    weight and probability. numbers: one tensor (B, T) of uniforms for each rejected child."""
    children, text = [], p.gather(-1, x).squeeze(-1)
    for child in range(count):
        px, qx = (w * p.gather(-1, x).squeeze(-1)), q.gather(-1, x).squeeze(-1)
        entered = torch.where(px > 0, (px / qx).clamp(max=1), 0.0)
        children.append((entered, torch.where(text > 0, chance * qx / text, 0.0)))
        if child + 1 < count:
            rest, lack = (w.unsqueeze(-1) * p - q).clamp(min=0), (q - w.unsqueeze(-1) * p).clamp(min=0)
            mass, rejected = rest.sum(-1), lack.sum(-1)
            y = draw(lack, next(numbers)).unsqueeze(-1)
            chance, p = chance * rejected, normed(rest)
            w = continued(mass, w)
            q = normed(q.scatter(-1, y, 0.0))
    return children


def reach_of_round(accept: Tensor, parents: tuple[int, ...], k: Tensor) -> Tensor:
    """Return the reach (A, D+1) of one round per row: P(the round accepts at least n nodes | the text), under
    `tree.tree`. accept (A, D, C): for each level, P(the text's token there is accepted as child c). parents: of the
    tree's nodes. k (A,): number of nodes in use."""
    tables = [part.unsqueeze(1) for part in accept.unbind(1)]
    return summed(reached(tables, accept.new_ones(len(accept), 1), parents), parents, k).squeeze(1)


def by_levels(p: Tensor, q: Tensor, x: Tensor, parents: tuple[int, ...], k: Tensor, seed: int = 0) -> Tensor:
    """Return the reach (A, D+1) of one round per row, P(the round accepts at least n nodes | the text), for sampled
    children under `tree.tree`. p, q (A, D, V): the target's and the draft's distributions of the text's next tokens x
    (A, D); zero past the text's end. parents: of the tree's nodes. k (A,): number of nodes in use. seed: for drawing
    the rejected children."""
    return reach_of_round(by_draw(p, q, x, max(ranks_of(parents)) + 1, seed=seed), parents, k)


def traversal_by_levels(p: Tensor, q: Tensor, x: Tensor, parents: tuple[int, ...], k: Tensor, seed: int = 0) -> Tensor:
    """Return the reach (A, D+1) of one round per row, P(the round accepts at least n nodes | the text), for sampled
    children under `tree.traversal`. p, q (A, D, V): the target's and the draft's distributions of the text's next
    tokens x (A, D); zero past the text's end. parents: of the tree's nodes. k (A,): number of nodes in use. seed: for
    drawing the rejected children."""
    later = len(parents) - len(set(parents))
    u = strata(len(x), later, SAMPLES, seed, x.device).unsqueeze(1)
    distributions = [(wide(p[:, j : j + 1]), wide(q[:, j : j + 1]), x[:, j : j + 1, None]) for j in range(p.shape[1])]
    return summed(traversed(parents, distributions, u), parents, k.unsqueeze(1)).squeeze(1)
