"""Progress of a long search.

::

    _core, every 40 ms --fraction--> monotonic, within [0, 1] --+--> the caller's function
                                                                +--> tqdm bar, or one line of percent, on stderr

A bar opens at the first report of the core, so that a search with invalid arguments shows none, and always closes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

Report = Callable[[float], object]
"""Called with the finished fraction, from 0.0 to 1.0."""

Progress = bool | Report | None
"""Type of the argument ``progress``: True for a bar, a function, or False or None for nothing."""


def part_of(report: Report | None, start: float, stop: float) -> Report | None:
    """Return the progress function for the part of the work between two fractions of the whole."""
    return None if report is None else lambda fraction: report(start + (stop - start) * fraction)


@contextlib.contextmanager
def reporting(progress: Progress) -> Iterator[Report | None]:
    """Yield the progress function for the core, or None without progress.

    Args:
        progress: True for a bar on stderr, a function of the finished fraction, or False or None for nothing.

    Raises:
        TypeError: ``progress`` is none of these.
    """
    if progress is None or isinstance(progress, (bool, np.bool_)):
        # stderr is None without a console.
        if not progress or sys.stderr is None:
            yield None
            return
        bar = _OpenedLate()
        try:
            yield _Forward(bar)
        finally:
            bar.close()
    elif callable(progress):
        yield _Forward(progress)
    else:
        raise TypeError(f"progress must be True, False, None or a function of the finished fraction, got {progress!r}")


class _Forward:
    """Forwards the highest fraction so far, since a search that starts over reports smaller ones."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._highest = 0.0

    def __call__(self, fraction: float) -> None:
        self._highest = min(max(fraction, self._highest), 1.0)
        self._report(self._highest)


class _Bar(Protocol):
    def __call__(self, fraction: float) -> None: ...

    def close(self) -> None: ...


class _OpenedLate:
    """A progress bar, created at the first report."""

    def __init__(self) -> None:
        self._bar: _Bar | None = None

    def __call__(self, fraction: float) -> None:
        if self._bar is None:
            self._bar = _tqdm_bar() or _PercentLine()
        self._bar(fraction)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _PercentLine:
    """Progress as one line of text, overwritten in place."""

    def __init__(self) -> None:
        self._percent = -1
        self(0.0)

    def __call__(self, fraction: float) -> None:
        percent = int(100 * fraction)
        if percent > self._percent:
            self._percent = percent
            sys.stderr.write(f"\rexactknn: {percent:3d}%")
            sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.write("\n")
        sys.stderr.flush()


class _TqdmBar:
    """Progress as a tqdm bar, with elapsed and remaining time."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __call__(self, fraction: float) -> None:
        done = round(100 * fraction, 1)
        if done > self._bar.n:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _tqdm_bar() -> _TqdmBar | None:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    return _TqdmBar(tqdm(total=100.0, desc="exactknn", bar_format=layout, file=sys.stderr, dynamic_ncols=True))
