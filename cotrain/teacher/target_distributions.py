"""A teacher: outputs of the target for texts, which may be cached, and the next-token laws computed from them.

The outputs are a record of tensors by name, (B, T, ...) each: the target's states by layer, of which the last layer's
give whole laws through its head, or the likeliest tokens of each law beside the mass of the others (`top_k`). Caches
keep records without knowing what they hold.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cotrain.losses.served_laws import Laws, Truncate, log_law, served
from cotrain.teacher.seen import Seen
from inference.models.passes import LAST

Head = Callable[[Tensor], Tensor]  # (n, D) -> logits (n, V)
Record = Mapping[int | str, Tensor]  # layer -> states (B, T, D); other names: whatever else a teacher reads
Reader = Callable[..., Record]  # ids (B, T), position_ids (B, T) or None -> what is read of these texts


class Teacher(Protocol):
    """read: of texts, to be kept. laws: what a record says of each place."""

    @property
    def read(self) -> Reader: ...

    def laws(self, record: Record) -> Laws: ...


@dataclass(frozen=True)
class FromStates:
    """Laws from the target's last states (B, T, D) and its head."""

    states: Tensor
    head: Head

    def logs(self, at: Tensor, logq: Tensor, temperature: Tensor, truncate: Truncate | None) -> Tensor:
        return served(log_law(self.head(self.states.flatten(0, 1)[at]), temperature), temperature, truncate)


@dataclass(frozen=True)
class StatesTeacher:
    """Reads states, LAST among them; its laws are whole."""

    read: Reader
    head: Head

    def laws(self, record: Record) -> Laws:
        return FromStates(record[LAST], self.head)


def seen(record: Record) -> Seen:
    """The states of a record."""
    return Seen({layer: states for layer, states in record.items() if isinstance(layer, int)})
