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
from cotrain.losses.guess import Guess, Pruned, chosen, numbers, picked, sent
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


class Masses:
    """The logs of the mass that the target gives to a draft's tokens, and to all others, at positions of texts. They
    are computed once for each text, by itself, so that its distributions have the same bits whenever it is learnt; the
    target's head is then applied for the draft's tokens alone.

    part: ids (Vd,) -> the target's head for these tokens, states (n, D) -> logits (n, Vd).
    """

    def __init__(self, part: Callable[[Tensor], Head]) -> None:
        self.part = part
        self.head: Head | None = None
        self.texts: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}  # columns (n,), on the CPU, and (n, 2)

    def logs(
        self, target: FromStates, keys: Sequence[int], mask: Tensor, temperature: Tensor, pruned: Pruned, chunk: int
    ) -> Callable[[Tensor], Tensor]:
        """Return a function from flat positions (n,), on the CPU, to log p (n, Vd + 1) there, as `with_rest` has it.

        keys: the number of each text. mask (B, T) bool: all positions that may be asked for, the same whenever a text
        is learnt. temperature (B * T,), on the CPU, above 0 and the same for all positions of a text. pruned: with the
        same ids in all calls.
        """
        texts = []
        for row, key in enumerate(keys):
            columns = numbers(mask[row])
            at = row * mask.shape[1] + columns
            name = key, float(temperature[at[0]]) if len(at) else 1.0
            if name not in self.texts or not torch.equal(self.texts[name][0], columns):
                parts = [target.logs(some, temperature[some], None, pruned) for some in at.split(chunk)]
                both = [torch.stack((one[:, :-1].logsumexp(-1), one[:, -1]), -1) for one in parts]
                self.texts[name] = columns, torch.cat(both)
            texts.append(self.texts[name][1])
        masses = torch.cat(texts)
        masses = masses.new_zeros(mask.numel(), 2).index_copy(0, sent(numbers(mask), masses.device), masses)
        self.head = head = self.head or self.part(pruned.ids)

        def logs(some: Tensor) -> Tensor:
            inside, outside = picked(masses, some).split(1, -1)
            return torch.cat((log_probs(head(chosen(target.states, some)), temperature[some]) + inside, outside), -1)

        return logs


@torch.no_grad()
def remembered(
    target: TargetDistributions,
    guesses: Sequence[Guess],
    mask: Tensor,
    temperature: float | Tensor,
    truncate: Truncate | None,
    chunk: int,
    masses: Masses | None = None,
    keys: Sequence[int] = (),
) -> TargetDistributions:
    """Return the target's distributions, computed once, at the positions where `mask` (B, T) bool is True and at least
    one guess is made. Return `target` itself if they would need more than `REMEMBERED` bytes (on a GPU, `ON_GPU` times
    as many), or if they need a gradient.

    guesses: all pruned to the same ids, or none pruned. temperature: a number, (B,) or (B, T). truncate: a function
    that sets the logits cut by top-k / top-p to -inf, or None. chunk: the number of positions computed at once.
    masses: used if the guesses are pruned, no text has temperature 0 and the target is not cut. keys: the number of
    each text, for `masses`.
    """
    if not isinstance(target, FromStates) or target.trained:
        return target
    wanted = torch.zeros_like(mask).flatten()
    for guess in guesses:
        wanted[guess.at] = True
    at = numbers(wanted & mask.flatten())
    each, pruned = over_positions(temperature, mask.shape, target.states), guesses[0].pruned

    def whole(some: Tensor) -> Tensor:
        return target.logs(some, each[some], truncate, pruned)

    logs: Callable[[Tensor], Tensor] = whole
    one = logs(at[:1])
    if len(at) * one.nbytes > REMEMBERED * (1 if one.device.type == "cpu" else ON_GPU):
        return target
    if masses and pruned and truncate is None and bool((each[mask.flatten()] > 0).all()):
        logs = masses.logs(target, keys, mask, each, pruned, chunk)
    values = one.new_empty(len(at), one.shape[1])
    for into, some in zip(values.split(chunk), at.split(chunk), strict=True):
        into.copy_(logs(some))
    rows = torch.arange(len(at), device=at.device)
    return Remembered(values, torch.full_like(wanted, len(at), dtype=torch.long).index_copy(0, at, rows))
