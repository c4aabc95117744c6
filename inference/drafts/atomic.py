"""Atomic writes of files and folders. Each is written under a temporary name in the same parent folder, then renamed.

The temporary name is `.<name>.<host>-<pid>-<random>.new`, or ends with `.old` for a folder that is being replaced. Host
and pid name the process that made it. The next write to the same path removes the temporaries of dead processes. If a
replacement was interrupted, that write also restores the old folder.
"""

import errno
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_OWNER = re.compile(r"(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}\.(?P<role>new|old)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# messages for a full disk from safetensors and torch.save, which do not raise OSError
_FULL_TEXT = re.compile(r"\(os error (28|122|27)\)|PytorchStreamWriter failed|unexpected pos \d+")


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` atomically. Text is encoded as UTF-8, a symbolic link is followed, and missing parent
    folders are created.

    Raises OSError and leaves the old file untouched if the write fails. If the disk is full, the error names `path`.
    """
    with new_file(path) as new:
        new.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write a value as JSON to `path`, as `write_atomic` does. indent: as for `json.dumps`."""
    write_atomic(path, json.dumps(value, indent=indent) + "\n")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that becomes `path` when the `with` block ends without an exception. If the block or the
    writing fails, the old file stays untouched and the exception is raised. If the disk is full, this is an OSError
    that names `path`."""
    real = _real_path(path)
    new = _temporary(real, "new")
    try:
        with naming_full_disk(real):
            yield new
            _sync(new)
            os.replace(new, real)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _sync(real.parent)


@contextmanager
def new_folder(final: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `final` when the `with` block ends without an exception.

    `final` may be absent or empty. With `replace` it may contain files; these stay untouched until the new folder is
    complete and on disk. Every error leaves `final` as it was. Raises FileExistsError if `final` contains files and
    `replace` is off, NotADirectoryError if `final` is a file, OSError naming `final` if the disk is full, and any
    exception of the block.
    """
    real = _real_path(final)
    _refuse(real, replace)
    new = _temporary(real, "new")
    new.mkdir()
    try:
        with naming_full_disk(real):
            yield new
            _flush(new)
            _refuse(real, replace)
            _swap(new, real)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def disk_full(error: BaseException) -> bool:
    """Return whether an error of the system, torch or safetensors means that the disk, the quota or the file size limit
    is exhausted."""
    return (isinstance(error, OSError) and error.errno in _FULL) or bool(_FULL_TEXT.search(str(error)))


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """If an error of the `with` block means a full disk, raise an OSError that names `path` instead."""
    try:
        yield
    except BaseException as error:
        if disk_full(error):
            raise OSError(errno.ENOSPC, "no space left (disk, quota or file size limit)", str(path)) from error
        raise


def _refuse(real: Path, replace: bool) -> None:
    if real.exists() and not real.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR, "cannot write a folder here: a file has this name; give another path", str(real)
        )
    if not replace and real.is_dir() and any(real.iterdir()):
        raise FileExistsError(errno.EEXIST, "this folder is not empty: empty it, or give another path", str(real))


def _flush(new: Path) -> None:
    """Flush the new files to disk, and give them their folder's mode without execution. The folder's mode follows the
    umask; safetensors saves files with mode 0600."""
    mode = new.stat().st_mode & 0o666
    for folder, _, names in os.walk(new):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(mode)
                _sync(path)
        _sync(Path(folder))


def _swap(new: Path, real: Path) -> None:
    """Move `new` to `real`. If the process is killed between the two renames, `_recover` restores the `.old` folder."""
    old = _temporary(real, "old")
    try:
        if real.exists():
            os.rename(real, old)
        os.rename(new, real)
    except BaseException:
        if old.exists() and not real.exists():
            os.rename(old, real)
        raise
    _sync(real.parent)
    shutil.rmtree(old, ignore_errors=True)


def _real_path(path: Path) -> Path:
    """Return the path with symbolic links followed. First create its parent folders, and remove the temporary files
    that dead processes left for it."""
    real = Path(os.path.realpath(path))
    real.parent.mkdir(parents=True, exist_ok=True)
    _recover(real)
    return real


def _temporary(real: Path, role: str) -> Path:
    owner = f"{platform.node() or 'host'}-{os.getpid()}-{secrets.token_hex(4)}"
    return real.with_name(f".{real.name}.{owner}.{role}")


def _recover(real: Path) -> None:
    """Remove the temporary files and folders that dead processes of this host left for `real`. If such a process was
    replacing the folder `real`, restore it."""
    prefix = f".{real.name}."
    for entry in real.parent.iterdir():
        owner = _OWNER.fullmatch(entry.name.removeprefix(prefix)) if entry.name.startswith(prefix) else None
        if owner is None or owner["host"] != (platform.node() or "host") or _alive(int(owner["pid"])):
            continue
        with suppress(FileNotFoundError):  # another process may remove them too
            if owner["role"] == "old" and not real.exists():
                entry.rename(real)
            elif entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, under another user
        return True
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
