"""Losses between a target law and a draft law: formulas in `divergences`, sums in `spec`, chunks in `chunked`."""

from cotrain.losses.divergences import (
    alpha,
    alpha_greedy,
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
