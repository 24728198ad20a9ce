"""Recall: the share of the true neighbours that a search found.

    found, true (ids) ------------------------> sorted rows ----> |found| - |found or true| + |tied or true|
    their distances -> found within the k-th -> tied                     counted as sets, a block of queries at a time

The sum is the number of distinct found ids that are true ones or tie with the farthest of them: ``|found and true|`` is
``|found| + k - |found or true|``, and ``tied``, a subset of ``found``, adds its ids that are not true ones,
``|tied or true| - k``.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from exactknn._arrays.blocks import blocks, rows_in
from exactknn._arrays.matrix import as_array, as_values
from exactknn._arrays.scalars import as_flag, as_real
from exactknn._environment import undisturbed

# Ids sorted at a time.
_BLOCK = 1 << 22


@overload
def recall(
    found_ids: Any,
    true_ids: Any,
    found_distances: Any = ...,
    true_distances: Any = ...,
    *,
    tolerance: float = ...,
    per_query: Literal[False] = ...,
) -> float: ...
@overload
def recall(
    found_ids: Any,
    true_ids: Any,
    found_distances: Any = ...,
    true_distances: Any = ...,
    *,
    tolerance: float = ...,
    per_query: Literal[True],
) -> npt.NDArray[np.float64]: ...
@overload
def recall(
    found_ids: Any,
    true_ids: Any,
    found_distances: Any = ...,
    true_distances: Any = ...,
    *,
    tolerance: float = ...,
    per_query: bool,
) -> float | npt.NDArray[np.float64]: ...
@undisturbed
def recall(
    found_ids: Any,
    true_ids: Any,
    found_distances: Any = None,
    true_distances: Any = None,
    *,
    tolerance: float = 0.0,
    per_query: bool = False,
) -> float | npt.NDArray[np.float64]:
    """Return the share of the true neighbours that a search found, as a mean over queries.

    The ``k`` of the recall is the number of columns of ``true_ids``, and all columns of ``found_ids`` count: with more
    found than true ids this is recall "k at R"; with fewer, the missing ones are misses. Pass ``found_ids[:, :k]`` for
    "k at k". The order within a row does not matter. Duplicate ids count once.

    If distances tie with the k-th, another search may correctly return another row than the ground truth. With both
    distances given, a found id also counts if its distance is at most the largest true distance of its query; at most
    ``k`` count.

    Args:
        found_ids: ``(n, r)`` integers, row numbers of the reference. Negative values are sentinels for "not found", and
            so is the largest value of an unsigned type (-1 reinterpreted as unsigned).
        true_ids: ``(n, k)`` integers, ``k`` distinct ids of at least 0 per row. Both kinds of ids are arrays of any
            integer type, torch tensors in CPU memory or nested lists.
        found_distances: ``(n, r)`` floats, the distances of ``found_ids``. A NaN never counts.
        true_distances: ``(n, k)`` finite floats, the distances of ``true_ids``. For similarities, where larger is
            nearer, negate both.
        tolerance: how far a found distance may exceed the largest true distance, a finite number of at least 0 in the
            units of the distances. 0 compares the values as float64, which suits two searches with identically rounded
            distances, such as exactknn's. Distances from float32 matrix products need more; ann-benchmarks uses 0.001.
        per_query: ``True`` returns the share of each query.

    Returns:
        The mean share as a ``float``, or ``(n,)`` float64 shares.

    Raises:
        TypeError: ids are not integers, distances are not floats, or only one of the two distances is given.
        ValueError: the shapes do not match, there are no queries or no true ids, a true id is negative or occurs twice
            in its row, a true distance is not finite, or ``tolerance`` is below 0.

    Examples:
        >>> recall([[4, 7, -1]], [[7, 2]])
        0.5
        >>> recall([[4, 7]], [[7, 2]], [[1.5, 1.0]], [[1.0, 1.5]])     # row 4 is as near as row 2
        1.0
    """
    found, true = _as_ids(found_ids, "found_ids"), _as_ids(true_ids, "true_ids")
    queries, k = true.shape
    if k == 0 or queries == 0:
        raise ValueError(f"true_ids must have at least one row and one column, got shape {true.shape}")
    if len(found) != queries:
        raise ValueError(f"found_ids must have a row for each of the {queries} rows of true_ids, got {len(found)}")
    slack = as_real(tolerance, "tolerance")
    if slack < 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    each = as_flag(per_query, "per_query")
    near, bounds = _as_distances(found_distances, true_distances, found.shape, true.shape)

    hits = np.empty(queries, np.int64)
    for block in blocks(queries, rows_in(_BLOCK, found.shape[1] + k)):
        rows = slice(*block)
        wanted = _sortable(true[rows], "true_ids", block[0])
        _check_true(wanted, block[0])
        returned = _sortable(found[rows], "found_ids", block[0])
        tied = returned[:, :0]
        if near is not None and bounds is not None:
            tied = np.where(near[rows] <= bounds[rows, np.newaxis] + slack, returned, -1)
        hits[rows] = _distinct(returned) - _distinct(returned, wanted) + _distinct(tied, wanted)
    hits = np.minimum(hits, k)
    return hits / k if each else float(hits.sum() / (queries * k))


def _distinct(*parts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the number of distinct ids of at least 0 in each row."""
    ids = np.sort(np.concatenate(parts, axis=1), axis=1)
    different = ids >= 0
    different[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    counts: npt.NDArray[np.int64] = different.sum(axis=1, dtype=np.int64)
    return counts


def _as_ids(values: Any, name: str) -> npt.NDArray[Any]:
    ids = as_array(values, name)
    if ids.ndim != 2:
        raise ValueError(f"{name} must be 2-D (queries, ids), got shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {ids.dtype.name}")
    return ids


def _sortable(ids: npt.NDArray[Any], name: str, first_row: int) -> npt.NDArray[Any]:
    """Return the ids in a signed type; the largest value of an unsigned type becomes -1."""
    if ids.dtype.kind == "u":
        empty = ids == np.iinfo(ids.dtype).max
        beyond = np.argwhere((ids > np.iinfo(np.int64).max) & ~empty)
        if beyond.size:
            row, column = beyond[0]
            raise ValueError(f"{name} must be below 2**63, got {ids[row, column]} in row {first_row + row}")
        ids = np.where(empty, -1, ids.astype(np.int64))
    if ids.dtype.itemsize == 8 and ids.size and ids.max() <= np.iinfo(np.int32).max:
        # int32 sorts in half the time.
        ids = np.maximum(ids, -1).astype(np.int32)
    return ids


def _check_true(ids: npt.NDArray[Any], first_row: int) -> None:
    wrong = np.flatnonzero(_distinct(ids) != ids.shape[1])
    if wrong.size:
        row = ids[wrong[0]]
        negative = row[row < 0]
        what = str(negative[0]) if negative.size else f"{_first_repeated(row)} twice"
        raise ValueError(
            f"true_ids must be different numbers of at least 0 in each row, got {what} in row {first_row + wrong[0]}"
        )


def _first_repeated(row: npt.NDArray[Any]) -> int:
    ids = np.sort(row)
    return int(ids[1:][ids[1:] == ids[:-1]][0])


def _as_distances(
    found: Any, true: Any, found_shape: tuple[int, ...], true_shape: tuple[int, ...]
) -> tuple[npt.NDArray[Any] | None, npt.NDArray[np.float64] | None]:
    """Return the found distances, and the largest true distance of each query."""
    if (found is None) != (true is None):
        missing = "found_distances" if found is None else "true_distances"
        raise TypeError(f"found_distances and true_distances must be given together, got no {missing}")
    if found is None:
        return None, None
    near, far = as_values(found, "found_distances"), as_values(true, "true_distances")
    for distances, shape, name in ((near, found_shape, "found"), (far, true_shape, "true")):
        if distances.shape != shape:
            raise ValueError(f"{name}_distances must have the shape {shape} of {name}_ids, got {distances.shape}")
    finite = np.isfinite(far).all(axis=1)
    if not finite.all():
        row = int(np.argmin(finite))
        value = far[row][~np.isfinite(far[row])][0]
        raise ValueError(f"true_distances must be finite, got {value} in row {row}")
    return near, far.max(axis=1).astype(np.float64)
