"""The error that is the user's to mend."""


class UserError(ValueError):
    """A key or file to change: the command line prints the message alone, without a traceback."""
