"""Lists of row numbers, one per query, as compressed rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from exactknn._arrays.matrix import as_array

Ints = npt.NDArray[np.int64]


def as_row_lists(values: Any, name: str, queries: int, rows: int) -> tuple[Ints, Ints]:
    """Return lists of row numbers as ``(indptr, indices)``: query ``i`` has ``indices[indptr[i]:indptr[i + 1]]``.

    Args:
        values: a sequence of row numbers per query, or a tuple ``(indptr, indices)``.
        name: the argument's name, for error messages.
        queries: number of queries.
        rows: number of rows; valid row numbers are below it.

    Raises:
        TypeError: the numbers are not integers.
        ValueError: there is not one list per query, a number is not a row, or a list names a row twice.
    """
    if isinstance(values, tuple) and len(values) == 2 and all(hasattr(part, "dtype") for part in values):
        indptr, indices = (_integers(part, name) for part in values)
        if len(indptr) != queries + 1 or indptr[0] != 0 or np.any(np.diff(indptr) < 0) or indptr[-1] != len(indices):
            raise ValueError(
                f"{name} must be (indptr, indices) with an indptr of {queries + 1} entries that rises from 0 to the "
                f"number of indices, got {len(indptr)} entries and {len(indices)} indices"
            )
    else:
        lists = [_integers(part, name) for part in values]
        if len(lists) != queries:
            raise ValueError(f"{name} must have a list for each of the {queries} queries, got {len(lists)}")
        indptr = np.concatenate([[0], np.cumsum([len(part) for part in lists], dtype=np.int64)]).astype(np.int64)
        indices = np.concatenate([np.empty(0, np.int64), *lists])
    owner = np.repeat(np.arange(queries), np.diff(indptr))
    outside = (indices < 0) | (indices >= rows)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise ValueError(f"{name} must name rows from 0 to below {rows}, got {indices[at]} for query {owner[at]}")
    order = np.lexsort((indices, owner))
    twice = (np.diff(owner[order]) == 0) & (np.diff(indices[order]) == 0)
    if twice.any():
        at = int(order[np.flatnonzero(twice)[0] + 1])
        raise ValueError(f"{name} must name a row once for a query, got {indices[at]} twice for query {owner[at]}")
    return indptr, np.ascontiguousarray(indices)


def _integers(values: Any, name: str) -> Ints:
    """Return one list of integers."""
    array = as_array(values, name)
    if array.size == 0 and array.dtype == np.float64 and not hasattr(values, "dtype"):
        return np.empty(0, np.int64)  # an empty Python list
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension for a query, got {array.ndim}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must be below 2**63, got {array.max()}")
    return array.astype(np.int64)
