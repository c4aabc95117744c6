"""Conversations as the target is served them: what is prompt and what was generated, whatever its template does."""

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from cotrain.data.conversations import Template
from cotrain.data.prompt_rows import PromptRows
from cotrain.data.rows import Reader
from cotrain.data.sources import read_data, sources_of
from cotrain.data.splits import ALL_ROWS
from cotrain.rollout.samplers import Ask
from cotrain.rollout.training_texts import logged
from tests.cotrain.data.test_inputs import given, source_of
from tests.folders import tokenizer, write_rows

END = "<|endoftext|>"
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# of earlier turns only what stands behind the thoughts; with `brief`, no thoughts are asked for
THINKING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last else m.content.split('</think>') | last }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if brief %}<think></think>{% endif %}{% endif %}"
)
TOOLS = "{% for t in tools or [] %}[{{ t.name }} {{ t.parameters | tojson }}]{% endfor %}" + PLAIN


def of(template: str | None, **options: Any) -> Template:
    one = copy.deepcopy(tokenizer())
    one.chat_template = template
    return Template(one, options, {one.eos_token_id})


def chat(*contents: str) -> dict[str, Any]:
    """A conversation that the user opens."""
    roles = [("user", "assistant")[i % 2] for i in range(len(contents))]
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]}


def turns(template: Template, *rows: dict[str, Any]) -> list[tuple[str, str]]:
    """(prompt, completion) as text."""
    reader, decode = Reader(templated=template.tokenizer.chat_template is not None), template.tokenizer.decode
    made = [turn for row in rows for turn in template.turns(reader.row(row))]
    return [(str(decode(one.prompt)), str(decode(one.completion))) for one in made]


def test_the_content_of_a_message_is_text_its_text_parts_or_nothing_where_it_calls_tools() -> None:
    """A template would print null as None and a list as Python does; the engine reads content the same way."""
    one, two = ({"type": "text", "text": text} for text in ("1+", "1"))
    answer = {"role": "assistant", "content": "2"}
    parts: list[dict[str, Any]] = [{"role": "user", "content": [one, two]}, answer]
    for template in (of(PLAIN), of(None)):
        assert turns(template, {"messages": parts}) == turns(template, chat("1+1", "2"))
        for wrong in (None, 3, [], [{"type": "image", "url": "a.png"}], {"text": "a"}):
            with pytest.raises(ValueError, match="message 1: the content of a message is text"):
                turns(template, {"messages": [{"role": "user", "content": wrong}, answer]})
        with pytest.raises(ValueError, match="message 1: the content of a message is text .* not None"):
            turns(template, {"messages": [{"role": "user"}, answer]})  # null keys are dropped from files
        with pytest.raises(ValueError, match="message 1: the content of a message is text"):
            turns(template, {"messages": [{"role": "user", "content": None, "tool_calls": [{}]}, answer]})
    long = {"role": "user", "content": [{"type": "image", "url": "x" * 100_000}]}
    with pytest.raises(ValueError, match="not \\[.*\\]") as error:
        turns(of(PLAIN), {"messages": [long, answer]})
    assert len(str(error.value)) < 400
    with pytest.raises(ValueError, match="message 2 calls tools, which only a chat template can render"):
        turns(of(None), {"messages": [parts[0], {"role": "assistant", "content": None, "tool_calls": [{}]}]})
    calls: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    [(_, completion)] = turns(of(PLAIN.replace("m.content", "m.content or 'calls'")), {"messages": [parts[0], calls]})
    assert completion == f"calls{END}"


def test_history_stands_as_the_template_shows_it_at_that_moment() -> None:
    one = chat("Hi", "<think>hm</think>Yes?", "1+1", "<think>easy</think>2")
    assert turns(of(THINKING), one) == [
        (f"<user>Hi{END}\n<assistant>", f"<think>hm</think>Yes?{END}"),
        (f"<user>Hi{END}\n<assistant>Yes?{END}\n<user>1+1{END}\n<assistant>", f"<think>easy</think>2{END}"),
    ]
    prompt, said = turns(of(THINKING, brief=True), chat("Hi", "<think></think>Yes?"))[0]
    assert (prompt, said) == (f"<user>Hi{END}\n<assistant><think></think>", f"Yes?{END}")


# an empty thought is before each answer without one, and a thought is always written alike
THOUGHTFUL = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{{ (m.content.split('</think>') | last).lstrip() }}"
    "{% else %}{{ m.content }}{% endif %}",
)


@pytest.mark.parametrize(
    ("template", "empty"),
    [(PLAIN, "<think></think>"), (PLAIN, "\n<think> </think>\n"), (THOUGHTFUL, "<think>\n\n</think>\n\n")],
)
def test_an_empty_thought_is_learnt_if_the_message_has_it(template: str, empty: str) -> None:
    [(_, added), (_, own)] = turns(of(template), chat("Hi", "<b></b>Yes?"), chat("Hi", empty + "<b></b>Yes?"))
    written = empty if template == PLAIN else "<think>\n\n</think>\n\n"
    assert (added, own) == (f"<b></b>Yes?{END}", f"{written}<b></b>Yes?{END}")


CALLS: list[dict[str, Any]] = [
    {"name": "weather", "arguments": {"city": "M\u00fcnchen", "days": 3}},
    {"name": "find", "arguments": {"\u043a\u043b\u044e\u0447": "\u5317\u4eac", "near": ["caf\u00e9", "\u03b1"]}},
    {"name": "now", "arguments": {}},
]
ASKED = (
    '{"city": "M\u00fcnchen", "days": 3}',
    '{"\u043a\u043b\u044e\u0447": "\u5317\u4eac", "near": ["caf\u00e9", "\u03b1"]}',
    "{}",
)
CALLING = {  # a template, and what it writes of the calls
    "{% for k, v in f.arguments.items() %}{{ k }}={{ v }};{% endfor %}": (
        "city=M\u00fcnchen;days=3;",
        "\u043a\u043b\u044e\u0447=\u5317\u4eac;near=['caf\u00e9', '\u03b1'];",
        "",
    ),
    "{{ f.arguments | tojson }}": ASKED,
    "{{ '' + f.arguments }}": ASKED,
}


@pytest.mark.parametrize("calling", CALLING)
def test_calls_are_read_alike_from_every_kind_of_file(calling: str, tmp_path: Path) -> None:
    """Arrow gives every call the arguments of all calls, null where it has none; logs also hold them as JSON text."""
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": one} for one in CALLS],
    }
    rows = [{"messages": [{"role": "user", "content": f"ask {i}"}, answer]} for i in range(3)]
    plain = [{"messages": [{"role": "user", "content": "ask 3"}, {"role": "assistant", "content": "\u0434\u0430"}]}]
    texts = json.loads(json.dumps(rows))
    for call in (call for row in texts for call in row["messages"][1]["tool_calls"]):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    write_rows(tmp_path / "own.jsonl", rows + plain)
    (tmp_path / "own.json").write_text(json.dumps(rows + plain, ensure_ascii=False), encoding="utf-8")
    write_rows(tmp_path / "text.jsonl", texts + plain)
    arrow = datasets.Dataset.from_list(rows + plain)
    arrow.to_parquet(str(tmp_path / "own.parquet"))
    arrow.save_to_disk(str(tmp_path / "saved"))
    shown = f"{{% for c in m.tool_calls or [] %}}{{% set f = c.function %}}[{{{{ f.name }}}} {calling}]{{% endfor %}}"
    template = of(PLAIN.replace("{{ m.content }}", "{{ m.content }}" + shown))
    read, ids, lines = list[Any](), list[Any](), list[Any]()
    for name in ("own.jsonl", "own.json", "own.parquet", "saved", "text.jsonl"):
        data = given(tmp_path / name)
        read.append([row for _, row in read_data(data)])
        lines.append([Reader(templated=True).row(row).content for row in read[-1]])
        ids.append(sources_of(data, (ALL_ROWS,), template)[ALL_ROWS].rows)  # type: ignore[union-attr]
    assert read[:4] == [rows + plain] * 4 and lines == lines[:1] * 5 and ids == ids[:1] * 5
    wanted = "".join(f"[{one['name']} {said}]" for one, said in zip(CALLS, CALLING[calling], strict=True))
    said = [str(template.tokenizer.decode(row["completion"])) for row in ids[0]]
    assert said == [wanted + END] * 3 + [f"\u0434\u0430{END}"]


def test_tools_are_shown_with_the_keys_that_were_written(tmp_path: Path) -> None:
    tools = [[{"name": "a", "parameters": {"x": 1}}], [{"name": "b", "parameters": {"y": None}}]]
    rows = [chat(f"call {i}", "done") | {"tools": tools[i % 2]} for i in range(40)]
    path = write_rows(tmp_path / "chats.jsonl", rows)
    source = source_of(given(path), "train", of(TOOLS).tokenizer)
    assert source.rendered
    starts = {str(tokenizer().decode(row["prompt"])).split("<")[0] for row in source.rows}
    assert starts == {'[a {"x": 1}]', '[b {"y": null}]'}


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        ("", chat("Hi", "Yes?"), "the target's chat template renders no text for this"),
        ("{{ raise_exception('no system') }}", chat("Hi", "Yes?"), ".* template fails: no system"),
        ("{% for %}", chat("Hi", "Yes?"), ".* template fails"),
        (
            PLAIN.replace("m.content", "m.contnt"),
            chat("Hi", "Yes?"),
            ".* the same text whatever the user says: correct",
        ),
        (None, chat("Hi", "Yes?", "More", "No"), "without a chat template"),
        (PLAIN, {"messages": []}, "it holds no list of messages"),
    ],
)
def test_what_cannot_be_rendered_says_why(template: str | None, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turns(of(template), row)


@pytest.mark.parametrize(
    ("template", "answer", "reason"),
    [
        ("{{ messages[0].content }}", "Yes?", "renders no text for the answer"),
        ("{{ messages | length }}{{ messages }}", "Yes?", "renders the text before an answer differently with"),
        (PLAIN, " ", "the answer is empty"),
    ],
)
def test_of_an_answer_that_cannot_be_learnt_the_prompt_is_read(template: str, answer: str, reason: str) -> None:
    [turn] = of(template).turns(Reader(templated=True).row(chat("Hi", answer)))
    assert turn.prompt and not turn.completion and reason in turn.lost


def test_one_prompt_is_never_in_both_splits(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chats.jsonl", [chat("the same", f"answer {i}") for i in range(60)])
    with pytest.raises(
        ValueError, match="the split .* gets none of the 60 rows: .* 1 different prompts, and at least 5"
    ):
        for split in ("train", "held_out"):
            source_of(given(path), split, of(PLAIN).tokenizer)


def chats(lengths: dict[str, list[int]]) -> PromptRows:
    return PromptRows(
        [{"domain": domain, "prompt": [2] * n, "completion": [3] * n} for domain in lengths for n in lengths[domain]]
    )


def test_prompts_are_never_cut() -> None:
    source = chats({"a": [5, 9, 6], "b": [4, 3, 9]})
    found = source.prompts(2, 6, seed=0)
    assert sorted(len(prompt) for _, prompt in found) == [3, 4, 5, 6] and {domain for domain, _ in found} == {"a", "b"}
    assert sorted(map(len, source.several(6, seed=0))) == [3, 4, 5, 6]
    assert sorted(source.prompts(3, 6, seed=0)) == sorted(found)  # as many as fit
    with pytest.raises(
        ValueError, match="the domain a has no prompt of at most rollout.prompt_tokens=4 tokens, the shortest has 5"
    ):
        source.prompts(3, 4, seed=0)
    with pytest.raises(ValueError, match="data.path: it has no prompt of at most rollout.prompt_tokens=4 tokens, the"):
        chats({"own": [5]}).prompts(3, 4, seed=0)
    with pytest.raises(ValueError, match="no prompt of at most 2 tokens, the shortest has 3"):
        source.several(2, seed=0)


def test_logs_give_their_completions_cut_to_what_is_asked() -> None:
    texts = logged(chats({"a": [5, 9, 6]}), Ask({"train": 2}, 6, 5), "train", seed=0)
    assert texts.prompt.tolist() in ([5, 6], [6, 5]) and (texts.length - texts.prompt).tolist() == [5, 5]
    assert (texts.ids[texts.ids.bool()][texts.prompt[0] :][:5] == 3).all()
    with pytest.raises(ValueError, match="have no completion of a prompt of at most rollout.prompt_tokens=4"):
        logged(chats({"a": [5]}), Ask({"train": 2}, 4, 5), "train", seed=0)
