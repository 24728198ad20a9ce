"""Ctrl-C while the command line is still being imported: one line and exit code 130 instead of a traceback.

The package imports this module first, which takes effect on import. It loads no other module of the package.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

_CODE = 130


def _catch_interrupts() -> None:
    """Let Ctrl-C end the process in one line, if this process is the command line and has no handler of its own."""
    if (
        _is_command()
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _end)


def release_interrupts() -> None:
    """Restore the handler that `_catch_interrupts` replaced; the command line handles `KeyboardInterrupt` itself."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    """Return whether the process runs ``exactknn`` or ``python -m exactknn``, whose ``argv`` is not yet complete."""
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if program == "-m" and "-m" in sys.orig_argv else []
    return program == "exactknn" or module == ["exactknn"]


def _end(number: int, frame: FrameType | None) -> None:
    # An exception could surface anywhere in an import, and be reported as something else. No file is open yet.
    try:
        os.write(2, b"exactknn: interrupted\n")
    finally:
        os._exit(_CODE)


_catch_interrupts()
