"""Whether ranks or neighbours are searched, and the ranks of relevant references in blocks of queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from exactknn import _core
from exactknn._retrieval.groups import Groups
from exactknn._retrieval.types import Ints

# Up to here the neighbours themselves always cost less than the ranks of the relevant references.
_FEW_NEIGHBOURS = 128

# Ranks handed out together by the core (32 MiB), and elements of a mask made at once.
_BLOCK_RANKS = 1 << 22


def ranks_pay(depth: int, relevant_counts: Ints) -> bool:
    """Whether the ranks of all relevant references are cheaper to get than the ``depth`` nearest of each query.

    Beyond a few neighbours that is so while they are fewer numbers.
    """
    return depth > _FEW_NEIGHBOURS and int(relevant_counts.sum()) <= depth * len(relevant_counts)


def ranks_of(
    query: npt.NDArray[Any],
    reference: npt.NDArray[Any],
    metric: str,
    groups: Groups,
    *,
    exclude_self: bool,
    first_row: int,
    **options: Any,
) -> tuple[Ints, Ints]:
    """Ranks of each query's relevant references among all references, counted without a list of neighbours.

    Args:
        query: ``(n, d)``, rows ready for the core.
        reference: ``(m, d)``, the same.
        metric: the core's name for it.
        groups: of the ``n`` queries.
        exclude_self: query ``i`` is reference row ``first_row + i``, and left out.
        first_row: see ``exclude_self``.
        options: ``bfloat16``, ``num_threads``, ``progress`` and ``p`` of the core.

    Returns:
        ``(offsets, ranks)`` of `Hits`.
    """
    return _core.ranks(
        query,
        reference,
        metric,
        query_group=groups.query_group,
        group_offsets=groups.offsets,
        group_rows=groups.rows,
        exclude_self=exclude_self,
        first_row=first_row if exclude_self else 0,
        **options,
    )


def blocks_of_ranks(relevant_counts: Ints) -> Iterator[tuple[int, int]]:
    """Cut the queries into blocks whose ranks fit into a few dozen MiB together."""
    ends = np.cumsum(relevant_counts)
    start, n = 0, len(relevant_counts)
    while start < n:
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _BLOCK_RANKS, side="right")))
        yield start, stop
        start = stop
