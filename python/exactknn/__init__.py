"""Exact k-nearest-neighbour search.

    knn(query, reference, k)
        -> _arrays: row-major views in CPU memory, no copy where the layout allows
        -> _core:   the Rust core (GIL released, Ctrl-C answered)
        -> (distances, indices) as NumPy arrays

Importing this package loads NumPy and the native core only. The parts for PyTorch live in
``exactknn.evaluation`` and ``exactknn.distances``.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from exactknn import _arrays, _core
from exactknn._core import (
    __version__,
    available_simd_levels,
    build_info,
    get_num_threads,
    set_num_threads,
    set_simd_level,
    simd_level,
)

__all__ = [
    "__version__",
    "available_simd_levels",
    "build_info",
    "get_num_threads",
    "knn",
    "set_num_threads",
    "set_simd_level",
    "simd_level",
]

# Without a handler of its own a library's warnings would reach stderr through logging's last resort.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_METRICS = ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev", "minkowski")


def knn(
    query: Any,
    reference: Any = None,
    k: int = 10,
    *,
    metric: str = "sqeuclidean",
    p: float | None = None,
    exclude_self: bool | None = None,
    num_threads: int | None = None,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Find the ``k`` exact nearest reference rows of each query row.

    Values are computed in float64 and rounded once; equal values are ordered by row number. The answer of a row
    depends neither on the other queries nor on the number of threads nor on the instruction set.

    Args:
        query: ``(n, d)`` float32, float64, float16 or bfloat16: a NumPy array, a torch tensor in CPU memory,
            anything with ``__array__`` or DLPack, or nested lists. Two different types are promoted.
        reference: ``(m, d)``, the same kinds. ``None``: the query rows are searched among themselves.
        k: number of neighbours, ``0 <= k <= m`` (``m - 1`` when a row excludes itself).
        metric: ``"sqeuclidean"``, ``"euclidean"``, ``"cosine"`` (1 - cosine similarity, 0 to 2), ``"cityblock"``
            (sum of absolute differences), ``"chebyshev"`` (the largest one) or ``"minkowski"``
            (``(sum |q - r|^p)^(1/p)``), each smallest first, or ``"inner_product"``, largest first.
        p: exponent of ``"minkowski"``, above 0; 1 is ``"cityblock"``, 2 ``"euclidean"``, infinity ``"chebyshev"``.
            ``None``: 2. No other metric takes one.
        exclude_self: whether query ``i`` is reference row ``i`` and must not be returned for itself. With a
            reference, ``True`` says that the queries are its first ``n`` rows. ``None``: ``True`` without a
            reference, ``False`` with one.
        num_threads: threads for this call, at least 1. ``None``: see ``set_num_threads``.

    Returns:
        ``(distances, indices)``, both ``(n, k)``, nearest first. Distances are float64 for float64 input, else
        float32; indices are int64 row numbers of the reference.

    Raises:
        TypeError: a type that is not taken, a ``k`` that is not an integer, or a ``p`` that is not a number.
        ValueError: wrong shape, dimension, ``k``, metric, ``p`` or device, or a NaN or infinity in a row.

    Examples:
        >>> distances, indices = knn([[0.0, 0.0]], [[0.0, 2.0], [1.0, 0.0]], k=2)
        >>> distances.tolist(), indices.tolist()
        ([[1.0, 4.0]], [[1, 0]])
    """
    if metric not in _METRICS:
        raise ValueError(f"metric must be one of {', '.join(_METRICS)}, got {metric!r}")
    if p is not None:
        p = _arrays.as_exponent(p, "p")
        if metric != "minkowski":
            raise ValueError(f"p is for metric='minkowski' only, got p={p:g} with metric={metric!r}")
    count = _arrays.as_count(k, "k", minimum=0)
    if num_threads is not None:
        num_threads = _arrays.as_count(num_threads, "num_threads", minimum=1)
    if exclude_self is None:
        exclude_self = reference is None
    elif not isinstance(exclude_self, (bool, np.bool_)):
        raise TypeError(f"exclude_self must be True, False or None, got {exclude_self!r}")
    pair = _arrays.as_pair(query, reference)
    return _core.knn(
        pair.query,
        pair.reference,
        count,
        metric,
        exclude_self=bool(exclude_self),
        bfloat16=pair.bfloat16,
        num_threads=num_threads,
        p=p,
    )
