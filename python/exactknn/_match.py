"""All pairs of rows within a distance, found in blocks of queries: what ``exactknn match`` writes.

    rows ──_core.radius, a block of queries at a time──> pairs ──among themselves: each once──> Pairs of a block
                 the next block is as large as the matches of this one allow

NumPy and the core only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from exactknn import _core
from exactknn._arrays.matrix import Pair
from exactknn._io.outputs import Pairs
from exactknn._progress import Report, part_of

_FIRST_CELLS = 1 << 24
"""Pairs of rows that are looked at before anything is known of how many match."""
_BLOCK_PAIRS = 1 << 21
"""Matches that a block of queries is to have at most, as far as the block before it tells."""
_BLOCK_QUERIES = 1 << 14
"""Queries of a block at most. For each block the core packs the references once more."""


def matches(
    pair: Pair,
    threshold: float,
    metric: str,
    *,
    p: float | None,
    exclude_self: bool,
    num_threads: int | None,
    progress: Report | None,
) -> Iterator[Pairs]:
    """Find the pairs within the threshold, by query row, then by reference row.

    Args:
        pair: the rows; without a reference each pair is found once, the lower row as the query.
        threshold: largest distance of a pair, least product for ``"inner_product"``.
        metric: of `exactknn.knn`.
        p: exponent of ``"minkowski"``.
        exclude_self: whether query ``i`` is not paired with reference ``i``.
        num_threads: threads, at least 1. ``None``: see `exactknn.set_num_threads`.
        progress: is told the finished fraction.

    Raises:
        ValueError: a NaN or infinity, by its row, and what else the core refuses.
    """
    among_themselves, searched, n = pair.reference is None, pair.searched, len(pair.query)
    start, rows = 0, min(_FIRST_CELLS // max(1, len(searched)) + 1, _BLOCK_QUERIES)
    # No distance is below zero: this only finds a row that is not finite, by its number in the file.
    _core.radius(pair.query, pair.reference, -1.0, "sqeuclidean", num_threads=num_threads)
    while start < n:
        stop = min(start + rows, n)
        # Among themselves the lower row is the query: rows before a block have met it when they were queries.
        first = start if among_themselves else 0
        indptr, found, distances = _core.radius(
            pair.query[start:stop],
            searched[first:],
            threshold,
            metric,
            sort=False,
            num_threads=num_threads,
            progress=part_of(progress, _share(start, n, among_themselves), _share(stop, n, among_themselves)),
            p=p,
        )
        assert distances is not None, "they were asked for"
        query, reference = np.repeat(np.arange(start, stop), np.diff(indptr)), found + first
        if among_themselves or exclude_self:
            wanted = reference > query if among_themselves else reference != query
            query, reference, distances = query[wanted], reference[wanted], distances[wanted]
        yield Pairs(query, reference, distances)
        start, rows = stop, min(rows * _BLOCK_PAIRS // max(1, len(found)), 2 * rows, _BLOCK_QUERIES)
        rows = max(1, rows)


def _share(row: int, n: int, among_themselves: bool) -> float:
    """The finished fraction when all queries before `row` are."""
    return 1 - (1 - row / n) ** 2 if among_themselves else row / n
