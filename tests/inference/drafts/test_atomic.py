"""Output folders: one holder, resumed or replaced only where they are ours; files whole or absent."""

import errno
import json
import multiprocessing
import os
import platform
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cotrain.errors import UserError
from cotrain.run_folder import LOCK, MARKER, claim
from inference.drafts import atomic
from inference.drafts.atomic import disk_full, new_folder, write_atomic


@contextmanager
def stopped_child(work: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """The pid of a process that runs `work(stop)` and has come to its call of `stop`; killed at the end."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def stop(connection: Connection = there) -> None:
        connection.send("here")
        signal.pause()

    child = context.Process(target=work, args=(stop,))
    child.start()
    try:
        assert here.poll(20)
        yield child.pid
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.join()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow past 1000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def tree(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


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


def test_a_failed_run_is_unfinished(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claim(tmp_path):
        (tmp_path / "made").write_text("")
        raise RuntimeError
    with claim(tmp_path) as run:
        assert run.state == "unfinished"


def test_a_run_that_failed_before_it_made_anything_leaves_the_folder_free(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claim(tmp_path, settings={"seed": 0}):
        raise RuntimeError
    with claim(tmp_path, settings={"seed": 1}) as run:
        assert run.state == "new"


def test_overwrite_empties_what_is_ours_and_follows_no_link(tmp_path: Path) -> None:
    path, kept = finished(tmp_path / "run"), tmp_path / "kept"
    (path / "sub").mkdir()
    kept.mkdir()
    (kept / "file").write_text("mine")
    (path / "link").symlink_to(kept)
    with claim(path, overwrite=True) as run:
        assert run.state == "new"
        assert sorted(entry.name for entry in path.iterdir()) == [MARKER, LOCK]
    assert tree(kept) == {"file": "mine"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", MARKER])
def test_a_folder_of_others_is_refused(tmp_path: Path, overwrite: bool, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="no run.json of cotrain"), claim(tmp_path, overwrite):
        pass
    assert tree(tmp_path) == {name: "{}"}


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"), claim(tmp_path / "file", overwrite=True):
        pass


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    finished(tmp_path / "run", loss={"first": "kl", "switch": (1, 2)}, seed=0)
    with pytest.raises(UserError, match=r"loss.first=kl \(now tv\): name") as refused:
        with claim(tmp_path / "run", settings={"loss": {"first": "tv", "switch": (1, 2)}, "seed": 0}):
            pass
    assert "seed" not in str(refused.value)
    with claim(tmp_path / "run") as run:
        assert run.settings == {"loss": {"first": "kl", "switch": [1, 2]}, "seed": 0}


def test_a_killed_overwrite_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = finished(tmp_path / "run")
    write_atomic(path / "sub" / "checkpoint", "old")
    monkeypatch.setattr(shutil, "rmtree", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), claim(path, overwrite=True):
        pass
    monkeypatch.undo()
    with claim(path) as run:
        assert (run.state, (path / "sub").exists()) == ("new", False)


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


def test_a_lock_removed_between_open_and_lock_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder ended just then: to hold the removed file would let a third process in."""
    taken = []

    def open_then_lose(file: Path, *arguments: int) -> int:
        handle = os_open(file, *arguments)
        if Path(file).name == LOCK and not taken:
            taken.append(os.unlink(file))
        return handle

    os_open = os.open
    monkeypatch.setattr(os, "open", open_then_lose)
    with claim(tmp_path), pytest.raises(UserError, match="in use"), claim(tmp_path):
        pass


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path, link = tmp_path / "new" / "file", tmp_path / "link"
    write_atomic(path, "é\r\n")
    link.symlink_to(path)
    write_atomic(link, b"\0")
    assert (path.read_bytes(), link.is_symlink()) == (b"\0", True)
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    assert path.stat().st_mode == (tmp_path / "new").stat().st_mode & 0o666 | 0o100000


def test_a_full_disk_leaves_the_old_file_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    with pytest.raises(OSError) as failed, full_disk():
        write_atomic(path, "n" * 2000)
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, str(path))
    assert tree(tmp_path) == {"file": "old"}


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def work(stop: Callable[[], None]) -> None:
        monkeypatch.setattr(os, "fsync", lambda handle: stop())
        write_atomic(path, "new")

    with stopped_child(work):
        assert sorted(tree(tmp_path).values()) == ["new", "old"]  # the new one under a temporary name
        write_atomic(tmp_path / "file", "other")  # does not disturb the living
        assert sorted(tree(tmp_path).values()) == ["new", "other"]
    write_atomic(path, "next")
    assert tree(tmp_path) == {"file": "next"}


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "a" / "draft"
    with new_folder(final) as new:
        (new / "sub").mkdir()
        (new / "sub" / "file").write_text("x")
        (new / "sub" / "file").chmod(0o600)
        assert not final.exists()
    assert tree(tmp_path) == {"a/draft/sub/file": "x"}
    assert (final / "sub" / "file").stat().st_mode & 0o777 == final.stat().st_mode & 0o666


def test_a_folder_with_files_is_replaced_only_when_asked(tmp_path: Path) -> None:
    final = tmp_path / "draft"
    final.mkdir()
    for text in ("one", "two"):
        with new_folder(final, replace=text == "two") as new:
            (new / text).write_text(text)
        assert tree(tmp_path) == {f"draft/{text}": text}
    with pytest.raises(FileExistsError, match="not empty"), new_folder(final):
        pass
    with pytest.raises(NotADirectoryError), new_folder(final / "two", replace=True):
        pass
    assert tree(tmp_path) == {"draft/two": "two"}


def test_a_folder_filled_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), new_folder(tmp_path / "draft") as new:
        (new / "file").write_text("late")
        write_atomic(tmp_path / "draft" / "file", "first")
    assert tree(tmp_path) == {"draft/file": "first"}


def pickled(file: Path) -> None:
    torch.save(torch.zeros(2000), file)


def tensors(file: Path) -> None:
    save_file({"a": torch.zeros(2000)}, file)


@pytest.mark.parametrize("save", [pickled, tensors, lambda file: file.write_text("n" * 2000)])
def test_a_full_disk_leaves_the_old_folder_and_is_named(tmp_path: Path, save: Callable[[Path], None]) -> None:
    final = tmp_path / "draft"
    write_atomic(final / "file", "old")
    with pytest.raises(OSError) as failed, full_disk(), new_folder(final, replace=True) as new:
        save(new / "file")
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, str(final))
    assert tree(tmp_path) == {"draft/file": "old"}


def test_other_errors_are_no_full_disk() -> None:
    assert [disk_full(error) for error in (OSError(errno.EACCES, "x"), RuntimeError("error 28"))] == [False, False]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_killed_replacement_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Killed before its first rename, or between the two."""
    final = tmp_path / "draft"
    write_atomic(final / "file", "old")

    def work(stop: Callable[[], None]) -> None:
        rename, done = os.rename, []
        monkeypatch.setattr(
            os, "rename", lambda *places: stop() if len(done) == renames else done.append(rename(*places))
        )
        with new_folder(final, replace=True) as new:
            (new / "file").write_text("new")

    with stopped_child(work):
        pass
    with pytest.raises(FileExistsError), new_folder(final):
        pass
    assert tree(tmp_path) == {"draft/file": "old"}


def test_a_failed_swap_brings_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "draft"
    write_atomic(final / "file", "old")
    rename = os.rename

    def refuse_new(source: Path, place: Path) -> None:
        if str(source).endswith(".new"):
            raise PermissionError(errno.EACCES, "no", str(place))
        rename(source, place)

    monkeypatch.setattr(atomic.os, "rename", refuse_new)
    with pytest.raises(PermissionError), new_folder(final, replace=True) as new:
        (new / "file").write_text("new")
    assert tree(tmp_path) == {"draft/file": "old"}


def test_the_marker_holds_state_and_settings(tmp_path: Path) -> None:
    marker = json.loads((finished(tmp_path / "run", seed=1) / MARKER).read_text())
    assert (marker["state"], marker["settings"]) == ("finished", {"seed": 1})


@pytest.mark.parametrize(("raised", "left"), [(ProcessLookupError, False), (PermissionError, True), (None, True)])
def test_what_a_writer_left_is_cleared_once_it_is_dead_whoever_it_was(
    raised: type[OSError] | None, left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / f".file.{platform.node() or 'host'}-{os.getpid()}-00000000.new"
    other.write_text("half")

    def signalled(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), 0)  # asked, not ended
        if raised:
            raise raised

    monkeypatch.setattr(atomic.os, "kill", signalled)
    write_atomic(tmp_path / "file", "whole")
    assert (tmp_path / "file").read_text() == "whole" and other.exists() == left
