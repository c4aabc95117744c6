"""The study of what a step of a block draft costs: its interval, and a report of two drafts on the bundled target."""

import json
from pathlib import Path

from studies import block_step


def test_the_interval_is_of_order_statistics() -> None:
    """Of 25 values in any order: the 13th, and those 4.9 places below and above."""
    assert block_step.interval([float(n * 7 % 25) for n in range(25)]) == [12.0, 7.0, 17.0]


def test_the_report(tmp_path: Path) -> None:
    block_step.main([str(tmp_path / "out.json"), "--depths", "1,2", "--repeats", "3"])
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["depths"] for row in report["rows"]] == [1, 2] and report["commit"]
    assert report["rows"][0]["ratio"] == [1.0, 1.0, 1.0]
    assert all(row["milliseconds"][1] <= row["milliseconds"][0] for row in report["rows"])
