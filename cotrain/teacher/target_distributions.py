"""A teacher: outputs of the target for texts, which may be cached, and the next-token distributions computed from them.

The outputs are a record of tensors by name, (B, T, ...) each: the target's states by layer, of which the last layer's
give whole distributions through its head, or the likeliest tokens of each distribution beside the mass of the others
(`top_k`). Caches keep records without knowing what they hold.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cotrain.losses.served_distributions import Distributions, Truncate, log_probs, served
from cotrain.teacher.seen import Seen
from inference.models.passes import LAST

Head = Callable[[Tensor], Tensor]  # (n, D) -> logits (n, V)
Record = Mapping[int | str, Tensor]  # layer -> states (B, T, D); other names: whatever else a teacher reads
Reader = Callable[..., Record]  # ids (B, T), position_ids (B, T) or None -> what is read of these texts


class Teacher(Protocol):
    """read: of texts, to be kept. distributions: what a record says of each place."""

    @property
    def read(self) -> Reader: ...

    def distributions(self, record: Record) -> Distributions: ...


@dataclass(frozen=True)
class FromStates:
    """Distributions from the target's last states (B, T, D) and its head."""

    states: Tensor
    head: Head

    def logs(self, at: Tensor, logq: Tensor, temperature: Tensor, truncate: Truncate | None) -> Tensor:
        return served(log_probs(self.head(self.states.flatten(0, 1)[at]), temperature), temperature, truncate)


@dataclass(frozen=True)
class StatesTeacher:
    """Reads states, LAST among them; its distributions are whole."""

    read: Reader
    head: Head

    def distributions(self, record: Record) -> Distributions:
        return FromStates(record[LAST], self.head)


def seen(record: Record) -> Seen:
    """The states of a record."""
    return Seen({layer: states for layer, states in record.items() if isinstance(layer, int)})
