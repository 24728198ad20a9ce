"""Output of the commands: lines on stdout, errors, warnings and progress on stderr; and the exit codes."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

from exactknn import _progress
from exactknn._io.errors import naming, printable
from exactknn._progress import Report

EXIT_FAILURE = 1
"""A valid request failed: out of memory, a full disk, a bug."""

EXIT_REFUSED = 2
"""An argument or a file is invalid."""

EXIT_BROKEN_PIPE = 128 + 13
"""The reader closed the output; the code that a shell reports for SIGPIPE."""


class CommandError(Exception):
    """The command cannot continue; the text is the line to print."""

    def __init__(self, message: str, exit_code: int = EXIT_REFUSED) -> None:
        """Join the text into one line."""
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


STDOUT = "stdout"
"""Named by an `OSError` of `print_text`."""


def print_text(text: str) -> None:
    """Print lines of text."""
    with naming(STDOUT):
        print(text)


def print_line(message: str) -> None:
    """Print a line that contains a path, escaped where it is not printable or stdout cannot encode it."""
    message = printable(message)
    try:
        print_text(message)
    except UnicodeEncodeError:
        print_text(message.encode("ascii", "backslashreplace").decode())


def warn(message: str) -> None:
    """Print a line on stderr, if there is a stderr."""
    if sys.stderr is None:  # closed by the caller; print would fall back to stdout
        return
    with contextlib.suppress(OSError):
        print(f"exactknn: {printable(message)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def searching(arguments: argparse.Namespace) -> Iterator[Report | None]:
    """Yield the progress function, if progress is shown, and convert errors of the search to `CommandError`.

    An error that begins with the name of an argument, as those of rows do, then begins with its option and file.
    """
    shown = arguments.progress
    if shown is None:
        shown = sys.stderr is not None and sys.stderr.isatty()
    with _progress.reporting(bool(shown)) as progress:
        try:
            yield progress
        except (ValueError, TypeError) as error:
            raise CommandError(_with_file(str(error), arguments)) from error
        except RuntimeError as error:
            raise CommandError(f"this is a bug in exactknn, please report it: {error}", EXIT_FAILURE) from error


def _with_file(message: str, arguments: argparse.Namespace) -> str:
    name, _, rest = message.partition(" must be ")
    path = getattr(arguments, name, None) if name in ("query", "reference") else None
    if path is None:
        return message
    option = "--query" if name == "query" else getattr(arguments, "reference_option", "--reference")
    return f"{option} {path} must be {rest}"
