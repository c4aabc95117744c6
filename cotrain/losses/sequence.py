"""Losses of whole texts, computed from the log-probabilities of the tokens that the target sampled.

The formulas are in `cotrain.acceptance`. Arguments of the losses:

logp, logq: log p(x) and log q(x) of each text's tokens, (B, L). If the draft's distribution depends on the depth, they
are (B, L, K): entry [b, t, j] is for token t, drafted in a round that begins j tokens earlier.
k: draft length. lengths (B,): the number of tokens in each text.

Each loss returns a sum over all texts, a scalar.

Gradients reach q only through acceptance probabilities, so these losses need texts that the target sampled. On other
texts they train tokens that the target would never emit. They train only tokens of the text, and have almost no
gradient where q is nearly 0, so warm-start with a divergence.

The functions from `columns` on shift completions to column 0, since no round begins inside a prompt.

B texts, T positions, L tokens of the longest completion, K depths.
"""

import math

import torch
from torch import Tensor

from cotrain import acceptance
from cotrain.losses.guess import chosen, numbers, sent


def calls(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> Tensor:
    """Return the expected number of target calls under the token rule, summed over the texts; a scalar. Divided by the
    number of tokens, this is 1 / tau.

    logp, logq (B, L) or (B, L, K): log p(x) and log q(x) of each text's tokens. k: draft length, at most K. lengths
    (B,): tokens in each text.
    """
    return acceptance.expected_calls(acceptance.r_from(logp, logq), k, lengths).sum()


def calls_block(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> Tensor:
    """Return the expected number of target calls under block verification, summed over the texts; a scalar.

    logp, logq (B, L) or (B, L, K): log p(x) and log q(x) of each text's tokens. k: draft length, at most K. lengths
    (B,): tokens in each text.
    """
    return acceptance.expected_calls_block(acceptance.l_from(logp, logq), k, lengths).sum()


def columns(sampled: Tensor) -> Tensor:
    """Return (B, L): entry i of a row is the position of token i of its completion. sampled (B, T) bool: True at the
    tokens of the completion, which are consecutive. Columns past a completion's length have arbitrary positions."""
    start = sampled.int().argmax(1, keepdim=True)
    longest = max(int(sampled.sum(1).max()), 1)
    return (start + torch.arange(longest, device=sampled.device)).clamp(max=sampled.shape[1] - 1)


def to_columns(values: Tensor, at: Tensor) -> Tensor:
    """Return the entries of `values` at the positions `at` (B, L) of each row. values (B, T) gives (B, L); values (B,
    T, D) gives (B, L, D)."""
    if values.ndim == 2:
        return values.gather(1, at)
    return values.gather(1, at.unsqueeze(-1).expand(*at.shape, values.shape[-1]))


def from_columns(values: Tensor, sampled: Tensor) -> Tensor:
    """Return (B, T): each completion's values, at the positions where `sampled` is True, and 0 elsewhere. values (B,
    L): column i is for token i of the completion. sampled (B, T) bool: True at the tokens of completions. This is the
    inverse of `to_columns`."""
    inside = numbers(torch.arange(values.shape[1]) < sampled.sum(1, keepdim=True))
    at = sent(numbers(sampled), values.device)
    return values.new_zeros(sampled.numel()).index_copy(0, at, chosen(values, inside)).view(sampled.shape)


def mask_impossible(logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p(x) and log q(x), both set to 0 at tokens with p(x) = 0. logp, logq: two tensors of the same shape
    (...).

    Such a token lies at the edge of a top-k or top-p cut, and rounding put it outside. Its ratio q / p is undefined,
    and is taken as the constant 1, which has no gradient.
    """
    impossible = logp == -math.inf
    return logp.masked_fill(impossible, 0.0), logq.masked_fill(impossible, 0.0)
