"""A call on a thread of its own, which is never waited for in vain.

::

    Call(function, *arguments) ──starts a thread──> result() or wait(seconds)
                               └─no memory for it──> MemoryError

`threading.Thread.start` and the executors of ``concurrent.futures`` wait for ever if a new thread lacks the memory to
run its first line. So would a child that was forked meanwhile, which has no such thread.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")

_START_SECONDS = 30.0
_POLL_SECONDS = 0.5


class Call(Generic[_Result]):
    """The call of a function on another thread.

    Args:
        function: the function.
        arguments: its arguments.

    Raises:
        MemoryError: the thread did not start.
    """

    def __init__(self, function: Callable[..., _Result], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments
        self._result: _Result | None = None
        self._error: BaseException | None = None
        self._abandoned = False
        self._process = os.getpid()
        # Locks: releasing one needs no memory.
        self._started, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        self._started.acquire()
        self._ended.acquire()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:
            raise MemoryError(f"could not start a thread for a block of rows: {error}") from error
        try:
            if not self._started.acquire(timeout=_START_SECONDS):
                raise MemoryError("could not start a thread for a block of rows: it ended at once")
        except BaseException:
            # It may still start, or just have started.
            self._abandoned = True
            raise

    def _run(self) -> None:
        self._started.release()
        try:
            if not self._abandoned:
                self._result = self._function(*self._arguments)
        except BaseException as error:  # for the thread that waits, as an executor does
            self._error = error
        finally:
            self._ended.release()

    def wait(self, seconds: float) -> bool:
        """Return whether the call has ended, after at most so many seconds.

        Raises:
            RuntimeError: this is a forked child, which does not have the thread.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "a forked child cannot continue a call of its parent that was running when it was forked"
            )
        if not self._ended.acquire(timeout=seconds):
            return False
        self._ended.release()
        return True

    def result(self) -> _Result:
        """Return the result of the function, or raise its exception.

        Raises:
            RuntimeError: as `wait`.
        """
        while not self.wait(_POLL_SECONDS):
            pass
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def join(self) -> None:
        """Wait for the end of the call, whatever its outcome; in a forked child, return at once."""
        while os.getpid() == self._process and not self.wait(_POLL_SECONDS):
            pass
