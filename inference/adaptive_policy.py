"""An adaptive policy. It goes on drafting while further drafts are expected to give more tokens per second than the
round otherwise gives. It drafts nothing if no draft length pays.

`cotrain plan` measures the seconds of rounds and decisions, and fits the estimates of acceptance. A rows, K the longest
draft length.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference.sampling import wide
from inference.sampling.parameters import is_whole

Numbers = NDArray[np.float64]
INPUTS = 4  # of an estimate, see `inputs`
PRIOR = 8.0  # drafts that the mean acceptance counts for, beside those of the row
DISCOUNT = 0.98  # of a row's earlier drafts, per token that it emits: texts change
EDGE = 1e-3  # no acceptance is taken to be nearer to 0 or 1


@dataclass(frozen=True)
class Estimates:
    """Estimates of acceptance for one draft model, fitted to real rounds (`cotrain plan`). mean: among the drafts whose
    predecessors were all accepted, the fraction that was accepted too. here: weights (INPUTS,) of the log odds that a
    draft is accepted. ahead: weights (INPUTS,) of the log odds that the next draft is accepted, if this one is."""

    mean: float
    here: tuple[float, ...]
    ahead: tuple[float, ...]


@dataclass(frozen=True)
class Adaptive:
    """A policy that chooses the draft length of each round by expected tokens per second.

    seconds: for each number of rows that was timed, the seconds of a round that drafts 0, 1, ... tokens; between these
    numbers of rows, seconds are interpolated. estimates: the estimates of acceptance. deciding: for each number of rows
    at which deciding after each draft pays, the seconds of one decision. At a timed number of rows that is not in
    `deciding`, rounds do not decide after each draft. A number of rows that was not timed follows the nearest timed
    one. None: rounds of any number of rows decide, in 0 seconds. draft: the draft that the policy was fitted to, as
    `draft_folder.folder_identity` names it; `inference.load` compares it. None if it is unknown.

    A round begins with drafts if some draft length k >= 1 has a higher rate (expected tokens of all rows / seconds)
    than plain decoding. A row's acceptance is estimated from its recent drafts, shrunk to the mean. After rounds
    without drafts it returns to the mean, so the row drafts again if the mean pays. If deciding pays at this number of
    rows, the round goes on after a draft while some number of further drafts is expected to gain at least their seconds
    times the best rate. If not, the round drafts the length with the best rate. All rows draft equally many tokens,
    since the target's pass is as wide as the longest draft of any row. Draft lengths therefore depend on the rows of a
    batch, and so may a row's text; its distribution does not.

    The estimates read each draft's distribution on the host, so a GPU waits once per draft. Drafts that are made in one
    call (CUDA graphs) are not interrupted; their number is chosen before the call. Raises ValueError if
    the lists in `seconds` differ in length, or if a number is out of its range.
    """

    seconds: Mapping[int, Sequence[float]]
    estimates: Estimates
    deciding: Mapping[int, float] | None = None
    draft: str | None = None

    def __post_init__(self) -> None:
        if not self.seconds or len({len(row) for row in self.seconds.values()}) > 1 or self.longest < 1:
            raise ValueError(
                "policy: seconds must have, for each number of rows, a list with the seconds of a round that drafts 0, "
                "1, ... tokens; all lists must have one length, at least 2, not "
                f"{[len(row) for row in self.seconds.values()]}"
            )
        for name in ("here", "ahead"):
            if len(getattr(self.estimates, name)) != INPUTS:
                raise ValueError(
                    f"policy: estimates.{name} must have {INPUTS} weights, not {len(getattr(self.estimates, name))}"
                )
        deciding = self.deciding or {}
        if not all(is_whole(rows, 1) for rows in (*self.seconds, *deciding)):
            raise ValueError(f"policy: numbers of rows must be whole and at least 1, not {[*self.seconds, *deciding]}")
        rounds = [one for row in self.seconds.values() for one in row]
        weights = (*self.estimates.here, *self.estimates.ahead)
        checks: list[tuple[str, Iterable[float], Callable[[float], bool], str]] = [
            ("seconds", rounds, lambda one: 0 < one < math.inf, "above 0 and finite"),
            ("deciding", deciding.values(), lambda one: 0 <= one < math.inf, "at least 0 and finite"),
            ("estimates.mean", [self.estimates.mean], lambda one: 0 <= one <= 1, "from 0 to 1"),
            ("estimates.here and estimates.ahead", weights, math.isfinite, "finite"),
        ]
        for name, numbers, fits, wanted in checks:
            if wrong := [one for one in numbers if not fits(one)]:
                raise ValueError(f"policy: {name} must be {wanted}, not {wrong[0]!r}")

    @classmethod
    def load(cls, file: str | PathLike[str]) -> "Adaptive":
        """Return the policy in a JSON file that `cotrain plan` has written. Raises ValueError, naming the file, if it
        cannot be read or has another form."""
        try:
            given: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
            seconds = {int(rows): tuple(map(float, row)) for rows, row in given["seconds"].items()}
            here, ahead = (tuple(map(float, given["estimates"][name])) for name in ("here", "ahead"))
            deciding = {int(rows): float(one) for rows, one in given["deciding"].items()}
            mean, draft = float(given["estimates"]["mean"]), given.get("identity")
            return cls(seconds, Estimates(mean, here, ahead), deciding, None if draft is None else str(draft))
        except OSError as error:
            raise ValueError(f"policy: {file} cannot be read ({error.strerror}): give a file that exists") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            detail = f"it has no {error}" if isinstance(error, KeyError) else f"it has another form ({error})"
            raise ValueError(
                f"policy: {file} is no policy file: {detail}; give a policy.json that cotrain plan wrote"
            ) from error

    @property
    def longest(self) -> int:
        """Return the largest draft length."""
        return len(next(iter(self.seconds.values()))) - 1

    def decision(self, rows: int) -> float | None:
        """Return the seconds of one decision with this number of rows, or None if deciding after each draft does not
        pay there."""
        if self.deciding is None:
            return 0.0
        return self.deciding.get(min(self.seconds, key=lambda timed: abs(timed - rows)))

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        """Return the longest draft length for each row. In a call, `CallDecisions` choose shorter ones. texts: the ids
        of each active row's text; only their number is used."""
        return [self.longest] * len(texts)

    def begin(self) -> "CallDecisions":
        """Return new decisions, for one call of `generate` or `stream`."""
        return CallDecisions(self)


@dataclass
class Recent:
    """A row's recent drafts. Each later token multiplies earlier counts by `DISCOUNT`. tried: number of drafts that
    were tested. accepted: number of these that were accepted."""

    tried: float = 0.0
    accepted: float = 0.0


@dataclass
class CallDecisions:
    """The decisions of an `Adaptive` policy in one call: how many tokens each round drafts. It implements
    `policy.Decisions`."""

    policy: Adaptive
    recent: dict[int, Recent] = field(default_factory=dict)  # by row of the call
    rows: Sequence[int] = ()  # of this round
    asks: bool = False  # whether this round decides after each draft
    rates: Numbers = field(default_factory=lambda: np.zeros(0))  # recent acceptance (A,)
    seconds: Numbers = field(default_factory=lambda: np.zeros(0))  # of rounds of A rows, by draft length (K+1,)
    best: float = 0.0  # expected tokens per second of the best draft length
    seen: list[Numbers] = field(default_factory=list)  # the inputs (A, INPUTS) of each draft
    reached: list[Numbers] = field(default_factory=list)  # probability (A,) that all drafts up to each are accepted
    decided: list[bool] = field(default_factory=list)  # after each draft

    def idle(self, rows: int, asks: bool) -> bool:
        """Return whether no draft length pays for `rows` rows that have the mean acceptance. asks: whether the proposer
        can stop after each draft (`Proposer.asks`)."""
        return CallDecisions(self.policy).open(range(rows), asks) == 0

    def open(self, rows: Sequence[int], asks: bool) -> int:
        """Begin a round. Return the largest number of drafts per row: 0 if no draft length has a higher expected rate
        than plain decoding. Otherwise return the longest draft length if the round decides after each draft, and the
        best draft length if it does not (the proposer does not ask, or deciding does not pay).

        rows: indices of the active rows in the call. asks: whether the proposer asks after each draft whether to go on
        (`Proposer.asks`).
        """
        decision = self.policy.decision(len(rows)) if asks else None
        self.rows, self.asks, self.seen, self.reached, self.decided = rows, decision is not None, [], [], []
        self.rates = np.array([self.rate(row) for row in rows])
        lengths = np.arange(self.policy.longest + 1)
        self.seconds = seconds_of(self.policy.seconds, len(rows)) + (decision or 0.0) * lengths
        tokens = (1 - self.rates ** (lengths[:, None] + 1)) / (1 - self.rates)  # a geometric series per row (K+1, A)
        rates = tokens.sum(1) / self.seconds
        k = int(rates.argmax())
        self.best = float(rates[k])
        return self.policy.longest if k and self.asks else k

    def see(self, depth: int, logits: Tensor, temperature: Tensor) -> None:
        """Compute the inputs of the estimates from the logits (A, V) that the drafts at `depth` (0-based) are drawn
        from. temperature (A,): each row's; 0 counts as 1."""
        if self.asks and depth == len(self.seen):
            heat = torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)
            self.note((wide(logits) / heat).softmax(-1).amax(-1).double().cpu().numpy())

    def note(self, top: Numbers) -> None:
        """Compute the inputs of the estimates for the next draft. top (A,): the largest probability in each row's draft
        distribution."""
        self.seen.append(inputs(self.rates, top))
        before = self.reached[-1] if self.reached else 1.0
        self.reached.append(before * estimate(self.policy.estimates.here, self.seen[-1]))

    def goes_on(self, depth: int, room: Sequence[int]) -> bool:
        """Return whether to draft another token after the draft at `depth` (0-based): whether some number of further
        drafts is expected to gain as many tokens as their seconds give at the best rate. All numbers are tried, since a
        cheap draft may follow one that takes long. Each later draft is assumed to be accepted as often as the next one.
        room: for each row, the largest number of drafts that it can use in this round."""
        if not self.asks:
            return True
        if depth == len(self.decided):  # else it is asked again, after drafts of one pass
            more = np.arange(1, len(self.seconds) - depth - 1)[:, None]  # numbers of further drafts (M, 1)
            gains = self.reached[depth] * estimate(self.policy.estimates.ahead, self.seen[depth]) ** more  # (M, A)
            gains = np.where(np.array(room) > depth + more, gains, 0.0)
            gains = np.nan_to_num(gains)  # a row without a distribution gains nothing
            seconds = self.seconds[depth + 2 :] - self.seconds[depth + 1]
            self.decided.append(bool((gains.sum(1).cumsum() >= self.best * seconds).any()))
        return self.decided[depth]

    def close(self, drafts: Sequence[tuple[int, int]]) -> None:
        for row, (drafted, accepted) in zip(self.rows, drafts, strict=True):
            recent, weight = self.recent.setdefault(row, Recent()), DISCOUNT ** (accepted + 1)
            recent.tried = weight * recent.tried + min(drafted, accepted + 1)
            recent.accepted = weight * recent.accepted + accepted

    def rate(self, row: int) -> float:
        """Return the recent acceptance of one row, shrunk to the mean. row: its index in the call."""
        recent = self.recent.get(row, Recent())
        rate = (recent.accepted + PRIOR * self.policy.estimates.mean) / (recent.tried + PRIOR)
        return min(max(rate, EDGE), 1 - EDGE)


def inputs(rates: Numbers, top: Numbers) -> Numbers:
    """Return the inputs (A, INPUTS) of the estimates: 1, the log odds of `rates`, `top`, and the logarithm of `top`.
    rates (A,): the rows' recent acceptance. top (A,): the probability of the draft's likeliest token. Entropy and
    margin are not used: they take longer to compute than a draft takes to draw, and say little more."""
    return np.stack((np.ones_like(rates), np.log(rates / (1 - rates)), top, np.log(top)), -1)


def estimate(weights: Sequence[float], given: Numbers) -> Numbers:
    """Return the estimated probabilities (A,) that drafts are accepted. weights (INPUTS,): weights of the log odds.
    given (A, INPUTS): the result of `inputs`."""
    return 1 / (1 + np.exp(-given @ np.array(weights)))


def seconds_of(table: Mapping[int, Sequence[float]], rows: int) -> Numbers:
    """Return the seconds (K+1,) of a round that drafts 0 to K tokens. table: these seconds by number of rows; between
    two numbers they are interpolated linearly. rows: number of rows; below or above all numbers in `table`, the nearest
    one's seconds are returned."""
    known = sorted(table)
    return np.array([np.interp(rows, known, column) for column in zip(*(table[n] for n in known), strict=True)])
