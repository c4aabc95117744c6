"""Rows whose slot may hold NaN from an earlier request."""

import random
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.policy import Fixed
from tests.kinds import KINDS
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


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [None, "independent", "parallel", "eagle", "block"])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_row_meets_the_nan_of_another(rows: int, seed: int, kind: str | None) -> None:
    """Rows end, move to freed slots and enter, in many orders. Once in its life a row leaves NaN in its slots past its
    text, as a draft may. All texts are those of an engine without NaN, and so is what other rows draft."""
    prompts, limits = [[3, 5], [4, 6], [2, 7], [9, 2], [5, 5], [8, 3]], [2, 8, 1, 5, 3, 6]
    target, generator, stained = tiny(), random.Random(seed), set[int]()
    draft = KINDS[kind].proposer(target) if kind else None
    engine = Engine(target, draft, verify="coupled", policy=Fixed(2), rows=rows)
    wanted = engine.generate(prompts, max_new_tokens=limits, seed=1, ignore_eos=True)
    call = engine.begin(prompts, limits, Sampling(), 1, None, True)
    caches: Any = [engine.target.cache, *([getattr(draft, "lm", draft).cache] if draft else [])]  # type: ignore[union-attr]
    for _ in engine.rounds(call):
        for slot, row in enumerate(call.active):
            if not row.stained and not row.finish and generator.random() < 0.5:
                row.stained = True
                stained.add(row.index)
                with torch.inference_mode():
                    for store in (store for cache in caches for store in cache.stores):
                        store.keys[slot, :, len(row.text) :] = torch.nan
                        store.values[slot, :, len(row.text) :] = torch.nan
    assert [row.finish for row in call.rows] == ["length"] * len(prompts)
    assert [row.new for row in call.rows] == wanted.tokens
    for index, counts in enumerate(call.stats.rows):
        assert index in stained or counts == wanted.stats.rows[index], index
