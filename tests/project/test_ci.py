"""The stages of `.ci/run`, and the limits of time on slow machines."""

import re
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from tests import run_mutants
from tests.run_mutants import Job

ROOT = Path(__file__).parents[2]


def make(*words: str) -> str:
    """Return the commands that make would run."""
    return subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_every_stage_is_a_target_and_limits_reach_the_tests() -> None:
    stages = re.findall(r"^stage (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert stages == [
        "test",
        "lint",
        "test-thorough",
        "mutants",
        "gpu-rehearsal",
        "dist",
        ".venv-engines/ready",
        "test-engines",
    ]
    for stage in stages:
        make(stage)
    assert "--minutes 15" in make("mutants", "MINUTES=15") and "--minutes" not in make("mutants")
    assert all("COTRAIN_TEST_MINUTES=25 " in make(stage, "MINUTES=25") for stage in ("test-thorough", "test-engines"))


@pytest.mark.thorough
def test_every_planted_bug_can_be_planted_and_names_tests_that_are_here() -> None:
    for row in run_mutants.MUTANTS:
        row.applied(run_mutants.ROOT)
    named = {test for row in run_mutants.MUTANTS for test in row.tests}
    collected = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named]
    asked = subprocess.run(collected, cwd=ROOT, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr[-2000:]


def test_no_planted_bug_is_tried_once_the_time_is_over(tmp_path: Path) -> None:
    assert run_mutants.run([Job(None, ["tests"])], [tmp_path / "copy"], until=-inf) == []


def test_rows_that_were_not_tried_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = run_mutants.MUTANTS[0]
    monkeypatch.setattr(run_mutants, "chosen", lambda names: [row] * 3)
    monkeypatch.setattr(run_mutants, "copy_tree", lambda target: target)
    monkeypatch.setattr(run_mutants, "HEAVY", ())
    tried = []

    def run(jobs: list[Job], slots: list[Path], until: float = inf) -> list[run_mutants.Result]:
        tried.append(until < inf)
        status = run_mutants.PASSED if any(job.mutant is None for job in jobs) else run_mutants.CAUGHT
        return [run_mutants.Result(job, status, 1.0, "") for job in (jobs[:1] if until < inf else jobs)]

    monkeypatch.setattr(run_mutants, "run", run)
    monkeypatch.setattr(run_mutants.os, "environ", {})
    assert run_mutants.main(["--minutes", "5"]) == 0
    said = capsys.readouterr().out
    assert "2 of 3 not run: the 5 minutes were over" in said and "1 passed, 0 failed" in said
    assert tried == [False, True, False]
