"""The cost of small heads: intervals, bytes, and a report of tiny drafts."""

import json
from pathlib import Path

from studies import small_heads
from studies.small_heads import middle


def test_an_interval_of_the_median() -> None:
    """Of 100 values the 40th to the 61st, as tables of the binomial distribution say."""
    found = middle([float(one) for one in range(100, 0, -1)])
    assert found == {"value": 50.5, "low": 40.0, "high": 61.0}
    assert middle([3.0]) == {"value": 3.0, "low": 3.0, "high": 3.0}


def test_the_report(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = (
        "--vocabularies 512 --widths 64 --tokens 32 --ranks 8 --dtypes float32 --batches 1,2 --repeats 3 --device cpu"
    )
    small_heads.main([str(out), *words.split()])
    report = json.loads(out.read_text())
    assert [cell["batch"] for cell in report["cells"]] == [1, 2] and report["repeats"] == 3
    heads = report["cells"][0]["heads"]
    assert list(heads) == ["whole", "32 tokens", "rank 8"]
    assert heads["whole"]["bytes"] - heads["32 tokens"]["bytes"] == 4 * 64 * (512 - 32)
    assert heads["whole"]["bytes"] - heads["rank 8"]["bytes"] == 4 * (64 * 512 - 8 * (64 + 512))
    for one in heads.values():
        assert 0 < one["step"]["low"] <= one["step"]["value"] <= one["step"]["high"]
