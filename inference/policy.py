"""Draft lengths of a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol


class Policy(Protocol):
    """Chooses draft lengths before a round, never from the tokens that it drafts."""

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        """Draft length of each active row, given its text so far."""


def lengths_of(policy: Policy, texts: Sequence[list[int]]) -> list[int]:
    """The policy's draft lengths. Raises ValueError unless they are one whole number >= 0 for each text."""
    lengths = list(policy.lengths(texts))
    whole = all(isinstance(length, Integral) and length >= 0 for length in lengths)
    if len(lengths) != len(texts) or not whole:
        raise ValueError(f"policy.lengths: {len(texts)} draft lengths of at least 0 are wanted, not {lengths}")
    return [int(length) for length in lengths]


@dataclass(frozen=True)
class Fixed:
    """The same draft length in every round. Raises ValueError when k < 0."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ValueError(f"policy.k: a draft length cannot be {self.k}")

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        return [self.k] * len(texts)
