"""Policies of draft lengths. A policy chooses how many tokens each row drafts in a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
