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

from exactknn import _core, _retrieval
from exactknn._arrays.matrix import EXACT_INTEGER, Pair
from exactknn._neighbours import without_self
from exactknn._progress import Report, part_of
from exactknn._retrieval import BLOCK_ELEMENTS, Bools, Floats, Groups, Hits, Ints

Array = npt.NDArray[Any]
Neighbours = int | Literal["all", "max"]

CURVE_NEIGHBOURS = 100
"""Neighbours up to which the curves go."""
PAIRS_AT_MOST = 100_000
"""Pairs of either kind that are measured; of more, so many are drawn."""

_SEED = 0
# Sums of a few values up to here are finite.
_LARGEST_DRAWN = 1e300


@dataclass(frozen=True)
class Task:
    """Queries and references with the class of each row."""

    rows: Pair
    classes: Array
    """The distinct labels of both sides, ascending."""
    query_class: Ints
    """Position in ``classes``, ``(n,)``."""
    reference_class: Ints
    """The same for the references, ``(m,)``."""
    distance: str = "sqeuclidean"
    p: float | None = None

    @classmethod
    def of(
        cls,
        rows: Pair,
        labels: Array,
        reference_labels: Array | None = None,
        distance: str = "sqeuclidean",
        p: float | None = None,
    ) -> Task:
        """Number the classes.

        Args:
            rows: as `as_pair` makes it; no reference: the queries against themselves, each without itself.
            labels: ``(n,)``, integers, booleans, floats or text.
            reference_labels: ``(m,)``, with a reference only.
            distance: a metric of `exactknn.knn`.
            p: exponent of ``"minkowski"``.

        Raises:
            ValueError: the labels of both sides cannot be compared exactly.
        """
        sides = [labels] if reference_labels is None else [labels, reference_labels]
        both = np.concatenate(_comparable(sides))
        classes, codes = np.unique(both, return_inverse=True)
        codes = codes.astype(np.int64)
        query_class = codes[: len(labels)]
        return cls(rows, classes, query_class, codes[len(labels) :] if len(sides) > 1 else query_class, distance, p)

    @property
    def excludes_self(self) -> bool:
        """Whether query ``i`` is reference row ``i`` and no neighbour of its own."""
        return self.rows.reference is None

    @property
    def reference(self) -> Array:
        """The rows that are searched, ``(m, d)``."""
        return self.rows.searched

    @property
    def candidates(self) -> int:
        """References of one query, itself left out."""
        return len(self.reference) - self.excludes_self

    def groups(self) -> Groups:
        """The references of each class."""
        return Groups.of_codes(self.query_class, self.reference_class, len(self.classes))


def _comparable(sides: Sequence[Array]) -> list[Array]:
    """Bring labels to one type in which equal means equal."""
    numbers = [_numbers_if_written_so(side) for side in sides]
    if any(side.dtype.kind == "U" for side in numbers):
        if all(side.dtype.kind == "U" for side in sides):
            return list(sides)
        raise ValueError("the labels of one side are text, those of the other numbers; wanted the same kind")
    kinds = {"f" if side.dtype.kind == "f" else "i" for side in numbers}
    for side in numbers:
        if side.dtype.kind not in "iu" or not side.size:
            continue
        low, high = int(side.min()), int(side.max())
        if kinds == {"f", "i"} and max(-low, high) > EXACT_INTEGER:
            raise ValueError("the labels of one side are floats, those of the other integers beyond 2**53")
        if high > np.iinfo(np.int64).max:
            raise ValueError(f"the label {high} is beyond 2**63 - 1")
    dtype = np.result_type(*numbers) if kinds == {"f"} else np.float64 if "f" in kinds else np.int64
    return [side.astype(dtype) for side in numbers]


def _numbers_if_written_so(labels: Array) -> Array:
    """Text that is all whole numbers as Python would write them, as these numbers: they sort as a reader expects."""
    if labels.dtype.kind != "U":
        return labels
    try:
        numbers = labels.astype(np.int64)
    except (ValueError, OverflowError):
        return labels
    return numbers if bool((numbers.astype(np.str_) == labels).all()) else labels


def first_row_not_finite(rows: Array) -> int | None:
    """The first row with a NaN or an infinity, or None."""
    step = max(1, BLOCK_ELEMENTS // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        bad = np.flatnonzero(~np.isfinite(rows[start : start + step]).all(axis=1))
        if bad.size:
            return start + int(bad[0])
    return None


# --- metrics -------------------------------------------------------------------------------------------------------


def known_metrics() -> tuple[str, ...]:
    """Names that `evaluate` takes; ``<k>`` stands for a number of at least 1."""
    return (*_retrieval.BUILT_IN, *_retrieval.NUMBERED_NAMES)


def check_metrics(names: Sequence[str]) -> None:
    """Refuse a name that is no metric's.

    Raises:
        ValueError: the text lists the known ones.
    """
    for name in names:
        if not _retrieval.is_name(name):
            raise ValueError(f"unknown metric {name!r}; known: {', '.join(known_metrics())}")


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
        return [name for name in self.values if name in _retrieval.UP_TO_RELEVANT]


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
        self.ranked = {name: metric for name in metrics if (metric := _retrieval.metric_named(name)) is not None}
        self.votes = {name: vote for name in metrics if (vote := _retrieval.vote_named(name)) is not None}
        curve = min(CURVE_NEIGHBOURS, task.candidates) if details else 0
        self.details = Details(np.zeros(curve, np.int64), np.zeros(curve, np.int64), np.full(n, -1, np.int64))
        wanted = [metric.depth(resolved, most, task.candidates) for metric in self.ranked.values()]
        self.depth = max([curve, *wanted])
        """Neighbours whose relevance is wanted."""
        self.classes_wanted = min(max([int(details), *(vote.k for vote in self.votes.values())]), task.candidates)
        """Neighbours whose classes are wanted."""

    def take_hits(self, start: int, stop: int, hits: Hits) -> None:
        for name, values in _retrieval.values_of(self.ranked, hits, self.resolved).items():
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
    by_rank = _retrieval.ranks_pay(gathering.depth, counts)
    columns = gathering.classes_wanted if by_rank else max(gathering.depth, gathering.classes_wanted)
    stages = _Stages(progress, number=int(by_rank) + int(columns > 0))
    if by_rank:
        for start, stop in _retrieval.blocks_of_ranks(counts):
            offsets, ranks = _retrieval.ranks_of(
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
    step = max(1, BLOCK_ELEMENTS // k)
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


# --- what the report adds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Confusion:
    """Queries of one class whose nearest reference is of another."""

    query_class: int
    nearest_class: int
    count: int


def confusions(task: Task, evaluation: Evaluation, at_most: int) -> list[Confusion]:
    """The pairs of classes that are confused most often, most often first, equal ones in the order of their labels."""
    assert evaluation.details is not None
    own, nearest = task.query_class, evaluation.details.nearest_class
    wrong = evaluation.counted & (own != nearest)
    keys, counts = np.unique(own[wrong] * len(task.classes) + nearest[wrong], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:at_most]
    pairs = (divmod(int(key), len(task.classes)) for key in keys[order])
    return [Confusion(own, other, int(count)) for (own, other), count in zip(pairs, counts[order], strict=True)]


@dataclass(frozen=True)
class PairSample:
    """Distances of pairs of a query and a reference of one kind."""

    values: Floats
    """Those below 1e300, at most ``(measured,)``."""
    total: int
    """Pairs of this kind that there are."""
    measured: int
    """Pairs of them that were measured."""

    @property
    def drawn(self) -> bool:
        """Whether some of the pairs were drawn, with replacement, instead of all taken."""
        return self.measured < self.total


def pair_sample(task: Task, *, same_class: bool) -> PairSample:
    """Measure the pairs of a query and a reference of one class, or of two: all, or a sample with a fixed seed.

    The references are laid out by class; those of the query's own class are one run, and the others are what lies
    before and behind it. So the ``u``-th pair of either kind is known without a list of all pairs.
    """
    groups = task.groups()
    begin = groups.offsets[task.query_class]
    length = np.diff(groups.offsets)[task.query_class]
    number = length - task.excludes_self if same_class else len(task.reference) - length
    ends = np.cumsum(number)
    total = int(ends[-1]) if len(ends) else 0
    if total > PAIRS_AT_MOST:
        pair = np.sort(np.random.default_rng(_SEED).integers(total, size=PAIRS_AT_MOST))
    else:
        pair = np.arange(total)
    query = np.searchsorted(ends, pair, side="right")
    place = pair - (ends[query] - number[query])
    if same_class:
        place = place + begin[query]
        if task.excludes_self:
            position = np.empty(len(groups.rows), np.int64)
            position[groups.rows] = np.arange(len(groups.rows))
            place = place + (place >= position[query])
    else:
        place = place + np.where(place >= begin[query], length[query], 0)
    values = _distances(task, query, groups.rows[place])
    return PairSample(values[np.abs(values) < _LARGEST_DRAWN], total, len(values))


def _distances(task: Task, query_rows: Ints, reference_rows: Ints) -> Floats:
    """Values of pairs in float64, for a picture: not in the order of sums of the core."""
    values = np.empty(len(query_rows))
    step = max(1, BLOCK_ELEMENTS // task.reference.shape[1])
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        left = task.rows.query[query_rows[part]].astype(np.float64)
        right = task.reference[reference_rows[part]].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            values[part] = _measured(left, right, task.distance, task.p)
    return values


def _measured(left: Floats, right: Floats, distance: str, p: float | None) -> Floats:
    if distance == "inner_product":
        return np.asarray(np.einsum("ij,ij->i", left, right))
    if distance == "cosine":
        norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
        products = np.einsum("ij,ij->i", left, right)
        return np.asarray(1.0 - np.divide(products, norms, out=np.zeros_like(norms), where=norms > 0))
    gaps = np.abs(left - right)
    order = {"cityblock": 1.0, "chebyshev": np.inf, "minkowski": 2.0 if p is None else p}.get(distance, 2.0)
    if distance == "sqeuclidean":
        return np.asarray(np.einsum("ij,ij->i", gaps, gaps))
    if order == np.inf:
        return np.asarray(gaps.max(axis=1))
    return np.asarray((gaps**order).sum(axis=1) ** (1.0 / order))
