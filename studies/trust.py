"""What the studies of faults share: parts of one report, and a record of what a process touches outside its folders."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment

# events of Python that write, with the arguments that name what is written
WRITES = {
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "shutil.rmtree": (0,),
}
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")
STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system")


def opens_to_write(arguments: tuple[Any, ...]) -> bool:
    """Return whether the event "open" with these arguments is of a file that may be written."""
    return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def write_part(out: Path, name: str, figures: Mapping[str, Any]) -> None:
    """Write the part `name` of the report at `out`, with the environment. Other parts stay as they are."""
    parts = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    parts[name] = {"environment": environment(), **figures}
    write_atomic(out, json.dumps(parts, indent=1) + "\n")


def environments(earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the environments of the processes that made a report, this one the last. earlier: the report that this
    process adds to; {} if there is none."""
    first = [earlier["environment"]] if "environment" in earlier else []
    return [*earlier.get("environments", first), environment()]


class Watch:
    """Records what Python code writes outside some folders, which addresses it opens, and which programs it starts.

    Python cannot remove its hook, so one object serves a process, and records while its `recording` is open.
    """

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] | None = None  # None: nothing is recorded
        self.seen: list[str] = []
        sys.addaudithook(self._event)

    @contextmanager
    def recording(self, allowed: Sequence[Path]) -> Iterator[list[str]]:
        """Yield a list to which each event is appended, until the block ends. allowed: folders that may be written."""
        self.seen, self.allowed = [], (*(os.path.realpath(path) for path in allowed), "/dev", "/proc")
        try:
            yield self.seen
        finally:
            self.allowed = None

    def _event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event in NETWORK:
            self.seen.append(f"{event} {arguments[-1] if event == 'socket.connect' else arguments[0]}")
        elif event in STARTS and arguments[0] != "git":  # a report names the commit
            self.seen.append(f"{event} {arguments[0]}")
        elif event == "open" and opens_to_write(arguments):
            self._wrote(event, arguments[0])
        for place in WRITES.get(event, ()):
            self._wrote(event, arguments[place])

    def _wrote(self, event: str, path: Any) -> None:
        if isinstance(path, int) or "__pycache__" in str(path):  # a descriptor is of a file that was opened
            return
        real = os.path.realpath(os.fsdecode(path))
        if not any(real == place or real.startswith(f"{place}/") for place in self.allowed or ()):
            self.seen.append(f"{event} {real}")
