"""What is read of the target by layer: live, from memory and from disk; kept distributions that hold ids as whole
numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.students.base import LAST
from cotrain.teacher.memory_cache import Remembering
from cotrain.teacher.states_cache import Shards
from cotrain.teacher.target_distributions import seen
from cotrain.teacher.target_model import served
from cotrain.teacher.top_k import TopKAndRest, TopKTeacher
from tests.tiny import tiny

IDS = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(0))
MAKER = {"weights": "w"}
LAYERS = (0, 2)


def wanted(layer: int) -> torch.Tensor:
    """As transformers numbers them: behind so many decoder layers, the last one normed."""
    with torch.no_grad():
        states = tiny(layers=3)(IDS, output_hidden_states=True).hidden_states
    return states[layer]  # type: ignore[no-any-return]


def counting(read: Any) -> tuple[Any, list[int]]:
    asked: list[int] = []

    def counted(ids: torch.Tensor, places: object = None) -> Any:
        asked.append(len(ids))
        return read(ids, places)

    return counted, asked


def same(record: Any, layers: tuple[int, ...]) -> bool:
    return set(record) == {LAST, *layers} and all(torch.equal(one, wanted(layer)) for layer, one in record.items())


def test_layers_are_those_of_transformers_wherever_they_are_kept(tmp_path: Path) -> None:
    live, asked = counting(served(tiny(layers=3), layers=LAYERS)[0])
    with torch.no_grad():
        assert same(live(IDS), LAYERS) and set(seen(live(IDS)).states) == {LAST, *LAYERS}
    asked.clear()
    for _ in range(2):
        assert same(Shards(live, tmp_path, MAKER, (LAST, *LAYERS))(IDS), LAYERS)
    memory = Remembering(live, 2**20)
    for _ in range(2):
        assert same(memory(IDS, torch.arange(3)), LAYERS)
    assert asked == [3, 3]
    few = Remembering(live, 2 * 3 * 9 * 16 * 8)  # of two texts, three layers each
    few(IDS, torch.arange(3))
    assert len(few.kept) == 2
    with pytest.raises(ValueError, match=r"states of layers \[3\]: the target has 0 \(embeddings\) to 2"):
        served(tiny(layers=3), layers=(1, 3))


def test_shards_of_last_states_serve_students_that_read_more_in_part(tmp_path: Path) -> None:
    last, first = counting(served(tiny(layers=3))[0])
    assert set(Shards(last, tmp_path, MAKER)(IDS)) == {LAST}
    live, asked = counting(served(tiny(layers=3), layers=LAYERS)[0])
    both = Shards(live, tmp_path, MAKER, (LAST, *LAYERS))
    assert same(both(IDS), LAYERS) and same(both(IDS), LAYERS) and asked == [3]
    assert same(Shards(last, tmp_path, MAKER)(IDS), ()) and first == [3]


def test_kept_distributions_are_whole_numbers_beside_floats_and_older_ones_are_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read, head = served(tiny(layers=3), layers=(1,))
    teacher = TopKTeacher(read, head, 4, 32, 1.0, None, chunk=5, reads=(1,))
    parts = (1, *TopKAndRest._fields)
    record = Shards(teacher.read, tmp_path, MAKER, parts)(IDS)
    assert (record["ids"].dtype, record["logs"].dtype, record["rest"].shape) == (torch.int32, torch.float32, (3, 9))
    assert torch.equal(record[1], wanted(1)) and list(seen(record).states) == [1]
    again, asked = counting(teacher.read)
    assert all(torch.equal(one, record[name]) for name, one in Shards(again, tmp_path, MAKER, parts)(IDS).items())
    assert not asked and not capsys.readouterr().out
    old = tmp_path / "old"
    Shards(lambda *_: {LAST: torch.zeros(3, 9, 9)}, old, MAKER)(IDS)  # ids and logs in one tensor, as they were
    assert torch.equal(Shards(again, old, MAKER, parts)(IDS)["ids"], record["ids"]) and asked == [3]
    assert "distributions that an earlier version kept are not read" in capsys.readouterr().out
