"""What was found about the exactness of a run, and how it is said; `inference.exactness.checks` makes these."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from inference.exactness.ties import MARGIN

CALLS_SIGMAS, DEPTH_SIGMAS = 4, 3
SURPRISE_SIGMAS, IMPOSSIBLE = 5, 0.02  # logarithms of distributions have heavy tails, and rounding moves edges of cuts


@dataclass(frozen=True)
class TextCheck:
    """(a) equal: prompts whose text is the plain one; ties, unexplained: tokens that plain decoding, given the text
    before them, chooses otherwise, by whether rounding explains that. noise: largest change, between passes of one id
    and of k + 1, of the gap between a position's two best scores (`ties`), at least the rounding that logits have in
    any case; gap: largest one at a difference, 0 without; limit: the largest that the dtype may explain, whatever was
    measured; compared: tokens, of the `tokens` that the measured prompts were given."""

    prompts: int
    equal: int
    ties: int
    unexplained: int
    noise: float
    gap: float
    limit: float = math.inf
    compared: int = 0
    tokens: int = 0

    @property
    def passed(self) -> bool:
        return self.unexplained == 0

    @property
    def explained(self) -> float:
        """The largest score gap that rounding explains."""
        return min(MARGIN * self.noise, self.limit)

    def line(self) -> str:
        share = f", {self.compared} of {self.tokens} tokens compared" if self.tokens else ""
        return (f"coupled text equals plain text: {self.equal} of {self.prompts} prompts, {self.ties} ties, "
                f"{self.unexplained} unexplained (gap {self.gap:.2g}, noise {self.noise:.2g}, by its dtype at most "
                f"{self.limit:.2g}){share}")  # fmt: skip


@dataclass(frozen=True)
class CallsCheck:
    """(b) target calls counted and expected for the same texts; sigma of the acceptance coins and of the
    `near` drafts whose distribution is certain but that rounding could turn, one call each. prefix, conditional:
    predicted acceptance by depth. rare, rare_expected: rounds that accepted a number
    of drafts which, given the text, has less than one chance in a hundred, counted and expected: a wrong residual or
    a wrong q shows there first."""

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
        return abs(self.z) < CALLS_SIGMAS and self.z_rare < CALLS_SIGMAS

    @property
    def z_rare(self) -> float:
        """Of rare rounds, one or each near draft more being no surprise."""
        return (self.rare - self.rare_expected) / math.sqrt(self.rare_expected + self.near + 1)

    def line(self) -> str:
        return (f"target calls on the emitted texts: {self.measured} measured, {self.predicted:.1f} +- "
                f"{self.sigma:.1f} predicted, z {self.z:+.2f}, {self.relative:+.2%}; {self.rare} rare rounds, "
                f"{self.rare_expected:.1f} expected")  # fmt: skip


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


@dataclass(frozen=True)
class LogitsCheck:
    """(d) of `tokens` tokens, from position `first` of a text, prompt included, to position `last`: how far passes of
    one id and of k + 1 are from transformers' own forward, root mean square over tokens, and the worst token of both;
    own: how far that forward is from itself when embeddings move by one unit in the last place; limit, worst_limit:
    what follows from that and the dtype. All of the logits' own root mean square (`inference.exactness.agreement`)."""

    tokens: int
    one: float
    many: float
    worst: float
    own: float
    limit: float
    worst_limit: float
    first: int = 0
    last: int = 0

    @property
    def passed(self) -> bool:
        return self.one <= self.limit and self.many <= self.limit and self.worst <= self.worst_limit

    def line(self) -> str:
        return (f"logits are those of transformers' forward on {self.tokens} tokens at "
                f"positions {self.first} to {self.last}: {self.one:.2g} off in passes of "
                f"one id, {self.many:.2g} of several, at most {self.limit:.2g}; worst token {self.worst:.2g}, at most "
                f"{self.worst_limit:.2g} (its own rounding {self.own:.2g})")  # fmt: skip


@dataclass(frozen=True)
class SurpriseCheck:
    """(e) over `tokens` emitted tokens, in nats: means of -log p(x) and of the entropy of p, which is its expectation
    if p drew x; z: their difference over its standard deviation. place_z: the same of the tokens' places in the
    distribution function. impossible: tokens that p gives no mass, left out of the means; rounding at the edge of
    top-k, top-p or min-p, or at a tie, makes few."""

    tokens: int
    surprise: float
    entropy: float
    z: float
    place_z: float
    impossible: int

    @property
    def passed(self) -> bool:
        likely = max(abs(self.z), abs(self.place_z)) < SURPRISE_SIGMAS
        return likely and self.impossible <= IMPOSSIBLE * self.tokens

    def line(self) -> str:
        return (f"emitted tokens surprise the target as its own would: {self.surprise:.3f} nats a token, "
                f"{self.entropy:.3f} expected, z {self.z:+.2f}, of places z {self.place_z:+.2f}; {self.impossible} of "
                f"{self.tokens} impossible")  # fmt: skip


def _sigmas(difference: float, sigma: float, scale: float) -> float:
    """difference / sigma; a difference within the rounding of float32 distributions is none."""
    if abs(difference) <= 1e-5 * scale:
        return 0.0
    return difference / sigma if sigma > 0 else math.copysign(math.inf, difference)


@dataclass(frozen=True)
class Verdict:
    """The five checks; `missing` says of each one that is None why it does not apply. lossy: the rule that verified, if
    it is one that changes the text's distribution."""

    text: TextCheck
    calls: CallsCheck | None = None
    depth: DepthCheck | None = None
    logits: LogitsCheck | None = None
    missing: dict[str, str] = field(default_factory=dict)
    surprise: SurpriseCheck | None = None
    lossy: str | None = None

    @property
    def passed(self) -> bool:
        """Every check that applies has passed, and the rule is exact."""
        checks = (self.text, self.calls, self.depth, self.logits, self.surprise)
        return not self.lossy and all(check.passed for check in checks if check)

    @property
    def figures(self) -> dict[str, Any]:
        """All figures, with None for a check that does not apply."""
        text = {**asdict(self.text), "passed": self.text.passed}
        calls = depth = logits = surprise = None
        if self.calls:
            names = ("z", "z_rare", "relative", "tau", "passed")
            calls = {**asdict(self.calls), **{name: getattr(self.calls, name) for name in names}}
        if self.depth:
            depth = {**asdict(self.depth), "measured": self.depth.measured, "passed": self.depth.passed}
        if self.logits:
            logits = {**asdict(self.logits), "passed": self.logits.passed}
        if self.surprise:
            surprise = {**asdict(self.surprise), "passed": self.surprise.passed}
        found = {"text": text, "calls": calls, "depth": depth, "logits": logits, "surprise": surprise}
        return {"passed": self.passed, **found, "missing": dict(self.missing)}

    def lines(self) -> list[str]:
        """A line that sums up, then one a check."""
        checks = {"a": self.text, "b": self.calls, "c": self.depth, "d": self.logits, "e": self.surprise}
        whole = f"no, {self.lossy} changes the text's distribution" if self.lossy else _word(self.passed)
        lines = [f"exactness: {whole}"]
        for letter, name in zip(checks, ("text", "calls", "depth", "logits", "surprise"), strict=True):
            one = checks[letter]
            said = f"{one.line()}: {_word(one.passed)}" if one else self.missing.get(name, f"{name}: not checked")
            lines.append(f"  ({letter}) {said}")
        return lines


def _word(passed: bool) -> str:
    return "passed" if passed else "FAILED"
