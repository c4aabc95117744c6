"""`cotrain generate` in colour: what each colour says, and the line behind the texts."""

from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.commands import generate
from inference import Event
from tests.folders import tokenizer

GREEN, YELLOW, PLAIN = "\033[32m", "\033[33m", "\033[0m"


def test_colours_tell_how_each_token_came_and_a_line_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (tokenizer().encode(one, add_special_tokens=False)[-1] for one in "abc")
    events = [Event(0, [a, b], ["drafted", "corrected"]), Event(0, [a, c], ["drafted", "bonus"])]
    engine: Any = SimpleNamespace(tokenizer=tokenizer(), stream=lambda prompt, **_: iter(events))
    generate._colored(engine, ["x", "y"], {})
    *texts, line, end = capsys.readouterr().out.split("\n")
    assert texts == [f"{GREEN}a{YELLOW}b{GREEN}a{PLAIN}c{PLAIN}"] * 2 and end == ""
    assert line.startswith("8 tokens in 4 target calls, 2.00 per call; ")
    assert (
        f"colours: {GREEN}accepted draft (4){PLAIN}, {YELLOW}corrected{PLAIN} (replaces a rejected draft), bonus"
        in line
    )
