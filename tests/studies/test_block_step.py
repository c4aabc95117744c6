"""The study of what a step of a block draft costs: a report of two drafts on the bundled target."""

import json
from pathlib import Path

from studies import block_step


def test_the_report(tmp_path: Path) -> None:
    block_step.main([str(tmp_path / "out.json"), "--depths", "1,2", "--repeats", "3"])
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["depths"] for row in report["rows"]] == [1, 2] and report["commit"]
    assert report["rows"][0]["ratio"] == [1.0, 1.0, 1.0]
    assert all(row["milliseconds"][1] <= row["milliseconds"][0] for row in report["rows"])
