"""Masks behind many places of a text at once: what a parallel draft reads while it trains.

A start is a place whose token is a round's anchor; behind it stand masks at depths 1, 2, ..., each of which sees the
text up to its start and the masks of that start before it. All of them are read in one pass behind the text's T tokens
(An et al. 2025, 2504.18583). B texts, T tokens, M masks of a text, L = T + M.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Blocks(NamedTuple):
    """Masks, those of depth 1 first: start and depth (M,) of each."""

    start: Tensor
    depth: Tensor

    @property
    def place(self) -> Tensor:
        """(M,) of whose distribution each mask guesses."""
        return self.start + self.depth


def blocks(starts: Tensor, length: int, depths: int, u: Tensor | None = None, keep: float = 1.0) -> Blocks:
    """Masks of depths 1 .. depths - 1 behind starts (S,), in order, as far as the text of `length` tokens goes.

    u (length,): uniforms by place: a start keeps its mask at depth j while u < keep ** j, so that one that has it has
    all before it (conditional drop of tokens); None: all are kept.
    """
    found = []
    for depth in range(1, depths):
        here = starts[starts + depth < length]
        found.append(here if u is None else here[u[here] < keep**depth])
    sizes = torch.tensor([len(here) for here in found], device=starts.device)
    each = torch.arange(1, depths, device=starts.device).repeat_interleave(sizes)
    return Blocks(torch.cat([starts[:0], *found]), each)


def starts(batch: Mapping[str, Any], device: torch.device, ahead: int = 0) -> Tensor:
    """Starts (S,), each of rounds whose anchor is `ahead` places behind it: all, or in a step of training, which gives
    `uniforms`, those where any text's next token behind the anchor is learnt from."""
    if "uniforms" not in batch:
        return torch.arange(batch["ids"].shape[1] - ahead, device=device)
    return batch["predicted"][:, ahead:].any(0).nonzero().squeeze(-1).to(device)


def places_of(masks: Blocks, depth: int, ids: Tensor, texts: Tensor | None, ahead: int = 0) -> tuple[Tensor, Tensor]:
    """Of a depth's masks in every row of ids (B, T), flat places and which of the (B M) masks: of packed texts, those
    whose round does not go on into another text. ahead: as of `starts`."""
    rows = torch.arange(len(ids), device=ids.device).unsqueeze(1)
    column = (masks.depth == depth).nonzero().squeeze(-1)
    place = masks.place[column] + ahead
    at, of_masks = rows * ids.shape[1] + place, rows * len(masks.depth) + column
    if texts is None:
        return at.flatten(), of_masks.flatten()
    same = texts[:, place] == texts[:, masks.start[column]]
    return at[same], of_masks[same]


def segments(position_ids: Tensor) -> Tensor:
    """position_ids (B, T) of packed texts -> (B, T), which text each token is of."""
    begins = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return pad(begins.cumsum(1), (1, 0))


def visible(masks: Blocks, length: int, texts: Tensor | None = None) -> Tensor:
    """(B or 1, 1, L, L) bool: a token sees those up to its own, a mask those up to its start, and the masks of that
    start up to its own depth. texts (B, T), see `segments`: none sees another text."""
    at = torch.arange(length, device=masks.start.device)
    until = torch.cat([at, masks.start])  # the last token that each sees
    tokens = at <= until.unsqueeze(1)  # (L, T)
    if texts is not None:
        tokens = tokens & (texts[:, until].unsqueeze(2) == texts.unsqueeze(1))
    same = (masks.start.unsqueeze(1) == masks.start) & (masks.depth.unsqueeze(1) >= masks.depth)
    others = pad(same, (0, 0, length, 0))  # (L, M): a token sees no mask
    others = others.expand(*tokens.shape[:-1], others.shape[1])
    return torch.cat([tokens, others], -1).view(-1, 1, len(until), len(until))
