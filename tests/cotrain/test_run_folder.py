"""Output folders of commands: one process at a time, resumed or replaced only if they are its own."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cotrain.config.names import ANY, REMOVED
from cotrain.errors import UserError
from cotrain.run_folder import LOCK, MARKER, REPLACED, claim, read_marker, resumable
from inference.drafts.atomic import write_atomic, write_json
from tests.inference.drafts.test_atomic import tree
from tests.stopped import stopped_child


def finished(path: Path, **settings: object) -> Path:
    with claim(path, settings=settings) as run:
        (path / "weights").write_text("w")
        run.finish()
    return path


def test_a_run_goes_from_new_to_unfinished_to_finished(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b, c"
    with claim(path) as run:
        assert (run.state, (path / LOCK).read_text()) == ("new", f"process {os.getpid()}\n")
    with claim(path) as run:
        assert run.state == "unfinished"
        run.finish()
    with claim(path) as run:
        assert run.state == "finished"
    assert [entry.name for entry in path.iterdir()] == [MARKER]


@pytest.mark.parametrize("command", ["bench", "plan", "pretrain"])
def test_a_repeated_measurement_keeps_the_earlier_one(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, keeps = tmp_path / "out", command != "pretrain"
    for number, overwrite in ((1, False), (2, False), (3, True), (4, False)):
        with claim(path, overwrite, command=command) as run:
            assert run.state == ("finished" if number in (2, 4) and not keeps else "new")
            (path / "report.json").write_text(str(number))
            run.finish()
    said, kept = capsys.readouterr().err, {"out-1": "1", "out-2": "3", "out": "4"} if keeps else {"out": "4"}
    assert {one.name: (one / "report.json").read_text() for one in tmp_path.iterdir()} == kept
    assert all(read_marker(one)["state"] == "finished" for one in tmp_path.iterdir())
    assert said.count("has an earlier result, which is kept in") == 2 * keeps
    with pytest.raises(RuntimeError), claim(path, command=command):
        raise RuntimeError  # before it wrote anything
    with claim(path, command=command) as run:
        assert run.state == ("new" if keeps else "finished")
    assert len([*tmp_path.iterdir()]) == 4 * keeps or not keeps


def test_a_failed_run_is_unfinished(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claim(tmp_path):
        (tmp_path / "made").write_text("")
        raise RuntimeError
    with claim(tmp_path) as run:
        assert run.state == "unfinished"


def test_a_run_that_failed_before_it_wrote_anything_leaves_the_folder_free(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claim(tmp_path, settings={"seed": 0}):
        raise RuntimeError
    with claim(tmp_path, settings={"seed": 1}) as run:
        assert run.state == "new"


def test_overwrite_empties_what_is_ours_and_follows_no_link(tmp_path: Path) -> None:
    path, elsewhere = finished(tmp_path / "run"), tmp_path / "elsewhere"
    (path / "sub").mkdir()
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    (path / "link").symlink_to(elsewhere)
    with claim(path, overwrite=True) as run:
        assert run.state == "new"
        assert sorted(entry.name for entry in path.iterdir()) == [REPLACED, MARKER, LOCK]
        assert (path / REPLACED / "link").is_symlink()
        run.finish()
    assert [entry.name for entry in path.iterdir()] == [MARKER]
    assert tree(elsewhere) == {"file": "mine"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", MARKER])
def test_a_folder_of_others_is_rejected(tmp_path: Path, overwrite: bool, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="no run.json of cotrain"), claim(tmp_path, overwrite):
        pass
    assert tree(tmp_path) == {name: "{}"}


def test_a_marker_that_is_cut_short_is_named(tmp_path: Path) -> None:
    text = (finished(tmp_path / "run", seed=0) / MARKER).read_text()
    for rest in (text[:-5], ""):
        (tmp_path / "run" / MARKER).write_text(rest)
        for overwrite in (False, True):
            with pytest.raises(UserError, match=rf"^{tmp_path / 'run' / MARKER} is broken \("):
                with claim(tmp_path / "run", overwrite, {"seed": 0}):
                    pass
        assert (tmp_path / "run" / "weights").exists()


def test_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"), claim(tmp_path / "file", overwrite=True):
        pass


def test_other_settings_are_rejected_by_name(tmp_path: Path) -> None:
    finished(tmp_path / "run", loss={"first": "kl", "switch": (1, 2)}, seed=0)
    with pytest.raises(UserError, match=r"loss.first=kl \(now tv\): name") as error:
        with claim(tmp_path / "run", settings={"loss": {"first": "tv", "switch": (1, 2)}, "seed": 0}):
            pass
    assert "seed" not in str(error.value)
    with claim(tmp_path / "run") as run:
        assert run.settings == {"loss": {"first": "kl", "switch": [1, 2]}, "seed": 0}


def test_a_setting_that_went_and_changed_nothing_is_no_difference(tmp_path: Path) -> None:
    """A finished run that names it is the same run; at another value it is another."""
    for key, removed in REMOVED.items():
        group, _, name = key.partition(".")
        for had in ({name: True if removed.neutral is ANY else removed.neutral}, {}):
            path = finished(tmp_path / f"{key} {len(had)}", **{group: {"first": "kl", **had}})
            with claim(path, settings={group: {"first": "kl"}}) as run:
                assert (run.state, run.changed) == ("finished", ()), key
    for number, settings in enumerate(({"loss": "kl"}, {"loss": ["kl"]}, None)):  # of other programs or versions
        (place := tmp_path / str(number)).mkdir()
        marker = {"cotrain": "0", "state": "finished", "settings": settings}
        write_json(place / "run.json", marker)
        assert read_marker(place) == marker
    (tmp_path / "folder" / "run.json").mkdir(parents=True)
    assert read_marker(tmp_path / "folder") is None
    finished(tmp_path / "other", loss={"first": "kl", "hardest": 0.5})
    with (
        pytest.raises(UserError, match="loss.hardest=0.5"),
        claim(tmp_path / "other", settings={"loss": {"first": "kl"}}),
    ):
        pass


def test_a_replaced_run_is_kept_until_the_new_one_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever ends the attempts to replace it, and whatever these wrote."""
    path = finished(tmp_path / "run", seed=0)
    for seed in (1, 2):
        with pytest.raises(RuntimeError), claim(path, True, {"seed": seed}):
            (path / "weights").write_text("of an attempt")
            raise RuntimeError
        assert (path / REPLACED / "weights").read_text() == "w"
        assert read_marker(path / REPLACED)["settings"] == {"seed": 0}
        assert f"is kept in {path / REPLACED} until" in capsys.readouterr().err
        assert resumable(path, {"seed": seed}) and not resumable(path, {"seed": 0})
    with claim(path, settings={"seed": 2}) as run:
        assert (run.state, (path / "weights").read_text()) == ("unfinished", "of an attempt")
        run.finish()
    assert not (path / REPLACED).exists() and not resumable(path, {"seed": 2})


@pytest.mark.parametrize("command", ["bench", "serve_check"])
def test_another_measurement_keeps_what_a_stopped_one_was_to_replace(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out"
    for text, overwrite in (("old", False), ("stopped", True), ("new", False)):
        with suppress(KeyboardInterrupt), claim(path, overwrite, command=command) as run:
            (path / "report.json").write_text(text)
            if text == "stopped":
                raise KeyboardInterrupt
            run.finish()
    assert {name: files["report.json"] for name in ("out", "out-1") if (files := tree(tmp_path / name))} == {
        "out": "new",
        "out-1": "old",
    }
    assert f"is kept in {tmp_path / 'out-1'}" in capsys.readouterr().err and not (path / REPLACED).exists()


def test_a_killed_overwrite_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = finished(tmp_path / "run")
    write_atomic(path / "sub" / "checkpoint", "old")
    rename, renamed = Path.rename, list[Path]()

    def killed(self: Path, target: Path) -> Path:
        renamed.append(target)
        return rename(self, target) if len(renamed) < 2 else 1 / 0

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(ZeroDivisionError), claim(path, overwrite=True):
        pass
    monkeypatch.undo()
    again = shutil.copytree(path, tmp_path / "again")
    for place, overwrite, kept in ((path, True, path / REPLACED), (again, False, tmp_path / "again-1")):
        with claim(place, overwrite) as run:
            assert (run.state, (place / "sub").exists()) == ("new", False)
            assert tree(kept).keys() == {MARKER, "weights", "sub/checkpoint"}
            assert read_marker(kept)["state"] == "finished"


def test_a_running_process_keeps_its_folder_and_a_dead_one_does_not(tmp_path: Path) -> None:
    def work(stop: Callable[[], None]) -> None:
        with claim(tmp_path):
            stop()

    with stopped_child(work) as pid:
        for overwrite in (False, True):
            with pytest.raises(UserError, match=f"in use by process {pid}:"), claim(tmp_path, overwrite):
                pass
    assert (tmp_path / LOCK).exists()
    with claim(tmp_path) as run:
        assert (run.state, (tmp_path / LOCK).read_text()) == ("unfinished", f"process {os.getpid()}\n")


def test_a_lock_removed_between_open_and_lock_is_locked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder ended just then: to hold the removed file would let a third process in."""
    unlinked = []

    def open_then_lose(file: Path, *arguments: int) -> int:
        handle = os_open(file, *arguments)
        if Path(file).name == LOCK and not unlinked:
            unlinked.append(os.unlink(file))
        return handle

    os_open = os.open
    monkeypatch.setattr(os, "open", open_then_lose)
    with claim(tmp_path), pytest.raises(UserError, match="in use"), claim(tmp_path):
        pass


@pytest.mark.parametrize("changes", [{"state": None}, {"state": "done"}, {"state": ["finished"]}, {"settings": [1]}])
def test_a_marker_that_cotrain_did_not_write_is_named(changes: dict[str, object], tmp_path: Path) -> None:
    """By all that read it, and without its state too."""
    path = finished(tmp_path / "run", k=1)
    marker = read_marker(path)
    without = {key: value for key, value in marker.items() if key != "state"}
    for value in (marker | changes, without):
        write_json(path / MARKER, value)
        for read in (lambda: read_marker(path), lambda: resumable(path, {"k": 1}), lambda: finished(path, k=1)):
            with pytest.raises(UserError, match=f"{path / MARKER} is broken .state .*another folder"):
                read()
