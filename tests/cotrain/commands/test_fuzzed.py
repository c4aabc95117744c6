"""Commands on arbitrary input, at a size the suite can afford; and each kind of complaint, which a planted fault makes.

`make fuzz` runs ten thousand cases."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotrain.commands import generate
from studies import fuzz
from studies.fuzz import FAMILIES, Case, Place, complaints, prepared
from tests.often import often

SMOKE = {"settings": 240}  # the cheapest; of the others ten each
PLAIN = Case(["generate", "prompt=a"], "a fault", status="0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with prepared(tmp_path_factory.mktemp("fuzz") / "fuzz") as place:
        yield place


@pytest.mark.parametrize("family", often(FAMILIES, lambda family: family == "data"))
def test_no_case_of_a_family_is_complained_about(family: str, place: Place) -> None:
    cases = SMOKE.get(family, 10)
    done = fuzz.fuzz(family, cases, 0, place, lambda *_, **__: None)
    assert done["cases"] == cases and done["found"] == []


class First:
    """Draws the words that it is given, then the first option of each strategy, or `number`."""

    def __init__(self, words: list[str], number: int) -> None:
        self.words, self.number = words, number

    def __call__(self, strategy: Any) -> Any:
        options = getattr(getattr(strategy, "wrapped_strategy", strategy), "elements", None)
        return self.words.pop(0) if self.words else options[0] if options else self.number


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"settings", "prompts"}))
def test_a_case_that_changes_nothing_passes(
    family: str, number: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a family would only show that broken inputs stay broken. number: which command uses the files."""
    monkeypatch.setattr(fuzz, "changed", lambda draw, value: (value, "nothing"))
    monkeypatch.setattr(fuzz, "damaged", lambda draw, content, *_: (content, "nothing"))
    words = {"drafts": ["eagle", "config.json", "change"], "reports": ["report"], "safetensors": ["medusa"]}
    place.fresh()
    os.chdir(place.output)
    case = FAMILIES[family](First(words.get(family, []), number), place)
    assert complaints(replace(case, status="0"), place) == []


def fails() -> None:
    raise KeyError("state")


def exits() -> None:
    raise SystemExit(3)


def panics() -> None:
    raise BaseException("a panic of Rust")


def writes() -> None:
    Path("../elsewhere").write_text("x")


def renames() -> None:
    Path("mine").touch()
    os.rename("mine", "../other")


def asks() -> None:
    with socket.socket() as one:
        one.connect_ex(("127.0.0.1", 9))


def hangs() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.1)  # instead of the `HANG` that is left
    time.sleep(20)


def swallows() -> None:
    fuzz.HANG = 0.1
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with suppress(BaseException):
        time.sleep(20)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (fails, "a traceback: KeyError: 'state'"),
        (exits, "status 3 without a sentence"),
        (panics, "BaseException leaves the command: a panic of Rust"),
        (writes, "outside: open "),
        (renames, "outside: os.rename "),
        (asks, "outside: socket.connect ('127.0.0.1', 9)"),
        (hangs, "more than "),
        (swallows, "more than "),
        (lambda: None, ""),
    ],
)
def test_a_fault_is_complained_about(
    fault: Callable[[], None], said: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "run", lambda cfg: fault())
    monkeypatch.setattr(fuzz, "HANG", fuzz.HANG)
    place.fresh()
    os.chdir(place.output)
    found = complaints(PLAIN, place)
    assert found[0].startswith(said) if said else found == []


def test_a_status_that_does_not_follow_is_complained_about(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "run", lambda cfg: None)
    right, wrong = ["generate", "prompt=a"], ["generate", "promt=a"]
    assert complaints(Case(right, "", status="not 0"), place) == ["status 0 where it should be not 0"]
    assert complaints(Case(wrong, "", status="0"), place) == ["status 2 where it should be 0"]
    assert complaints(Case(wrong, "", status="not 0"), place) == complaints(Case(right, "", status="0"), place) == []
