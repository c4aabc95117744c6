"""What was found with an engine, kept as a report in outputs/engines/, and in the folder that COTRAIN_REPORTS names."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cotrain.config.groups import Bench
from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment
from tests.engines.drafts import K

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "outputs" / "engines"
KEPT = "COTRAIN_REPORTS"  # as outputs/results
SIZE = Bench(
    prompts=48,
    quick_prompts=1,
    prompt_tokens=48,
    new_tokens=128,
    parity_tokens=1,
    rows=8,
    minutes=0,
    interval=0.1,
    depths=[K],
    draft_dtype="auto",
    draft_int8=False,
    seed=0,
    trees=0,
)
CASES = [("two layers", "sampled"), ("four layers", "greedy")]


@pytest.fixture(scope="session")
def found(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    """Figures by case."""
    yield from reported("engines", pytestconfig)


def reported(name: str, config: pytest.Config, k: int = K) -> Iterator[dict[str, Any]]:
    """An empty dict, written as NAME.json at the end with machine, date, commit and command, if it has figures of
    cases. k: drafts a round."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    yield figures
    if not any(isinstance(case, dict) for case in figures.values()):
        return
    command = " ".join(["python -m pytest", *config.invocation_params.args])
    known = json.loads(json.dumps(figures), parse_constant=lambda name: None)  # JSON has no infinity
    report = {"environment": environment() | {"command": command}, "k": k, "found": known}
    for folder in (OUTPUT, *map(Path, filter(None, [os.environ.get(KEPT)]))):
        write_atomic(folder / f"{name}.json", json.dumps(report, indent=2) + "\n")


def require_same(text: Any, figures: dict[str, Any]) -> None:
    """Keep a comparison of greedy texts among the figures. Fail if rounding does not explain a difference."""
    figures["greedy_text"] = vars(text) | {"line": text.line()}
    print(text.line())
    assert text.unexplained == 0
