"""The output folder of a run: held by one process at a time, resumed when unfinished, only ours replaced.

`run.json` marks a folder as ours, names the command that made it and says how far it is; `run.lock` is there while a
process works in it.
"""

import fcntl
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from cotrain import __version__
from cotrain.config.overrides import flat
from cotrain.config.ranges import REMOVED
from cotrain.errors import UserError
from inference.drafts.atomic import write_atomic

State = Literal["new", "unfinished", "finished"]
Judge = Callable[[str, Any, Any], str]  # key, old value, new value -> "free", "longer" or "other"
MARKER, LOCK = "run.json", "run.lock"
UNNAMED = {"bench", "serve_check", "pretrain"}  # commands whose runs keep no settings
WRITTEN = ("output", "export")  # settings that name a folder which a command writes, and may replace
STORES = ("rollout.folder", "trainer.cache", "page", "report")  # paths that are written to and need not exist yet
# Settings of text that is no path. Every other one is taken for a path, so that a new one is guarded too.
WORDS = frozenset({
    "quantisation.kind", "draft.kind", "draft.quantisation", "init.kind", "loss.first", "loss.then", "objective",
    "data.column", "data.split", "data.config", "rollout.url", "trainer.precision", "trainer.accelerator",
    "trainer.strategy", "trainer.logger", "bench.draft_dtype", "matrix.targets", "matrix.drafts", "target.dtype",
    "verify", "label", "kind", "baseline", "engine", "layout", "push_to_hub", "url", "model", "prompt",
    "pretraining.precision",
})  # fmt: skip


@dataclass
class RunFolder:
    """A claimed folder: `path`, and its `state` before the claim."""

    path: Path
    state: State
    settings: dict[str, Any]
    command: str
    changed: tuple[str, ...] = ()  # settings of a finished run that come too late, and change nothing

    def finish(self) -> None:
        """Mark the run finished; a later claim without `overwrite` finds it so."""
        _mark(self.path, "finished", self.settings, self.command)


def refuse_overlap(command: str, values: Mapping[str, Any]) -> None:
    """Raise UserError, naming the key to change, before a command touches anything, where what it reads lies in a
    folder that it writes, or that folder in what it reads; and for an output that another command made.

    values: all settings of `command`, nested. Paths are compared as they are, with symbolic links resolved, and by what
    a draft folder names: its target, adapter and datastore.
    """
    settings = dict(flat(dict(values)))
    if isinstance(settings.get("check"), str):  # of cotrain export, which then writes nothing
        return
    written = {key: str(settings[key]) for key in WRITTEN if settings.get(key)}
    for key, folder in written.items():
        _refuse_other_command(command, key, Path(folder))
    named = [(key, path) for key, value in settings.items() if key not in WRITTEN for path in _paths(key, value)]
    inputs = [(f"{key}={path}", path) for key, path in [*named, *written.items()]]
    inputs += [(f"{other}, which {key}={path} names,", other) for key, path in named for other in _named_by(Path(path))]
    for key, folder in written.items():
        for name, path in inputs:
            if name == f"{key}={folder}":
                continue
            if any(_within(place, folder) for place in (path, *_entries(path))):
                raise UserError(f"{name} lies in {key}={folder}, which the command writes: name another {key}=")
            if Path(path).is_dir() and _within(folder, path):
                raise UserError(f"{key}={folder} lies in {name} which the command reads: name another {key}=")


def _refuse_other_command(command: str, key: str, folder: Path) -> None:
    """A folder that was marked before the marker named its command is of `train` if it has settings."""
    marker = read_marker(folder)
    if marker is None:
        return
    makers = {marker["command"]} if "command" in marker else {"train"} if marker.get("settings") else UNNAMED
    if key != "output" or command not in makers:
        raise UserError(f"{key}={folder} holds a run of cotrain {' or '.join(sorted(makers))}: name another folder "
                        "(overwrite=true replaces only what the same command made)")  # fmt: skip


def refuse_replaced(path: str | Path, name: str, text: str = "", key: str = "output") -> None:
    """Raise UserError for a folder with files that a command would replace, but not its own: the command writes the
    file `name`, which holds `text`."""
    file = Path(path) / name
    if not Path(path).is_dir() or not any(Path(path).iterdir()):
        return
    if not file.is_file() or text not in file.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{key}={path} holds files, but no {name} that this command wrote: name another folder (a "
                        "command replaces only what it made)")  # fmt: skip


def _paths(key: str, value: object) -> list[str]:
    """The paths that a setting names: what is there, and what a store will be."""
    if key in WORDS or key.startswith("data.template"):
        return []
    texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str) and one]
    present = [text for text in texts if key in STORES or os.path.lexists(text)]
    return present + [path for text in texts if text not in present for path in glob.glob(text, recursive=True)]


def _named_by(folder: Path) -> list[str]:
    """The target, adapter and datastore of a draft folder, those that are on this machine."""
    named: list[object] = []
    for file, outer, inner in (
        ("cotrain.json", "target", "name"), ("cotrain.json", "made", "adapter"), ("config.json", "lookup", "datastore"),
    ):  # fmt: skip
        with suppress(OSError, ValueError, AttributeError):  # no draft folder
            named.append((json.loads((folder / file).read_text(encoding="utf-8")).get(outer) or {}).get(inner))
    return [path for path in named if isinstance(path, str) and os.path.lexists(path)]


def _entries(path: str) -> list[str]:
    """The symbolic links in an input folder."""
    return [entry.path for entry in os.scandir(path) if entry.is_symlink()] if Path(path).is_dir() else []


def _within(path: str, folder: str) -> bool:
    """Whether a path, or what it links to, lies in a folder or is that folder."""
    place, root = Path(path).absolute(), os.path.realpath(folder)
    link = Path(os.path.realpath(place.parent), place.name)  # itself, wherever it points
    return link.is_relative_to(root) or Path(os.path.realpath(place)).is_relative_to(root)


@contextmanager
def claim(
    path: str | Path,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
    kind: Judge | None = None,
    command: str = "train",
) -> Iterator[RunFolder]:
    """Hold the output folder `path` of a run until the block ends; `finish()` marks the run done.

    An absent or empty folder is made "new"; a run of ours comes back "unfinished" (to resume) or "finished",
    or, with `overwrite`, emptied and "new". `settings` (JSON values) are what makes it this run: they are
    kept in `run.json` and, where given, must be the same when the folder is claimed again, but for those that `kind`
    (of key, old and new value) calls "free", or "longer": a finished run is then "unfinished" again.

    Raises UserError, naming the key to change, when another process holds the folder, when it holds files
    that are not ours (with `overwrite` too: they are never deleted), or when the settings differ.
    """
    path = Path(path)
    wanted = None if settings is None else json.loads(json.dumps(dict(settings)))  # tuples become lists
    _make(path)
    with _locked(path):
        run = _open(path, overwrite, wanted, kind or (lambda *_: "other"), command)
        if run.state == "new":
            _mark(path, "unfinished", run.settings, command)
        try:
            yield run
        except BaseException:
            if run.state == "new" and {entry.name for entry in path.iterdir()} <= {MARKER, LOCK}:
                (path / MARKER).unlink()  # nothing was made: other settings may take the folder
            raise


def refuse(
    path: str | Path, overwrite: bool = False, settings: Mapping[str, Any] | None = None, kind: Judge | None = None
) -> State:
    """Raise UserError where `claim` would, and change nothing: what a command asks before minutes of work. Returns the
    state that `claim` would find."""
    path = Path(path)
    _usable(path)
    if (path / LOCK).exists():
        with _locked(path):
            pass
    state: State = "new"
    marker = read_marker(path)
    if marker is not None and not overwrite and marker["state"] != "emptying":
        wanted = marker["settings"] if settings is None else json.loads(json.dumps(dict(settings)))
        changed = _compare(path, marker["settings"], wanted, kind or (lambda *_: "other"))
        state = "unfinished" if "longer" in changed.values() else marker["state"]
    writable("output", path)
    return state


def writable(key: str, path: str | Path) -> None:
    """Raise UserError, naming the key, where a file or folder could not be made or written to. Leaves nothing."""
    path = Path(path)
    try:
        place = path.absolute().parent if path.is_file() else path.absolute()
        while not place.exists() and not place.is_symlink():
            place = place.parent
        with TemporaryDirectory(prefix=".cotrain-", dir=place):
            pass
    except OSError as error:
        raise UserError(f"{key}={path} cannot be written ({error.strerror}): name another place") from error


@contextmanager
def held(path: str | Path) -> Iterator[Path]:
    """Hold a folder that is no run and may hold others' files: made where it is absent, used by one process."""
    path = Path(path)
    _folder(path)
    with _locked(path):
        yield path


def finished(path: str | Path) -> bool:
    """Whether the folder holds a run that is done."""
    marker = read_marker(Path(path))
    return marker is not None and marker["state"] == "finished"


def _make(path: Path) -> None:
    _usable(path)
    _folder(path)


def _folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output={path} cannot be written ({error.strerror}): name another place") from error


def _usable(path: Path) -> None:
    """Raise UserError if the path is a file, or a folder with files that cotrain did not write."""
    if path.exists() and not path.is_dir():
        raise UserError(f"output={path} is a file: name a folder")
    if path.is_dir() and _foreign(path):
        raise UserError(
            f"output={path} holds files but no {MARKER} of cotrain: name another folder"
            " (overwrite=true replaces only runs of cotrain)"
        )


def _open(path: Path, overwrite: bool, settings: dict[str, Any] | None, kind: Judge, command: str) -> RunFolder:
    """The run in the folder `path`, which this process holds; emptied where it is to be replaced."""
    marker = read_marker(path)
    if marker is not None and (overwrite or marker["state"] == "emptying"):
        _empty(path, marker["settings"], command)
        marker = None
    if marker is None:
        return RunFolder(path, "new", settings or {}, command)
    if settings is None:
        return RunFolder(path, marker["state"], marker["settings"], command)
    changed = _compare(path, marker["settings"], settings, kind)
    state: State = "unfinished" if "longer" in changed.values() else marker["state"]
    if state == "finished":
        return RunFolder(path, state, marker["settings"], command, tuple(changed))
    if changed:
        _mark(path, state, settings, command)
    return RunFolder(path, state, settings, command)


def _compare(path: Path, before: dict[str, Any], wanted: dict[str, Any], kind: Judge) -> dict[str, str]:
    """The changed settings, by key, with the kind of change. Raises UserError if one makes it another run."""
    old, new = ({key: value for key, value in flat(values) if not isinstance(value, dict)}
                for values in (before, wanted))  # fmt: skip
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    kinds = {key: kind(key, old.get(key), new.get(key)) for key in keys}
    if "other" in kinds.values():
        changes = ", ".join(f"{key}={old.get(key)} (now {new.get(key)})" for key in keys if kinds[key] == "other")
        raise UserError(f"output={path} holds a run with {changes}: name another folder, or overwrite=true")
    # a free setting that the run does not name is newer than the run
    return {key: change for key, change in kinds.items() if key in old or change != "free"}


def _empty(path: Path, settings: Mapping[str, Any], command: str) -> None:
    """Delete all but marker and lock. The marker says so first: killed half-way, the next claim goes on."""
    _mark(path, "emptying", settings, command)
    for entry in path.iterdir():
        if entry.name in (MARKER, LOCK):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _foreign(path: Path) -> bool:
    """Whether `path` holds files without our marker; a lock or a half-written marker alone is ours."""
    ours = all(entry.name == LOCK or entry.name.startswith(f".{MARKER}.") for entry in path.iterdir())
    return not ours and read_marker(path) is None


def read_marker(path: Path) -> dict[str, Any] | None:
    """The content of the marker in `path`, without settings that no longer exist and changed nothing; None if there is
    no marker, or one of another program."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not isinstance(marker, dict) or "cotrain" not in marker:
        return None
    for key, neutral in REMOVED.items():
        group, _, name = key.partition(".")
        values = (marker.get("settings") or {}).get(group) or {}
        if values.get(name) == neutral:
            del values[name]
    return marker


def _mark(path: Path, state: str, settings: Mapping[str, Any], command: str) -> None:
    marker = {"cotrain": __version__, "command": command, "state": state, "settings": settings}
    write_atomic(path / MARKER, json.dumps(marker, indent=2) + "\n")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold `run.lock`. The system frees the lock of a dead process, so a file left behind stops nobody."""
    file = path / LOCK
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 100).decode().strip() or "another process"
            os.close(handle)
            message = f"output={path} is in use by {holder}: wait for it, or name another folder"
            raise UserError(message) from None
        if _is(file, handle):
            break
        os.close(handle)  # its holder ended and removed it between our open and our lock
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()}\n".encode(), 0)
        yield
    finally:
        with suppress(OSError):  # left behind, it stops nobody
            file.unlink()
        os.close(handle)


def _is(file: Path, handle: int) -> bool:
    """Whether the open `handle` is still the file of that name."""
    try:
        return os.path.samestat(file.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
