"""What people have as data: files of each kind, compressed, by pattern, in folders, saved, streamed, oddly named."""

import bz2
import copy
import gzip
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from cotrain.config.groups import Data
from cotrain.data.conversations import Template
from cotrain.data.sources import prompt_origin, read_data, sources_of
from cotrain.data.splits import ALL_ROWS, SPLITS
from tests.folders import tokenizer, write_rows


def given(path: Path | str, **changed: object) -> Data:
    few = {"bytes": {}, "held_out_bytes": {}, "block": 8, "embedded_shares": {}, "take": 1000}
    return Data(**few | {"path": str(path)} | changed)  # type: ignore[arg-type]


def lines(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def texts(path: Path | str, **changed: object) -> list[str]:
    return [row["text"] for _, row in read_data(given(path, **changed))]


def source_of(
    data: Data, split: str, words: PreTrainedTokenizerFast, ends: Collection[int] = (), encoder: bool = False
) -> Any:
    """The prompts of a split, for a target of this tokenizer."""
    return sources_of(data, (split,), Template(words, data.template, ends), encoder)[split]


def templated() -> PreTrainedTokenizerFast:
    one = copy.deepcopy(tokenizer())
    one.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    return one


def csv(path: Path) -> None:
    path.write_text('text,other\n"a, b",1\nc,2\n')


def parquet(path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a, b", "c"]}).to_parquet(str(path))


WRITTEN: dict[str, Callable[[Path], object]] = {
    "own.csv": csv,
    "own.parquet": parquet,
    "own.ndjson": lambda path: path.write_text(lines("a, b", "c")),
    "own.json": lambda path: path.write_text(json.dumps([{"text": "a, b"}, {"text": "c"}])),
    "list.jsonl": lambda path: path.write_text(f"\ufeff {json.dumps([{'text': 'a, b'}, {'text': 'c'}], indent=1)}"),
    "own.txt": lambda path: path.write_text("a, b\nc\n"),
    "own.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines("a, b", "c").encode())),
    "own.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(lines("a, b", "c").encode())),
    "own.csv.gz": lambda path: path.write_bytes(gzip.compress(b'text,other\n"a, b",1\nc,2\n')),
    "own.txt.gz": lambda path: path.write_bytes(gzip.compress(b"a, b\nc\n")),
    "a [1] {b}?*.jsonl": lambda path: path.write_text(lines("a, b", "c")),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_of_each_kind_is_read_and_streamed(tmp_path: Path, name: str) -> None:
    WRITTEN[name](tmp_path / name)
    assert texts(tmp_path / name) == ["a, b", "c"]
    assert texts(tmp_path / name, streaming=True, take=1) == ["a, b"]


def test_a_pattern_names_all_that_match_in_their_order(tmp_path: Path) -> None:
    for number in (2, 1, 10):
        (tmp_path / f"part-{number:02d}.jsonl").write_text(lines(f"text {number}"))
    (tmp_path / "other.jsonl").write_text(lines("other"))
    assert texts(tmp_path / "part-*.jsonl") == ["text 1", "text 2", "text 10"]
    with pytest.raises(ValueError, match=r"data.path: no such file, and none that matches: .*none-\*"):
        texts(tmp_path / "none-*.jsonl")


def test_a_folder_of_files_may_hold_splits(tmp_path: Path) -> None:
    place = tmp_path / "a [x] b"
    place.mkdir()
    (place / "train-0.jsonl").write_text(lines("a", "b"))
    (place / "train-1.jsonl.gz").write_bytes(gzip.compress(lines("c").encode()))
    (place / "test.jsonl").write_text(lines("T"))
    (place / "README.md").write_text("# Ours\n")
    assert texts(place) == ["a", "b", "c"] and texts(place, split="test") == ["T"]
    remarks = source_of(given(place), ALL_ROWS, tokenizer()).remarks
    assert remarks[0] == "data.path: 3 of 3 rows are read, columns text; files not read (1): test.jsonl"
    with pytest.raises(ValueError, match="data.path: .* cannot be read: .*'?dev"):
        texts(place, split="dev")


def test_a_folder_of_two_kinds_of_files_is_refused(tmp_path: Path) -> None:
    """The pattern that is proposed is that of most files."""
    (tmp_path / "a.jsonl").write_text(lines("a"))
    (tmp_path / "a2.jsonl").write_text(lines("b"))
    csv(tmp_path / "b.csv")
    with pytest.raises(
        ValueError, match=r"several types, .jsonl, .csv: name one with a pattern, as in data.path=.*/\*.jsonl"
    ):
        texts(tmp_path)


def test_other_files_of_a_folder_are_no_texts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines("a"))
    (tmp_path / "paper.pdf").write_bytes(b"%PDF-1.4\xff\n")
    assert texts(tmp_path) == texts(tmp_path / "*") == ["a"]


def test_texts_of_a_rollout_are_refused_as_prompts(tmp_path: Path) -> None:
    rows = {"domain": ["own"], "prompt": [[1, 2]], "completion": [[3]]}
    features = datasets.Features(
        {
            "domain": datasets.Value("string"),
            **dict.fromkeys(("prompt", "completion"), datasets.List(datasets.Value("int32"))),
        }
    )
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "train_T1.parquet"))
    (tmp_path / "train_T1.json").write_text("{}")
    for path in (tmp_path, tmp_path / "train_T1.parquet"):
        with pytest.raises(ValueError, match="a target sampled, not prompts: set rollout.folder="):
            texts(path)


def test_saved_data_sets_of_one_split_and_of_several_are_read(tmp_path: Path) -> None:
    one, two = (datasets.Dataset.from_dict({"text": [text]}) for text in "ab")
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(str(tmp_path / "dict"))
    assert texts(tmp_path / "dict") == ["a"] and texts(tmp_path / "dict", split="test") == ["b"]
    assert texts(tmp_path / "dict" / "test", streaming=True) == ["b"]
    with pytest.raises(ValueError, match="data.path: .*it has no split 'dev', but train, test: set data.split= to one"):
        texts(tmp_path / "dict", split="dev")


def test_a_data_set_of_several_configs_is_asked_for_one(tmp_path: Path) -> None:
    for name in ("en", "de"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text(lines(name))
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("en", "de"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert texts(tmp_path, config="de") == ["de"]
    with pytest.raises(ValueError, match="data.path: .* cannot be read: .*'fr' not found"):
        texts(tmp_path, config="fr")


def test_of_a_stream_only_the_first_rows_are_read(tmp_path: Path) -> None:
    """What lies behind them, here the end of a file that was cut, is never read."""
    path = tmp_path / "large.jsonl.gz"
    path.write_bytes(gzip.compress(lines(*("x" * 1000 + str(i) for i in range(15_000))).encode())[:-100])
    assert len(texts(path, streaming=True, take=50)) == 50
    with pytest.raises(ValueError, match="data.path: .* cannot be read"):
        texts(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("own.jsonl", b"\n", "has no rows|cannot be read"),
        ("own.jsonl.gz", gzip.compress(b"", mtime=0), "has no rows"),
        (
            "own.jsonl",
            b"Tell me a joke\nAnd one more\n",
            "2 of 2 rows .* line 1: it is no JSON object; a file of plain text.* in .txt",
        ),
        ("own.json", b'["a", "b"]', '2 of 2 .* row 1: it is no JSON object; .* an object such as {"prompt": "..."}'),
        ("own.json", b'{\n"a": [\n{"x": 1}],\n"b": [{"x": 1}]}', "1 of 1 rows .* row 1: its 'a' is a list of objects"),
        ("own.docx", b"PK", "ends in none of .jsonl, .ndjson"),
        ("own.csv", b"", "is empty"),
        (
            "own.jsonl",
            b'{"text": " "}\n{"text": ""}\n',
            "has no text, all rows are skipped: 2, the first own.jsonl, line 1: ",
        ),
        ("own.jsonl", b'{"body": "a"}\n', "line 1: it has no column .*, but body: name another by data.column"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"data.path: .*{name}.*({message})") as raised:
        source_of(given(tmp_path / name), "train", tokenizer())
    assert "\n" not in str(raised.value)


def test_a_path_that_is_no_hub_id_is_no_such_file(tmp_path: Path) -> None:
    for path in ("none.jsonl.gz", "./none", str(tmp_path / "none"), "a/b/c"):
        with pytest.raises(ValueError, match=f"data.path: no such file: {path}"):
            texts(path)


def test_a_name_that_is_nothing_here_and_not_on_the_hub_is_said_so() -> None:
    for ask in (lambda data: list(read_data(data)), lambda data: prompt_origin(data, "train")):
        with pytest.raises(ValueError, match="data.path: promtps cannot be read: there is no such file or folder, and"):
            ask(given("promtps"))


def test_a_stream_counts_by_size_and_time_files_by_their_contents(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(lines("a"))
    whole, streamed = prompt_origin(given(path), "train"), prompt_origin(given(path, streaming=True), "train")
    again = tmp_path / "again"
    again.mkdir()
    (again / "own.jsonl").write_text(lines("a"))
    assert prompt_origin(given(again / "own.jsonl"), "train") == whole
    assert prompt_origin(given(path, streaming=True, take=2), "train") != streamed != whole


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_stream_of_conversations_ends_where_it_is_asked_to(ending: str, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"number {i}"}]} for i in range(60)]
    path = tmp_path / f"chats.{ending}"
    if ending == "jsonl":
        write_rows(path, rows)
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(path))

    def count(**changed: object) -> int:
        parts = [source_of(given(path, **changed), split, templated()) for split in SPLITS]
        assert all(part.rendered for part in parts)
        return sum(len(part.rows) for part in parts)

    assert (count(), count(streaming=True, take=20), count(streaming=True)) == (60, 20, 60)
