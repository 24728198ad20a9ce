"""The file from which an interrupted search goes on.

::

    State + what the search is of ──> temporary file ──rename──> FILE        (now and then, and at an interrupt)
    FILE ──same search? whole?──> State                                      (at the start, where there is one)

It is an ``.npz``: ``about`` (JSON, as bytes), ``place`` (first query of the block, references seen), ``ranks`` and
``candidates`` of that block, ``distances`` and ``indices`` of the queries before it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exactknn._io.errors import FileError
from exactknn._io.npy import read_npz_array
from exactknn._io.outputs import OutputFile
from exactknn._stream.search import ResumableSearch, State

SECONDS = 30.0
"""Time between two writings, at least."""
SHARE = 20
"""A writing takes at most one in so many parts of the time: a long one waits longer for the next."""
_ABOUT_BYTES = 1 << 20

Array = npt.NDArray[Any]


class Checkpoint:
    """A file with the state of one search.

    Args:
        path: where it is, or will be.
        about: what the search is of, by what a message is to call it. A state is of use only where all of it is equal.
    """

    def __init__(self, path: str, about: Mapping[str, object]) -> None:
        """Check that the file can be written.

        Raises:
            FileError: the folder is missing or cannot be written, or the path is a folder.
        """
        with OutputFile(path):
            pass
        self.path = path
        self._about = json.dumps(about)
        self._due = time.monotonic() + SECONDS

    def is_due(self) -> bool:
        """Tell whether it is time to write."""
        return time.monotonic() >= self._due

    def write(self, state: State) -> None:
        """Replace the file, in one step.

        Raises:
            FileError, OSError: it cannot be written; the one before is still there.
        """
        start = time.monotonic()
        with OutputFile(self.path) as output:
            about = np.frombuffer(self._about.encode(), np.uint8)
            place = np.array([state.first_query, state.rows])
            arrays = state._asdict() | {"about": about, "place": place}
            del arrays["first_query"], arrays["rows"]
            np.savez(output.stream, **arrays)
            output.finish()
            output.commit()
        end = time.monotonic()
        self._due = end + max(SECONDS, SHARE * (end - start))

    def restore(self, search: ResumableSearch) -> bool:
        """Let the search go on from the file; False where there is none.

        Raises:
            FileError: it is no checkpoint, damaged, or of another search.
            OSError: it cannot be read.
        """
        if not os.path.exists(self.path):
            return False
        if not os.path.isfile(self.path):  # a pipe would be waited for
            raise FileError(f"{self.path}: is a device or pipe, not a file")
        try:
            self._compare(json.loads(self._array("about", np.dtype(np.uint8), None).tobytes()))
            first, rows = (int(number) for number in self._array("place", np.dtype(np.int64), (2,)))
            shapes = search.state_shapes(first, rows)
            arrays = {name: self._array(name, dtype, shape) for name, (dtype, shape) in shapes.items()}
            search.restore(State(first, rows, **arrays))
        except _DifferentSearchError:
            raise
        except ValueError as error:
            reason = str(error).removeprefix(f"{self.path}: ")
            raise FileError(
                f"{self.path}: is no checkpoint of a search, or a damaged one ({reason}); "
                "name another file, or remove it"
            ) from error
        return True

    def _compare(self, about: Any) -> None:
        mine = json.loads(self._about)
        if not isinstance(about, dict) or about.keys() != mine.keys():
            raise ValueError("it says something else than this version would of what the search is of")
        for name, value in mine.items():
            if about[name] != value:
                raise _DifferentSearchError(
                    f"{self.path}: is of another search: {name} was {about[name]}, now it is {value}; "
                    "name another file, or remove it to start anew"
                )

    def _array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Array:
        def check(found_shape: tuple[int, ...], found_dtype: np.dtype[Any], path: str) -> None:
            wrong = found_shape != shape if shape is not None else math.prod(found_shape) > _ABOUT_BYTES
            if found_dtype != dtype or wrong:
                raise FileError(f"{path}: {name} is {found_dtype.name} of shape {found_shape}")

        return read_npz_array(Path(self.path), self.path, name, check)


class _DifferentSearchError(FileError):
    """The file is whole, but of no use to this search."""
