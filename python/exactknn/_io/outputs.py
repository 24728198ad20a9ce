"""Result files: neighbours, distances, ground truth and pairs, each written atomically."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np

from exactknn._arrays.blocks import blocks, rows_in
from exactknn._io.errors import FileError, naming
from exactknn._io.npy import (
    BLOCK_BYTES,
    Array,
)

RESULT_SUFFIXES = (".npz", ".ivecs", ".ibin")
"""Suffixes of the formats for neighbours."""

DISTANCE_SUFFIXES = (".fbin", ".fvecs")
"""Suffixes of the formats for distances alone."""

PAIR_SUFFIXES = (".csv", ".npz")
"""Suffixes of the formats for matching pairs."""

# Lines of text formatted at a time.
_LINES = 1 << 15
_INT32_MAX = 2**31 - 1
_INT32_RESULTS = (".ivecs", ".ibin", ".bin")


class OutputFile:
    """A result file that appears complete or not at all.

    A temporary file is created at once in the folder of `path`, with the permissions of the file that it replaces, so
    whatever the system forbids is an error before the search. `finish` and then `commit` put it in place; leaving the
    context without them removes it. An `OSError` while writing names `path`.
    """

    def __init__(self, path: str) -> None:
        """Create the temporary file.

        Raises:
            FileError: the folder of `path` is missing or cannot be written, or `path` cannot be a file: it is a folder,
                a device, a pipe, a read-only file or a name that the file system rejects.
        """
        self.path = path
        there = _existing(path)
        # A symbolic link is kept: its target is replaced.
        self._target = Path(os.path.realpath(path))
        if there is not None and not self._target.exists():  # through /dev/stdout, for instance
            raise FileError(f"{path}: leads to a deleted file")
        folder = self._target.parent
        if not folder.is_dir():
            raise FileError(f"{path}: the folder {folder} does not exist")
        self._temporary = folder / f".exactknn-{secrets.token_hex(8)}.tmp"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:
            descriptor = os.open(self._temporary, flags, 0o666 if there is None else 0o600)
        except OSError as error:
            raise FileError(f"{path}: cannot write in the folder {folder}: {error.strerror}") from error
        if there is not None and hasattr(os, "fchown"):
            # Only the superuser may give files away, and some file systems have no modes.
            with contextlib.suppress(OSError):
                os.fchown(descriptor, there.st_uid, there.st_gid)
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, stat.S_IMODE(there.st_mode))
        self.stream: IO[bytes] = io.BufferedRandom(_NamedFile(descriptor, path))
        self._committed = False

    def finish(self) -> None:
        """Flush to disk; after this, a full disk can no longer cause a failure.

        Raises:
            OSError: the disk is full or broken.
        """
        self.stream.flush()
        with naming(self.path):
            os.fsync(self.stream.fileno())

    def commit(self) -> None:
        """Rename the finished file into place, atomically, replacing an existing file.

        Raises:
            OSError: the folder has vanished or changed since.
        """
        if os.name == "nt":  # no open file can be renamed
            self.stream.close()
        with naming(self.path):
            os.replace(self._temporary, self._target)
        self._committed = True
        self.stream.close()

    def rescue(self) -> Path | None:
        """Return a new file with the finished content in the current or the temporary folder, None if neither works.

        For a file that cannot be put in its place.
        """
        for folder in (os.getcwd, tempfile.gettempdir):
            try:
                return _copied(self.stream, Path(folder()), self._target.name)
            except (OSError, ValueError):  # ValueError: closed
                continue
        return None

    def __enter__(self) -> OutputFile:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the temporary file unless it was committed."""
        if not self._committed:
            with contextlib.suppress(OSError):  # closing flushes, which fails once more on a full disk
                self.stream.close()
            with contextlib.suppress(OSError):  # its folder may have vanished
                self._temporary.unlink()


class _NamedFile(io.FileIO):
    """An open file whose errors name the path that the user gave."""

    def __init__(self, descriptor: int, shown: str) -> None:
        super().__init__(descriptor, "r+b")
        self._shown = shown

    def write(self, data: Any) -> int:
        with naming(self._shown):
            return super().write(data)


def _existing(path: str) -> os.stat_result | None:
    """Return the status of the regular, writable file at ``path``, followed through links; None if there is none."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from error
    except ValueError as error:  # an embedded null byte
        raise FileError(f"{path!r}: not a path: {error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise FileError(f"{path}: is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise FileError(f"{path}: is a device or pipe, not a file")
    # A rename would replace a read-only file, and the superuser may open it.
    if not status.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise FileError(f"{path}: is read-only")
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from error
    return status


def _copied(source: IO[bytes], folder: Path, name: str) -> Path:
    """Return a new file with the content of ``source``; existing files are left alone, and a failed one is removed."""
    place = folder / name
    if os.path.lexists(place):
        place = folder / f"{secrets.token_hex(4)}-{name}"
    with place.open("xb") as copy:
        try:
            source.seek(0)
            shutil.copyfileobj(source, copy, BLOCK_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
        except BaseException:
            place.unlink()
            raise
    return place


def check_indices_fit(reference_rows: int, path: str, suffix: str) -> None:
    """Reject a format with 32-bit ids if row numbers of the reference may not fit.

    Raises:
        FileError: `suffix` is ``.ivecs``, ``.ibin`` or ``.bin`` and `reference_rows` is above 2**31.
    """
    if suffix in _INT32_RESULTS and reference_rows - 1 > _INT32_MAX:
        raise FileError(
            f"{path}: row numbers up to {reference_rows - 1} do not fit the int32 of {suffix}; expected an .npz output"
        )


def write_neighbours(stream: IO[bytes], suffix: str, distances: Array, indices: Array) -> None:
    """Write a result in the format of `suffix`, one of `RESULT_SUFFIXES`.

    Args:
        stream: binary, writable, at its beginning.
        suffix: ``.npz`` stores both arrays unchanged; ``.ivecs`` and ``.ibin`` store the indices as int32.
        distances: shape (n, k).
        indices: shape (n, k), int64.

    Raises:
        ValueError: an index does not fit int32.
    """
    if suffix == ".npz":
        np.savez(stream, distances=distances, indices=indices)
    else:
        write_matrix(stream, suffix, indices)


def write_matrix(stream: IO[bytes], suffix: str, matrix: Array) -> None:
    """Write a matrix as ``.ivecs``, ``.ibin`` (int32) or ``.fvecs``, ``.fbin`` (float32).

    Raises:
        ValueError: a value does not fit the type of the format.
    """
    rows, columns = matrix.shape
    value = np.dtype("<i4") if suffix in _INT32_RESULTS else np.dtype("<f4")
    _check_fits(matrix, value, suffix)
    if suffix in (".ibin", ".fbin"):
        if rows > 2**32 - 1:
            raise ValueError(f"{rows} rows do not fit the header of {suffix}")
        stream.write(np.array([rows, columns], dtype="<u4").tobytes())
        for start, stop in blocks(rows, rows_in(BLOCK_BYTES, columns * value.itemsize)):
            stream.write(matrix[start:stop].astype(value).tobytes())
        return
    record = np.dtype([("dimension", "<i4"), ("values", value, (columns,))])
    for start, stop in blocks(rows, rows_in(BLOCK_BYTES, record.itemsize)):
        block = np.empty(stop - start, dtype=record)
        block["dimension"] = columns
        block["values"] = matrix[start:stop]
        stream.write(block.tobytes())


def write_truth(stream: IO[bytes], distances: Array, indices: Array) -> None:
    """Write a ground truth as ``.bin``: the content of ``.ibin``, then the distances (float32).

    Args:
        stream: binary, writable, at its beginning.
        distances: shape (n, k), float32.
        indices: shape (n, k), int64.

    Raises:
        ValueError: a value does not fit the type of the format.
    """
    _check_fits(distances, np.dtype("<f4"), ".bin")
    write_matrix(stream, ".ibin", indices)
    for start, stop in blocks(len(distances), rows_in(BLOCK_BYTES, distances.shape[1] * 4)):
        stream.write(distances[start:stop].astype("<f4").tobytes())


class Pairs(NamedTuple):
    """Matching pairs, one entry per pair in each array."""

    query: Array
    """Row numbers, int64."""
    reference: Array
    """Row numbers, int64."""
    distance: Array
    """Their distances, float32 or float64."""


def write_pairs(stream: IO[bytes], suffix: str, found: Iterable[Pairs], dtype: np.dtype[Any]) -> int:
    """Return the number of matching pairs after writing them in the format of `suffix`, one of `PAIR_SUFFIXES`.

    Args:
        stream: binary, writable, at its beginning.
        suffix: ``.csv`` is written block by block: a header, then lines of query, reference and the shortest text that
            parses to the same distance. ``.npz``, with the three arrays, needs all blocks in memory.
        found: blocks of pairs, in output order.
        dtype: type of the distances.
    """
    if suffix == ".npz":
        parts = [Pairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, dtype)), *found]
        query, reference, distance = (np.concatenate(column) for column in zip(*parts, strict=True))
        np.savez(stream, query=query, reference=reference, distance=distance)
        return len(query)
    stream.write((",".join(Pairs._fields) + "\n").encode())
    count = 0
    for block in found:
        count += len(block.query)
        # Text takes far more memory than numbers.
        for start, stop in blocks(len(block.query), _LINES):
            query, reference, distance = (column[start:stop] for column in block)
            lines = zip(query.tolist(), reference.tolist(), distance.astype(str).tolist(), strict=True)
            stream.write("".join(f"{i},{j},{value}\n" for i, j, value in lines).encode())
    return count


def _check_fits(matrix: Array, value: np.dtype[Any], suffix: str) -> None:
    if value.kind == "f":
        if matrix.dtype.itemsize > value.itemsize:
            raise ValueError(f"{matrix.dtype.name} values do not fit the {value.name} of {suffix}")
    elif matrix.size and (int(matrix.max()) > _INT32_MAX or int(matrix.min()) < -_INT32_MAX - 1):
        raise ValueError(f"the index {int(np.abs(matrix).max())} does not fit the int32 of {suffix}")
