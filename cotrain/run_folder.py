"""The output folder of a run. One process uses it at a time, an unfinished run is resumed, and only runs are replaced.

`run.json`, the marker, shows that a folder has a run of cotrain, and stores its command and state. `run.lock` is locked
while a process works in the folder.
"""

import fcntl
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from cotrain import __version__
from cotrain.config.base import Mark, marked
from cotrain.config.names import ANY, REMOVED
from cotrain.config.settings import SCHEMAS, flat
from cotrain.errors import UserError, warn
from inference.drafts.atomic import write_json

State = Literal["new", "unfinished", "finished"]
Judge = Callable[[str, Any, Any], str]  # (key, old value, new value) -> "free", "longer" or "other", see `claim`
MARKER, LOCK = "run.json", "run.lock"
STATES = ("unfinished", "finished", "emptying")  # of a marker
REPLACED = "replaced"  # in a folder: the run that overwrite=true replaces, until the new one is finished
UNNAMED = {"bench", "serve_check"}  # commands that store no settings in the marker
# commands that measure anew each time, and keep what was measured before
REPEATED = {"bench", "plan", "serve_check", "audit"}


@dataclass
class RunFolder:
    """A claimed output folder. state: the state of its run when the folder was claimed: "new", "unfinished" or
    "finished"."""

    path: Path
    state: State
    settings: dict[str, Any]
    command: str
    changed: tuple[str, ...] = ()  # settings that differ from those of a finished run, and have no effect any more

    def finish(self) -> None:
        """Mark the run as finished, and delete the run that it replaces."""
        _mark(self.path, "finished", self.settings, self.command)
        shutil.rmtree(self.path / REPLACED, ignore_errors=True)


def refuse_overlap(command: str, values: Mapping[str, Any]) -> None:
    """Raise UserError, which names the key to change, if a folder that `command` writes contains one of its inputs,
    lies in one, or has a run of another command.

    values: all settings of `command`, nested. Inputs are the paths in them, and the target, adapter and datastore that
    draft folders name. Paths are compared both with and without resolving symbolic links.
    """
    settings = dict(flat(dict(values)))
    if isinstance(settings.get("check"), str):  # of cotrain export, which then writes nothing
        return
    paths, outputs = (marked(SCHEMAS[command], *marks) for marks in ((Mark.PATH, Mark.STORE), (Mark.OUTPUT,)))
    stores = marked(SCHEMAS[command], Mark.STORE)
    written = {key: str(settings[key]) for key in outputs if settings.get(key)}
    for key, folder in written.items():
        _refuse_other_command(command, key, Path(folder))
    named = [(key, path) for key in settings if key in paths for path in _paths(settings[key], key in stores)]
    inputs = [(f"{key}={path}", path) for key, path in [*named, *written.items()]]
    inputs += [(f"{other}, which {key}={path} names,", other) for key, path in named for other in _named_by(Path(path))]
    for key, folder in written.items():
        for name, path in inputs:
            if name == f"{key}={folder}":
                continue
            if any(_within(place, folder) for place in (path, *_entries(path))):
                raise UserError(f"{name} lies in {key}={folder}, which the command writes: name another {key}=")
            if Path(path).is_dir() and _within(folder, path):
                raise UserError(f"{key}={folder} lies in {name}, which the command reads: name another {key}=")


def _refuse_other_command(command: str, key: str, folder: Path) -> None:
    """Raise UserError if the folder has a run of another command. The marker of an older version names no command: with
    settings it counts as a run of `train`, without as one of `UNNAMED`."""
    marker = read_marker(folder)
    if marker is None:
        return
    makers = {marker["command"]} if "command" in marker else {"train"} if marker.get("settings") else UNNAMED
    if key != "output" or command not in makers:
        raise UserError(
            f"{key}={folder} has a run of cotrain {' or '.join(sorted(makers))}: name another folder "
            "(overwrite=true replaces only folders of the same command)"
        )


def refuse_replaced(path: str | Path, name: str, written: Sequence[str], text: str = "", key: str = "output") -> None:
    """Raise UserError if the folder `path` has files that this command did not write, so that they would be lost.

    name: a file that every folder of this command has, and which contains `text`. written: patterns for the names of
    the command's other files. key: the setting that names the folder, for the message.
    """
    file = Path(path) / name
    if not Path(path).is_dir() or not any(Path(path).iterdir()):
        return
    if not file.is_file() or text not in file.read_text(encoding="utf-8", errors="replace"):
        raise UserError(
            f"{key}={path} has files, but no {name} that this command wrote: name another folder (a "
            "command replaces only its own folders)"
        )
    for entry in Path(path).iterdir():
        if not any(fnmatch(entry.name, pattern) for pattern in (name, *written)):
            raise UserError(
                f"{entry} was not written by this command, which would delete it: move it, or name another {key}="
            )


def _paths(value: object, absent: bool) -> list[str]:
    """Return the paths in a setting's value: existing paths, and the matches of a glob pattern. absent: whether paths
    that do not exist are returned too."""
    texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str) and one]
    present = [text for text in texts if absent or os.path.lexists(text)]
    return present + [path for text in texts if text not in present for path in glob.glob(text, recursive=True)]


def _named_by(folder: Path) -> list[str]:
    """Return the target, adapter and datastore that a draft folder names, if they are on this machine."""
    named: list[object] = []
    for file, outer, inner in (
        ("cotrain.json", "target", "name"),
        ("cotrain.json", "made", "adapter"),
        ("config.json", "lookup", "datastore"),
    ):
        with suppress(OSError, ValueError, AttributeError):  # not a draft folder
            named.append((json.loads((folder / file).read_text(encoding="utf-8")).get(outer) or {}).get(inner))
    return [path for path in named if isinstance(path, str) and os.path.lexists(path)]


def _entries(path: str) -> list[str]:
    """Return the paths of the symbolic links in a folder; [] for a file."""
    return [entry.path for entry in os.scandir(path) if entry.is_symlink()] if Path(path).is_dir() else []


def _within(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or lies in it. If `path` is a symbolic link, the file or folder that it points
    to is tested too."""
    place, root = Path(path).absolute(), os.path.realpath(folder)
    link = Path(os.path.realpath(place.parent), place.name)  # the link itself, only its parents resolved
    return link.is_relative_to(root) or Path(os.path.realpath(place)).is_relative_to(root)


@contextmanager
def claim(
    path: str | Path,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
    kind: Judge = lambda *_: "other",
    command: str = "train",
) -> Iterator[RunFolder]:
    """Lock the output folder `path` of a run until the block ends, and yield it. `RunFolder.finish` marks the run as
    finished.

    The yielded state is "new" if the folder was absent or empty, or if its run was moved away. Otherwise it is the
    state of the run in the folder: "unfinished" (to be resumed) or "finished". A run is moved away in three cases:
        - With `overwrite`: to the folder `REPLACED` in `path`, which is deleted when the new run is finished.
        - Without `overwrite`, if a command in `REPEATED` finds a finished run: to a new folder next to `path`.
        - Without `overwrite`, if the folder `REPLACED` has a run that was to be replaced: to a new folder next to
            `path`.

    settings: JSON values that identify the run. They are stored in `run.json`, and a later claim must give the same
    ones. None: they are not compared. kind: a function that returns the meaning of a changed setting. "same": it counts
    as unchanged. "free": it may change. "longer": it may change, and a finished run becomes unfinished. "other": it may
    not change. command: the command that claims the folder.

    Raises UserError, which names the key to change, if another process uses the folder, if a setting differs, or if the
    folder has files but no run of cotrain. Such files are never deleted, even with `overwrite`.
    """
    path = Path(path)
    wanted = None if settings is None else json.loads(json.dumps(dict(settings)))  # tuples become lists
    _usable(path)
    _folder(path)
    with _locked(path):
        if command in REPEATED and not overwrite and finished(path):
            _keep(path, path)
        run = _open(path, overwrite, wanted, kind, command)
        if not overwrite and (run.state == "new" or command in REPEATED) and (path / REPLACED).exists():
            _keep(path, path / REPLACED)  # of an attempt that this command does not go on with
            (path / REPLACED).rmdir()
        if run.state == "new":
            _mark(path, "unfinished", run.settings, command)
        try:
            yield run
        except BaseException:
            if run.state == "new" and {entry.name for entry in path.iterdir()} <= {MARKER, LOCK}:
                (path / MARKER).unlink()  # nothing was written, so other settings may use the folder
            if (path / REPLACED).exists() and run.state != "finished":
                warn(f"the run that this one replaces is kept in {path / REPLACED} until this one is finished")
            raise


def _keep(path: Path, root: Path) -> None:
    """Move the files of the run in `root` to a new folder next to `path`, the marker last, and print a line."""
    # the files are moved and not their folder, which may be a link or the working directory
    (place := numbered(path.resolve())).mkdir()
    for entry in sorted(root.iterdir(), key=lambda entry: entry.name == MARKER):
        if entry.name != LOCK:
            entry.rename(place / entry.name)
    warn(f"output={path} has an earlier result, which is kept in {place}; overwrite=true replaces it")


def numbered(path: Path, ending: str = "") -> Path:
    """Return the first unused path among `path`-1, `path`-2, ... ending: the extension of the file that will be written
    there, for example ".parquet"; "" for a folder."""
    names = (f"{path.name}-{number}" for number in count(1))
    return next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(f"{name}{ending}")))


def refuse_folder(
    path: str | Path,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
    kind: Judge = lambda *_: "other",
) -> State:
    """Raise UserError if `claim` would raise it for the same arguments (another process uses the folder, a setting may
    not change, or the folder has files but no run of cotrain), and if the folder cannot be written. Otherwise return
    the state of its run: "new", "unfinished" or "finished". Nothing is changed, so commands call this before minutes of
    work."""
    path = Path(path)
    _usable(path)
    if (path / LOCK).exists():
        with _locked(path):
            pass
    state: State = "new"
    marker = read_marker(path)
    if marker is not None and not overwrite and marker["state"] != "emptying":
        wanted = marker["settings"] if settings is None else json.loads(json.dumps(dict(settings)))
        changed = _compare(path, marker["settings"], wanted, kind)
        state = "unfinished" if "longer" in changed.values() else marker["state"]
    writable("output", path)
    return state


def writable(key: str, path: str | Path) -> None:
    """Raise UserError if the file or folder cannot be written or created. key: the setting that names it. No files are
    left."""
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
    """Lock a folder until the block ends, and yield it. It is created if it is absent. It may have any files, since it
    is no run."""
    path = Path(path)
    _folder(path)
    with _locked(path):
        yield path


def resumable(path: str | Path, settings: Mapping[str, Any]) -> bool:
    """Return whether the folder has an unfinished run with exactly these settings."""
    marker = read_marker(Path(path)) or {}
    return marker.get("state") == "unfinished" and marker["settings"] == json.loads(json.dumps(dict(settings)))


def finished(path: str | Path) -> bool:
    """Return whether the folder has a finished run."""
    marker = read_marker(Path(path))
    return marker is not None and marker["state"] == "finished"


def refuse_unfinished(key: str, path: Path) -> None:
    """Raise UserError if the path is an unfinished run, or lies directly in one. key: the setting that names the
    path."""
    for run in (path, path.parent):
        if (read_marker(run) or {}).get("state") == "unfinished":
            raise UserError(f"{key}={path}: the run {run} is not finished: repeat its command, which resumes it")


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
        with suppress(OSError):  # none is there
            try:
                json.loads((path / MARKER).read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(
                    f"{path / MARKER} is broken ({error}), so output={path} cannot be used: name another "
                    "folder, or put a copy of the file there"
                ) from error
        raise UserError(
            f"output={path} has files but no {MARKER} of cotrain: name another folder"
            " (overwrite=true replaces only runs of cotrain)"
        )


def _open(path: Path, overwrite: bool, settings: dict[str, Any] | None, kind: Judge, command: str) -> RunFolder:
    """Return the run in the locked folder `path`. Its files are moved to the folder `REPLACED` first, with `overwrite`
    or if an earlier move was interrupted. settings, kind, command: as in `claim`. Raises UserError if a setting may not
    change."""
    marker = read_marker(path)
    if marker is not None and (overwrite or marker["state"] == "emptying"):
        _empty(path, marker, command)
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
    """Return the changed settings as key -> meaning of the change ("free" or "longer"). before: settings of the stored
    run. wanted: settings of this run. kind: a function that returns the meaning. Raises UserError if a setting may not
    change."""
    old, new = (
        {key: value for key, value in flat(values) if not isinstance(value, dict)} for values in (before, wanted)
    )
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    kinds = {key: kind(key, old.get(key), new.get(key)) for key in keys}
    kinds = {key: change for key, change in kinds.items() if change != "same"}
    if "other" in kinds.values():
        changes = ", ".join(
            f"{key}={old.get(key)} (now {new.get(key)})" for key, change in kinds.items() if change == "other"
        )
        raise UserError(f"output={path} has a run with {changes}: name another folder, or set overwrite=true")
    # a free setting that is missing from the marker was added by a later version of cotrain: no change
    return {key: change for key, change in kinds.items() if key in old or change != "free"}


def _empty(path: Path, marker: dict[str, Any], command: str) -> None:
    """Move all files except the lock to the folder `REPLACED`. If this folder already has a run, the files are deleted
    instead: they belong to an unfinished run that was to replace it.

    Meanwhile the marker has the state "emptying", so that the next claim continues if this process is killed.
    """
    replaced, old = path / REPLACED, path / REPLACED / f"{MARKER}.new"
    if marker["state"] == "finished":  # what is there was to be deleted when this run was finished
        shutil.rmtree(replaced, ignore_errors=True)
    if marker["state"] != "emptying":
        if not (replaced / MARKER).exists():
            write_json(old, marker, 2)
        _mark(path, "emptying", marker["settings"], command)
    for entry in path.iterdir():
        if entry.name in (MARKER, LOCK, REPLACED):
            continue
        if old.exists():
            entry.rename(replaced / entry.name)
        elif entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if old.exists():
        old.rename(replaced / MARKER)


def _foreign(path: Path) -> bool:
    """Return whether the folder has files but no marker of cotrain. A lock and an incomplete marker do not count."""
    ours = all(entry.name == LOCK or entry.name.startswith(f".{MARKER}.") for entry in path.iterdir())
    return not ours and read_marker(path) is None


def read_marker(path: Path) -> dict[str, Any] | None:
    """Return the content of the marker in `path`, without settings that no longer exist and had no effect. Return None
    if there is no marker, or if `run.json` is from another program. Raises UserError if its state or its settings are
    none that cotrain writes."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    if not isinstance(marker, dict) or "cotrain" not in marker:
        return None
    if marker.get("state") not in STATES or not isinstance(marker.get("settings"), dict | None):
        raise UserError(
            f"{path / MARKER} is broken (state {marker.get('state')!r}): put a copy of the file there, or name another "
            "folder"
        )
    for key, removed in REMOVED.items():
        group, _, name = key.partition(".")
        settings = marker.get("settings")
        values = settings.get(group) if isinstance(settings, dict) else None
        if isinstance(values, dict) and name in values and removed.neutral in (values[name], ANY):
            del values[name]
    return marker


def _mark(path: Path, state: str, settings: Mapping[str, Any], command: str) -> None:
    marker = {"cotrain": __version__, "command": command, "state": state, "settings": settings}
    write_json(path / MARKER, marker, 2)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock `run.lock` in the folder until the block ends. The system releases the lock when a process dies, so a
    remaining file blocks nobody. Raises UserError if another process has the lock."""
    file = path / LOCK
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 100).decode().strip() or "another process"
            os.close(handle)
            raise UserError(f"output={path} is in use by {holder}: wait for it, or name another folder") from None
        if _is(file, handle):
            break
        os.close(handle)  # another process removed the file after it was opened here: try again
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()}\n".encode(), 0)
        yield
    finally:
        with suppress(OSError):  # a remaining file blocks nobody
            file.unlink()
        os.close(handle)


def _is(file: Path, handle: int) -> bool:
    """Return whether `handle` is still the file at the path `file`. The file may have been removed and created
    again."""
    try:
        return os.path.samestat(file.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
