"""Errors that a user can mend: one clear message, never a traceback."""


class UserError(Exception):
    """Something the user gave is wrong.

    The message says what is wrong, where (file, line, key, shape) and what to do about it.
    """


def reason(error: BaseException) -> str:
    """The first line of somebody else's error, or its kind where it has no words."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
