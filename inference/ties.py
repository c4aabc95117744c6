"""Where rounding may decide: first differences of two texts made from the same noise, and what passes of
other widths change.

A score is logit + temperature * Gumbel noise, in units of logits: its argmax is what coupled decoding emits,
and at temperature 0 it is the logit itself. A rows, n positions, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference import streams
from inference.forced import Block, teacher_forced
from inference.sampling import Sampling, probs


class Difference(NamedTuple):
    """The first place where a text leaves the plain one: score gap of the two tokens there in the plain
    side's pass of one id, its logits (V,) and noise (V,), the two tokens."""

    gap: float
    logits: Tensor
    g: Tensor
    plain: int
    other: int


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First index at which the lists differ, a missing token included; None when they are equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def compare_passes(
    model: PreTrainedModel,
    prompts: list[list[int]],
    texts: list[list[int]],
    sampling: Sampling,
    *,
    vocabulary: int,
    width: int,
    rows: int = 8,
    noise_keys: tuple[list[int], int] | None = None,
    others: list[list[int]] | None = None,
) -> tuple[float, list[Difference]]:
    """Largest change of a score gap between passes of one id and of `width` ids, over all tokens of `texts`;
    and where `others`, if given, first differ from `texts`.

    The gap is that of a position's two best scores, the one that decides what is emitted. noise_keys: (ids,
    seed) of the Gumbel noise, None for no noise. A text that is merely shorter has no place at which its
    tokens differ.
    """
    settings = {"vocabulary": vocabulary, "block": width, "rows": rows}
    narrow = teacher_forced(model, prompts, texts, sampling, width=1, **settings)
    wide = teacher_forced(model, prompts, texts, sampling, width=width, **settings)
    noise, found = 0.0, []
    for one, many in zip(narrow, wide, strict=True):
        g = _gumbel(one, noise_keys) if noise_keys else torch.zeros_like(one.logits, dtype=torch.float64)
        scores, again = (block.logits.double() + sampling.temperature * g for block in (one, many))
        noise = max(noise, _change(scores, again, one.valid))
        if others is not None:
            found += _differences(one, scores, g, texts, others)
    return noise, found


def _gumbel(block: Block, noise_keys: tuple[list[int], int]) -> Tensor:
    """Gumbel noise (A, n, V) of the tokens of a block."""
    ids, seed = noise_keys
    _, n, V = block.logits.shape
    row = torch.tensor([ids[i] for i in block.rows], device=block.logits.device)
    position = torch.arange(block.start, block.start + n, device=row.device).expand(len(block.rows), n)
    return streams.gumbel(seed, row, position, V)


def _change(scores: Tensor, again: Tensor, valid: Tensor) -> float:
    """Largest change of the gap between the two best of `scores` (A, n, V); 0 where fewer than two are
    possible."""
    best = scores.topk(2, -1).indices
    gaps = [s.gather(-1, best) for s in (scores, again)]
    change = ((gaps[0][..., 0] - gaps[0][..., 1]) - (gaps[1][..., 0] - gaps[1][..., 1])).abs()
    change = change[valid & change.isfinite()]
    return float(change.max()) if change.numel() else 0.0


def _differences(
    block: Block, scores: Tensor, g: Tensor, texts: list[list[int]], others: list[list[int]]
) -> list[Difference]:
    found = []
    for a, i in enumerate(block.rows):
        at = first_difference(texts[i], others[i])
        if at is not None and block.start <= at < min(block.start + scores.shape[1], len(texts[i]), len(others[i])):
            row, plain, other = scores[a, at - block.start], texts[i][at], others[i][at]
            logits, noise = block.logits[a, at - block.start].clone(), g[a, at - block.start].clone()
            found.append(Difference(abs(float(row[plain] - row[other])), logits, noise, plain, other))
    return found


def is_tie(difference: Difference, noise: float, sampling: Sampling) -> bool:
    """Whether rounding of size `noise` explains a difference: the gap is at most that, or one of the two
    tokens is so near an edge of top-k, top-p or min-p that moving its logit by the noise makes the other
    side's choice."""
    return difference.gap <= noise or any(
        _choice(difference, token, shift, sampling) == difference.other
        for token, shift in ((difference.other, noise), (difference.plain, -noise))
    )


def _choice(difference: Difference, token: int, shift: float, sampling: Sampling) -> int:
    """What is emitted when one logit is moved."""
    logits = difference.logits.double()
    logits[token] += shift
    return int((probs(logits, sampling).log() + difference.g).argmax())


def near_ties(logits: Tensor, noise: float) -> Tensor:
    """Positions whose two best logits (..., V) are within the noise: their argmax is a matter of rounding."""
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1] <= noise
