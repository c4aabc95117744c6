"""What is read of the target by layer: live, from memory and from disk."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cotrain.students.base import LAST
from cotrain.teacher.states_cache import DiskCache, MemoryCache
from cotrain.teacher.target_model import Record, served
from tests.tiny import tiny

MAKER = {"config": "c", "tokenizer": "t", "weights": "w"}
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


class Reads:
    """A target that returns states of every id and counts its passes."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, ids: Tensor, *_: object) -> Record:
        self.count += 1
        return {LAST: torch.sin(ids.unsqueeze(-1) * torch.arange(1, 5)).bfloat16()}


def test_texts_on_disk_are_not_read_again(tmp_path: Path) -> None:
    first, second = Reads(), Reads()
    live = DiskCache(first, tmp_path, MAKER)(IDS)[LAST]
    cached = DiskCache(second, tmp_path, MAKER)(IDS)[LAST]
    assert torch.equal(live, cached) and cached.dtype == live.dtype and (first.count, second.count) == (1, 0)
    assert torch.equal(DiskCache(second, tmp_path, MAKER)(IDS.flip(0))[LAST], live.flip(0))
    DiskCache(second, tmp_path, MAKER)(IDS[1:])
    assert second.count == 0  # the same texts in other batches
    DiskCache(second, tmp_path, MAKER)(IDS.view(1, 6))  # the same ids in a row are another text
    DiskCache(second, tmp_path, MAKER)(IDS, torch.tensor([[0, 1, 2], [0, 0, 1]]))  # two texts in a row too
    DiskCache(second, tmp_path, MAKER)(torch.tensor([[1, 2, 3, 0, 1, 2]]))  # ids that equal position ids
    assert second.count == 3


def test_texts_of_other_lengths_are_other_texts(tmp_path: Path) -> None:
    """Also those that end in id 0, which is padding in others, and those that come beside stored ones."""

    def read(ids: Tensor, _: object, __: object, length: Tensor) -> Record:
        """Each state says how long its text is."""
        return {LAST: length[:, None, None].float().expand(-1, ids.shape[1], 1).contiguous()}

    rows = torch.tensor([[5, 9, 0, 0], [5, 0, 0, 0], [5, 9, 7, 0]])
    texts = [(row, length) for row in rows for length in range(1, 5)]
    texts = [(row, length) for row, length in texts if not row[length:].any()]
    cache = DiskCache(read, tmp_path, MAKER)
    for some in (texts[::2], texts, texts[::-1]):
        ids, lengths = torch.stack([row for row, _ in some]), torch.tensor([length for _, length in some])
        assert cache(ids, length=lengths)[LAST][:, 0, 0].tolist() == lengths.tolist()


def test_a_row_without_a_length_is_a_whole_text(tmp_path: Path) -> None:
    reads = Reads()
    cache = DiskCache(reads, tmp_path, MAKER)
    ids = torch.tensor([[5, 9, 0, 0, 0]])
    for length, passes in (([2], 1), (None, 2), ([5], 2)):
        cache(ids, length=None if length is None else torch.tensor(length))
        assert reads.count == passes


@pytest.mark.parametrize("key", MAKER)
def test_states_of_another_target_raise(tmp_path: Path, key: str) -> None:
    DiskCache(Reads(), tmp_path, MAKER)(IDS)
    with pytest.raises(
        ValueError, match=f"trainer.cache=.*another target .differences: {key}.: set trainer.cache= to another folder"
    ):
        DiskCache(Reads(), tmp_path, MAKER | {key: "other"})


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_shard_is_read_anew(tmp_path: Path, damage: str) -> None:
    reads = Reads()
    shards = DiskCache(reads, tmp_path, MAKER)
    truth = shards(IDS)[LAST]
    (file,) = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content[:100] if damage == "cut" else content)
    assert torch.equal(shards(IDS)[LAST], truth) and reads.count == 2
    assert torch.equal(shards(IDS)[LAST], truth) and reads.count == 2


def test_a_disk_too_small_raises_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(2**30))
    shards = DiskCache(Reads(), tmp_path / "cache", MAKER)
    assert "1.00 GiB for 1024 texts, 1.00 GiB are free" in shards.estimate(1024, 2**20)
    with pytest.raises(OSError, match=r"trainer.cache=.*1.95 GiB for 2000 texts"):
        shards.estimate(2000, 2**20)
    assert not list((tmp_path / "cache").glob("*.safetensors"))


ROWS = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(0))
LAYERS = (0, 2)


def wanted(layer: int) -> torch.Tensor:
    """As transformers numbers them: after so many decoder layers, the last one normed."""
    with torch.no_grad():
        states = tiny(layers=3)(ROWS, output_hidden_states=True).hidden_states
    return states[layer]  # type: ignore[no-any-return]


def counting(read: Any) -> tuple[Any, list[int]]:
    asked: list[int] = []

    def counted(ids: torch.Tensor, *places: object) -> Any:
        asked.append(len(ids))
        return read(ids, *places)

    return counted, asked


def same(record: Any, layers: tuple[int, ...]) -> bool:
    return set(record) == {LAST, *layers} and all(torch.equal(one, wanted(layer)) for layer, one in record.items())


def test_layers_are_those_of_transformers_live_and_from_both_caches(tmp_path: Path) -> None:
    live, asked = counting(served(tiny(layers=3), layers=LAYERS)[0])
    with torch.no_grad():
        assert same(live(ROWS), LAYERS)
    asked.clear()
    for _ in range(2):
        assert same(DiskCache(live, tmp_path, MAKER, (LAST, *LAYERS))(ROWS), LAYERS)
    memory = MemoryCache(live, 2**20)
    for _ in range(2):
        assert same(memory(ROWS, torch.arange(3)), LAYERS)
    assert asked == [3, 3]
    few = MemoryCache(live, 2 * 3 * 9 * 16 * 8)  # of two texts, three layers each
    few(ROWS, torch.arange(3))
    assert len(few.records) == 2
    with pytest.raises(ValueError, match=r"states of layers \[3\]: its layers are 0 \(embeddings\) to 2"):
        served(tiny(layers=3), layers=(1, 3))


def test_shards_of_last_states_are_extended_by_further_layers(tmp_path: Path) -> None:
    last, first = counting(served(tiny(layers=3))[0])
    assert set(DiskCache(last, tmp_path, MAKER)(ROWS)) == {LAST}
    live, asked = counting(served(tiny(layers=3), layers=LAYERS)[0])
    both = DiskCache(live, tmp_path, MAKER, (LAST, *LAYERS))
    assert same(both(ROWS), LAYERS) and same(both(ROWS), LAYERS) and asked == [3]
    assert same(DiskCache(last, tmp_path, MAKER)(ROWS), ()) and first == [3]
