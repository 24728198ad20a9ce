"""Retrieval evaluation of whole arrays, for ``exactknn evaluate``. NumPy and the core only.

    embeddings, labels --Task.of--> Task: rows, and the class code of each
    Task, metrics, k --engine.plan--> ranks, neighbours or both, in blocks of queries
        ranks, or relevance of neighbours --> Hits --+--> one value per query and metric
                                                     +--> counts by rank, for curves
        classes of neighbours --> votes, nearest class
    Task --pair_sample--> distances of same-class and of other-class pairs

Queries are processed in blocks, so memory grows neither with queries x references nor with queries x neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from exactknn._arrays.blocks import small_blocks
from exactknn._progress import Report, part_of
from exactknn._references import References
from exactknn._retrieval import engine
from exactknn._retrieval.groups import Groups
from exactknn._retrieval.hits import Hits
from exactknn._retrieval.metrics import (
    UP_TO_RELEVANT,
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
"""Number of neighbours that the curves cover."""


@dataclass(frozen=True)
class Details:
    """Further data for the report, over the queries that are not lone (queries with positives)."""

    relevant_at: Ints
    """Number of queries with a relevant reference at rank ``j + 1``, ``(c,)``."""
    first_at: Ints
    """Number of queries whose nearest relevant reference has rank ``j + 1``, ``(c,)``."""
    nearest_class: Ints
    """Class of the nearest reference of every query, ``(n,)``."""


@dataclass(frozen=True)
class Evaluation:
    """One value for each metric and query."""

    values: dict[str, Floats]
    """By name, in the given order: ``(n,)``, NaN for lone queries."""
    relevant_counts: Ints
    """Relevant references of each query, self excluded, ``(n,)``; 0: the query is lone (without positives)."""
    k: int
    """Neighbours for metrics without a cutoff in their name."""
    details: Details | None = None

    @property
    def counted(self) -> Bools:
        """Mask of the queries that are not lone, ``(n,)``."""
        return self.relevant_counts > 0

    @property
    def cut_short(self) -> list[str]:
        """Metrics that ``k`` truncates: those that need as many neighbours as there are relevant references."""
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
    """Return the value of each metric for each query.

    Args:
        task: rows and classes.
        metrics: names of `known_metrics`.
        k: neighbours for metrics without a cutoff in their name: ``"all"``, ``"max"`` (the largest number of relevant
            references) or a number of at least 1, capped at the number of references.
        details: whether to collect the further data for the report.
        num_threads: threads, at least 1. ``None``: see `exactknn.set_num_threads`.
        progress: called with the finished fraction.

    Raises:
        ValueError: a metric is unknown, or the core rejects the arguments.
    """
    check_metrics(metrics)
    groups = task.groups()
    relevant_counts = np.diff(groups.offsets)[task.query_class] - task.excludes_self
    most = int(relevant_counts.max(initial=0))
    resolved = {"all": task.candidates, "max": most}[k] if isinstance(k, str) else min(k, task.candidates)
    gathering = _Gathering(task, metrics, relevant_counts, resolved, details)
    if most:
        _search(gathering, groups, num_threads, progress)
    return Evaluation(gathering.values(metrics), relevant_counts, resolved, gathering.details if details else None)


class _Gathering:
    """Collects the results of the searches, block by block."""

    def __init__(self, task: Task, metrics: Sequence[str], relevant_counts: Ints, resolved: int, details: bool) -> None:
        n = len(task.query_class)
        self.task = task
        self.relevant_counts = relevant_counts
        ranked = {name: metric for name in metrics if (metric := metric_named(name)) is not None}
        self._scores = engine.Scores(ranked, n, resolved)
        votes = {name: vote for name in metrics if (vote := vote_named(name)) is not None}
        self._votes = {name: (vote, np.full(n, np.nan)) for name, vote in votes.items()}
        curve = min(CURVE_NEIGHBOURS, task.candidates) if details else 0
        self.details = Details(np.zeros(curve, np.int64), np.zeros(curve, np.int64), np.full(n, -1, np.int64))
        depth = engine.depth_of(ranked.values(), resolved, relevant_counts, task.candidates)
        classes_wanted = max([int(details), *(vote.k for vote in votes.values())])
        self.plan = engine.plan(resolved, max(depth, curve), min(classes_wanted, task.candidates), relevant_counts)

    def values(self, metrics: Sequence[str]) -> dict[str, Floats]:
        votes = {name: values for name, (_, values) in self._votes.items()}
        return {name: {**self._scores.values, **votes}[name] for name in metrics}

    def take_hits(self, start: int, stop: int, hits: Hits) -> None:
        self._scores.take(start, stop, hits)
        curve = len(self.details.first_at)
        if curve:
            first = hits.first_rank
            for counts, ranks in (
                (self.details.relevant_at, hits.first(curve).ranks),
                (self.details.first_at, first[first <= curve].astype(np.int64)),
            ):
                counts += np.bincount(ranks, minlength=curve + 1)[1:]

    def take_neighbours(self, start: int, stop: int, distances: Array, classes: Ints) -> None:
        """Take distances and classes of the nearest references, ``(stop - start, k)``, nearest first."""
        own = self.task.query_class[start:stop]
        counts = self.relevant_counts[start:stop]
        if not self.plan.by_rank:
            self.take_hits(start, stop, Hits.from_relevance(classes == own[:, np.newaxis], counts))
        self.details.nearest_class[start:stop] = classes[:, 0]
        for vote, values in self._votes.values():
            columns = vote.winners(classes, distances)
            winners = np.take_along_axis(classes, columns[:, None], axis=1)[:, 0]
            values[start:stop] = np.where(counts > 0, winners == own, np.nan)


def _search(gathering: _Gathering, groups: Groups, num_threads: int | None, progress: Report | None) -> None:
    task, counts, plan = gathering.task, gathering.relevant_counts, gathering.plan
    references = References(
        task.rows, task.distance, p=task.p, exclude_self=task.excludes_self, num_threads=num_threads
    )
    stages = _Stages(progress, len(counts), number=int(plan.by_rank) + int(plan.columns > 0))
    if plan.by_rank:
        of_classes = engine.group_blocks(groups, counts)
        for block in engine.counted(references, of_classes, counts, task.candidates, stages.part):
            gathering.take_hits(*block)
        stages.next()
    if plan.columns:
        for start, stop in small_blocks(len(counts), plan.columns):
            distances, rows = references.knn(start, stop, plan.columns, stages.part(start, stop))
            gathering.take_neighbours(start, stop, distances, task.reference_class[rows])


@dataclass
class _Stages:
    """Combined finished fraction of several searches, each in blocks."""

    progress: Report | None
    n: int
    number: int
    finished: int = field(default=0, init=False)

    def part(self, start: int, stop: int) -> Report | None:
        """Return the progress function for the queries ``start`` to ``stop`` of this stage."""
        before, after = (self.finished + row / self.n for row in (start, stop))
        return part_of(self.progress, before / self.number, after / self.number)

    def next(self) -> None:
        """Finish the stage."""
        self.finished += 1
