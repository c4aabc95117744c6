"""Trained drafts, and what was found with each engine, written to outputs/engines/report.json at the end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cotrain.cli import main
from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "outputs" / "engines"
K = 4
# minutes on two cores: parity holds for a draft however little it learnt
QUICK = f"""experiment=demo verify=token trainer.steps=120 trainer.validations=1
trainer.remember_mb=0 bench.compile=false bench.prompts=2 bench.quick_prompts=1 bench.minutes=0 bench.parity_tokens=256
bench.depths=[{K}] policy.k={K} rollout.temperatures=[1.0]""".split()
TWO, FOUR = "init.layers=[0,-1]", "init.layers=[0,1,-2,-1]"
SIZES = {"two layers": [TWO], "four layers": [FOUR], "parallel": ["draft=parallel", TWO, f"draft.depths={K}"]}
OBJECTIVES = {"sampled": [], "greedy": ["objective=greedy_draft", "loss.then=greedy_draft"]}
CASES = [(size, objective) for size in SIZES if size != "parallel" for objective in OBJECTIVES]


def draft_folder(size: str, objective: str) -> Path:
    """A draft of this size, trained for this way of drafting; once a session."""
    run = OUTPUT / f"{size}, {objective}"
    if not (run / "draft" / "cotrain.json").is_file():
        settings = [f"output={run}", "overwrite=true", *QUICK, *SIZES[size], *OBJECTIVES[objective]]
        assert main(["train", *settings]) == 0
    return run / "draft"


@pytest.fixture(scope="session")
def found() -> Iterator[dict[str, Any]]:
    """Figures by case, kept as a report."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    yield figures
    report = {"environment": environment() | {"command": "make test-engines"}, "k": K, "found": figures}
    write_atomic(OUTPUT / "report.json", json.dumps(report, indent=2) + "\n")
