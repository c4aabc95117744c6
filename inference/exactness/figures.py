"""Checks (b) and (c) of the verdict: the number of target calls, and the acceptance of first drafts, must be as p and q
predict.

`Figures` holds log p, log q and sum_v min(p, q) at every token of given texts; `side_by_side.pair_figures` computes
them. B texts, T tokens of the longest, K drafts per round.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from inference.output import Emitted
from inference.verify import predict_chain
from inference.verify.rules import Rule, rule_of

CALLS_SIGMAS = 4
FALSE_ALARM = 0.00135  # of check (c): that of three standard deviations, on one side
RARE = 0.01
DRAWS = 16  # samples of the rounding that the distributions of a run may have had


@dataclass(frozen=True)
class Figures:
    """The numbers at each token of given texts that determine how many target calls the texts need. They are on the
    CPU, zero past a text's end, and float64 unless said otherwise.

    logp (B, T): log p of each token. logq, alpha: log q of the token, and sum_v min(p, q). Both are (B, T), or (B, T,
    K) if they depend on the depth: entry (t, j) is for token t as draft j (0-based) of the round that starts at t - j.
    If a deterministic draft is not the text's token, log q is -inf there and at all later depths, because no round
    reaches these.

    near_p (B, T), near_q (shape of logq), bool: whether the distribution is one-hot and rounding could change its
    token. k (B, T), int64: number of drafts, or of levels for trees, of the round that starts at token t. lengths (B,):
    number of tokens of each text. rounding: standard deviation, in nats, of the change of log p - log q by rounding,
    between the passes of the run and the passes here.

    reach (B, T, D+1): for trees only, P(the round that starts at token t accepts at least n nodes | the text); None for
    chains. With trees, logq is zero, alpha is P(at least one node), and near_q is for any level.
    """

    logp: Tensor
    logq: Tensor
    alpha: Tensor
    near_p: Tensor
    near_q: Tensor
    k: Tensor
    lengths: Tensor
    reach: Tensor | None = None
    rounding: float = 0.0

    def of(self, texts: Sequence[int]) -> "Figures":
        """Return the figures of some texts only. texts: their indices."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        chosen: dict[str, Any] = {name: some[texts] for name, some in values.items() if isinstance(some, Tensor)}
        return replace(self, **chosen)

    def first(self, values: Tensor) -> Tensor:
        """Return the values (B, T) for the first draft of the round that starts at each token. values: (B, T), or (B,
        T, K) by depth, in the shape of `logq`."""
        if values.ndim == 2:
            return values
        return values[..., 0] if values.shape[-1] else torch.zeros_like(self.logp)

    @property
    def near(self) -> int:
        """Return the number of tokens at which rounding could change a deterministic draft at some depth."""
        return int((self.near_q if self.near_q.ndim == 2 else self.near_q.any(-1)).sum())


class Expected(NamedTuple):
    """What p and q predict for the texts. calls: the expected number of target calls, for all texts together. variance:
    the variance of this number. prefix[i]: P(a round accepts its first i + 1 drafts). conditional[i]: P(draft i,
    0-based, is accepted | all before it were)."""

    calls: float
    variance: float
    prefix: list[float]
    conditional: list[float]


@dataclass(frozen=True)
class CallsCheck:
    """The result of check (b), which compares measured and predicted target calls.

    tokens: number of tokens in the texts. measured, predicted: number of target calls. near: number of deterministic
    drafts that rounding could change. sigma: standard deviation of `predicted`; its variance comes from random
    acceptance, plus 1 for each of the `near` drafts. prefix, conditional: predicted acceptance by depth (`Expected`),
    None if it was not predicted. rare: number of rounds whose number of accepted drafts has a probability below RARE,
    given the text. rare_expected: the expected number of such rounds. A wrong residual or a wrong q changes `rare`
    first.
    """

    tokens: int
    measured: int
    predicted: float
    sigma: float
    near: int
    prefix: list[float] | None = None
    conditional: list[float] | None = None
    rare: int = 0
    rare_expected: float = 0.0

    @property
    def z(self) -> float:
        """Return measured - predicted, in standard deviations; 0 within the rounding of float32 distributions."""
        difference = self.measured - self.predicted
        if abs(difference) <= 1e-5 * self.predicted:
            return 0.0
        return difference / self.sigma if self.sigma > 0 else math.copysign(math.inf, difference)

    @property
    def relative(self) -> float:
        """Return (measured - predicted) / predicted."""
        return self.measured / self.predicted - 1

    @property
    def tau(self) -> float:
        """Return the predicted tokens per target call."""
        return self.tokens / self.predicted

    @property
    def passed(self) -> bool:
        return abs(self.z) < CALLS_SIGMAS and self.z_rare < CALLS_SIGMAS

    @property
    def z_rare(self) -> float:
        """Return rare - rare_expected, in standard deviations. The variance gets 1, and 1 more for each of the `near`
        drafts, because rounding may cause such rounds."""
        return (self.rare - self.rare_expected) / math.sqrt(self.rare_expected + self.near + 1)

    def line(self) -> str:
        """Return this check's numbers as one sentence. `Verdict.lines` appends whether the check passed."""
        return (
            f"target calls on the emitted texts: {self.measured} measured, {self.predicted:.1f} +- "
            f"{self.sigma:.1f} predicted (z {self.z:+.2f}, {self.relative:+.2%}); rounds with an unlikely number of "
            f"accepted drafts: {self.rare}, {self.rare_expected:.1f} expected"
        )


@dataclass(frozen=True)
class DepthCheck:
    """The result of check (c), which compares the acceptance rate of first drafts with alpha. rounds: number of rounds
    that drafted. accepted: number of these rounds that accepted their first draft. alpha: mean of sum_v min(p, q) at
    the starts of the rounds. chance: probability that an exact engine accepts at least `accepted` first drafts."""

    rounds: int
    accepted: int
    alpha: float
    chance: float

    @property
    def measured(self) -> float:
        return self.accepted / self.rounds

    @property
    def passed(self) -> bool:
        return self.chance >= FALSE_ALARM

    def line(self) -> str:
        """Return this check's numbers as one sentence. `Verdict.lines` appends whether the check passed."""
        return (
            f"acceptance at depth 1: {self.measured:.4f} in {self.rounds} rounds, alpha {self.alpha:.4f}; an exact "
            f"engine accepts as many with probability {self.chance:.2g}, which must be at least {FALSE_ALARM:g}"
        )


def check_calls(figures: Figures, texts: Emitted, rule: Rule | str) -> CallsCheck | None:
    """Return the result of check (b) for texts decoded under `rule`, or None if acceptance under the rule depends on
    the noise that generated the text. figures: the numbers of target and draft at every token of these texts."""
    forecast, reach = expected(figures, rule), rounded_reach(figures, rule)
    if forecast is None or reach is None:
        return None
    near = figures.near
    rare, rare_expected = rare_rounds(figures, texts, reach)
    return CallsCheck(
        tokens=sum(map(len, texts.tokens)),
        measured=sum(row.target_calls for row in texts.counts),
        predicted=forecast.calls,
        sigma=math.sqrt(forecast.variance + near),
        near=near,
        prefix=forecast.prefix,
        conditional=forecast.conditional,
        rare=rare,
        rare_expected=rare_expected,
    )


def check_depth(figures: Figures, texts: Emitted) -> DepthCheck | None:
    """Return the result of check (c), from alpha = sum_v min(p, q) at the starts of rounds. Return None if no round
    drafted. If rounding decides the draft at a start, its alpha is counted as 1. figures: the numbers of target and
    draft at every token of these texts.

    Raises ValueError if the counts and the figures do not have the same number of rounds that drafted, since they then
    come from different runs.
    """
    at = started(figures, texts)
    rounds = int(at.sum())
    if rounds != sum(sum(row.drafted[:1]) for row in texts.counts):
        raise ValueError(
            f"exactness: by the figures {rounds} rounds drafted, by the counts another number: give texts and counts "
            "of one timing, with its policy and limit"
        )
    if rounds == 0:
        return None
    alpha, near = figures.first(figures.alpha)[at], (figures.near_p | (figures.first(figures.near_q) > 0))[at]
    accepted = sum(sum(row.accepted[:1]) for row in texts.counts)
    most = (alpha + 1e-5).clamp(max=1).masked_fill(near, 1)  # float32 distributions are rounded
    return DepthCheck(rounds, accepted, float(alpha.mean()), prob_at_least(accepted, most))


def prob_at_least(count: int, probs: Tensor) -> float:
    """Return P(at least `count` of n independent events occur). probs (n,): the probability of each event."""
    parts = torch.stack([1 - probs, probs], -1)  # (n, counts): the distribution of a count in each group of events
    while len(parts) > 1:
        if len(parts) % 2:
            parts = torch.cat([parts, F.one_hot(torch.tensor([0]), parts.shape[1])])
        size = 2 * parts.shape[1] - 1
        one, other = (torch.fft.rfft(group, size) for group in (parts[::2], parts[1::2]))
        parts = torch.fft.irfft(one * other, size)
    return float(parts[0, count:].sum())


def started(figures: Figures, texts: Emitted) -> Tensor:
    """Return a bool tensor (B, T): whether a round of the run started at each token and drafted. figures: of the texts,
    with the draft lengths `k`. texts: with the starts of their rounds."""
    starts = torch.zeros_like(figures.k, dtype=torch.bool)
    for row, counts in zip(starts, texts.counts, strict=True):
        row[counts.starts] = True
    return starts & (figures.k > 0)


def expected(figures: Figures, rule: Rule | str) -> Expected | None:
    """Return the expected target calls of the texts under a rule, their variance, and acceptance by depth. Return None
    if acceptance under the rule depends on the noise that generated the text. rule: a rule or its name."""
    reach, lengths = reach_of(figures, rule), figures.lengths
    if reach is None:
        return None
    calls, variance = predict_chain.calls_from(reach, lengths), predict_chain.variance_from(reach, lengths)
    by_depth = (part.tolist() for part in predict_chain.depths_from(reach, figures.k, lengths))
    return Expected(float(calls.sum()), float(variance.sum()), *by_depth)


def reach_of(figures: Figures, rule: Rule | str, most: int | None = None) -> Tensor | None:
    """Return the reach (B, T, K+1): P(a round that starts at token t accepts at least n drafts | the text). Return None
    if acceptance under the rule depends on the noise that generated the text.

    most: the largest number of drafts per round, None for the number in the figures. For trees the figures fix rule and
    tree, and `most` raises ValueError.
    """
    if figures.reach is not None:
        if most is not None:
            raise ValueError(
                f"most={most}: for trees most must be None, since their figures are for the tree that ran; "
                "measure.tree_shapes has "
                "figures for other trees"
            )
        return figures.reach
    k = figures.k if most is None else figures.k.clamp(max=most)
    return rule_of(rule).reach(figures.logp, figures.logq, k, figures.lengths)


def predictable_reach(figures: Figures, rule: Rule | str, most: int) -> Tensor:
    """Return the reach (B, T, K+1) of chains: P(a round that starts at token t accepts at least n drafts | the text).
    For a rule whose acceptance depends on the random numbers that made the text, return the reach under the token rule.
    most: the largest number of drafts per round."""
    reach = reach_of(figures, rule, most)
    if reach is None:
        reach = reach_of(figures, "token", most)
    assert reach is not None
    return reach


def rounded_reach(figures: Figures, rule: Rule | str) -> Tensor | None:
    """Return the reach (B, T, K+1), P(a round that starts at token t accepts at least n drafts | the text), as a mean
    over random changes of log q that are as large as the run's rounding. This matters if the draft is nearly the
    target: rounding alone then decides whether drafts can be rejected. For trees, return the reach without such
    changes. Return None if acceptance under the rule depends on the noise that generated the text."""
    if not figures.rounding or figures.reach is not None:
        return reach_of(figures, rule)
    generator, parts = torch.Generator().manual_seed(0), []
    for _ in range(DRAWS):
        moved = figures.logq + figures.rounding * torch.randn(figures.logq.shape, generator=generator).double()
        parts.append(reach_of(replace(figures, logq=moved), rule))
    return None if parts[0] is None else torch.stack(cast(list[Tensor], parts)).mean(0)


def rare_rounds(figures: Figures, texts: Emitted, reach: Tensor) -> tuple[int, float]:
    """Return the number of rare rounds, and the expected number. A round is rare if its number of accepted drafts has a
    probability below RARE, given the text. reach (B, T, K+1): `rounded_reach` under the run's rule.

    Such rounds reveal errors. For example, if q >= p, the token rule never rejects the text's token, because the
    residual has no mass there. figures: the numbers of target and draft at every token of the texts.
    """
    chances = predict_chain.jumps_of(reach)
    seldom = chances < RARE
    rare, rare_expected = 0, 0.0
    for b, counts in enumerate(texts.counts):
        starts = torch.tensor(counts.starts, dtype=torch.int64)
        ends = torch.cat([starts[1:], figures.lengths[b : b + 1]])
        rare += int(seldom[b, starts, ends - starts - 1].sum())
        rare_expected += float((chances[b, starts] * seldom[b, starts]).sum())
    return rare, rare_expected
