"""Losses between a target distribution p and a draft distribution q. Each returns one value per position, without a
reduction.

Each docstring gives the formula, the source, the gradient, the use, and the cases in which the loss fails.
`names.LOSSES` lists the losses that an expression may name.

Every loss takes log p and log q (..., V), normalised and at the temperature of the regime, and returns (...,). Half
precision is raised to float32. Gradients are given in the draft's logits z, q = softmax(z), with I_v = 1[q_v <= p_v]
and S = sum_v q_v I_v. At a tie q_v = p_v, `minimum` splits the gradient. A zero probability, log = -inf, gives finite
values and gradients in p and in q: 0 log 0 = 0, and any other infinite logarithm is replaced by log(tiny) of the dtype,
with zero gradient.
"""

import math

import torch
from torch import Tensor

from inference.sampling import at_ids, wide


def alpha(logp: Tensor, logq: Tensor) -> Tensor:
    """Return the acceptance probability of the token rule, sum_v min(p, q) = 1 - TV(p, q), (...,), from log p and log q
    (..., V) (Leviathan et al. 2023, arXiv 2211.17192)."""
    return torch.minimum(wide(logp), wide(logq)).exp().sum(-1)


def alpha_greedy(logp: Tensor, logq: Tensor) -> Tensor:
    """Return p(argmax q), (...,), from log p and log q (..., V). It is the acceptance if the engine drafts the most
    probable token, and equals `alpha` for a one-hot q."""
    return at_ids(wide(logp), logq.argmax(-1)).exp()


def entropy(logp: Tensor) -> Tensor:
    """Return the entropy -sum_v p log p, in nats, (...,), from log p (..., V)."""
    logp = wide(logp)
    return -(logp.exp() * _finite(logp)).sum(-1)


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Return KL(p || q) = sum_v p log(p / q), in nats, (...,), from log p and log q (..., V) (Kullback and Leibler
    1951). dL/dz = q - p.

    Use: it is convex in z, with a bounded gradient that vanishes only at q = p, so training starts stably. It is also
    the baseline. It fails for a small draft, because it rewards covering all of p, while acceptance depends on the
    overlap alone. At q = 0 < p (a pruned draft vocabulary) the divergence is infinite, and log q is replaced by the
    constant log(tiny).
    """
    logp, logq = wide(logp), wide(logq)
    return (logp.exp() * (_finite(logp) - _finite(logq))).sum(-1)


def tv(logp: Tensor, logq: Tensor) -> Tensor:
    """Return the total variation 1 - sum_v min(p, q), (...,), from log p and log q (..., V). It is the probability of
    rejection (Leviathan et al. 2023). dL/dz = -q (I - S).

    Use: it is exactly the rejection rate of the token rule. It fails at small overlap, where its gradient vanishes, so
    warm-start with `kl`. It gains next to nothing on a target that decodes at temperature 0.
    """
    return 1 - alpha(logp, logq)


def nla(logp: Tensor, logq: Tensor) -> Tensor:
    """Return -log alpha = -log sum_v min(p, q), (...,), from log p and log q (..., V) (arXiv 2602.23881). dL/dz = -q (I
    - S) / alpha.

    Use: it serves the same purpose as `tv`, but its gradient does not vanish at small overlap. It has no setting, and
    equals cross-entropy if p is one-hot. It fails on texts with positions that no draft predicts, because these get the
    largest weight. Zero overlap gives -log(tiny) with zero gradient.
    """
    return _neg_log_sum(torch.minimum(wide(logp), wide(logq)))


def lk(logp: Tensor, logq: Tensor, eta: float = 3.0, alpha: Tensor | None = None) -> Tensor:
    """Return w KL + (1 - w) TV with w = exp(-eta alpha), (...,), from log p and log q (..., V) (LK, arXiv 2602.23881).

    Use: it is near `kl` at low overlap and near `tv` at high overlap, without a schedule. Its gradient treats w as a
    constant, w (q - p) - (1 - w) q (I - S), so its value may rise while the draft improves.

    alpha: an aggregated acceptance that broadcasts to (...,); None: the acceptance at each position. eta: 3, or 10 for
    Medusa heads.
    """
    distance = tv(logp, logq)
    w = torch.exp(-eta * (1 - distance if alpha is None else alpha).detach())
    return w * kl(logp, logq) + (1 - w) * distance


def greedy(logp: Tensor, logq: Tensor) -> Tensor:
    """Return -log q(argmax p), (...,), from log p and log q (..., V): the cross-entropy with the target's most probable
    token. dL/dz = q - e, with e one-hot at this token.

    Use: for a target that decodes at temperature 0, whose distribution is one-hot. It fails at any other temperature,
    because the draft becomes more confident than p.
    """
    return -at_ids(_finite(wide(logq)), logp.argmax(-1))


def greedy_draft(logp: Tensor, logq: Tensor, sharp: float = 4.0) -> Tensor:
    """Return 1 - sum_v p q' with q' = softmax(sharp log q), (...,), from log p and log q (..., V). As `sharp` grows, it
    tends to 1 - p(argmax q), of which it is a smooth form. dL/dz = -sharp q' (p - sum_v p q').

    Use: for engines that draft argmax q and accept it with probability p. It fails for engines that sample from q,
    because it trains only the maximum of q, not the distribution.
    """
    return 1 - (wide(logp).exp() * torch.softmax(sharp * wide(logq), -1)).sum(-1)


def _floor(values: Tensor) -> float:
    return math.log(torch.finfo(values.dtype).tiny)


def _finite(logs: Tensor) -> Tensor:
    """Return `logs` with -inf replaced by log(tiny), with zero gradient. Its product with p = 0 is then 0 instead of
    NaN."""
    return logs.masked_fill(logs == -torch.inf, _floor(logs))


def _neg_log_sum(logs: Tensor) -> Tensor:
    """Return -log sum_v exp(logs), or -log(tiny) with zero gradient (not NaN) if every entry is -inf."""
    empty = (logs == -torch.inf).all(-1)
    total = torch.logsumexp(logs.masked_fill(empty[..., None], 0.0), -1)
    return -total.masked_fill(empty, _floor(logs))
