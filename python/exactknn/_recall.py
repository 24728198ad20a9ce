"""Recall: the share of the true neighbours that a search found.

    found, true (ids) --------------------------------> sorted rows ----> |found| - |found or true| + |tied or true|
    distances, or vectors -> checked, within the k-th -> tied              counted as sets, a block of queries at a time

The sum is the number of distinct found ids that are true ones or tie with the farthest of them: ``|found and true|`` is
``|found| + k - |found or true|``, and ``tied``, a subset of ``found``, adds its ids that are not true ones,
``|tied or true| - k``.

Distances of an approximate index may be those of its codes. They would count rows that are farther than they seem, so
they are compared with the true ones: an id has one distance, and only true ids are nearer than the farthest of them.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from exactknn import _core
from exactknn._arrays.blocks import blocks, rows_in
from exactknn._arrays.matrix import Pair, as_array, as_pair, as_values, first_row_not_finite
from exactknn._arrays.scalars import as_flag, as_real
from exactknn._environment import undisturbed
from exactknn._search import check_metric

# Ids sorted at a time.
_BLOCK = 1 << 22


@overload
def recall(
    found_ids: Any,
    true_ids: Any,
    found_distances: Any = ...,
    true_distances: Any = ...,
    *,
    query: Any = ...,
    reference: Any = ...,
    metric: str = ...,
    p: float | None = ...,
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
    query: Any = ...,
    reference: Any = ...,
    metric: str = ...,
    p: float | None = ...,
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
    query: Any = ...,
    reference: Any = ...,
    metric: str = ...,
    p: float | None = ...,
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
    query: Any = None,
    reference: Any = None,
    metric: str = "sqeuclidean",
    p: float | None = None,
    tolerance: float = 0.0,
    per_query: bool = False,
) -> float | npt.NDArray[np.float64]:
    """Return the share of the true neighbours that a search found, as a mean over queries.

    The ``k`` of the recall is the number of columns of ``true_ids``, and all columns of ``found_ids`` count: with more
    found than true ids this is recall "k at R"; with fewer, the missing ones are misses. Pass ``found_ids[:, :k]`` for
    "k at k". The order within a row does not matter. Duplicate ids count once.

    If distances tie with the k-th, another search may correctly return another row than the ground truth. With the
    vectors, or with both distances, a found id also counts if its distance is at most the largest true distance of its
    query; at most ``k`` count. The distances that an approximate index returns are often those of its codes, not of the
    vectors: pass the vectors then.

    Args:
        found_ids: ``(n, r)`` integers, row numbers of the reference. Negative values are sentinels for "not found", and
            so is the largest value of an unsigned type (-1 reinterpreted as unsigned).
        true_ids: ``(n, k)`` integers, ``k`` distinct ids of at least 0 per row. Both kinds of ids are arrays of any
            integer type, torch tensors in CPU memory or nested lists.
        found_distances: ``(n, r)`` floats, the distances of ``found_ids`` from their query. A NaN never counts.
        true_distances: ``(n, k)`` finite floats, the distances of ``true_ids``. For similarities, where larger is
            nearer, negate both.
        query: ``(n, d)``, the queries: with ``reference``, the distances of both kinds of ids are computed from the
            vectors, as `exactknn.knn` does.
        reference: ``(m, d)``, the rows that the ids number.
        metric: the metric of the vectors, one of `exactknn.knn`.
        p: exponent of ``"minkowski"``, as in `exactknn.knn`.
        tolerance: how far a found distance may exceed the largest true distance, and differ from the true distance of
            the same id: a finite number of at least 0 in the units of the distances. 0 compares the values as float64,
            which suits two searches with identically rounded distances, such as exactknn's, and vectors. Distances from
            float32 matrix products need more; ann-benchmarks uses 0.001.
        per_query: ``True`` returns the share of each query.

    Returns:
        The mean share as a ``float``, or ``(n,)`` float64 shares.

    Raises:
        TypeError: ids are not integers, distances are not floats, only one of the two distances or of ``query`` and
            ``reference`` is given, or distances and vectors.
        ValueError: the shapes do not match, there are no queries or no true ids, a true id is negative or occurs twice
            in its row, a true distance is not finite, or ``tolerance`` is below 0. A found distance is not that of its
            id: the true distance of the id differs, or it is no true id and nearer than the farthest of them. An id is
            not the number of a row of ``reference``.

    Examples:
        >>> recall([[4, 7, -1]], [[7, 2]])
        0.5
        >>> recall([[4, 7]], [[7, 2]], [[1.5, 1.0]], [[1.0, 1.5]])     # row 4 is as near as row 2
        1.0
        >>> recall([[2]], [[0]], query=[[1.0]], reference=[[0.0], [3.0], [2.0]])     # so are rows 0 and 2
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
    measured = _measure(query, reference, metric, p, found_distances is not None or true_distances is not None)
    if measured is not None and measured.queries != queries:
        raise ValueError(f"query must have a row for each of the {queries} rows of true_ids, got {measured.queries}")
    near, far = _as_distances(found_distances, true_distances, found.shape, true.shape)

    hits = np.empty(queries, np.int64)
    for block in blocks(queries, rows_in(_BLOCK, found.shape[1] + k)):
        rows = slice(*block)
        wanted = _sortable(true[rows], "true_ids", block[0])
        _check_true(wanted, block[0])
        returned = _sortable(found[rows], "found_ids", block[0])
        tied = returned[:, :0]
        if measured is not None:
            bound = measured.distances(wanted, "true_ids", block[0]).max(axis=1, keepdims=True)
            tied = np.where(measured.distances(returned, "found_ids", block[0]) <= bound + slack, returned, -1)
        elif near is not None and far is not None:
            _check_distances(returned, wanted, near[rows], far[rows], slack, block[0])
            tied = np.where(near[rows] <= far[rows].max(axis=1, keepdims=True) + slack, returned, -1)
        hits[rows] = _distinct(returned) - _distinct(returned, wanted) + _distinct(tied, wanted)
    hits = np.minimum(hits, k)
    return hits / k if each else float(hits.sum() / (queries * k))


class _Vectors(NamedTuple):
    """Queries and references, from which distances of ids are computed."""

    pair: Pair
    metric: str
    p: float | None

    @property
    def queries(self) -> int:
        return len(self.pair.query)

    def distances(self, ids: npt.NDArray[Any], name: str, first_row: int) -> npt.NDArray[np.float64]:
        """Return the distance of each id from its query, NaN for ids below 0."""
        rows = self.pair.searched
        beyond = np.argwhere(ids >= len(rows))
        if beyond.size:
            row, column = beyond[0]
            raise ValueError(
                f"{name} must be below the {len(rows)} rows of reference, "
                f"got {ids[row, column]} in row {first_row + row}"
            )
        result = np.full(ids.shape, np.nan)
        queries, columns = np.nonzero(ids >= 0)
        for start, stop in blocks(len(queries), rows_in(_BLOCK, rows.shape[1])):
            left, right = queries[start:stop], columns[start:stop]
            result[left, right] = _core.pairwise(
                self.pair.query[first_row + left],
                rows[ids[left, right]],
                self.metric,
                bfloat16=self.pair.bfloat16,
                p=self.p,
            )
        return -result if self.metric == "inner_product" else result


def _measure(query: Any, reference: Any, metric: str, p: float | None, with_distances: bool) -> _Vectors | None:
    """Return the vectors if both are given."""
    p = check_metric(metric, p)
    if (query is None) != (reference is None):
        raise TypeError(
            f"query and reference must be given together, got no {'query' if query is None else 'reference'}"
        )
    if query is None:
        return None
    if with_distances:
        raise TypeError("found_distances and true_distances must not be given with query and reference, got both")
    pair = as_pair(query, reference)
    for rows, name in ((pair.query, "query"), (pair.searched, "reference")):
        bad = first_row_not_finite(rows, pair.bfloat16)
        if bad is not None:
            raise ValueError(f"{name} must be finite, got NaN or infinity in row {bad}")
    return _Vectors(pair, metric, p)


def _check_distances(
    found: npt.NDArray[Any],
    true: npt.NDArray[Any],
    found_distances: npt.NDArray[Any],
    true_distances: npt.NDArray[Any],
    tolerance: float,
    first_row: int,
) -> None:
    """Raise ``ValueError`` if a found distance cannot be that of its id."""
    k = true.shape[1]
    # Equal ids become runs, each of which begins with the true id, if it is one.
    order = np.argsort(np.concatenate([true, found], axis=1), axis=1, kind="stable")
    ids = np.take_along_axis(np.concatenate([true, found], axis=1), order, axis=1)
    begins = np.ones(ids.shape, bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    begin = np.maximum.accumulate(np.where(begins, np.arange(ids.shape[1]), 0), axis=1)
    of_run = np.take_along_axis(order, begin, axis=1)
    distances = np.concatenate([true_distances, found_distances], axis=1, dtype=np.float64)
    own = np.take_along_axis(distances, order, axis=1)
    expected = np.take_along_axis(distances, of_run, axis=1)
    is_true = of_run < k
    farthest = true_distances.max(axis=1, keepdims=True).astype(np.float64)
    listed = (order >= k) & (ids >= 0)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        differ = listed & is_true & (np.abs(own - expected) > tolerance)
    nearer = listed & ~is_true & (own < farthest - tolerance)
    for wrong, what in ((differ, "whose true distance is"), (nearer, "which is not in true_ids; the largest there is")):
        if wrong.any():
            row, place = np.argwhere(wrong)[0]
            value = expected[row, place] if wrong is differ else farthest[row, 0]
            raise ValueError(
                f"found_distances must be the distances of found_ids within tolerance={tolerance:g}, got "
                f"{own[row, place]} in row {first_row + row} for id {ids[row, place]}, {what} {value}; "
                "raise tolerance if they are rounded, give query and reference if they are distances of codes"
            )


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
) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
    """Return the found and the true distances."""
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
    return near, far
