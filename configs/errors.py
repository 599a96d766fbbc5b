"""Errors that a user can mend: one clear message, never a traceback."""


class UserError(Exception):
    """Something the user gave is wrong.

    The message says what is wrong, where (file, line, key, shape) and what to do about it.
    """
