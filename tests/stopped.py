"""A process that is stopped in the middle of its work, and killed there."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection


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
