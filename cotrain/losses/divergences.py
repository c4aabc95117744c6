"""Losses between a target law p and a draft law q, one value a position, no reduction.

Every function takes log p and log q, (..., V), normalised and already at the temperature of the regime, and
returns (...,). Half precision is raised to float32. Gradients are given in the draft's logits z,
q = softmax(z), with I_v = 1[q_v <= p_v] and S = sum_v q_v I_v; at a tie q_v = p_v `minimum` splits them.
Zero probabilities are log = -inf, on either side, and give finite values and gradients: 0 log 0 = 0, and a
logarithm that would be infinite is taken as log(tiny) of the dtype with zero gradient.
"""

import math

import torch
from torch import Tensor

from inference.sampling import wide


def alpha(logp: Tensor, logq: Tensor) -> Tensor:
    """Acceptance probability sum_v min(p, q) = 1 - TV(p, q) (Leviathan et al. 2023, arXiv 2211.17192)."""
    return torch.minimum(wide(logp), wide(logq)).exp().sum(-1)


def misaligned(ours: Tensor, theirs: Tensor) -> Tensor:
    """1 - cosine of the draft's and the target's final hidden states (..., D) -> (...), in [0, 2]: a help early on,
    for drafts with the target's width and head (DistilBERT, Sanh et al. 2019, arXiv 1910.01108)."""
    return 1 - torch.cosine_similarity(wide(ours), wide(theirs).detach(), dim=-1)


def alpha_greedy(logp: Tensor, logq: Tensor) -> Tensor:
    """Acceptance p(argmax q) in an engine that drafts greedily: `alpha` of p and a one-hot q."""
    return _at(wide(logp), logq.argmax(-1)).exp()


def entropy(logp: Tensor) -> Tensor:
    """-sum_v p log p, in nats."""
    logp = wide(logp)
    return -(logp.exp() * _finite(logp)).sum(-1)


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(p || q) = sum_v p log(p / q), a stable start and the baseline. dL/dz = q - p.

    Where q = 0 < p the divergence is infinite: log q is then log(tiny), constant (a pruned draft vocabulary).
    """
    logp, logq = wide(logp), wide(logq)
    return (logp.exp() * (_finite(logp) - _finite(logq))).sum(-1)


def tv(logp: Tensor, logq: Tensor) -> Tensor:
    """Total variation 1 - sum_v min(p, q), the probability of refusal. dL/dz = -q (I - S).

    Its gradient vanishes where overlap is small: best from a warm start (Leviathan et al. 2023).
    """
    return 1 - alpha(logp, logq)


def nla(logp: Tensor, logq: Tensor) -> Tensor:
    """-log alpha = -log sum_v min(p, q), cross-entropy when p is one-hot. dL/dz = -q (I - S) / alpha.

    (arXiv 2602.23881.) Zero overlap gives -log(tiny) with zero gradient.
    """
    return _neg_log_sum(torch.minimum(wide(logp), wide(logq)))


def lk(logp: Tensor, logq: Tensor, eta: float = 3.0, alpha: Tensor | None = None) -> Tensor:
    """w KL + (1 - w) TV, w = exp(-eta alpha): divergence where overlap is low (LK, arXiv 2602.23881).

    alpha: an aggregated acceptance that broadcasts to (...,), default this position's own. It is a
    constant to the gradient, w (q - p) - (1 - w) q (I - S). eta: 3, or 10 for Medusa heads.
    """
    distance = tv(logp, logq)
    w = torch.exp(-eta * (1 - distance if alpha is None else alpha).detach())
    return w * kl(logp, logq) + (1 - w) * distance


def rkl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(q || p) = sum_v q log(q / p). dL/dz = q (log(q/p) - L).

    Raises ValueError where p = 0 < q (a truncated or greedy p): infinite whatever the draft does.
    """
    if bool(((logp == -torch.inf) & (logq > -torch.inf)).any()):
        raise ValueError("rkl needs p > 0 wherever q > 0: use another loss with a truncated or greedy target")
    return kl(logq, logp)


def jsd(logp: Tensor, logq: Tensor) -> Tensor:
    """Jensen-Shannon KL(p || m)/2 + KL(q || m)/2, m = (p + q)/2 (Lin 1991). At most log 2.

    dL/dz = q/2 (log(2q/(p+q)) - sum_v q log(2q/(p+q))).
    """
    logm = torch.logaddexp(_finite(wide(logp)), _finite(wide(logq))) - math.log(2)
    return (kl(logp, logm) + kl(logq, logm)) / 2


def tvpp(logp: Tensor, logq: Tensor, x: Tensor) -> Tensor:
    """Score-function form of TV (TVD++, arXiv 2403.00858): -A log q(x), x (...,) drawn from q.

    A = (1[p(x) >= q(x)] - mu) / sigma, a constant; mu = S, sigma = sqrt(S (1 - S)); 0 where sigma = 0.
    Its gradient has expectation -q (I - S) / sigma: tv's over sigma.
    """
    logp, logq = wide(logp), wide(logq)
    with torch.no_grad():
        q, inside = logq.exp(), logq <= logp
        mu, rest = (q * inside).sum(-1), (q * ~inside).sum(-1)  # rest = 1 - mu without cancellation
        sigma = (mu * rest).sqrt()
        advantage = torch.where(sigma > 0, (_at(inside, x).to(mu) - mu) / sigma, 0.0)
    return -advantage * _at(_finite(logq), x)


def mix(logp: Tensor, logq: Tensor, x: Tensor) -> Tensor:
    """.1 (-log q(x)) + .9 sum_v abs(p - q), x (...,) the text's token: the production mix of DSpark.

    dL/dz = .1 (q - e_x) + .9 q (s - sum_v q s), s = sign(q - p).
    """
    logp, logq = wide(logp), wide(logq)
    return -0.1 * _at(_finite(logq), x) + 0.9 * (logp.exp() - logq.exp()).abs().sum(-1)


def hellinger(logp: Tensor, logq: Tensor) -> Tensor:
    """Squared Hellinger distance 1 - sum_v sqrt(p q), smooth: H^2 <= TV <= sqrt(2) H.

    dL/dz = -(sqrt(p q) - q sum_v sqrt(p q)) / 2.
    """
    return 1 - ((wide(logp) + wide(logq)) / 2).exp().sum(-1)


def greedy(logp: Tensor, logq: Tensor) -> Tensor:
    """-log q(argmax p), for a target that decodes at temperature 0. dL/dz = q - e."""
    return -_at(_finite(wide(logq)), logp.argmax(-1))


def match(logp: Tensor, logq: Tensor) -> Tensor:
    """-log sum_v p q, for engines that sample both and compare. dL/dz = q - p q / sum_v p q.

    Zero overlap gives -log(tiny) with zero gradient.
    """
    return _neg_log_sum(wide(logp) + wide(logq))


def greedy_draft(logp: Tensor, logq: Tensor, sharp: float = 4.0) -> Tensor:
    """1 - sum_v p q', q' = softmax(sharp log q), for engines that draft argmax q and accept with p of it.

    dL/dz = -sharp q' (p - sum_v p q'); as sharp grows the loss tends to 1 - p(argmax q).
    """
    return 1 - (wide(logp).exp() * torch.softmax(sharp * wide(logq), -1)).sum(-1)


def _floor(values: Tensor) -> float:
    return math.log(torch.finfo(values.dtype).tiny)


def _finite(logs: Tensor) -> Tensor:
    """-inf becomes log(tiny) with zero gradient: times p = 0 it is 0 where -inf would be NaN."""
    return logs.masked_fill(logs == -torch.inf, _floor(logs))


def _neg_log_sum(logs: Tensor) -> Tensor:
    """-log sum_v exp(logs), with -log(tiny) and zero gradient (not NaN) where every entry is -inf."""
    empty = (logs == -torch.inf).all(-1)
    total = torch.logsumexp(logs.masked_fill(empty[..., None], 0.0), -1)
    return -total.masked_fill(empty, _floor(logs))


def _at(values: Tensor, x: Tensor) -> Tensor:
    return values.gather(-1, x[..., None]).squeeze(-1)
