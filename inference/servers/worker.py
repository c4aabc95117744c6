"""A program in a separate process. It answers one request at a time: it reads a line of JSON and writes a line of
JSON."""

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Worker:
    """A process that runs `command`, with its settings as the last argument, in JSON. Its first line of output is a
    JSON object with its `version`.

    name: the program's name, for messages. log: the file that gets the process's standard error. pauses: whether to
    stop the process between requests, so that its idle threads do not use the cores while something else is timed; the
    process must then have no children. Raises RuntimeError, with the last lines of the log, if the process does not
    start or ends early.
    """

    def __init__(
        self, name: str, command: Sequence[str], settings: Mapping[str, Any], log: Path, pauses: bool = False
    ) -> None:
        self.name, self.log, self.pauses = name, log, pauses
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.version: str = self._read()["version"]
        if pauses:
            self.process.send_signal(signal.SIGSTOP)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, and return its answer. Raises RuntimeError, with the last lines of the log, if the process
        has ended."""
        assert self.process.stdin is not None
        with self._running():
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return self._read()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Within the `with` block, let the process run if it pauses between requests."""
        if not self.pauses:
            yield
            return
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            tail = self.log.read_text(errors="replace").splitlines()[-8:]
            raise RuntimeError(f"{self.name} has ended; see {self.log}, whose last lines are: " + "\n".join(tail))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self.process.stdin is not None
        if self.pauses:
            self.process.send_signal(signal.SIGCONT)  # a stopped process does not see the end of its input
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
