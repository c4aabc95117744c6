"""Figures of target and draft at every token of emitted texts, computed by `pair_figures`.

B texts, T tokens of the longest, A texts per batch, n tokens per block, V vocabulary.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from inference.engine import Engine
from inference.exactness.figures import Figures
from inference.exactness.forced import forced
from inference.exactness.teacher_forced import TextLogits, teacher_forced
from inference.exactness.ties import MARGIN, near_ties, noise_of
from inference.models.lm import LM
from inference.output import Emitted
from inference.proposers.base import Proposer
from inference.sampling import Sampling, at_ids, one_hot, probs, up_to

LARGEST = 3.3  # standard deviations: the size of the largest of a thousand changes by rounding, see `ties`


def pair_figures(
    engine: Engine,
    proposer: Proposer,
    texts: Emitted,
    sampling: Sampling,
    max_new_tokens: int,
    noise: float,
    rows: int | None = None,
) -> Figures:
    """Return the figures of target and draft at every token of the texts. The passes are as wide as in decoding.

    engine: the engine that decoded the texts. proposer: its proposer. If the proposer has a `language_model`, both
    models run teacher-forced passes. The target reads k + 1 ids per pass; the draft reads one id, with its weights
    rounded as when it serves. Any other proposer runs forced rounds with the engine's target, in the engine's slots.
    sampling, max_new_tokens: the settings and the limit of the run. noise: the largest change, by rounding, of the gap
    between two scores of the target. rows: number of texts per pass; None for the engine's number of rows. Forced
    rounds always use the engine's number.
    """
    V, rows = engine.target.vocabulary, min(rows or engine.rows, len(texts.tokens))
    q_lm = proposer.language_model(rows, V)
    if q_lm is None:
        with_proposer = copy.copy(engine)  # the same target, slots and CUDA graphs included
        with_proposer.proposer = proposer
        figures = forced(with_proposer, texts, sampling, max_new_tokens, noise)
        return replace(figures, rounding=_rounding(noise, sampling))
    p_lm = LM(engine.target.model, rows, V)
    k = draft_lengths(engine, min(q_lm.context, engine.target.context), texts, max_new_tokens)
    certain = sampling.temperature == 0 or proposer.greedy
    noise_q = _draft_noise(q_lm, texts, sampling) if certain else 0.0
    block = int(k.max()) + 1
    p_blocks = teacher_forced(p_lm, texts.prompts, texts.tokens, sampling, block=block)
    q_blocks = teacher_forced(q_lm, texts.prompts, texts.tokens, sampling, block=block, width=1)
    values = torch.zeros(5, *k.shape, dtype=torch.float64)
    for p_block, q_block in zip(p_blocks, q_blocks, strict=True):
        logp, logq, alpha = _pair(p_block, q_block, sampling, proposer.greedy)
        near_p = near_ties(p_block.logits, noise) & (sampling.temperature == 0)
        near_q = near_ties(q_block.logits, noise_q) & certain
        columns = slice(p_block.start, p_block.start + p_block.x.shape[1])
        for value, one in zip(values, (logp, logq, alpha, near_p, near_q), strict=True):
            value[p_block.rows, columns] = one.double().cpu()
    lengths = texts.lengths
    inside = up_to(lengths, k.shape[1])
    values = values.masked_fill(~inside, 0.0)
    logp, logq, alpha, near_p, near_q = values
    return Figures(logp, logq, alpha, near_p > 0, near_q > 0, k, lengths, rounding=_rounding(noise, sampling))


def _rounding(noise: float, sampling: Sampling) -> float:
    """Return the standard deviation, in nats, of the change of log p - log q by rounding between passes. noise: the
    largest change of a gap between two scores."""
    return noise / (MARGIN * LARGEST * sampling.temperature) if sampling.temperature else 0.0


def draft_lengths(engine: Engine, context: int, texts: Emitted, max_new_tokens: int) -> Tensor:
    """Return the draft length of the round that starts at each token, (B, T) int64: the policy's, limited by
    max_new_tokens and by the draft's context. context: the draft's, in tokens. texts: emitted by the engine.
    max_new_tokens: the limit of that run."""
    k = torch.zeros(len(texts.tokens), max(map(len, texts.tokens)), dtype=torch.int64)
    for b, (prompt, text) in enumerate(zip(texts.prompts, texts.tokens, strict=True)):
        limit = min(max_new_tokens, engine.target.context - len(prompt))
        wanted = engine.policy.lengths([prompt + text[:t] for t in range(len(text))])
        room = [min(limit - t - 1, context - len(prompt) - t) for t in range(len(text))]
        k[b, : len(text)] = torch.tensor([max(0, min(pair)) for pair in zip(wanted, room, strict=True)])
    return k


def _draft_noise(lm: LM, texts: Emitted, sampling: Sampling) -> float:
    """Return the largest change, by rounding, of a gap between two of the draft's logits, from passes of one id to
    passes of two ids; drafting uses both. It is measured on as many texts as the LM has rows, and multiplied by
    `MARGIN`. lm: the draft model. sampling: the settings of the texts."""
    greedy, first = replace(sampling, temperature=0), slice(0, lm.rows)
    return MARGIN * noise_of(lm, texts.prompts[first], texts.tokens[first], greedy, width=2)


def _pair(p_block: TextLogits, q_block: TextLogits, sampling: Sampling, greedy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(x), log q(x) and alpha, each (A, n). If p(x) = 0 because rounding moved x past the edge of top-k,
    top-p or min-p, the smallest positive number replaces p(x). p_block, q_block: the target's and the draft's logits at
    the same tokens. greedy: whether the draft takes its likeliest token."""
    p, q = probs(p_block.logits, sampling), probs(q_block.logits, sampling).to(p_block.logits.device)
    if greedy:
        q = one_hot(q.argmax(-1), q)
    px, qx = at_ids(p, p_block.x).double(), at_ids(q, p_block.x).double()
    alpha = torch.minimum(p, q).sum(-1).clamp(max=1)  # float32 distributions sum to one but for rounding
    return px.clamp(min=torch.finfo(torch.float32).tiny).log(), qx.log(), alpha
