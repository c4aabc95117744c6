"""Drift of a served draft: the acceptance that a server counts, compared with the plan's forecast (`cotrain plan
log=`).

A server counts rounds, and accepted drafts by depth. The share of rounds that accept depth d is compared with the
plan's share. The standard error covers both the plan's texts and the server's rounds. A server does not count by text,
so its rounds are treated as independent. Rounds of one text are in fact alike, so few served texts may show drift by
chance.
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
LOST = 0.1  # of the planned first drafts: fewer are accepted where the draft is not what was planned
COUNTERS = (
    "save the page of a vLLM server, as with `curl http://localhost:8000/metrics`, or JSON with rounds and "
    "accepted_by_depth"
)
NEAR = 0.25  # of the difference: what is left of it at another temperature, if that is the cause


@dataclass(frozen=True)
class Drift:
    """The served acceptance of a draft, compared with its plan.

    temperature: the planned temperature whose profile is nearest to the served acceptance. depths: the draft length.
    tau, forecast: tokens per round at this draft length, as served and as forecast; their ratio is the ratio of speeds.
    z: standard score of the difference. cause: the likely cause in words, or None without drift.
    """

    draft: str
    temperature: float
    depths: int
    tau: float
    forecast: float
    z: float
    cause: str | None

    @property
    def line(self) -> str:
        """Return the comparison as one line for the user."""
        change = f"tau {self.tau:.3f} served, {self.forecast:.3f} forecast for {self.depths} drafts (z {self.z:+.1f})"
        speed = f"speed {100 * (self.tau / self.forecast - 1):+.0f} %"
        return f"{self.draft}: {change}, {speed}: " + (f"drift: {self.cause}" if self.cause else "as forecast")


@dataclass(frozen=True)
class PlannedTau:
    """A plan's forecast for its recommended draft.

    profiles: temperature -> for depths 1 .. K, the share of rounds that accept this depth. The first temperature is the
    serving temperature. tau, errors: tokens per round at the first temperature, and their standard errors, by draft
    length from 0 on.
    """

    draft: str
    profiles: Mapping[float, Sequence[float]]
    tau: Sequence[float]
    errors: Sequence[float]


def read_plan(file: Path) -> PlannedTau:
    """Return the forecast in a plan.json. Raises UserError if the file is missing or is no plan."""
    if not file.is_file():
        raise UserError(
            f"output={file.parent}: it has no {file.name}: make one with cotrain plan draft.path= of the served draft"
        )
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
        draft = _entry(plan, "recommended", kind=str)
        profiles = {
            float(t): _numbers(_entry(one, "prefix"), f"acceptance.{t}.prefix", 0, 1)
            for t, one in _entry(plan, "acceptance", draft, kind=dict).items()
        }
        for cell in _entry(plan, "cells", kind=list):
            (t,) = _numbers([_entry(cell, "temperature")], "temperature", 0)
            if _entry(cell, "draft") == draft and math.isclose(t, next(iter(profiles), math.nan), rel_tol=1e-4):
                tau, errors = (
                    _numbers(_entry(cell, name), name, least) for name, least in (("tau", 1), ("tau_errors", 0))
                )
                if len(errors) == len(tau) > max(map(len, profiles.values())):
                    return PlannedTau(draft, profiles, tau, errors)
        raise ValueError(
            f"its cells have no tau and tau_errors of {draft} at temperature {next(iter(profiles), math.nan):g} for "
            "all draft lengths"
        )
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"output={file.parent}: {file.name} is no plan of a draft: {error}; make it again with cotrain plan "
            "draft.path= of the served draft"
        ) from error


def _entry(given: Any, *keys: str, kind: type = object) -> Any:
    """Return the value at the path `keys` in nested objects. kind: its type. Raises ValueError if the value is missing
    or has another type."""
    for key in keys:
        given = given.get(key) if isinstance(given, dict) else None
    if given is None or not isinstance(given, kind):
        raise ValueError(f"its entry {'.'.join(keys)} is missing or of a wrong type: {given!r:.20}")
    return given


def _numbers(given: Any, name: str, least: float, most: float = math.inf) -> tuple[float, ...]:
    """Return a list as a tuple of numbers. Raises ValueError unless it is a list of finite numbers from `least` to
    `most`. name: the list's name, for the message."""
    if not isinstance(given, list) or not given:
        raise ValueError(f"{name} must be a list of numbers, not {given!r:.20}")
    for one in given:
        if isinstance(one, bool | str | list | dict | None) or not least <= one <= most or math.isinf(one):
            raise ValueError(f"{name} must be numbers from {least:g} to {most:g}, not {one!r:.20}")
    return tuple(given)


def served_counters(log: Path) -> Served:
    """Return the counters of a server, read from the file `log`. It is a Prometheus page from vLLM (`curl
    URL/metrics`), or JSON with `rounds`, `accepted_by_depth` and, if rounds drafted different numbers of tokens,
    `drafted`. Raises UserError for any other file, and for counters that are impossible."""
    try:
        text = log.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            given = json.loads(text)
            (rounds,), depths = (_counters(given, name) for name in ("rounds", "accepted_by_depth"))
            drafted = _counters(given, "drafted")[0] if "drafted" in given else rounds * len(depths)
            counters: Served | None = Served(rounds, drafted, sum(depths), depths)
        else:
            counters = counted_in(text)
    except KeyError as error:
        raise UserError(f"log={log}: it has no counter {error}: {COUNTERS}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"log={log}: it begins like JSON but is not valid JSON ({error}): {COUNTERS}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"log={log}: it is not UTF-8 text: {COUNTERS}") from error
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"log={log}: {error}") from error
    if counters is None or not counters.by_depth:
        raise UserError(f"log={log}: it has no counters of drafts: {COUNTERS}")
    if impossible := _impossible(counters):
        raise UserError(f"log={log}: {impossible}")
    return counters


def _counters(given: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return an entry as a tuple of counters; a single counter gives one element. Raises KeyError if the entry is
    missing, and ValueError for numbers that are not whole or below 0."""
    value = given[name]
    numbers = _numbers(value if name == "accepted_by_depth" else [value], name, 0)
    if any(one != int(one) for one in numbers):
        raise ValueError(f"{name} must be whole numbers, not {value!r}")
    return tuple(map(int, numbers))


def _impossible(one: Served) -> str | None:
    """Return why no server can have these counters, or None if they are possible."""
    depths, accepted = list(one.by_depth), sum(one.by_depth)
    if one.rounds < 1:
        return "no round drafted: serve some prompts with the draft, and save the counters again"
    if min(depths) < 0 or any(later > before for before, later in pairwise((one.rounds, *depths))):
        return f"of {one.rounds} rounds, {depths} drafts were accepted by depth: numbers cannot rise, or be below 0"
    if not accepted <= one.drafted <= one.rounds * len(depths):
        return (
            f"{one.drafted} tokens were drafted in {one.rounds} rounds of at most {len(depths)}, and {accepted} "
            "accepted: these cannot be counters of the same rounds"
        )
    if not math.isclose(one.accepted, accepted, rel_tol=SMALL, abs_tol=len(depths)):
        return f"{one.accepted} drafts were accepted, and {accepted} by depth: save the whole page at one time"
    return None


def drift(plan: PlannedTau, counters: Served) -> Drift:
    """Return the comparison of a server's counters with the plan's recommended draft, at the plan's first temperature.
    plan: the forecast. counters: rounds, and accepted drafts by depth.

    Raises UserError if the server drafts more tokens than the plan forecast, or different numbers of tokens in its
    rounds, since the plan has no forecast for a mixture of lengths.
    """
    profiles, k = plan.profiles, len(counters.by_depth)
    longest = min(map(len, profiles.values()))
    if k > longest:
        raise UserError(
            f"log: the server drafts {k} tokens per round, and the plan forecasts at most {longest}: plan again with "
            f"bench.depths=[{k}]"
        )
    if counters.drafted < FIXED * counters.rounds * k:
        raise UserError(
            f"log: rounds drafted {counters.drafted / counters.rounds:.2f} tokens on average, and {k} at most: drift "
            "can only be computed if all rounds draft equally many: serve some prompts without a schedule and "
            "without an adaptive policy, and save their counters"
        )
    shares = [accepted / counters.rounds for accepted in counters.by_depth]
    at = next(iter(profiles))  # the first temperature is that of serving
    nearest = min(profiles, key=lambda t: abs(sum(profiles[t][:k]) - sum(shares)))
    forecast, tau = plan.tau[k], counters.tau  # at this draft length: rounds begin elsewhere at another
    # the larger error of the two shares: a few rounds without an accepted draft would have none
    spread = max(_error(some, counters.rounds) for some in (shares, profiles[at][:k]))
    error = math.hypot(spread, plan.errors[k])
    z = (tau - forecast) / error if error else math.copysign(math.inf, tau - forecast) if tau != forecast else 0.0
    drifts = abs(z) > SIGMAS and abs(tau / forecast - 1) > SMALL
    cause = _cause(profiles, at, nearest, shares) if drifts else None
    return Drift(plan.draft, nearest, k, tau, forecast, z, cause)


def _error(shares: Sequence[float], rounds: int) -> float:
    """Return the standard error of the mean number of accepted drafts over `rounds` rounds. A round accepts 0 .. K
    drafts; the variance is sum_d (2 d - 1) P(at least d) - mean^2. shares (K,): P(at least d) for d = 1 .. K."""
    mean = sum(shares)
    square = sum((2 * depth - 1) * share for depth, share in enumerate(shares, 1))
    return math.sqrt(max(square - mean**2, 0.0) / rounds)


def _cause(profiles: Mapping[float, Sequence[float]], planned: float, nearest: float, shares: Sequence[float]) -> str:
    """Return the likely cause of a difference, in words.

    profiles: temperature -> the planned share of rounds that accept each depth. planned: the serving temperature in the
    plan. nearest: the temperature whose profile is nearest to the served acceptance. shares: the share of served rounds
    that accept each depth.
    """
    count, expected = len(shares), profiles[planned][: len(shares)]
    first = shares[0] / expected[0] if expected[0] else 1.0
    if first < LOST and shares[0] < LOST * min(one[0] for one in profiles.values()):
        return (
            f"{first:.0%} of the planned first drafts are accepted, which other prompts do not explain; look at these "
            "in turn: whether the server's draft is the planned folder; whether target and draft have the planned "
            "tokenizer; whether the draft reads the target's states, layers and positions as in training (cotrain "
            "serve_check); whether the server's flags are those that cotrain export wrote"
        )
    gap, left = (abs(sum(profiles[t][:count]) - sum(shares)) for t in (planned, nearest))
    if nearest != planned and left < NEAR * gap:
        return (
            f"the acceptance is as planned for temperature {nearest:g}, not for {planned:g}: requests set another "
            "temperature: plan again with regime.temperature= of the requests"
        )
    if sum(shares) > sum(expected):
        return (
            "more drafts are accepted than planned: the texts are easier, so a longer draft may pay; plan again with "
            "data.path= of the served prompts"
        )
    later = [_conditional(shares, d) / max(_conditional(expected, d), 1e-9) for d in range(1, count)]
    if later and min(later) < first - LATE:
        return (
            f"{first:.0%} of the planned first drafts are accepted, and fewer of the later ones: the server's draft "
            "model reads other states or positions than in training, or drafts greedily; compare with "
            "cotrain serve_check"
        )
    return (
        "fewer drafts are accepted than planned, at all depths alike: the served prompts differ from the planned ones: "
        "train on texts of these prompts (init=pretrained), or plan again with data.path= of them"
    )


def _conditional(shares: Sequence[float], depth: int) -> float:
    return shares[depth] / shares[depth - 1] if shares[depth - 1] else 0.0
