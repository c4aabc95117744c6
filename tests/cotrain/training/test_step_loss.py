"""The loss of a step over guesses of several depths."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.losses.spec import parse
from cotrain.training.module import StepLoss


class Batch:
    """Of guess g at each position a loss of g and terms of g and 10 g."""

    ids = torch.zeros(1, 3, dtype=torch.int64)

    def of_positions(self, spec: object, guess: Any, *_: object) -> tuple[torch.Tensor, "Values"]:
        number = guess.depth + 1.0
        return torch.tensor(11 * number), Values(torch.tensor([number, 10 * number]))


class Values:
    """What is read of `Statistics`."""

    def __init__(self, terms: torch.Tensor) -> None:
        self.terms = terms


def test_parts_of_a_loss_are_weighed_as_the_loss_is() -> None:
    """At every depth, a term counts with the depth's share."""

    class Counts:
        positions = torch.tensor(2.0)

    guesses = [SimpleNamespace(depth=depth) for depth in range(3)]
    loss = StepLoss(parse("kl+tv"), Batch(), guesses, None, Counts(), 3)  # type: ignore[arg-type]
    share = torch.tensor([0.5, 0.25, 0.125])
    loss_of_positions = loss.of_positions(torch.ones(1, 2, dtype=torch.bool), share, True)
    weighed = 0.5 * 1 + 0.25 * 2 + 0.125 * 3
    assert float(loss_of_positions.mean) == pytest.approx(11 * weighed / 2)
    assert {name: float(part) for name, part in loss_of_positions.terms.items()} == pytest.approx(
        {"kl": weighed / 2, "tv": 10 * weighed / 2}
    )
