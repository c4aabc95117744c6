"""What a student predicts while it trains, to which losses apply.

B texts, T tokens, N predicted positions, V vocabulary, Vd tokens of a pruned vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

ANY = -1  # the depth of a guess that holds at every depth


def draftable(mask: Tensor, depth: int) -> Tensor:
    """Return (B, T) bool: the positions of the mask at which a round drafts at a depth. mask (B, T) bool: the tokens of
    completions. The round begins `depth` positions earlier, and must begin in the completion too, since no round begins
    in a prompt."""
    return mask if depth < 1 else mask & pad(mask, (depth, 0))[:, :-depth]


def numbers(mask: Tensor) -> Tensor:
    """Return the flat indices (N,) of the entries of a mask (B, R) that are True. Masks of a batch stay on the CPU,
    since the host would wait for one on a GPU."""
    return mask.flatten().nonzero().squeeze(-1)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device, copied without waiting."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def picked(values: Tensor, places: Tensor) -> Tensor:
    """Return the rows of `values` (R, ...) at indices `places` (N,), which may be on another device."""
    return values[sent(places, values.device)]


def chosen(values: Tensor, places: Tensor | None) -> Tensor:
    """Return the entries of `values` (B, R, ...), flattened to (B * R, ...), at the flat indices `places` (N,); None:
    all of them."""
    flat = values.flatten(0, 1)
    return flat if places is None else picked(flat, places)


class Pruned(NamedTuple):
    """The part of a head that has finite logits.

    ids (Vd,) int64: its tokens, without duplicates, each below `size`. head: (n, Dq) -> logits (n, Vd). size: V.
    """

    ids: Tensor
    head: Callable[[Tensor], Tensor]
    size: int


@dataclass(frozen=True)
class Guess:
    """The distributions that a student predicts at one depth, one from each of its states.

    depth: 0-based. Position t of a text predicts token t + 1, in the round whose first new token is t + 1 - depth. ANY:
    the distribution at a position is the same at every depth.
    at (N,) int64: flat positions b * T + t, without duplicates, on the CPU.
    states (N, Dq): the draft's states there. head: (n, Dq) -> logits (n, V).
    parameters: all trained parameters of the head; if they are given, a loss computes each chunk only once.
    share: the fraction of the depth's positions that were drawn at random for this guess; sums over them are divided by
    it.
    pruned: the part of the head that has finite logits, if the draft has a pruned vocabulary. A loss then computes Vd +
    1 columns instead of V.
    """

    depth: int
    at: Tensor
    states: Tensor
    head: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...] = field(default=())
    share: float = 1.0
    pruned: Pruned | None = None

    @classmethod
    def everywhere(
        cls,
        states: Tensor,
        head: Callable[[Tensor], Tensor],
        parameters: tuple[Tensor, ...] = (),
        depth: int = ANY,
        pruned: Pruned | None = None,
    ) -> "Guess":
        """Return a guess at every position of states (B, T, Dq). Other arguments: see `Guess`."""
        at = torch.arange(states.shape[0] * states.shape[1])
        return cls(depth, at, states.flatten(0, 1), head, parameters, pruned=pruned)

    def whole(self) -> "Guess":
        """Return the same guess without its pruned vocabulary, so that losses compute all V columns."""
        return replace(self, pruned=None)
