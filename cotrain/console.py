"""The output of a command: its answer, as text or as one JSON object, and the progress of long jobs."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from inference.drafts.atomic import write_json
from inference.report.schema import strict

Answer = Callable[[Mapping[str, Any], str], None]  # prints an answer, given as an object and as text


@contextmanager
def answering(as_json: bool) -> Iterator[Answer]:
    """Yield a function (object, text) that prints the command's answer on standard output: the text, or with `as_json`
    the object as JSON. With `as_json`, all other prints in the block go to standard error."""
    if not as_json:
        yield lambda _, words: print(words)
        return
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        yield lambda value, _: print(json.dumps(strict(value)), file=out, flush=True)


def write_answer(file: Path, answer: Mapping[str, Any], indent: int = 2) -> None:
    """Write the answer of a command to a JSON file. NaN and infinity become null, for example an interval of few
    batches."""
    write_json(file, strict(answer), indent)


EVERY = 30.0  # seconds between lines, without a terminal
SHORT = 5.0  # seconds; a brief job that ends sooner prints nothing


class Display:
    """The progress of a job: a bar on a terminal, otherwise lines. Use it as a context manager, so that the bar is
    closed.

    Args:
        title: the beginning of the bar or line.
        total: the number of units in the whole job.
        unit: the name of a unit, for example "texts".
        start_at: the number of units that were done before.
        hidden: True to print nothing.
        brief: True to print lines without a bar, and no line if the job ends within `SHORT` seconds. This is for a job
            inside another job.
    """

    def __init__(
        self, title: str, total: float, unit: str, start_at: float = 0, hidden: bool = False, brief: bool = False
    ) -> None:
        self.title, self.total, self.unit, self.start_at = title, total, unit, start_at
        self.start = self.last_shown = time.monotonic()
        self.brief = brief
        self.done, self.note, self.hidden = start_at, "", hidden
        self.bar: Progress | None = None
        if not hidden and not brief and sys.stdout.isatty():
            self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def to(self, done: float, note: str = "", total: float | None = None) -> None:
        """Show that `done` units are done. note: text at the end of the line; "" leaves the previous note. total: a new
        number of units in the whole job; None leaves it unchanged."""
        self.done, self.note = done, note or self.note
        self.total = self.total if total is None else total
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=done, total=self.total, note=self.note, count=self._count())
        elif not self.hidden and self._due(done):
            self.last_shown = time.monotonic()
            print(self.line(), flush=True)

    def line(self) -> str:
        """Return the progress as one line of text."""
        left = f", {clock(self.left)} left" if self.left and self.done < self.total else ""
        return f"{self.title}: {self._count()}{left}" + (f", {self.note}" if self.note else "")

    @property
    def left(self) -> float | None:
        """Return the expected seconds to the end at the mean speed so far, or None before the first unit."""
        units = self.done - self.start_at
        return (time.monotonic() - self.start) / units * (self.total - self.done) if units > 0 else None

    def close(self) -> None:
        """Stop the bar, which stays visible in its last state."""
        if self.bar:
            self.bar.stop()
            self.bar = None

    def _due(self, done: float) -> bool:
        now = time.monotonic()
        if self.brief and self.last_shown == self.start:  # the first line
            return now - self.start >= SHORT
        return now - self.last_shown >= EVERY or done >= self.total

    def _count(self) -> str:
        return f"{self.done:.0f}/{self.total:.0f} {self.unit}"

    def _open(self) -> None:
        columns: tuple[Any, ...] = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(),
            TextColumn("left  {task.fields[note]}"),
        )
        self.bar = Progress(*columns, console=Console(file=sys.stdout))
        self.bar.add_task(self.title, total=self.total, completed=int(self.start_at), count=self._count(), note="")
        self.bar.start()


Counter = Callable[[int], None]  # adds to the number of units that are done


@contextmanager
def counting(title: str, total: int, unit: str, hidden: bool = False) -> Iterator[Counter]:
    """Show a brief `Display` until the block ends. Yield a function to call with the number of units done since its
    last call. title: the beginning of each line. total: the number of units. unit: the name of a unit."""
    with Display(title, total, unit, hidden=hidden, brief=True) as display:
        yield lambda count: display.to(display.done + count)


@contextmanager
def working(title: str) -> Iterator[None]:
    """Print the title and, again and again, the seconds that the block has taken so far. For a job whose length is not
    known, which shows no other progress."""
    if not sys.stdout.isatty():
        print(title, flush=True)
        start, ended = time.monotonic(), threading.Event()

        def shown_again() -> None:
            while not ended.wait(EVERY):
                print(f"{title}: {clock(time.monotonic() - start)}", flush=True)

        threading.Thread(target=shown_again, daemon=True).start()
        try:
            yield
        finally:
            ended.set()
        return
    with Progress(TextColumn("{task.description}"), SpinnerColumn(), TimeElapsedColumn()) as shown:
        shown.add_task(title, total=None)
        yield


def clock(seconds: float) -> str:
    """Format seconds as 0:05, 12:30 or 2:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
