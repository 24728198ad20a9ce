"""The file from which an interrupted search resumes.

::

    State + identity of the search ──> temporary file ──rename──> FILE        (periodically, and at an interrupt)
    FILE ──same search? undamaged?──> State                                   (at the start, if it exists)

It is an ``.npz``: ``about`` (JSON, as bytes), ``place`` (first query of the block, references searched), ``ranks`` and
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
"""Minimum time between two writes."""
SHARE = 20
"""Writing takes at most one part in ``SHARE`` of the time: after a long write the next one waits longer."""
_ABOUT_BYTES = 1 << 20

Array = npt.NDArray[Any]


class Checkpoint:
    """A file with the state of one search.

    Args:
        path: the file, which need not exist.
        about: the identity of the search, by the names that messages use. A state is valid only if all of it is equal.
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
        """Return whether it is time to write."""
        return time.monotonic() >= self._due

    def write(self, state: State) -> None:
        """Replace the file atomically.

        Raises:
            FileError, OSError: the file cannot be written; an existing one is unchanged.
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
        """Return whether the file exists, after restoring the search from it.

        Raises:
            FileError: the file is not a checkpoint, is damaged, or belongs to another search.
            OSError: the file cannot be read.
        """
        if not os.path.exists(self.path):
            return False
        if not os.path.isfile(self.path):  # reading a pipe would block
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
                f"{self.path}: is not a checkpoint, or is damaged ({reason}); name another file, or remove it"
            ) from error
        return True

    def _compare(self, about: Any) -> None:
        mine = json.loads(self._about)
        if not isinstance(about, dict) or about.keys() != mine.keys():
            raise ValueError("its description of the search has other fields than this version writes")
        for name, value in mine.items():
            if about[name] != value:
                raise _DifferentSearchError(
                    f"{self.path}: belongs to another search: {name} was {about[name]}, now it is {value}; "
                    "name another file, or remove it to start over"
                )

    def _array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Array:
        def check(found_shape: tuple[int, ...], found_dtype: np.dtype[Any], path: str) -> None:
            wrong = found_shape != shape if shape is not None else math.prod(found_shape) > _ABOUT_BYTES
            if found_dtype != dtype or wrong:
                raise FileError(f"{path}: {name} is {found_dtype.name} of shape {found_shape}")

        return read_npz_array(Path(self.path), self.path, name, check)


class _DifferentSearchError(FileError):
    """The file is valid, but belongs to another search."""
