"""Slots with a length per row: what a pass says of a row depends on that row's tokens alone."""

import pytest
import torch

from inference.models.lm import LM
from tests.tiny import tiny


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def alone(model, text: list[int], last: int) -> torch.Tensor:
    """Logits (last, V) after the last tokens of a text, from one pass without any cache."""
    return model(torch.tensor([text]), use_cache=False).logits[0, -last:]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_ragged_rows_read_their_own_past(model):
    texts = [torch.randint(0, 32, (n,)).tolist() for n in (3, 11, 7)]
    lm = LM(model, rows=3)
    for slot, text in enumerate(texts):
        lm.store(torch.tensor([text[:-2]]), [0], slot)
    logits = lm.forward(torch.tensor([text[-2:] for text in texts]), [len(text) - 2 for text in texts]).logits
    for row, text in zip(logits, texts, strict=True):
        close(row, alone(model, text, 2))


def test_what_is_past_a_length_is_overwritten_unread(model):
    text, junk = torch.randint(0, 32, (9,)).tolist(), torch.randint(0, 32, (2, 8))
    lm = LM(model, rows=2)
    lm.forward(junk, [0, 0])
    lm.store(torch.tensor([text[:4], text[:4]]), [0, 0])
    lm.forward(junk[:, :5], [4, 2])  # drafts that are refused: row 0 goes back to 4, row 1 to 2
    ids = torch.tensor([text[4:7] + [0, 0], text[2:7]])  # row 0's padding is junk as well
    logits = lm.forward(ids, [4, 2]).logits
    close(logits[0, :3], alone(model, text[:7], 3))
    close(logits[1], alone(model, text[:7], 5))
    close(lm.forward(torch.tensor([text[7:], text[7:]]), [7, 7]).logits[0], alone(model, text, 2))


def test_slots_grow_and_move_with_their_content(model):
    text = torch.randint(0, 32, (200,)).tolist()
    lm = LM(model, rows=3)
    lm.cache = lm.run.cache = type(lm.cache)(2, 3, slots=16)
    lm.store(torch.tensor([text[:10]]), [0], 2)
    lm.store(torch.tensor([text[10:150]]), [10], 2)
    lm.move(2, 1, 150)
    lm.forward(torch.zeros(1, 60, dtype=torch.int64), [100], 2)  # the old slot is free
    close(lm.forward(torch.tensor([text[150:]]), [150], 1).logits[0], alone(model, text, 50))


def test_vocabularies_of_other_sizes(model):
    wide, narrow = LM(model, 1, vocabulary=40), LM(model, 1, vocabulary=20)
    ids = torch.tensor([[3, 39, 5]])
    logits = wide.forward(ids, [0]).logits
    assert logits.shape[-1] == 40 and (logits[..., 32:] == -torch.inf).all()
    close(logits[0, :, :32], alone(model, [3, 31, 5], 3))  # the last row stands for what the model lacks
    close(narrow.forward(ids, [0]).logits[0], alone(model, [3, 31, 5], 3)[:, :20])
