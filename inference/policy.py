"""Policies of draft lengths. A policy chooses how many tokens each row drafts in a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from inference.sampling.parameters import is_whole


class Policy(Protocol):
    """A choice of draft lengths before each round. It may not depend on the tokens that the round drafts."""

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        """Return the draft length of each active row, given its text so far."""


@dataclass(frozen=True)
class Fixed:
    """A policy with the same draft length in every round. Raises ValueError unless k is a whole number of at least
    0."""

    k: int

    def __post_init__(self) -> None:
        if not is_whole(self.k, 0):
            raise ValueError(f"policy.k must be a whole number of at least 0, not {self.k!r}")

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        return [self.k] * len(texts)


class Decisions(Protocol):
    """The decisions of a policy that learns within a call. No decision may depend on the draft that it decides about,
    nor on the target's numbers of this round. Then each draft is drawn from its distribution whatever was decided, and
    every rule stays exact. A rows."""

    def idle(self, rows: int, asks: bool) -> bool:
        """Return whether rounds of this many new rows would draft nothing, so that no draft model need read their
        prompts yet (`Proposer.catches_up`). asks: as in `open`."""

    def open(self, rows: Sequence[int], asks: bool) -> int:
        """Begin a round of these rows of the call, and return the largest number of drafts per row. asks: whether the
        proposer asks after each draft whether to go on (`Proposer.asks`)."""

    def see(self, depth: int, logits: Tensor, temperature: Tensor) -> None:
        """Receive the logits (A, V) from which the draft of this depth (0-based) is drawn. temperature (A,)."""

    def goes_on(self, depth: int, room: Sequence[int]) -> bool:
        """Return whether to draft another token after that of this depth (0-based). room: the largest number of drafts
        of each row."""

    def close(self, drafts: Sequence[tuple[int, int]]) -> None:
        """Receive how many drafts each row made, and how many of these were accepted."""


@runtime_checkable
class LearningPolicy(Policy, Protocol):
    """A policy that learns within a call, from the distributions of its drafts and from the outcomes of its rounds."""

    def begin(self) -> Decisions:
        """Return the decisions of one call."""
