"""The error that every refused file raises."""

from __future__ import annotations


class FileError(ValueError):
    """A file cannot be used; the text is one line, begins with the path and says what was wanted."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
