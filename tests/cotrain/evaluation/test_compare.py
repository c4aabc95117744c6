"""Comparisons are paired by seed and text, and refuse what was judged on other texts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotrain.cli import main
from cotrain.errors import UserError
from cotrain.evaluation.comparison import compare, read, table

LENGTHS = [40] * 30


def run(label: str, seed: int, factor: float, lengths: list[int] = LENGTHS) -> dict[str, object]:
    """A run whose calls are `factor` times those of a noisy base that text and seed decide."""
    rng = np.random.default_rng(seed)
    calls = (factor * rng.uniform(8, 30, size=len(lengths))).tolist()
    texts = {
        "1": {
            "alpha": 0.5,
            "kl": 1.0,
            "entropy": 2.0,
            "calibration": 0.1,
            "lengths": lengths,
            "calls": {"4": calls, "8": calls},
        }
    }
    return {"label": label, "seed": seed, "texts": texts}


def write(folder: Path, runs: list[dict[str, object]]) -> Path:
    for index, one in enumerate(runs):
        place = folder / str(index)
        place.mkdir()
        (place / "held_out.json").write_text(json.dumps(one))
    return folder


def test_a_constant_factor_has_no_width(tmp_path: Path) -> None:
    runs = [run("kl", s, 1.0) for s in range(3)] + [run("tv", s, 1 / 1.05) for s in range(3)]
    gains = {(g.label, g.k): g for g in compare(read(write(tmp_path, runs)), "kl")}
    found = gains["tv", 4]
    # the noise of texts and seeds is shared by both sides, so pairing removes all of it
    assert found.seeds == 3
    assert (found.gain, found.low, found.high) == pytest.approx((0.05, 0.05, 0.05))
    assert gains["kl", 8].gain == 0


def test_independent_noise_has_width(tmp_path: Path) -> None:
    runs = [run("kl", s, 1.0) for s in range(3)] + [run("tv", s + 7, 1.0) for s in range(3)]
    found = {g.label: g for g in compare(read(write(tmp_path, runs)), "kl")}["tv"]
    assert found.low < 0 < found.high


def test_temperatures_that_some_run_lacks_are_left_out(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [run(label, seed, 1.0) for label in ("kl", "tv") for seed in (0, 1)]
    for one in (runs[0], runs[2], runs[3]):
        one["texts"]["0.5"] = one["texts"]["1"]
    found = compare(read(write(tmp_path, runs)), "tv")
    assert {(g.label, g.temperature) for g in found} == {("kl", "1"), ("tv", "1"), ("tv", "0.5")}


def test_runs_are_paired_by_their_seeds(tmp_path: Path) -> None:
    """Of seed 0 there is no run of tv: one that failed is not made up for by another."""
    runs = [run("kl", s, 1.0) for s in range(3)] + [run("tv", s, 1 / 1.05) for s in (1, 2)]
    found = {g.label: g for g in compare(read(write(tmp_path, runs)), "kl")}["tv"]
    assert found.seeds == 2 and (found.gain, found.low, found.high) == pytest.approx((0.05, 0.05, 0.05))


def test_tau_is_a_ratio_of_sums(tmp_path: Path) -> None:
    one = run("kl", 0, 1.0)
    calls = one["texts"]["1"]["calls"]["4"]  # type: ignore[index]
    (found, _) = compare(read(write(tmp_path, [one])), "kl")
    assert found.tau == pytest.approx(sum(LENGTHS) / sum(calls))


def test_other_texts_are_refused(tmp_path: Path) -> None:
    for place, runs in enumerate((
        [run("kl", 0, 1.0), run("tv", 0, 1.0, [40] * 29 + [41])],
        [run("kl", 0, 1.0), run("kl", 1, 1.0), run("tv", 0, 1.0), run("tv", 1, 1.0, [40] * 29 + [41])],
    )):  # fmt: skip
        (folder := tmp_path / str(place)).mkdir()
        with pytest.raises(UserError, match="judged on other texts"):
            compare(read(write(folder, runs)), "kl")


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no run"):
        read(tmp_path)
    write(tmp_path, [run("tv", 0, 1.0)])
    assert main(["compare", f"folder={tmp_path}", "baseline=kl"]) == 1
    assert "baseline=kl: the runs are tv" in capsys.readouterr().err
    assert main(["compare", f"folder={tmp_path}", "baseline=loss=kl"]) == 1  # as a sweep labels its runs
    assert "baseline=loss=kl: the runs are tv" in capsys.readouterr().err


def test_the_table_says_interval_and_baseline(tmp_path: Path) -> None:
    runs = [run("kl", 0, 1.0), run("tv", 0, 0.5)]
    lines = table(compare(read(write(tmp_path, runs)), "kl"), "kl").splitlines()
    assert "over kl" in lines[0]
    assert any("tv" in line and "+100.00% [+100.00%, +100.00%]" in line for line in lines)


SETTINGS: dict[str, Any] = {
    "draft": {"kind": "independent", "layers": 4}, "init": {"kind": "target_layers"}, "loss": {"first": "kl"},
    "regime": {"temperature": 1.0}, "trainer": {"steps": 100, "seed": 0, "threads": 2}, "label": None,
    "rollout": {"seed": 0, "texts": 600}, "bench": {"prompts": 3}, "minutes": None, "data": {"path": "a.jsonl"},
}  # fmt: skip


def kept(folder: Path, *changes: str) -> list[str]:
    """Labels of two seeds as they are and one run with the changes, `group.key=value`, all under one label."""
    for index, changed in enumerate([(), ("trainer.seed=1", "rollout.seed=1"), changes]):
        place = folder / str(index)
        place.mkdir()
        settings = json.loads(json.dumps(SETTINGS))
        for change in changed:
            keys, _, value = change.partition("=")
            group, _, key = keys.rpartition(".")
            (settings[group] if group else settings)[key] = value
        (place / "held_out.json").write_text(json.dumps(run("kl", index, 1.0)))
        (place / "run.json").write_text(json.dumps({"cotrain": "0", "state": "finished", "settings": settings}))
    return sorted(read(folder))


@pytest.mark.parametrize("change", [
    "draft.kind=eagle", "draft.layers=2", "init.kind=scratch", "loss.first=tv", "regime.temperature=0.5",
    "trainer.steps=9", "rollout.texts=60", "minutes=3", "data.path=b.jsonl",
])  # fmt: skip
def test_runs_of_other_settings_are_not_pooled_under_one_label(tmp_path: Path, change: str) -> None:
    key = change.partition("=")[0]
    group, _, name = key.rpartition(".")
    own = (SETTINGS[group] if group else SETTINGS)[name]
    assert kept(tmp_path, change) == sorted([f"kl,{key}={own}", f"kl,{change}"])


@pytest.mark.parametrize("change", ["trainer.seed=5", "bench.prompts=9", "trainer.threads=1", "label=other"])
def test_runs_that_differ_in_seeds_and_measuring_are_pooled(tmp_path: Path, change: str) -> None:
    assert kept(tmp_path, change) == ["kl"]


def test_what_cannot_be_compared_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other: Any = run("tv", 0, 1.0)
    other["texts"] = {"0.5": other["texts"]["1"]}
    untrained = {"label": "retrieval", "seed": 0, "texts": {}}
    write(tmp_path, [run("kl", 0, 1.0), other, untrained])
    assert main(["compare", f"folder={tmp_path}", "baseline=kl"]) == 0
    said = capsys.readouterr().out
    assert "left out: retrieval: it learns nothing" in said
    assert "left out: tv: judged at temperatures ['0.5'], the baseline at ['1']" in said
    assert main(["compare", f"folder={tmp_path}", "baseline=retrieval"]) == 0
    assert capsys.readouterr().out.count("left out: ") == 3
