"""Losses between a target distribution and a draft distribution: formulas per position in `divergences`, per text in
`sequence`, names and sums in `spec`, a batch of guesses in `batch`, computed by `chunked`."""

from cotrain.losses.divergences import (
    alpha,
    alpha_greedy,
    ce,
    entropy,
    greedy,
    greedy_draft,
    hellinger,
    jsd,
    kl,
    lk,
    match,
    misaligned,
    mix,
    nla,
    rkl,
    tv,
    tvpp,
)

__all__ = [
    "alpha",
    "alpha_greedy",
    "ce",
    "entropy",
    "greedy",
    "greedy_draft",
    "hellinger",
    "jsd",
    "kl",
    "lk",
    "match",
    "misaligned",
    "mix",
    "nla",
    "rkl",
    "tv",
    "tvpp",
]
