"""Losses of whole texts, from the log-probabilities of the tokens that the target sampled.

Formulas are in `cotrain.acceptance`. logp, logq: log p(x) and log q(x) of each text's tokens, (B, L); or (B, L, K) for
drafts whose distribution depends on the depth: entry [b, t, j] is of token t as drafted by a round that starts j tokens
before it. k: draft length; lengths (B,): tokens of each text. Each loss returns a sum; `LossDefinition.over` says by
what it is divided. Gradients reach q only through acceptance probabilities, so these losses need texts of the target
itself: on other texts they teach tokens that the target would never emit. They teach nothing about tokens that the text
does not hold, and nothing at positions with q nearly 0: warm-start with a divergence.

The lower half lays out completions from column 0, since a round never starts inside a prompt. B texts, T positions,
L tokens of the longest completion.
"""

import math

import torch
from torch import Tensor

from cotrain import acceptance


def length(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> Tensor:
    """Minus the expected tokens of a round by the token rule, averaged over a text's starts: `acceptance.length`."""
    return acceptance.length(acceptance.r_from(logp, logq), k, lengths).sum()


def length_block(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> Tensor:
    """The same under block verification: `acceptance.length_block`."""
    return acceptance.length_block(acceptance.l_from(logp, logq), k, lengths).sum()


def calls(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> Tensor:
    """Expected target calls, 1 / tau once divided by the tokens: `acceptance.calls`."""
    return acceptance.calls(acceptance.r_from(logp, logq), k, lengths).sum()


def calls_block(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> Tensor:
    """The same under block verification, 1 / block tau once divided by the tokens: `acceptance.calls_block`."""
    return acceptance.calls_block(acceptance.l_from(logp, logq), k, lengths).sum()


def columns(sampled: Tensor) -> Tensor:
    """Positions of each row's completion from its first token on; sampled (B, T) bool, one run of True a row -> (B, L).
    Columns past a row's own length hold arbitrary positions."""
    start = sampled.int().argmax(1, keepdim=True)
    longest = max(int(sampled.sum(1).max()), 1)
    return (start + torch.arange(longest, device=sampled.device)).clamp(max=sampled.shape[1] - 1)


def to_columns(values: Tensor, at: Tensor) -> Tensor:
    """values (B, T) or (B, T, D) at positions (B, L) -> (B, L) or (B, L, D)."""
    if values.ndim == 2:
        return values.gather(1, at)
    return values.gather(1, at.unsqueeze(-1).expand(*at.shape, values.shape[-1]))


def from_columns(values: Tensor, sampled: Tensor) -> Tensor:
    """values (B, L) of completions at their positions (B, T), 0 elsewhere: the inverse of `to_columns`."""
    inside = torch.arange(values.shape[1], device=values.device) < sampled.sum(1, keepdim=True)
    return values.new_zeros(sampled.shape).masked_scatter(sampled, values[inside])


def mask_impossible(logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """log p(x) and log q(x), both 0 at tokens with p(x) = 0: rounding moved a token on the edge of a top-k or top-p cut
    outside it. Its ratio q / p is undefined; a constant ratio of 1 has no gradient."""
    impossible = logp == -math.inf
    return logp.masked_fill(impossible, 0.0), logq.masked_fill(impossible, 0.0)
