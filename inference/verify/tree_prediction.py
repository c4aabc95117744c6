"""What a tree of drafts will accept, given the text that comes out: for every shape, from distributions and ranks.

Given the text, a round stays on it while it accepts: at a node whose path is the text so far, the text's next token is
accepted as the node's child number c with a chance that the distributions there decide (`by_rank`, `by_draw`). A shape
only says which children there are. So one table of these chances gives `reach_tree` of every topology under
`tree.tree`, and calls and their variance follow as for chains (`prediction`).

B rows, T positions, C children, D levels, V vocabulary. accept (B, T, C): P(the text's token t is accepted as child c,
0-based | the text, and the children of its node are tried); with one axis more, (B, T, K, C), when it is drafted at
depth j (0-based), that is by a round that starts at t - j; entries with j > t are never read, nor tokens past a row's
length. parents: as in `tree`, of all rounds. k: nodes in use, of the round that starts at t: an int, (B,) or (B, T).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.noise import REFUSED, uniform
from inference.sampling import draw, wide
from inference.verify.prediction import calls_from, tau_from, variance_from
from inference.verify.tree import depths_of, ranks_of

CHUNK = 2**22  # entries of a distribution's table that are worked on at once
GOLDEN = 0.6180339887498949
SAMPLES = 8  # of the refused children that are drawn


def rank_of(probs: Tensor, x: Tensor) -> Tensor:
    """How many tokens stand before x among the likeliest of distribution: (..., V), (...) -> (...) int64, 0 for the
    first.

    Of equal ones the lower id stands first, as `topology.likeliest` takes them. distribution may be logits.
    """
    own = probs.gather(-1, x.unsqueeze(-1))
    lower = torch.arange(probs.shape[-1], device=probs.device) < x.unsqueeze(-1)
    return ((probs > own) | ((probs == own) & lower)).sum(-1)


def by_rank(rank: Tensor, children: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """accept (..., C) of deterministic children, the likeliest first: 1 for child rank, no coin is left given the text.

    rank (...) int64 of the text's token among the draft's guesses, see `rank_of`.
    """
    return (rank.unsqueeze(-1) == torch.arange(children, device=rank.device)).to(dtype)


def by_draw(
    p: Tensor, q: Tensor, x: Tensor, children: int, *, replacement: bool = False, samples: int = SAMPLES, seed: int = 0
) -> Tensor:
    """accept (..., C) of children drawn from q, of the text's tokens x (...) with distributions p, q (..., V).

    With Z = sum max(q - p, 0), p' = norm(max(p - q, 0)) and q'_y = q without y, renormalised (q'_y = q with
    replacement): the first child with min(p, q)(x) / p(x), the second with sum_y max(q - p, 0)(y) min(p', q'_y)(x) /
    p(x). With replacement every child is exact in this way. Without it, from the third on, the refused ones are drawn
    (`samples` times, stratified, a function of seed and place) but for the last, which is summed over: unbiased.
    """
    shape, chunk = x.shape, max(1, CHUNK // p.shape[-1])
    parts = [part.flatten(0, -2).split(chunk) for part in (p.expand(*shape, -1), q.expand(*shape, -1))]
    numbers = strata(x.numel(), max(children - 2, 0), samples, seed, x.device).split(chunk)
    found = []
    for probs, draft, token, u in zip(*parts, x.flatten().split(chunk), numbers, strict=True):
        probs, draft, token = wide(probs), wide(draft), token.unsqueeze(-1)
        each = _with(probs, draft, token, children) if replacement else _without(probs, draft, token, children, u)
        own = probs.gather(-1, token)
        found.append(torch.where(own > 0, torch.stack(each, -1) / own, 0.0))
    return torch.cat(found).unflatten(0, shape) if found else wide(p.new_zeros(*shape, children))


def reach_tree(
    accept: Tensor, parents: tuple[int, ...], lengths: Tensor | None = None, k: int | Tensor | None = None
) -> Tensor:
    """P(a round that starts at t accepts at least n nodes | the text) under `tree.tree` -> (B, T, D+1).

    Sum over the nodes of depth n of the product, along the node's path, of the chance of each child's number. Raises
    ValueError when a node has more children, or the tree more levels, than accept.
    """
    depths, ranks = depths_of(parents), ranks_of(parents)
    levels, most = max(depths, default=0), max(ranks, default=-1) + 1
    if most > accept.shape[-1] or (accept.ndim == 4 and levels > accept.shape[2]):
        found = f"(B, T{', K' * (accept.ndim == 4)}, C) = {tuple(accept.shape)}"
        raise ValueError(f"the tree has {levels} levels and up to {most} children of a node, accept is {found}")
    whole = accept.new_ones(accept.shape[:2])
    return reached([of_rounds(accept, level, lengths) for level in range(levels)], whole, parents, k)


def reached(tables: Sequence[Tensor], whole: Tensor, parents: tuple[int, ...], k: int | Tensor | None) -> Tensor:
    """Of rounds whole (B, T), ones: chances of their next tokens by level, (B, T, C) each -> (B, T, D+1)."""
    depths, ranks = depths_of(parents), ranks_of(parents)
    reach = [torch.zeros_like(whole) for _ in range(max(depths, default=0))]
    chances: list[Tensor] = []
    for node, (parent, depth, rank) in enumerate(zip(parents, depths, ranks, strict=True)):
        chance = (chances[parent] if parent >= 0 else whole) * tables[depth - 1][..., rank]
        chances.append(chance if k is None else chance * used(node, k, chance))
        reach[depth - 1] = reach[depth - 1] + chances[-1]
    return torch.stack([whole, *reach], -1)


def expected_calls_tree(
    accept: Tensor, parents: tuple[int, ...], lengths: Tensor | None = None, k: int | Tensor | None = None
) -> Tensor:
    """Expected target calls of each text -> (B,), from its start to its end; lengths (B,) of the texts, default T."""
    return calls_from(reach_tree(accept, parents, lengths, k), lengths)


def calls_variance_tree(
    accept: Tensor, parents: tuple[int, ...], lengths: Tensor | None = None, k: int | Tensor | None = None
) -> Tensor:
    """Variance of the target calls of each text -> (B,), calls squared, over what is left to chance given the text."""
    return variance_from(reach_tree(accept, parents, lengths, k), lengths)


def tau_tree(
    accept: Tensor, parents: tuple[int, ...], lengths: Tensor | None = None, k: int | Tensor | None = None
) -> Tensor:
    """Tokens per target call, sum(lengths) / sum(expected calls), a scalar."""
    return tau_from(reach_tree(accept, parents, lengths, k), lengths)


def of_rounds(accept: Tensor, level: int, lengths: Tensor | None) -> Tensor:
    """Chances (B, T, C) of token t + level, for the round that starts at t; 0 past the text's end."""
    now = accept if accept.ndim == 3 else accept[:, :, level]
    if lengths is not None:
        inside = torch.arange(now.shape[1], device=now.device) < lengths.to(now.device).unsqueeze(-1)
        now = torch.where(inside.unsqueeze(-1), now, 0.0)
    gone = min(level, now.shape[1])
    return F.pad(now[:, gone:], (0, 0, 0, gone))


def used(node: int, k: int | Tensor, like: Tensor) -> Tensor:
    """Whether each round has this node: (), (B, 1) or (B, T)."""
    limit = torch.as_tensor(k, device=like.device)
    return (node < (limit.unsqueeze(-1) if limit.ndim == 1 else limit)).to(like.dtype)


def _with(p: Tensor, q: Tensor, x: Tensor, children: int) -> list[Tensor]:
    """P(accepted as child c, and it is x), c < C, drawn with replacement: (n, V), x (n, 1) -> (n,) each."""
    weight, found = torch.ones_like(p[:, 0]), []
    for _ in range(children):
        found.append(weight * torch.minimum(p, q).gather(-1, x).squeeze(-1))
        weight = weight * (q - p).clamp(min=0).sum(-1)
        p = normed((p - q).clamp(min=0))
    return found


def _without(p: Tensor, q: Tensor, x: Tensor, children: int, u: Tensor) -> list[Tensor]:
    """The same without replacement; u (n, S, C-2) draws the refused ones."""
    found = [torch.minimum(p, q).gather(-1, x).squeeze(-1), _second(p, q, x)][:children]
    totals = [torch.zeros_like(found[0]) for _ in range(children - 2)]
    for sample in u.unbind(1):
        probs, draft, weight = p, q, torch.ones_like(p[:, 0])
        for total, number in zip(totals, sample.unbind(-1), strict=True):
            lack = (draft - probs).clamp(min=0)
            weight, y = weight * lack.sum(-1), draw(lack, number).unsqueeze(-1)
            probs, draft = normed((probs - draft).clamp(min=0)), normed(draft.scatter(-1, y, 0.0))
            total += weight * _second(probs, draft, x)
    return found + [total / u.shape[1] for total in totals]


def _second(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """sum_y max(q - p, 0)(y) min(p'(x), q'_y(x)): (n, V), x (n, 1) -> (n,)."""
    lack, left = (q - p).clamp(min=0), normed((p - q).clamp(min=0)).gather(-1, x)
    others = q.sum(-1, keepdim=True) - q
    drawn = torch.where(others > 0, q.gather(-1, x) / others, 0.0)  # of x, when y is gone
    return (lack * torch.minimum(left, drawn)).sum(-1)


def normed(rest: Tensor) -> Tensor:
    """rest (n, V) over its sum, 0 where that is 0."""
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, 0.0)


def strata(places: int, draws: int, samples: int, seed: int, device: torch.device) -> Tensor:
    """Uniforms (n, S, draws): each one uniform, the S of a place and a draw spread evenly."""
    row, depth = torch.arange(places, device=device), torch.arange(draws, device=device)
    u = uniform(seed, row, torch.zeros_like(row), depth, REFUSED).unsqueeze(1)  # (n, 1, draws)
    shift = torch.arange(samples, device=device).unsqueeze(-1) * torch.where(depth == 0, 1 / samples, GOLDEN * depth)
    return (u + shift) % 1
