"""Every row of the table in docs/data.md: its ids are those of the template's own rendering of messages written here.

The reference is `apply_chat_template` alone: of the messages before the answer, and of all messages with the mask of
the tokens that the template itself marks as generated.
"""

import copy
import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow
import pytest
from transformers import PreTrainedTokenizerFast

from cotrain.cli import main
from cotrain.data.conversations import Template
from cotrain.data.prompt_rows import PromptRows, TextStarts
from cotrain.data.sources import sources_of
from cotrain.data.splits import ALL_ROWS
from cotrain.rollout.samplers import Ask
from cotrain.rollout.training_texts import logged
from tests.cotrain.data.test_inputs import given, source_of
from tests.folders import target_folder, tokenizer, write_rows

PAGE = Path(__file__).resolve().parents[3] / "docs" / "data.md"
MARKS = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<think>", "</think>"]
CALLS = (
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
    "{% for name, value in c.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}]{% endfor %}"
)
CONTENT = "{{ m.content or '' }}" + CALLS
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}CONTENT<|end|>{% endgeneration %}{% else %}CONTENT<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
).replace("CONTENT", CONTENT)
OPENS = TEMPLATE.replace("%}<|assistant|>{% endif %}", "%}<|assistant|><think>{% endif %}")
DROPS = TEMPLATE.replace(
    "{{ m.content or '' }}", "{{ m.content if loop.last else m.content.split('</think>') | last }}"
)


def says(*turns: str, system: str = "") -> list[dict[str, Any]]:
    """A conversation that the user begins."""
    opened = [{"role": "system", "content": system}] if system else []
    return opened + [
        {"role": role, "content": text} for role, text in zip(("user", "assistant") * len(turns), turns, strict=False)
    ]


CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "rain", "arguments": {"day": 3}}}]},
    {"role": "tool", "content": "no"},
    {"role": "assistant", "content": "No."},
]


class Shape(NamedTuple):
    """A row of the table. row: its second column. messages: a conversation as this file writes it, or the text. write:
    from a path without its ending and the row to what data.path names; by default a file .jsonl of the row."""

    row: str
    messages: list[dict[str, Any]] | str
    write: Callable[[Path, str], Path] | str = ".jsonl"
    template: str = TEMPLATE


def parquet(path: Path, row: str) -> Path:
    datasets.Dataset.from_list([json.loads(row)]).to_parquet(file := str(path.with_suffix(".parquet")))
    return Path(file)


def gz(path: Path, row: str) -> Path:
    (file := path.with_suffix(".jsonl.gz")).write_bytes(gzip.compress(f"{row}\n".encode()))
    return file


def zst(path: Path, row: str) -> Path:
    with pyarrow.output_stream(str(file := path.with_suffix(".jsonl.zst")), compression="zstd") as stream:
        stream.write(f"{row}\n".encode())
    return file


def over_lines(path: Path, row: str) -> Path:
    (file := path.with_suffix(".json")).write_text(f"{json.dumps(json.loads(row), indent=2)}\n")
    return file


def folder(path: Path, row: str) -> Path:
    path.mkdir()
    (path / "notes.md").write_text("not data")
    (path / "part-0.jsonl").write_text(f"{row}\n")
    return path


def pattern(path: Path, row: str) -> Path:
    return folder(path, row) / "part-*.jsonl"


def lines(path: Path, row: str) -> Path:
    """In the table, \\t stands for a tab, and <br> for the end of a line."""
    ending = ".tsv" if "\\t" in row else ".csv"
    (file := path.with_suffix(ending)).write_text(row.replace("\\t", "\t") + "\n")
    return file


MESSAGES = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}'
PAIR = '{"prompt": "Hi", "completion": "Yes?"}'
LOG = (
    '{"messages": [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": null, "tool_calls": '
    '[{"function": {"name": "rain", "arguments": ARGUMENTS}}]}, {"role": "tool", "content": "no"}, '
    '{"role": "assistant", "content": "No."}]}'
)
SHAPES = {
    "ShareGPT": Shape(
        '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]}', says("Hi", "Yes?")
    ),
    "ShareGPT, other names": Shape(
        '{"conversations": [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Hi"}, '
        '{"from": "model", "value": "Yes?"}, {"from": "human", "value": "1+1"}, {"from": "assistant", "value": "2"}]}',
        says("Hi", "Yes?", "1+1", "2", system="Be brief."),
    ),
    "OpenAI messages": Shape(MESSAGES, says("Hi", "Yes?")),
    "OpenAI messages, unanswered": Shape('{"messages": [{"role": "user", "content": "Hi"}]}', says("Hi")),
    "OpenAI messages of text parts": Shape(
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, '
        '{"role": "assistant", "content": "Yes?"}]}',
        says("Hi", "Yes?"),
    ),
    "OpenAI log, arguments as JSON text": Shape(LOG.replace("ARGUMENTS", '"{\\"day\\": 3}"'), CALLED),
    "OpenAI log, arguments as an object": Shape(LOG.replace("ARGUMENTS", '{"day": 3}'), CALLED),
    "OpenAI batch, or a logged request": Shape(
        '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
        '"body": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}}',
        says("Hi"),
    ),
    "OpenAI Responses, a logged request": Shape(
        '{"model": "m", "instructions": "Be brief.", "input": [{"role": "user", "content": [{"type": "input_text", '
        '"text": "Hi"}]}], "output": [{"role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]}]}',
        says("Hi", system="Be brief."),
    ),
    "TRL, text": Shape(PAIR, says("Hi", "Yes?")),
    "TRL, messages": Shape(
        '{"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Yes?"}]}',
        says("Hi", "Yes?"),
    ),
    "alpaca": Shape(
        '{"instruction": "Add.", "input": "1+1", "output": "2"}',
        says("Add.\n1+1", "2"),
    ),
    "alpaca, no input": Shape('{"instruction": "Hi", "input": "", "output": "Yes?"}', says("Hi", "Yes?")),
    "question and answer": Shape('{"question": "1+1?", "answer": "2"}', says("1+1?", "2")),
    "prompt and system": Shape('{"system": "Be brief.", "prompt": "Hi"}', says("Hi", system="Be brief.")),
    "text column": Shape('{"text": "Once upon a time"}', "Once upon a time"),
    "plain text": Shape("Once upon a time", "Once upon a time", ".txt"),
    "csv": Shape('prompt,completion<br>"Hi, you",Yes?', says("Hi, you", "Yes?"), lines),
    "tsv": Shape("prompt\\tcompletion<br>Hi, you\\tYes?", says("Hi, you", "Yes?"), lines),
    "parquet": Shape(MESSAGES, says("Hi", "Yes?"), parquet),
    "jsonl.gz": Shape(PAIR, says("Hi", "Yes?"), gz),
    "jsonl.zst": Shape(PAIR, says("Hi", "Yes?"), zst),
    "JSON list": Shape(f"[{PAIR}]", says("Hi", "Yes?"), ".json"),
    "JSON object that wraps a list": Shape(
        '{"version": 1, "data": [{"prompt": "Hi", "completion": "Yes?"}]}', says("Hi", "Yes?"), ".json"
    ),
    "JSON objects over several lines": Shape(PAIR, says("Hi", "Yes?"), over_lines),
    "folder of files": Shape(PAIR, says("Hi", "Yes?"), folder),
    "pattern": Shape(PAIR, says("Hi", "Yes?"), pattern),
    "columns of mixed types": Shape(
        '{"prompt": "Hi", "completion": "Yes?", "score": 1}<br>'
        '{"prompt": [{"role": "user", "content": "Hi"}], "completion": "Yes?", "score": "high"}',
        says("Hi", "Yes?"),
    ),
    "template that opens a thought": Shape(MESSAGES, says("Hi", "Yes?"), template=OPENS),
    "template that drops earlier thoughts": Shape(
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>hm</think>Yes?"}, '
        '{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}',
        says("Hi", "<think>hm</think>Yes?", "1+1", "2"),
        template=DROPS,
    ),
}


@cache
def words(template: str) -> PreTrainedTokenizerFast:
    one = copy.deepcopy(tokenizer())
    one.add_special_tokens({"additional_special_tokens": MARKS})
    one.chat_template = template
    return one


def rows_of_the_page() -> dict[str, list[str]]:
    """The other cells of each row of the page's first table, by its first cell."""
    table = PAGE.read_text(encoding="utf-8").split("|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    return {name: cells for name, *cells in rows}


def read(name: str, place: Path) -> PromptRows | TextStarts:
    shape, path = SHAPES[name], place / "own"
    row = shape.row.replace("<br>", "\n")
    if callable(shape.write):
        file = shape.write(path, row)
    else:
        (file := path.with_suffix(shape.write)).write_text(f"{row}\n")
    one = words(shape.template)
    return sources_of(given(file), (ALL_ROWS,), Template(one, {}, {one.convert_tokens_to_ids("<|end|>")}))[ALL_ROWS]


def by_template(messages: list[dict[str, Any]], template: str) -> list[tuple[list[int], list[int], list[bool]]]:
    """(ids of the prompt, ids of all, which of them are learnt) of each turn, as the template itself renders it."""
    turns, one = [], words(template)
    for place in range(1, len(messages) + 1):
        if place < len(messages) and messages[place]["role"] != "assistant":
            continue
        prompt = one.apply_chat_template(messages[:place], add_generation_prompt=True, return_dict=True)["input_ids"]
        if place == len(messages):
            if messages[-1]["role"] != "assistant":
                turns.append((prompt, prompt, [False] * len(prompt)))
            continue
        whole = one.apply_chat_template(messages[: place + 1], return_dict=True, return_assistant_tokens_mask=True)
        mask = [bool(mark) and at >= len(prompt) for at, mark in enumerate(whole["assistant_masks"])]
        turns.append((prompt, whole["input_ids"], mask))
    return turns


def test_the_page_has_a_row_for_each_shape() -> None:
    rows = rows_of_the_page()
    assert list(rows) == list(SHAPES) and len(rows) >= 14
    assert {name: cells[0] for name, cells in rows.items()} == {
        name: f"`{shape.row.replace('<br>', '`<br>`')}`" for name, shape in SHAPES.items()
    }
    for name, shape in SHAPES.items():
        answered = not isinstance(shape.messages, str) and shape.messages[-1]["role"] == "assistant"
        read_as = "prompt and completion" if answered and shape.template != OPENS else "prompt"
        assert rows[name][1].startswith(read_as), name
        assert rows[name][1].startswith("prompt and completion") is (read_as == "prompt and completion"), name


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_read_as_its_template_renders_it(name: str, tmp_path: Path) -> None:
    shape, source = SHAPES[name], read(name, tmp_path)
    assert ": 2 of 2 rows" in source.remarks[0] if "mixed" in name else ": 1 of 1 rows" in source.remarks[0]
    if isinstance(shape.messages, str):
        assert isinstance(source, TextStarts)
        whole = words(shape.template)(shape.messages)["input_ids"]
        assert source.each(4) == [whole[:4]] and source.each(99) == [whole]
        return
    assert isinstance(source, PromptRows)
    wanted = by_template(shape.messages, shape.template) * (1 + ("mixed" in name))
    assert [row["prompt"] for row in source.rows] == [prompt for prompt, _, _ in wanted]
    if shape.template == OPENS or shape.messages[-1]["role"] != "assistant":
        assert not any(row["completion"] for row in source.rows)
        assert any("1 answers are not learnt from" in one for one in source.remarks) is (shape.template == OPENS)
        return
    assert [row["prompt"] + row["completion"] for row in source.rows] == [whole for _, whole, _ in wanted]
    texts = logged(source, Ask({"train": len(wanted)}, 999, 999), "train", seed=0)
    learnt = {
        (*ids[:length], *predicted[: length - 1])
        for ids, length, predicted in zip(
            texts.ids.tolist(), texts.length.tolist(), texts.predicted.tolist(), strict=True
        )
    }
    assert learnt == {(*whole, *mask[1:]) for _, whole, mask in wanted}


def test_objects_over_several_lines_are_all_read(tmp_path: Path) -> None:
    """As jq prints them."""
    rows = [{"prompt": f"say {place}", "tags": ["a", "b"]} for place in range(3)]
    (tmp_path / "own.json").write_text("\n".join(json.dumps(row, indent=2) for row in rows))
    source = source_of(given(tmp_path / "own.json"), ALL_ROWS, words(TEMPLATE))
    assert isinstance(source, PromptRows)
    assert [row["prompt"] for row in source.rows] == [by_template(says(f"say {n}"), TEMPLATE)[0][0] for n in range(3)]


def test_what_columns_are_read_as_is_said(tmp_path: Path) -> None:
    """Of columns that only some rows have, too; a column that is not read is in none of the parts."""
    rows = [
        {"instruction": "a", "input": "b", "output": "c", "id": 1},
        {"prompt": "d", "answer": "e", "system": "f", "tools": [{"name": "g"}]},
        {"messages": says("h", "i")},
    ]
    write_rows(tmp_path / "own.jsonl", rows)
    source = source_of(given(tmp_path / "own.jsonl"), ALL_ROWS, words(TEMPLATE))
    assert source.remarks[1] == (
        "data.path: read as the prompt: instruction, input, prompt; the answer: output, answer; the system turn: "
        "system; the tools: tools; the conversation: messages"
    )


def test_a_check_shows_the_answers_that_are_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = target_folder(tmp_path / "target")
    rows = [{"prompt": f"say {place}", "completion": f"word {place} and more of them"} for place in range(40)]
    write_rows(tmp_path / "own.jsonl", rows)
    paths = [f"target.path={target}", f"data.path={tmp_path / 'own.jsonl'}", f"output={tmp_path / 'out'}"]
    few = "check=true init.layers=[0] rollout.texts=20 rollout.held_out_texts=2 measure=false rollout.new_tokens=4"
    for given_answers in ("true", "false"):
        assert main(["train", *paths, *few.split(), f"data.on_target={given_answers}"]) == 0
        said = capsys.readouterr().out.splitlines()
        shown = [line.partition(": ")[2] for line in said if line.startswith(("prompt  ", "answer  "))]
        asked = [int(text.strip("'").removeprefix("say ")) for text in shown[:: 1 + (given_answers == "true")]]
        ids = [tokenizer()(rows[place]["completion"])["input_ids"][:4] for place in asked]
        assert shown[1::2] == [repr(tokenizer().decode(one)) for one in ids] or given_answers == "false"
        assert len(asked) == 3 and "data.path: read as the prompt: prompt; the answer: completion" in said
