"""What an engine's keys and values take, against the slots that it holds."""

import pytest
import torch

from inference import Engine, Sampling
from inference.models.cache import SlotCache
from inference.models.lm import LM
from inference.models.memory import cache_bytes, spare_slots
from inference.policy import Fixed
from inference.proposers import Independent
from tests.tiny import near, tiny


def held(cache: SlotCache) -> int:
    return sum(store.keys.nbytes + store.values.nbytes for store in cache.stores)


@pytest.mark.parametrize("rows, length", [(1, 40), (5, 300), (20, 600)])
def test_estimates_are_what_is_held_with_waiting_prompts(rows: int, length: int) -> None:
    """The most that a call of so many tokens a row makes an engine hold; spare slots count."""
    model = tiny(positions=2048)
    engine = Engine(model, rows=rows, policy=Fixed(0))
    assert engine.target.spare == spare_slots(rows)
    prompts = [[1] * (length - 1)] * (rows + 1)
    engine.generate(prompts, max_new_tokens=1, ignore_eos=True)
    assert held(engine.target.cache) == cache_bytes(model.config, rows, length, torch.float64)


def test_slots_stay_within_the_context_and_the_drafts_of_a_round() -> None:
    """Doubling stops at the context; rows near its end draft with those that are not."""
    target, draft, k = tiny(positions=300), near(tiny(positions=300)), 4
    engine = Engine(target, Independent(draft), rows=2, policy=Fixed(k))
    engine.generate([[1] * 200, [2] * 290], max_new_tokens=[60, 10], sampling=Sampling(0.8), ignore_eos=True)
    assert engine.target.cache.slots <= 300 + k + 1
    assert isinstance(engine.proposer, Independent) and engine.proposer.lm.cache.slots <= 300 + k + 1


def test_a_row_longer_than_the_draft_can_hold_takes_no_slots_there() -> None:
    target, draft = tiny(positions=256), near(tiny(positions=64))
    proposer = Independent(draft)
    engine = Engine(target, proposer, rows=2, policy=Fixed(3))
    engine.generate([[1] * 150, [2] * 5], max_new_tokens=20, sampling=Sampling(0.8), ignore_eos=True)
    assert proposer.lm.cache.slots <= 64 + 3 + 1


def test_growth_frees_each_old_store_before_the_next_is_made() -> None:
    lm = LM(tiny(positions=2048), 4)
    with torch.inference_mode():
        lm.forward(torch.ones(4, 2, dtype=torch.int64), [0] * 4)
        before = [store.keys for store in lm.cache.stores]
        lm.forward(torch.ones(4, 2, dtype=torch.int64), [300] * 4)
    assert lm.cache.slots == 512 and all(old.shape[2] == 256 for old in before)
