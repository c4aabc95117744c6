"""What is shown of a job: lines without a terminal."""

import time
from types import SimpleNamespace

import pytest

from cotrain import console
from cotrain.console import SHORT, Display, counting, working


def test_a_brief_display_is_silent_for_a_short_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with counting("judging", 4, "texts") as add:
        for _ in range(4):
            now[0] += SHORT / 5
            add(1)
    assert capsys.readouterr().out == ""
    with counting("judging", 4, "texts") as add:
        for _ in range(4):
            now[0] += SHORT
            add(1)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["judging: 1/4 texts, 0:15 left", "judging: 4/4 texts"]


def test_a_job_of_unknown_length_is_shown_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "EVERY", 0.02)
    with working("judging"):
        time.sleep(0.3)
    assert "judging: 0:00" in capsys.readouterr().out


def test_other_displays_end_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("sampling", 2, "texts") as display:
        display.to(2)
    assert capsys.readouterr().out == "sampling: 2/2 texts\n"
