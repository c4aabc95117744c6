"""Rounds in which no row drafts, while rows enter, leave and move, change nothing of what is drafted later."""

import pytest
import torch

from inference import Engine, Sampling
from inference.models.replay import Compiled
from inference.proposers import Independent
from tests.tiny import tiny


@pytest.mark.parametrize("pause", [2, 3])
def test_rounds_without_drafts_leave_no_hole_in_the_cache(pause: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is the target has every draft accepted, unless its cache lacks an id."""

    class Pausing:
        round = 0

        def lengths(self, texts: list[list[int]]) -> list[int]:
            self.round += 1
            return [4 if self.round % pause == 0 else 0] * len(texts)

    monkeypatch.setattr(torch, "compile", lambda module, *_: module)  # as it is
    monkeypatch.setattr(Compiled, "failed", False)
    for compile in (False, True):
        engine = Engine(tiny(), Independent(tiny(), compile=compile), policy=Pausing(), rows=2)
        stats = engine.generate([[3, 5, 7], [9, 2]], max_new_tokens=40, sampling=Sampling(0.8), ignore_eos=True).stats
        assert stats.accepted == stats.drafted
