"""What losses are summed over: the distributions that a student guesses. N guesses, V vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

ANY = -1  # the depth of a guess that is the same at every depth


@dataclass(frozen=True)
class Guess:
    """Distributions that a student guesses, each from a state of its own.

    depth: 0-based: a round whose first new token is t + 1 - depth makes the guess at place t, of token t + 1; ANY: its
    distribution at a place is the same at every depth. at (N,) int64: flat places, none twice. states (N, Dq). head:
    (n, Dq) -> logits (n, V). parameters: all that head learns; with them a loss in chunks computes each chunk once.
    share: of the places of its depth, those that it was made at, drawn at random: what it adds up to stands for all.
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
        """At every place, from states (B, T, Dq)."""
        places = torch.arange(states.shape[0] * states.shape[1], device=states.device)
        return cls(depth, places, states.flatten(0, 1), head, parameters)
