"""Hidden states on disk: what is read back is what the target said, and nobody else's."""

from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cotrain.students.base import LAST
from cotrain.teacher.states_cache import Shards
from cotrain.teacher.target_distributions import Record

MAKER = {"config": "c", "tokenizer": "t", "weights": "w"}
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


class Reads:
    """A target that says something about every id, and counts how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, ids: Tensor, position_ids: Tensor | None = None) -> Record:
        self.count += 1
        return {LAST: torch.sin(ids.unsqueeze(-1) * torch.arange(1, 5)).bfloat16()}


def test_what_is_on_disk_is_not_read_again(tmp_path: Path) -> None:
    first, second = Reads(), Reads()
    said = Shards(first, tmp_path, MAKER)(IDS)[LAST]
    kept = Shards(second, tmp_path, MAKER)(IDS)[LAST]
    assert torch.equal(said, kept) and kept.dtype == said.dtype and (first.count, second.count) == (1, 0)
    assert torch.equal(Shards(second, tmp_path, MAKER)(IDS.flip(0))[LAST], said.flip(0))
    Shards(second, tmp_path, MAKER)(IDS[1:])
    assert second.count == 0  # the same texts in other batches
    Shards(second, tmp_path, MAKER)(IDS.view(1, 6))  # the same ids in a row are another text
    Shards(second, tmp_path, MAKER)(IDS, torch.tensor([[0, 1, 2], [0, 0, 1]]))  # two texts in a row too
    Shards(second, tmp_path, MAKER)(torch.tensor([[1, 2, 3, 0, 1, 2]]))  # ids that are no places
    assert second.count == 3


@pytest.mark.parametrize("key", MAKER)
def test_states_of_another_target_are_refused(tmp_path: Path, key: str) -> None:
    Shards(Reads(), tmp_path, MAKER)(IDS)
    with pytest.raises(ValueError, match=f"trainer.cache=.*another target, its {key} differ"):
        Shards(Reads(), tmp_path, MAKER | {key: "other"})


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_shard_is_made_anew(tmp_path: Path, damage: str) -> None:
    reads = Reads()
    shards = Shards(reads, tmp_path, MAKER)
    truth = shards(IDS)[LAST]
    (file,) = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content[:100] if damage == "cut" else content)
    assert torch.equal(shards(IDS)[LAST], truth) and reads.count == 2
    assert torch.equal(shards(IDS)[LAST], truth) and reads.count == 2


def test_a_disk_too_small_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(2**30))
    shards = Shards(Reads(), tmp_path / "cache", MAKER)
    assert "1.00 GiB for 1024 texts, 1.00 GiB are free" in shards.estimate(1024, 2**20)
    with pytest.raises(OSError, match=r"trainer.cache=.*1.95 GiB for 2000 texts"):
        shards.estimate(2000, 2**20)
    assert not list((tmp_path / "cache").glob("*.safetensors"))
