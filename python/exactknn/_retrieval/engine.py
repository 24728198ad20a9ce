"""How an evaluation finds what its metrics look at, and one value per query and metric of it.

metrics, relevant references --plan--> how many neighbours, and whether ranks are counted instead of them
References, groups ---------counted--> ranks -----+
relevance of neighbours --------------------------+--> Hits --Scores.take--> values, a block of queries at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from exactknn._progress import Report
from exactknn._references import References
from exactknn._retrieval.groups import Groups
from exactknn._retrieval.hits import Hits
from exactknn._retrieval.metrics import Metric, values_of
from exactknn._retrieval.types import Floats, Ints

# Up to here the neighbours themselves always cost less than the ranks of the relevant references.
_FEW_NEIGHBOURS = 128

# Ranks handed out together by the core (32 MiB).
_BLOCK_RANKS = 1 << 22

Block = tuple[int, int, Hits]
"""First query, one behind the last, and their hits."""


class Plan(NamedTuple):
    """How many neighbours an evaluation looks at, and how it finds them."""

    resolved: int
    """For metrics without a number of their own."""
    for_ranks: int
    """For the metrics of ranks."""
    columns: int
    """To search for."""
    by_rank: bool
    """Whether ranks are counted, so that the metrics of ranks need none of these columns."""


def depth_of(metrics: Iterable[Metric], resolved: int, relevant_counts: Ints, candidates: int) -> int:
    """Return how many neighbours these metrics look at: none where no query has a relevant reference."""
    most = int(relevant_counts.max(initial=0))
    return max((metric.depth(resolved, most, candidates) for metric in metrics), default=0) if most else 0


def plan(resolved: int, for_ranks: int, for_others: int, relevant_counts: Ints, *, can_count: bool = True) -> Plan:
    """Return how to find what metrics look at: ranks are counted where that is cheaper than their neighbours.

    Args:
        resolved: neighbours of metrics without a number of their own.
        for_ranks: neighbours that only metrics of ranks look at.
        for_others: neighbours that are wanted in any case.
        relevant_counts: relevant references of each query, ``(n,)``.
        can_count: whether the search can count ranks.
    """
    by_rank = can_count and for_ranks > for_others and ranks_pay(for_ranks, relevant_counts)
    return Plan(resolved, for_ranks, for_others if by_rank else max(for_others, for_ranks), by_rank)


def ranks_pay(depth: int, relevant_counts: Ints) -> bool:
    """Return whether the ranks of all relevant references are cheaper to get than the ``depth`` nearest of each query.

    Beyond a few neighbours that is so while they are fewer numbers.
    """
    return depth > _FEW_NEIGHBOURS and int(relevant_counts.sum()) <= depth * len(relevant_counts)


def group_blocks(groups: Groups, relevant_counts: Ints) -> Iterator[tuple[int, int, Groups]]:
    """Yield blocks of queries whose ranks fit into a few dozen MiB together, each with its groups."""
    ends = np.cumsum(relevant_counts)
    start, n = 0, len(relevant_counts)
    while start < n:
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _BLOCK_RANKS, side="right")))
        yield start, stop, groups.part(start, stop)
        start = stop


def counted(
    references: References,
    blocks: Iterable[tuple[int, int, Groups]],
    relevant_counts: Ints,
    candidates: int,
    part: Callable[[int, int], Report | None] = lambda start, stop: None,
) -> Iterator[Block]:
    """Yield the hits of each block of queries, counted among all references without a list of neighbours.

    Args:
        references: what is searched.
        blocks: of queries, from the first to the last, with their relevant references.
        relevant_counts: how many these are for each query, itself left out, ``(n,)``.
        candidates: references of one query, itself left out.
        part: gives what is told the finished fraction of a block.
    """
    for start, stop, groups in blocks:
        offsets, ranks = references.ranks(
            start, stop, groups.query_group, groups.offsets, groups.rows, part(start, stop)
        )
        yield start, stop, Hits(ranks, offsets, relevant_counts[start:stop], candidates)


class Scores:
    """One value per query for each metric of ranks, NaN until its block is taken."""

    def __init__(self, metrics: Mapping[str, Metric], n: int, resolved: int) -> None:
        """Begin with no block of ``n`` queries; metrics without a number of their own look at ``resolved``."""
        self._metrics = metrics
        self._resolved = resolved
        self.values: dict[str, Floats] = {name: np.full(n, np.nan) for name in metrics}

    def take(self, start: int, stop: int, hits: Hits) -> None:
        """Form the values of the queries from ``start`` to ``stop``."""
        for name, values in values_of(self._metrics, hits, self._resolved).items():
            self.values[name][start:stop] = values
