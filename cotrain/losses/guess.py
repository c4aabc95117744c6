"""The predictions of a student while it trains. Losses are computed from them.

B texts, T tokens, N predicted positions, V vocabulary, Vd tokens of a pruned vocabulary, Dq width of the draft's
states.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

ANY = -1  # the depth of a guess that holds at every depth


def draftable(mask: Tensor, depth: int) -> Tensor:
    """Return (B, T) bool: the positions at which a round can make a guess at this depth (0-based). mask (B, T) bool:
    True at positions that predict tokens of completions. A guess at position t belongs to a round that begins at t -
    depth, and `mask` must be True there too, since no round begins in a prompt."""
    return mask if depth < 1 else mask & pad(mask, (depth, 0))[:, :-depth]


def numbers(mask: Tensor) -> Tensor:
    """Return the flat indices b * R + r (N,) at which `mask` (B, R) is True or not 0. Masks of a batch stay on the CPU,
    because reading one from a GPU would make the host wait."""
    return mask.flatten().nonzero().squeeze(-1)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `values` on the device, made without waiting for the device."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.contiguous().pin_memory()  # an expanded tensor cannot be pinned
    return values.to(device, non_blocking=True)


def picked(values: Tensor, places: Tensor) -> Tensor:
    """Return the rows of `values` (R, ...) at the indices `places` (N,), as (N, ...). `places` may be on another
    device."""
    return values[sent(places, values.device)]


def chosen(values: Tensor, places: Tensor | None) -> Tensor:
    """Return the entries of `values` (B, R, ...) at the flat indices b * R + r in `places` (N,), as (N, ...). None: all
    entries, as (B * R, ...)."""
    flat = values.flatten(0, 1)
    return flat if places is None else picked(flat, places)


class Pruned(NamedTuple):
    """The part of a head that has finite logits.

    ids (Vd,) int64: its token ids, without duplicates, each below `size`. head: (n, Dq) -> logits (n, Vd). size: V.
    """

    ids: Tensor
    head: Callable[[Tensor], Tensor]
    size: int


@dataclass(frozen=True)
class Guess:
    """The distributions that a student predicts at one depth, one for each of its states.

    depth: 0-based. At depth d, position t of a text predicts token t + 1 in a round whose first new token is t + 1 - d.
    ANY: the distribution at a position is the same at every depth.
    at (N,) int64: flat positions b * T + t, without duplicates, on the CPU.
    states (N, Dq): the draft's states at these positions. head: (n, Dq) -> logits (n, V).
    parameters: all trained parameters of the head. If they are given, a loss computes each chunk only once.
    share: which fraction of the depth's positions was drawn at random for this guess; sums over them are divided by it.
    pruned: the part of the head with finite logits if the draft has a pruned vocabulary, else None. With it, a loss
    computes Vd + 1 columns instead of V.
    """

    depth: int
    at: Tensor
    states: Tensor
    head: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...] = ()
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
        """Return a guess at every position, N = B * T. states (B, T, Dq): the draft's. head: (n, Dq) -> logits (n, V).
        parameters: all trained parameters of the head, or (). depth: 0-based, or ANY. pruned: the part of the head with
        finite logits, or None."""
        at = torch.arange(states.shape[0] * states.shape[1])
        return cls(depth, at, states.flatten(0, 1), head, parameters, pruned=pruned)

    def whole(self) -> "Guess":
        """Return the same guess without `pruned`, so that losses compute all V columns."""
        return replace(self, pruned=None)
