"""Reads the class of each row from a file.

::

    L.npy  L.npz[:name]          (one 1-D array)       --- npy ---+
    L.txt  L.csv                 (one label per line)  -----------+--> array of integers, floats or text

Errors are `FileError`, as for vectors.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from exactknn._io.errors import FileError, one_line
from exactknn._io.npy import check_possible, map_npy_array, read_npz_array
from exactknn._io.paths import size_of, split_array_name

LABEL_SUFFIXES = (".npy", ".npz", ".txt", ".csv")
"""Suffixes that `read_labels` accepts."""

# First lines that name the column, in lower case.
_HEADERS = (
    "label",
    "labels",
    "class",
    "classes",
    "class_id",
    "class_name",
    "label_id",
    "category",
    "target",
    "targets",
)

Array = npt.NDArray[Any]


def read_labels(path: str) -> Array:
    """Return the class of each row.

    Args:
        path: a file with one of `LABEL_SUFFIXES`. ``.npy`` and ``.npz`` hold one 1-D array of integers, booleans,
            floats or text; ``file.npz:name`` selects one of several arrays. ``.txt`` and ``.csv`` hold UTF-8 text, one
            label per line, without a header; labels in a ``.csv`` file may be quoted.

    Returns:
        ``(n,)``, of the type in the file; the lines of a text file unchanged, as text.

    Raises:
        FileError: the file is missing, empty, truncated, of an unknown kind, begins with a header, or does not hold
            labels.
    """
    name, array_name = split_array_name(path)
    source = Path(name)
    suffix = source.suffix.lower()
    if suffix not in LABEL_SUFFIXES:
        raise FileError(f"{path}: unknown suffix {suffix!r} for labels; expected one of {', '.join(LABEL_SUFFIXES)}")
    try:
        size = size_of(source, path)
        if suffix == ".npy":
            labels = np.array(map_npy_array(source, path, size, _check_labels))
        elif suffix == ".npz":
            labels = read_npz_array(source, path, array_name, _check_labels)
        else:
            labels = _labels_of_lines(source, path, _fields if suffix == ".csv" else _lines)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    if labels.dtype.kind == "f" and np.isnan(labels).any():
        row = int(np.flatnonzero(np.isnan(labels))[0])
        raise FileError(f"{path}: the label of row {row} is NaN, which equals nothing, not even itself")
    if labels.dtype.kind == "U":
        _check_characters(labels, path)
    return labels


def _check_characters(labels: Array, path: str) -> None:
    """Reject invalid code points in a NumPy file: no text file can hold them, so they could not be written."""
    codes = np.ascontiguousarray(labels, dtype=labels.dtype.newbyteorder("=")).view(np.uint32)
    bad = ((codes >= 0xD800) & (codes <= 0xDFFF)) | (codes > 0x10FFFF)
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        row = first // (len(codes) // len(labels))
        raise FileError(f"{path}: the label of row {row} holds {codes[first]:#x}, which is not a Unicode character")


def _check_labels(shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> None:
    if dtype.hasobject:
        raise FileError(f"{path}: holds pickled Python objects, which are never loaded; expected numbers or text")
    if dtype.kind not in "biufU" or dtype.itemsize == 0 or (dtype.kind == "f" and dtype.itemsize > 8):
        raise FileError(f"{path}: holds {dtype.name} values; expected labels: integers, booleans, floats or text")
    if len(shape) != 1:
        raise FileError(f"{path}: a {len(shape)}-D array of shape {shape}; expected 1-D, one label per row")
    check_possible(shape, dtype, path)


def _labels_of_lines(source: Path, path: str, split: Callable[[IO[str], str], Iterator[str]]) -> Array:
    try:
        with source.open(encoding="utf-8-sig", newline=None if split is _lines else "") as stream:
            labels = list(split(stream, path))
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: is not UTF-8 text: byte {error.object[error.start]:#04x}") from error
    for i, label in enumerate(labels):
        # NumPy strips trailing null characters, so two labels could become equal.
        if not label or "\0" in label:
            raise FileError(
                f"{path}: label {i + 1} {'holds a null character' if label else 'is empty'}; "
                "expected one label per line"
            )
    if _begins_with_header(labels):
        raise FileError(
            f"{path}: line 1, {labels[0]!r}, looks like a header; expected one label per line and no header "
            "(if it is a label, use .npy or .npz)"
        )
    return np.array(labels, dtype=np.str_)


def _begins_with_header(labels: list[str]) -> bool:
    """Return whether the first line names the column: text above numbers only, or a usual name that is no other label.

    A header would be a class, and shift the labels of all rows by one where the length fits.
    """
    if len(labels) < 2:
        return False
    first, others = labels[0], labels[1:]
    if first.strip().lower() in _HEADERS and first not in others:
        return True
    return not _is_number(first) and all(map(_is_number, others))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _lines(stream: IO[str], path: str) -> Iterator[str]:
    return (line.removesuffix("\n") for line in stream)


def _fields(stream: IO[str], path: str) -> Iterator[str]:
    reader = csv.reader(stream, strict=True)
    try:
        for fields in reader:
            if len(fields) > 1:
                raise FileError(f"{path}: line {reader.line_num} has {len(fields)} fields; expected one label per line")
            yield fields[0] if fields else ""
    except csv.Error as error:
        raise FileError(f"{path}: line {reader.line_num}: {one_line(error)}") from error
