"""Exceptions that end a command with a message for the user, and lines for the user beside its answer."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """An error that the user can correct. The command line prints only its message, without a traceback, so the message
    must name the setting or file to change. status: the exit status of the command."""

    def __init__(self, said: object = "", status: int = 1) -> None:
        super().__init__(said)
        self.status = status


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError or OSError in the block into a UserError with the same message on one line."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error


def warn(text: str) -> None:
    """Print a line for the user on standard error."""
    print(text, file=sys.stderr)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has no message."""
    if isinstance(error, FileNotFoundError) and error.errno:  # of the system, with a number and the path
        return "there is no such file"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip()


class NotFinite(UserError):
    """Raised before the optimiser step if the loss is NaN or infinite. said: the message. ids: token ids of each text
    in the batch."""

    def __init__(self, said: str, ids: list[list[int]]) -> None:
        super().__init__(said)
        self.ids = ids


class Interrupted(BaseException):
    """Raised when a signal ends a run. signum: 2 for SIGINT, 15 for SIGTERM. said: the message, which names what was
    saved.

    It is not an Exception, so that `except Exception` does not catch it.
    """

    def __init__(self, signum: int, said: str) -> None:
        super().__init__(said)
        self.signum = int(signum)
