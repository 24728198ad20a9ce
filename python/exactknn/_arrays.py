"""From what a caller hands in to what the native core reads.

    tensor, DLPack object, array, nested lists
        -> ``as_matrix``: one row-major NumPy view in CPU memory, copied only when the layout forces it
        -> ``as_pair``:   query and reference in one common floating type
        -> ``rounded``:   rows in the type that an index stores
        -> ``exactknn._core``

NumPy has no bfloat16 of its own, so such values travel as their ``uint16`` bits with a flag beside them.
torch is never imported here: a torch tensor can only exist when its module is already loaded.
"""

from __future__ import annotations

import numbers
import operator
import re
import sys
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

#: What every search takes, as the error messages say it.
DTYPES = "float32, float64, float16 or bfloat16"

#: What `exactknn.knn`, `exactknn.radius` and the command line rank by.
METRICS = ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev", "minkowski")

#: The types that hold every value of a type exactly, itself included.
HELD_BY = {
    "float16": ("float16", "float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
}

# DLPack's numbers for memory that the CPU can read: plain, and pinned for CUDA or ROCm.
_DLPACK_CPU_DEVICES = (1, 3, 11)

# Elements that are rounded together: their temporaries stay a few MiB.
_ROUNDED_ELEMENTS = 1 << 18

#: The largest integer up to which all integers are float64 numbers.
EXACT_INTEGER = 2**53


class Matrix(NamedTuple):
    """A two-dimensional, C-contiguous, aligned, native-endian array; bfloat16 as ``uint16`` bits."""

    array: npt.NDArray[Any]
    bfloat16: bool

    @property
    def dtype_name(self) -> str:
        """Name of the floating type of the values."""
        return "bfloat16" if self.bfloat16 else str(self.array.dtype.name)


class Pair(NamedTuple):
    """Query and reference (``None``: the query itself) in the same floating type."""

    query: npt.NDArray[Any]
    reference: npt.NDArray[Any] | None
    bfloat16: bool

    @property
    def searched(self) -> npt.NDArray[Any]:
        """The rows that are searched: the reference, or the query where there is none."""
        return self.query if self.reference is None else self.reference


def as_count(value: Any, name: str, *, minimum: int) -> int:
    """Return ``value`` as an ``int`` of at least ``minimum``.

    NumPy integers count as integers; booleans and floats do not.

    Raises:
        TypeError: ``value`` is not an integer.
        ValueError: ``value`` is below ``minimum``.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {value!r} of type bool")
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}") from None
    if count < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {count}")
    return count


def as_bytes(value: Any, name: str) -> int:
    """Return a number of bytes, given as an integer or as a text such as ``"2GB"``, ``"512 MiB"`` or ``"1.5 GB"``.

    Raises:
        TypeError: ``value`` is neither an integer nor a text.
        ValueError: the text is none of these, or the number is below 1.
    """
    if not isinstance(value, str):
        if isinstance(value, (float, np.floating)):
            raise TypeError(f"{name} must be a whole number of bytes or a text such as '2GB', got {value!r}")
        return as_count(value, name, minimum=1)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B\s*|\s*(\d+)\s*", value, re.ASCII | re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise ValueError(
            f"{name} must be a number of bytes, or a text such as '2GB', '512MiB' or '1.5 GB', got {value!r}"
        )
    if found[4]:
        count = int(found[4])
    else:
        power = " KMGT".index(found[2].upper() or " ")
        # As a fraction: 1.1 GB are a whole number of bytes, which float64 would miss.
        count = int(Fraction(found[1]) * (1024 if found[3] else 1000) ** power)
    if count < 1:
        raise ValueError(f"{name} must be at least 1 byte, got {value!r}")
    return count


def as_exponent(value: Any, name: str) -> float:
    """Return ``value`` as a ``float`` above 0, infinity included.

    Integers and NumPy's numbers count as numbers; booleans and text do not.

    Raises:
        TypeError: ``value`` is not a number.
        ValueError: ``value`` is not above 0.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        exponent = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number above 0 that float64 holds, or infinity, got {value!r}") from None
    if not exponent > 0:
        raise ValueError(f"{name} must be a number above 0, or infinity, got {exponent:g}")
    return exponent


def as_real(value: Any, name: str, *, finite: bool = True) -> float:
    """Return ``value`` as a ``float``, which is never NaN and is finite unless ``finite`` is False.

    Python's and NumPy's integers and floats count; booleans, texts and arrays do not.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: ``value`` is a NaN, an infinity where that is not taken, or beyond the range of float64.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {value!r} of type {type(value).__name__}")
    try:
        real = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a finite number, got one beyond the range of float64") from None
    if finite and not np.isfinite(real):
        raise ValueError(f"{name} must be a finite number, got {value}")
    if np.isnan(real):
        raise ValueError(f"{name} must be a number or an infinity, got {value}")
    return real


def as_flag(value: Any, name: str) -> bool:
    """Return ``value`` as a ``bool``; truth values of other types do not count.

    Raises:
        TypeError: ``value`` is neither True nor False.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def as_dtype_name(value: Any, name: str) -> str:
    """Return the name of a floating type that the core takes.

    Args:
        value: the name itself, or a type of NumPy, torch or ml_dtypes.
        name: the argument's name, for the messages.

    Raises:
        TypeError: neither a text nor a type.
        ValueError: another type.
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


def as_matrix(values: Any, name: str) -> Matrix:
    """View ``values`` as a row-major matrix in CPU memory.

    Args:
        values: torch tensor, DLPack object, anything with ``__array__``, or nested lists, of shape ``(rows, d)``.
            Lists of Python integers are read as float64.
        name: the argument's name, for the messages.

    Raises:
        TypeError: the values are not of a floating type that the core takes, or are no array at all.
        ValueError: the array is not two-dimensional, or does not lie in CPU memory.
    """
    array, is_bfloat16 = as_view(values, name)
    return Matrix(np.require(array, array.dtype.newbyteorder("="), ["C", "A"]), is_bfloat16)


def as_view(values: Any, name: str) -> tuple[npt.NDArray[Any], bool]:
    """View ``values`` as `as_matrix` does, in whatever layout and byte order they have: never a copy of an array.

    Returns:
        The array, and whether it holds the bits of bfloat16 values.

    Raises:
        TypeError, ValueError: as `as_matrix`.
    """
    array, is_bfloat16 = _imported(values, name)
    if array.ndim != 2:
        raise ValueError(f"{name} must be 2-D (rows, dimensions), got shape {tuple(array.shape)}")
    if not is_bfloat16 and (array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4, 8)):
        raise TypeError(f"{name} must hold {DTYPES} values, got {array.dtype.name}")
    return array, is_bfloat16


def as_values(values: Any, name: str) -> npt.NDArray[Any]:
    """View numbers as ``as_matrix`` does, bfloat16 widened to float32. Raises what ``as_matrix`` raises."""
    matrix = as_matrix(values, name)
    return converted(matrix, "float32") if matrix.bfloat16 else matrix.array


def as_array(values: Any, name: str) -> npt.NDArray[Any]:
    """View ``values`` as an array in CPU memory, of whatever type NumPy has for them.

    Raises:
        TypeError: a masked array, or a tensor that is sparse or bfloat16.
        ValueError: a tensor that is not in CPU memory, or rows of different lengths.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise ValueError(f"{name} must lie in CPU memory, got a tensor on {values.device}: copy it with .cpu()")
        try:
            values = values.detach().numpy()
        except TypeError as error:
            raise TypeError(f"{name} must be a dense tensor of a type that NumPy has, got {values.dtype}") from error
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array")
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must have rows of equal length: {error}") from error


def as_pair(query: Any, reference: Any = None) -> Pair:
    """View both sides of a search in one floating type; two different types are promoted.

    float16 with bfloat16 becomes float32, which holds both exactly. Raises what ``as_matrix`` raises.
    """
    left = as_matrix(query, "query")
    if reference is None:
        return Pair(left.array, None, left.bfloat16)
    right = as_matrix(reference, "reference")
    wide = common_dtype(left.dtype_name, right.dtype_name)
    return Pair(converted(left, wide), converted(right, wide), wide == "bfloat16")


def is_blocks(values: Any) -> bool:
    """Tell whether these are blocks of rows: an iterable without item access, or a list or tuple of matrices."""
    if isinstance(values, (list, tuple)):
        return bool(values) and getattr(values[0], "ndim", None) == 2
    if hasattr(values, "__array__") or hasattr(values, "__dlpack__"):
        return False
    return hasattr(values, "__iter__") and not hasattr(values, "__getitem__")


def common_dtype(left: str, right: str) -> str:
    """Return the name of the floating type that holds the values of two such types exactly."""
    if left == right:
        return left
    return "float64" if "float64" in (left, right) else "float32"


def converted(matrix: Matrix, dtype_name: str) -> npt.NDArray[Any]:
    """Return the values in their own or a wider floating type, exactly; their own array where the type is theirs."""
    if matrix.dtype_name == dtype_name:
        return matrix.array
    dtype = np.dtype(dtype_name)
    single = matrix.array
    if matrix.bfloat16:
        # A bfloat16 is the upper half of a float32.
        single = (single.astype(np.uint32) << np.uint32(16)).view(np.float32)
    wide = single.astype(dtype, copy=False)
    if wide.dtype == np.float64 and single.dtype == np.float32:
        # The calling thread may have been told to read subnormal numbers as zero. Integers are not: such a number is
        # its 23 bits times 2**-149, and no step on the way to float64 is subnormal.
        bits = single.view(np.uint32)
        subnormal = ((bits & 0x7F80_0000) == 0) & ((bits & 0x007F_FFFF) != 0)
        if subnormal.any():
            found = bits[subnormal]
            sign = np.where(found >> 31, -1.0, 1.0)
            wide[subnormal] = sign * (found & 0x007F_FFFF).astype(np.float64) * 2.0**-149
    return wide


def rounded(matrix: Matrix, dtype_name: str, name: str) -> Matrix:
    """The values in another floating type, rounded to nearest, ties to even; NaN and infinity stay what they are.

    Raises:
        ValueError: a finite value beyond the largest of the type, by row and column.
    """
    if matrix.dtype_name == dtype_name:
        return matrix
    if dtype_name in HELD_BY[matrix.dtype_name]:
        return Matrix(converted(matrix, dtype_name), False)
    source = converted(matrix, "float32") if matrix.bfloat16 else matrix.array
    to_type, storage = _ROUNDING[dtype_name]
    result = np.empty(source.shape, storage)
    step = max(1, _ROUNDED_ELEMENTS // max(1, source.shape[1]))
    for start in range(0, len(result), step):
        rows = source[start : start + step]
        with np.errstate(all="ignore"):
            numbers, is_infinite = to_type(rows)
        beyond = is_infinite & np.isfinite(rows)
        if beyond.any():
            row, column = (int(place) for place in np.argwhere(beyond)[0])
            raise ValueError(
                f"{name} must hold values that {dtype_name} can hold, "
                f"got {float(rows[row, column]):g} in row {start + row}, column {column}"
            )
        result[start : start + step] = numbers
    return Matrix(result, dtype_name == "bfloat16")


def _to_float16(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    half = rows.astype(np.float16)
    return half, np.isinf(half)


def _to_float32(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    single = rows.astype(np.float32)
    # The calling thread may have been told to write subnormal numbers as zero; as integers they are safe.
    magnitudes = np.abs(rows)
    subnormal = (magnitudes < 2.0**-126) & (magnitudes > 0)
    if subnormal.any():
        bits = np.rint(np.ldexp(magnitudes[subnormal], 149)).astype(np.uint32)
        single.view(np.uint32)[subnormal] = bits | (np.signbit(rows[subnormal]).astype(np.uint32) << 31)
    return single, np.isinf(single)


def _to_bfloat16(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    if rows.dtype == np.float64:
        # By way of float32 they would be rounded twice. So to the 8 bits that a bfloat16 keeps, fewer where it is
        # subnormal; the result is a float32 number.
        fractions, exponents = np.frexp(rows)
        kept = 8 - np.maximum(-125 - exponents, 0)
        rows, _ = _to_float32(np.ldexp(np.rint(np.ldexp(fractions, kept)), exponents - kept))
    bits = rows.view(np.uint32)
    # Half of the last place that stays, a little less where that place is even; a carry into the exponent is right.
    rounded_bits = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    upper = np.where(np.isnan(rows), 0x7FC0, rounded_bits).astype(np.uint16)
    return upper, (upper & 0x7FFF) == 0x7F80


# How values come to a type, and what NumPy stores.
_ROUNDING = {
    "float16": (_to_float16, np.float16),
    "float32": (_to_float32, np.float32),
    "bfloat16": (_to_bfloat16, np.uint16),
}


def _imported(values: Any, name: str) -> tuple[npt.NDArray[Any], bool]:
    """An ndarray of any layout, and whether it holds the bits of bfloat16 values."""
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
            raise ValueError(f"{name} must lie in CPU memory, got a DLPack object on device type {int(device)}")
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
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must lie in CPU memory, got a tensor on {tensor.device}: "
            "copy it with .cpu(), or search on its device with exactknn.evaluation.CustomKNN"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if tensor.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise TypeError(f"{name} must hold {DTYPES} values, got {tensor.dtype}")
    plain = tensor.detach().resolve_neg()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(np.uint16), True
    return plain.numpy(), False


def _from_sequence(values: Any, name: str) -> tuple[npt.NDArray[Any], bool]:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must be 2-D (rows, dimensions) with rows of equal length: {error}") from error
    if array.ndim == 0:
        raise TypeError(f"{name} must be an array, a tensor or nested lists, got {type(values).__name__}")
    if isinstance(values, (list, tuple)) and array.dtype.kind in "iu":
        # Python numbers carry no element type, so whole ones are as good as floats while they stay exact.
        if array.size and max(abs(int(array.min())), abs(int(array.max()))) > EXACT_INTEGER:
            raise TypeError(f"{name} must hold {DTYPES} values, got integers beyond 2**53")
        array = array.astype(np.float64)
    return _bits_of_bfloat16(array)
