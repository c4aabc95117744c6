"""Inputs that failed once, with the outcome that is right: `files/cases.jsonl`, a case a line. Its test stands in the
file of its `kind`, `test_<kind>.py`, under `@case(<its name>)`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

FILES = Path(__file__).parent / "files"
CASES = {one["name"]: one for one in map(json.loads, (FILES / "cases.jsonl").read_text(encoding="utf-8").splitlines())}
Test = TypeVar("Test", bound=Callable[..., Any])
TEMPLATES: dict[str, str] = json.loads((FILES / "templates.json").read_text(encoding="utf-8"))


def case(name: str) -> Callable[[Test], Test]:
    """Mark a test as that of a case. Raises KeyError if there is no such case."""
    assert CASES[name]
    return lambda test: test
