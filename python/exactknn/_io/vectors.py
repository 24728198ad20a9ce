"""Vector files: header checked, memory-mapped, values copied only if necessary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exactknn._arrays.blocks import blocks, rows_in
from exactknn._arrays.matrix import EXACT_FLOAT32
from exactknn._io.errors import FileError
from exactknn._io.npy import (
    BLOCK_BYTES,
    Array,
    Check,
    check_length,
    check_possible,
    map_npy_array,
    map_values,
    read_npz_array,
)
from exactknn._io.paths import size_of, split_array_name

VECTOR_SUFFIXES = (".npy", ".npz", ".fvecs", ".bvecs", ".ivecs", ".fbin", ".u8bin", ".i8bin")
"""Suffixes that `open_vectors` accepts."""

MAX_DIMENSION = 1 << 20
"""Largest dimension accepted in a header without a magic number; other file types give far larger or smaller ones."""

_VECS_VALUES: dict[str, np.dtype[Any]] = {
    ".fvecs": np.dtype("<f4"),
    ".bvecs": np.dtype("u1"),
    ".ivecs": np.dtype("<i4"),
}
_BIN_VALUES: dict[str, np.dtype[Any]] = {".fbin": np.dtype("<f4"), ".u8bin": np.dtype("u1"), ".i8bin": np.dtype("i1")}


@dataclass(frozen=True, eq=False)
class VectorFile:
    """A vector file with a checked header, whose values have not been read.

    Attributes:
        path: the path as given, with ``:name`` for a selected array of an ``.npz``.
        source: the file itself.
        rows: number of vectors, at least 0.
        dimension: values per vector, at least 1.
        dtype: type in which the values are searched, which represents them exactly: float16, float32 or float64.
        raw: the rows as stored in the file: a matrix, or records of a row's dimension and values.
        offset: file offset of the first row, if the rows are contiguous, else None.
    """

    path: str
    source: Path
    rows: int
    dimension: int
    dtype: np.dtype[Any]
    raw: Array
    offset: int | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether the rows are in a memory-mapped file; those of an archive are in memory."""
        return self.source.suffix.lower() != ".npz"

    def load(self) -> Array:
        """Return the vectors, shape (rows, dimension), of dtype `dtype` up to its byte order.

        Floating-point arrays are zero-copy views of the mapped file, in any byte and axis order. Integers are converted
        to float32, which must represent each of them exactly.

        Raises:
            FileError: a row of an ``.fvecs``, ``.bvecs`` or ``.ivecs`` file has another dimension than the first, or a
                row of an ``.ivecs`` file holds a value beyond 2**24.
        """
        if self.raw.dtype.kind == "f":
            return self.raw
        vectors = np.empty((self.rows, self.dimension), dtype=self.dtype)
        for start, stop in blocks(self.rows, rows_in(BLOCK_BYTES, self.raw.nbytes // max(1, self.rows))):
            vectors[start:stop] = self.values_of(self.raw[start:stop], start)
        return vectors

    def values_of(self, raw: Array, start: int) -> Array:
        """Return the values of consecutive raw rows, the first of which is row ``start``.

        Raises:
            FileError: as `load`.
        """
        if raw.dtype.names is None:
            return raw
        self._check_row_dimensions(raw["dimension"], start)
        self._check_exact(raw["values"], start)
        return raw["values"]

    def _check_exact(self, values: Array, start: int) -> None:
        if values.dtype.itemsize < 4 or values.dtype.kind == "f":
            return
        wrong = np.argwhere((values > EXACT_FLOAT32) | (values < -EXACT_FLOAT32))
        if wrong.size:
            row, column = (int(i) for i in wrong[0])
            raise FileError(
                f"{self.path}: row {start + row} holds {values[row, column]}, which float32 may not hold exactly; "
                f"expected integers within 2**24 (are these ids?)"
            )

    def _check_row_dimensions(self, dimensions: Array, start: int) -> None:
        wrong = np.flatnonzero(dimensions != self.dimension)
        if wrong.size:
            row = int(wrong[0])
            raise FileError(
                f"{self.path}: row {start + row} has dimension {dimensions[row]}, row 0 has {self.dimension}; "
                "all rows must have the same dimension"
            )


def open_vectors(path: str, most_bytes: float = math.inf) -> VectorFile:
    """Return a memory-mapped file of vectors, its header checked against its size.

    Args:
        path: a file with one of `VECTOR_SUFFIXES`. ``file.npz:name`` selects one of several arrays of an ``.npz``.
        most_bytes: size limit of an array of an ``.npz``, which is read, not mapped.

    Raises:
        FileError: the file is missing, empty, truncated, of an unknown kind, does not hold vectors, or is too large.
    """
    name, array_name = split_array_name(path)
    source = Path(name)
    suffix = source.suffix.lower()
    if suffix == ".ibin":
        raise FileError(f"{path}: holds integer ids, not vectors; expected one of {', '.join(VECTOR_SUFFIXES)}")
    if suffix not in VECTOR_SUFFIXES:
        raise FileError(f"{path}: unknown suffix {suffix!r}; expected one of {', '.join(VECTOR_SUFFIXES)}")
    try:
        size = size_of(source, path)
        if suffix in (".npy", ".npz"):
            if suffix == ".npy":
                values = map_npy_array(source, path, size, _check_matrix)
                # The length matches the header, so the array ends where the file does.
                offset = size - values.nbytes if values.flags.c_contiguous else None
            else:
                values = read_npz_array(source, path, array_name, _matrix_up_to(most_bytes))
                offset = None
            rows, dimension = values.shape
            return VectorFile(path, source, rows, dimension, _vector_dtype(values.dtype, path), values, offset)
        if suffix in _VECS_VALUES:
            return _open_vecs(source, path, size, _VECS_VALUES[suffix])
        return _open_bin(source, path, size, suffix)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error


def _vector_dtype(dtype: np.dtype[Any], path: str) -> np.dtype[Any]:
    """Return the dtype in which values of `dtype` are searched, which represents them exactly."""
    if dtype.hasobject:
        raise FileError(f"{path}: holds pickled Python objects, which are never loaded; expected a matrix of numbers")
    if dtype.kind == "f" and dtype.itemsize in (2, 4, 8):
        return dtype.newbyteorder("=")
    if dtype.kind in "iu" and dtype.itemsize <= 2:
        return np.dtype(np.float32)
    if dtype.kind in "iu":
        raise FileError(
            f"{path}: holds {dtype.name} values, which look like ids or labels and may not fit float32 exactly; "
            "convert them to float32 or float64 first"
        )
    raise FileError(f"{path}: holds {dtype.name} values; expected float16, float32, float64 or 8- or 16-bit integers")


def _check_matrix(shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> None:
    _vector_dtype(dtype, path)
    if len(shape) != 2:
        raise FileError(f"{path}: a {len(shape)}-D array of shape {shape}; expected 2-D, one row per vector")
    check_possible(shape, dtype, path)
    if shape[1] == 0:
        raise FileError(f"{path}: the vectors have dimension 0 (shape {shape})")


def _matrix_up_to(most_bytes: float) -> Check:
    def check(shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> None:
        _check_matrix(shape, dtype, path)
        size = math.prod(shape) * dtype.itemsize
        if size > most_bytes:
            raise FileError(
                f"{path}: an array of an .npz file is read whole, and this one takes {size} bytes, more than allowed; "
                "a .npy file is read in blocks"
            )

    return check


def _open_vecs(source: Path, path: str, size: int, values: np.dtype[Any]) -> VectorFile:
    """Return a mapped .fvecs (float32), .bvecs (uint8) or .ivecs (int32) file: each row is int32 d, then d values."""
    with source.open("rb") as stream:
        head = stream.read(4)
    if len(head) < 4:
        raise FileError(f"{path}: is {size} bytes long; each row begins with a 4-byte dimension")
    dimension = int.from_bytes(head, "little", signed=True)
    _check_dimension(dimension, source, path)
    record = np.dtype([("dimension", "<i4"), ("values", values, (dimension,))])
    rows, rest = divmod(size, record.itemsize)
    records = map_values(source, record, 0, (rows,))
    vectors = VectorFile(path, source, rows, dimension, np.dtype(np.float32), records, 0)
    if rest:
        # Either some row has another dimension, or the last row is incomplete.
        for start, stop in blocks(rows, rows_in(BLOCK_BYTES, record.itemsize)):
            vectors._check_row_dimensions(records["dimension"][start:stop], start)
        raise FileError(
            f"{path}: row {rows} is cut short: it has {rest} bytes, a row of {dimension} values has {record.itemsize}"
        )
    return vectors


def _open_bin(source: Path, path: str, size: int, suffix: str) -> VectorFile:
    """Return a mapped .fbin (float32), .u8bin (uint8) or .i8bin (int8) file: uint32 n, uint32 d, then all rows."""
    with source.open("rb") as stream:
        head = stream.read(8)
    if len(head) < 8:
        raise FileError(f"{path}: is {size} bytes long; the header alone (rows, dimension) has 8")
    rows, dimension = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:], "little")
    _check_dimension(dimension, source, path)
    values = _BIN_VALUES[suffix]
    hint = "".join(
        f"; the size would fit {other}"
        for other, dtype in _BIN_VALUES.items()
        if dtype.itemsize != values.itemsize and size - 8 == rows * dimension * dtype.itemsize
    )
    wanted = rows * dimension * values.itemsize
    check_length(path, size - 8, wanted, f"{rows} rows of {dimension} {values.name} values", hint)
    result_dtype = np.dtype(np.float32)
    return VectorFile(path, source, rows, dimension, result_dtype, map_values(source, values, 8, (rows, dimension)), 8)


def _check_dimension(dimension: int, source: Path, path: str) -> None:
    if not 1 <= dimension <= MAX_DIMENSION:
        raise FileError(
            f"{path}: the header gives dimension {dimension}, expected 1 to {MAX_DIMENSION}; "
            f"is it really {_an(source.suffix.lower())} file?"
        )


def _an(suffix: str) -> str:
    return f"an {suffix}" if suffix in (".fvecs", ".ivecs", ".fbin", ".i8bin") else f"a {suffix}"
