"""Floating types: their names, rows of one type, exact conversion and rounding.

NumPy has no bfloat16, so such values are represented by their ``uint16`` bits and a flag. torch is never imported
here: a torch type can exist only if its module is already loaded.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from exactknn._arrays.blocks import blocks, rows_in

#: The types that every search accepts, for error messages.
DTYPES = "float32, float64, float16 or bfloat16"

#: For each type, the types that represent all its values exactly, itself included.
HELD_BY = {
    "float16": ("float16", "float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
}


class Matrix(NamedTuple):
    """A two-dimensional, C-contiguous, aligned, native-endian array; bfloat16 as ``uint16`` bits."""

    array: npt.NDArray[Any]
    bfloat16: bool

    @property
    def dtype_name(self) -> str:
        """Name of the floating type of the values."""
        return "bfloat16" if self.bfloat16 else str(self.array.dtype.name)


def as_dtype_name(value: Any, name: str) -> str:
    """Return the name of a floating type that the core accepts.

    Args:
        value: the name itself, or a type of NumPy, torch or ml_dtypes.
        name: the argument's name, for error messages.

    Raises:
        TypeError: ``value`` is neither a string nor a type.
        ValueError: ``value`` is another type.
    """
    torch = sys.modules.get("torch")
    if isinstance(value, str):
        found = value
    elif torch is not None and isinstance(value, torch.dtype):
        found = str(value).removeprefix("torch.")
    elif isinstance(value, (type, np.dtype)):
        try:
            found = np.dtype(value).name
        except TypeError:
            raise TypeError(f"{name} must be the name or type of {DTYPES} numbers, got {value!r}") from None
    else:
        raise TypeError(f"{name} must be the name or type of {DTYPES} numbers, got {value!r}")
    if found not in HELD_BY:
        raise ValueError(f"{name} must be {DTYPES}, got {found!r}")
    return found


def common_dtype(left: str, right: str) -> str:
    """Return the name of the floating type that represents the values of both types exactly."""
    if left == right:
        return left
    return "float64" if "float64" in (left, right) else "float32"


def converted(matrix: Matrix, dtype_name: str) -> npt.NDArray[Any]:
    """Return the values in their own or a wider floating type, exactly; without a copy if the type is their own."""
    if matrix.dtype_name == dtype_name:
        return matrix.array
    dtype = np.dtype(dtype_name)
    single = matrix.array
    if matrix.bfloat16:
        # A bfloat16 is the upper half of a float32.
        single = (single.astype(np.uint32) << np.uint32(16)).view(np.float32)
    wide = single.astype(dtype, copy=False)
    if wide.dtype == np.float64 and single.dtype == np.float32:
        # The caller may have set denormals-are-zero, so convert denormals by their integer bits: such a number is its
        # 23 bits times 2**-149, and no intermediate float64 value is denormal.
        bits = single.view(np.uint32)
        subnormal = ((bits & 0x7F80_0000) == 0) & ((bits & 0x007F_FFFF) != 0)
        if subnormal.any():
            found = bits[subnormal]
            sign = np.where(found >> 31, -1.0, 1.0)
            wide[subnormal] = sign * (found & 0x007F_FFFF).astype(np.float64) * 2.0**-149
    return wide


# Elements rounded at a time: their temporaries take a few MiB.
_ROUNDED_ELEMENTS = 1 << 18


def rounded(matrix: Matrix, dtype_name: str, name: str) -> Matrix:
    """Return the values in another floating type, rounded to nearest, ties to even; NaN and infinity are preserved.

    Raises:
        ValueError: a finite value exceeds the range of the type; the message names row and column.
    """
    if matrix.dtype_name == dtype_name:
        return matrix
    if dtype_name in HELD_BY[matrix.dtype_name]:
        return Matrix(converted(matrix, dtype_name), False)
    is_half = matrix.dtype_name in ("float16", "bfloat16")  # float32 represents both exactly
    source = converted(matrix, "float32") if is_half else matrix.array
    to_type, storage = _ROUNDING[dtype_name]
    result = np.empty(source.shape, storage)
    for start, stop in blocks(len(result), rows_in(_ROUNDED_ELEMENTS, source.shape[1])):
        rows = source[start:stop]
        with np.errstate(all="ignore"):
            numbers, is_infinite = to_type(rows)
        beyond = is_infinite & np.isfinite(rows)
        if beyond.any():
            row, column = (int(place) for place in np.argwhere(beyond)[0])
            raise ValueError(
                f"{name} must hold values that {dtype_name} can hold, "
                f"got {float(rows[row, column]):g} in row {start + row}, column {column}"
            )
        result[start:stop] = numbers
    return Matrix(result, dtype_name == "bfloat16")


def _to_float16(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    half = rows.astype(np.float16)
    return half, np.isinf(half)


def _to_float32(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    single = rows.astype(np.float32)
    # The caller may have set flush-to-zero, so denormal results are formed as integers.
    magnitudes = np.abs(rows)
    subnormal = (magnitudes < 2.0**-126) & (magnitudes > 0)
    if subnormal.any():
        bits = np.rint(np.ldexp(magnitudes[subnormal], 149)).astype(np.uint32)
        single.view(np.uint32)[subnormal] = bits | (np.signbit(rows[subnormal]).astype(np.uint32) << 31)
    return single, np.isinf(single)


def _to_bfloat16(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    if rows.dtype == np.float64:
        # Rounding to float32 first would round twice. So round to the 8 significant bits of a bfloat16, fewer if it is
        # denormal; float32 represents the result exactly.
        fractions, exponents = np.frexp(rows)
        kept = 8 - np.maximum(-125 - exponents, 0)
        rows, _ = _to_float32(np.ldexp(np.rint(np.ldexp(fractions, kept)), exponents - kept))
    bits = rows.astype(np.float32, copy=False).view(np.uint32)  # float16 is widened exactly
    # Add half a unit of the last kept place, slightly less if that place is even; a carry into the exponent is correct.
    rounded_bits = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    upper = np.where(np.isnan(rows), 0x7FC0, rounded_bits).astype(np.uint16)
    return upper, (upper & 0x7FFF) == 0x7F80


# The rounding function of each type, and its storage type in NumPy.
_ROUNDING = {
    "float16": (_to_float16, np.float16),
    "float32": (_to_float32, np.float32),
    "bfloat16": (_to_bfloat16, np.uint16),
}
