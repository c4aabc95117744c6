"""Output folders: one holder, resumed or replaced only where they are ours; files whole or absent."""

import errno
import os
import platform
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inference.drafts import atomic
from inference.drafts.atomic import disk_full, new_file, new_folder, write_atomic
from tests.stopped import stopped_child


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


def test_a_folder_with_files_is_replaced_only_with_replace(tmp_path: Path) -> None:
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


def test_all_that_is_renamed_was_flushed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine that goes down leaves empty files under final names."""
    flushed, moved, fsync = set[int](), list[str](), os.fsync

    def note(handle: int) -> None:
        flushed.add(os.fstat(handle).st_ino)
        fsync(handle)

    def move(done: Callable[..., None], old: Path, new: Path) -> None:
        assert [one for one in (old, *old.rglob("*")) if one.stat().st_ino not in flushed] == []
        moved.append(new.name)
        done(old, new)

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, partial(move, getattr(os, name)))
    monkeypatch.setattr(os, "fsync", note)
    write_atomic(tmp_path / "file", "x")
    with new_folder(tmp_path / "draft") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
    assert moved == ["file", "draft"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_ends_a_writer_leaves_no_temporary(tmp_path: Path, error: type[BaseException]) -> None:
    write_atomic(tmp_path / "file", "old")
    for writer in (new_file, new_folder):
        with pytest.raises(BaseException) as raised, writer(tmp_path / ("file" if writer is new_file else "a")) as new:
            (new / "x" if new.is_dir() else new).write_text("half")
            raise error
        assert raised.type is error and os.listdir(tmp_path) == ["file"]


def test_temporaries_of_other_hosts_stay(tmp_path: Path) -> None:
    """Their processes cannot be asked whether they live; those of a dead process of this host are removed."""
    for host in ("elsewhere", platform.node() or "host"):
        (tmp_path / f".file.{host}-{2**23}-0123abcd.new").touch()
    write_atomic(tmp_path / "file", "x")
    assert sorted(os.listdir(tmp_path)) == [f".file.elsewhere-{2**23}-0123abcd.new", "file"]


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
