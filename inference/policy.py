"""Policies of draft lengths. A policy chooses how many tokens each row drafts in a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from inference.sampling.parameters import is_whole


class Policy(Protocol):
    """Chooses draft lengths before each round. The choice must not depend on the tokens that the round drafts."""

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        """Return the draft length of each active row, in tokens. texts: the ids of each row's text so far."""


@dataclass(frozen=True)
class Fixed:
    """A policy with the same draft length in every round. k: number of drafts per row and round. Raises ValueError
    unless k is a whole number of at least 0."""

    k: int

    def __post_init__(self) -> None:
        if not is_whole(self.k, 0):
            raise ValueError(f"policy.k must be a whole number of at least 0, not {self.k!r}")

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        return [self.k] * len(texts)


class Decisions(Protocol):
    """The decisions of a policy that learns within a call. A decision must not depend on the draft that it decides
    about, nor on the target's logits of this round. Then each draft is drawn from its distribution whatever was
    decided, and every rule stays exact. A is the number of active rows, V the vocabulary size. asks: whether the round
    that was opened last decides after each draft."""

    @property
    def asks(self) -> bool: ...

    def idle(self, rows: int, asks: bool) -> bool:
        """Return whether a round of `rows` new rows would draft nothing. Then the draft model need not read their
        prompts yet, if it can read them later (`Proposer.catches_up`). asks: whether the proposer asks after each draft
        whether to go on (`Proposer.asks`)."""

    def open(self, rows: Sequence[int], asks: bool) -> int:
        """Begin a round. Return the largest number of drafts per row. rows: indices of the active rows in the call.
        asks: whether the proposer asks after each draft whether to go on (`Proposer.asks`)."""

    def see(self, depth: int, logits: Tensor, temperature: Tensor) -> None:
        """Receive the logits (A, V) that the drafts at `depth` (0-based) are drawn from. temperature (A,): each row's
        temperature, 0 for greedy."""

    def goes_on(self, depth: int, room: Sequence[int]) -> bool:
        """Return whether to draft another token after the draft at `depth` (0-based). room: for each row, the largest
        number of drafts that it can use in this round."""

    def close(self, drafts: Sequence[tuple[int, int]]) -> None:
        """End the round. drafts: for each row, the number of its drafts and the number of these that were accepted."""


@runtime_checkable
class LearningPolicy(Policy, Protocol):
    """A policy that learns within a call, from the distributions of its drafts and from the outcomes of its rounds."""

    def begin(self) -> Decisions:
        """Return the decisions of one call."""
