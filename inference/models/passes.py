"""What a pass of a model leaves, and the shape of a tree of drafts that it reads.

A rows, n ids a row, D width, V vocabulary, N nodes of a tree.
"""

from collections.abc import Mapping, Sequence
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor

Layers = tuple[int, ...]
States = Mapping[int, Tensor]  # of layers, each (A, n, D)
# held by who runs models: these, hooks on them, slots, what is compiled and recorded may be those of other engines
ALONE = RLock()
LAST = -1  # the states that the head reads, behind the final norm
MOST_NODES = 62  # of a tree: a node's ancestors are bits of one int64, of which the last is spare and one is the anchor


class Pass(NamedTuple):
    """logits (A, n, V), or (A, 1, V) where one id of each row was asked for; states (A, n, D) by layer, of the layers
    asked for alone.

    Layers are numbered as transformers' `hidden_states`: 0 are the embeddings, i the residual stream behind i decoder
    layers, `LAST` what the head reads.
    """

    logits: Tensor
    states: States = {}


class Tree:
    """The shape of a tree of drafts: node i hangs on node parents[i] < i, or on the anchor, a row's last token, where
    that is -1 (SpecInfer: Miao et al. 2023, 2305.09781).

    parents: N numbers, for all rows; or a tensor (N,) or (A, N), one shape a row, on the device of the model, where it
    is not checked. Columns are those of a pass: 0 is the anchor, i + 1 node i.
    shape: the numbers where the host knows them, None of a tensor. depths: (1 or A, N + 1), 0 of the anchor, 1 of its
    children. seen: (1 or A, N + 1), of each column those that it sees, itself and its ancestors, as bits. Raises
    ValueError for more than `MOST_NODES` nodes and for a parent that does not come before its child.
    """

    def __init__(self, parents: Sequence[int] | Tensor) -> None:
        self.parents = torch.as_tensor(parents, dtype=torch.int64)
        self.nodes = self.parents.shape[-1]
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"parents: a tree of {self.nodes} nodes; 1 .. {MOST_NODES} can be verified")
        self.shape = None if isinstance(parents, Tensor) else tuple(parents)
        if self.shape is not None:
            _refuse_late(self.shape)
        self.depths, self.seen = _ancestry(self.parents.view(-1, self.nodes))
        self._elsewhere: dict[torch.device, Tree] = {}

    def on(self, device: torch.device) -> "Tree":
        """The tree on a device, copied there once."""
        if self.parents.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = Tree(self.parents.to(device))
            self._elsewhere[device].shape = self.shape
        return self._elsewhere[device]

    @property
    def ancestors(self) -> Tensor:
        """(1 or A, N, N) bool: [_, i, j] whether node j is node i or one that it hangs on."""
        columns = torch.arange(1, self.nodes + 1, device=self.seen.device)
        return (self.seen[:, 1:, None] >> columns & 1).bool()


def _refuse_late(parents: Sequence[int]) -> None:
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"parents: node {i} hangs on {parent}; on a node before it, or on -1, the anchor")


def _ancestry(parents: Tensor) -> tuple[Tensor, Tensor]:
    """parents (A, N) -> depths and seen (A, N + 1), by doubling: each step joins what a column sees with what is seen
    from where it has come to, twice as far up every time."""
    up = torch.nn.functional.pad(parents + 1, (1, 0))  # columns; the anchor hangs on itself
    columns = torch.arange(up.shape[1], device=up.device).expand_as(up)
    depths, seen = (columns > 0).to(torch.int64), torch.ones_like(up) << columns
    for _ in range((up.shape[1] - 1).bit_length()):
        depths, seen = depths + depths.gather(1, up), seen | seen.gather(1, up)
        up = up.gather(1, up)
    return depths, seen


class Branches(NamedTuple):
    """What a pass over columns of a tree needs beside their positions: anchor (A, 1), the slot of each row's; slots
    (A, n) that the columns are written at; seen (A, n) and depths (A, N + 1), see `Tree`."""

    anchor: Tensor
    slots: Tensor
    seen: Tensor
    depths: Tensor | None = None
