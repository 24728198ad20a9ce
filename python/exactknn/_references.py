"""References, packed once, and searches of blocks of queries in them."""

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
    """Queries, and references packed once for one metric.

    Args:
        rows: queries and references; without references, the queries themselves.
        metric: of the core.
        p: exponent of ``"minkowski"``.
        exclude_self: whether each query is a reference row, and not a neighbour of itself.
        own: the reference row of each query, ``(n,)``; ``None``: query ``i`` is row ``i``.
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
        self._query = rows.query
        self._exclude_self = exclude_self
        self._own = own
        self._num_threads = num_threads
        self._native = _core.References(rows.searched, metric, bfloat16=rows.bfloat16, p=p)

    @property
    def packings(self) -> int:
        """Number of times the references were packed: once for each kind of filter that a search has used."""
        return self._native.packings

    def _without_self(self, start: int, stop: int) -> dict[str, Any]:
        """Return the core's arguments for self-exclusion of the queries ``start`` to ``stop``."""
        if self._own is None:
            return {"exclude_self": self._exclude_self, "first_query": start if self._exclude_self else 0}
        return {"exclude_self": self._exclude_self, "self_rows": np.ascontiguousarray(self._own[start:stop], np.int64)}

    def knn(self, start: int, stop: int, k: int, progress: Report | None = None) -> tuple[Array, Ints]:
        """Return distances and rows of the ``k`` nearest of the queries ``start`` to ``stop``, nearest first."""
        return self._native.knn(
            self._query[start:stop],
            k,
            num_threads=self._num_threads,
            progress=progress,
            **self._without_self(start, stop),
        )

    def ranks(
        self, start: int, stop: int, query_group: Ints, offsets: Ints, rows: Ints, progress: Report | None = None
    ) -> tuple[Ints, Ints]:
        """Return the ranks of relevant references among all, for the queries ``start`` to ``stop``.

        Args:
            start: the first query.
            stop: one past the last.
            query_group: the group of each of these queries, ``(stop - start,)``.
            offsets: group ``g`` has the reference rows ``rows[offsets[g]:offsets[g + 1]]``.
            rows: see ``offsets``.
            progress: called with the finished fraction.

        Returns:
            ``(offsets, ranks)``: query ``start + i`` has the ranks ``ranks[offsets[i]:offsets[i + 1]]``, ascending.
        """
        assert self._own is None, "ranks need queries that are consecutive rows"
        return self._native.ranks(
            self._query[start:stop],
            query_group=query_group,
            group_offsets=offsets,
            group_rows=rows,
            exclude_self=self._exclude_self,
            first_query=start if self._exclude_self else 0,
            num_threads=self._num_threads,
            progress=progress,
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
        """Return the pairs within ``r`` of the queries ``start`` to ``stop``, by query row, then reference row.

        Args:
            start: the first query.
            stop: one past the last.
            r: largest distance of a pair, smallest product for ``"inner_product"``.
            since: the first reference row to search.
            return_distances: whether to measure the pairs.
            progress: called with the finished fraction.

        Returns:
            Query rows, reference rows and distances, one entry per pair; distances are ``None`` if not requested.
        """
        indptr, reference, distances = self._native.radius(
            self._query[start:stop],
            r,
            from_row=since,
            return_distances=return_distances,
            sort=False,
            num_threads=self._num_threads,
            progress=progress,
            **self._without_self(start, stop),
        )
        return np.repeat(np.arange(start, stop), np.diff(indptr)), reference, distances
