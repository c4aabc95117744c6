"""A sweep that measured its drafts ends in one table: how each drafts, tau, speed-up, exactness."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cotrain.commands.train import swept
from inference.report.table import comparison


def report(tau: float, predicted: float, whole: tuple[float, float | None, float | None], passed: bool = True) -> Any:
    return {
        "acceptance": {"tau": {"measured": tau, "predicted": predicted}},
        "speedup": {"whole": dict(zip(("value", "low", "high"), whole, strict=True))},
        "exactness": {"passed": passed},
        "settings": {"policy": "fixed k=4"},
        "extra": {},
    }


def test_reports_beside_each_other_say_what_each_of_them_says() -> None:
    tree = report(2.0, 1.98, (1.0, None, None)) | {"extra": {"planned_shape": [-1, 0]}}
    unchecked = report(1.5, 1.5, (1.0, 0.9, 1.1)) | {"exactness": None, "acceptance": None, "speedup": None}
    reports = {
        "draft=medusa": report(1.234, 1.25, (1.126, 1.094, 1.157)),
        "draft=eagle": tree,
        "draft=wrong": report(3.0, 2.0, (2.0, 1.9, 2.1), passed=False),
        "none": unchecked,
    }
    assert [re.split(r"  +", row) for row in comparison(reports).splitlines()] == [
        ["draft", "drafting", "tau", "predicted", "speed-up", "exact"],
        ["draft=medusa", "fixed k=4", "1.234", "1.250", "1.13x", "[1.09, 1.16]", "yes"],
        ["draft=eagle", "trees of 2 nodes", "2.000", "1.980", "1.00x", "yes"],
        ["draft=wrong", "fixed k=4", "3.000", "2.000", "2.00x", "[1.90, 2.10]", "NO"],
        ["none", "fixed k=4", "-", "-", "-", "not checked"],
    ]


def test_a_sweep_shows_the_runs_that_were_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, tau in (("draft=medusa", 1.2), ("draft=eagle", 1.7), ("not measured", None)):
        (folder := tmp_path / name / "draft").mkdir(parents=True)
        if tau:
            (folder / "report.json").write_text(json.dumps(report(tau, tau, (1.1, 1.0, 1.2))))
    outputs = [str(tmp_path / name) for name in ("draft=medusa", "not measured", "draft=eagle")]
    swept(outputs)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["draft=medusa", "fixed", "k=4", "1.200"],
        ["draft=eagle", "fixed", "k=4", "1.700"],
    ]
    swept(outputs[:2])
    assert capsys.readouterr().out == ""  # one run is no sweep
