"""Drift of a served draft: the acceptance that a server counts beside what the plan forecast (`cotrain plan log=`).

A server counts rounds, and accepted drafts by depth. The share of rounds that accept depth d is compared with the
plan's. The standard error of a share is that of the plan's texts and that of the server's rounds together. A server
does not count by text, so its rounds are taken as independent; rounds of one text are alike, so few served texts drift
by chance.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cotrain.errors import UserError
from inference.servers.openai_client import Served, counted_in

FIXED = 0.95  # of the drafts of equally long rounds: the last rounds of texts may draft fewer
SIGMAS = 3.0  # of a difference that is called drift
SMALL = 0.02  # of tau: a smaller difference is none, however certain
LATE = 0.3  # how much more of the conditional acceptance is lost at later depths than at the first, if only they drift
NEAR = 0.25  # of the difference: what is left of it at another temperature, if that is the cause


@dataclass(frozen=True)
class Drift:
    """A comparison. temperature: of the plan's profile that is nearest to the served acceptance. tau, forecast: tokens
    per round served and forecast for these depths; at one draft length, their ratio is that of the speeds. z: standard
    score of the difference. cause: the likely cause in words, None for no drift."""

    draft: str
    temperature: float
    depths: int
    tau: float
    forecast: float
    z: float
    cause: str | None

    @property
    def line(self) -> str:
        """Return the comparison in words."""
        change = f"tau {self.tau:.3f} served, {self.forecast:.3f} forecast for {self.depths} drafts (z {self.z:+.1f})"
        speed = f"speed {100 * (self.tau / self.forecast - 1):+.0f} %"
        return f"{self.draft}: {change}, {speed}: " + (f"drift: {self.cause}" if self.cause else "as forecast")


def served(log: Path) -> Served:
    """Return the counters in a file: a Prometheus page of vLLM (`curl URL/metrics`), or JSON with `rounds`,
    `accepted_by_depth` and, if not every round drafted as many, `drafted`. Raises UserError for other files."""
    try:
        text = log.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            given = json.loads(text)
            rounds, depths = int(given["rounds"]), tuple(map(int, given["accepted_by_depth"]))
            drafted = int(given.get("drafted", rounds * len(depths)))
            counters: Served | None = Served(rounds, drafted, sum(depths), depths)
        else:
            counters = counted_in(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"log={log}: {error!r}") from error
    if counters is None or not counters.by_depth or counters.rounds < 1:
        raise UserError(f"log={log}: it has no counters of drafts: save the page of a vLLM server, as with `curl "
                        "http://localhost:8000/metrics`, or JSON with rounds and accepted_by_depth")  # fmt: skip
    if any(later > before for before, later in pairwise((counters.rounds, *counters.by_depth))):
        raise UserError(f"log={log}: of {counters.rounds} rounds, {list(counters.by_depth)} drafts were accepted by "
                        "depth: numbers cannot rise")  # fmt: skip
    return counters


def drift(plan: Mapping[str, Any], counters: Served) -> Drift:
    """Compare counters with the recommended draft of a plan (the content of plan.json), at the plan's first
    temperature. Raises UserError if the server drafts more tokens than the plan forecast, or not equally many in all
    rounds, since the plan has no forecast for a mixture of lengths."""
    draft, k = str(plan["recommended"]), len(counters.by_depth)
    profiles: dict[float, Sequence[float]] = {float(t): one["prefix"] for t, one in plan["acceptance"][draft].items()}
    if k > min(map(len, profiles.values())):
        raise UserError(f"log: the server drafts {k} tokens, and the plan has {min(map(len, profiles.values()))}: plan "
                        f"again with bench.depths up to {k}")  # fmt: skip
    if counters.drafted < FIXED * counters.rounds * k:
        raise UserError(f"log: {counters.drafted / counters.rounds:.2f} tokens are drafted per round, and {k} at most: "
                        "drift is found where all rounds draft equally many; serve some prompts without a schedule and "
                        "without an adaptive policy, and save their counters")  # fmt: skip
    shares = [accepted / counters.rounds for accepted in counters.by_depth]
    planned = next(iter(profiles))  # the first temperature is that of serving
    nearest = min(profiles, key=lambda t: abs(sum(profiles[t][:k]) - sum(shares)))
    cell = next(one for one in plan["cells"]
                if one["draft"] == draft and math.isclose(one["temperature"], planned, rel_tol=1e-4))  # fmt: skip
    forecast, tau = float(cell["tau"][k]), counters.tau  # at this draft length: rounds begin elsewhere at another
    error = math.hypot(_error(shares, counters.rounds), float(cell["tau_errors"][k]))
    z = (tau - forecast) / error if error else 0.0
    drifts = abs(z) > SIGMAS and abs(tau / forecast - 1) > SMALL
    cause = _cause(profiles, planned, nearest, shares) if drifts else None
    return Drift(draft, nearest, k, tau, forecast, z, cause)


def _error(shares: Sequence[float], rounds: int) -> float:
    """Return the standard error of the mean number of accepted drafts, of which each round has 0 .. K: its variance is
    sum_d (2 d - 1) P(at least d) - mean^2."""
    mean = sum(shares)
    square = sum((2 * depth - 1) * share for depth, share in enumerate(shares, 1))
    return math.sqrt(max(square - mean**2, 0.0) / rounds)


def _cause(profiles: Mapping[float, Sequence[float]], planned: float, nearest: float, shares: Sequence[float]) -> str:
    """Return the likely cause of a difference."""
    count, expected = len(shares), profiles[planned][: len(shares)]
    gap, left = (abs(sum(profiles[t][:count]) - sum(shares)) for t in (planned, nearest))
    if nearest != planned and left < NEAR * gap:
        return (
            f"the acceptance is that of temperature {nearest:g}, and {planned:g} was planned: requests set another one"
        )
    if sum(shares) > sum(expected):
        return (
            "more drafts are accepted than planned: the texts are easier, so a longer draft may pay; plan again with "
            "data.path= of the served prompts"
        )
    first = shares[0] / expected[0] if expected[0] else 1.0
    later = [_conditional(shares, d) / max(_conditional(expected, d), 1e-9) for d in range(1, count)]
    if later and min(later) < first - LATE:
        return (
            f"{first:.0%} of the planned first drafts are accepted, and fewer of the later ones: the server's draft "
            "model reads other states or positions than in training, or drafts greedily; compare with "
            "cotrain serve_check"
        )
    return (
        "all depths lose alike: the served prompts differ from the planned ones; train on texts of these prompts "
        "(init=pretrained), or plan again with data.path= of them"
    )


def _conditional(shares: Sequence[float], depth: int) -> float:
    return shares[depth] / shares[depth - 1] if shares[depth - 1] else 0.0
