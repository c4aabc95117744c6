"""What a student predicts while it trains, and what losses sum over. B texts, T tokens, N guesses, V vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

ANY = -1  # the depth of a guess that is the same at every depth


@dataclass(frozen=True)
class Guess:
    """Distributions of one depth that a student predicts, one from each of its states.

    depth: 0-based. Position t of a text predicts token t + 1, in the round whose first new token is t + 1 - depth; ANY:
    the distribution at a position is the same at every depth. at (N,) int64: flat positions b * T + t, without
    duplicates. states (N, Dq). head: (n, Dq) -> logits (n, V). parameters: all that the head learns; given them, a loss
    in chunks computes each chunk once. share: the fraction of the depth's positions that were drawn at random to make
    this guess; its sums are scaled up by 1 / share.
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
        """At every position, from states (B, T, Dq)."""
        at = torch.arange(states.shape[0] * states.shape[1], device=states.device)
        return cls(depth, at, states.flatten(0, 1), head, parameters)
