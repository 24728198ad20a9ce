"""The command line: ``exactknn search``, ``groundtruth``, ``evaluate``, ``match`` and ``info``.

::

    argv --> arguments --> file headers checked --> outputs staged --> search, scores, pairs --> outputs renamed
             (options)     (files)                  (files)           (a module each)           into place
                 +-------------+------------------------+---- one line on stderr, exit code ----+

Everything that can be checked is checked before the search starts.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from exactknn import __version__, _startup
from exactknn._io.errors import FileError, naming
from exactknn.cli import evaluate, groundtruth, info, match, search
from exactknn.cli.console import EXIT_BROKEN_PIPE, EXIT_FAILURE, STDOUT, CommandError, print_text, warn

_DESCRIPTION = """\
Exact k-nearest-neighbour search: the result of float64 brute force, ties to the lowest row number,
identical for every CPU, thread count and batch.
"""

_EPILOG = """\
example:
  exactknn search --query queries.fbin --reference base.fbin -k 100 --output neighbours.npz

exit codes:
  0 success   1 failure   2 invalid argument or file   130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; it neither raises nor ends the process.

    Args:
        argv: the arguments after the program's name; None: those of the process.
    """
    stop = _Stop()
    try:
        _startup.release_interrupts()
        with stop.on_terminate():
            code = _run(argv)
            if sys.stdout is not None:
                with naming(STDOUT):
                    sys.stdout.flush()
            return code
    except CommandError as error:
        warn(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        warn(f"{'terminated' if stop.terminated else 'interrupted'}{interrupt}")
        return 128 + (stop.terminated or signal.SIGINT)
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except MemoryError as error:
        warn(f"error: not enough memory: {error}" if str(error) else "error: not enough memory")
        return EXIT_FAILURE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        warn(f"error: {where}{error.strerror or error}")
        if error.filename == STDOUT:
            _discard_stdout()
        return EXIT_FAILURE


def _discard_stdout() -> None:
    """Redirect stdout to nowhere: the interpreter flushes it once more at exit, and would print an error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Sent by batch systems, and on a lost connection.
_TERMINATING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _Stop:
    """Turns terminating signals into `KeyboardInterrupt`, so that temporary files are removed."""

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
                if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    signal.signal(number, self._interrupt)
                    previous[number] = handler
        except ValueError:  # not the main thread, which alone may set signal handlers
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
    except SystemExit as stop:  # after --help
        return int(stop.code or 0)
    if arguments.version:
        print_text(f"exactknn {__version__}")
        return 0
    if arguments.command is None:
        parser.error("expected a command: search, groundtruth, evaluate, match or info")
    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except FileError as error:
        raise CommandError(str(error)) from error


def _with_attached_thresholds(argv: Sequence[str]) -> list[str]:
    """Return the arguments with `--threshold -1e-3` as `--threshold=-1e-3`: argparse parses `-1e-3` as an option."""
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
    """An `ArgumentParser` with one-line errors, like all errors of the command line.

    An unknown option is reported before anything else, since argparse would report it last, by the wrong parser, or as
    a required option that is missing.
    """

    # The overloads of the parent are about the type of a given namespace.
    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        self._check_options(words)
        parsed, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return parsed, rest

    def _check_options(self, words: Sequence[str]) -> None:
        """Reject the first unknown option, unless help is requested; those after a command are left to its parser."""
        known = self._option_string_actions
        commands = self._commands()
        if not {"-h", "--help"}.isdisjoint(words):
            return
        for word in words:
            if word == "--":
                return
            if not word.startswith("-") or word == "-" or " " in word or _is_number(word):
                if commands:
                    if word not in commands:
                        self.error(f"unknown command {word!r}{_suggestion(word, commands)}")
                    return
                continue
            option = word.partition("=")[0]
            if option not in known and (word.startswith("--") or word[:2] not in known):
                self.error(f"unknown option {option}{_suggestion(option, known)}")

    def _commands(self) -> list[str]:
        subparsers = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return [name for action in subparsers for name in action.choices]

    def _print_message(self, message: str, file: Any = None) -> None:
        # The parent ignores a full disk.
        if message and file is not None:
            with naming(STDOUT):
                file.write(message)

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see: {self.prog} --help)")


def _suggestion(word: str, known: Iterable[str]) -> str:
    near = [name for name in known if name.lower() == word.lower()] or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser("exactknn", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    for command in (search, groundtruth, evaluate, match, info):
        command.add_command(commands)
    return parser
