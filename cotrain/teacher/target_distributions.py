"""Next-token distributions of the target, computed from its last states.

B texts, T tokens, D width, n positions, V vocabulary, Vd tokens of a pruned vocabulary, C columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cotrain.losses.chunked import TargetDistributions, Truncate, log_probs, over_positions, served_logs
from cotrain.losses.guess import Guess, Pruned, chosen, numbers, picked
from cotrain.teacher.target_model import Head

# bytes of a batch's distributions that are computed once for all guesses, and how many times that on a GPU, whose
# batches are larger
REMEMBERED, ON_GPU = 2**28, 8


@dataclass(frozen=True)
class FromStates:
    """Distributions that the target's head computes from its last states (B, T, D). head: states (n, D) -> logits (n,
    V). trained: whether losses have gradients in the states."""

    states: Tensor
    head: Head
    trained: bool = False

    def logs(self, at: Tensor, temperature: Tensor, truncate: Truncate | None, pruned: Pruned | None = None) -> Tensor:
        logs = served_logs(log_probs(self.head(chosen(self.states, at)), temperature), temperature, truncate)
        return logs if pruned is None else with_rest(logs, pruned.ids)


def with_rest(logs: Tensor, ids: Tensor) -> Tensor:
    """Return (n, Vd + 1): column i is the log-probability of token ids[i], the last column that of all other tokens
    together. logs (n, V): log-probabilities. ids (Vd,)."""
    inside = logs[:, ids]
    mass = 1 - inside.exp().sum(-1, keepdim=True)
    some = mass > 0  # the gradient of log 0 would be NaN
    return torch.cat((inside, torch.where(some, mass, 1.0).log().masked_fill(~some, -math.inf)), -1)


@dataclass(frozen=True)
class Remembered:
    """Distributions at some positions of a batch, computed once for all of its guesses.

    values (n, C): log p as served. row (B * T,), on the CPU: for each flat position its row in `values`, or n, which is
    no row, for a position without one.
    """

    values: Tensor
    row: Tensor
    trained: ClassVar[bool] = False

    def logs(self, at: Tensor, temperature: Tensor, truncate: Truncate | None, pruned: Pruned | None = None) -> Tensor:
        return picked(self.values, self.row[at])


@torch.no_grad()
def remembered(
    target: TargetDistributions,
    guesses: Sequence[Guess],
    mask: Tensor,
    temperature: float | Tensor,
    truncate: Truncate | None,
    chunk: int,
) -> TargetDistributions:
    """Return the target's distributions, computed once, at the positions where `mask` (B, T) bool is True and at least
    one guess is made. Return `target` itself if they would need more than `REMEMBERED` bytes (on a GPU, `ON_GPU` times
    as many), or if they need a gradient.

    guesses: all pruned to the same ids, or none pruned. temperature: a number, (B,) or (B, T). truncate: a function
    that sets the logits cut by top-k / top-p to -inf, or None. chunk: the number of positions computed at once.
    """
    if not isinstance(target, FromStates) or target.trained:
        return target
    wanted = torch.zeros_like(mask).flatten()
    for guess in guesses:
        wanted[guess.at] = True
    at = numbers(wanted & mask.flatten())
    each = over_positions(temperature, mask.shape, target.states)

    def logs(some: Tensor) -> Tensor:
        return target.logs(some, each[some], truncate, guesses[0].pruned)

    one = logs(at[:1])
    if len(at) * one.nbytes > REMEMBERED * (1 if one.device.type == "cpu" else ON_GPU):
        return target
    values = one.new_empty(len(at), one.shape[1])
    for into, some in zip(values.split(chunk), at.split(chunk), strict=True):
        into.copy_(logs(some))
    rows = torch.arange(len(at), device=at.device)
    return Remembered(values, torch.full_like(wanted, len(at), dtype=torch.long).index_copy(0, at, rows))
