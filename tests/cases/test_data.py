"""Data as people have them: rows of each shape, with ids equal to the template's own rendering."""

import copy
import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cotrain.cli import main
from cotrain.data.conversations import Template
from cotrain.data.prompt_rows import PromptRows
from cotrain.data.sources import sources_of
from cotrain.data.splits import ALL_ROWS
from cotrain.evaluation.comparison import FIGURES
from cotrain.rollout.samplers import Ask
from cotrain.rollout.training_texts import logged
from inference.drafts.weight_files import read_json
from tests.cases import FILES, TEMPLATES, case
from tests.cotrain.data.test_inputs import given
from tests.folders import network, target_folder, tokenizer, write_rows

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WRITES = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}",
)
CONCATENATES = WRITES.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
SIZES = """init.layers=[0,1] trainer.steps=2 trainer.batch=2 trainer.validations=1 trainer.threads=1 data.block=8
rollout.texts=6 rollout.held_out_texts=2 rollout.prompt_tokens=100 rollout.new_tokens=4 rollout.temperatures=[1.0]
bench.new_tokens=4 bench.depths=[2] policy.k=2 measure=false""".split()


def words(template: str | None) -> PreTrainedTokenizerFast:
    one = copy.deepcopy(tokenizer())
    one.chat_template = template
    return one


def read(name: str | Path, template: str | None = PLAIN, **changed: Any) -> tuple[PromptRows, list[tuple[str, str]]]:
    """All rows of a file, and their prompts and completions as text."""
    one = words(template)
    found = sources_of(given(FILES / name, **changed), (ALL_ROWS,), Template(one, {}, {0}))[ALL_ROWS]
    assert isinstance(found, PromptRows)
    return found, [(str(one.decode(row["prompt"])), str(one.decode(row["completion"]))) for row in found.rows]


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FILES / name).read_text(encoding="utf-8-sig").splitlines()]


def rendered(*turns: tuple[str, str]) -> tuple[list[int], list[int]]:
    """Prompt and completion of the last turn, as the template itself renders them."""
    return by_template([{"role": role, "content": content} for role, content in turns])


def by_template(messages: list[dict[str, Any]], template: str = PLAIN) -> tuple[list[int], list[int]]:
    one, texts = words(template), list[str]()
    for part, begins in ((messages[:-1], True), (messages, False)):
        texts.append(str(one.apply_chat_template(part, add_generation_prompt=begins, tokenize=False)))
    prompt, said = (one(text, add_special_tokens=False)["input_ids"] for text in (texts[0], texts[1][len(texts[0]) :]))
    return prompt, said[: said.index(0) + 1] if 0 in said else said


def pairs(found: PromptRows) -> list[tuple[list[int], list[int]]]:
    return [(row["prompt"], row["completion"]) for row in found.rows]


def target(place: Path, template: str | None) -> Path:
    network().save_pretrained(place / "target")
    words(template).save_pretrained(place / "target")
    return place / "target"


def train(place: Path, name: str | Path, template: str | None, *settings: str) -> int:
    folder = place / "target" if (place / "target").exists() else target(place, template)
    return main(
        ["train", f"target.path={folder}", f"data.path={FILES / name}", f"output={place / 'run'}", *SIZES, *settings]
    )


@case("tool arguments as text")
@pytest.mark.parametrize("template", [TEMPLATES["items"], WRITES, CONCATENATES])
def test_tool_arguments(template: str) -> None:
    found, texts = read("tools.jsonl", template)
    wanted = []
    for row in rows_of("tools.jsonl"):
        messages = copy.deepcopy(row["messages"])
        function = messages[1]["tool_calls"][0]["function"]
        function["arguments"] = (
            json.loads(function["arguments"])
            if template != CONCATENATES
            else json.dumps(json.loads(function["arguments"]))
        )
        messages[1]["content"] = ""
        wanted += [by_template(messages[:2], template), by_template(messages, template)]
    assert pairs(found) == wanted and len(wanted) == 40 and not any("None" in part for pair in texts for part in pair)


@case("prompt and completion")
@pytest.mark.parametrize("template", [PLAIN, None])
def test_prompt_and_completion(template: str | None) -> None:
    found, texts = read("prompt_completion.jsonl", template)
    rows = rows_of("prompt_completion.jsonl")
    said = [
        (row["prompt"], row["completion"])
        if isinstance(row["prompt"], str)
        else (row["prompt"][0]["content"], row["completion"][0]["content"])
        for row in rows
    ]
    assert len(said) == 44
    if template:
        assert pairs(found) == [rendered(("user", prompt), ("assistant", completion)) for prompt, completion in said]
    else:
        assert texts == [(prompt, f"{completion}<|endoftext|>") for prompt, completion in said]
    assert found.remarks[0] == "data.path: 44 of 44 rows are read, columns prompt, completion"


@case("response and completion")
def test_response_and_completion() -> None:
    found, _ = read("response_and_completion.jsonl")
    wanted = [
        rendered(("user", row["prompt"]), ("assistant", row.get("response") or row["completion"]))
        for row in rows_of("response_and_completion.jsonl")
    ]
    assert pairs(found) == wanted and len(wanted) == 40
    assert "columns prompt, completion (20), response (20)" in found.remarks[0]


@case("odd rows")
def test_odd_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, texts = read("odd_rows.jsonl")
    normal = [
        row["messages"]
        for row in rows_of("odd_rows.jsonl")
        if [one["role"] for one in row["messages"]] == ["user", "assistant"]
    ]
    assert [pair for pair in pairs(found) if pair[1]] == [by_template(one) for one in normal] and len(normal) == 60
    assert [text for text in texts if not text[1]] == [  # which this template takes
        ("<|assistant|>I begin.<|endoftext|>\n<|user|>ok<|endoftext|>\n<|assistant|>", ""),
        ("<|user|>a<|endoftext|>\n<|user|>b<|endoftext|>\n<|assistant|>", ""),
    ]
    assert found.remarks[:2] == (
        "data.path: 62 of 66 rows are read, columns messages",
        "data.path: 4 of 66 rows are skipped: 2, the first odd_rows.jsonl, line 13: it has no message of a user; "
        "1, the first odd_rows.jsonl, line 11: it holds no list of messages, each with role and content; "
        "1, the first odd_rows.jsonl, line 12: message 1: the content of a message is text or a list of text parts, "
        "not None",
    )
    strict = (
        "{% if messages[0].role == 'assistant' or (messages | length > 1 and messages[1].role == 'user') %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}" + PLAIN
    )
    found, _ = read("odd_rows.jsonl", strict)
    assert len(found.rows) == 60 and "60 of 66 rows are read" in found.remarks[0]
    assert "2, the first odd_rows.jsonl, line 44: the target's chat template fails: roles must" in found.remarks[1]
    assert train(tmp_path, "odd_rows.jsonl", strict, "check=true") == 0
    assert "6 of 66 rows are skipped" in capsys.readouterr().out


@case("system column")
def test_system_column() -> None:
    found, _ = read("system_column.jsonl")
    wanted = [
        rendered(("system", row["system"]), ("user", row["prompt"]), ("assistant", ""))[0]
        for row in rows_of("system_column.jsonl")
    ]
    assert [row["prompt"] for row in found.rows] == wanted and "columns system, prompt" in found.remarks[0]
    raw, texts = read("system_column.jsonl", None)
    assert "not read: system" in raw.remarks[0] and texts[0][0] == "Say hello 0."


TOLD = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN
MESSAGES = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]}
ASKED = {"prompt": "Hello"}
TOOLS = [{"type": "function", "function": {"name": "read"}}]


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        (MESSAGES, "tools", TOOLS),
        (MESSAGES, "tools", json.dumps(TOOLS)),
        *((MESSAGES, name, "words") for name in ("system", "id", "text", "completion", "output", "source")),
        *((ASKED, name, "words") for name in ("system", "answer", "text", "response", "input", "instruction")),
        (ASKED, "tools", TOOLS),
    ],
)
def test_a_column_is_in_the_texts_or_is_said_not_to_be_read(
    row: dict[str, Any], column: str, value: Any, tmp_path: Path
) -> None:
    """Exactly one of both, for every column beside a prompt or messages."""
    for name, more in (("without", {}), ("with", {column: value})):
        write_rows(tmp_path / f"{name}.jsonl", [row | more] * 20)
    (without, _), (found, _) = (read(tmp_path / f"{name}.jsonl", TOLD) for name in ("without", "with"))
    columns, _, rest = found.remarks[0].partition("; not read: ")
    listed = column in columns.partition("columns ")[2].split(", ")
    assert listed is (pairs(found) != pairs(without)) is not (column in rest.split(", ")), found.remarks[0]


@case("plain prompts for a chat target")
def test_plain_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "system_column.jsonl", PLAIN) == 0
    said = capsys.readouterr().out
    assert "data.path: is each prompt what a user says? " in said
    assert "as the target reads it: '<|system|>Answer in French.<|endoftext|>\\n<|user|>Say hello" in said
    served = read_json(tmp_path / "run" / "draft" / "cotrain.json")["served"]
    assert (served["chat"], served["messages"]) == (None, True)
    for template, chat, wanted in ((PLAIN, False, "data.chat=true makes each"), (None, None, "has no chat template")):
        found, texts = read("system_column.jsonl", template, chat=chat)
        assert wanted in found.remarks[-1] and texts[0] == ("Say hello 0.", "") and not found.rendered


def test_a_target_with_a_template_asks_about_plain_prompts_until_it_is_answered() -> None:
    asked = (
        "data.path: is each prompt what a user says? The target's chat template renders prompts of plain text as "
        "users' messages; data.chat=true answers yes, data.chat=false uses them as they are"
    )
    for chat, lines in ((None, [asked]), (True, []), (False, [])):
        found, _ = read("system_column.jsonl", PLAIN, chat=chat)
        assert found.rendered is (chat is not False) and [line for line in found.remarks if "?" in line] == lines


@case("byte order mark")
def test_byte_order_mark(tmp_path: Path) -> None:
    found, _ = read("bom.jsonl")
    assert pairs(found) == [by_template(row["messages"]) for row in rows_of("bom.jsonl")] and len(found.rows) == 40
    for ending, text in ((".csv", "prompt\na\nb\n"), (".json", '[{"prompt": "a"}, {"prompt": "b"}]')):
        file = tmp_path / f"own{ending}"
        file.write_text(f"\ufeff{text}", encoding="utf-8")
        assert [prompt for prompt, _ in read(file, None)[1]] == ["a", "b"]


@case("words that pandas drops")
def test_missing_words() -> None:
    _, texts = read("missing_words.csv", None)
    lines = (FILES / "missing_words.csv").read_text().splitlines()[1:]
    assert texts == [(line, "") for line in lines] and len(lines) == 44 and lines[:3] == ["NA", "null", "None"]


@case("template opens a thought")
def test_template_opens_a_thought(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, texts = read("bom.jsonl", TEMPLATES["r1"])
    assert pairs(found) == [(by_template(row["messages"], TEMPLATES["r1"])[0], []) for row in rows_of("bom.jsonl")]
    assert all(prompt.endswith("<|a|><think>\n") for prompt, _ in texts)
    assert (
        "40 answers are not learnt from, but their prompts are used: 40, the first bom.jsonl, line 1"
        in found.remarks[-1]
    )
    assert train(tmp_path, "bom.jsonl", TEMPLATES["r1"], "check=true") == 0
    assert "40 answers are not learnt from" in capsys.readouterr().out
    with pytest.raises(ValueError, match="have no completion"):
        logged(found, Ask({"train": 9}, 99, 9), "train", seed=0)


@case("template writes an empty thought")
def test_template_writes_an_empty_thought(tmp_path: Path) -> None:
    found, texts = read("bom.jsonl", TEMPLATES["empty_think"])
    said = [row["messages"][1]["content"] + "<|im_end|>\n" for row in rows_of("bom.jsonl")]
    assert [one for _, one in texts] == said
    assert [row["prompt"] for row in found.rows] == [
        by_template(row["messages"], TEMPLATES["empty_think"])[0] for row in rows_of("bom.jsonl")
    ]
    thought = [
        {
            "messages": [
                {"role": "user", "content": f"q {i}"},
                {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{i}"},
            ]
        }
        for i in range(9)
    ]
    file = write_rows(tmp_path / "own.jsonl", thought)
    without = TEMPLATES["empty_think"].replace("<think>\n\n</think>\n\n", "")
    assert read(file, without)[1][3][1] == "<think>\nhm\n</think>\n\n3<|im_end|>\n"  # the target's own stays


@case("template writes the date")
@pytest.mark.thorough
@pytest.mark.parametrize("data", ["self", "file"])
def test_template_writes_the_date(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Clock(datetime.date):
        now = datetime.date(2026, 3, 1)

        @classmethod
        def today(cls) -> Any:
            return cls.now

    monkeypatch.setattr("cotrain.training.job.date", Clock)
    monkeypatch.setattr("cotrain.training.job.LONGEST", 12)
    monkeypatch.setattr("cotrain.rollout.self_prompts._reason", lambda text, *_: None if text.strip() else "empty")
    folder = target(tmp_path, TEMPLATES["date"].replace("<|end|>", "{{ eos_token }}"))
    source = "data=self" if data == "self" else f"data.path={FILES / 'bom.jsonl'}"
    command = ["train", f"target.path={folder}", source, f"output={tmp_path / 'run'}", *SIZES, "rollout.texts=3"]
    assert main(command) == 0
    kept = {file.name: file.read_bytes() for file in (tmp_path / "run" / "rollouts").iterdir()}
    ids = sources_of(given(FILES / "bom.jsonl"), (ALL_ROWS,), Template(words(TEMPLATES["date"]), {}, {0}, Clock.now))
    assert "Today is 01 March 2026. " in str(words(None).decode(ids[ALL_ROWS].rows[0]["prompt"]))  # type: ignore[union-attr]
    Clock.now = datetime.date(2026, 3, 2)
    capsys.readouterr()
    assert main([*command, "trainer.steps=3"]) == 0  # resumed
    assert "since the stored ones do not fit" not in capsys.readouterr().out
    assert kept == {file.name: file.read_bytes() for file in (tmp_path / "run" / "rollouts").iterdir()}
    assert main([*command, "overwrite=true"]) == 0  # a new run has its own date
    assert read_json(tmp_path / "run" / "rollouts" / "train_T1.json")["source"]["date"] == "2026-03-02"


SHORT = """rollout.texts=8 rollout.held_out_texts=2 rollout.prompt_tokens=32 rollout.temperatures=[1.0] measure=false
trainer.steps=2 trainer.batch=2 trainer.validations=1 policy.k=2 init=scratch""".split()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param("draft=block draft.head_dim=64 loss=calls rollout.new_tokens=1", marks=pytest.mark.thorough),
        "draft=medusa loss=calls_block data.on_target=true rollout.new_tokens=8",
    ],
)
@case("short answers")
def test_answers_of_one_and_two_tokens_are_learnt_and_judged(settings: str, tmp_path: Path) -> None:
    paths = [
        f"target.path={target_folder(tmp_path / 'target')}",
        f"data.path={FILES / 'short_answers.jsonl'}",
        f"output={tmp_path / 'out'}",
    ]
    assert main(["train", *paths, *SHORT, *settings.split()]) == 0
    tau = read_json(tmp_path / "out" / FIGURES)["tau"]
    assert tau == 1 if settings.endswith("new_tokens=1") else tau >= 1  # a text of one token takes one call
