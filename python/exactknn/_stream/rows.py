"""The rows of a search in blocks: their sources, and how the next block is read ahead.

::

    array in memory ───the core's layout───> a view of each block ───────────────────────────────────┐
          └─another type or layout─┐                                                                 │
    mapped array ──────────────────┼──pieces──> checked, converted ──a thread──> one of two buffers ─┼──> blocks
    file of vectors ───────────────┘                                             (one block ahead)   │
    iterable of blocks of any size ──────────────the calling thread──────> one of two buffers ───────┘

Pages of a mapped file count as memory of the process while they are resident. So files are read, not mapped, and the
pages of an array mapped by the caller are released once they have been copied.

An iterable is consumed on the calling thread, since it may use thread-local state, such as torch's gradient mode or a
database connection. The search then runs on another thread (`ResumableSearch`).
"""

from __future__ import annotations

import io
import mmap
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from exactknn._arrays.blocks import blocks, rows_in
from exactknn._arrays.dtypes import Matrix, converted
from exactknn._arrays.matrix import as_matrix
from exactknn._io.errors import FileError
from exactknn._io.vectors import VectorFile
from exactknn._stream.thread import Call

PIECE_BYTES = 1 << 22
"""Bytes read, checked and converted at a time. Between two pieces the read-ahead thread checks whether to stop."""

Array = npt.NDArray[Any]
Blocks = Generator[Array, None, None]


class Rows(Protocol):
    """Rows of one floating type that can be read more than once."""

    rows: int
    dimension: int
    dtype_name: str

    def buffers(self, dtype_name: str) -> int:
        """Return how many block buffers of this type are needed besides the rows themselves: 2, or 0 for views."""

    def blocks(self, start: int, step: int, dtype_name: str) -> Blocks:
        """Yield all rows, starting at ``start``, ``step`` at a time, in the layout of `Matrix`.

        A block is valid until the next one is requested. Close the generator if it is not exhausted.
        """

    def take(self, start: int, stop: int, dtype_name: str) -> Array:
        """Return these rows as one block."""


def dtype_of(dtype_name: str) -> np.dtype[Any]:
    """Return the dtype of an array with values of this floating type."""
    return np.dtype(np.uint16 if dtype_name == "bfloat16" else dtype_name)


class _CopiedRows:
    """Rows copied into buffers, piece by piece."""

    rows: int
    dimension: int

    def buffers(self, dtype_name: str) -> int:
        return 2

    def blocks(self, start: int, step: int, dtype_name: str) -> Blocks:
        starts = range(start, self.rows, step)
        if not starts:
            return
        shape = (min(step, self.rows - start), self.dimension)
        buffers = [np.empty(shape, dtype_of(dtype_name)) for _ in starts[:2]]
        stopped = threading.Event()

        def read(block: int) -> Array:
            buffer = buffers[block % 2][: self.rows - starts[block]]
            self._fill(starts[block], buffer, dtype_name, stopped)
            return buffer

        ahead = Call(read, 0)
        try:
            for block in range(1, len(starts)):
                ready = ahead.result()
                # The previous block has been searched, so its buffer is free.
                ahead = Call(read, block)
                yield ready
            yield ahead.result()
        finally:
            stopped.set()
            ahead.join()

    def take(self, start: int, stop: int, dtype_name: str) -> Array:
        block = np.empty((stop - start, self.dimension), dtype_of(dtype_name))
        self._fill(start, block, dtype_name, threading.Event())
        return block

    def _fill(self, start: int, block: Array, dtype_name: str, stopped: threading.Event) -> None:
        for at, end in blocks(len(block), rows_in(PIECE_BYTES, self.dimension * block.itemsize)):
            if stopped.is_set():
                return
            self._read(start + at, block[at:end], dtype_name)

    def _read(self, start: int, piece: Array, dtype_name: str) -> None:
        """Fill the piece with rows, starting at ``start``."""
        raise NotImplementedError


class ArrayRows(_CopiedRows):
    """Rows of an array of any layout, in memory or mapped.

    Args:
        array: a matrix of numbers.
        dtype: the type in which its values are searched; uint16 for the bits of bfloat16 values.
        bfloat16: whether the values are such bits.
    """

    def __init__(self, array: Array, dtype: np.dtype[Any], bfloat16: bool) -> None:
        self.rows, self.dimension = array.shape
        self.dtype_name = "bfloat16" if bfloat16 else str(dtype.name)
        self._array = array
        self._dtype = dtype
        self._bfloat16 = bfloat16
        self._map = _map_of(array)

    def buffers(self, dtype_name: str) -> int:
        return 0 if self.is_zero_copy(dtype_name) else 2

    def blocks(self, start: int, step: int, dtype_name: str) -> Blocks:
        if not self.is_zero_copy(dtype_name):
            yield from super().blocks(start, step, dtype_name)
            return
        for at in range(start, self.rows, step):
            yield self._array[at : at + step]

    def take(self, start: int, stop: int, dtype_name: str) -> Array:
        if self.is_zero_copy(dtype_name):
            return self._array[start:stop]
        return super().take(start, stop, dtype_name)

    def is_zero_copy(self, dtype_name: str) -> bool:
        flags = self._array.flags
        return (
            self._map is None
            and self.dtype_name == dtype_name
            and self._array.dtype == self._dtype
            and flags.c_contiguous
            and flags.aligned
        )

    def _read(self, start: int, piece: Array, dtype_name: str) -> None:
        values = np.require(self._array[start : start + len(piece)], self._dtype, ["C", "A"])
        piece[:] = converted(Matrix(values, self._bfloat16), dtype_name)
        # Pages of a copy-on-write map may be modified, and are then the only copy.
        if self._map is not None and self._map.mode != "c" and hasattr(mmap, "MADV_DONTNEED"):
            self._map._mmap.madvise(mmap.MADV_DONTNEED)


def _map_of(array: Any) -> Any:
    """Return the mapped array that this one is a view of, or None."""
    # NumPy's copies of a mapped array have the same class, but no map.
    while not (array is None or (isinstance(array, np.memmap) and getattr(array, "_mmap", None) is not None)):
        array = getattr(array, "base", None)
    return array


class FileRows(_CopiedRows):
    """Contiguous rows of a file.

    Args:
        vectors: the file, with an ``offset``.
        stream: the same file, open for reading, unbuffered.
    """

    def __init__(self, vectors: VectorFile, stream: io.FileIO) -> None:
        self.rows, self.dimension = vectors.rows, vectors.dimension
        self.dtype_name = str(vectors.dtype.name)
        self._vectors = vectors
        self._stream = stream
        raw = vectors.raw.dtype
        self._record = raw if raw.names else np.dtype((raw, (self.dimension,)))

    def _read(self, start: int, piece: Array, dtype_name: str) -> None:
        if self.dtype_name == dtype_name and self._record.base == piece.dtype:
            self._read_bytes(start, piece.reshape(-1).view(np.uint8))
            return
        raw = np.empty(len(piece) * self._record.itemsize, np.uint8)
        self._read_bytes(start, raw)
        values = self._vectors.values_of(np.frombuffer(raw, self._record), start)
        values = np.require(values, self._vectors.dtype, ["C", "A"])
        piece[:] = converted(Matrix(values, False), dtype_name)

    def _read_bytes(self, start: int, wanted: Array) -> None:
        assert self._vectors.offset is not None
        view = memoryview(wanted.data)
        try:
            self._stream.seek(self._vectors.offset + start * self._record.itemsize)
            while view:
                count = self._stream.readinto(view)
                if not count:
                    raise FileError(f"{self._vectors.path}: was truncated while it was read")
                view = view[count:]
        except OSError as error:
            raise FileError(f"{self._vectors.path}: cannot be read: {error.strerror or error}") from error


class Stream:
    """Blocks of any size from an iterable, regrouped into blocks of equal size.

    All blocks must have the floating type and dimension of the first non-empty one; empty blocks are skipped. The
    constructor consumes the first non-empty block to learn both.

    Args:
        blocks: matrices of any kind that `as_matrix` accepts.
        name: of the argument, for error messages.

    Attributes:
        rows: number of rows, or None if unknown until the end.
        dimension: of the rows, or None if there are none.
        dtype_name: floating type of the rows, or None if there are none.
    """

    def __init__(self, blocks: Iterable[Any], name: str) -> None:
        listed = isinstance(blocks, (list, tuple)) and all(getattr(block, "ndim", None) == 2 for block in blocks)
        self.rows = sum(map(len, blocks)) if listed else None
        self.dimension: int | None = None
        self.dtype_name: str | None = None
        self._name = name
        self._source = iter(blocks)
        self._matrices = self._checked()
        self._first = next(self._matrices, None)
        if self._first is not None:
            self.dimension, self.dtype_name = self._first.array.shape[1], self._first.dtype_name

    def buffers(self, dtype_name: str) -> int:
        """Return how many block buffers are needed besides the blocks of the iterable, as `Rows.buffers`."""
        return 2

    def blocks(self, step: int, dtype_name: str) -> Blocks:
        """Yield the rows, ``step`` at a time and once only; a block is valid until the next but one is requested."""
        matrix, self._first = self._first, None
        buffer, other = (np.empty((step, self.dimension or 0), dtype_of(dtype_name)) for _ in range(2))
        piece, filled = rows_in(PIECE_BYTES, buffer[:1].nbytes), 0
        while matrix is not None:
            for start, stop in blocks(len(matrix.array), piece):
                part = converted(matrix._replace(array=matrix.array[start:stop]), dtype_name)
                while len(part):
                    count = min(len(part), step - filled)
                    buffer[filled : filled + count] = part[:count]
                    part, filled = part[count:], filled + count
                    if filled == step:
                        yield buffer
                        buffer, other, filled = other, buffer, 0
            # Drop this block before the iterable makes the next one.
            del matrix, part
            matrix = next(self._matrices, None)
        if filled:
            yield buffer[:filled]

    def _checked(self) -> Iterator[Matrix]:
        number = -1
        for block in self._source:  # enumerate would hold each block while the next one is made
            number += 1
            name = f"{self._name} block {number}"
            if isinstance(block, (list, tuple)) and any(getattr(part, "ndim", 0) == 2 for part in block):
                raise TypeError(
                    f"{name} must be one matrix, got a {type(block).__name__} of {len(block)} arrays: pass only the "
                    "rows, for instance (rows for rows, labels in loader)"
                )
            matrix = as_matrix(block, name)
            del block
            if not len(matrix.array):
                continue
            if self.dtype_name is not None and matrix.dtype_name != self.dtype_name:
                raise TypeError(f"{name} must hold {self.dtype_name} values like the first, got {matrix.dtype_name}")
            if self.dimension is not None and matrix.array.shape[1] != self.dimension:
                raise ValueError(
                    f"{name} must have {self.dimension} columns like the first, got shape {matrix.array.shape}"
                )
            yield matrix
            del matrix
