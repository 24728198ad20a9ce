"""Vector files in, result files out: the formats in which public nearest-neighbour benchmarks ship.

::

    Q.npy  Q.npz[:name]                 (NumPy)                      open_vectors           load
    Q.fvecs  Q.bvecs  Q.ivecs           (each row: d, d values)   -----------------> VectorFile -----> float array
    Q.fbin  Q.u8bin  Q.i8bin            (n, d, then all rows)      header checked,         values copied only
                                                                   file memory-mapped      where they have to be

    (distances, indices) ----> OutputFile: a temporary file in the folder of the output ----rename----> OUT.npz
                                                                                          .ivecs .ibin .bin .fvecs .fbin
    blocks of matching pairs ---> the same -------------------------------------------rename----> OUT.csv OUT.npz

Nothing here unpickles anything, and nothing is allocated from a number in a header before that number has been
compared with the size of the file. Every refusal is a `FileError` with a one-line text that begins with the path.
"""

from __future__ import annotations

import contextlib
import errno
import io
import lzma
import math
import os
import secrets
import stat
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

VECTOR_SUFFIXES = (".npy", ".npz", ".fvecs", ".bvecs", ".ivecs", ".fbin", ".u8bin", ".i8bin")
"""What `open_vectors` reads."""

RESULT_SUFFIXES = (".npz", ".ivecs", ".ibin")
"""What neighbours can be written to."""

DISTANCE_SUFFIXES = (".fbin", ".fvecs")
"""What distances alone can be written to."""

PAIR_SUFFIXES = (".csv", ".npz")
"""What matching pairs can be written to."""

MAX_DIMENSION = 1 << 20
"""Largest dimension believed of a header without a magic number; any other file read as one says far more, or less."""

_VECS_VALUES: dict[str, np.dtype[Any]] = {
    ".fvecs": np.dtype("<f4"),
    ".bvecs": np.dtype("u1"),
    ".ivecs": np.dtype("<i4"),
}
_BIN_VALUES: dict[str, np.dtype[Any]] = {".fbin": np.dtype("<f4"), ".u8bin": np.dtype("u1"), ".i8bin": np.dtype("i1")}
_NPY_MAGIC = b"\x93NUMPY"
# A version 1 header is at most 65,535 bytes and its prefix 10; NumPy itself refuses to evaluate more than 10,000.
_NPY_HEADER_BYTES = 1 << 17
# Rows go through memory in pieces of about this size, so that a conversion never needs a second copy of the whole.
_BLOCK_BYTES = 1 << 24
# Lines of text that are made at once.
_LINES = 1 << 15
_INT32_MAX = 2**31 - 1
# Every integer up to here is a float32 number; above, only some are.
_FLOAT32_INTEGERS = 2**24
_INT32_RESULTS = (".ivecs", ".ibin", ".bin")

Array = npt.NDArray[Any]
# Refuses the shape and the type of an array, named by its path, before its values are read.
Check = Callable[[tuple[int, ...], np.dtype[Any], str], None]


class FileError(ValueError):
    """A file cannot be used; the text is one line, begins with the path and says what was wanted."""


@dataclass(frozen=True, eq=False)
class VectorFile:
    """A vector file whose header has been checked and whose values have not been touched.

    Attributes:
        path: the path as given, with ``:name`` for a chosen array of an ``.npz``.
        source: the file itself.
        rows: number of vectors, at least 0.
        dimension: values of a vector, at least 1.
        dtype: type in which the values are searched, each of them exactly: float16, float32 or float64.
        raw: the rows as they lie in the file: a matrix, or records of a row's dimension and its values.
        offset: where the first row begins in the file, if the others follow it one behind the other, else None.
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
        """Whether the rows lie in a mapped file; those of an archive had to be read."""
        return self.source.suffix.lower() != ".npz"

    def load(self) -> Array:
        """Return the vectors, shape (rows, dimension), of dtype `dtype` up to its byte order.

        Floating-point arrays are returned as they lie in the mapped file, in any order of bytes and of axes.
        Integers become float32, which must hold each of them exactly.

        Raises:
            FileError: a row of an ``.fvecs``, ``.bvecs`` or ``.ivecs`` file names another dimension than the first, or
                one of an ``.ivecs`` file holds a value beyond 2**24.
        """
        if self.raw.dtype.kind == "f":
            return self.raw
        vectors = np.empty((self.rows, self.dimension), dtype=self.dtype)
        for start, stop in _blocks(self.rows, self.raw.nbytes // max(1, self.rows)):
            vectors[start:stop] = self.values_of(self.raw[start:stop], start)
        return vectors

    def values_of(self, raw: Array, start: int) -> Array:
        """Return the values of rows as they lie in the file, the first of which is row ``start``.

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
        wrong = np.argwhere((values > _FLOAT32_INTEGERS) | (values < -_FLOAT32_INTEGERS))
        if wrong.size:
            row, column = (int(i) for i in wrong[0])
            raise FileError(
                f"{self.path}: row {start + row} holds {values[row, column]}, which float32 may not hold exactly; "
                f"wanted integers within 2**24 (are these ids?)"
            )

    def _check_row_dimensions(self, dimensions: Array, start: int) -> None:
        wrong = np.flatnonzero(dimensions != self.dimension)
        if wrong.size:
            row = int(wrong[0])
            raise FileError(
                f"{self.path}: row {start + row} says it has {dimensions[row]} values, row 0 says {self.dimension}; "
                "all rows must have the same dimension"
            )


def open_vectors(path: str, most_bytes: float = math.inf) -> VectorFile:
    """Open a file of vectors, check its header against its size and map it into memory.

    Args:
        path: a file with one of `VECTOR_SUFFIXES`. ``file.npz:name`` chooses an array of an ``.npz`` with several.
        most_bytes: the largest array of an ``.npz``, which is read and not mapped, that is taken.

    Raises:
        FileError: the file is missing, empty, cut short, of an unknown kind, holds no vectors, or too many of them.
    """
    name, array_name = split_array_name(path)
    source = Path(name)
    suffix = source.suffix.lower()
    if suffix == ".ibin":
        raise FileError(f"{path}: holds integer ids, not vectors; wanted one of {', '.join(VECTOR_SUFFIXES)}")
    if suffix not in VECTOR_SUFFIXES:
        raise FileError(f"{path}: unknown suffix {suffix!r}; wanted one of {', '.join(VECTOR_SUFFIXES)}")
    try:
        size = size_of(source, path)
        if suffix in (".npy", ".npz"):
            if suffix == ".npy":
                values = map_npy_array(source, path, size, _check_matrix)
                # Its length is what the header says, so the array ends where the file does.
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


def source_of(path: str) -> Path:
    """Return the file of ``path``, which may choose an array of it by ``file.npz:name``."""
    return Path(split_array_name(path)[0])


def split_array_name(path: str) -> tuple[str, str | None]:
    """Take ``file.npz:name`` apart; a file that really has a colon in its name wins."""
    at = path.lower().rfind(".npz:")
    if at < 0 or os.path.exists(path):
        return path, None
    return path[: at + 4], path[at + 5 :]


def size_of(source: Path, path: str) -> int:
    try:
        status = source.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileError(f"{path}: no such file") from error
    except ValueError as error:  # an embedded null byte
        raise FileError(f"{path!r}: not a path: {error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise FileError(f"{path}: is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise FileError(f"{path}: is not a regular file, so it cannot be mapped into memory")
    if status.st_size == 0:
        raise FileError(f"{path}: the file is empty")
    return status.st_size


def _map(source: Path, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], order: str = "C") -> Array:
    if 0 in shape:  # nothing to map, and mmap refuses an empty range
        return np.empty(shape, dtype)
    try:
        mapped: Array = np.memmap(source, dtype=dtype, mode="r", offset=offset, shape=shape, order=order)  # type: ignore[call-overload]
    except ValueError as error:  # it has become shorter since its size was read
        raise FileError(f"{source}: cannot be mapped into memory: {one_line(error)}") from error
    return np.asarray(mapped)


def _blocks(rows: int, row_bytes: int) -> list[tuple[int, int]]:
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


# --- NumPy ---------------------------------------------------------------------------------------------------------


def map_npy_array(source: Path, path: str, size: int, check: Check) -> Array:
    """Map the array of a file once ``check`` has not refused its shape and type."""
    with source.open("rb") as stream:
        head = stream.read(_NPY_HEADER_BYTES)
    shape, fortran, dtype, offset = _npy_header(head, path)
    check(shape, dtype, path)
    _check_length(path, size - offset, math.prod(shape) * dtype.itemsize, f"an array {shape} of {dtype.name}")
    return _map(source, dtype, offset, shape, "F" if fortran else "C")


def read_npz_array(source: Path, path: str, array_name: str | None, check: Check) -> Array:
    """Read one array of an archive; its members may be compressed, so they are read and not mapped.

    Args:
        source: the file.
        path: what the messages call it.
        array_name: which array; None: the only one.
        check: refuses the shape and the type of the array, given with ``path``, before its values are read.

    Raises:
        FileError: the archive or the array cannot be read.
        OSError: nor can the file.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            member = _choose_member(archive, path, array_name)
            with archive.open(member) as stream:
                return _read_npz_member(stream, path, member, check)
    except FileError:
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A damaged directory of the archive sends zipfile to a place before the beginning of the file.
        raise FileError(f"{path}: the archive cannot be read: {one_line(error)}") from error
    # It also reaches zipfile's decoding and seeking (ValueError, IndexError, struct.error).
    # RuntimeError: encrypted; its NotImplementedError: a compression this Python lacks.
    except (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        struct.error,
        EOFError,
        RuntimeError,
        LookupError,
        ValueError,
    ) as error:
        if isinstance(error, zipfile.BadZipFile) and not zipfile.is_zipfile(source):
            raise FileError(f"{path}: not a zip archive, so not an .npz file (or it is cut short)") from error
        raise FileError(f"{path}: the archive cannot be read: {one_line(error)}") from error


def _choose_member(archive: zipfile.ZipFile, path: str, array_name: str | None) -> zipfile.ZipInfo:
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist() if not info.is_dir()}
    names = ", ".join(name if name.isprintable() else repr(name) for name in members)
    if not members:
        raise FileError(f"{path}: the archive holds no array")
    if array_name is not None:
        if array_name not in members:
            raise FileError(f"{path}: no array named {array_name!r}; the archive holds: {names}")
        return members[array_name]
    if len(members) > 1:
        first = next(iter(members))
        raise FileError(f"{path}: holds {len(members)} arrays ({names}); choose one, for instance {path}:{first}")
    return next(iter(members.values()))


def _read_npz_member(stream: IO[bytes], path: str, member: zipfile.ZipInfo, check: Check) -> Array:
    head = stream.read(_NPY_HEADER_BYTES)
    shape, fortran, dtype, offset = _npy_header(head, path)
    check(shape, dtype, path)
    wanted = math.prod(shape) * dtype.itemsize
    _check_length(path, member.file_size - offset, wanted, f"an array {shape} of {dtype.name}")
    buffer = bytearray(head[offset:])
    while piece := stream.read(_BLOCK_BYTES):  # to the end, where zipfile compares the checksum
        buffer += piece
    _check_length(path, len(buffer), wanted, f"an array {shape} of {dtype.name}")
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order="F" if fortran else "C")


def _npy_header(head: bytes, path: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Parse the beginning of a .npy file: shape, whether in Fortran order, dtype, offset of the values."""
    if not head.startswith(_NPY_MAGIC):
        raise FileError(f"{path}: not a .npy array: it begins with {head[:6]!r}, wanted {_NPY_MAGIC!r}")
    stream = io.BytesIO(head)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        version = np.lib.format.read_magic(stream)
        if version not in readers:
            raise FileError(f"{path}: .npy format {version[0]}.{version[1]}; plain arrays have 1.0 or 2.0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers of Python 2, which are read all the same
            shape, fortran, dtype = readers[version](stream)
    except FileError:
        raise
    # A damaged header goes through NumPy's literal_eval and tokenizer, which have all of these to say about it.
    except (ValueError, SyntaxError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise FileError(f"{path}: the .npy header cannot be read: {one_line(error)}") from error
    except (tokenize.TokenError, RecursionError, MemoryError, AttributeError) as error:
        raise FileError(f"{path}: the .npy header cannot be read: {one_line(error)}") from error
    return shape, fortran, dtype, stream.tell()


def _vector_dtype(dtype: np.dtype[Any], path: str) -> np.dtype[Any]:
    """Return the dtype in which values of `dtype` are searched, each of them exactly."""
    if dtype.hasobject:
        raise FileError(f"{path}: an array of Python objects, which is never unpickled; wanted a matrix of numbers")
    if dtype.kind == "f" and dtype.itemsize in (2, 4, 8):
        return dtype.newbyteorder("=")
    if dtype.kind in "iu" and dtype.itemsize <= 2:
        return np.dtype(np.float32)
    if dtype.kind in "iu":
        raise FileError(
            f"{path}: holds {dtype.name} values, which look like ids or labels and may not fit float32 exactly; "
            "convert them to float32 or float64 first"
        )
    raise FileError(f"{path}: holds {dtype.name} values; wanted float16, float32, float64 or 8- or 16-bit integers")


def _check_matrix(shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> None:
    _vector_dtype(dtype, path)
    if len(shape) != 2:
        raise FileError(f"{path}: a {len(shape)}-D array of shape {shape}; wanted 2-D, one row per vector")
    check_possible(shape, path)
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


def check_possible(shape: tuple[int, ...], path: str) -> None:
    if min(shape) < 0:
        raise FileError(f"{path}: the header gives the shape {shape}, which is not possible")


# --- benchmark formats ---------------------------------------------------------------------------------------------


def _open_vecs(source: Path, path: str, size: int, values: np.dtype[Any]) -> VectorFile:
    """Map .fvecs (float32), .bvecs (uint8) or .ivecs (int32): every row is an int32 d followed by d values."""
    with source.open("rb") as stream:
        head = stream.read(4)
    if len(head) < 4:
        raise FileError(f"{path}: is {size} bytes long; each row begins with a 4-byte dimension")
    dimension = int.from_bytes(head, "little", signed=True)
    _check_dimension(dimension, source, path)
    record = np.dtype([("dimension", "<i4"), ("values", values, (dimension,))])
    rows, rest = divmod(size, record.itemsize)
    records = _map(source, record, 0, (rows,))
    vectors = VectorFile(path, source, rows, dimension, np.dtype(np.float32), records, 0)
    if rest:
        # Either a row of another dimension stands before the end, or the last row is incomplete.
        for start, stop in _blocks(rows, record.itemsize):
            vectors._check_row_dimensions(records["dimension"][start:stop], start)
        raise FileError(
            f"{path}: row {rows} is cut short: it has {rest} bytes, a row of {dimension} values has {record.itemsize}"
        )
    return vectors


def _open_bin(source: Path, path: str, size: int, suffix: str) -> VectorFile:
    """Map .fbin (float32), .u8bin (uint8) or .i8bin (int8): uint32 n, uint32 d, then all values by rows."""
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
    _check_length(path, size - 8, wanted, f"{rows} rows of {dimension} {values.name} values", hint)
    result_dtype = np.dtype(np.float32)
    return VectorFile(path, source, rows, dimension, result_dtype, _map(source, values, 8, (rows, dimension)), 8)


def _check_dimension(dimension: int, source: Path, path: str) -> None:
    if not 1 <= dimension <= MAX_DIMENSION:
        raise FileError(
            f"{path}: the header gives dimension {dimension}, wanted 1 to {MAX_DIMENSION}; "
            f"is it really {_an(source.suffix.lower())} file?"
        )


def _an(suffix: str) -> str:
    return f"an {suffix}" if suffix in (".fvecs", ".ivecs", ".fbin", ".i8bin") else f"a {suffix}"


def _check_length(path: str, present: int, wanted: int, what: str, hint: str = "") -> None:
    if present < wanted:
        raise FileError(
            f"{path}: the file is cut short: the header announces {what} ({wanted} bytes), "
            f"{max(present, 0)} are there{hint}"
        )
    if present > wanted:
        raise FileError(
            f"{path}: the header announces {what} ({wanted} bytes), but {present} bytes follow it: "
            f"{present - wanted} too many{hint}"
        )


# --- results -------------------------------------------------------------------------------------------------------


class OutputFile:
    """A result file that appears whole or not at all.

    A temporary file is made in the folder of `path` at once, so a folder that cannot be written is found before the
    search and not after it. `finish` and then `commit` put it in place; leaving the context without them removes it.
    """

    def __init__(self, path: str) -> None:
        """Make the temporary file.

        Raises:
            FileError: the folder of `path` is missing or cannot be written, or `path` is a folder.
        """
        self.path = path
        # Through a symbolic link: replace what it points at, and keep the link.
        self._target = Path(os.path.realpath(path))
        folder = self._target.parent
        if self._target.is_dir():
            raise FileError(f"{path}: is a folder, not a file")
        if not folder.is_dir():
            raise FileError(f"{path}: the folder {folder} does not exist")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._temporary = folder / f".exactknn-{secrets.token_hex(8)}.tmp"
        try:
            descriptor = os.open(self._temporary, flags, 0o666)
        except OSError as error:
            raise FileError(f"{path}: cannot write in the folder {folder}: {error.strerror}") from error
        self.stream: IO[bytes] = os.fdopen(descriptor, "w+b")
        self._committed = False

    def finish(self) -> None:
        """Bring what was written to the disk; whatever can fail for want of room has failed after this."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()

    def commit(self) -> None:
        """Give the finished file its name, in one step, replacing what had it."""
        os.replace(self._temporary, self._target)
        self._committed = True

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
            self._temporary.unlink(missing_ok=True)


def check_output_suffix(path: str, wanted: Sequence[str], option: str) -> str:
    """Return the suffix of an output path in lower case, or refuse it.

    Raises:
        FileError: the suffix is not one of `wanted`.
    """
    suffix = suffix_of(path)
    if suffix not in wanted:
        raise FileError(f"{path}: unknown suffix {suffix!r} for {option}; wanted one of {', '.join(wanted)}")
    return suffix


def suffix_of(path: str) -> str:
    """Return the suffix of a path in lower case, with its dot; empty where there is none."""
    return Path(path).suffix.lower()


def same_file(first: str | Path, second: str | Path) -> bool:
    """Tell whether two paths lead to one file, whether or not it exists yet."""
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    try:
        return os.path.samefile(first, second)
    except (OSError, ValueError):
        return False


def check_indices_fit(reference_rows: int, path: str, suffix: str) -> None:
    """Refuse a format of 32-bit ids when row numbers of the reference may not fit.

    Raises:
        FileError: `suffix` is ``.ivecs``, ``.ibin`` or ``.bin`` and `reference_rows` is above 2**31.
    """
    if suffix in _INT32_RESULTS and reference_rows - 1 > _INT32_MAX:
        raise FileError(
            f"{path}: row numbers up to {reference_rows - 1} do not fit the int32 of {suffix}; wanted an .npz output"
        )


def write_neighbours(stream: IO[bytes], suffix: str, distances: Array, indices: Array) -> None:
    """Write a result in the format of `suffix`, one of `RESULT_SUFFIXES`.

    Args:
        stream: binary, writable, at its beginning.
        suffix: ``.npz`` keeps both arrays as they are; ``.ivecs`` and ``.ibin`` keep the indices as int32.
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
        for start, stop in _blocks(rows, columns * value.itemsize):
            stream.write(matrix[start:stop].astype(value).tobytes())
        return
    record = np.dtype([("dimension", "<i4"), ("values", value, (columns,))])
    for start, stop in _blocks(rows, record.itemsize):
        block = np.empty(stop - start, dtype=record)
        block["dimension"] = columns
        block["values"] = matrix[start:stop]
        stream.write(block.tobytes())


def write_truth(stream: IO[bytes], distances: Array, indices: Array) -> None:
    """Write a ground truth as ``.bin``: what ``.ibin`` holds, then the distances (float32).

    Args:
        stream: binary, writable, at its beginning.
        distances: shape (n, k), float32.
        indices: shape (n, k), int64.

    Raises:
        ValueError: a value does not fit the type of the format.
    """
    _check_fits(distances, np.dtype("<f4"), ".bin")
    write_matrix(stream, ".ibin", indices)
    for start, stop in _blocks(len(distances), distances.shape[1] * 4):
        stream.write(distances[start:stop].astype("<f4").tobytes())


class Pairs(NamedTuple):
    """Matching pairs, one entry of each array a pair."""

    query: Array
    """Row numbers, int64."""
    reference: Array
    """Row numbers, int64."""
    distance: Array
    """Their distances, float32 or float64."""


def write_pairs(stream: IO[bytes], suffix: str, blocks: Iterable[Pairs], dtype: np.dtype[Any]) -> int:
    """Write matching pairs in the format of `suffix`, one of `PAIR_SUFFIXES`, and return their number.

    Args:
        stream: binary, writable, at its beginning.
        suffix: ``.csv`` is written as the blocks come: a header, then a line of query, reference and the shortest text
            that is read as the distance again. ``.npz`` needs all blocks in memory: it holds the three arrays.
        blocks: the pairs, in the order to be written.
        dtype: type of the distances.
    """
    if suffix == ".npz":
        parts = [Pairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, dtype)), *blocks]
        query, reference, distance = (np.concatenate(column) for column in zip(*parts, strict=True))
        np.savez(stream, query=query, reference=reference, distance=distance)
        return len(query)
    stream.write((",".join(Pairs._fields) + "\n").encode())
    count = 0
    for block in blocks:
        count += len(block.query)
        # Text takes far more memory than numbers.
        for start in range(0, len(block.query), _LINES):
            query, reference, distance = (column[start : start + _LINES] for column in block)
            lines = zip(query.tolist(), reference.tolist(), distance.astype(str).tolist(), strict=True)
            stream.write("".join(f"{i},{j},{value}\n" for i, j, value in lines).encode())
    return count


def _check_fits(matrix: Array, value: np.dtype[Any], suffix: str) -> None:
    if value.kind == "f":
        if matrix.dtype.itemsize > value.itemsize:
            raise ValueError(f"{matrix.dtype.name} values do not fit the {value.name} of {suffix}")
    elif matrix.size and (int(matrix.max()) > _INT32_MAX or int(matrix.min()) < -_INT32_MAX - 1):
        raise ValueError(f"the index {int(np.abs(matrix).max())} does not fit the int32 of {suffix}")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
