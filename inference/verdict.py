"""What was found about the exactness of a run, and how it is said; `inference.exactness` makes these."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

CALLS_SIGMAS, DEPTH_SIGMAS = 4, 3


@dataclass(frozen=True)
class TextCheck:
    """(a) prompts = equal + ties + unexplained. noise: largest change, between passes of one id and of k + 1,
    of the gap between a position's two best scores (`inference.ties`); gap: largest one at a first
    difference, 0 without."""

    prompts: int
    equal: int
    ties: int
    unexplained: int
    noise: float
    gap: float

    @property
    def passed(self) -> bool:
        return self.unexplained == 0

    def line(self) -> str:
        return (f"coupled text equals plain text: {self.equal} of {self.prompts} prompts, {self.ties} ties, "
                f"{self.unexplained} unexplained (gap {self.gap:.2g}, noise {self.noise:.2g})")  # fmt: skip


@dataclass(frozen=True)
class CallsCheck:
    """(b) target calls counted and expected for the same texts; sigma of the acceptance coins and of the
    `near` drafts whose law is certain but that rounding could turn, one call each. prefix, conditional:
    predicted acceptance by depth, None where not predicted (block)."""

    tokens: int
    measured: int
    predicted: float
    sigma: float
    near: int
    prefix: list[float] | None = None
    conditional: list[float] | None = None

    @property
    def z(self) -> float:
        return _sigmas(self.measured - self.predicted, self.sigma, self.predicted)

    @property
    def relative(self) -> float:
        """(measured - predicted) / predicted."""
        return self.measured / self.predicted - 1

    @property
    def tau(self) -> float:
        """Predicted tokens per target call."""
        return self.tokens / self.predicted

    @property
    def passed(self) -> bool:
        return abs(self.z) < CALLS_SIGMAS

    def line(self) -> str:
        return (f"target calls on the emitted texts: {self.measured} measured, {self.predicted:.1f} +- "
                f"{self.sigma:.1f} predicted, z {self.z:+.2f}, {self.relative:+.2%}")  # fmt: skip


@dataclass(frozen=True)
class DepthCheck:
    """(c) rounds that drafted, how many accepted their first draft, mean of alpha over those rounds, its
    sigma."""

    rounds: int
    accepted: int
    alpha: float
    sigma: float

    @property
    def measured(self) -> float:
        return self.accepted / self.rounds

    @property
    def passed(self) -> bool:
        return _sigmas(self.measured - self.alpha, self.sigma, 1) <= DEPTH_SIGMAS

    def line(self) -> str:
        return (f"acceptance at depth 1: {self.measured:.4f} in {self.rounds} rounds, "
                f"at most alpha {self.alpha:.4f} + {DEPTH_SIGMAS} x {self.sigma:.4f}")  # fmt: skip


def _sigmas(difference: float, sigma: float, scale: float) -> float:
    """difference / sigma; a difference within the rounding of float32 laws is none."""
    if abs(difference) <= 1e-5 * scale:
        return 0.0
    return difference / sigma if sigma > 0 else math.copysign(math.inf, difference)


@dataclass(frozen=True)
class Verdict:
    """The three checks; `missing` says of each one that is None why it does not apply."""

    text: TextCheck
    calls: CallsCheck | None = None
    depth: DepthCheck | None = None
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Every check that applies has passed."""
        return all(check.passed for check in (self.text, self.calls, self.depth) if check)

    @property
    def figures(self) -> dict[str, Any]:
        """All figures, with None for a check that does not apply."""
        text = {**asdict(self.text), "passed": self.text.passed}
        calls = depth = None
        if self.calls:
            derived = {"z": self.calls.z, "relative": self.calls.relative, "tau": self.calls.tau}
            calls = {**asdict(self.calls), **derived, "passed": self.calls.passed}
        if self.depth:
            depth = {**asdict(self.depth), "measured": self.depth.measured, "passed": self.depth.passed}
        missing = dict(self.missing)
        return {"passed": self.passed, "text": text, "calls": calls, "depth": depth, "missing": missing}

    def lines(self) -> list[str]:
        """A line that sums up, then one a check."""
        checks = {"a": self.text, "b": self.calls, "c": self.depth}
        lines = [f"exactness: {_word(self.passed)}"]
        for letter, name in zip(checks, ("text", "calls", "depth"), strict=True):
            one = checks[letter]
            lines.append(f"  ({letter}) " + (f"{one.line()}: {_word(one.passed)}" if one else self.missing[name]))
        return lines


def _word(passed: bool) -> str:
    return "passed" if passed else "FAILED"
