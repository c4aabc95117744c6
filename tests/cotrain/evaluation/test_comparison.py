"""Comparisons are paired by seed and text, and raise for runs that were judged on other texts."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from cotrain.cli import main
from cotrain.data.texts import Texts
from cotrain.errors import UserError
from cotrain.evaluation import comparison
from cotrain.evaluation.comparison import (
    FIGURES,
    at_start,
    compare,
    gains_table,
    own_acceptance,
    read_runs,
    since_start,
)
from inference.drafts.atomic import write_json

LENGTHS = [40] * 30


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Fewer draws of the bootstrap, but where its interval is what is tested."""
    if "interval" not in request.node.name:
        monkeypatch.setattr(comparison, "RESAMPLES", 200)


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
        place.mkdir(parents=True)
        write_json(place / "held_out.json", one)
    return folder


@pytest.mark.parametrize(("between_seeds", "between_texts"), [(0.3, 0.0), (0.0, 0.3)])
def test_the_interval_is_of_95_percent_over_seeds_and_texts(between_seeds: float, between_texts: float) -> None:
    """The baseline takes one call a text less or more, by a normal part of the seed and one of the text; the candidate
    always takes one. So the gain is a mean over seeds and texts, whose bootstrap error is known."""
    rng = np.random.default_rng(1)
    seeds, texts = between_seeds * rng.normal(size=24), between_texts * rng.normal(size=60)
    runs: dict[str, list[dict[str, Any]]] = {"base": [], "other": []}
    for seed, shift in enumerate(seeds):
        for label, calls in (("base", 3 + shift + texts), ("other", np.ones(60))):
            one = {
                **dict.fromkeys(comparison.LIKE, 0.0),
                "lengths": [40] * 60,
                "calls": {k: calls.tolist() for k in ("4", "8")},
            }
            runs[label].append({"label": label, "seed": seed, "texts": {"1": one}})
    gain = {(g.label, g.k): g for g in compare(runs, "base")}["other", 4]
    error = np.sqrt(seeds.var() / len(seeds) + texts.var() / len(texts))
    assert gain.gain == pytest.approx(2 + seeds.mean() + texts.mean())
    assert (gain.high - gain.gain) / error == pytest.approx(1.96, rel=0.1)
    assert (gain.gain - gain.low) / error == pytest.approx(1.96, rel=0.1)


def test_runs_of_one_seed_are_pairs_of_their_own() -> None:
    """Two runs of a seed on each side, in their order."""
    runs = [run("kl", 0, 1.0), run("kl", 0, 2.0), run("tv", 0, 1 / 1.05), run("tv", 0, 2 / 1.05)]
    gain = {g.label: g for g in compare({"kl": runs[:2], "tv": runs[2:]}, "kl")}["tv"]
    assert gain.seeds == 2 and (gain.gain, gain.low, gain.high) == pytest.approx((0.05, 0.05, 0.05))


def test_runs_judged_on_other_texts_are_left_out(tmp_path: Path) -> None:
    for place, runs in enumerate(
        (
            [run("kl", 0, 1.0), run("tv", 0, 1.0, [40] * 29 + [41])],
            [run("kl", 0, 1.0), run("kl", 1, 1.0), run("tv", 0, 1.0), run("tv", 1, 1.0, [40] * 29 + [41])],
        )
    ):
        read_back = read_runs(write(tmp_path / str(place), runs))
        assert {gain.label for gain in compare(read_back, "kl")} == {"kl"}
        assert "evaluated on other texts" in comparison.left_out(read_back, "kl")["tv"]


def test_runs_that_judged_parts_of_the_texts_are_compared_on_those_that_both_have(tmp_path: Path) -> None:
    """minutes= leaves time for more texts in one run than in another. Texts are paired by their hashes, wherever they
    stand; here a text's calls are 5 % fewer than the baseline's of the same text, and of other texts far more."""
    whole, k = cast(Any, run("kl", 0, 1.0)), "8"
    calls = whole["texts"]["1"]["calls"][k]
    whole["texts"]["1"]["hashes"] = [f"text {row}" for row in range(30)]
    part = json.loads(json.dumps(whole)) | {"label": "tv"}
    rows = [29, 3, 17, 8]
    texts = part["texts"]["1"]
    texts["hashes"] = ["another", *(f"text {row}" for row in rows)]
    texts["lengths"] = [40] * 5
    texts["calls"] = {of: [900.0, *(calls[row] / 1.05 for row in rows)] for of in ("4", "8")}
    part["texts"]["1"]["calls"][k][0] = 900.0
    gain = {(g.label, g.k): g for g in compare(read_runs(write(tmp_path, [whole, part])), "kl")}["tv", int(k)]
    assert (gain.gain, gain.low, gain.high) == pytest.approx((0.05, 0.05, 0.05))
    texts["hashes"] = [f"another {row}" for row in range(5)]
    write_json(tmp_path / "1" / "held_out.json", part)
    assert {gain.label for gain in compare(read_runs(tmp_path), "kl")} == {"kl"}


def test_texts_are_those_that_every_pair_has_or_evenly_spaced(tmp_path: Path) -> None:
    """Seeds with other parts of the same texts are compared on what all have; seeds of other texts on equally many,
    evenly over each, not on the first ones, which are of one domain."""
    pairs: list[Any] = []
    for texts in (["a", "b", "c", "d"], ["d", "x", "b"]):
        one = {"hashes": texts, "lengths": [40] * len(texts)}
        pairs.append((one, {"hashes": texts[::-1], "lengths": one["lengths"]}))
    assert comparison._aligned(pairs) == [[(1, 2), (3, 0)], [(2, 0), (0, 2)]]
    others = [({"hashes": list(some)}, {"hashes": list(some)}) for some in ("abcdef", "xyz")]
    assert comparison._aligned(others) == [[(0, 0), (2, 2), (4, 4)], [(0, 0), (1, 1), (2, 2)]]
    runs = [run("kl", 0, 1.0), run("tv", 0, 0.5)]
    gains = compare(read_runs(write(tmp_path, runs)), "kl")
    assert {gain.texts for gain in gains} == {30} and " 30 " in gains_table(gains, "kl", {}).splitlines()[1]


def test_a_text_has_one_hash_whatever_its_padding() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 8, 0]])
    texts = Texts(ids, torch.tensor([1, 1]), torch.tensor([3, 3]), ["a", "a"])
    narrow = Texts(ids[:, :3], torch.tensor([1, 1]), torch.tensor([3, 3]), ["a", "a"])
    assert texts.hashes() == narrow.hashes() and len({*texts.hashes()}) == 2


def test_a_missing_folder_or_baseline_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no run"):
        read_runs(tmp_path)
    write(tmp_path, [run("tv", 0, 1.0)])
    assert main(["compare", f"folder={tmp_path}", "baseline=kl"]) == 1
    assert "baseline=kl: no run has this label; the labels are tv" in capsys.readouterr().err
    assert main(["compare", f"folder={tmp_path}", "baseline=loss=kl"]) == 1  # as a sweep labels its runs
    assert "baseline=loss=kl: no run has this label; the labels are tv" in capsys.readouterr().err


SETTINGS: dict[str, Any] = {
    "draft": {"kind": "independent", "layers": 4},
    "init": {"kind": "target_layers"},
    "loss": {"first": "kl"},
    "regime": {"temperature": 1.0},
    "trainer": {"steps": 100, "seed": 0, "threads": 2},
    "label": None,
    "rollout": {"seed": 0, "texts": 600},
    "bench": {"prompts": 3},
    "minutes": None,
    "data": {"path": "a.jsonl"},
}


def labels_of(folder: Path, *changes: str) -> list[str]:
    """Labels of two seeds as they are and one run with the changes, `group.key=value`, all under one label."""
    for index, changed in enumerate([(), ("trainer.seed=1", "rollout.seed=1"), changes]):
        place = folder / str(index)
        place.mkdir()
        settings = json.loads(json.dumps(SETTINGS))
        for change in changed:
            keys, _, value = change.partition("=")
            group, _, key = keys.rpartition(".")
            (settings[group] if group else settings)[key] = 1.0 if value == "1.0" else value
        write_json(place / "held_out.json", run("kl", index, 1.0))
        write_json(place / "run.json", {"cotrain": "0", "state": "finished", "settings": settings})
        (place / "warm").mkdir()  # of a joint training, which is no run
        write_json(place / "warm" / "held_out.json", run("tv", index, 1.0))
    return sorted(read_runs(folder))


@pytest.mark.parametrize(
    "change",
    """draft.kind=hybrid draft.layers=2 init.kind=scratch loss.first=tv regime.temperature=0.5 trainer.steps=9
    rollout.texts=60 minutes=3 data.path=b.jsonl""".split(),
)
def test_runs_of_other_settings_are_not_pooled_under_one_label(tmp_path: Path, change: str) -> None:
    key = change.partition("=")[0]
    group, _, name = key.rpartition(".")
    own = (SETTINGS[group] if group else SETTINGS)[name]
    assert labels_of(tmp_path, change) == sorted([f"kl,{key}={own}", f"kl,{change}"])


@pytest.mark.parametrize(
    "change",  # the last: a setting that went
    "trainer.seed=5 bench.prompts=9 trainer.threads=1 label=other draft.rank=0 loss.hardest=1.0".split(),
)
def test_runs_that_differ_in_seeds_and_measuring_are_pooled(tmp_path: Path, change: str) -> None:
    assert labels_of(tmp_path, change) == ["kl"]


def test_labels_that_cannot_be_compared_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other: Any = run("tv", 0, 1.0)
    other["texts"] = {"0.5": other["texts"]["1"]}
    untrained = {"label": "retrieval", "seed": 0, "texts": {}}
    write(tmp_path, [run("kl", 0, 1.0), other, untrained])
    assert main(["compare", f"folder={tmp_path}", "baseline=kl"]) == 0
    said = capsys.readouterr().out
    assert "left out: retrieval: it is not trained" in said
    assert "left out: tv: it was evaluated at temperatures ['0.5'], the baseline at ['1']" in said
    assert main(["compare", f"folder={tmp_path}", "baseline=retrieval"]) == 0
    assert capsys.readouterr().out.count("left out: ") == 3


def test_a_gain_is_of_sums_over_paired_runs() -> None:
    """Figures of a label are means over its runs; tau and the gain are ratios of sums, at each k of its own."""
    rng = np.random.default_rng(3)

    def judged() -> dict[str, Any]:
        like = dict(zip(comparison.LIKE, rng.uniform(size=4).tolist(), strict=True))
        return {**like, "lengths": [7, 3, 11], "calls": {k: rng.uniform(1, 3, size=3).tolist() for k in ("4", "8")}}

    def run(label: str, seed: int) -> dict[str, Any]:
        return {"label": label, "seed": seed, "texts": {"0": judged(), "1": judged()}}

    runs = {"base": [run("base", s) for s in (0, 1, 2)], "other": [run("other", s) for s in (2, 1)]}
    for gain in comparison.compare(runs, "base"):
        mine, t, k = runs[gain.label], gain.temperature, str(gain.k)
        pairs = [(m, b) for m in mine for b in runs["base"] if m["seed"] == b["seed"]]
        ours, theirs = (sum(sum(pair[side]["texts"][t]["calls"][k]) for pair in pairs) for side in (0, 1))
        assert gain.seeds == len(pairs) and gain.tau == pytest.approx(21 * len(pairs) / ours)
        assert gain.gain == pytest.approx(theirs / ours - 1) and gain.low <= gain.gain <= gain.high
        for name in comparison.LIKE:
            assert getattr(gain, name) == pytest.approx(sum(m["texts"][t][name] for m in mine) / len(mine))
    assert len(comparison.compare(runs, "base")) == 8


def test_a_trained_draft_is_compared_with_its_start_text_by_text() -> None:
    """Of 1,200 tokens. Each text takes .8 of its calls at the start, so the gain of 1 / .8 has no spread."""
    before: dict[str, Any] = run("start", 3, 1.0)["texts"]  # type: ignore[assignment]
    after: dict[str, Any] = run("end", 3, 0.8)["texts"]  # type: ignore[assignment]
    after["1"]["alpha"] = 0.625
    tau = sum(LENGTHS) / sum(before["1"]["calls"]["4"])
    expected = (
        f"since the start, T=1: acceptance 0.500 -> 0.625%s, tau at k=4 {tau:.2f} -> {tau / 0.8:.2f}, +25.0% "
        "[+25.0%, +25.0%] on 30 texts"
    )
    own = " (0.750 on texts of the target that the draft was trained for)"
    assert since_start(before, after, {"1": 0.75}) == [expected.replace("%s", own)]
    assert since_start(before, after, {"0.5": 0.75}) == [expected.replace("%s", "")]
    assert at_start(before, {"1": 0.75}) == [f"at the start, T=1: acceptance 0.500{own}"]


def test_a_drafts_record_is_its_report_or_else_that_of_its_run(tmp_path: Path) -> None:
    """The report is of the exported checkpoint, the run's figures of the last one."""
    draft = tmp_path / "draft"
    draft.mkdir()
    assert own_acceptance(draft) == {}
    write_json(tmp_path / FIGURES, {"texts": {"0.7": {"alpha": 0.25}}})
    assert own_acceptance(draft) == {"0.7": 0.25}
    held = {"alpha_T0.7/all": 0.5, "alpha_T1/all": 0.75, "alpha_T1/code": 0.1, "alpha_greedy_draft_T1/all": 0.2}
    write_json(draft / "report.json", {"extra": {"held_out": held}})
    assert own_acceptance(draft) == {"0.7": 0.5, "1": 0.75}


BROKEN: dict[str, Any] = {
    "seed": [None, "1", [1]],
    "label": [None, 3],
    "texts": [None, [], "x", {"1": None}, {"1": {}}],
    "texts.1.alpha": [None, "0.5", [0.5]],
    "texts.1.lengths": [None, 4, ["a"], [1, 2]],
    "texts.1.calls": [None, {}, {"4": [1.0]}, {"4": None, "8": None}],
    "texts.1.hashes": [3, ["a"], [1, 2]],
}


@pytest.mark.parametrize("key", BROKEN)
@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_broken_file_of_figures_is_named(
    key: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is in it, by all commands that read it; without the key, too."""
    file = write(tmp_path, [run("a", 0, 1.0)]) / "0" / "held_out.json"
    whole = json.loads(file.read_text())
    words = [command, f"folder={tmp_path}" if command == "compare" else f"run={tmp_path / '0'}"]
    assert main(words) == 0
    *path, last = key.split(".")
    optional = last == "hashes"
    for value in [*BROKEN[key], *([] if optional else [...])]:
        figures = json.loads(json.dumps(whole))
        inner = figures
        for name in path:
            inner = inner[name]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
        write_json(file, figures)
        capsys.readouterr()
        assert main(words) == 1, value
        said = capsys.readouterr().err
        assert f"{file} is broken ({key.partition('.')[0]}" in said and "restore it" in said
