"""What the losses of a step are divided by: counts of the whole step, not of the batch that a pass sees.

A step may add up the gradients of several batches (accumulation) and of several processes. Means of means would weigh
a token of a batch with few tokens more, so every sum is divided by what all batches and processes count together.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Counts:
    """Scalars to divide by: positions that are learnt from, tokens that the target sampled, texts that hold some."""

    positions: Tensor
    tokens: Tensor
    texts: Tensor


def sampled(batch: Batch) -> Tensor:
    """(B, T-1) bool: where the token that comes next was sampled by the target; every predicted one, unless said."""
    found: Tensor = batch.get("sampled", batch["predicted"])
    return found


def counted(batch: Batch) -> Tensor:
    """Positions, tokens and texts of a batch -> (3,) float32."""
    lengths = sampled(batch).sum(1)
    return torch.stack([batch["predicted"].sum(), lengths.sum(), (lengths > 0).sum()]).float()


def divisors(total: Tensor, batches: int) -> Counts:
    """total (3,): counts of a step, a process's share of them; the trainer divides each of the step's batches by their
    number, which is undone here. Nothing counted divides by 1."""
    total = torch.where(total > 0, total / batches, torch.ones_like(total))
    return Counts(*total.unbind())


class Grouped:
    """Endless batches with what their step counts: `counts` (3,), and their place in it, `group` (index, number)."""

    def __init__(self, batches: Iterable[dict[str, Any]], number: int) -> None:
        self.batches, self.number = batches, number

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.batches)
        while group := list(islice(batches, self.number)):
            counts = torch.stack([counted(batch) for batch in group]).sum(0)
            for index, batch in enumerate(group):
                yield batch | {"counts": counts, "group": (index, len(group))}
