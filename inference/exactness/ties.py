"""Where rounding may decide: first differences of two texts made from the same noise, and what passes of
other widths change.

A score is logit + temperature * Gumbel noise, in units of logits: its argmax is what coupled decoding emits,
and at temperature 0 it is the logit itself. A rows, n positions, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.exactness.teacher_forced import Block, teacher_forced
from inference.exactness.tree_passes import Parents, depth_of
from inference.models.lm import LM
from inference.noise import gumbel
from inference.sampling import Sampling, probs

MARGIN = 2  # a gap that rounding moved by more than was seen elsewhere is rare; by more than twice that, rarer still


class Difference(NamedTuple):
    """A place where a text leaves the plain one: score gap of the two tokens there in the plain side's pass of one
    id, its logits (V,) and noise (V,), the two tokens; text: its number; limit: the largest gap that rounding in the
    model's dtype may explain."""

    gap: float
    logits: Tensor
    g: Tensor
    plain: int
    other: int
    text: int = 0
    limit: float = math.inf


class Compared(NamedTuple):
    """Places where texts leave plain decoding, tokens compared, and how far passes of several ids moved the gap of a
    position's two best scores: noise, at most; limit: what the dtype allows, at most."""

    differences: list[Difference]
    tokens: int
    noise: float
    limit: float


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
    bound: float = math.inf,
) -> tuple[float, list[Difference]]:
    """Largest change of a score gap between passes of one id and of `width` ids, over all tokens of `texts`;
    and where `others`, if given, first differ from `texts`.

    The gap is that of a position's two best scores, the one that decides what is emitted. noise_keys: (ids,
    seed) of the Gumbel noise, None for no noise. bound: `Difference.limit`, in root mean squares of the logits. A text
    that is merely shorter has no place at which its tokens differ.
    """
    settings: dict[str, Any] = {"vocabulary": vocabulary, "block": width, "rows": rows}
    narrow = teacher_forced(model, prompts, texts, sampling, width=1, **settings)
    wide = teacher_forced(model, prompts, texts, sampling, width=width, **settings)
    noise, found = 0.0, []
    for one, many in zip(narrow, wide, strict=True):
        g = _gumbel(one, noise_keys)
        scores, again = (block.logits.double() + sampling.temperature * g for block in (one, many))
        noise = max(noise, _change(scores, again, one.valid))
        if others is not None:
            found += _differences(one, scores, g, texts, others, bound)
    return noise, found


def compare_text(
    lm: LM,
    prompts: list[list[int]],
    texts: list[list[int]],
    sampling: Sampling,
    *,
    width: int,
    bound: float,
    noise_keys: tuple[list[int], int] | None = None,
    tree: Parents | None = None,
) -> Compared:
    """What plain decoding chooses at every token of `texts`, given the text before it and noise_keys, the (ids, seed)
    of the Gumbel noise; and the noise of passes of `width` ids, or over trees of a shape, as in `compare_passes`.

    lm: the one that runs, of the engine in question. bound: as in `compare_passes`; differences beyond it come without
    logits and noise, so that those of a wrong engine are not all held.
    """
    best, found, tokens, limit = [], [], 0, 0.0
    size = width if tree is None else 1 + depth_of(tree)
    for block, scores, g in _scored(lm, prompts, texts, sampling, size, 1, noise_keys):
        best.append(scores.topk(2, -1))
        found += _chosen_otherwise(block, scores, g, sampling, bound)
        tokens, limit = tokens + int(block.valid.sum()), max(limit, float(bound * block.scale[block.valid].max()))
    noise = _noise(best, _scored(lm, prompts, texts, sampling, size, width, noise_keys, tree))
    return Compared(found, tokens, noise, limit)


def noise_of(lm: LM, prompts: list[list[int]], texts: list[list[int]], sampling: Sampling, width: int) -> float:
    """As `compare_passes`, of an `LM` and without Gumbel noise."""
    best = [scores.topk(2, -1) for _, scores, _ in _scored(lm, prompts, texts, sampling, width, 1, None)]
    return _noise(best, _scored(lm, prompts, texts, sampling, width, width, None))


def _scored(
    lm: LM,
    prompts: list[list[int]],
    texts: list[list[int]],
    sampling: Sampling,
    block: int,
    width: int,
    noise_keys: tuple[list[int], int] | None,
    tree: Parents | None = None,
) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Blocks of passes of `width` ids or over trees, with their scores and their noise, (A, n, V) each."""
    for part in teacher_forced(lm, prompts, texts, sampling, block=block, width=width, tree=tree):
        g = _gumbel(part, noise_keys)
        yield part, part.logits.double() + sampling.temperature * g, g


def _noise(best: list[Any], again: Iterable[tuple[Block, Tensor, Tensor]]) -> float:
    """Largest change of the gap of each position's two best scores, `best` of other passes."""
    pairs = zip(best, again, strict=True)
    return max(_moved(two.values, scores.gather(-1, two.indices), block.valid) for two, (block, scores, _) in pairs)


def _chosen_otherwise(block: Block, scores: Tensor, g: Tensor, sampling: Sampling, bound: float) -> list[Difference]:
    """Places where the argmax of log p + g, the noise g (A, n, V), is not the text's token."""
    choice = (probs(block.logits.flatten(0, 1), sampling).view(block.logits.shape).log() + g).argmax(-1)
    found = []
    for a, j in ((choice != block.x) & block.valid).nonzero().tolist():
        plain, other = int(choice[a, j]), int(block.x[a, j])
        gap, limit = float(abs(scores[a, j, plain] - scores[a, j, other])), float(bound * block.scale[a, j])
        one = Difference(gap, block.logits[a, j], g[a, j], plain, other, block.rows[a], limit)
        if is_tie(one, limit, sampling):
            found.append(one._replace(logits=one.logits.clone(), g=one.g.clone()))
        else:
            found.append(one._replace(logits=one.logits.new_empty(0), g=one.g.new_empty(0), limit=-math.inf))
    return found


def _gumbel(block: Block, noise_keys: tuple[list[int], int] | None) -> Tensor:
    """Gumbel noise (A, n, V) of the tokens of a block, zeros without keys."""
    if noise_keys is None:
        return torch.zeros_like(block.logits, dtype=torch.float64)
    ids, seed = noise_keys
    _, n, V = block.logits.shape
    row = torch.tensor([ids[i] for i in block.rows], device=block.logits.device)
    position = torch.arange(block.start, block.start + n, device=row.device).expand(len(block.rows), n)
    return gumbel(seed, row, position, V)


def _change(scores: Tensor, again: Tensor, valid: Tensor) -> float:
    """`_moved` of the two best of `scores` (A, n, V)."""
    best = scores.topk(2, -1).indices
    return _moved(scores.gather(-1, best), again.gather(-1, best), valid)


def _moved(pair: Tensor, again: Tensor, valid: Tensor) -> float:
    """Largest change of the gap between the two scores of a position, pair and again (A, n, 2); 0 where fewer than two
    are possible."""
    change = ((pair[..., 0] - pair[..., 1]) - (again[..., 0] - again[..., 1])).abs()
    change = change[valid & change.isfinite()]
    return float(change.max()) if change.numel() else 0.0


def _differences(
    block: Block, scores: Tensor, g: Tensor, texts: list[list[int]], others: list[list[int]], bound: float
) -> list[Difference]:
    found = []
    for a, i in enumerate(block.rows):
        at = first_difference(texts[i], others[i])
        if at is not None and block.start <= at < min(block.start + scores.shape[1], len(texts[i]), len(others[i])):
            row, plain, other = scores[a, at - block.start], texts[i][at], others[i][at]
            logits, noise = block.logits[a, at - block.start].clone(), g[a, at - block.start].clone()
            limit = float(bound * block.scale[a, at - block.start])
            found.append(Difference(abs(float(row[plain] - row[other])), logits, noise, plain, other, i, limit))
    return found


def excused(difference: Difference, noise: float, sampling: Sampling) -> bool:
    """Whether rounding explains a difference: noise that was measured, with a margin, no further than its limit."""
    return difference.limit >= 0 and is_tie(difference, min(MARGIN * noise, difference.limit), sampling)


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
    logits = difference.logits.double().clone()
    logits[token] += shift
    return int((probs(logits, sampling).log() + difference.g).argmax())


def near_ties(logits: Tensor, noise: float) -> Tensor:
    """Positions whose two best logits (..., V) are within the noise: their argmax is a matter of rounding."""
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1] <= noise
