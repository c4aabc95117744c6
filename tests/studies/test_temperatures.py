"""The study that compares a conditioned draft with specialists of each temperature."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from studies import temperatures


def test_a_share_is_of_the_calls_of_the_same_texts() -> None:
    def scored(calls: list[float], lengths: list[int]) -> Any:
        each = torch.tensor(calls)
        return SimpleNamespace(
            lengths=torch.tensor(lengths), calls=lambda k: each * k, tau=lambda k: sum(lengths) / float(each.sum() * k)
        )

    ours, theirs = scored([4.0, 2.0, 3.0], [8, 8, 8]), scored([3.0, 3.0, 3.0], [8, 8, 8])
    shares = temperatures.shares(ours, theirs, 2)
    assert (shares["specialist"], shares["conditioned"]) == (pytest.approx(24 / 18), pytest.approx(24 / 18))
    assert shares["share"] == pytest.approx(1.0) and shares["low"] < 0.9 < 1.1 < shares["high"]
    same = temperatures.shares(ours, ours, 2)  # a text's ease is no difference between the sides
    assert (same["share"], same["low"], same["high"]) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="the same texts"):
        temperatures.shares(ours, scored([1.0], [8]), 2)
