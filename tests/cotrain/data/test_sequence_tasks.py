"""Sources of encoder-decoders: those of the user's rows, and the sequence tasks of the embedded corpora."""

import json
import random
from pathlib import Path

import pytest

from cotrain.config.groups import Data
from cotrain.data import sequence_tasks
from cotrain.data.corpora import Document, records, shipped, shipped_ids
from cotrain.data.prompt_rows import PromptRows
from cotrain.data.sequence_tasks import TASKS, embedded_pairs, functions, sentence, sentences
from cotrain.data.splits import shared
from tests.cotrain.data.test_inputs import given, source_of
from tests.folders import few_files, tokenizer

CODE = '''
def area(width, height=1.0, *, unit: str = "m") -> float:
    """Return the area of a rectangle. It is never negative.

    width, height: of the rectangle.
    """
    return abs(width * height)  # a comment

def _hidden(value):
    """Return the value of something that nobody sees."""
    return value

def short():
    """Too short."""
    return 1
'''


def test_a_function_gives_its_first_line_and_its_summary() -> None:
    signature, summary = functions(CODE)
    assert (
        signature.task == "signature" and signature.output == "def area(width, height=1.0, *, unit: str='m') -> float:"
    )
    assert signature.source.startswith("signature: Return the area of a rectangle. It is never negative.\n\nwidth")
    assert summary.output == "Return the area of a rectangle."
    assert summary.source == f"summary: {signature.output}\n    return abs(width * height)"
    assert list(functions("def broken(")) == []


def test_a_sentence_says_what_the_record_holds() -> None:
    record = {"id": 7, "name": "Ada Kim", "email": "ada.kim@example.org", "city": "Oslo"}
    said = {sentence(record, random.Random(seed)) for seed in range(9)}
    assert len(said) == 2 and all("Ada Kim" in one and "7" in one and "Oslo" in one for one in said)
    for number in range(40):
        pairs = list(sentences(records(number)))
        assert len(pairs) >= 2 and all(pair.output.endswith(".") and "{" not in pair.output for pair in pairs)
        assert [pair.output for pair in pairs] == [pair.output for pair in sentences(records(number))]


def embed(monkeypatch: pytest.MonkeyPatch, held_out: str, train: str) -> None:
    """Each split has one document."""

    def documents(domain: str, split: str, size: int) -> list[Document]:
        return [Document(split, held_out if split == "held_out" else train)]

    monkeypatch.setattr(sequence_tasks, "embedded", documents)


def test_what_a_held_out_function_tells_is_not_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a held-out function under another name of its file, with another body or another docstring."""
    other_body = CODE.replace("abs(width * height)", "width * height * 1.0 * 1.0")
    other_words = CODE.replace("Return the area of a rectangle.", "Return how large a rectangle is.")
    free = CODE.replace("Return the area of a rectangle.", "Return the volume of a box.").replace("abs(", "round(")
    embed(monkeypatch, CODE, f"{other_body}{other_words}{free}")
    rows = embedded_pairs({"code": 100, "records": 0}, "train")
    assert {row["domain"] for row in rows} == {"signature", "summary"} and len(rows) == 2
    assert all("volume" in row["source"] + row["output"] for row in rows)
    embed(monkeypatch, records(3), records(3))
    with pytest.raises(ValueError, match="no sequence task of the split train"):  # its records are held out
        embedded_pairs({"records": 100}, "train")


def test_a_held_out_function_without_code_keeps_no_other_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Abstract functions have no code but a docstring, which is their own."""
    code = 'def area(width):\n    """Return the area of a rectangle."""\n'
    embed(monkeypatch, code, code.replace("area", "volume"))
    assert embedded_pairs({"code": 100}, "train")["output"] == ["def volume(width):"]


def test_the_splits_share_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    few_files(monkeypatch)
    size = {"code": 150_000, "prose": 10_000, "records": 20_000}
    train, held_out = (embedded_pairs(size, split) for split in ("train", "held_out"))
    assert set(train["domain"]) == set(held_out["domain"]) == set(TASKS)
    assert len(set(train["source"])) == len(train) and not set(train["source"]) & set(held_out["source"])
    said = [{row["output"] for row in rows if row["domain"] == "summary"} for rows in (train, held_out)]
    assert not said[0] & said[1]
    with pytest.raises(ValueError, match="no sequence task of the split train"):
        embedded_pairs({"prose": 10_000}, "train")


def test_the_shipped_sources_cover_all_tasks_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = shipped("sources.jsonl")
    assert [row["domain"] for row in rows[:6]] == [*TASKS, *TASKS] and len({row["text"] for row in rows}) == len(rows)
    assert all(row["text"].startswith(f"{row['domain']}: ") for row in rows)
    ranking, final = shipped_ids(tokenizer(), 8, encoder=True)
    assert len(ranking) == 60 and len(final) == 120 and not shared(final, ranking)
    assert tokenizer().decode(ranking[0]) == rows[0]["text"]


class TestRows:
    def source(self, data: Data, split: str = "all") -> PromptRows:
        source = source_of(data, split, tokenizer(), encoder=True)
        assert isinstance(source, PromptRows)
        return source

    @pytest.mark.parametrize(
        ("row", "column", "wanted"),
        [
            ({"source": "a b", "text": "c", "prompt": "d"}, None, "a b"),
            ({"prompt": "d", "text": "c"}, None, "d"),
            ({"text": "c"}, None, "c"),
            ({"source": "a b", "note": "e"}, "note", "e"),
        ],
    )
    def test_a_row_is_a_whole_source(
        self, tmp_path: Path, row: dict[str, str], column: str | None, wanted: str
    ) -> None:
        long = {key: value * 40 for key, value in row.items()}
        (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(long) + "\n")
        data = given(tmp_path / "own.jsonl", column=column)
        ids = [one["prompt"] for one in self.source(data).rows]
        assert [tokenizer().decode(one) for one in ids] == [wanted, wanted * 40]
        assert [ids for _, ids in self.source(data).prompts(9, 12, 0)] == ids[:1]
