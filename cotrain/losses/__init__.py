"""Losses between a target distribution and a draft distribution: formulas per position in `divergences`, per text in
`sequence`, names and sums in `spec`, a batch of guesses in `batch`, computed by `chunked`."""

from cotrain.losses.divergences import (
    alpha,
    alpha_greedy,
    entropy,
    greedy,
    greedy_draft,
    jsd,
    kl,
    lk,
    match,
    misaligned,
    nla,
    rkl,
    tv,
)

__all__ = [
    "alpha",
    "alpha_greedy",
    "entropy",
    "greedy",
    "greedy_draft",
    "jsd",
    "kl",
    "lk",
    "match",
    "misaligned",
    "nla",
    "rkl",
    "tv",
]
