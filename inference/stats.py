"""Counts and clocks of a run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PHASES = ("prefill", "draft", "target", "verify", "other")


@dataclass
class Counts:
    """tokens emitted; target_calls, one a round; drafted[d] and accepted[d] at depth d (0-based)."""

    tokens: int = 0
    target_calls: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens per target call, the one emitted after the accepted ones included; nan before any call."""
        return self.tokens / self.target_calls if self.target_calls else float("nan")

    def add(self, tokens: int, drafted: int, accepted: int) -> None:
        """One round of one row."""
        self.tokens += tokens
        self.target_calls += 1
        missing = drafted - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for depth in range(drafted):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < accepted


@dataclass
class Stats(Counts):
    """Sums over rows, the rows themselves in the order of the prompts, and wall seconds by phase."""

    rows: list[Counts] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def count(self, row: int, tokens: int, drafted: int, accepted: int) -> None:
        self.add(tokens, drafted, accepted)
        self.rows[row].add(tokens, drafted, accepted)
