"""How a command answers: displays of long jobs, JSON for machines, the verdict in a line."""

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain import console
from cotrain.bench.measurement import TimingDisplay
from cotrain.cli import main
from cotrain.console import Display, answering, clock
from cotrain.training.progress import Bar, Progress
from inference.report.schema import strict
from inference.report.table import headline
from tests.cotrain.evaluation.test_comparison import run as judged
from tests.cotrain.evaluation.test_comparison import write as write_runs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock that displays read."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_lines_come_now_and_then_with_the_time_left(seconds: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Display("rollout", 100, "texts", start_at=40) as display:
        for done in range(41, 101):
            seconds[0] += 2.0
            display.to(done, f"{done} tokens/s")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rollout: 55/100 texts, 1:30 left, 55 tokens/s"  # at two seconds a text since this run began
    assert lines[-1] == "rollout: 100/100 texts, 100 tokens/s" and len(lines) == 4


def test_a_terminal_gets_a_bar_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(OSError, match="down"), Display("training", 10, "steps", start_at=4) as display:
        display.to(7, "loss 2.100")
        raise OSError("the machine went down")
    shown = terminal.getvalue()
    assert "4/10 steps" in shown or "7/10 steps" in shown
    assert "loss 2.100" in shown and "\x1b[?25h" in shown.rpartition("loss 2.100")[2] and not display.bar


def test_nothing_is_shown_by_the_other_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("training", 10, "steps", hidden=True) as display:
        display.to(10)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("value", "said"), [(5, "0:05"), (750, "12:30"), (7200, "2:00:00"), (59.7, "1:00")])
def test_a_time_is_told_as_on_a_clock(value: float, said: str) -> None:
    assert clock(value) == said


def test_a_resumed_training_begins_where_the_run_does(seconds: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar(Progress(100))
    trainer: Any = SimpleNamespace(
        global_step=60, max_steps=100, loggers=[], progress_bar_metrics={"v_num": "tensorboard"}
    )
    found = {"loss": 2.0, "acceptance": 0.5, "acceptance_greedy_draft": 0.4}
    module: Any = SimpleNamespace(step_figures={})
    bar.on_train_start(trainer, module)
    for trainer.global_step in range(61, 101):
        seconds[0] += 4.0
        module.step_figures = found if trainer.global_step == 70 else {}
        bar.on_train_batch_end(trainer, module)
        bar.on_train_batch_end(trainer, module)  # a batch that ends no step
    bar.on_train_end(trainer, module)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training: 70/100 steps, 2:00 left, loss 2.000, acceptance 0.500"
    assert lines[-1] == "training: 100/100 steps, loss 2.000, acceptance 0.500" and bar.display is None


def test_a_timing_says_how_near_it_is() -> None:
    display = TimingDisplay(4, math.inf)
    display.turned(1)
    said = display.line()
    assert said.startswith("bench: timing: 1/4 batches") and said.endswith("left, no interval yet")
    display.known(2, 0.25)
    display.turned(2)
    assert display.line().endswith("left, interval within 25 % of the speed-up")
    assert TimingDisplay(4, console.time.perf_counter() + 60).line().startswith("bench: timing: 0/60 s at most")


def test_json_alone_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(True) as answer:
        print("a word")
        answer({"value": math.nan, "list": (1, math.inf)}, "words")
    said = capsys.readouterr()
    assert json.loads(said.out) == {"value": None, "list": [1, None]} and said.err == "a word\n"
    with answering(False) as answer:
        answer({"value": 1}, "words")
    assert capsys.readouterr().out == "words\n"
    assert strict({"a": [True, "x", 0.5]}) == {"a": [True, "x", 0.5]}


def test_compare_and_a_check_answer_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_runs(tmp_path, [judged("kl", 0, 1.0), judged("tv", 0, 0.8)])
    assert main(["compare", f"folder={tmp_path}", "baseline=kl", "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["baseline"] == "kl" and {gain["label"] for gain in found["gains"]} == {"kl", "tv"}
    assert main(["export", f"check={tmp_path / '0'}", "json=true"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert not found["passed"] and found["problems"] and "would not load" in said.err
    assert main(["export", f"draft.path={tmp_path}", "json=true"]) == 1
    assert "json=true: only check= prints JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "high", "passed", "said"),
    [
        (
            1.2,
            1.6,
            True,
            "verdict: faster, 1.40x [1.20, 1.60] the speed of plain decoding at temperature 0.7, Fixed(k=4); exact",
        ),
        (0.9, 1.6, True, "verdict: no speed-up is shown, 1.40x"),
        (0.5, 0.9, True, "verdict: SLOWER, 1.40x"),
        (1.2, 1.6, False, "; NOT EXACT: do not serve it"),
        (None, None, None, "verdict: too few batches for an interval, 1.40x the speed of plain decoding"),
    ],
)
def test_the_verdict_is_one_line(low: float | None, high: float | None, passed: bool | None, said: str) -> None:
    speedup = {"of": "speculative", "over": "plain", "whole": {"value": 1.4, "low": low, "high": high}}
    settings = {"sampling": {"temperature": 0.7}, "policy": "Fixed(k=4)"}
    exactness = None if passed is None else {"passed": passed}
    moved = {"original": "theirs", "kl": 0.0}  # it did not move
    line = headline({"speedup": speedup, "exactness": exactness, "settings": settings, "extra": {"moved": moved}})
    assert said in line and "\n" not in line
    assert ("was not checked" in line) == (passed is None)
