"""Conversion of the caller's rows to the arrays that the core takes.

    tensor, DLPack object, array, nested lists
        -> ``as_matrix``: one row-major NumPy view in CPU memory, copied only if the layout requires it
        -> ``as_pair``:   query and reference in one common floating type
        -> ``exactknn._core``

torch is never imported here: a torch tensor can exist only if its module is already loaded.
"""

from __future__ import annotations

import numbers
import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from exactknn._arrays.blocks import small_blocks
from exactknn._arrays.dtypes import DTYPES, Matrix, common_dtype, converted
from exactknn._arrays.tensors import oddity, resolved

# DLPack's device types for memory that the CPU can read: plain, and pinned for CUDA or ROCm.
_DLPACK_CPU_DEVICES = (1, 3, 11)

#: float32 and float64 represent all integers up to here exactly.
EXACT_FLOAT32 = 2**24
EXACT_INTEGER = 2**53


class Pair(NamedTuple):
    """Query and reference (``None``: the query itself) in the same floating type."""

    query: npt.NDArray[Any]
    reference: npt.NDArray[Any] | None
    bfloat16: bool

    @property
    def searched(self) -> npt.NDArray[Any]:
        """The rows to search: the reference, or the query if there is none."""
        return self.query if self.reference is None else self.reference


def as_matrix(values: Any, name: str) -> Matrix:
    """Return ``values`` as a row-major matrix in CPU memory, without a copy if their layout allows it.

    Args:
        values: torch tensor, DLPack object, anything with ``__array__``, or nested lists, of shape ``(rows, d)``.
            Lists of Python integers are converted to float64, exactly.
        name: the argument's name, for error messages.

    Raises:
        TypeError: the values are not of a floating type that the core accepts, are not an array, or are integers that
            float64 does not represent.
        ValueError: the array is not two-dimensional, or is not in CPU memory.
    """
    array, is_bfloat16 = as_view(values, name)
    return Matrix(np.require(array, array.dtype.newbyteorder("="), ["C", "A"]), is_bfloat16)


def as_view(values: Any, name: str) -> tuple[npt.NDArray[Any], bool]:
    """Return ``values`` as an array in their own layout and byte order, and whether it holds bits of bfloat16 values.

    An array is never copied.

    Raises:
        TypeError, ValueError: as `as_matrix`.
    """
    array, is_bfloat16 = _imported(values, name)
    if array.ndim != 2:
        raise ValueError(f"{name} must be 2-D (rows, dimensions), got shape {tuple(array.shape)}")
    check_rows(len(array), name)
    if not is_bfloat16 and (array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4, 8)):
        raise TypeError(f"{name} must hold {DTYPES} values, got {array.dtype.name}")
    return array, is_bfloat16


def check_rows(rows: int, name: str) -> None:
    """Refuse more rows than the core has numbers for, before any of them is read or copied.

    Raises:
        ValueError: there are 2**32 - 64 rows or more.
    """
    if rows >= 2**32 - 64:
        raise ValueError(f"{name} must have fewer than 2**32 - 64 rows, got {rows}")


def as_values(values: Any, name: str) -> npt.NDArray[Any]:
    """Return the array of ``as_matrix``, bfloat16 widened to float32. Raises as ``as_matrix``."""
    matrix = as_matrix(values, name)
    return converted(matrix, "float32") if matrix.bfloat16 else matrix.array


def as_array(values: Any, name: str) -> npt.NDArray[Any]:
    """Return ``values`` as an array in CPU memory, of any type that NumPy has.

    Raises:
        TypeError: ``values`` is a masked array, or a tensor that is sparse or bfloat16.
        ValueError: ``values`` is a tensor that is not in CPU memory, or has rows of different lengths.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        odd = oddity(values)
        if odd is not None:
            raise TypeError(f"{name} must be a dense tensor, got {odd}")
        if values.device.type != "cpu":
            raise ValueError(f"{name} must be in CPU memory, got a tensor on {values.device}: copy it with .cpu()")
        try:
            values = resolved(values, name).numpy()
        except TypeError as error:
            raise TypeError(f"{name} must be a dense tensor of a type that NumPy has, got {values.dtype}") from error
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array")
    return array_of(values, name, "have rows of equal length")


def as_pair(query: Any, reference: Any = None) -> Pair:
    """Return both sides of a search in one floating type; two different types are promoted.

    float16 with bfloat16 becomes float32, which represents both exactly. Raises as ``as_matrix``.
    """
    left = as_matrix(query, "query")
    if reference is None:
        return Pair(left.array, None, left.bfloat16)
    right = as_matrix(reference, "reference")
    wide = common_dtype(left.dtype_name, right.dtype_name)
    return Pair(converted(left, wide), converted(right, wide), wide == "bfloat16")


def whole_dtype(array: npt.NDArray[Any], name: str) -> np.dtype[Any]:
    """Return the type in which integers are searched: float32 if it represents them exactly, else float64.

    This is the only rule for integers where rows are converted.

    Raises:
        TypeError: an integer is beyond 2**53, where float64 has gaps; the message names the first such row.
    """
    if not array.size or array.dtype.itemsize <= 2:
        return np.dtype(np.float32)
    low, high = int(array.min()), int(array.max())
    largest = max(-low, high)
    if largest > EXACT_INTEGER:
        place = np.argwhere((array > EXACT_INTEGER) | (array < -EXACT_INTEGER))[0]
        raise _inexact(name, array[tuple(place)], int(place[0]) if len(place) else 0)
    return np.dtype(np.float32 if largest <= EXACT_FLOAT32 else np.float64)


def check_listed(values: Any, array: npt.NDArray[Any], name: str) -> None:
    """Raise ``TypeError`` if a list holds integers that NumPy rounded, because they are beside floats or large."""
    if hasattr(values, "dtype") or array.dtype.kind != "f" or not array.size:
        return
    with np.errstate(invalid="ignore"):
        if not bool((np.abs(array) >= EXACT_INTEGER).any()):
            return
    places = np.ndindex(*array.shape)
    for place, value in zip(places, np.asarray(values, dtype=object).reshape(-1), strict=True):
        if isinstance(value, numbers.Integral) and int(array[place]) != int(value):
            raise _inexact(name, value, place[0] if place else 0)


def _inexact(name: str, value: Any, row: int) -> TypeError:
    return TypeError(f"{name} must hold {DTYPES} values, got the integer {value} beyond 2**53 in row {row}")


def is_blocks(values: Any) -> bool:
    """Return whether these are blocks of rows: an iterable without item access, or a list or tuple of matrices."""
    if isinstance(values, (list, tuple)):
        return bool(values) and getattr(values[0], "ndim", None) == 2
    if hasattr(values, "__array__") or hasattr(values, "__dlpack__"):
        return False
    return hasattr(values, "__iter__") and not hasattr(values, "__getitem__")


def first_row_not_finite(rows: npt.NDArray[Any], bfloat16: bool = False) -> int | None:
    """Return the first row with a NaN or infinity, or None. ``bfloat16``: the rows hold bits of bfloat16 values."""
    for start, stop in small_blocks(*rows.shape):
        part = rows[start:stop]
        finite = (part & 0x7F80) != 0x7F80 if bfloat16 else np.isfinite(part)
        bad = np.flatnonzero(~finite.all(axis=1))
        if bad.size:
            return start + int(bad[0])
    return None


def _imported(values: Any, name: str) -> tuple[npt.NDArray[Any], bool]:
    """Return an ndarray of any layout, and whether it holds bits of bfloat16 values."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        return _from_tensor(torch, values, name)
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: masked entries have no distance")
    if isinstance(values, np.ndarray):
        return _bits_of_bfloat16(np.asarray(values))
    if hasattr(values, "__dlpack_device__"):
        device, _ = values.__dlpack_device__()
        if int(device) not in _DLPACK_CPU_DEVICES:
            raise ValueError(f"{name} must be in CPU memory, got a DLPack object on device type {int(device)}")
    if hasattr(values, "__array__"):
        return _bits_of_bfloat16(np.asarray(values))
    if hasattr(values, "__dlpack__"):
        try:
            return _bits_of_bfloat16(np.from_dlpack(values))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"{name} must hold {DTYPES} values that NumPy can import by DLPack: {error}") from error
    return _from_sequence(values, name)


def _bits_of_bfloat16(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], bool]:
    # ml_dtypes registers its bfloat16 with NumPy as a two-byte extension type.
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16), True
    return array, False


def _from_tensor(torch: Any, tensor: Any, name: str) -> tuple[npt.NDArray[Any], bool]:
    odd = oddity(tensor)
    if odd is not None:
        raise TypeError(f"{name} must be a dense tensor, got {odd}")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be in CPU memory, got a tensor on {tensor.device}: "
            "copy it with .cpu(), or search on its device with exactknn.evaluation.CustomKNN"
        )
    if tensor.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise TypeError(f"{name} must hold {DTYPES} values, got {tensor.dtype}")
    plain = resolved(tensor, name)
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(np.uint16), True
    return plain.numpy(), False


def _from_sequence(values: Any, name: str) -> tuple[npt.NDArray[Any], bool]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, (list, tuple)) and values and isinstance(values[0], torch.Tensor):
        return _from_vectors(torch, values, name)
    array = array_of(values, name, "be 2-D (rows, dimensions) with rows of equal length")
    if array.ndim == 0:
        raise TypeError(f"{name} must be an array, a tensor or nested lists, got {type(values).__name__}")
    if isinstance(values, (list, tuple)) and array.dtype.kind in "iu":
        # Python numbers have no element type, so integers are accepted as floats while the conversion is exact.
        whole_dtype(array, name)
        array = array.astype(np.float64)
    return _bits_of_bfloat16(array)


def _from_vectors(torch: Any, values: Any, name: str) -> tuple[npt.NDArray[Any], bool]:
    """Return the rows of a list of tensors, of one type."""
    rows = []
    for row, vector in enumerate(values):
        if not isinstance(vector, torch.Tensor) or vector.dtype != values[0].dtype:
            given = vector.dtype if isinstance(vector, torch.Tensor) else type(vector).__name__
            raise TypeError(f"{name} must hold tensors of {values[0].dtype} like the first, got {given} in row {row}")
        rows.append(_from_tensor(torch, vector, f"row {row} of {name}"))
    for row, (row_numbers, _) in enumerate(rows):
        if row_numbers.ndim != 1 or row_numbers.shape != rows[0][0].shape:
            raise ValueError(
                f"{name} must be 2-D (rows, dimensions) with rows of equal length, "
                f"got shape {row_numbers.shape} in row {row}"
            )
    return np.stack([part for part, _ in rows]), rows[0][1]


def array_of(values: Any, name: str, wanted: str) -> npt.NDArray[Any]:
    """Return nested lists as an array."""
    try:
        array: npt.NDArray[Any] = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must {wanted}: {error}") from error
    except (RuntimeError, TypeError) as error:  # such as a list of lists of tensors that require grad
        raise TypeError(f"{name} must be an array, a tensor or nested lists of numbers: {error}") from error
    check_listed(values, array, name)
    return array
