"""Prompts of mixed kinds: an edit shows a piece of code and the first half of it with one name changed."""

import json
import random
from pathlib import Path

import pytest

from cotrain.data.corpora import Document
from studies import mixed_prompts
from studies.mixed_prompts import edit
from tests.folders import few_files

PIECE = """def shared(values):
    total = sum(values)
    return total / len(values)
    # values_of stays
"""


def test_an_edit_repeats_half_of_the_piece_with_a_name_changed() -> None:
    found = edit(PIECE, random.Random(0))
    before, after = found.split("\n# after, with values renamed to values_")
    assert before == f"# before\n{PIECE}" and after[1:] == (
        f"\ndef shared(values_{after[0]}):\n    total = sum(values_{after[0]})\n"
    )


def test_pieces_without_a_name_to_change_are_no_edits() -> None:
    assert edit("return 1\nreturn 2\n", random.Random(0)) is None  # a keyword is no name
    assert edit("same_name same_name", random.Random(0)) is None
    assert edit("one_name\nother_name\n", random.Random(0)) is None


def test_kinds_take_turns_and_no_prompt_comes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_files(monkeypatch)
    monkeypatch.setattr(mixed_prompts, "BYTES", 200_000)
    mixed_prompts.main([str(tmp_path / "out.jsonl"), "--count", "20"])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["domain"] for row in rows[:3]] == ["code edits", "records", "prose"] and len(rows) == 60
    assert len({row["prompt"] for row in rows}) == 60
    with pytest.raises(ValueError, match="--count 100000: there are [0-9]+ of code edits"):
        mixed_prompts.mixed(100_000)


def test_prompts_are_of_texts_that_no_draft_learns_from(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def documents(domain: str, split: str, size: int) -> list[Document]:
        asked.append((domain, split))
        return [Document(f"{domain}/{i}", f"{PIECE}# {domain} {i}\n") for i in range(3)]

    monkeypatch.setattr(mixed_prompts, "embedded", documents)
    assert len(mixed_prompts.mixed(2)) == 6
    assert sorted(asked) == [(domain, "held_out") for domain in ("code", "prose", "records")]
