"""Checks of counts, sizes, exponents and flags; and the names of the metrics."""

from __future__ import annotations

import numbers
import operator
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from exactknn._environment import undisturbed

#: Metrics of `exactknn.knn`, `exactknn.radius` and the command line.
METRICS = ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev", "minkowski")


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


def as_optional_count(value: Any, name: str) -> int | None:
    """Return ``value`` as an ``int`` of at least 1, or ``None`` unchanged. Raises as `as_count`."""
    return None if value is None else as_count(value, name, minimum=1)


def as_bytes(value: Any, name: str) -> int:
    """Return a number of bytes, given as an integer or a string such as ``"2GB"``, ``"512 MiB"`` or ``"1.5 GB"``.

    Raises:
        TypeError: ``value`` is neither an integer nor a string.
        ValueError: the string has another form, or the number is below 1.
    """
    if not isinstance(value, str):
        if isinstance(value, (float, np.floating)):
            raise TypeError(f"{name} must be a whole number of bytes or a string such as '2GB', got {value!r}")
        return as_count(value, name, minimum=1)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B\s*|\s*(\d+)\s*", value, re.ASCII | re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise ValueError(
            f"{name} must be a number of bytes, or a string such as '2GB', '512MiB' or '1.5 GB', got {value!r}"
        )
    if found[4]:
        count = int(found[4])
    else:
        power = " KMGT".index(found[2].upper() or " ")
        # As a fraction: 1.1 GB is a whole number of bytes, but float64 would round it.
        count = int(Fraction(found[1]) * (1024 if found[3] else 1000) ** power)
    if count < 1:
        raise ValueError(f"{name} must be at least 1 byte, got {value!r}")
    return count


def as_choice(value: Any, name: str, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of the strings.

    Raises:
        ValueError: it is not.
    """
    if not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def check_callable(value: Any, name: str) -> None:
    """Raise ``TypeError`` unless the value can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r} of type {type(value).__name__}")


@undisturbed
def as_exponent(value: Any, name: str) -> float:
    """Return ``value`` as a ``float`` above 0, infinity included.

    Integers and NumPy's numbers count as numbers; booleans and strings do not.

    Raises:
        TypeError: ``value`` is not a number.
        ValueError: ``value`` is not above 0.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        exponent = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number above 0 within float64, or infinity, got {value!r}") from None
    if not exponent > 0:
        raise ValueError(f"{name} must be a number above 0, or infinity, got {exponent:g}")
    return exponent


def as_real(value: Any, name: str, *, finite: bool = True) -> float:
    """Return ``value`` as a ``float``, never NaN, and finite unless ``finite`` is False.

    Python's and NumPy's integers and floats count as numbers; booleans, strings and arrays do not.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: ``value`` is NaN, infinite although ``finite`` is True, or beyond the range of float64.
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
    """Return ``value`` as a ``bool``; truthy values of other types are errors.

    Raises:
        TypeError: ``value`` is neither True nor False.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)
