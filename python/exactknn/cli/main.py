"""The command line: ``exactknn search``, ``groundtruth``, ``evaluate``, ``match`` and ``info``.

::

    argv --> arguments --> headers of the files --> outputs staged --> search, scores, pairs --> outputs renamed
             (options)     (files)                  (files)           (a module each)           into place
                 +-------------+------------------------+---- one line on stderr, exit code ----+

Whatever can be refused is refused before the search starts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from exactknn import __version__
from exactknn._io.errors import FileError
from exactknn.cli import evaluate, groundtruth, info, match, search
from exactknn.cli.console import EXIT_BROKEN_PIPE, EXIT_FAILURE, CommandError, warn

_DESCRIPTION = """\
Exact k-nearest-neighbour search: the same answer as float64 brute force, ties to the lowest row number,
identical for every CPU, thread count and batch.
"""

_EPILOG = """\
example:
  exactknn search --query queries.fbin --reference base.fbin -k 100 --output neighbours.npz

exit codes:
  0 done   1 could not be done   2 refused (arguments or a file)   130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing is raised and the process is not ended.

    Args:
        argv: the arguments after the program's name; None takes those of the process.
    """
    stop = _Stop()
    try:
        with stop.on_terminate():
            code = _run(argv)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
    except CommandError as error:
        warn(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        warn(f"{'terminated' if stop.terminated else 'interrupted'}{interrupt}")
        return 128 + (stop.terminated or signal.SIGINT)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; let that go nowhere rather than complain.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except MemoryError as error:
        warn(f"error: not enough memory: {error}" if str(error) else "error: not enough memory")
        return EXIT_FAILURE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        warn(f"error: {where}{error.strerror or error}")
        return EXIT_FAILURE


# What batch systems send, and what a lost connection does.
_TERMINATING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _Stop:
    """Turns signals that end a process into the interrupt that removes temporary files on its way out."""

    def __init__(self) -> None:
        self.terminated = 0

    def _interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        self.terminated = number
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def on_terminate(self) -> Iterator[None]:
        previous = {}
        try:
            for number in _TERMINATING:
                handler = signal.getsignal(number)
                if handler is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                    signal.signal(number, self._interrupt)
                    previous[number] = handler
        except ValueError:  # not the main thread: signals are someone else's
            yield
            return
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    try:
        arguments = parser.parse_args(_with_attached_thresholds(sys.argv[1:] if argv is None else argv))
    except SystemExit as stop:  # --help has been printed
        return int(stop.code or 0)
    if arguments.version:
        print(f"exactknn {__version__}")
        return 0
    if arguments.command is None:
        parser.error("a command is wanted: search, groundtruth, evaluate, match or info")
    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except FileError as error:
        raise CommandError(str(error)) from error


def _with_attached_thresholds(argv: Sequence[str]) -> list[str]:
    """`--threshold -1e-3` as `--threshold=-1e-3`: argparse takes a word like the second for an option."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] == "--threshold" and word.startswith("-") and _is_number(word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line, as all others here."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see: {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser("exactknn", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    for command in (search, groundtruth, evaluate, match, info):
        command.add_command(commands)
    return parser
