"""Draft lengths of a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from inference.sampling.parameters import is_whole


class Policy(Protocol):
    """Chooses draft lengths before a round. The choice may not depend on the tokens that the round drafts."""

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        """Return the draft length of each active row, given its text so far."""


@dataclass(frozen=True)
class Fixed:
    """The same draft length in every round. Raises ValueError if k is no whole number of at least 0."""

    k: int

    def __post_init__(self) -> None:
        if not is_whole(self.k, 0):
            raise ValueError(f"policy.k must be a whole number of at least 0, not {self.k!r}")

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        return [self.k] * len(texts)
