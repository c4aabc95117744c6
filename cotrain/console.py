"""What a command prints: its answer, in words or as one JSON object, and how far a long job is."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Answer = Callable[[Mapping[str, Any], str], None]  # what was found, and the words for it


@contextmanager
def answering(as_json: bool) -> Iterator[Answer]:
    """What gives a command's answer to standard output. Where that is JSON, whatever else is printed until the block
    ends goes to standard error."""
    if not as_json:
        yield lambda _, words: print(words)
        return
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        yield lambda value, _: print(json.dumps(strict(value)), file=out, flush=True)


def strict(answer: Any) -> Any:
    """The same without NaN and infinity, which are no JSON: null in their places."""
    if isinstance(answer, Mapping):
        return {key: strict(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [strict(value) for value in answer]
    return None if isinstance(answer, float) and not math.isfinite(answer) else answer


EVERY = 30.0  # seconds between lines where there is no terminal
SHORT = 5.0  # seconds of a job that need no line
Say = Callable[[str], None]


class Display:
    """One job of `total` units; `start_at` of them were done before. say: takes a line of each `to`, and nothing else
    is shown; None: standard output. brief: lines without a bar, and none if all is done within SHORT seconds; for jobs
    inside another one.

    Used as a context: a bar that is not closed stays in the terminal's way.
    """

    def __init__(
        self, title: str, total: float, unit: str, start_at: float = 0, say: Say | None = None, hidden: bool = False,
        brief: bool = False,
    ) -> None:  # fmt: skip
        self.title, self.total, self.unit, self.start_at, self.say = title, total, unit, start_at, say
        self.start = self.last_shown = time.monotonic()
        self.brief = brief
        self.done, self.note, self.hidden = start_at, "", hidden
        self.bar: Progress | None = None
        if say is None and not hidden and not brief and sys.stdout.isatty():
            self._open(Console(file=sys.stdout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def to(self, done: float, note: str = "", total: float | None = None) -> None:
        """So much is done; note: what else is to be said of it."""
        self.done, self.note = done, note or self.note
        self.total = self.total if total is None else total
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=done, total=self.total, note=self.note, count=self._count())
        elif self.say:
            self.say(self.line())
        elif not self.hidden and self._due(done):
            self.last_shown = time.monotonic()
            print(self.line(), flush=True)

    def line(self) -> str:
        """In words."""
        left = f", {clock(self.left)} left" if self.left and self.done < self.total else ""
        return f"{self.title}: {self._count()}{left}" + (f", {self.note}" if self.note else "")

    @property
    def left(self) -> float | None:
        """Seconds, at the speed since this process began; None before anything was done."""
        units = self.done - self.start_at
        return (time.monotonic() - self.start) / units * (self.total - self.done) if units > 0 else None

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar:
            self.bar.stop()
            self.bar = None

    def _due(self, done: float) -> bool:
        """Whether a line is due, without a terminal."""
        now = time.monotonic()
        if self.brief and self.last_shown == self.start:  # the first line
            return now - self.start >= SHORT
        return now - self.last_shown >= EVERY or done >= self.total

    def _count(self) -> str:
        return f"{self.done:.0f}/{self.total:.0f} {self.unit}"

    def _open(self, console: Console) -> None:
        columns: tuple[Any, ...] = (
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(), TextColumn("left  {task.fields[note]}"),
        )  # fmt: skip
        self.bar = Progress(*columns, console=console)
        self.bar.add_task(self.title, total=self.total, completed=int(self.start_at), count=self._count(), note="")
        self.bar.start()


Counter = Callable[[int], None]  # adds units that are done


@contextmanager
def counting(title: str, total: int, unit: str, hidden: bool = False) -> Iterator[Counter]:
    """A brief display of a job whose parts say how many units they were."""
    with Display(title, total, unit, hidden=hidden, brief=True) as display:
        yield lambda count: display.to(display.done + count)


def clock(seconds: float) -> str:
    """0:05, 12:30, 2:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
