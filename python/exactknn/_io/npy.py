"""NumPy's formats: ``.npy`` is memory-mapped, ``.npz`` is read; neither is trusted or unpickled."""

from __future__ import annotations

import errno
import io
import lzma
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from exactknn._io.errors import FileError, one_line, printable

_NPY_MAGIC = b"\x93NUMPY"

# A version 1 header has at most 65,535 bytes and its prefix 10; NumPy itself evaluates at most 10,000.
_NPY_HEADER_BYTES = 1 << 17

# Rows are converted in pieces of about this size, so that a conversion never needs a second copy of the whole.
BLOCK_BYTES = 1 << 24
Array = npt.NDArray[Any]

# Validates the shape and type of an array, named by its path, before its values are read.
Check = Callable[[tuple[int, ...], np.dtype[Any], str], None]


def map_npy_array(source: Path, path: str, size: int, check: Check) -> Array:
    """Return the memory-mapped array of a file whose shape and type pass ``check``."""
    with source.open("rb") as stream:
        head = stream.read(_NPY_HEADER_BYTES)
    shape, fortran, dtype, offset = _npy_header(head, path)
    check(shape, dtype, path)
    check_length(path, size - offset, math.prod(shape) * dtype.itemsize, f"an array {shape} of {dtype.name}")
    return map_values(source, dtype, offset, shape, "F" if fortran else "C")


def read_npz_array(source: Path, path: str, array_name: str | None, check: Check) -> Array:
    """Return one array of an archive; its members may be compressed, so they are read, not memory-mapped.

    Args:
        source: the file.
        path: its name in error messages.
        array_name: which array; None: the only one.
        check: validates the shape and type of the array, given with ``path``, before its values are read.

    Raises:
        FileError: the archive or the array cannot be read.
        OSError: the file cannot be read.
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
        # With a damaged archive directory, zipfile seeks to a negative offset.
        raise FileError(f"{path}: the archive cannot be read: {one_line(error)}") from error
    # ValueError, IndexError and struct.error: damage found by zipfile while decoding and seeking.
    # RuntimeError: encrypted; its subclass NotImplementedError: a compression that this Python lacks.
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
    names = ", ".join(map(printable, members))
    if not members:
        raise FileError(f"{path}: the archive holds no array")
    if array_name is not None:
        if array_name not in members:
            raise FileError(f"{path}: no array named {array_name!r}; the archive holds: {names}")
        return members[array_name]
    if len(members) > 1:
        first = next(iter(members))
        raise FileError(
            f"{path}: holds {len(members)} arrays ({names}); choose one, for instance {path}:{printable(first)}"
        )
    return next(iter(members.values()))


def _read_npz_member(stream: IO[bytes], path: str, member: zipfile.ZipInfo, check: Check) -> Array:
    head = stream.read(_NPY_HEADER_BYTES)
    shape, fortran, dtype, offset = _npy_header(head, path)
    check(shape, dtype, path)
    wanted = math.prod(shape) * dtype.itemsize
    check_length(path, member.file_size - offset, wanted, f"an array {shape} of {dtype.name}")
    buffer = bytearray(head[offset:])
    while piece := stream.read(BLOCK_BYTES):  # to the end, where zipfile verifies the checksum
        buffer += piece
    check_length(path, len(buffer), wanted, f"an array {shape} of {dtype.name}")
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order="F" if fortran else "C")


def _npy_header(head: bytes, path: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, whether in Fortran order, dtype and offset of the values, parsed from the head of a .npy file."""
    if not head.startswith(_NPY_MAGIC):
        raise FileError(f"{path}: not a .npy array: it begins with {head[:6]!r}, expected {_NPY_MAGIC!r}")
    stream = io.BytesIO(head)
    # Format 3.0 is 2.0 with a header in UTF-8 instead of Latin-1. They differ in the names of fields alone, and arrays
    # with fields are refused.
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
        (3, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(stream)
        if version not in readers:
            raise FileError(f"{path}: .npy format {version[0]}.{version[1]}; expected 1.0, 2.0 or 3.0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers written by Python 2 are accepted
            shape, fortran, dtype = readers[version](stream)
    except FileError:
        raise
    # NumPy parses the header with literal_eval and a tokenizer, which raise all of these for a damaged one.
    except (ValueError, SyntaxError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise FileError(f"{path}: the .npy header cannot be read: {one_line(error)}") from error
    except (tokenize.TokenError, RecursionError, MemoryError, AttributeError) as error:
        raise FileError(f"{path}: the .npy header cannot be read: {one_line(error)}") from error
    return shape, fortran, dtype, stream.tell()


def check_possible(shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> None:
    # NumPy multiplies all sizes but zeros, and refuses a product beyond its index type.
    product = math.prod(size for size in shape if size) * dtype.itemsize
    if min(shape) < 0 or product > np.iinfo(np.intp).max:
        raise FileError(f"{path}: the header gives the impossible shape {shape}")


def check_length(path: str, present: int, wanted: int, what: str, hint: str = "") -> None:
    if present < wanted:
        raise FileError(
            f"{path}: the file is cut short: the header announces {what} ({wanted} bytes), "
            f"found {max(present, 0)} bytes{hint}"
        )
    if present > wanted:
        raise FileError(
            f"{path}: the header announces {what} ({wanted} bytes), but {present} bytes follow it: "
            f"{present - wanted} too many{hint}"
        )


def map_values(source: Path, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], order: str = "C") -> Array:
    if 0 in shape:  # nothing to map, and mmap refuses an empty range
        return np.empty(shape, dtype)
    try:
        mapped: Array = np.memmap(source, dtype=dtype, mode="r", offset=offset, shape=shape, order=order)  # type: ignore[call-overload]
    except ValueError as error:  # truncated since its size was read
        raise FileError(f"{source}: cannot be mapped into memory: {one_line(error)}") from error
    return np.asarray(mapped)
