"""The file of an adaptive policy (`policy.file=`): seconds of rounds and decisions on this machine, and estimates of
the draft's acceptance, fitted to real rounds on ranking texts.

The rounds draft the longest chains. Every draft whose predecessors were all accepted is one observation, so the
estimates are fitted to the inputs that they read when they decide. The same rounds show, for each number of rows,
whether it pays to decide after each draft: if many rows share a round, a decision may gain less than it costs.

A rows, K drafts of the longest chain, N observations, D inputs.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference import Engine, Sampling
from inference.adaptive_policy import INPUTS, Adaptive, CallDecisions, Estimates, Numbers, Recent, inputs
from inference.measure.costs import Costs, drafting_by
from inference.models.passes import wait_for

UNKNOWN = Estimates(0.5, (0.0,) * INPUTS, (0.0,) * INPUTS)
BY_RATE = (0.0, 1.0, *(0.0,) * (INPUTS - 2))  # weights of an estimate that is the row's recent acceptance
FEWEST = 200  # observations of a fit
REPEATS = 20  # decisions that are timed
RIDGE = 1e-3  # of the squared weights, in units of the inputs' standard deviations
STEPS, FLAT = 50, 1e-10  # of Newton's method, and the slope where it ends


@dataclass(frozen=True)
class RowRound:
    """A round of one row. recent: the row's acceptance before the round. top (drafted,): the highest probability in the
    distribution of each draft; empty for drafts whose distribution is not read (`Proposer.asks`). accepted: how many of
    the `drafted` tokens were accepted."""

    recent: Recent
    top: Numbers
    drafted: int
    accepted: int

    @property
    def seen(self) -> int:
        """Return the number of drafts whose predecessors were all accepted and whose distribution is known."""
        return min(len(self.top), self.accepted + 1)


@dataclass
class Observed(CallDecisions):
    """The decisions of one call in which every round drafts the longest chain. rounds: these rounds, row by row."""

    rounds: list[RowRound] = field(default_factory=list)

    def close(self, drafts: Sequence[tuple[int, int]]) -> None:
        tops = np.stack([one[:, 2] for one in self.seen], -1) if self.seen else np.zeros((len(self.rows), 0))
        for row, top, (drafted, accepted) in zip(self.rows, tops, drafts, strict=True):
            recent = self.recent.get(row, Recent())
            recent = Recent(recent.tried, recent.accepted)  # as it was when the round began
            self.rounds.append(RowRound(recent, top[:drafted], drafted, accepted))
        super().close(drafts)


@dataclass(frozen=True)
class Observing(Adaptive):
    """A policy that drafts the longest chain in every round, and collects the decisions of each call in `calls`."""

    calls: list[Observed] = field(default_factory=list)

    def begin(self) -> Observed:
        self.calls.append(Observed(self))
        return self.calls[-1]


def observed(
    engine: Engine, longest: int, prompts: Sequence[list[int]], sampling: Sampling, new_tokens: int, seed: int
) -> list[RowRound]:
    """Return the rounds of `engine` with chains of `longest` drafts, one per row and round, in the order of time. The
    engine's policy is replaced until the call returns.

    prompts: token ids of each. sampling: the regime. new_tokens: the most tokens of a text. seed: of the random
    numbers.
    """
    policy = Observing({1: (1.0,) * (longest + 1)}, UNKNOWN)  # more drafts cost nothing, so none stops
    with drafting_by(engine, policy):
        engine.generate(prompts, max_new_tokens=new_tokens, sampling=sampling, seed=seed).whole()
    return [one for call in policy.calls for one in call.rounds]


def share(rounds: Sequence[RowRound]) -> float:
    """Return the share of accepted drafts, among drafts whose predecessors were all accepted; 0 without rounds."""
    tried = sum(min(one.drafted, one.accepted + 1) for one in rounds)
    return sum(one.accepted for one in rounds) / tried if tried else 0.0


def estimates(mean: float, rounds: Sequence[RowRound]) -> Estimates:
    """Return the estimates of acceptance that fit the rounds best. mean: the share of accepted drafts. With fewer than
    `FEWEST` observations, for example for drafts whose distribution is not read, the estimate for a row is its recent
    acceptance."""
    later = [(one, depth) for one in rounds for depth in range(1, one.seen)]
    if len(later) < FEWEST:
        return Estimates(mean, BY_RATE, BY_RATE)
    unsure = Adaptive({1: (1.0, 1.0)}, Estimates(mean, BY_RATE, BY_RATE))
    rates = {id(one): CallDecisions(unsure, {0: one.recent}).rate(0) for one in rounds}

    def fitted(drafts: Sequence[tuple[RowRound, int]], before: int) -> tuple[float, ...]:
        """Return the weights for the acceptance of drafts (round, depth), fitted to the distribution `before` drafts
        earlier."""
        top = np.array([one.top[depth - before] for one, depth in drafts])
        given = inputs(np.array([rates[id(one)] for one, _ in drafts]), top)
        accepted = torch.tensor([float(depth < one.accepted) for one, depth in drafts]).double()
        weights, bias = logistic(torch.tensor(given[:, 1:]), accepted)
        return (float(bias), *map(float, weights))

    return Estimates(mean, fitted([(one, d) for one in rounds for d in range(one.seen)], 0), fitted(later, 1))


def policy_of(
    costs: Mapping[int, Costs], fit: Estimates, rounds: Sequence[RowRound], vocabulary: int, device: torch.device
) -> Adaptive:
    """Return the adaptive policy for these costs. It decides after each draft only at those numbers of rows at which
    this pays on `rounds`.

    costs: of rounds, keyed by number of rows. fit: the estimates of acceptance. rounds: observed ones. vocabulary,
    device: of the logits that the policy reads.
    """
    policy = Adaptive({rows: one.rounds for rows, one in sorted(costs.items())}, fit, {})
    deciding = {rows: decision_seconds(policy, rows, vocabulary, device) for rows in policy.seconds}
    paying = {}
    for rows, seconds in deciding.items():
        asking = replace(policy, deciding={rows: seconds})
        if replayed(asking, rounds, rows) > replayed(policy, rounds, rows):
            paying[rows] = seconds
    return replace(policy, deciding=paying)


def decision_seconds(policy: Adaptive, rows: int, vocabulary: int, device: torch.device) -> float:
    """Return the median seconds to read a draft's distribution, logits (rows, vocabulary) on `device`, and to decide by
    `policy` about the next draft."""
    decisions, seconds = replace(policy, deciding=None).begin(), []
    logits, temperature = torch.randn(rows, vocabulary, device=device), torch.ones(rows, device=device)
    for _ in range(REPEATS):
        decisions.open(range(rows), True)
        wait_for(device)
        began = time.perf_counter()
        decisions.see(0, logits, temperature)
        decisions.goes_on(0, [policy.longest] * rows)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def replayed(policy: Adaptive, rounds: Sequence[RowRound], rows: int) -> float:
    """Return the tokens per second that the policy would reach on observed rounds, taken `rows` at a time, by its own
    table of seconds; 0 if there are fewer than `rows` rounds.

    Rounds at the end of a text that drafted less than the longest chain are left out. A row that accepted n of the
    longest chain is assumed to accept min(n, k) of k drafts.
    """
    whole = [one for one in rounds if len(one.top) == policy.longest]
    tokens, seconds = 0, 0.0
    for first in range(0, len(whole) - rows + 1, rows):
        some = whole[first : first + rows]
        decisions = CallDecisions(policy, {row: one.recent for row, one in enumerate(some)})
        k = decisions.open(range(rows), True)
        if decisions.asks and k:
            k = _decided(decisions, np.stack([one.top for one in some]))
        tokens += sum(min(one.accepted, k) + 1 for one in some)
        seconds += float(decisions.seconds[k])
    return tokens / seconds if seconds else 0.0


def _decided(decisions: CallDecisions, tops: Numbers) -> int:
    """Return the number of drafts after which a round ends. decisions: of one call. tops (A, K): the highest
    probability in the distribution of each draft, by row and depth."""
    rows, longest = tops.shape
    for depth in range(longest):
        decisions.note(tops[:, depth])
        if not decisions.goes_on(depth, [longest] * rows):
            return depth + 1
    return longest


def content(policy: Adaptive) -> dict[str, Any]:
    """Return the content of the policy's file, which `Adaptive.load` reads."""
    deciding = dict.fromkeys(policy.seconds, 0.0) if policy.deciding is None else policy.deciding
    return {
        "seconds": {str(rows): list(one) for rows, one in policy.seconds.items()},
        "estimates": asdict(policy.estimates),
        "deciding": {str(rows): one for rows, one in deciding.items()},
        "identity": policy.draft,
    }


def logistic(x: Tensor, y: Tensor, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
    """Return the weights w (D,) and the bias b () of a logistic regression, found by Newton's method with step halving.

    x (N, D) float64: inputs. y (N,) float64: labels in [0, 1]. w and b minimise the mean cross-entropy of sigmoid(x w +
    b) with y, plus ridge / 2 times the sum of squares of w times the standard deviations of x. This objective is
    convex.
    """
    mean, deviation = x.mean(0), x.std(0, correction=0)
    scale = torch.where(deviation > 0, deviation, 1.0)
    z = torch.cat(((x - mean) / scale, torch.ones_like(x[:, :1])), 1)
    held = torch.full_like(z[0], ridge).index_fill(0, torch.tensor(len(z[0]) - 1, device=z.device), 0.0)

    def objective(w: Tensor) -> Tensor:
        logits = z @ w
        return (torch.nn.functional.softplus(logits) - y * logits).mean() + held @ w.square() / 2

    w = torch.zeros_like(z[0])
    for _ in range(STEPS):
        share = torch.sigmoid(z @ w)
        slope = z.T @ (share - y) / len(y) + held * w
        if float(slope.abs().max()) < FLAT:
            break
        bend = (z * (share * (1 - share)).unsqueeze(1)).T @ z / len(y) + torch.diag(held)
        step = torch.linalg.solve(bend, slope)
        now, size = objective(w), 1.0
        while float(objective(w - size * step)) > float(now) and size > FLAT:
            size /= 2
        w = w - size * step
    weight = w[:-1] / scale
    return weight, w[-1] - mean @ weight
