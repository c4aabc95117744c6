"""Prompts that `cotrain generate` reads of a file."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.cli import main
from inference import Engine, Sampling
from tests.cotrain.commands.test_cli import saved
from tests.cotrain.data.test_inputs import templated
from tests.folders import write_rows


def test_prompts_of_a_file_keep_their_spaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, prompts = saved(tmp_path / "target"), ["    return x", "a = 1  "]
    (tmp_path / "prompts").write_text("\n".join([prompts[0], "", "   ", prompts[1]]))
    settings = {"max_new_tokens": 6, "sampling": Sampling(temperature=0.0)}
    plain = Engine(str(target)).generate(prompts, **settings).text  # type: ignore[arg-type]
    other = Engine(str(target)).generate([one.strip() for one in prompts], **settings).text  # type: ignore[arg-type]
    capsys.readouterr()
    arguments = [f"target.path={target}", f"prompts={tmp_path / 'prompts'}", "max_new_tokens=6", "regime=t0"]
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == "".join(f"{one}\n" for one in plain) and plain != other


@pytest.mark.parametrize("chat", [False, True])
def test_rows_are_read_as_for_training(
    chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, read = saved(tmp_path / "target"), list[Any]()
    words = templated()
    words.save_pretrained(target)
    messages = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    rows = [{"prompt": "p", "completion": "c"}, {"messages": messages}, {"text": "t"}, *[{"prompt": "q"}] * 9, {"x": 1}]
    write_rows(tmp_path / "own.jsonl", rows)
    out = SimpleNamespace(text=["said"], errors=[None])
    engine = SimpleNamespace(generate=lambda prompts, **_: read.extend(prompts) or out)
    monkeypatch.setattr("cotrain.commands.generate._engine", lambda _: engine)
    command = ["generate", f"target.path={target}", f"prompts={tmp_path / 'own.jsonl'}", f"chat={str(chat).lower()}"]
    assert main(command) == 0
    shown = [one if isinstance(one, str) else words.decode(one) for one in read]
    asked = ["<user>p<assistant>", "<user>t<assistant>", "<user>q<assistant>"] if chat else ["p", "t", "q"]
    assert shown == [asked[0], "<user>u<assistant>a<user>u<assistant>", asked[1], *[asked[2]] * 9]
    assert "1 rows are skipped: 1, the first " in (said := capsys.readouterr().err) and "own.jsonl, line 13" in said
    assert main([*command[:2], "prompt=null"]) == 0 and read[-1] == "null"
    assert capsys.readouterr().err.startswith("prompt=null: the text 'null' is continued; leave prompt= out")
    for rows, reason in (
        ("plain\ntext\n", "it is no JSON object"),
        ('{"x": 1}\n', "but x: rename the one that holds the prompts\n"),
        ('{"prompt": null}\n', "contains no prompt: 1, the first "),
    ):
        (tmp_path / "own.jsonl").write_text(rows)
        assert main(command) == 1 and reason in capsys.readouterr().err
