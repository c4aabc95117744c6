"""The speed of a draft at every draft length, computed from the expected target calls of texts and the costs of rounds.

No model runs here. A forecast is computed on a sample of texts, so it has an error. Another sample could choose another
length. So, among the lengths that the texts cannot tell apart, the shortest one is recommended.

N texts, K the longest draft length, S = SAMPLES runs, T tokens of the longest text.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cotrain.acceptance import iid_tau
from inference.adaptive_policy import seconds_of
from inference.drafts.draft_folder import PlannedTree
from inference.exactness.figures import Figures, predictable_reach
from inference.measure.costs import Costs
from inference.verify import predict_chain

SIGMAS = 1.96  # of a 95 % interval
SAMPLES = 16  # of the rounds of every text, for batches whose rows end one by one
WORTH = 0.02  # the gain of speed for which more texts are asked for


@dataclass(frozen=True)
class Acceptance:
    """A draft's acceptance on texts under one verification rule, at draft lengths 0 .. K.

    calls (K+1, N) float64: expected target calls of each text; row 0 is plain decoding, one call per token.
    lengths (N,) float64: tokens of each text.
    samples (K+1, S, N) int64: numbers of target calls in S sampled runs.
    alpha: mean acceptance of the first draft of a round, over the tokens.
    by_depth: figures at draft length K, over the expected rounds. `prefix` and `conditional`: acceptance at depths 1 ..
    K; `histogram`: the probability that a round accepts 0 .. K drafts.
    """

    calls: Tensor
    lengths: Tensor
    samples: Tensor
    alpha: float = math.nan
    by_depth: Mapping[str, Any] = field(default_factory=dict)

    def tau(self, k: int) -> float:
        """Return the expected tokens per target call at draft length k."""
        return float(self.lengths.sum() / self.calls[k].sum())

    def error(self, k: int) -> float:
        """Return the standard error of `tau` at draft length k, from the differences between texts; infinite for one
        text."""
        return error_of_sum(self.lengths - self.tau(k) * self.calls[k]) / float(self.calls[k].sum())


def acceptance(figures: Figures, verify: str, longest: int) -> Acceptance:
    """Return the draft's acceptance on texts, at draft lengths 0 .. longest. figures: the probabilities of both models
    on the texts. verify: the verification rule."""
    reaches = [predictable_reach(figures, verify, k) for k in range(1, longest + 1)]
    rows = [figures.lengths, *(predict_chain.calls_from(reach, figures.lengths) for reach in reaches)]
    generator = torch.Generator().manual_seed(0)
    samples = [
        figures.lengths.expand(SAMPLES, -1),
        *(sampled_rounds(reach, figures.lengths, generator) for reach in reaches),
    ]
    prefix, conditional = predict_chain.depths_from(reaches[-1], longest, figures.lengths)
    histogram = predict_chain.histogram_from(reaches[-1], figures.lengths)
    by_depth = {"prefix": prefix.tolist(), "conditional": conditional.tolist(), "histogram": histogram.tolist()}
    calls = torch.stack([row.double() for row in rows])
    return Acceptance(calls, figures.lengths.double(), torch.stack(samples), mean_acceptance(figures), by_depth)


def sampled_rounds(reach: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
    """Return how many rounds each text takes in `SAMPLES` sampled runs, (SAMPLES, N) int64. reach (N, T, K+1): entry
    [i, t, n] is the probability that a round that starts at token t accepts at least n drafts. lengths (N,): tokens of
    each text. generator: of the random numbers."""
    texts = torch.arange(len(lengths)).expand(SAMPLES, -1)
    at, rounds = torch.zeros_like(texts), torch.zeros_like(texts)
    while bool((inside := at < lengths).any()):
        here = reach[texts, at.clamp(max=reach.shape[1] - 1), 1:]  # (SAMPLES, N, K), falling along K
        u = torch.rand(*texts.shape, 1, generator=generator, dtype=reach.dtype)
        at, rounds = at + 1 + (u < here).sum(-1), rounds + inside
    return rounds


@dataclass(frozen=True)
class TreeForecast:
    """The forecast of a tree in full batches.

    tree: its nodes and rule. tau: expected tokens per target call. seconds: of a round, all rows together. speedup:
    over plain decoding. gain: the speed over the best chain's, minus 1. error: the standard error of the gain, from the
    differences between texts.
    """

    tree: PlannedTree
    tau: float
    seconds: float
    speedup: float
    gain: float
    error: float

    @property
    def recommended(self) -> bool:
        """Return whether the texts show that the tree is faster. If not, the chain is recommended, since it is
        simpler."""
        return self.gain > self.error

    @property
    def chain(self) -> float:
        """Return the chain's speed-up over plain decoding."""
        return self.speedup / (1 + self.gain)

    def words(self) -> str:
        """Return a phrase for the user: the tree's nodes, levels, children and rule."""
        tree, kind = self.tree, "likeliest" if self.tree.likeliest else "sampled"
        return f"a tree of {len(tree.parents)} nodes in {tree.depth} levels with {kind} children, verify={tree.rule}"


@dataclass(frozen=True)
class Forecast:
    """The forecast of one draft, at one temperature and batch size.

    acceptance: the draft's on texts.
    seconds[k]: of a round that drafts k tokens, all rows together.
    k: the recommended length of chains; 0: plain decoding.
    fastest: the length with the least expected time, which the texts may not tell apart from k.
    speedups[k], errors[k]: speed-up over plain decoding, and its standard error from the differences between texts.
    gain: how much faster than k `fastest` may be at most (upper end of a 95 % interval), as a share of the speed.
    alone[k]: speed-up if batches are decoded one after another, so that a row that ends stays empty; () if not known.
    tree: the best tree; None if no tree was asked for, or if the kind drafts none.
    serves_tree: whether the tree is drafted instead of the chain.
    """

    acceptance: Acceptance
    seconds: Sequence[float]
    k: int
    fastest: int
    speedups: tuple[float, ...]
    errors: tuple[float, ...]
    gain: float
    alone: Sequence[float] = ()
    tree: TreeForecast | None = None
    serves_tree: bool = False

    @property
    def served(self) -> TreeForecast | None:
        """Return the tree if it is drafted, otherwise None."""
        return self.tree if self.serves_tree else None

    @property
    def length(self) -> int:
        """Return the draft length or, if a tree is drafted, its number of levels."""
        return self.served.tree.depth if self.served else self.k

    @property
    def speedup(self) -> float:
        """Return the expected speed-up over plain decoding: the tree's if a tree is drafted, otherwise the chain's at
        length k."""
        return self.served.speedup if self.served else self.speedups[self.k]

    @property
    def tau(self) -> float:
        """Return the expected tokens per target call: the tree's if a tree is drafted, otherwise the chain's at length
        k."""
        return self.served.tau if self.served else self.acceptance.tau(self.k)

    def among(self, lengths: Iterable[int]) -> "Forecast":
        """Return the same forecast with k set to the length in `lengths` with the highest expected speed-up."""
        return replace(self, k=max(lengths, key=self.speedups.__getitem__))

    @property
    def undecided(self) -> bool:
        """Return whether more texts could show that another length is faster by more than the share WORTH."""
        return self.fastest != self.k and self.gain > WORTH

    @property
    def perfect(self) -> float:
        """Return the speed-up if every drafted token were accepted, the most that these costs allow."""
        return at_acceptance(self.seconds, 1.0)[0]

    @property
    def break_even(self) -> float | None:
        """Return the acceptance (the same at every depth) above which some draft length beats plain decoding at these
        costs; None if no acceptance pays."""
        return break_even(self.seconds)


def at_acceptance(seconds: Sequence[float], acceptance: float) -> tuple[float, int]:
    """Return the speed-up over plain decoding at the best draft length, and this length (0: plain decoding).
    acceptance: a probability, the same at every depth. seconds: of a round, by draft length from 0 on."""
    speedups = [seconds[0] * iid_tau(acceptance, k) / one for k, one in enumerate(seconds)]
    k = max(range(len(speedups)), key=speedups.__getitem__)
    return speedups[k], k


def break_even(seconds: Sequence[float]) -> float | None:
    """Return the acceptance (the same at every depth) above which some draft length beats plain decoding. None if no
    acceptance pays. seconds: of a round, by draft length from 0 on."""
    if not at_acceptance(seconds, 1.0)[1]:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if at_acceptance(seconds, middle)[1] else (middle, high)
    return high


def alone(rates: Acceptance, table: Mapping[int, Sequence[float]], rows: int) -> tuple[float, ...]:
    """Return, by draft length from 0 on, the speed-up if batches of `rows` texts are decoded one after another. A row
    that ends then stays empty, because no prompts wait, so the last rounds have fewer rows. Return () for fewer texts
    than rows.

    rates: the draft's acceptance on the texts. table: seconds of rounds by draft length, keyed by number of rows; other
    numbers of rows are interpolated. In each sample, texts are put into batches in a random order. Texts that fill no
    batch are left out.
    """
    samples, count = rates.samples, rates.samples.shape[-1] // rows * rows
    if not count:
        return ()
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(samples.shape[-1], generator=generator) for _ in range(samples.shape[1])])
    seconds = torch.tensor(np.array([seconds_of(table, active) for active in range(1, rows + 1)]))  # (rows, K+1)
    totals = []
    for k, one in enumerate(samples[: seconds.shape[1]]):
        ends = one.gather(1, order)[:, :count].reshape(-1, rows).sort(1, descending=True).values  # (batches, rows)
        rounds = (ends - torch.nn.functional.pad(ends[:, 1:], (0, 1))).double()  # with exactly 1, 2, ... rows
        totals.append(float((rounds @ seconds[:, k]).sum()))
    return tuple(totals[0] / total for total in totals)


def forecast(rates: Acceptance, costs: Costs) -> Forecast:
    """Return the forecast of a draft. rates: its acceptance on texts. costs: the costs of its rounds.

    The recommended length is the shortest one whose expected time exceeds the fastest length's by at most one standard
    error of the paired difference over texts (the one-standard-error rule: Breiman et al., Classification and
    Regression Trees, 1984, 3.4.3).
    """
    longest = min(len(rates.calls) - 1, len(costs.target) - 1)
    seconds = costs.rounds[: longest + 1]
    times = torch.tensor(seconds, dtype=torch.float64).unsqueeze(1) * rates.calls[: longest + 1]  # (K+1, N)
    totals = times.sum(1)
    fastest = int(totals.argmin())
    worse = times - times[fastest]  # of each text
    k = next(k for k in range(longest + 1) if float(worse[k].sum()) <= error_of_sum(worse[k]) or k == fastest)
    gain = (float(worse[k].sum()) + SIGMAS * error_of_sum(worse[k])) / float(totals[fastest])
    speedups = tuple(float(totals[0] / total) for total in totals)
    errors = tuple(
        speedup * error_of_sum(times[0] - speedup * times[k]) / float(totals[0]) for k, speedup in enumerate(speedups)
    )
    return Forecast(rates, seconds, k, fastest, speedups, errors, gain)


def error_of_sum(values: Tensor) -> float:
    """Return the standard error of the sum of `values` (N,), one per text; infinite for one text."""
    count = len(values)
    return math.inf if count < 2 else float(values.std() * math.sqrt(count))


def mean_acceptance(figures: Figures) -> float:
    """Return the mean acceptance of the first draft of a round, over the tokens of all texts. figures: the
    probabilities of both models on the texts."""
    inside = torch.arange(figures.logp.shape[1]) < figures.lengths[:, None]
    return float(figures.first(figures.alpha)[inside].mean())


def stops_paying(forecasts: Mapping[int, Forecast]) -> int | None:
    """Return the smallest batch size from which on no draft length is recommended. None if one is still recommended at
    the largest size. forecasts: keyed by batch size."""
    sizes = sorted(forecasts)
    never = [rows for rows in sizes if all(forecasts[more].k == 0 for more in sizes if more >= rows)]
    return never[0] if never else None


def schedule(lengths: Mapping[int, int], most: int) -> list[list[int]]:
    """Return draft lengths for 1 .. most rows as ranges [first, last, k], the form of vLLM's schedules. lengths:
    recommended length by batch size. A number of rows between two sizes takes the length of the nearer one, by
    ratio."""
    sizes = sorted(lengths)
    ranges: list[list[int]] = []
    for rows in range(1, most + 1):
        k = lengths[min(sizes, key=lambda size: (abs(math.log(size / rows)), size))]
        if ranges and ranges[-1][2] == k:
            ranges[-1][1] = rows
        else:
            ranges.append([rows, rows, k])
    return ranges
