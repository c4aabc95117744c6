"""Errors that the user can fix."""


class UserError(ValueError):
    """A key or file to change: the command line prints the message alone, without a traceback."""


class NotFinite(UserError):
    """A loss that is no number, before the step that it was for. ids: of its texts."""

    def __init__(self, said: str, ids: list[list[int]]) -> None:
        super().__init__(said)
        self.ids = ids


class Interrupted(BaseException):
    """A signal ended the run; the message says what is kept. No Exception: nothing that mends failures may hold it up.

    signum: of the signal, 2 for SIGINT, 15 for SIGTERM.
    """

    def __init__(self, signum: int, said: str) -> None:
        super().__init__(said)
        self.signum = int(signum)
