"""The error for an invalid file."""

from __future__ import annotations


class FileError(ValueError):
    """A file is invalid; the text is one line that begins with the path and says what was expected."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
