"""What a round needs of its rows on the device: settings that stay, and one copy for what the host decides.

A rows. Settings are copied when rows come or go; what changes from round to round (draft lengths, positions, ids) goes
in one buffer, pinned where there is a GPU, so that the copy does not wait for the device.
"""

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from functools import cached_property

import torch
from torch import Tensor

from inference.batched.distributions import Regimes
from inference.batched.history import History
from inference.noise import branch_states, gumbel_states
from inference.processors import needs_history
from inference.request import Request

Numbers = Sequence[int] | Sequence[list[int]]  # one a row, or a list of one length a row


class Batch:
    """Settings of the active rows as tensors, made again when these are other rows."""

    def __init__(self, rows: Sequence[Request], vocabulary: int, device: torch.device) -> None:
        self.rows, self.vocabulary, self.device = list(rows), vocabulary, device
        sampling = [row.sampling for row in rows]
        self.regimes = Regimes(sampling, device)
        self.history = History(rows, vocabulary, device) if any(map(needs_history, sampling)) else None
        self.states: dict[int, Tensor] = {}  # by seed
        self.branches: dict[int, Tensor] = {}
        self.own = [a for a, one in enumerate(sampling) if one.processors]  # rows with processors of their own

    def holds(self, rows: Sequence[Request]) -> bool:
        """Whether it was made of these very rows."""
        return len(rows) == len(self.rows) and all(a is b for a, b in zip(rows, self.rows, strict=True))

    @cached_property
    def ids(self) -> Tensor:
        """Request ids (A,)."""
        return torch.tensor([row.id for row in self.rows], device=self.device)

    @property
    def key(self) -> Hashable:
        """All that distributions depend on but logits, ids and tensors."""
        return self.regimes.key, self.history.key if self.history else None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Settings on the device, by name."""
        parts = {"regimes": self.regimes, "history": self.history} if self.history else {"regimes": self.regimes}
        return {f"{part}.{name}": value for part, settings in parts.items() for name, value in vars(settings).items()
                if isinstance(value, Tensor)}  # fmt: skip

    def on(self, tensors: Mapping[str, Tensor]) -> "Batch":
        """These settings, read from other tensors of the names and shapes of `tensors`."""
        made = copy(self)
        made.regimes, made.history = self.regimes.general(), copy(self.history)
        for name, value in tensors.items():
            part, _, field = name.partition(".")
            if field:
                setattr(getattr(made, part), field, value)
        return made

    def gumbel_states(self, seed: int) -> Tensor:
        """`noise.gumbel_states` of the rows, made once."""
        if seed not in self.states:
            self.states = {seed: gumbel_states(seed, self.ids)}
        return self.states[seed]

    def branch_states(self, seed: int) -> Tensor:
        """`noise.branch_states` of the rows, made once."""
        if seed not in self.branches:
            self.branches = {seed: branch_states(seed, self.ids)}
        return self.branches[seed]


def send(device: torch.device, **numbers: Numbers) -> dict[str, Tensor]:
    """Whole numbers of A rows in one copy: name -> (A,) or (A, n) int64 on the device, which is not waited for."""
    flat: list[int] = []
    shapes: list[tuple[int, ...]] = []
    for part in numbers.values():
        if isinstance(part[0], list):
            shapes.append((len(part), len(part[0])))
            for row in part:
                flat += row  # type: ignore[arg-type]
        else:
            shapes.append((len(part),))
            flat += part  # type: ignore[arg-type]
    host = torch.tensor(flat, dtype=torch.int64)
    if device.type != "cpu":
        host = host.pin_memory().to(device, non_blocking=True)
    parts = host.split([shape[0] if len(shape) == 1 else shape[0] * shape[1] for shape in shapes])
    return {name: part.view(shape) for name, part, shape in zip(numbers, parts, shapes, strict=True)}
