"""The cost of small heads: intervals, bytes, and a report of tiny drafts."""

import json
from pathlib import Path

import pytest

from studies import small_heads
from studies.small_heads import middle


def test_an_interval_of_the_median() -> None:
    """Of 100 values the 40th to the 61st, as tables of the binomial distribution say."""
    found = middle([float(one) for one in range(100, 0, -1)])
    assert found == {"value": 50.5, "low": 40.0, "high": 61.0}
    assert middle([3.0]) == {"value": 3.0, "low": 3.0, "high": 3.0}


def test_every_head_is_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a step moves by its own cost: each head has its own number, `whole` is 1."""
    now, calls = [0.0], []

    class Lm:
        def wait(self) -> None: ...

    def step(name: str, cost: float):  # type: ignore[no-untyped-def]
        def run() -> None:
            calls.append(name)
            now[0] += cost

        return run

    monkeypatch.setattr(small_heads.time, "perf_counter", lambda: now[0])
    made = {name: (Lm(), step(name, cost), step(name, cost / 2)) for name, cost in (("whole", 0.004), ("low", 0.001))}
    found = small_heads.timed(made, 5)  # type: ignore[arg-type]
    assert found["low"]["step"]["value"] == pytest.approx(1) and found["low"]["pass"]["value"] == pytest.approx(0.5)
    assert found["low"]["of_whole"]["value"] == pytest.approx(0.25) and found["whole"]["of_whole"]["value"] == 1
    assert len(calls) == 4 * (5 + small_heads.WARM) and sorted(calls[:4]) == ["low", "low", "whole", "whole"]


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
