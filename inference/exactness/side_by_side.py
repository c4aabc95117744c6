"""Target and draft side by side on emitted texts: the distributions at every token, and the target calls they predict.

B texts, T tokens of the longest, A texts of a batch, n tokens of a block, V vocabulary.
"""

import copy
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from inference.engine import Engine
from inference.exactness.figures import Figures
from inference.exactness.forced import forced
from inference.exactness.teacher_forced import Block, teacher_forced
from inference.exactness.ties import MARGIN, near_ties, noise_of
from inference.measure.timing import Emitted
from inference.models.lm import LM
from inference.proposers.base import Proposer
from inference.sampling import Sampling, one_hot, probs
from inference.verify import prediction
from inference.verify.rules import Rule, rule_of

RARE = 0.01
LARGEST = 3.3  # standard deviations: the largest of a thousand changes by rounding, as `ties` measures them
DRAWS = 16  # of what rounding may have made of the distributions in the run


class Expected(NamedTuple):
    """Target calls of all texts together, their variance, and acceptance by depth."""

    calls: float
    variance: float
    prefix: list[float]
    conditional: list[float]


def pair_figures(
    engine: Engine,
    proposer: Proposer,
    texts: Emitted,
    sampling: Sampling,
    max_new_tokens: int,
    noise: float,
    rows: int | None = None,
) -> Figures:
    """The distributions of target and drafts at every token of the texts, in passes as wide as those of decoding.

    Of a proposer that is a language model: teacher-forced passes of both, k + 1 ids for the target, one for the draft,
    whose weights are rounded as they are served. Of any other: forced rounds of it beside the engine's target, on whose
    slots they run. noise: of the target's score gaps, see `ties.compare_passes`; rows: texts together, those of the
    engine when None (of forced rounds always those).
    """
    V, rows = engine.target.vocabulary, min(rows or engine.rows, len(texts.tokens))
    q_lm = proposer.language_model(rows, V)
    if q_lm is None:
        beside = copy.copy(engine)  # the same target, slots and compiled passes included
        beside.proposer = proposer
        return replace(forced(beside, texts, sampling, max_new_tokens, noise), rounding=_rounding(noise, sampling))
    p_lm = LM(engine.target.model, rows, V)
    k = draft_lengths(engine, min(q_lm.context, engine.target.context), texts, max_new_tokens)
    certain = sampling.temperature == 0 or proposer.greedy
    noise_q = _draft_noise(q_lm, texts, sampling) if certain else 0.0
    block = int(k.max()) + 1
    p_blocks = teacher_forced(p_lm, texts.prompts, texts.tokens, sampling, block=block)
    q_blocks = teacher_forced(q_lm, texts.prompts, texts.tokens, sampling, block=block, width=1)
    values = torch.zeros(5, *k.shape, dtype=torch.float64)
    for p_block, q_block in zip(p_blocks, q_blocks, strict=True):
        found = _distributions(p_block, q_block, sampling, proposer.greedy)
        near_p = near_ties(p_block.logits, noise) & (sampling.temperature == 0)
        near_q = near_ties(q_block.logits, noise_q) & certain
        columns = slice(p_block.start, p_block.start + p_block.x.shape[1])
        for value, one in zip(values, (*found, near_p, near_q), strict=True):
            value[p_block.rows, columns] = one.double().cpu()
    lengths = torch.tensor([len(text) for text in texts.tokens])
    inside = torch.arange(k.shape[1]) < lengths[:, None]
    values = values.masked_fill(~inside, 0.0)
    logp, logq, alpha, near_p, near_q = values
    return Figures(logp, logq, alpha, near_p > 0, near_q > 0, k, lengths, rounding=_rounding(noise, sampling))


def _rounding(noise: float, sampling: Sampling) -> float:
    """Standard deviation of log p - log q between passes, from the largest change of a score gap with its margin."""
    return noise / (MARGIN * LARGEST * sampling.temperature) if sampling.temperature else 0.0


def _distributions(p_block: Block, q_block: Block, sampling: Sampling, greedy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """log p(x), log q(x), alpha, each (A, n). p(x) = 0, where rounding moved an edge, counts as the least
    number."""
    p, q = probs(p_block.logits, sampling), probs(q_block.logits, sampling).to(p_block.logits.device)
    if greedy:
        q = one_hot(q.argmax(-1), q)
    at = p_block.x.unsqueeze(-1)
    px, qx = p.gather(-1, at).squeeze(-1).double(), q.gather(-1, at).squeeze(-1).double()
    alpha = torch.minimum(p, q).sum(-1).clamp(max=1)  # float32 distributions sum to one but for rounding
    return px.clamp(min=torch.finfo(torch.float32).tiny).log(), qx.log(), alpha


def _draft_noise(lm: LM, texts: Emitted, sampling: Sampling) -> float:
    """Of the draft's logit gaps, between the passes of one and of two ids that drafting makes; on the first
    texts, as many as it has rows."""
    greedy, first = replace(sampling, temperature=0), slice(0, lm.rows)
    return MARGIN * noise_of(lm, texts.prompts[first], texts.tokens[first], greedy, width=2)


def draft_lengths(engine: Engine, context: int, texts: Emitted, max_new_tokens: int) -> Tensor:
    """How many tokens a round that starts at token t of a text drafts -> (B, T) int64: what the policy wants,
    no further than the limit, nor than the draft's own context."""
    k = torch.zeros(len(texts.tokens), max(map(len, texts.tokens)), dtype=torch.int64)
    for b, (prompt, text) in enumerate(zip(texts.prompts, texts.tokens, strict=True)):
        limit = min(max_new_tokens, engine.target.context - len(prompt))
        wanted = engine.policy.lengths([prompt + text[:t] for t in range(len(text))])
        room = [min(limit - t - 1, context - len(prompt) - t) for t in range(len(text))]
        k[b, : len(text)] = torch.tensor([max(0, min(pair)) for pair in zip(wanted, room, strict=True)])
    return k


def expected(figures: Figures, rule: Rule | str) -> Expected | None:
    """Target calls of the texts under a rule, and acceptance by depth (see `inference.verify.prediction`). None for a
    rule whose acceptance hangs on the noise that made the text."""
    reach, lengths = reach_of(figures, rule), figures.lengths
    if reach is None:
        return None
    calls, variance = prediction.calls_from(reach, lengths), prediction.variance_from(reach, lengths)
    by_depth = (part.tolist() for part in prediction.depths_from(reach, figures.k, lengths))
    return Expected(float(calls.sum()), float(variance.sum()), *by_depth)


def reach_of(figures: Figures, rule: Rule | str, most: int | None = None) -> Tensor | None:
    """P(a round that starts at token t accepts at least n drafts | the text) -> (B, T, K+1), drafting no more than
    `most`; None for a rule whose acceptance hangs on the noise that made the text. Of trees it is that of the rule
    and the shape that ran. Raises ValueError for fewer levels of these."""
    if figures.reach is not None:
        if most is not None:
            raise ValueError("most: calls of trees are those of the shape that ran; see measure.shapes for others")
        return figures.reach
    k = figures.k if most is None else figures.k.clamp(max=most)
    return rule_of(rule).reach(figures.logp, figures.logq, k, figures.lengths)


def rounded(figures: Figures, rule: Rule | str) -> Tensor | None:
    """`reach_of` with the distributions that the run may have had: the mean over log q - log p moved by rounding. Where
    a draft is nearly the target, rounding alone decides whether it may be refused at all. Of trees the distributions
    are taken as they are."""
    if not figures.rounding or figures.reach is not None:
        return reach_of(figures, rule)
    generator, parts = torch.Generator().manual_seed(0), []
    for _ in range(DRAWS):
        moved = figures.logq + figures.rounding * torch.randn(figures.logq.shape, generator=generator).double()
        parts.append(reach_of(replace(figures, logq=moved), rule))
    return None if parts[0] is None else torch.stack(cast(list[Tensor], parts)).mean(0)


def rare_rounds(figures: Figures, texts: Emitted, kept: Tensor) -> tuple[int, float]:
    """Rounds that accepted a number of drafts whose probability, given the text, is below RARE; and how many of the
    rounds that there were would do so. kept (B, T, K+1): `rounded` by the run's rule.

    Where q >= p the token rule never refuses the text's token: the residual has no mass there.
    """
    chances = kept - F.pad(kept[..., 1:], (0, 1))  # (B, T, K+1) of accepting exactly n
    seldom = chances < RARE
    found, expected_rounds = 0, 0.0
    for b, counts in enumerate(texts.counts):
        starts = torch.tensor(counts.starts, dtype=torch.int64)
        ends = torch.cat([starts[1:], figures.lengths[b : b + 1]])
        found += int(seldom[b, starts, ends - starts - 1].sum())
        expected_rounds += float((chances[b, starts] * seldom[b, starts]).sum())
    return found, expected_rounds


def started(figures: Figures, texts: Emitted) -> Tensor:
    """Tokens at which a round of the run began that drafted -> (B, T) bool."""
    began = torch.zeros_like(figures.k, dtype=torch.bool)
    for row, counts in zip(began, texts.counts, strict=True):
        row[counts.starts] = True
    return began & (figures.k > 0)
