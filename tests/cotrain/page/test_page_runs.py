"""Runs of which the page knows less or more: killed with curves, resumed, several judged on the same texts."""

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from cotrain.evaluation.comparison import compare
from cotrain.page.loaded_run import load_runs, read_curves, thinned
from tests.cotrain.evaluation.test_comparison import run as judged
from tests.cotrain.page.test_page import parsed
from tests.cotrain.page.test_page import small as small  # a fixture
from tests.pages import folder, marker


def events(place: Path, name: str, steps: dict[int, float], second: int) -> None:
    """One event file, named as of that second."""
    with SummaryWriter(str(place)) as writer:
        for step, value in steps.items():
            writer.add_scalar(name, value, step)
    (newest,) = [file for file in place.iterdir() if "tfevents" in file.name and not file.name.endswith(".kept")]
    newest.rename(place / f"events.out.tfevents.{second}.kept")


def test_a_repeated_step_has_its_later_value(tmp_path: Path) -> None:
    events(tmp_path, "2_training/loss", {0: 4.0, 5: 3.0, 10: 2.5}, 1)
    events(tmp_path, "2_training/loss", {5: 2.0, 15: 1.0, 20: float("nan")}, 2)
    assert read_curves(tmp_path) == {"2_training/loss": [(0, 4.0), (5, 2.0), (10, 2.5), (15, 1.0)]}
    assert read_curves(tmp_path / "none") == {}


def test_curves_are_read_from_any_folder_in_the_order_of_time(tmp_path: Path) -> None:
    events(tmp_path / "new", "2_training/loss", {5: 2.0}, 2)  # resumed where the folder has another name
    events(tmp_path / "old", "2_training/loss", {0: 4.0, 5: 3.0}, 1)
    assert read_curves(tmp_path) == {"2_training/loss": [(0, 4.0), (5, 2.0)]}
    events(tmp_path, "2_training/loss", {5: 1.0}, 3)
    assert read_curves(tmp_path) == {"2_training/loss": [(0, 4.0), (5, 1.0)]}


def test_an_event_file_cut_short_gives_what_is_whole(tmp_path: Path) -> None:
    events(tmp_path, "2_training/loss", {step: float(step) for step in range(20)}, 1)
    (file,) = tmp_path.iterdir()
    os.truncate(file, file.stat().st_size - 7)
    (curve,) = read_curves(tmp_path).values()
    assert curve == [(step, float(step)) for step in range(19)]


def test_thinned_curves_keep_their_end() -> None:
    curve = [(step, 0.5) for step in range(1001)]
    result = thinned(curve, 100)
    assert len(result) <= 100 and result[-1] == curve[-1] and result == sorted(result)
    assert thinned(curve[:7], 100) == curve[:7]


def test_a_killed_run_shows_how_far_it_came(tmp_path: Path) -> None:
    place = folder(tmp_path / "run", None, run=marker("unfinished", trainer={"steps": 40}))
    events(tmp_path / "run" / "tensorboard", "2_training/loss", {4: 2.0, 9: 1.0}, 1)
    events(tmp_path / "run" / "tensorboard", "4_held_out/acceptance_T1", {0: 0.25, 10: 0.5}, 2)
    page = parsed(place)
    assert "not finished: step 9 of 40; the same command resumes it" in page.texts[""]
    assert "0.250 → 0.500" in page.texts["figures"]
    (loss,) = page.blocks["curve0-0-data"]["data"]
    assert (loss["name"], loss["x"], loss["y"]) == ("loss", [4, 9], [2.0, 1.0])


def test_runs_without_speed_are_compared_by_their_texts(tmp_path: Path) -> None:
    places, result = [], {}
    for name, factor in (("kl", 1.0), ("tv", 0.8)):
        result[name] = judged(name, 0, factor)
        result[name]["texts"]["1"]["calls"]["4"][:9] = [20.0] * 9  # so that the gain is not the same everywhere
        places.append(folder(tmp_path / name, None, held_out=result[name], run=marker("finished")))
    page = parsed(*places)
    assert "no speed was measured in this run (measure=false)" in page.texts[""]
    gains = compare({name: [json.loads(json.dumps(one))] for name, one in result.items()}, "kl")
    for gain in (gain for gain in gains if gain.label == "tv"):
        assert gain.low < gain.gain < gain.high or gain.k != 4
        assert f"{gain.gain:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}]" in page.texts["runs"]
    texts = judged("rkl", 0, 1.0, [40] * 29 + [41])
    other = folder(tmp_path / "rkl", None, held_out=texts, run=marker("finished"))
    assert "evaluated on other texts" in parsed(places[0], other).texts["runs"]


def test_runs_whose_folders_share_a_name_are_told_apart(tmp_path: Path) -> None:
    places = []
    for parent, factor in (("a", 1.0), ("b", 0.8), ("c", 0.9)):
        one = judged(parent, 0, factor)
        (tmp_path / parent).mkdir()
        places.append(folder(tmp_path / parent / "train", None, held_out=one, run=marker("finished")))
    text = parsed(*places).texts["runs"]
    assert "tau over train (1), paired by text" in text and "train (2)" in text and "train (3)" in text


def test_a_report_that_was_changed_is_said(tmp_path: Path) -> None:
    draft = shutil.copytree("data/drafts/smollm2", tmp_path / "draft")
    with warnings.catch_warnings(action="error"):
        load_runs([str(draft)])
    report = json.loads((draft / "report.json").read_text())
    (draft / "report.json").write_text(json.dumps(report))
    for path in (tmp_path, draft, draft / "report.json"):
        with pytest.warns(
            UserWarning, match="report.json is missing, or is not the file that cotrain.json was written with"
        ):
            load_runs([str(path)])
