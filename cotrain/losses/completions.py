"""The sampled tokens of texts, laid out from column 0: what the sequence losses and their recursion speak of.

Expected target calls are of the tokens that the target sampled: a round never starts in the prompt. B rows,
T positions, L tokens of the longest completion.
"""

import math

import torch
from torch import Tensor


def columns(sampled: Tensor) -> Tensor:
    """Positions of each row's completion, from its first token on; sampled (B, T) bool, one run a row -> (B, L). Behind
    a row's end stand positions that its length leaves out."""
    start = sampled.int().argmax(1, keepdim=True)
    longest = max(int(sampled.sum(1).max()), 1)
    return (start + torch.arange(longest, device=sampled.device)).clamp(max=sampled.shape[1] - 1)


def taken(values: Tensor, at: Tensor) -> Tensor:
    """values (B, T) or (B, T, D) at positions (B, L) -> (B, L) or (B, L, D)."""
    if values.ndim == 2:
        return values.gather(1, at)
    return values.gather(1, at.unsqueeze(-1).expand(*at.shape, values.shape[-1]))


def placed(values: Tensor, sampled: Tensor) -> Tensor:
    """values (B, L) of completions back at their positions (B, T), 0 elsewhere: undoes `taken`."""
    inside = torch.arange(values.shape[1], device=values.device) < sampled.sum(1, keepdim=True)
    return values.new_zeros(sampled.shape).masked_scatter(sampled, values[inside])


def possible(logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """log p(x) and log q(x), where p(x) = 0 as if p = q there: a token at the edge of a cut, which passes that round
    otherwise had sampled. Its ratio is no number, and a constant 1 teaches nothing."""
    never = logp == -math.inf
    return logp.masked_fill(never, 0.0), logq.masked_fill(never, 0.0)
