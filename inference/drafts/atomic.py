"""Files and folders that are whole or absent: written under a temporary name beside their place and renamed.

A temporary is `.<name>.<host>-<pid>-<random>.new` (or `.old`: a folder on its way out), so what a dead
process left behind is known by its name; it goes away, or comes back, when the same place is next written.
"""

import errno
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OWNER = re.compile(r"(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}\.(?P<role>new|old)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What safetensors and torch.save say: neither raises an OSError.
_FULL_TEXT = re.compile(r"\(os error (28|122|27)\)|PytorchStreamWriter failed|unexpected pos \d+")


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` (text as UTF-8) to `path`, wholly or not at all; a symbolic link is followed.

    Makes the parent folders. Raises OSError, with the old file untouched; a full disk names `path`.
    """
    with new_file(path) as new:
        new.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield where to write a file that becomes `path` when the block ends without an exception; see `write_atomic`."""
    place = _place(path)
    new = _temporary(place, "new")
    try:
        with naming_full_disk(place):
            yield new
            _sync(new)
            os.replace(new, place)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _sync(place.parent)


@contextmanager
def new_folder(final: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `final` when the block ends without an exception.

    An absent or empty `final` is always taken; one with files in it only with `replace`, and it stays
    untouched until the new one is complete and on disk. Raises FileExistsError when `final` is taken,
    NotADirectoryError when it is a file, OSError that names `final` when the disk is full, and whatever
    the block raises, leaving `final` as it was.
    """
    place = _place(final)
    _refuse(place, replace)
    new = _temporary(place, "new")
    new.mkdir()
    try:
        with naming_full_disk(place):
            yield new
            _settle(new)
            _refuse(place, replace)
            _swap(new, place)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def disk_full(error: BaseException) -> bool:
    """Whether `error`, from the system, torch or safetensors, says that disk, quota or file size ran out."""
    return (isinstance(error, OSError) and error.errno in _FULL) or bool(_FULL_TEXT.search(str(error)))


@contextmanager
def naming_full_disk(place: Path) -> Iterator[None]:
    """Raise a full disk as an OSError with the name of what was to be written, which the system leaves out."""
    try:
        yield
    except BaseException as error:
        if disk_full(error):
            raise OSError(errno.ENOSPC, "no space left (disk, quota or file size limit)", str(place)) from error
        raise


def _refuse(place: Path, replace: bool) -> None:
    if place.exists() and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is where a folder was to be written", str(place))
    if not replace and place.is_dir() and any(place.iterdir()):
        raise FileExistsError(errno.EEXIST, "the folder exists and is not empty", str(place))


def _settle(new: Path) -> None:
    """Give files the mode that the umask gave the folder (safetensors saves with 0600); flush all to disk."""
    mode = new.stat().st_mode & 0o666
    for folder, _, names in os.walk(new):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(mode)
                _sync(path)
        _sync(Path(folder))


def _swap(new: Path, place: Path) -> None:
    """Put `new` at `place`; killed between its renames it leaves an `.old` that `_recover` brings back."""
    old = _temporary(place, "old")
    try:
        if place.exists():
            os.rename(place, old)
        os.rename(new, place)
    except BaseException:
        if old.exists() and not place.exists():
            os.rename(old, place)
        raise
    _sync(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def _place(path: Path) -> Path:
    """The real place of `path`, its parents made and the leftovers of dead writers cleared."""
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    _recover(place)
    return place


def _temporary(place: Path, role: str) -> Path:
    owner = f"{platform.node() or 'host'}-{os.getpid()}-{secrets.token_hex(4)}"
    return place.with_name(f".{place.name}.{owner}.{role}")


def _recover(place: Path) -> None:
    """Drop what dead processes of this host left beside `place`; bring back a folder they had moved aside."""
    prefix = f".{place.name}."
    for entry in place.parent.iterdir():
        owner = _OWNER.fullmatch(entry.name.removeprefix(prefix)) if entry.name.startswith(prefix) else None
        if owner is None or owner["host"] != (platform.node() or "host") or _alive(int(owner["pid"])):
            continue
        with suppress(FileNotFoundError):  # another process clears them too
            if owner["role"] == "old" and not place.exists():
                entry.rename(place)
            elif entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, under another user
        return True
    return True


def _sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
