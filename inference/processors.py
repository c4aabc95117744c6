"""Settings that read the text so far: penalties, biases, banned words, minimum length, own processors.

n rows of logits, V vocabulary. Each row is a place of some text with its own history (prompt, emitted tokens
and the drafts before the place), so the same function serves plain decoding and every place of a draft. The
order is that of transformers' generate: bias, repetition, presence, frequency, banned, minimum length, own.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from inference.sampling import Sampling, wide

Step = Callable[[Tensor, Tensor, int], Tensor]  # ids (1, T), logits (1, V), tokens generated -> logits (1, V)


def needs_history(sampling: Sampling) -> bool:
    """Whether any setting makes the distribution depend on the text beyond the model itself."""
    return bool(
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.logit_bias
        or sampling.banned
        or sampling.min_new_tokens
        or sampling.processors
    )


def process(
    logits: Tensor,
    histories: Sequence[Sequence[int]],
    new: Sequence[int],
    sampling: Sampling | Sequence[Sampling],
    eos_ids: Sequence[int] = (),
) -> Tensor:
    """The logits each row's history-dependent settings leave, before `sampling.probs`.

    logits (n, V); histories: n lists of ids, prompt included; new: how many of each were generated, drafts
    included; sampling: one or n; eos_ids: end tokens, held back with `stop_ids` until min_new_tokens.
    Returns (n, V) in the logits' dtype, float32 at least; the input is left as it was. Raises ValueError when
    lengths differ, an id is outside the vocabulary, or the settings leave a row no token at all.
    """
    n = logits.shape[0]
    regimes = [sampling] * n if isinstance(sampling, Sampling) else list(sampling)
    if not n == len(histories) == len(new) == len(regimes):
        lengths = f"{len(histories)} histories, {len(new)} counts and {len(regimes)} sampling settings"
        raise ValueError(f"{lengths} for {n} rows of logits")
    chains = {id(one): _chain(one, eos_ids) for one in regimes}
    out = wide(logits).clone()
    for i, (history, count, one) in enumerate(zip(histories, new, regimes, strict=True)):
        ids = torch.tensor([list(history)], dtype=torch.int64, device=logits.device)
        row = out[i : i + 1].clone()
        for step in chains[id(one)]:
            row = step(ids, row, count)
        out[i] = row[0]
    _refuse_empty(out)
    return out


def presence(ids: Tensor, logits: Tensor, penalty: float) -> Tensor:
    """Subtract the penalty from the logits of the tokens in ids (T,), once each: logits (1, V)."""
    return logits - penalty * (_counts(ids, logits) > 0)


def frequency(ids: Tensor, logits: Tensor, penalty: float) -> Tensor:
    """Subtract the penalty from the logits of the tokens in ids (T,), once an occurrence: logits (1, V)."""
    return logits - penalty * _counts(ids, logits)


def _counts(ids: Tensor, logits: Tensor) -> Tensor:
    """Occurrences (V,) in the dtype of the logits."""
    return torch.zeros_like(logits[0]).index_add_(0, ids, torch.ones_like(ids, dtype=logits.dtype))


def _generated(ids: Tensor, new: int) -> Tensor:
    """The last `new` ids of (1, T), as (new,)."""
    return ids[0, ids.shape[1] - new :]


def _chain(sampling: Sampling, eos_ids: Sequence[int]) -> list[Step]:
    """The steps a regime needs, in order."""
    steps: list[Step] = []
    if sampling.logit_bias:
        biases: list[list[list[int] | float]] = [[[t], b] for t, b in sampling.logit_bias.items()]
        steps.append(_plain(SequenceBiasLogitsProcessor(biases)))
    if sampling.repetition_penalty != 1:
        steps.append(_plain(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))))
    if sampling.presence_penalty != 0:
        steps.append(lambda ids, row, new: presence(_generated(ids, new), row, sampling.presence_penalty))
    if sampling.frequency_penalty != 0:
        steps.append(lambda ids, row, new: frequency(_generated(ids, new), row, sampling.frequency_penalty))
    if sampling.banned:
        # without eos ids: transformers drops them from the list, and a ban must not vanish
        steps.append(_plain(NoBadWordsLogitsProcessor([list(word) for word in sampling.banned])))
    ends = sorted({*eos_ids, *sampling.stop_ids})
    if sampling.min_new_tokens and ends:
        steps.append(lambda ids, row, new: _long_enough(ids, row, new, sampling.min_new_tokens, ends))
    return steps + [_plain(processor) for processor in sampling.processors]


def _plain(processor: Callable[[Tensor, Tensor], Tensor]) -> Step:
    return lambda ids, row, new: processor(ids, row)


def _long_enough(ids: Tensor, row: Tensor, new: int, least: int, ends: list[int]) -> Tensor:
    prompt = ids.shape[1] - new
    return MinNewTokensLengthLogitsProcessor(prompt, least, ends, device=str(row.device))(ids, row)


def _refuse_empty(logits: Tensor) -> None:
    empty = ~(logits > -math.inf).any(-1)
    if empty.any():
        row = int(empty.nonzero()[0])
        raise ValueError(
            f"row {row} has no token left: Sampling.banned, logit_bias, min_new_tokens or processors "
            "forbid every one the model allows"
        )
