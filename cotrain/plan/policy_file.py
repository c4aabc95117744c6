"""The file of an adaptive policy (`policy.file=`): seconds of rounds on this machine, and estimates of the draft's
acceptance, fitted to real rounds on ranking texts.

The rounds draft the longest chains, and every draft whose predecessors were all accepted is one observation. So the
estimates see what they will see when they decide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from cotrain.evaluation.confidence import logistic
from inference import Engine, Sampling
from inference.adaptive_policy import INPUTS, Adaptive, CallDecisions, Estimates, Numbers, Recent, inputs
from inference.measure.costs import Costs, drafting_by

UNKNOWN = Estimates(0.5, (0.0,) * INPUTS, (0.0,) * INPUTS)
BY_RATE = (0.0, 1.0, *(0.0,) * (INPUTS - 2))  # weights of an estimate that is the row's recent acceptance
FEWEST = 200  # observations of a fit


@dataclass(frozen=True)
class Observation:
    """A draft whose predecessors were all accepted. recent: of its row. of_q: the measures of its distribution. before:
    those of the draft before it, None for the first."""

    recent: Recent
    of_q: Numbers
    before: Numbers | None
    accepted: bool


@dataclass
class Observed(CallDecisions):
    """Decisions of a call whose rounds all draft the longest chains, with the observations."""

    observations: list[Observation] = field(default_factory=list)

    def close(self, drafts: Sequence[tuple[int, int]]) -> None:
        for slot, (row, (drafted, accepted)) in enumerate(zip(self.rows, drafts, strict=True)):
            recent = self.recent.get(row, Recent())
            recent = Recent(recent.tried, recent.accepted)  # as it was when the round began
            for depth in range(min(drafted, accepted + 1, len(self.seen))):
                of_q = [one[slot, 2:] for one in self.seen[max(depth - 1, 0) : depth + 1]]
                self.observations.append(Observation(recent, of_q[-1], of_q[0] if depth else None, depth < accepted))
        super().close(drafts)


@dataclass(frozen=True)
class Observing(Adaptive):
    """A policy that drafts the longest chain in every round, and collects observations."""

    calls: list[Observed] = field(default_factory=list)

    def begin(self) -> Observed:
        self.calls.append(Observed(self))
        return self.calls[-1]


def observed(
    engine: Engine, longest: int, prompts: Sequence[list[int]], sampling: Sampling, new_tokens: int, seed: int
) -> tuple[float, list[Observation]]:
    """Return the share of accepted drafts, of those whose predecessors were all accepted, in rounds of `engine` with
    chains of `longest` drafts, and the observations. The engine's policy is replaced and restored."""
    policy = Observing({1: (1.0,) * (longest + 1)}, UNKNOWN)  # more drafts cost nothing, so none stops
    with drafting_by(engine, policy):
        stats = engine.generate(prompts, max_new_tokens=new_tokens, sampling=sampling, seed=seed).whole().stats
    tried = sum(stats.tried)
    return (sum(stats.accepted) / tried if tried else 0.0), [one for call in policy.calls for one in call.observations]


def estimates(mean: float, observations: Sequence[Observation]) -> Estimates:
    """Return the estimates that fit the observations best. mean: the share of accepted drafts. With fewer than `FEWEST`
    observations, as for drafts that are not asked (`Proposer.asks`), they are the row's recent acceptance."""
    later = [one for one in observations if one.before is not None]
    if len(later) < FEWEST:
        return Estimates(mean, BY_RATE, BY_RATE)
    unsure = Adaptive({1: (1.0, 1.0)}, Estimates(mean, BY_RATE, BY_RATE))
    rates = {id(one): CallDecisions(unsure, {0: one.recent}).rate(0) for one in observations}

    def fitted(rows: Sequence[tuple[float, Numbers | None, bool]]) -> tuple[float, ...]:
        given = inputs(np.array([rate for rate, _, _ in rows]), np.array([of_q for _, of_q, _ in rows]))
        weights, bias = logistic(torch.tensor(given[:, 1:]), torch.tensor([float(row[2]) for row in rows]).double())
        return (float(bias), *map(float, weights))

    return Estimates(
        mean,
        fitted([(rates[id(one)], one.of_q, one.accepted) for one in observations]),
        fitted([(rates[id(one)], one.before, one.accepted) for one in later]),
    )


def content(fit: Estimates, costs: Mapping[int, Costs]) -> dict[str, Any]:
    """Return the content of the file that `Adaptive.load` reads. costs: by number of rows."""
    seconds = {str(rows): list(one.rounds) for rows, one in sorted(costs.items())}
    return {"seconds": seconds, "estimates": asdict(fit)}
