"""The token rule from logits and log-normalisers: what `verify.token` says of the laws, without the laws.

Places are taken one at a time, so beyond the logits themselves (B, V) is the largest tensor: p and q exist
only where a row stops. For plain temperatures above 0; truncated regimes go through `sampling.probs`.
"""

import torch
from torch import Tensor

from inference.sampling import wide
from inference.verify import Verdict


def token_from_logits(
    target_logits: Tensor,
    draft_logits: Tensor,
    x: Tensor,
    u: Tensor,
    k: Tensor | None,
    temperature: Tensor,
) -> Verdict:
    """`verify.token` for p = softmax(target_logits / temperature), q = softmax(draft_logits / temperature).

    Accept x_i where u_i < exp(log p(x_i) - log q(x_i)), log p(x) = z_x - logsumexp(z) (Leviathan et al. 2023,
    2211.17192). target_logits (B, K+1, V), draft_logits (B, K, V), x (B, K), u (B, K), k (B,) or None,
    temperature (B,) above 0. Entries past k_b are never read. In the inputs' dtype, float32 at least.
    """
    B, K = x.shape
    k = torch.full((B,), K, dtype=torch.int64, device=x.device) if k is None else k
    alive = torch.ones(B, dtype=torch.bool, device=x.device)
    accepted = torch.zeros(B, dtype=torch.int64, device=x.device)
    for i in range(K):
        drafted = i < k
        at = torch.where(drafted, x[:, i], 0)
        log_p = _log_prob(target_logits[:, i], at, temperature)
        log_q = _log_prob(draft_logits[:, i], at, temperature)
        alive = alive & drafted & (u[:, i] < (log_p - log_q).exp())
        accepted = accepted + alive
    return Verdict(accepted, _law(target_logits, draft_logits, accepted, k, temperature))


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits / temperature: (B, V), (B,) -> (B, V), float32 at least."""
    logits = wide(logits)
    return logits / temperature.to(logits.dtype).unsqueeze(-1)


def _log_prob(logits: Tensor, x: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) at x: (B, V), (B,), (B,) -> (B,)."""
    z = _scaled(logits, temperature)
    return z.gather(-1, x.unsqueeze(-1)).squeeze(-1) - z.logsumexp(-1)


def _law(target_logits: Tensor, draft_logits: Tensor, n: Tensor, k: Tensor, temperature: Tensor) -> Tensor:
    """norm(max(p_n - q_n, 0)), or p_n where n = k or no mass is left: (B, V)."""
    row = torch.arange(n.shape[0], device=n.device)
    p = _scaled(target_logits[row, n], temperature).softmax(-1)
    if draft_logits.shape[1] == 0:
        return p
    q = _scaled(draft_logits[row, n.clamp(max=draft_logits.shape[1] - 1)], temperature).softmax(-1)
    rest = (p - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where((n == k).unsqueeze(-1) | ~(mass > 0), p, rest / mass)
