"""Slots with a length per row: a row's logits depend on its own tokens alone; bytes and growth of the slots."""

import pytest
import torch

from inference import Engine, Sampling
from inference.models.cache import SlotCache, cache_bytes, spare_slots, token_bytes
from inference.models.lm import LM
from inference.policy import Fixed
from inference.proposers import Independent
from tests.encoder_decoders import bart
from tests.tiny import near, tiny


@pytest.fixture(scope="module")
def model():
    return tiny()


def alone(model, text: list[int], last: int) -> torch.Tensor:
    """Logits (last, V) after the last tokens of a text, from one pass without any cache."""
    return model(torch.tensor([text]), use_cache=False).logits[0, -last:]


def close(logits: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-12)


@torch.inference_mode()
def test_ragged_rows_read_their_own_past(model):
    texts = [torch.randint(0, 32, (n,)).tolist() for n in (3, 11, 7)]
    lm = LM(model, rows=3)
    for slot, text in enumerate(texts):
        lm.store(torch.tensor([text[:-2]]), [0], slot)
    logits = lm.forward(torch.tensor([text[-2:] for text in texts]), [len(text) - 2 for text in texts]).logits
    for row, text in zip(logits, texts, strict=True):
        close(row, alone(model, text, 2))


@torch.inference_mode()
def test_what_is_past_a_length_is_overwritten_unread(model):
    text, junk = torch.randint(0, 32, (9,)).tolist(), torch.randint(0, 32, (2, 8))
    lm = LM(model, rows=2)
    lm.forward(junk, [0, 0])
    lm.store(torch.tensor([text[:4], text[:4]]), [0, 0])
    lm.forward(junk[:, :5], [4, 2])  # rejected drafts: row 0 goes back to 4, row 1 to 2
    ids = torch.tensor([text[4:7] + [0, 0], text[2:7]])  # row 0's padding is junk as well
    logits = lm.forward(ids, [4, 2]).logits
    close(logits[0, :3], alone(model, text[:7], 3))
    close(logits[1], alone(model, text[:7], 5))
    close(lm.forward(torch.tensor([text[7:], text[7:]]), [7, 7]).logits[0], alone(model, text, 2))


@torch.inference_mode()
def test_slots_grow_and_move_with_their_content(model):
    text = torch.randint(0, 32, (200,)).tolist()
    lm = LM(model, rows=3)
    lm.cache = lm.run.cache = type(lm.cache)(2, 3, slots=16)
    lm.store(torch.tensor([text[:10]]), [0], 2)
    lm.store(torch.tensor([text[10:150]]), [10], 2)
    lm.move(2, 1, 150)
    lm.forward(torch.zeros(1, 60, dtype=torch.int64), [100], 2)  # the old slot is free
    close(lm.forward(torch.tensor([text[150:]]), [150], 1).logits[0], alone(model, text, 50))


@torch.inference_mode()
def test_vocabularies_of_other_sizes(model):
    wide, narrow = LM(model, 1, vocabulary=40), LM(model, 1, vocabulary=20)
    ids = torch.tensor([[3, 39, 5]])
    logits = wide.forward(ids, [0]).logits
    assert logits.shape[-1] == 40 and (logits[..., 32:] == -torch.inf).all()
    close(logits[0, :, :32], alone(model, [3, 31, 5], 3))  # the last row stands for what the model lacks
    close(narrow.forward(ids, [0]).logits[0], alone(model, [3, 31, 5], 3)[:, :20])


def bytes_of(cache: SlotCache) -> int:
    return sum(store.keys.nbytes + store.values.nbytes for store in cache.stores)


@pytest.mark.parametrize("rows, length", [(1, 40), (5, 300), (20, 600)])
def test_estimated_bytes_are_those_of_an_engine(rows: int, length: int) -> None:
    """The most bytes that a call of so many tokens a row needs; spare slots count."""
    model = tiny(positions=2048)
    engine = Engine(model, rows=rows, policy=Fixed(0))
    assert engine.target.spare == spare_slots(rows)
    prompts = [[1] * (length - 1)] * (rows + 1)
    engine.generate(prompts, max_new_tokens=1, ignore_eos=True)
    assert bytes_of(engine.target.cache) == cache_bytes(model.config, rows, length, torch.float64)


def test_slots_stay_within_the_context_and_the_drafts_of_a_round() -> None:
    """Doubling stops at the context; rows near its end draft with those that are not."""
    target, draft, k = tiny(positions=300), near(tiny(positions=300)), 4
    engine = Engine(target, Independent(draft), rows=2, policy=Fixed(k))
    engine.generate([[1] * 200, [2] * 290], max_new_tokens=[60, 10], sampling=Sampling(0.8), ignore_eos=True)
    assert engine.target.cache.slots <= 300 + k + 1
    assert engine.proposer.lm.cache.slots <= 300 + k + 1


def test_a_row_longer_than_the_draft_can_hold_takes_no_slots_there() -> None:
    target, draft = tiny(positions=256), near(tiny(positions=64))
    proposer = Independent(draft)
    engine = Engine(target, proposer, rows=2, policy=Fixed(3))
    engine.generate([[1] * 150, [2] * 5], max_new_tokens=20, sampling=Sampling(0.8), ignore_eos=True)
    assert proposer.lm.cache.slots <= 64 + 3 + 1


@pytest.mark.parametrize(("encoder", "decoder"), [(1, 3), (3, 1)])
def test_bytes_of_a_decoder_that_is_deeper_than_its_encoder(encoder: int, decoder: int) -> None:
    """Of its own keys and values, in layers of 16 numbers each."""
    config = bart(encoder_layers=encoder, decoder_layers=decoder).config
    assert token_bytes(config, torch.float32) == decoder * 2 * 16 * 4
