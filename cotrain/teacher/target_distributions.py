"""Next-token distributions of the target, computed from its last states.

B texts, T tokens, D width, n positions, V vocabulary, Vd tokens of a pruned vocabulary, C columns.
"""

import math
from collections.abc import Callable, Sequence
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


class OutsideMass:
    """The log of the mass that the target gives to all tokens outside of a draft's vocabulary, at positions of texts.
    It is stored when a text is first learnt. From then on the head of the target is applied for the draft's tokens
    alone. part: ids (Vd,) -> the target's head for these tokens, states (n, D) -> logits (n, Vd)."""

    def __init__(self, part: Callable[[Tensor], Head]) -> None:
        self.part = part
        self.head: Head | None = None
        self.texts: dict[int, tuple[Tensor, Tensor]] = {}  # positions (n,), on the CPU, and log masses (n, 1)

    def known(self, keys: Sequence[int], columns: Sequence[Tensor]) -> Tensor | None:
        """Return the log masses (N, 1) at the positions `columns` of each text, or None unless those of all texts are
        stored for just these positions. keys: the number of each text."""
        texts = [self.texts.get(key) for key in keys]
        same = all(text and torch.equal(text[0], one) for text, one in zip(texts, columns, strict=True))
        return torch.cat([text[1] for text in texts if text]) if same else None

    def logs(self, states: Tensor, outside: Tensor, temperature: Tensor, ids: Tensor) -> Tensor:
        """Return log p (n, Vd + 1) as `with_rest`, from the target's last states (n, D) and the log masses (n, 1).
        temperature (n,), on the CPU, above 0. ids (Vd,): always the same."""
        self.head = self.head or self.part(ids)
        inside = log_probs(self.head(states), temperature) + torch.log1p(-outside.exp())
        return torch.cat((inside, outside), -1)


@torch.no_grad()
def remembered(
    target: TargetDistributions,
    guesses: Sequence[Guess],
    mask: Tensor,
    temperature: float | Tensor,
    truncate: Truncate | None,
    chunk: int,
    outside: OutsideMass | None = None,
    keys: Sequence[int] = (),
) -> TargetDistributions:
    """Return the target's distributions, computed once, at the positions where `mask` (B, T) bool is True and at least
    one guess is made. Return `target` itself if they would need more than `REMEMBERED` bytes (on a GPU, `ON_GPU` times
    as many), or if they need a gradient.

    guesses: all pruned to the same ids, or none pruned. temperature: a number, (B,) or (B, T). truncate: a function
    that sets the logits cut by top-k / top-p to -inf, or None. chunk: the number of positions computed at once.
    outside: read, and filled, if the guesses are pruned and the target is neither cut nor at temperature 0. keys: the
    number of each text, for `outside`.
    """
    if not isinstance(target, FromStates) or target.trained:
        return target
    wanted = torch.zeros_like(mask).flatten()
    for guess in guesses:
        wanted[guess.at] = True
    at = numbers(wanted & mask.flatten())
    each, pruned = over_positions(temperature, mask.shape, target.states), guesses[0].pruned
    rest = None
    if outside and pruned and truncate is None and bool((each[at] > 0).all()):
        columns = (at % mask.shape[1]).split(torch.bincount(at // mask.shape[1], minlength=len(keys)).tolist())
        rest = outside.known(keys, columns)
    else:
        outside = None

    def logs(some: Tensor) -> Tensor:
        if outside and pruned and rest is not None:
            return outside.logs(chosen(target.states, some), picked(rest, row[some]), each[some], pruned.ids)
        return target.logs(some, each[some], truncate, pruned)

    row = torch.full_like(wanted, len(at), dtype=torch.long).index_copy(0, at, torch.arange(len(at)))
    one = logs(at[:1])
    if len(at) * one.nbytes > REMEMBERED * (1 if one.device.type == "cpu" else ON_GPU):
        return target
    values = one.new_empty(len(at), one.shape[1])
    for into, some in zip(values.split(chunk), at.split(chunk), strict=True):
        into.copy_(logs(some))
    if outside and rest is None:
        masses = values[:, -1:].clone().split([len(one) for one in columns])
        outside.texts.update(zip(keys, zip(columns, masses, strict=True), strict=True))
    return Remembered(values, row)
