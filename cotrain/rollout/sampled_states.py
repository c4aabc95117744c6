"""The target's states of texts, kept from the passes that sample them.

A rows, n tokens, T tokens of a text, L layers, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cotrain.teacher.states_cache import nbytes
from cotrain.teacher.target_model import Record
from inference.models.passes import States
from inference.proposers.base import Outcome, Proposer


class SampledStates(Proposer):
    """A proposer that drafts nothing and keeps the target's states of the texts that are decoded. Its engine must have
    the policy Fixed(0).

    records: the states (T, D) of each ended text in the target's dtype, by layer, keyed by its ids. The last token,
    which no pass has read, has the state 0. layers: the layers to keep. room: bytes; after the first text that does not
    fit, none is kept.
    """

    def __init__(self, layers: Sequence[int], room: int) -> None:
        self.reads, self.room = tuple(layers), room  # no layers once the room is full
        self.records: dict[tuple[int, ...], Record] = {}
        self.slots: dict[int, tuple[list[int], list[Tensor]]] = {}  # a text, which the engine extends, and its states

    def open(self, host: Any) -> None:
        self.slots, self.dtype = {}, host.target.model.dtype

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        for slot, (prompt, row) in enumerate(zip(prompts, self._copied(states), strict=False), low):
            self.slots[slot] = prompt, [row[: len(prompt) - 1]]

    stage = admit

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        if self.reads:
            self.slots[target] = self.slots.pop(source)

    def commit(self, outcome: Outcome) -> None:
        for slot, row in enumerate(self._copied(outcome.states)):
            self.slots[slot][1].append(row)

    def move(self, source: int, target: int) -> None:
        if not self.reads:
            return
        text, parts = self.slots.pop(target)
        record = dict(zip(self.reads, pad(torch.cat(parts), (0, 0, 0, 0, 0, 1)).unbind(1), strict=True))
        if nbytes(record) > self.room:
            self.reads, self.slots = (), {}
            return
        self.room -= nbytes(record)
        self.records[*text,] = record
        if source != target:
            self.slots[target] = self.slots.pop(source)

    def _copied(self, states: States) -> Sequence[Tensor]:
        """Return a copy (A, n, L, D) of states (A, n, D) by layer, on the CPU; () without layers."""
        if not self.reads:
            return ()
        return torch.stack([states[layer] for layer in self.reads], 2).to("cpu", self.dtype).unbind()
