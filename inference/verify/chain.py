"""Verification rules for chains, as pure functions. From distributions, drafts and random numbers they compute the
number of accepted drafts, and the distribution of the token after them.

B rows, K the largest number of drafts, V vocabulary. p (B, K+1, V): target distributions. q (B, K, V): draft
distributions. Both are after `sampling.probs`. x (B, K): drafted ids. u: uniforms in [0, 1). k (B,): number of drafts
per row; None means K for every row.

p[b, k[b]] is row b's bonus distribution, used if all its drafts are accepted. Entries past k[b] are not read and may be
NaN. Draft i (1-based) is tested with u[:, i-1] and passes if u < threshold, strictly, so a token with p = 0 is rejected
even at u = 0. The round emits x[:, :accepted], then one token drawn from `probs`. Results have the inputs' dtype, or
float32 if that is wider.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.sampling import at_ids, draw, one_hot, up_to, wide


class Verification(NamedTuple):
    """The result of a rule. accepted (B,): number of accepted drafts, int64. probs (B, V): distribution of the token
    that is emitted after them."""

    accepted: Tensor
    probs: Tensor


def token(p: Tensor, q: Tensor, x: Tensor, u: Tensor, k: Tensor | None = None) -> Verification:
    """Verify a chain: accept x_i if u_i < p(x_i)/q(x_i), and stop at the first rejection. The next token is drawn from
    norm(max(p - q, 0)) at the rejected draft, or from p if all k drafts are accepted (Leviathan et al. 2023,
    2211.17192; Chen et al. 2023, 2302.01318).

    p (B, K+1, V), q (B, K, V): the target's and the draft's distributions; column i - 1 is for x_i (i from 1), and p's
    last column follows all drafts. x (B, K): drafts. u (B, K): uniforms. k (B,): number of drafts, None for K. If the
    residual has no mass, the next token is drawn from p itself.
    """
    k, drafted = _drafted(x, k)
    accepted = _leading(drafted & (u < _ratios(p, q, x, drafted)))
    return Verification(accepted, _residual(p, q, accepted, k, None))


def block(p: Tensor, q: Tensor, x: Tensor, u: Tensor, k: Tensor | None = None) -> Verification:
    """Verify a chain as a whole (Sun et al. 2024, 2403.10444). In expectation this emits at least as many tokens as
    `token`.

    w_0 = 1, w_i = min(w_{i-1} p(x_i)/q(x_i), 1); R_i = sum_v max(w_i p(v|x_<=i) - q(v|x_<=i), 0); h_i = R_i / (R_i + 1
    - w_i) for i < k, 0/0 = 1, and h_k = w_k. Accept the first i drafts, with i the last index for which u_i < h_i, or 0
    if there is none. Draw the next token from norm(max(w_i p - q, 0)) after draft i, or from p if i = k or if no mass
    is left.

    p (B, K+1, V), q (B, K, V): the target's and the draft's distributions; column i - 1 is for x_i (i from 1), and p's
    last column follows all drafts. x (B, K): drafts. u (B, K): uniforms. k (B,): number of drafts, None for K.
    """
    k, drafted = _drafted(x, k)
    w, depth = _weights(_ratios(p, q, x, drafted)), torch.arange(1, x.shape[1] + 1, device=x.device)  # (B, K+1), (K,)
    mass = _excess(p[:, 1:-1], q[:, 1:], w[:, 1:-1]).sum(-1)
    h = torch.cat((continued(mass, w[:, 1:-1]), w[:, -1:]), 1)[:, : x.shape[1]]  # (B, K)
    h = torch.where(k.unsqueeze(-1) == depth, w[:, 1:], h)
    accepted = torch.cat((torch.zeros_like(k).unsqueeze(-1), (drafted & (u < h)) * depth), 1).amax(-1)
    return Verification(accepted, _residual(p, q, accepted, k, w))


def match(p: Tensor, x: Tensor, u: Tensor, k: Tensor | None = None) -> Verification:
    """Verify a chain by sampling from the target: y_i is drawn from p_i by inverse CDF at u_i; accept while y_i = x_i.
    The resulting distribution is one-hot: y at the first rejection, or the bonus draw if all k drafts are accepted.

    p (B, K+1, V): the target's distributions. x (B, K): drafts. u (B, K+1): uniforms. k (B,): number of drafts, None
    for K. If u is (B, K), the bonus is not drawn, and its distribution is p.
    """
    y = draw(wide(p[:, : u.shape[1]]), u)  # (B, K+1) or (B, K)
    k, drafted = _drafted(x, k)
    accepted = _leading(drafted & (y[:, : x.shape[1]] == x))
    bonus = _at(wide(p), accepted)  # (B, V)
    if y.shape[1] == 0:
        return Verification(accepted, bonus)
    drawn = accepted.clamp(max=y.shape[1] - 1)
    sure = one_hot(_at(y, drawn), bonus)
    return Verification(accepted, torch.where((drawn == accepted).unsqueeze(-1), sure, bonus))


def coupled(p: Tensor, x: Tensor, g: Tensor, k: Tensor | None = None) -> Verification:
    """Verify a chain by the target's own draws with Gumbel noise: y_i = argmax(log p_i + g_i); accept while y_i = x_i.
    The resulting distribution is one-hot at the next y. The text therefore equals the text of plain decoding with this
    noise, whatever was drafted. Drafts x_i = argmax(log q_i + g_i) are accepted most often.

    p (B, K+1, V): the target's distributions. x (B, K): drafts. g (B, K+1, V): Gumbel noise, by position. k (B,):
    number of drafts, None for K.
    """
    y = (wide(p).log() + g).argmax(-1)  # (B, K+1)
    k, drafted = _drafted(x, k)
    accepted = _leading(drafted & (y[:, :-1] == x))
    return Verification(accepted, one_hot(_at(y, accepted), wide(p[:, 0])))


def _drafted(x: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return k (B,), with K for None, and a bool tensor (B, K): whether each column has a draft."""
    B, K = x.shape
    k = torch.full((B,), K, dtype=torch.int64, device=x.device) if k is None else k.to(torch.int64)
    return k, up_to(k, K)


def _leading(passed: Tensor) -> Tensor:
    """Return the number (B,) of drafts that passed before the first that failed. passed (B, K), bool."""
    return passed.to(torch.int64).cumprod(-1).sum(-1)


def _at(x: Tensor, i: Tensor) -> Tensor:
    """Return x[b, i_b] (B, ...) for x (B, n, ...) and i (B,), from 0 to n - 1."""
    first = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1], device=x.device)
    return x.flatten(0, 1).index_select(0, first + i)  # copies rows whole, which indexing does number by number


def _ratios(p: Tensor, q: Tensor, x: Tensor, drafted: Tensor) -> Tensor:
    """Return p(x_i)/q(x_i) (B, K), or 0 if p(x_i) is 0. drafted (B, K): whether an entry has a draft; other entries of
    the result have no meaning."""
    x = torch.where(drafted, x, 0)
    px = wide(at_ids(p[:, :-1], x))
    return torch.where(px > 0, px / wide(at_ids(q, x)), 0.0)


def _weights(ratios: Tensor) -> Tensor:
    """Return the weights w_0 to w_K (B, K+1) of `block`. ratios (B, K): p(x_i)/q(x_i)."""
    w = [torch.ones_like(ratios[:, :1])]
    for ratio in ratios.split(1, dim=1):
        w.append(torch.where(w[-1] > 0, (w[-1] * ratio).clamp(max=1), 0.0))
    return torch.cat(w, 1)


def _excess(p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """Return max(w p - q, 0) (..., V). p, q (..., V). w (...)."""
    return (w.unsqueeze(-1) * wide(p)).sub_(wide(q)).clamp_(min=0)


def continued(mass: Tensor, w: Tensor) -> Tensor:
    """Return R / (R + 1 - w) (...) with 0/0 = 1. mass (...): the residual mass R. w (...): the weights. 1 - w is
    computed first: for peaked distributions R is so small that R + 1 would lose R's digits."""
    return torch.where(w == 1, 1.0, mass / (mass + (1 - w)))


def _residual(p: Tensor, q: Tensor, n: Tensor, k: Tensor, w: Tensor | None) -> Tensor:
    """Return norm(max(w_n p_n - q_n, 0)) (B, V). Return p_n instead if n = k, or if no mass is left. p (B, K+1, V), q
    (B, K, V). n (B,): number of accepted drafts. k (B,): number of drafts. w (B, K+1): weights, None for 1."""
    here = wide(_at(p, n))
    if q.shape[1] == 0:
        return here
    weight = torch.ones_like(here[:, 0]) if w is None else _at(w, n)
    rest = _excess(here, _at(q, n.clamp(max=q.shape[1] - 1)), weight)
    mass = rest.sum(-1, keepdim=True)
    bonus = (n == k).unsqueeze(-1) | ~(mass > 0)
    return torch.where(bonus, here, rest / mass)
