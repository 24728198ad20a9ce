"""`knn` and `radius`: argument checks, then a single call of the native core."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from exactknn import _core, _progress
from exactknn._arrays.matrix import as_pair, is_blocks
from exactknn._arrays.scalars import (
    METRICS,
    as_bytes,
    as_choice,
    as_count,
    as_exponent,
    as_flag,
    as_optional_count,
    as_real,
)
from exactknn._progress import Progress


def knn(
    query: Any,
    reference: Any = None,
    k: int | None = 10,
    *,
    metric: str = "sqeuclidean",
    p: float | None = None,
    exclude_self: bool | None = None,
    num_threads: int | None = None,
    progress: Progress = None,
    max_memory: int | str | None = None,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return the ``k`` exact nearest reference rows of each query row.

    Values are computed in float64 and rounded once; equal values are ordered by row number. The result for a query
    depends neither on the other queries nor on the number of threads nor on the instruction set.

    Args:
        query: ``(n, d)`` float32, float64, float16 or bfloat16: a NumPy array, a torch tensor in CPU memory,
            anything with ``__array__`` or DLPack, or nested lists. Two different types are promoted.
        reference: ``(m, d)``, the same kinds. ``None``: the query rows are searched among themselves. Or consecutive
            blocks of rows of any size: a list or tuple of 2-D arrays or tensors, or an iterable without item access,
            such as a generator, which is consumed once, on this thread, and closed. All non-empty blocks must have the
            type of the first.
        k: number of neighbours, ``0 <= k <= m`` (``m - 1`` if self is excluded); ``None``: all of them.
        metric: ``"sqeuclidean"``, ``"euclidean"``, ``"cosine"`` (1 - cosine similarity, 0 to 2), ``"cityblock"``
            (sum of absolute differences), ``"chebyshev"`` (the largest one) or ``"minkowski"``
            (``(sum |q - r|^p)^(1/p)``), each smallest first, or ``"inner_product"``, largest first.
        p: exponent of ``"minkowski"``, above 0; 1 is ``"cityblock"``, 2 ``"euclidean"``, infinity ``"chebyshev"``.
            ``None``: 2. Invalid for other metrics.
        exclude_self: whether query ``i`` is reference row ``i`` and must not be returned for itself. With a
            reference, ``True`` says that the queries are its first ``n`` rows. ``None``: ``True`` without a
            reference, ``False`` with one.
        num_threads: threads for this call, at least 1. ``None``: see ``set_num_threads``.
        progress: ``True`` shows a bar on stderr (a tqdm bar if it is installed, else a percentage). A function is
            called on this thread with the finished fraction, about 25 times a second: never less than before, and
            1.0 when the search is done; an exception that it raises stops the search. ``None`` and ``False``: nothing.
            While blocks come from an iterable of unknown length, the fraction is 0.0.
        max_memory: limit on what the call allocates, in bytes or as a string such as ``"2GB"`` or ``"512MiB"``. The
            reference is then searched block by block, read ahead if it is memory-mapped or not zero-copy; if that does
            not fit, the queries are split too, with one pass over the reference for each block of them. ``None``: no
            limit; an array is packed as a whole, which takes a quarter to all of its size again.

    Returns:
        ``(distances, indices)``, both ``(n, k)``, nearest first. Distances are float64 for float64 input, else
        float32; indices are int64 row numbers of the reference.

    Raises:
        TypeError: the rows are of an unsupported type, ``k`` is not an integer, ``p`` is not a number, or ``progress``
            is neither a bool, a function nor ``None``.
        ValueError: a shape, dimension, ``k``, metric, ``p`` or device is invalid, a row holds a NaN or infinity, or
            ``max_memory`` is too small (the message says how much is needed).

    Examples:
        >>> distances, indices = knn([[0.0, 0.0]], [[0.0, 2.0], [1.0, 0.0]], k=2)
        >>> distances.tolist(), indices.tolist()
        ([[1.0, 4.0]], [[1, 0]])
    """
    p = check_metric(metric, p)
    count = None if k is None else as_count(k, "k", minimum=0)
    num_threads = as_optional_count(num_threads, "num_threads")
    exclude_self = _whether_to_exclude_self(exclude_self, reference)
    if max_memory is not None or is_blocks(reference):
        # Imported late: only this search needs files and threads.
        from exactknn._stream.search import knn as knn_in_blocks

        most = None if max_memory is None else as_bytes(max_memory, "max_memory")
        with _progress.reporting(progress) as report:
            return knn_in_blocks(
                query,
                reference,
                count,
                metric=metric,
                p=p,
                exclude_self=exclude_self,
                num_threads=num_threads,
                max_memory=most,
                progress=report,
            )
    pair = as_pair(query, reference)
    if count is None:
        count = max(len(pair.searched) - exclude_self, 0)
    with _progress.reporting(progress) as report:
        return _core.knn(
            pair.query,
            pair.reference,
            count,
            metric,
            exclude_self=exclude_self,
            bfloat16=pair.bfloat16,
            num_threads=num_threads,
            progress=report,
            p=p,
        )


# The return type depends on ``return_distances``.
@overload
def radius(
    query: Any,
    reference: Any = None,
    r: float = ...,
    *,
    metric: str = ...,
    p: float | None = ...,
    exclude_self: bool | None = ...,
    return_distances: Literal[True] = ...,
    sort: bool | None = ...,
    num_threads: int | None = ...,
    progress: Progress = ...,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[Any]]: ...
@overload
def radius(
    query: Any,
    reference: Any = None,
    r: float = ...,
    *,
    metric: str = ...,
    p: float | None = ...,
    exclude_self: bool | None = ...,
    return_distances: Literal[False],
    sort: bool | None = ...,
    num_threads: int | None = ...,
    progress: Progress = ...,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
@overload
def radius(
    query: Any,
    reference: Any = None,
    r: float = ...,
    *,
    metric: str = ...,
    p: float | None = ...,
    exclude_self: bool | None = ...,
    return_distances: bool,
    sort: bool | None = ...,
    num_threads: int | None = ...,
    progress: Progress = ...,
) -> tuple[npt.NDArray[Any], ...]: ...
def radius(
    query: Any,
    reference: Any = None,
    r: float | None = None,
    *,
    metric: str = "sqeuclidean",
    p: float | None = None,
    exclude_self: bool | None = None,
    return_distances: bool = True,
    sort: bool | None = None,
    num_threads: int | None = None,
    progress: Progress = None,
) -> tuple[npt.NDArray[Any], ...]:
    """Return all reference rows within ``r`` of each query row.

    A row is inside if its returned distance is at most ``r``, compared as float64 numbers; a similarity must be at
    least ``r``. Both comparisons are inclusive. Values and order are those of ``knn``.

    Args:
        query: ``(n, d)`` rows, of the kinds that ``knn`` accepts.
        reference: ``(m, d)`` rows. ``None``: the query rows are searched among themselves.
        r: the radius, a finite number, in the units of the metric: a *squared* distance for ``"sqeuclidean"``,
            1 - cosine similarity for ``"cosine"``. For a distance, a negative radius gives no rows.
        metric: as for ``knn``; for ``"inner_product"``, ``r`` is the smallest accepted value.
        p: as for ``knn``: the exponent of ``"minkowski"``.
        exclude_self: as for ``knn``: whether query ``i`` is reference row ``i`` and must not be returned for itself.
            ``None``: ``True`` without a reference, ``False`` with one.
        return_distances: ``False`` omits the distances. Rows that are certainly inside are then not measured at all,
            unless ``sort=True``.
        sort: ``True``: the rows of a query are ordered nearest first, ties by row number. ``False``: by row number.
            ``None``: nearest first if distances are returned, else by row number.
        num_threads: threads for this call, at least 1. ``None``: see ``set_num_threads``.
        progress: as for ``knn``.

    Returns:
        ``(indptr, indices, distances)``, the arrays of a compressed sparse row (CSR) matrix: query ``i`` has the rows
        ``indices[indptr[i]:indptr[i + 1]]``, with distances at the same positions. ``indptr`` has ``n + 1`` entries;
        ``indptr`` and ``indices`` are int64, distances float64 for float64 input, else float32.
        ``(indptr, indices)`` with ``return_distances=False``.

    Raises:
        TypeError: the rows are of an unsupported type, or ``r`` or ``p`` is not a real number.
        ValueError: a shape, dimension, metric, ``p`` or device is invalid, or a row or ``r`` is NaN or infinite.
        MemoryError: the rows inside do not fit in memory.

    Examples:
        >>> indptr, indices, distances = radius([[0.0], [5.0]], [[1.0], [-2.0], [0.0]], r=4)
        >>> indptr.tolist(), indices.tolist(), distances.tolist()
        ([0, 3, 3], [2, 0, 1], [0.0, 1.0, 4.0])
    """
    p = check_metric(metric, p)
    if r is None:
        raise TypeError("r must be a real number, got None: it has no default")
    bound = as_real(r, "r")
    exclude_self = _whether_to_exclude_self(exclude_self, reference)
    with_distances = as_flag(return_distances, "return_distances")
    by_value = with_distances if sort is None else as_flag(sort, "sort")
    num_threads = as_optional_count(num_threads, "num_threads")
    pair = as_pair(query, reference)
    with _progress.reporting(progress) as report:
        indptr, indices, distances = _core.radius(
            pair.query,
            pair.reference,
            bound,
            metric,
            exclude_self=exclude_self,
            return_distances=with_distances,
            sort=by_value,
            bfloat16=pair.bfloat16,
            num_threads=num_threads,
            progress=report,
            p=p,
        )
    return (indptr, indices) if distances is None else (indptr, indices, distances)


def check_metric(metric: str, p: float | None) -> float | None:
    as_choice(metric, "metric", METRICS)
    if p is None:
        return None
    exponent = as_exponent(p, "p")
    if metric != "minkowski":
        raise ValueError(f"p is for metric='minkowski' only, got p={exponent:g} with metric={metric!r}")
    return exponent


def _whether_to_exclude_self(exclude_self: bool | None, reference: Any) -> bool:
    if exclude_self is None:
        return reference is None
    if not isinstance(exclude_self, (bool, np.bool_)):
        raise TypeError(f"exclude_self must be True, False or None, got {exclude_self!r}")
    return bool(exclude_self)
