"""Check (a) of the verdict: the coupled text must equal the plain text token for token, except at ties that rounding
decides.

Coupled decoding emits the argmax of logit + temperature * Gumbel noise. This argument is called the score; at
temperature 0 it is the logit itself. Passes of different widths round differently, so two nearly equal scores may
change their order. The tolerance is the largest measured change of a gap between two scores, bounded by the dtype. It
decides which differences are ties. A rows, n positions, V vocabulary.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.engine import Engine
from inference.exactness.agreement import GAP, most
from inference.exactness.teacher_forced import Parents, TextLogits, depth_of, teacher_forced
from inference.lookup.suffixes import common_prefix
from inference.models.lm import LM
from inference.sampling import Sampling, probs
from inference.sampling.noise import gumbel
from inference.verify.rules import RULES

MARGIN = 2  # rounding seldom changes a gap by more than the measured maximum, and hardly ever by more than twice that


@dataclass(frozen=True)
class TextCheck:
    """The result of check (a): how many coupled texts equal the plain text.

    prompts: number of prompts. equal: number of prompts whose coupled text equals the plain text. ties, unexplained:
    numbers of tokens at which plain decoding, after the same text, chooses another token; rounding explains the ties,
    not the others. noise: the largest change of the gap between a position's two best scores, from passes of one id to
    passes of k + 1 ids; at least the general rounding of the logits. gap: the largest gap between the scores of the two
    tokens at a difference, 0 without differences. limit: the largest gap that the dtype can explain. compared: number
    of tokens compared. tokens: number of tokens in the measured texts.
    """

    prompts: int
    equal: int
    ties: int
    unexplained: int
    noise: float
    gap: float
    limit: float = math.inf
    compared: int = 0
    tokens: int = 0

    @property
    def passed(self) -> bool:
        return self.unexplained == 0

    @property
    def explained(self) -> float:
        """Return the largest score gap that rounding explains."""
        return min(MARGIN * self.noise, self.limit)

    def line(self) -> str:
        """Return this check's numbers as one sentence. `Verdict.lines` appends whether the check passed."""
        share = f", {self.compared} of {self.tokens} tokens compared" if self.tokens else ""
        said = f", but for {self.ties} ties that rounding decides" if self.ties else ""
        said += f", but for {self.unexplained} tokens that it does not explain" if self.unexplained else ""
        said += f", in {self.prompts - self.equal} of them" if said else ""
        return (
            f"with shared noise the texts of {self.prompts} prompts are plain decoding's, token for token{said} "
            f"(largest score gap at a difference {self.gap:.2g}; rounding changes gaps by up to {self.noise:.2g}, and "
            f"by its dtype at most {self.limit:.2g}){share}"
        )


class Difference(NamedTuple):
    """A position at which a text differs from the plain text. plain, other: the plain token and the text's token. gap:
    the gap between their scores in the plain pass of one id. logits (V,), g (V,): logits and Gumbel noise of this pass.
    text: number of the text. limit: the largest gap that rounding in the model's dtype may explain."""

    gap: float
    logits: Tensor
    g: Tensor
    plain: int
    other: int
    text: int = 0
    limit: float = math.inf


def check_coupled(
    engine: Engine,
    prompts: list[list[int]],
    ids: list[int],
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    bound: float,
    tree: Parents | None = None,
) -> TextCheck:
    """Return the result of check (a). The engine decodes the prompts with shared noise. Then its passes of one id show
    which token plain decoding chooses at every position (`compare_text`).

    ids: keys of the prompts' random numbers. seed: of the coupled run. bound: the largest gap that rounding may
    explain, in root mean squares of the logits. It is GAP times the general rounding of the logits; the noise is at
    least this rounding. tree: the parents of the tree that the engine drafts, None for chains. sampling,
    max_new_tokens: the settings and the limit of the run. Raises RequestError if a prompt ends in an error.
    """
    coupled = copy.copy(engine)  # the same target and proposer, slots and CUDA graphs included
    coupled.rule = RULES["coupled"]
    out = coupled.generate(
        prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, ids=ids, ignore_eos=True
    )
    engine.slots.current = None
    texts = out.whole().tokens  # a text that ends in an error is only a part of the plain text
    compared = compare_text(
        engine.target,
        prompts,
        texts,
        sampling,
        width=verifying_width(engine, prompts),
        noise_keys=(ids, seed),
        bound=bound,
        tree=tree,
    )
    equal = len(prompts) - len({difference.text for difference in compared.differences})
    noise = max(compared.noise, compared.limit / GAP)  # short texts may show no noise, although logits are rounded
    ties, gap = _ties_and_gap(compared.differences, noise, sampling)
    unexplained = len(compared.differences) - ties
    emitted = sum(map(len, texts))
    return TextCheck(len(prompts), equal, ties, unexplained, noise, gap, compared.limit, compared.tokens, emitted)


def verifying_width(engine: Engine, prompts: list[list[int]]) -> int:
    """Return the number of ids per row in the engine's verifying passes: the anchor and the longest draft."""
    return max(engine.policy.lengths(prompts)) + 1


def check_text(
    model: PreTrainedModel,
    prompts: list[list[int]],
    plain: list[list[int]],
    coupled: list[list[int]],
    noise_keys: tuple[list[int], int],
    sampling: Sampling,
    vocabulary: int,
    k: int,
    rows: int = 8,
) -> TextCheck:
    """Return the result of check (a) for texts of another server, such as vLLM in tests/engines. Only the first
    difference of each text counts, since plain decoding is unknown after it.

    plain, coupled: for each prompt, the new ids of the plain and of the coupled text. noise_keys: (ids, seed) of the
    noise that both share. k: drafts per round. rows: the noise is measured on the texts that differ, and on the first
    `rows` texts. sampling: the settings of both runs. vocabulary: number of ids that can be emitted.
    """
    differ = [i for i in range(len(prompts)) if first_difference(plain[i], coupled[i]) is not None]
    chosen = sorted({*range(min(rows, len(prompts))), *differ})
    noise, differences = compare_passes(
        model,
        [prompts[i] for i in chosen],
        [plain[i] for i in chosen],
        sampling,
        vocabulary=vocabulary,
        width=k + 1,
        rows=rows,
        noise_keys=([noise_keys[0][i] for i in chosen], noise_keys[1]),
        others=[coupled[i] for i in chosen],
        bound=GAP * most(model),
    )
    ties, gap = _ties_and_gap(differences, noise, sampling)
    limit = max((difference.limit for difference in differences), default=math.inf)
    return TextCheck(len(prompts), len(prompts) - len(differ), ties, len(differ) - ties, noise, gap, limit)


def _ties_and_gap(differences: list[Difference], noise: float, sampling: Sampling) -> tuple[int, float]:
    ties = sum(excused(difference, noise, sampling) for difference in differences)
    return ties, max((difference.gap for difference in differences), default=0.0)


def excused(difference: Difference, noise: float, sampling: Sampling) -> bool:
    """Return whether a difference is a tie. The tolerance is MARGIN times the measured `noise`, but at most the
    difference's limit. sampling: the settings of both texts."""
    return difference.limit >= 0 and is_tie(difference, min(MARGIN * noise, difference.limit), sampling)


def is_tie(difference: Difference, noise: float, sampling: Sampling) -> bool:
    """Return whether rounding of size `noise` explains a difference. It does if the gap is at most `noise`. It also
    does if plain decoding chooses the other token once one of the two tokens' logits is changed by `noise`: such a
    token is near an edge of top-k, top-p or min-p. sampling: the settings of both texts."""
    return difference.gap <= noise or any(
        _choice(difference, token, shift, sampling) == difference.other
        for token, shift in ((difference.other, noise), (difference.plain, -noise))
    )


def _choice(difference: Difference, token: int, shift: float, sampling: Sampling) -> int:
    """Return the token that plain decoding chooses if `shift` is added to the logit of `token`."""
    logits = difference.logits.double().clone()
    logits[token] += shift
    return int((probs(logits, sampling).log() + difference.g).argmax())


class Compared(NamedTuple):
    """The result of comparing texts with plain decoding. differences: one for each position at which they differ.
    tokens: number of tokens compared. noise: the largest change, in passes of several ids, of the gap between a
    position's two best scores. limit: the largest change that the dtype allows."""

    differences: list[Difference]
    tokens: int
    noise: float
    limit: float


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
    """Compare each token of `texts` with the choice of plain decoding after the same text. The result's noise is for
    passes of `width` ids, or over trees of the shape `tree`.

    lm: the LM of the engine under test. prompts, texts: the ids of each prompt, and the new ids after it. noise_keys:
    (ids, seed) of the Gumbel noise, None for none. bound: the largest gap that rounding may explain, in root mean
    squares of the logits. A difference that rounding within `bound` cannot explain has empty `logits` and `g`; a wrong
    engine would fill the memory with them. tree: the parents of the tree, None for chains.
    """
    best, differences, tokens, limit = [], [], 0, 0.0
    size = width if tree is None else 1 + depth_of(tree)
    for block, scores, g in _scored(lm, prompts, texts, sampling, size, 1, noise_keys):
        best.append(scores.topk(2, -1))
        differences += _chosen_otherwise(block, scores, g, sampling, bound)
        tokens, limit = tokens + int(block.valid.sum()), max(limit, float(bound * block.scale[block.valid].max()))
    noise = _noise(best, _scored(lm, prompts, texts, sampling, size, width, noise_keys, tree))
    return Compared(differences, tokens, noise, limit)


def _chosen_otherwise(
    block: TextLogits, scores: Tensor, g: Tensor, sampling: Sampling, bound: float
) -> list[Difference]:
    """Return the differences of a block: positions at which plain decoding, the argmax of log p + g, chooses another
    token than the text's. scores, g (A, n, V): scores and Gumbel noise. bound: the largest gap that rounding may
    explain, in root mean squares of the logits."""
    choice = (probs(block.logits.flatten(0, 1), sampling).view(block.logits.shape).log() + g).argmax(-1)
    differences = []
    for a, j in ((choice != block.x) & block.valid).nonzero().tolist():
        plain, other = int(choice[a, j]), int(block.x[a, j])
        gap, limit = float(abs(scores[a, j, plain] - scores[a, j, other])), float(bound * block.scale[a, j])
        one = Difference(gap, block.logits[a, j], g[a, j], plain, other, block.rows[a], limit)
        if is_tie(one, limit, sampling):
            differences.append(one._replace(logits=one.logits.clone(), g=one.g.clone()))
        else:
            differences.append(one._replace(logits=one.logits.new_empty(0), g=one.g.new_empty(0), limit=-math.inf))
    return differences


def noise_of(lm: LM, prompts: list[list[int]], texts: list[list[int]], sampling: Sampling, width: int) -> float:
    """Return the noise of an LM's passes of `width` ids: the largest change of the gap between a position's two best
    logits, from passes of one id, over all tokens of `texts`. prompts: the ids before each text."""
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
) -> Iterator[tuple[TextLogits, Tensor, Tensor]]:
    """Yield blocks of passes of `width` ids or over trees. Each comes with its scores and its Gumbel noise, both (A, n,
    V). prompts, texts: the ids of each prompt, and the new ids after it. block: the largest number of tokens of a text
    in a block. noise_keys: (ids, seed) of the Gumbel noise, None for none."""
    for part in teacher_forced(lm, prompts, texts, sampling, block=block, width=width, tree=tree):
        g = _gumbel(part, noise_keys)
        yield part, part.logits.double() + sampling.temperature * g, g


def _noise(best: list[Any], again: Iterable[tuple[TextLogits, Tensor, Tensor]]) -> float:
    """Return the largest change of the gap between each position's two best scores from one run of passes to another.
    best: for each block of the first run, its two best scores. again: the blocks of the second run."""
    pairs = zip(best, again, strict=True)
    return max(_moved(two.values, scores.gather(-1, two.indices), block.valid) for two, (block, scores, _) in pairs)


def _moved(pair: Tensor, again: Tensor, valid: Tensor) -> float:
    """Return the largest change of the gap between a position's two scores, from `pair` to `again`, both (A, n, 2).
    valid (A, n): whether the position counts. Return 0 if no position has two possible tokens."""
    change = ((pair[..., 0] - pair[..., 1]) - (again[..., 0] - again[..., 1])).abs()
    change = change[valid & change.isfinite()]
    return float(change.max()) if change.numel() else 0.0


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
    """Return the noise and the differences. The noise is the largest change of the gap between a position's two best
    scores, from passes of one id to passes of `width` ids, over all tokens of `texts`. If `others` are given, the
    differences are the first difference between each text and the same text of `others`; otherwise there are none.

    prompts: the ids before each text. vocabulary: number of ids that can be emitted. rows: number of texts per pass.
    noise_keys: (ids, seed) of the Gumbel noise, None for no noise. bound: the largest gap that rounding may explain
    (`Difference.limit`), in root mean squares of the logits. If one text is a prefix of the other, there is no
    difference.
    """
    settings: dict[str, Any] = {"vocabulary": vocabulary, "block": width, "rows": rows}
    narrow = teacher_forced(model, prompts, texts, sampling, width=1, **settings)
    wide = teacher_forced(model, prompts, texts, sampling, width=width, **settings)
    noise, differences = 0.0, []
    for one, many in zip(narrow, wide, strict=True):
        g = _gumbel(one, noise_keys)
        scores, again = (block.logits.double() + sampling.temperature * g for block in (one, many))
        best = scores.topk(2, -1).indices
        noise = max(noise, _moved(scores.gather(-1, best), again.gather(-1, best), one.valid))
        if others is not None:
            differences += _differences(one, scores, g, texts, others, bound)
    return noise, differences


def _gumbel(block: TextLogits, noise_keys: tuple[list[int], int] | None) -> Tensor:
    """Return the Gumbel noise (A, n, V) for a block's tokens, or zeros if noise_keys, the (ids, seed) of the noise, is
    None."""
    if noise_keys is None:
        return torch.zeros_like(block.logits, dtype=torch.float64)
    ids, seed = noise_keys
    _, n, V = block.logits.shape
    row = torch.tensor([ids[i] for i in block.rows], device=block.logits.device)
    position = torch.arange(block.start, block.start + n, device=row.device).expand(len(block.rows), n)
    return gumbel(seed, row, position, V)


def _differences(
    block: TextLogits, scores: Tensor, g: Tensor, texts: list[list[int]], others: list[list[int]], bound: float
) -> list[Difference]:
    """Compare each text with the same text of `others`. Return the first differences that lie in this block. scores, g
    (A, n, V): the block's scores and Gumbel noise. bound: the largest gap that rounding may explain, in root mean
    squares of the logits."""
    differences = []
    for a, i in enumerate(block.rows):
        at = first_difference(texts[i], others[i])
        if at is not None and block.start <= at < min(block.start + scores.shape[1], len(texts[i]), len(others[i])):
            row, plain, other = scores[a, at - block.start], texts[i][at], others[i][at]
            logits, noise = block.logits[a, at - block.start].clone(), g[a, at - block.start].clone()
            limit = float(bound * block.scale[a, at - block.start])
            gap = abs(float(row[plain] - row[other]))
            differences.append(Difference(gap, logits, noise, plain, other, i, limit))
    return differences


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first index at which the lists differ, or None if they are equal. A token that one list lacks counts
    as a difference."""
    shared = common_prefix(a, b)
    return None if len(a) == len(b) == shared else shared


def near_ties(logits: Tensor, noise: float) -> Tensor:
    """Return (...) bool: whether the two best of logits (..., V) are at most `noise` apart, so that rounding may decide
    the argmax."""
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1] <= noise
