"""The error for an invalid file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class FileError(ValueError):
    """A file is invalid; the text is one line that begins with the path and says what was expected."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str) -> str:
    """Return text that is safe to print on a terminal: escape sequences and other control characters are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Let an `OSError` of the system name this file instead of a temporary one, or none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from error
