"""Losses between a target distribution p and a draft distribution q, one value a position, no reduction.

Each docstring says the formula, the source, the gradient, why one would use it, and when it fails. `spec.LOSSES` holds
those that an expression may name.

Every loss takes log p and log q, (..., V), normalised and already at the temperature of the regime, and
returns (...,). Half precision is raised to float32. Gradients are given in the draft's logits z,
q = softmax(z), with I_v = 1[q_v <= p_v] and S = sum_v q_v I_v; at a tie q_v = p_v `minimum` splits the gradient.
Zero probabilities are log = -inf, on either side, and give finite values and gradients: 0 log 0 = 0, and an infinite
logarithm is replaced by log(tiny) of the dtype, with zero gradient.
"""

import math

import torch
from torch import Tensor

from inference.sampling import wide


def alpha(logp: Tensor, logq: Tensor) -> Tensor:
    """Acceptance probability sum_v min(p, q) = 1 - TV(p, q) (Leviathan et al. 2023, arXiv 2211.17192)."""
    return torch.minimum(wide(logp), wide(logq)).exp().sum(-1)


def misaligned(ours: Tensor, theirs: Tensor) -> Tensor:
    """1 - cosine of the draft's and the target's final hidden states (..., D) -> (...), in [0, 2]: an auxiliary loss
    for early training, for drafts with the target's width and head (DistilBERT, Sanh et al. 2019, arXiv 1910.01108)."""
    return 1 - torch.cosine_similarity(wide(ours), wide(theirs).detach(), dim=-1)


def alpha_greedy(logp: Tensor, logq: Tensor) -> Tensor:
    """Acceptance p(argmax q) in an engine that drafts greedily: `alpha` of p and a one-hot q."""
    return _at(wide(logp), logq.argmax(-1)).exp()


def entropy(logp: Tensor) -> Tensor:
    """-sum_v p log p, in nats."""
    logp = wide(logp)
    return -(logp.exp() * _finite(logp)).sum(-1)


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(p || q) = sum_v p log(p / q) (Kullback and Leibler 1951). dL/dz = q - p.

    Why: convex in z, with a bounded gradient that vanishes only at q = p: a stable start, and the baseline. Fails a
    small draft: it rewards covering all of p, while acceptance depends on the overlap alone. At q = 0 < p (a pruned
    draft vocabulary) the divergence is infinite; log q is then the constant log(tiny).
    """
    logp, logq = wide(logp), wide(logq)
    return (logp.exp() * (_finite(logp) - _finite(logq))).sum(-1)


def tv(logp: Tensor, logq: Tensor) -> Tensor:
    """Total variation 1 - sum_v min(p, q), the probability of rejection (Leviathan et al. 2023). dL/dz = -q (I - S).

    Why: it is exactly the token rule's rejection rate. Fails at small overlap, since its gradient vanishes there: warm-
    start with `kl`. Gains next to nothing on a target that decodes at temperature 0.
    """
    return 1 - alpha(logp, logq)


def nla(logp: Tensor, logq: Tensor) -> Tensor:
    """-log alpha = -log sum_v min(p, q) (arXiv 2602.23881). dL/dz = -q (I - S) / alpha.

    Why: like `tv`, but its gradient does not vanish at small overlap; cross-entropy if p is one-hot; no setting. Fails
    on texts with hopeless positions, which it weighs most. Zero overlap gives -log(tiny) with zero gradient.
    """
    return _neg_log_sum(torch.minimum(wide(logp), wide(logq)))


def lk(logp: Tensor, logq: Tensor, eta: float = 3.0, alpha: Tensor | None = None) -> Tensor:
    """w KL + (1 - w) TV, w = exp(-eta alpha) (LK, arXiv 2602.23881).

    Why: `kl` at low overlap, `tv` at high overlap, without a schedule. Its gradient treats w as a constant,
    w (q - p) - (1 - w) q (I - S), so its value may rise while the draft improves. alpha: an aggregated acceptance that
    broadcasts to (...,), default this position's own. eta: 3, or 10 for Medusa heads.
    """
    distance = tv(logp, logq)
    w = torch.exp(-eta * (1 - distance if alpha is None else alpha).detach())
    return w * kl(logp, logq) + (1 - w) * distance


def rkl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(q || p) = sum_v q log(q / p), the reverse (Gu et al. 2024, arXiv 2306.08543). dL/dz = q (log(q/p) - L).

    Why: a draft that cannot cover p concentrates on p's largest tokens. Fails by ignoring the others, and on truncated
    distributions. Raises ValueError if p = 0 < q anywhere (a truncated or greedy p): it is infinite for any draft.
    """
    if bool(((logp == -torch.inf) & (logq > -torch.inf)).any()):
        raise ValueError("rkl needs p > 0 wherever q > 0: use another loss with a truncated or greedy target")
    return kl(logq, logp)


def jsd(logp: Tensor, logq: Tensor) -> Tensor:
    """Jensen-Shannon KL(p || m)/2 + KL(q || m)/2, m = (p + q)/2 (Lin 1991). At most log 2.

    Why: between `kl` and `rkl`, bounded, finite for truncated distributions. Fails at small overlap: its gradient
    vanishes. dL/dz = q/2 (log(2q/(p+q)) - sum_v q log(2q/(p+q))).
    """
    logm = torch.logaddexp(_finite(wide(logp)), _finite(wide(logq))) - math.log(2)
    return (kl(logp, logm) + kl(logq, logm)) / 2


def greedy(logp: Tensor, logq: Tensor) -> Tensor:
    """-log q(argmax p), cross-entropy with the target's most probable token. dL/dz = q - e, e one-hot at it.

    Why: a target that decodes at temperature 0, whose distribution is one-hot. Fails at any other temperature: the
    draft becomes more confident than p.
    """
    return -_at(_finite(wide(logq)), logp.argmax(-1))


def match(logp: Tensor, logq: Tensor) -> Tensor:
    """-log sum_v p q, the probability that a draw of p and one of q agree. dL/dz = q - p q / sum_v p q.

    Why: engines that sample both sides and compare (the rule `match`). Fails for rules that test p / q: its optimum is
    argmax p with probability 1. Zero overlap gives -log(tiny) with zero gradient.
    """
    return _neg_log_sum(wide(logp) + wide(logq))


def greedy_draft(logp: Tensor, logq: Tensor, sharp: float = 4.0) -> Tensor:
    """1 - sum_v p q', q' = softmax(sharp log q), a smooth 1 - p(argmax q).

    Why: engines that draft argmax q and accept it with probability p. Only the maximum of q is trained, not the
    distribution. dL/dz = -sharp q' (p - sum_v p q'); as sharp grows the loss tends to 1 - p(argmax q).
    """
    return 1 - (wide(logp).exp() * torch.softmax(sharp * wide(logq), -1)).sum(-1)


def _floor(values: Tensor) -> float:
    return math.log(torch.finfo(values.dtype).tiny)


def _finite(logs: Tensor) -> Tensor:
    """-inf becomes log(tiny) with zero gradient: times p = 0 it is 0, while -inf would give NaN."""
    return logs.masked_fill(logs == -torch.inf, _floor(logs))


def _neg_log_sum(logs: Tensor) -> Tensor:
    """-log sum_v exp(logs); -log(tiny) with zero gradient (not NaN) if every entry is -inf."""
    empty = (logs == -torch.inf).all(-1)
    total = torch.logsumexp(logs.masked_fill(empty[..., None], 0.0), -1)
    return -total.masked_fill(empty, _floor(logs))


def _at(values: Tensor, x: Tensor) -> Tensor:
    return values.gather(-1, x[..., None]).squeeze(-1)
