"""The error for an invalid file."""

from __future__ import annotations


class FileError(ValueError):
    """A file is invalid; the text is one line that begins with the path and says what was expected."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str) -> str:
    """Return text that is safe to print on a terminal: escape sequences and other control characters are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
