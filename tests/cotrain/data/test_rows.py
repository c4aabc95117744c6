"""Rows of any shape: each column is read or named, and what cannot be read is skipped with a reason."""

import gzip
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest

from cotrain.data.conversations import Template
from cotrain.data.prompt_rows import PromptRows, TextStarts
from cotrain.data.rows import COMPLETION, Reader
from cotrain.data.sources import sources_of
from cotrain.data.splits import ALL_ROWS
from tests.cotrain.data.test_inputs import given, source_of, templated
from tests.folders import tokenizer, write_rows

USER, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHAT = Reader(templated=True)


ROLES = ("user", "assistant", "tool", "assistant")
VALUES: dict[str, Any] = {
    "text": lambda name: f"{name} 0",
    "one message": lambda name: [{"role": "assistant", "content": f"{name} 0"}],
    "messages": lambda name: [{"role": role, "content": f"{name} {index}"} for index, role in enumerate(ROLES[1:])],
    "parts": lambda name: [
        {"role": "assistant", "content": [{"type": "text", "text": f"{name} {index}"} for index in range(3)]}
    ],
}


@pytest.mark.parametrize("reader", [CHAT, Reader(), Reader(chat=False, templated=True)])
@pytest.mark.parametrize("form", VALUES)
@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "asked 0"},
        {"instruction": "asked 0", "input": "asked 1"},
        {"prompt": [{"role": "system", "content": "asked 0"}, {"role": "user", "content": "asked 1"}]},
        {"messages": [{"role": role, "content": f"asked {index}"} for index, role in enumerate(ROLES[:1])]},
        {"messages": [{"role": role, "content": f"asked {index}"} for index, role in enumerate((*ROLES, "user"))]},
        {"conversations": [{"from": "human", "value": "asked 0"}]},
    ],
)
def test_every_word_of_the_columns_that_are_read_is_in_the_row(
    asked: dict[str, Any], form: str, reader: Reader
) -> None:
    """Or the row is skipped, with every number of completions, of which none differs, or any one does, or all do."""
    for count in range(len(COMPLETION) + 1):
        for names in combinations(COMPLETION, count):
            for other in (None, *(names if count > 1 else ())):
                said = {name: VALUES[form](name if name == other else "said") for name in names}
                try:
                    row = reader.row(asked | said)
                except ValueError as reason:
                    assert ("differ: leave one out" in str(reason)) == (other is not None), reason
                    assert other is not None or not reader.templated or reader.chat is False, reason
                    continue
                assert other is None or not {*names} & {*row.columns}
                for name, value in (asked | said).items():
                    words = re.findall(r"(?:asked|said|" + "|".join(COMPLETION) + r") \d", json.dumps(value))
                    assert all(word in row.content for word in words) == (name in row.columns), name
                    assert (name in row.columns) != (name in row.unread)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "it is no JSON object"),
        ("text", "it is no JSON object; a file of plain text"),
        ({}, "it has no column"),
        ({"prompt;domain": "a;b"}, "its only column is 'prompt;domain': separate columns by commas, not by ';'"),
        ({"data": [{"prompt": "a"}]}, "its 'data' is a list of objects: .* a file of that list alone"),
        ({"prompt": "a", "domain": ["b"]}, "column 'domain' holds list, not text"),
        ({"prompt": "a", "completion": "b", "response": "c"}, "its columns completion and response differ"),
        ({"messages": "no JSON"}, "messages: .*the text is not JSON"),
        (
            {"messages": [USER, {"role": "function_call", "content": "x"}]},
            "message 2 has the role 'function_call': it must be one of",
        ),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"message 1 has the role \['user'\]: it must be one of"),
        ({"messages": [SAID]}, "no message of a user"),
        (
            {"messages": [USER, SAID | {"tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}]},
            "the text is not JSON",
        ),
        ({"messages": [USER, SAID | {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]}, "JSON object"),
        ({"messages": [USER, SAID | {"tool_calls": ["f"]}]}, "a tool call needs a name"),
        ({"messages": [USER, SAID | {"tool_calls": {"f": 1}}]}, "its tool_calls must be a list"),
        ({"messages": [USER], "tools": "no JSON"}, "tools: .*the text is not JSON"),
    ],
)
def test_a_row_that_cannot_be_read_has_a_reason(row: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CHAT.row(row)


def calls(message: dict[str, Any]) -> Any:
    return CHAT.row({"messages": [USER, message]}).messages[1]


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}, "", "{}", None])
def test_a_tool_call_is_the_same_as_text_and_as_values(arguments: Any) -> None:
    function = {"name": "f", "arguments": arguments}
    wanted = {"name": "f", "arguments": {"x": 1} if arguments and arguments != "{}" else {}}
    call = {"type": "function", "function": function}
    for message in ({"tool_calls": [call]}, {"tool_calls": json.dumps([call])}, {"function_call": function}):
        found = calls({"role": "assistant", "content": None, **message})
        assert found == {"role": "assistant", "content": "", "tool_calls": [call | {"function": wanted}]}
    assert calls({"role": "assistant", "content": "", "tool_calls": [function]})["tool_calls"] == [wanted]


@pytest.mark.parametrize("nothing", ["", "{}", "[]", [], {}, None])
def test_no_tools_are_no_tools(nothing: Any) -> None:
    assert CHAT.row({"messages": [USER], "tools": nothing}).tools is None
    assert calls(SAID | {"tool_calls": nothing, "function_call": None}) == SAID
    tools = [{"name": "f", "parameters": {"x": None}}]
    assert CHAT.row({"messages": [USER], "tools": json.dumps(tools)}).tools == tools


@pytest.mark.parametrize("chat", [None, True, False])
def test_a_named_column_may_hold_anything(chat: bool | None) -> None:
    named = Reader(column="own", chat=chat, templated=True)
    assert named.row({"own": [USER, SAID], "prompt": "p"}).messages == (USER, SAID)
    one = named.row({"own": "a", "prompt": "p"})
    assert (one.text, one.messages) == (("", (USER,)) if chat else ("a", ()))
    assert Reader(column="prompt", chat=chat, templated=True).row({"prompt": "a", "text": "b"}).text == ""


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_tenth_may_be_skipped(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {i}"} for i in range(36)]
    odd = ["{\n", {"prompt": 3}, {"other": "a"}, {"text": "a"}]
    found = source_of(given(write(tmp_path / "own.jsonl", [*rows, *odd])), ALL_ROWS, templated())
    assert len(found.rows) == 36 and "36 of 40 rows are read" in found.remarks[0]
    assert (
        "4 of 40 rows are skipped" in found.remarks[1] and "1, the first own.jsonl, line 37: it is" in found.remarks[1]
    )
    with pytest.raises(ValueError, match="data.path: .*own.jsonl: 5 of 41 rows cannot be read: ") as error:
        source_of(given(write(tmp_path / "own.jsonl", [*rows, *odd, 7])), ALL_ROWS, templated())
    assert "\n" not in str(error.value)


def test_files_of_a_folder_may_have_other_columns(tmp_path: Path) -> None:
    for name, row in (("a", {"prompt": "p", "score": 1}), ("b", {"prompt": "q", "score": "x", "completion": "c"})):
        write(tmp_path / f"{name}.jsonl", [row])
    packed = gzip.compress(b'{"prompt": "r"}\n')
    (tmp_path / "c.jsonl.gz").write_bytes(packed)
    with pyarrow.output_stream(str(tmp_path / "d.jsonl.zst"), compression="zstd") as file:
        file.write(b'{"prompt": [{"role": "user", "content": "s"}]}\n')
    found = source_of(given(tmp_path), ALL_ROWS, tokenizer())
    assert [tokenizer().decode(row["prompt"]) for row in found.rows] == ["p", "q", "r", "s"]


@pytest.mark.parametrize("columns", ["text", "prompt"])
def test_held_out_prompts_are_none_that_are_learnt(columns: str, tmp_path: Path) -> None:
    """By what the model sees: the first ids of a text."""
    rows = [
        {columns: f"start {i % 60} " + "x" * 40 * (columns == "text") + f"{i}" * (columns == "text")}
        for i in range(400)
    ]
    made = sources_of(given(write(tmp_path / "own.jsonl", rows)), ("train", "held_out"), Template(tokenizer(), {}, ()))
    train, held_out = made["train"], made["held_out"]
    seen = {tuple(ids) for ids in train.each(12)}
    common = sum(tuple(ids) in seen for ids in held_out.each(12))
    if columns == "prompt":  # equal ones are in one split
        assert common == 0
        return
    assert common > 5
    with pytest.raises(ValueError, match=r"all \d+ held-out prompts begin like training prompts"):
        held_out.without(train.each(12), 12)


@pytest.mark.parametrize(
    ("answers", "said"),
    [(["x"] * 8, "7 of 8"), (list("xyxyxyxx"), "6 of 8"), (list("xyxyabcd"), "2 of 8"), (list("abcdefgh"), "")],
)
def test_rows_that_repeat_others_are_counted(answers: list[str], said: str, tmp_path: Path) -> None:
    """By all that is read of them, also of an answer, and not by what is not read."""
    rows = [{"prompt": "ask", "response": one, "id": place} for place, one in enumerate(answers)]
    file = write(tmp_path / "own.jsonl", rows)
    source = source_of(given(file), ALL_ROWS, templated())
    lines = [line for line in source.remarks if "repetitions" in line]
    assert lines == ([f"data.path: {said} rows are repetitions of others"] if said else [])


def test_a_held_out_prompt_that_begins_a_learnt_one_or_begins_with_one_is_left_out() -> None:
    """And no other, of prompts and of texts."""
    text = "0123456789"
    ids = [tokenizer()(text[:end])["input_ids"] for end in range(len(text) + 1)]
    learnt = [ids[4], ids[8] + ids[1], [], ids[7][1:]]
    beside = {  # is it left out?
        text[:4]: True,  # equal
        text[:3]: True,
        text[:6]: True,  # begins one, and another begins it
        text[:8]: True,
        text[1:6]: True,
        text[2:]: False,
        text[3]: False,
        text[:2] + text[5:]: False,  # has only a part of one
    }
    prompts = [tokenizer()(one)["input_ids"] for one in beside]
    texts = datasets.Dataset.from_dict({"text": list(beside), "domain": ["own"] * len(beside)})
    rows = [{"domain": "own", "prompt": one, "completion": []} for one in prompts]
    for source in (PromptRows(rows), TextStarts(texts, texts, tokenizer())):
        left = source.without(learnt, 12)
        assert left.each(12) == [one for one, out in zip(prompts, beside.values(), strict=True) if not out]
        assert left.remarks == (
            "data.path: 5 of 8 held-out prompts are left out, because they begin like training prompts (their first "
            "12 tokens are compared)",
        )
        assert left.without(learnt, 12).each(12) == left.each(12) and len(left.without([], 12).remarks) == 1


SYSTEM = {"role": "system", "content": "be kind"}


@pytest.mark.parametrize("before", [[SAID], [SYSTEM], [SYSTEM, SAID]], ids=["greeting", "system", "both"])
def test_rows_that_begin_alike_are_split_by_what_the_user_asks(before: list[Any], tmp_path: Path) -> None:
    rows = [{"messages": [*before, USER | {"content": f"question {place}"}, SAID]} for place in range(60)]
    write_rows(tmp_path / "own.jsonl", rows)
    sources = sources_of(given(tmp_path / "own.jsonl"), ("train", "held_out"), Template(templated(), {}, ()))
    assert min(map(len, sources.values())) > 0


def test_a_system_turn_of_the_row_is_not_put_before_that_of_its_messages() -> None:
    row = CHAT.row({"messages": [SYSTEM, USER, SAID], "system": "other"})
    assert [one["role"] for one in row.messages] == ["system", "user", "assistant"] and row.unread == ("system",)


def test_an_answer_of_weight_0_is_not_learnt(tmp_path: Path) -> None:
    """As OpenAI's fine-tuning files mark it; its prompt is used."""
    rows = [{"messages": [USER, SAID | {"weight": weight}]} for weight in (0, 1)]
    write_rows(tmp_path / "own.jsonl", rows)
    source = source_of(given(tmp_path / "own.jsonl"), ALL_ROWS, templated())
    assert isinstance(source, PromptRows)
    assert [bool(row["completion"]) for row in source.rows] == [False, True]
    assert "1 answers are not learnt from" in source.remarks[-1] and "has weight 0" in source.remarks[-1]


def test_the_domain_is_a_column_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "a", "domain": "law"}\n')
    source = source_of(given(tmp_path / "own.jsonl"), ALL_ROWS, templated())
    assert "columns prompt, domain" in source.remarks[0] and "by which figures are given: domain" in source.remarks[1]


@pytest.mark.parametrize("name", ["own.JSONL", "own.JSONL.GZ", "own.jsonl.gz"])
def test_an_extension_is_read_in_any_case_and_hidden_files_are_not(name: str, tmp_path: Path) -> None:
    content = b'{"prompt": "a"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith("gz") else content)
    for hidden in (".a.csv", ".b.csv"):
        (tmp_path / hidden).write_text("prompt\nb\n")
    source = source_of(given(tmp_path), ALL_ROWS, templated())
    assert ": 1 of 1 rows" in source.remarks[0]
