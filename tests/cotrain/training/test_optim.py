"""Optimisers move what they should, and the schedule is a function of progress."""

import pytest
import torch

from cotrain.training import optim
from cotrain.training.optim import trapezoid
from cotrain.training.progress import Progress
from tests.folders import network


def test_adamw_decays_matrices_only() -> None:
    groups = optim.adamw(network(), 1e-3, 0.1, [0.9, 0.95]).param_groups
    assert [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in groups] == [(0.1, {2}), (0.0, {1})]


def rates(steps: int, warmup: float, decay: float, seconds: float = 0.0) -> list[float]:
    """Of every step, each of which takes so many seconds of a budget of a minute."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    progress = Progress(steps, 1.0 if seconds else None)
    schedule, factors = trapezoid(optimizer, progress, warmup, decay), []
    for _ in range(steps):
        factors.append(schedule.get_last_lr()[0])
        optimizer.step()
        progress.elapsed += seconds
        schedule.step()
    return factors


def test_the_trapezoid_rises_stays_and_falls() -> None:
    assert rates(10, 0.4, 0.3) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 2 / 3, 1 / 3])


def test_warm_up_and_decay_are_fractions_of_any_length() -> None:
    for steps in (10, 200, 2300):
        assert max(rates(steps, 0.02, 0.5)) == 1
    assert rates(4, 0.0, 0.0) == [1, 1, 1, 1]


def test_a_budget_of_time_ends_the_schedule_with_it() -> None:
    factors = rates(1000, 0.0, 0.5, seconds=6.0)  # ten steps a minute
    assert factors[:11] == pytest.approx([1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0]) and not any(factors[11:])
    assert rates(4, 0.0, 0.5, seconds=6.0) == pytest.approx([1, 1, 1, 0.5])  # steps are the nearer end
