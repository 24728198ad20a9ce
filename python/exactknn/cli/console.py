"""What the commands print: lines on stdout, errors and warnings on stderr, progress; and the exit codes."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

from exactknn import _progress
from exactknn._progress import Report

EXIT_FAILURE = 1
"""Nothing wrong with what was asked, but it could not be done: no memory, a full disk, a bug."""

EXIT_REFUSED = 2
"""The arguments or one of the files cannot be used."""

EXIT_BROKEN_PIPE = 128 + 13
"""Nobody reads the output any more; the code a shell reports for SIGPIPE."""


class CommandError(Exception):
    """The command cannot go on; the text is the line to print."""

    def __init__(self, message: str, exit_code: int = EXIT_REFUSED) -> None:
        """Keep the text on one line, whatever it was made of."""
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


def print_line(message: str) -> None:
    """Print a line with a path in it, which stdout may be unable to encode."""
    try:
        print(message)
    except UnicodeEncodeError:
        print(message.encode("ascii", "backslashreplace").decode())


def warn(message: str) -> None:
    """Print a line on stderr, where there is one."""
    if sys.stderr is None:  # closed by the caller; print would fall back to stdout
        return
    with contextlib.suppress(OSError):
        print(f"exactknn: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def searching(arguments: argparse.Namespace) -> Iterator[Report | None]:
    """Show progress where it is wanted, and put what the core refuses into the words of the command line."""
    shown = arguments.progress
    if shown is None:
        shown = sys.stderr is not None and sys.stderr.isatty()
    with _progress.reporting(bool(shown)) as progress:
        try:
            yield progress
        except (ValueError, TypeError) as error:
            raise CommandError(str(error)) from error
        except RuntimeError as error:
            raise CommandError(f"this is a bug in exactknn, please report it: {error}", EXIT_FAILURE) from error
