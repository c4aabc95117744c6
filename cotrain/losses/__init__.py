"""Losses between a target distribution and a draft distribution.

`divergences` has the formulas per position, and `sequence` those per text. `spec` has the names and sums of losses.
`batch` computes the loss of a batch of guesses, in the chunks of `chunked`.
"""

from cotrain.losses.divergences import (
    alpha,
    alpha_greedy,
    entropy,
    greedy,
    greedy_draft,
    kl,
    lk,
    nla,
    tv,
)

__all__ = [
    "alpha",
    "alpha_greedy",
    "entropy",
    "greedy",
    "greedy_draft",
    "kl",
    "lk",
    "nla",
    "tv",
]
