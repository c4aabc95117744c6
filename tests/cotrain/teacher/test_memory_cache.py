"""What was read of the target is remembered by text, until the room is full."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cotrain.data.texts import COLUMNS
from cotrain.students.base import LAST
from cotrain.teacher.states_cache import MemoryCache
from cotrain.teacher.target_model import ENCODER, Record
from tests import standin


def reading(width: int = 1) -> tuple[Callable[..., Record], list[Tensor]]:
    """A target whose states are the ids, and the ids of each of its passes."""
    asked: list[Tensor] = []

    def read(ids: Tensor, *_: object) -> Record:
        asked.append(ids)
        return {LAST: ids.unsqueeze(-1).float().expand(-1, -1, width)}

    return read, asked


def test_hidden_states_are_remembered_by_text_until_the_room_is_full() -> None:
    read, asked = reading(width=4)
    texts, keys = torch.arange(3)[:, None].repeat(1, 5), torch.tensor([10, 11, 12])
    teacher = MemoryCache(read, limit=2 * 5 * 4 * 4)  # two texts' worth of bytes
    for at in ([0, 1], [1, 0], [1], [2], [0, 2], [2]):
        assert torch.equal(teacher(texts[at], keys[at])[LAST], read(texts[at])[LAST])
        asked.pop()
    assert [ids[:, 0].tolist() for ids in asked] == [[0, 1], [2], [0, 2], [2]]


def test_texts_are_filled_until_the_room_is_full() -> None:
    """What is left is read when it comes."""
    read, asked = reading()
    texts, keys = torch.arange(5)[:, None].repeat(1, 4), torch.arange(5)
    teacher = MemoryCache(read, limit=2 * 4 * 4)
    teacher.fill(texts, keys, batch=2)
    assert len(teacher.records) == 2 and [len(ids) for ids in asked] == [2, 2]


def test_texts_padded_to_another_width_are_read_again() -> None:
    """As those of the first round are once a longer text came in the second."""
    read, asked = reading()
    short, keys = torch.arange(8).view(4, 2), torch.arange(4)
    teacher = MemoryCache(read, limit=4 * 3 * 4 + 2 * 3 * 4)  # bytes of six texts of three tokens
    teacher.fill(short, keys, batch=2)
    long = torch.nn.functional.pad(torch.arange(12).view(6, 2), (0, 1))
    teacher.fill(long[:2], keys[:2], batch=2)
    teacher.fill(long, torch.arange(6), batch=2)  # the first batch is known: the others are read all the same
    assert [tuple(ids.shape) for ids in asked] == [(2, 2), (2, 2), (2, 3), (2, 3), (2, 3)]
    assert torch.equal(teacher(long, torch.arange(6))[LAST][..., 0], long.float()) and len(asked) == 5


def test_a_batch_that_is_begun_twice_is_read_once_with_all_its_inputs() -> None:
    asked: list[tuple[object, ...]] = []

    def read(*inputs: Tensor) -> Record:
        asked.append(inputs)
        return {LAST: inputs[0].unsqueeze(-1).float()}

    ids = torch.arange(6).view(2, 3)
    others = {"position_ids": ids % 2, "source": ids + 7, "length": torch.tensor([3, 2])}
    batch = {"ids": ids, "key": torch.arange(2)} | others
    teacher = MemoryCache(read, limit=0)
    teacher.begin(batch)
    teacher.begin(batch)
    for reads in (1, 2):  # a read that was begun serves one call
        assert torch.equal(teacher(ids, batch["key"], *others.values())[LAST][..., 0], ids.float())
        assert len(asked) == reads and not teacher.early
        assert all(map(torch.equal, asked[-1], (ids, *others.values())))


def test_stored_texts_are_not_begun() -> None:
    read, asked = reading()
    texts, keys = torch.arange(6).view(3, 2), torch.arange(3)
    teacher = MemoryCache(read, limit=10**6)
    teacher.fill(texts[:2], keys[:2])
    teacher.begin({"ids": texts[:2], "key": keys[:2]})
    assert not teacher.early and len(asked) == 1
    teacher.begin({"ids": texts[1:], "key": keys[1:]})
    assert len(teacher.early) == 1


def test_records_rest_in_main_memory() -> None:
    with standin.device():
        texts, keys = torch.arange(3)[:, None].repeat(1, 4), torch.arange(3)
        teacher = MemoryCache(lambda ids, *_: {LAST: ids.unsqueeze(-1).float().to("cuda")}, limit=10**6)
        teacher.fill(texts, keys)
        assert teacher(texts.to("cuda"), keys)[LAST].device.type == "cuda"
        assert {part.device.type for record in teacher.records.values() for part in record.values()} == {"cpu"}


@pytest.mark.parametrize("given", [True, False], ids=["with lengths", "without"])
@pytest.mark.parametrize("way", ["fill", "add", "call"])
def test_stored_states_have_a_column_for_each_token_and_use_no_memory_for_padding(way: str, given: bool) -> None:
    """Joint training asks for the states of the original target without lengths."""
    width = 3 * COLUMNS
    ids, keys, length = torch.arange(1, 1 + 2 * width).view(2, width), torch.arange(2), torch.tensor([5, COLUMNS + 1])
    asked: list[Tensor] = []

    def read(ids: Tensor, *_: object) -> Record:
        asked.append(ids)
        return {LAST: ids.unsqueeze(-1).float(), 1: ids.unsqueeze(-1) + 0.5, ENCODER: torch.ones(2, 7, 3)}

    teacher = MemoryCache(read, limit=10**6)
    if way == "fill":
        teacher.fill(ids, keys, length=length)
    elif way == "add":
        whole = {
            (*row[:size].tolist(),): {LAST: row[:size, None].float()} for row, size in zip(ids, length, strict=True)
        }
        teacher.add(whole, ids, keys, length)
    else:
        teacher(ids, keys, length=length)
    record = teacher(ids, keys, length=length if given else None)
    assert record[LAST].shape == (2, width, 1) and len(asked) == (way != "add")
    for row, size in enumerate(length):
        assert torch.equal(record[LAST][row, :size, 0], ids[row, :size].float())
    assert way == "add" or record[ENCODER].shape == (2, 7, 3) and record[1].shape == (2, width, 1)
    stored = [len(texts[LAST]) for texts in teacher.records.values()]
    assert stored == [COLUMNS, 2 * COLUMNS]
