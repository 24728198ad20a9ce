"""Plans and runs the searches of an evaluation, and computes one value per query and metric.

metrics, relevant references --plan--> how many neighbours, and whether ranks are counted instead
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

# Up to here, neighbours are always cheaper than the ranks of the relevant references.
_FEW_NEIGHBOURS = 128

# Ranks that the core returns at a time (32 MiB).
_BLOCK_RANKS = 1 << 22

Block = tuple[int, int, Hits]
"""First query, one past the last, and their hits."""


class Plan(NamedTuple):
    """How many neighbours an evaluation needs, and how it finds them."""

    resolved: int
    """Neighbours for metrics without a cutoff in their name."""
    for_ranks: int
    """Neighbours for the rank metrics."""
    columns: int
    """Neighbours to search for."""
    by_rank: bool
    """Whether ranks are counted, so that the rank metrics need none of these columns."""


def depth_of(metrics: Iterable[Metric], resolved: int, relevant_counts: Ints, candidates: int) -> int:
    """Return how many neighbours these metrics need, 0 if no query has a relevant reference."""
    most = int(relevant_counts.max(initial=0))
    return max((metric.depth(resolved, most, candidates) for metric in metrics), default=0) if most else 0


def plan(resolved: int, for_ranks: int, for_others: int, relevant_counts: Ints, *, can_count: bool = True) -> Plan:
    """Return the plan of an evaluation: ranks are counted if that is cheaper than finding the neighbours.

    Args:
        resolved: neighbours for metrics without a cutoff in their name.
        for_ranks: neighbours for the rank metrics.
        for_others: neighbours for all other metrics, which always need them.
        relevant_counts: relevant references of each query, ``(n,)``.
        can_count: whether the search can count ranks.
    """
    by_rank = can_count and for_ranks > for_others and ranks_pay(for_ranks, relevant_counts)
    return Plan(resolved, for_ranks, for_others if by_rank else max(for_others, for_ranks), by_rank)


def ranks_pay(depth: int, relevant_counts: Ints) -> bool:
    """Return whether the ranks of all relevant references are cheaper than the ``depth`` nearest of each query.

    Beyond a few neighbours, ranks are cheaper if there are fewer of them.
    """
    return depth > _FEW_NEIGHBOURS and int(relevant_counts.sum()) <= depth * len(relevant_counts)


def group_blocks(groups: Groups, relevant_counts: Ints) -> Iterator[tuple[int, int, Groups]]:
    """Yield blocks of queries whose ranks take a few dozen MiB, each with its groups."""
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
        references: the references.
        blocks: of queries, first to last, with their relevant references.
        relevant_counts: relevant references of each query, self excluded, ``(n,)``.
        candidates: references of one query, self excluded.
        part: returns the progress function of a block.
    """
    for start, stop, groups in blocks:
        offsets, ranks = references.ranks(
            start, stop, groups.query_group, groups.offsets, groups.rows, part(start, stop)
        )
        yield start, stop, Hits(ranks, offsets, relevant_counts[start:stop], candidates)


class Scores:
    """One value per query for each rank metric, NaN until its block is taken."""

    def __init__(self, metrics: Mapping[str, Metric], n: int, resolved: int) -> None:
        """Start with NaN for all ``n`` queries; metrics without a cutoff in their name use ``resolved`` neighbours."""
        self._metrics = metrics
        self._resolved = resolved
        self.values: dict[str, Floats] = {name: np.full(n, np.nan) for name in metrics}

    def take(self, start: int, stop: int, hits: Hits) -> None:
        """Compute the values of the queries ``start`` to ``stop``."""
        for name, values in values_of(self._metrics, hits, self._resolved).items():
            self.values[name][start:stop] = values
