"""Rows whose slot may hold NaN from an earlier request."""

from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.policy import Fixed
from tests.inference.test_drafting import calls  # noqa: F401 - a fixture
from tests.tiny import tiny


def test_a_row_whose_slot_may_hold_nan_gets_a_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a round without drafts too: those of an earlier round may be to blame."""
    engine = Engine(tiny(), policy=Fixed(0))
    wanted = engine.generate([[3, 5]], max_new_tokens=6, seed=1, ignore_eos=True).tokens
    for stained in (True, False):
        run, read, rounds = engine.begin([[3, 5]], 6, Sampling(), 1, None, True), engine.target.forward, iter(range(9))

        def once(*given: Any, read: Any = read, rounds: Any = rounds, **settings: Any) -> Any:
            result = read(*given, **settings)
            return result._replace(logits=result.logits * torch.nan) if next(rounds) == 2 else result

        monkeypatch.setattr(engine.target, "forward", once)
        run.rows[0].stained = stained
        for _ in engine.rounds(run):
            pass
        monkeypatch.undo()
        assert run.rows[0].finish == ("length" if stained else "error")
        assert run.rows[0].new == (wanted[0] if stained else wanted[0][:2])
