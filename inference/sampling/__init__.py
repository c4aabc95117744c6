"""Sampling: the settings of a request, distributions from logits, and draws from distributions by given uniforms."""

from inference.sampling.distributions import (
    Truncate,
    at_ids,
    certain,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    log_probs_at,
    one_hot,
    probs,
    probs_at,
    up_to,
    wide,
)
from inference.sampling.parameters import COLDEST, Processor, Sampling

__all__ = [
    "COLDEST",
    "Processor",
    "Sampling",
    "Truncate",
    "at_ids",
    "certain",
    "draw",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "log_probs_at",
    "one_hot",
    "probs",
    "probs_at",
    "up_to",
    "wide",
]
