"""A student that learns depth j from KEEP ** j of its starts, against one that drops none."""

from typing import Any

import pytest
import torch

from cotrain.students.base import Student
from cotrain.students.parallel import KEEP
from tests.cotrain.losses.test_batch import CONVERSATIONS, module
from tests.cotrain.losses.test_sequence import batch


def check_dropped_starts(student: Student, name: str, depths: int) -> None:
    """Over all that the uniforms may be, the loss is that of no drop; later depths are of fewer starts. name: the
    loss; depths: how many values of the uniforms differ."""
    target: Any = student.target
    made, given = module(student, target, name, decay=0.8), batch(CONVERSATIONS, True)
    made._uniforms = lambda keys, positions, stream=1: torch.full((len(keys), positions), u)  # type: ignore[method-assign]
    edges, total, values = [KEEP**j for j in range(depths)] + [0.0], 0.0, []
    for above, below in zip(edges, edges[1:], strict=False):
        u = (above + below) / 2
        values.append(made.learn(given).item())
        total += (above - below) * values[-1]
    made.student.guesses = lambda given, seen: type(student)(made.draft, target).guesses(  # type: ignore[method-assign]
        {"ids": given["ids"]}, seen
    )
    assert made.learn(given).item() == pytest.approx(total, rel=1e-6) and values[0] != pytest.approx(total, rel=1e-3)
