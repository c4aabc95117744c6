"""The predictions of a student in training, to which losses apply. B texts, T tokens, N guesses, V vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

ANY = -1  # the depth of a guess that holds at every depth


@dataclass(frozen=True)
class Guess:
    """Distributions that a student predicts at one depth, one from each of its states.

    depth: 0-based. Position t of a text predicts token t + 1, in the round whose first new token is t + 1 - depth. ANY:
    the distribution at a position is the same at every depth. at (N,) int64: flat positions b * T + t, without
    duplicates. states (N, Dq). head: (n, Dq) -> logits (n, V). parameters: all trained parameters of the head; if they
    are given, a loss computes each chunk only once. share: the fraction of the depth's positions that were drawn at
    random for this guess; sums over them are divided by it.
    """

    depth: int
    at: Tensor
    states: Tensor
    head: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...] = field(default=())
    share: float = 1.0

    @classmethod
    def everywhere(
        cls, states: Tensor, head: Callable[[Tensor], Tensor], parameters: tuple[Tensor, ...] = (), depth: int = ANY
    ) -> "Guess":
        """Return a guess at every position, from states (B, T, Dq)."""
        at = torch.arange(states.shape[0] * states.shape[1], device=states.device)
        return cls(depth, at, states.flatten(0, 1), head, parameters)
