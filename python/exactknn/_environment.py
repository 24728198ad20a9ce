"""What must not change a result: the float mode of the calling thread and, at a fork, locks and the threads of torch.

    caller ──undisturbed──> default float mode; torch on one thread in a forked child ──> function ──> caller's state

Other libraries may set flush-to-zero or denormals-are-zero for a thread (``torch.set_flush_denormal``). The core resets
it for its own work; NumPy and torch do not. A forked child inherits torch's thread pool without its threads, and an
operation that uses them would wait for ever. So would a child for a lock that another thread held during the fork:
``os.fork`` waits until the core's locks are free.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from exactknn import _core

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Whether torch was loaded before this process was forked.
_torch_was_forked = False


def undisturbed(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return the function such that neither the caller's float mode nor a fork changes its result."""

    @functools.wraps(function)
    def wrapper(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        state = _core.replace_float_env()
        torch: Any = sys.modules["torch"] if _torch_was_forked else None
        threads = 1 if torch is None else torch.get_num_threads()
        if threads > 1:
            torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            if threads > 1:
                torch.set_num_threads(threads)
            _core.restore_float_env(state)

    return wrapper


def _note_fork() -> None:
    global _torch_was_forked
    _torch_was_forked = _torch_was_forked or "torch" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
    os.register_at_fork(before=_core.before_fork, after_in_parent=_core.after_fork, after_in_child=_core.after_fork)
