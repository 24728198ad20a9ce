"""Retrieval evaluation of whole arrays: what ``exactknn evaluate`` computes. NumPy and the core only.

    embeddings, labels --Task.of--> Task: rows, and the class of each as a number
    Task, metrics, k --> how many neighbours each metric looks at
        few, or fewer than are relevant --_neighbour_blocks--> neighbours --> Hits --+--> one value per query and metric
        else ----------------------------blocks_of_ranks-----> ranks ------> Hits --+--> counts by rank, for curves
        neighbours --> classes ----------------------------------------------------> votes, nearest class
    Task --pair_sample--> distances of same-class and of other-class pairs

The queries pass in blocks, so memory grows neither with queries x references nor with queries x neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from exactknn import _core
from exactknn._arrays import blocks
from exactknn._arrays.blocks import rows_in
from exactknn._neighbours import without_self
from exactknn._progress import Report, part_of
from exactknn._retrieval import engine
from exactknn._retrieval.engine import blocks_of_ranks, ranks_of
from exactknn._retrieval.groups import Groups
from exactknn._retrieval.hits import Hits
from exactknn._retrieval.metrics import (
    UP_TO_RELEVANT,
    values_of,
)
from exactknn._retrieval.names import (
    check_metrics,
    metric_named,
    vote_named,
)
from exactknn._retrieval.task import Task
from exactknn._retrieval.types import Bools, Floats, Ints

Array = npt.NDArray[Any]
Neighbours = int | Literal["all", "max"]
CURVE_NEIGHBOURS = 100
"""Neighbours up to which the curves go."""


@dataclass(frozen=True)
class _Neighbours:
    """The nearest references of some queries, themselves left out, nearest first."""

    values: Array
    """Their distances, ``(b, k)``."""
    classes: Ints
    """``(b, k)``."""


@dataclass(frozen=True)
class Details:
    """What the report shows beside the metrics, over the queries that are not lone."""

    relevant_at: Ints
    """How many queries have a relevant reference at rank ``j + 1``, ``(c,)``."""
    first_at: Ints
    """For how many that is the nearest relevant one, ``(c,)``."""
    nearest_class: Ints
    """Class of the nearest reference of every query, ``(n,)``."""


@dataclass(frozen=True)
class Evaluation:
    """One value for each metric and query."""

    values: dict[str, Floats]
    """By name, in the order asked for: ``(n,)``, NaN for lone queries."""
    relevant_counts: Ints
    """References of its class of each query, itself left out, ``(n,)``; 0: the query is lone."""
    k: int
    """Neighbours that metrics without a number of their own look at."""
    details: Details | None = None

    @property
    def counted(self) -> Bools:
        """Queries that are not lone, ``(n,)``."""
        return self.relevant_counts > 0

    @property
    def cut_short(self) -> list[str]:
        """Metrics that look at as many neighbours as there are relevant references, where ``k`` is below that."""
        if self.k >= self.relevant_counts.max(initial=0):
            return []
        return [name for name in self.values if name in UP_TO_RELEVANT]


def evaluate(
    task: Task,
    metrics: Sequence[str],
    k: Neighbours = "all",
    *,
    details: bool = False,
    num_threads: int | None = None,
    progress: Report | None = None,
) -> Evaluation:
    """Score each query.

    Args:
        task: rows and classes.
        metrics: names of `known_metrics`.
        k: neighbours for metrics that name no number: ``"all"``, ``"max"`` (as many as the largest number of relevant
            references) or a number of at least 1, which acts as ``"all"`` where there are fewer.
        details: whether to gather what the report shows, too.
        num_threads: threads, at least 1. ``None``: see `exactknn.set_num_threads`.
        progress: is told the finished fraction.

    Raises:
        ValueError: an unknown metric, or what the core refuses.
    """
    check_metrics(metrics)
    groups = task.groups()
    relevant_counts = np.diff(groups.offsets)[task.query_class] - task.excludes_self
    most = int(relevant_counts.max(initial=0))
    resolved = {"all": task.candidates, "max": most}[k] if isinstance(k, str) else min(k, task.candidates)
    gathering = _Gathering(task, metrics, relevant_counts, resolved, most, details)
    if most:
        _search(gathering, groups, num_threads, progress)
    return Evaluation(gathering.values, relevant_counts, resolved, gathering.details if details else None)


class _Gathering:
    """Takes what the searches find, block by block."""

    def __init__(
        self, task: Task, metrics: Sequence[str], relevant_counts: Ints, resolved: int, most: int, details: bool
    ) -> None:
        n = len(task.query_class)
        self.task = task
        self.relevant_counts = relevant_counts
        self.resolved = resolved
        self.values = {name: np.full(n, np.nan) for name in metrics}
        self.ranked = {name: metric for name in metrics if (metric := metric_named(name)) is not None}
        self.votes = {name: vote for name in metrics if (vote := vote_named(name)) is not None}
        curve = min(CURVE_NEIGHBOURS, task.candidates) if details else 0
        self.details = Details(np.zeros(curve, np.int64), np.zeros(curve, np.int64), np.full(n, -1, np.int64))
        wanted = [metric.depth(resolved, most, task.candidates) for metric in self.ranked.values()]
        self.depth = max([curve, *wanted])
        """Neighbours whose relevance is wanted."""
        self.classes_wanted = min(max([int(details), *(vote.k for vote in self.votes.values())]), task.candidates)
        """Neighbours whose classes are wanted."""

    def take_hits(self, start: int, stop: int, hits: Hits) -> None:
        for name, values in values_of(self.ranked, hits, self.resolved).items():
            self.values[name][start:stop] = values
        curve = len(self.details.first_at)
        if curve:
            first = hits.first_rank
            for counts, ranks in (
                (self.details.relevant_at, hits.first(curve).ranks),
                (self.details.first_at, first[first <= curve].astype(np.int64)),
            ):
                counts += np.bincount(ranks, minlength=curve + 1)[1:]

    def take_neighbours(self, start: int, stop: int, neighbours: _Neighbours) -> None:
        own = self.task.query_class[start:stop]
        counted = self.relevant_counts[start:stop] > 0
        self.details.nearest_class[start:stop] = neighbours.classes[:, 0]
        for name, vote in self.votes.items():
            columns = vote.winners(neighbours.classes, neighbours.values)
            winners = np.take_along_axis(neighbours.classes, columns[:, None], axis=1)[:, 0]
            self.values[name][start:stop] = np.where(counted, winners == own, np.nan)


def _search(gathering: _Gathering, groups: Groups, num_threads: int | None, progress: Report | None) -> None:
    task, counts = gathering.task, gathering.relevant_counts
    by_rank = engine.ranks_pay(gathering.depth, counts)
    columns = gathering.classes_wanted if by_rank else max(gathering.depth, gathering.classes_wanted)
    stages = _Stages(progress, number=int(by_rank) + int(columns > 0))
    if by_rank:
        for start, stop in blocks_of_ranks(counts):
            offsets, ranks = ranks_of(
                task.rows.query[start:stop],
                task.reference,
                task.distance,
                groups.part(start, stop),
                exclude_self=task.excludes_self,
                first_row=start,
                bfloat16=task.rows.bfloat16,
                num_threads=num_threads,
                progress=stages.part(start, stop, len(counts)),
                p=task.p,
            )
            gathering.take_hits(start, stop, Hits(ranks, offsets, counts[start:stop], task.candidates))
        stages.next()
    if columns:
        for start, stop, neighbours in _neighbour_blocks(task, columns, num_threads, stages):
            if not by_rank:
                relevance = neighbours.classes == task.query_class[start:stop, None]
                gathering.take_hits(start, stop, Hits.from_relevance(relevance, counts[start:stop]))
            gathering.take_neighbours(start, stop, neighbours)


def _neighbour_blocks(
    task: Task, k: int, num_threads: int | None, stages: _Stages
) -> Iterator[tuple[int, int, _Neighbours]]:
    """The ``k`` nearest references of the queries from ``start`` to ``stop``, at least one."""
    n = len(task.query_class)
    step = rows_in(blocks.BLOCK_ELEMENTS, k)
    if n <= step:
        values, indices = _knn(task, slice(None), k, task.excludes_self, num_threads, stages.part(0, n, n))
        yield 0, n, _Neighbours(values, task.reference_class[indices])
        return
    for start in range(0, n, step):
        stop = min(start + step, n)
        report = stages.part(start, stop, n)
        found = _knn(task, slice(start, stop), k + task.excludes_self, False, num_threads, report)
        values, indices = without_self(*found, start) if task.excludes_self else found
        yield start, stop, _Neighbours(values, task.reference_class[indices])


def _knn(
    task: Task, queries: slice, k: int, exclude_self: bool, num_threads: int | None, progress: Report | None
) -> tuple[Array, Ints]:
    return _core.knn(
        task.rows.query[queries],
        None if exclude_self else task.reference,
        k,
        task.distance,
        exclude_self=exclude_self,
        bfloat16=task.rows.bfloat16,
        num_threads=num_threads,
        progress=progress,
        p=task.p,
    )


@dataclass
class _Stages:
    """One finished fraction of several searches, each in blocks."""

    progress: Report | None
    number: int
    finished: int = field(default=0, init=False)

    def part(self, start: int, stop: int, of: int) -> Report | None:
        """What a search is to call that does the part from ``start`` to ``stop`` of this stage."""
        return part_of(
            self.progress, (self.finished + start / of) / self.number, (self.finished + stop / of) / self.number
        )

    def next(self) -> None:
        """The stage is done."""
        self.finished += 1
