"""Losses between a target distribution and a draft distribution: formulas in `divergences`, of texts in `sequence`, all
by name in `registry`, sums in `spec`, chunks in `chunked`, depths in `over_guesses`."""

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
