"""References that several blocks of queries are searched in, each query without itself where it is one of them.

The core leaves out reference row ``i`` for query ``i`` of a call, counted from the first query of the call, and packs
the references anew in each call. What a block of other queries needs beyond that is done here and nowhere else: one
neighbour more is searched for, and each query is taken out of its own answer. Order and ties are fixed, so that is the
answer of a search that leaves the query out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from exactknn import _core
from exactknn._arrays.matrix import Pair
from exactknn._progress import Report

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


class References:
    """Queries and the references that they are searched in, by one metric.

    Args:
        rows: queries and references; without references, the queries themselves.
        metric: of the core.
        p: exponent of ``"minkowski"``.
        exclude_self: whether each query is a reference row, and not a neighbour of itself.
        own: that row of each query, ``(n,)``; ``None``: query ``i`` is row ``i``.
        num_threads: threads, at least 1. ``None``: see `exactknn.set_num_threads`.
    """

    def __init__(
        self,
        rows: Pair,
        metric: str,
        *,
        p: float | None = None,
        exclude_self: bool = False,
        own: Ints | None = None,
        num_threads: int | None = None,
    ) -> None:
        self._rows = rows
        self._metric = metric
        self._exclude_self = exclude_self
        self._own = own
        self._options: dict[str, Any] = {"bfloat16": rows.bfloat16, "num_threads": num_threads, "p": p}

    def knn(self, start: int, stop: int, k: int, progress: Report | None = None) -> tuple[Array, Ints]:
        """Return distances and rows of the ``k`` nearest of the queries from ``start`` to ``stop``, nearest first."""
        query, reference = self._rows.query[start:stop], self._rows.searched
        if self._exclude_self and (start > 0 or self._own is not None):
            found = _core.knn(query, reference, k + 1, self._metric, progress=progress, **self._options)
            return without_self(*found, np.arange(start, stop) if self._own is None else self._own[start:stop])
        return _core.knn(
            query,
            None if self._rows.reference is None and len(query) == len(reference) else reference,
            k,
            self._metric,
            exclude_self=self._exclude_self,
            progress=progress,
            **self._options,
        )

    def ranks(
        self, start: int, stop: int, query_group: Ints, offsets: Ints, rows: Ints, progress: Report | None = None
    ) -> tuple[Ints, Ints]:
        """Return the ranks of relevant references among all, for the queries from ``start`` to ``stop``.

        Args:
            start: the first query.
            stop: one behind the last.
            query_group: the group of each of these queries, ``(stop - start,)``.
            offsets: group ``g`` has the reference rows ``rows[offsets[g]:offsets[g + 1]]``.
            rows: see ``offsets``.
            progress: is told the finished fraction.

        Returns:
            ``(offsets, ranks)``: query ``start + i`` has the ranks ``ranks[offsets[i]:offsets[i + 1]]``, ascending.
        """
        assert self._own is None, "ranks are counted for queries that are rows one behind the other"
        return _core.ranks(
            self._rows.query[start:stop],
            self._rows.searched,
            self._metric,
            query_group=query_group,
            group_offsets=offsets,
            group_rows=rows,
            exclude_self=self._exclude_self,
            first_row=start if self._exclude_self else 0,
            progress=progress,
            **self._options,
        )

    def pairs(
        self,
        start: int,
        stop: int,
        r: float,
        *,
        since: int = 0,
        return_distances: bool = True,
        progress: Report | None = None,
    ) -> tuple[Ints, Ints, Array | None]:
        """Return the pairs within ``r`` of the queries from ``start`` to ``stop``, by query row, then reference row.

        Args:
            start: the first query.
            stop: one behind the last.
            r: largest distance of a pair, least product for ``"inner_product"``.
            since: the first reference row that is searched.
            return_distances: whether to measure the pairs.
            progress: is told the finished fraction.

        Returns:
            Query rows, reference rows and distances, an entry a pair; ``None`` for distances that are not wanted.
        """
        indptr, reference, distances = _core.radius(
            self._rows.query[start:stop],
            self._rows.searched[since:],
            r,
            self._metric,
            return_distances=return_distances,
            sort=False,
            progress=progress,
            **self._options,
        )
        query = np.repeat(np.arange(start, stop), np.diff(indptr))
        if since:
            reference += since
        if self._exclude_self:
            others = reference != (query if self._own is None else self._own[query])
            query, reference = query[others], reference[others]
            distances = None if distances is None else distances[others]
        return query, reference, distances


def without_self(distances: Array, indices: Ints, own: Ints) -> tuple[Array, Ints]:
    """Return the neighbours without each query, or without the last where copies of the query come before it.

    Args:
        distances: ``(n, k + 1)``.
        indices: ``(n, k + 1)`` reference rows.
        own: the row that each query is, ``(n,)``.

    Returns:
        ``(distances, indices)``, both ``(n, k)``, in the same order.
    """
    others = indices != own[:, np.newaxis]
    others[others.all(axis=1), -1] = False
    shape = (len(indices), indices.shape[1] - 1)
    return distances[others].reshape(shape), indices[others].reshape(shape)
