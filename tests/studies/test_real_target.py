"""The study of a real target by task, on a toy target with a chat template."""

import json
from pathlib import Path
from typing import Any

import pytest

from cotrain.training.job import models
from inference import Engine, Sampling, load
from inference.models.pretrained import load_model
from inference.policy import Fixed
from studies import real_target, real_target_beside, real_target_cells
from studies.real_target_beside import Served
from tests.draft_folders import draft_folder
from tests.folders import target_folder, tokenizer

TEMPLATE = "{% for one in messages %}[{{ one.content }}]{% endfor %}"
TINY = [f"--set=bench.{one}" for one in "prompt_tokens=16 new_tokens=8 depths=[1,2] compile=false".split()]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = target_folder(tmp_path / "target")
    words = tokenizer()
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    words.chat_template = None
    return folder


@pytest.fixture
def options(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a run of seconds, on prompts of two tasks."""
    monkeypatch.setattr("inference.measure.costs.MOST", 1)
    monkeypatch.setattr("cotrain.bench.planner.SHAPE", 1)
    rows = [{"domain": task, "messages": [{"role": "user", "content": f"{task} {i}"}]}
            for task in ("chat", "edits") for i in range(7)]  # fmt: skip
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"--output={tmp_path / 'out.json'}", f"--target={target}", f"--prompts={prompts}", "--seconds=1", *TINY]


def cells(tmp_path: Path) -> list[dict[str, Any]]:
    report = json.loads((tmp_path / "out.json").read_text())
    return [{**cell, "command": report["runs"][cell["run"]]["command"]} for cell in report["cells"]]


def test_cells_that_are_missing_are_measured(
    tmp_path: Path, target: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    small = draft_folder(tmp_path / "draft", target, "independent")
    drafts = [f"small={small}", "look-up=draft=retrieval"]
    real_target.main([*drafts, *options, "--regimes=1", "--rows=1", "--tasks=chat"])
    real_target.main([*drafts, *options, "--regimes=1,card", "--rows=1", "--tasks=chat", "--plan=stored"])
    real_target.main(
        [f"both=draft=hybrid init=pretrained draft.path={small}", *options, "--regimes=0", "--rows=2", "--tasks=edits"]
    )
    found = cells(tmp_path)
    assert [(cell["draft"], cell["kind"], cell["regime"], cell["rows"], cell["task"]) for cell in found] == [
        ("small", "independent", "1", 1, "chat"), ("look-up", "retrieval", "1", 1, "chat"),
        ("small", "independent", "card", 1, "chat"), ("look-up", "retrieval", "card", 1, "chat"),
        ("both", "hybrid", "0", 2, "edits"),
    ]  # fmt: skip
    assert all(cell["exact"] and not cell["wrong"] for cell in found)
    assert "stored" not in found[0]["command"] and "stored" in found[2]["command"] and found[2]["k"] == 2
    small_cell = found[0]
    assert abs(small_cell["tau"]["z"]) < 4 and len(small_cell["acceptance"]["measured"]) == small_cell["k"]
    speed = small_cell["speedup"]
    assert 0 < speed["expected"] and speed["decode"]["low"] <= speed["decode"]["value"]
    assert small_cell["speedup"]["low"] <= small_cell["speedup"]["value"] <= small_cell["speedup"]["high"]
    capsys.readouterr()
    real_target.main([f"--output={tmp_path / 'out.json'}", "--summary"])
    said = capsys.readouterr().out
    assert "**small, 1 row**\n\n| task | T = 1 | card's settings |\n|---|---|---|\n| chat | " in said
    assert "**both, 2 rows**" in said and "NOT EXACT" not in said
    assert cells(tmp_path) == found


def test_prompts_that_plan_are_not_timed(target: Path) -> None:
    """And every task of the study has its own, in the chat template."""
    words = models(real_target_cells.settings(str(target), []))[1]
    by_task = real_target_cells.prompts_of(real_target.PROMPTS, load_model(str(target)), words)
    assert list(by_task) == real_target.TASKS
    texts = [json.loads(line)["messages"][0]["content"] for line in real_target.PROMPTS.read_text().splitlines()]
    assert len(set(texts)) == len(texts) >= 60
    for prompts in by_task.values():
        assert len(prompts.ranking) == real_target_cells.PLANNED_ON and len(prompts.final) >= 8
        assert words.decode(prompts.ranking[0]).startswith("[")


def test_a_report_is_of_one_target(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "out.json").write_text(json.dumps({"target": "another"}))
    with pytest.raises(ValueError, match="of target another"):
        real_target.main(options)


def test_engines_take_turns_and_what_is_left_out_is_said(
    tmp_path: Path, target: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = [f"small={draft_folder(tmp_path / 'draft', target, 'independent')}", "int8=draft=quantised draft.bits=8"]
    for rows in ("1", "1,2"):
        real_target.main([*drafts, *options, "--beside", "--regimes=1", f"--rows={rows}", "--tasks=chat"])
    report = json.loads((tmp_path / "out.json").read_text())
    alone, together = report["beside"]
    assert (alone["run"], together["run"]) == (0, 1) and not report["cells"]
    assert list(alone["engines"]) == ["small", "transformers, small", "int8", "plain", "transformers"]
    assert list(together["engines"]) == ["small", "int8", "plain", "transformers"]
    assert [one.split(":")[0] for one in alone["left_out"]] == ["vLLM", "llama.cpp", "transformers assisted by int8"]
    speed = alone["engines"]["transformers"]["tokens_per_second"]
    assert speed["low"] <= speed["value"] <= speed["high"] and alone["engines"]["small"]["ours_over_it"]["value"] == 1
    capsys.readouterr()
    real_target.main([options[0], "--summary"])
    assert "**T = 1, 2 rows, chat**" in capsys.readouterr().out


@pytest.mark.parametrize("first", [0, 1])
def test_what_another_engine_accepted_is_compared_with_the_prediction(
    first: int, tmp_path: Path, target: Path, options: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The other engine is this one, which samples the first token without a draft where vLLM does."""
    small = draft_folder(tmp_path / "draft", target, "independent")

    def serves(asked: Any, prompts: list[list[int]], sampling: Sampling, new: int) -> Served:
        begun, engine = prompts, load(small, verify="token", policy=Fixed(2), rows=len(prompts))
        if first:
            sampled = Engine(engine.target.model, rows=len(prompts)).generate(
                prompts, max_new_tokens=1, sampling=sampling, seed=1, ignore_eos=True
            )
            begun = [[*prompt, *text] for prompt, text in zip(prompts, sampled.tokens, strict=True)]
        rest = engine.generate(begun, max_new_tokens=new - first, sampling=sampling, ignore_eos=True)
        texts = [[*given[len(prompt) :], *text]
                 for prompt, given, text in zip(prompts, begun, rest.tokens, strict=True)]  # fmt: skip
        return Served("another", "1", 2, "sampled", first, texts, rest.stats.target_calls, rest.stats.accepted, 2.0)

    monkeypatch.setattr(real_target_beside, "vllm_serves", serves)
    asked = [f"small={small}", *options, "--set=bench.new_tokens=24", "--regimes=1", "--rows=1", "--tasks=chat,edits"]
    real_target.main([*asked, "--acceptance", "--vllm-draft=exported"])
    found = json.loads((tmp_path / "out.json").read_text())["acceptance"]
    assert [(one["task"], one["engine"], one["prompts"]) for one in found] == [("chat", "another", 3)] + [
        ("edits", "another", 3)
    ]
    for one in found:
        tau, depths, draft = one["tau"], one["acceptance"], one["first_draft"]
        assert one["tokens"] == 3 * (24 - first) and one["tokens_per_second"] == 3 * 24 / 2
        assert tau["measured"] == one["tokens"] / one["rounds"] and abs(tau["z"]) < 4
        assert abs(tau["relative"]) < 5 * tau["standard_error"]
        for measured, expected, spread in zip(*(depths[name] for name in ("measured", "predicted", "standard_error")),
                                              strict=True):  # fmt: skip
            assert 0 < spread < 0.2 and abs(measured - expected) < 5 * spread
        assert abs(draft["measured"] - draft["predicted"]) < 5 * draft["standard_error"] < 1
    assert "small in another, T 1, edits, " in capsys.readouterr().out
    with pytest.raises(ValueError, match="--acceptance: name one draft"):
        real_target.main([*asked, "--acceptance"])
