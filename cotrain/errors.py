"""Exceptions that end a command with a message for the user."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """An error that the user can correct. The command line prints its message without a traceback, so the message names
    the setting or file to change."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise UserError, with the same message in one line, for a ValueError or OSError in the block."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error


class NotFinite(UserError):
    """An error for a loss that is NaN or infinite, raised before the optimiser step. said: the message. ids: token ids
    of the texts in the batch."""

    def __init__(self, said: str, ids: list[list[int]]) -> None:
        super().__init__(said)
        self.ids = ids


class Interrupted(BaseException):
    """The end of a run by a signal. signum: 2 for SIGINT, 15 for SIGTERM. said: the message, which names what was
    saved.

    It is not an Exception, so that `except Exception` does not catch it.
    """

    def __init__(self, signum: int, said: str) -> None:
        super().__init__(said)
        self.signum = int(signum)
