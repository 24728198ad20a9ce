"""Retrieval metrics from the ranks of the relevant references. NumPy only.

    query and reference labels ──Groups.of_codes──> Groups: the references that are relevant to each query
    a backend's neighbours, relevant or not ──Hits.from_relevance──┐
    ranks from the core, without neighbours ─────────────Hits─────┴──> Hits ──Metric───> one value per query
    one value per query ──mean_of, class_means──> what is reported

With relevance yes or no, a ranked list is known by the ranks of its relevant rows: every metric here is a function of
these ranks, of their number among all references, and of how many neighbours were looked at. So no metric needs a step
of Python for each query, and none needs the full list of neighbours.

Sums are formed in one order or rounded once, so that the reported values do not depend on the machine either.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exactknn import _core

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Up to here the neighbours themselves always cost less than the ranks of the relevant references.
_FEW_NEIGHBOURS = 128

# Ranks handed out together by the core (32 MiB), and elements of a mask made at once.
_BLOCK_RANKS = 1 << 22
BLOCK_ELEMENTS = 1 << 22
# Votes counted together, each of some 200 bytes on the way.
VOTES_AT_ONCE = 1 << 19


@dataclass(frozen=True)
class Hits:
    """The relevant references among the first ``k`` neighbours of ``n`` queries, as compressed rows."""

    ranks: Ints
    """Ranks from 1, ascending within a query."""
    offsets: Ints
    """Query ``i`` has the ranks ``offsets[i]`` to ``offsets[i + 1]``, ``(n + 1,)``."""
    relevant_counts: Ints
    """Relevant references of each query among all references, itself left out, ``(n,)``."""
    k: int
    """Neighbours that were looked at."""

    @classmethod
    def from_relevance(cls, relevance: Bools, relevant_counts: Ints) -> Hits:
        """From the relevance of each neighbour, ``(n, k)``, nearest first."""
        rows, columns = np.nonzero(relevance)
        offsets = np.zeros(len(relevance) + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=len(relevance)), out=offsets[1:])
        return cls(columns.astype(np.int64) + 1, offsets, relevant_counts, relevance.shape[1])

    def first(self, k: int) -> Hits:
        """What is left of it when only the first ``k`` neighbours are looked at."""
        if k >= self.k:
            return self
        kept = self.ranks <= k
        before = np.zeros(len(kept) + 1, np.int64)
        np.cumsum(kept, out=before[1:])
        return Hits(self.ranks[kept], before[self.offsets], self.relevant_counts, k)

    @property
    def found(self) -> Ints:
        """Relevant references among the ``k`` neighbours of each query, ``(n,)``."""
        return np.diff(self.offsets)

    @functools.cached_property
    def queries(self) -> Ints:
        """The query that each rank belongs to, ``(len(ranks),)``."""
        return np.repeat(np.arange(len(self.relevant_counts)), self.found)

    def sums(self, values: npt.NDArray[Any]) -> Floats:
        """Sum over the ranks of each query, in their order, ``(n,)``."""
        return np.bincount(self.queries, weights=values, minlength=len(self.relevant_counts)).astype(np.float64)

    @functools.cached_property
    def precisions(self) -> Floats:
        """Precision at each rank: the share of relevant references from the first neighbour to this one."""
        order = np.arange(len(self.ranks)) - self.offsets[self.queries] + 1
        precision: Floats = order / self.ranks
        return precision

    @property
    def first_rank(self) -> Floats:
        """Rank of the nearest relevant reference, infinite where none was found, ``(n,)``."""
        rank = np.full(len(self.relevant_counts), np.inf)
        some = self.found > 0
        rank[some] = self.ranks[self.offsets[:-1][some]]
        return rank


# --- metrics: Hits -> (n,), NaN where the query has no relevant reference -------------------------------------------


def _divided(values: npt.NDArray[Any], divisors: npt.NDArray[Any]) -> Floats:
    out = np.full(len(values), np.nan)
    np.divide(values, divisors, out=out, where=divisors > 0)
    return out


def _defined(values: npt.NDArray[Any], hits: Hits) -> Floats:
    return np.where(hits.relevant_counts > 0, values, np.nan)


def r_precision(hits: Hits) -> Floats:
    """Precision among the first ``h`` neighbours, ``h`` the smaller of the relevant references and ``k``."""
    height = np.minimum(hits.relevant_counts, hits.k)
    return _divided(hits.sums(hits.ranks <= height[hits.queries]), height)


def average_precision(hits: Hits) -> Floats:
    """Sum of the precisions at the relevant ranks, over all relevant references, those not found too."""
    return _divided(hits.sums(hits.precisions), hits.relevant_counts)


def average_precision_at_r(hits: Hits) -> Floats:
    """The same, only ranks up to the number of relevant references counted."""
    counted = hits.ranks <= hits.relevant_counts[hits.queries]
    return _divided(hits.sums(np.where(counted, hits.precisions, 0.0)), hits.relevant_counts)


def reciprocal_rank(hits: Hits) -> Floats:
    """One over the rank of the nearest relevant reference, 0 where none was found."""
    return _defined(1.0 / hits.first_rank, hits)


def precision_at(hits: Hits, k: int) -> Floats:
    """Share of relevant references among the first ``k``, divided by ``k`` even where there are fewer."""
    return _defined(hits.first(k).found / k, hits)


def hit_rate_at(hits: Hits, k: int) -> Floats:
    """1 where any of the first ``k`` neighbours is relevant, else 0."""
    return _defined(hits.first_rank <= k, hits)


def found_fraction_at(hits: Hits, k: int) -> Floats:
    """Share of all relevant references that are among the first ``k``."""
    return _divided(hits.first(k).found, hits.relevant_counts)


def ndcg_at(hits: Hits, k: int) -> Floats:
    """Discounted gain of the first ``k``, over that of a list with all relevant references in front."""
    kept = hits.first(k)
    in_front = np.minimum(hits.relevant_counts, k)
    ideal = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(2, in_front.max(initial=0) + 2)))])
    return _divided(kept.sums(1.0 / np.log2(kept.ranks + 1.0)), ideal[in_front])


@dataclass(frozen=True)
class Metric:
    """A metric of the ranks of the relevant references."""

    name: str
    values: Callable[[Hits], Floats]
    neighbours: int | None = None
    """How many neighbours it looks at; ``None``: as many as the calculator's ``k`` says."""
    up_to_relevant: bool = False
    """Whether it never looks beyond the largest number of relevant references."""

    def depth(self, resolved: int, most: int, candidates: int) -> int:
        """How many neighbours of each query must be known.

        Args:
            resolved: what the calculator's ``k`` says, at most ``candidates``.
            most: the largest number of relevant references.
            candidates: the references of one query, itself left out.
        """
        if self.neighbours is not None:
            return min(self.neighbours, candidates)
        return min(resolved, most) if self.up_to_relevant else resolved


def values_of(metrics: Mapping[str, Metric], hits: Hits, resolved: int) -> dict[str, Floats]:
    """One value per query for each metric; those without a number of their own look at ``resolved`` neighbours."""
    limited = hits.first(resolved)
    return {name: metric.values(limited if metric.neighbours is None else hits) for name, metric in metrics.items()}


BUILT_IN = {
    metric.name: metric
    for metric in (
        Metric("mean_average_precision", average_precision),
        Metric("mean_average_precision_at_r", average_precision_at_r, up_to_relevant=True),
        Metric("mean_reciprocal_rank", reciprocal_rank),
        Metric("precision_at_1", lambda hits: precision_at(hits, 1), neighbours=1),
        Metric("r_precision", r_precision, up_to_relevant=True),
    )
}

UP_TO_RELEVANT = tuple(name for name, metric in BUILT_IN.items() if metric.up_to_relevant)

_AT_K: dict[str, Callable[[Hits, int], Floats]] = {
    "precision": precision_at,
    "recall": hit_rate_at,
    "hit_rate": hit_rate_at,
    "found_fraction": found_fraction_at,
    "ndcg": ndcg_at,
}
_NUMBERED = re.compile(r"([a-z_]+)_at_([1-9][0-9]{0,17})")  # any more digits would not fit 64 bits


def numbered(name: str) -> tuple[str, int] | None:
    """Split a name such as ``precision_at_10``; ``None`` if it has not that form."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def metric_named(name: str) -> Metric | None:
    """The metric of this name, such as ``r_precision`` or ``precision_at_10``; ``None`` if there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    parts = numbered(name)
    if parts is None or parts[0] not in _AT_K:
        return None
    function, k = _AT_K[parts[0]], parts[1]
    return Metric(name, lambda hits: function(hits, k), neighbours=k)


# Temperature of the weights by which neighbours vote; None: all weigh the same.
_VOTES = {"knn_accuracy": None, "knn_softmax_accuracy": 0.07}

NUMBERED_NAMES = tuple(f"{name}_at_<k>" for name in (*_AT_K, *_VOTES))
"""Names that need a number of at least 1 in the place of ``<k>``."""


@dataclass(frozen=True)
class Vote:
    """The vote of the first ``k`` neighbours for the class of a query."""

    k: int
    temperature: float | None = None
    """Of the weights ``exp(similarity / temperature)``, a distance being a negative similarity; ``None``: all equal."""

    def winners(self, classes: Ints, values: npt.NDArray[Any] | None) -> Ints:
        """Column of the nearest member of the class that wins, ``(n,)``.

        Args:
            classes: class of each neighbour, ``(n, c)``, nearest first, ``c`` at least 1; the first ``k`` vote.
            values: distances or similarities of these neighbours, ``(n, c)``; not looked at where votes are equal.
        """
        columns = np.empty(len(classes), np.int64)
        step = max(1, VOTES_AT_ONCE // classes.shape[1])
        for start in range(0, len(classes), step):
            part = slice(start, start + step), slice(self.k)
            weights = None if self.temperature is None or values is None else _weights(values[part], self.temperature)
            columns[part[0]] = _vote(classes[part], weights)
        return columns


def _weights(values: npt.NDArray[Any], temperature: float) -> Floats:
    # Nearest first, whichever way the values run: only how far they are behind the nearest counts. Infinite ones are
    # equal, and what has no distance is behind all others.
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        behind = np.where(wide == wide[:, :1], 0.0, np.abs(wide - wide[:, :1])) / temperature
    weights: Floats = np.exp(-np.where(np.isnan(behind), np.inf, behind))
    return weights


def vote_named(name: str) -> Vote | None:
    """The vote of this name, such as ``knn_accuracy_at_20``; ``None`` if there is none."""
    parts = numbered(name)
    return None if parts is None or parts[0] not in _VOTES else Vote(parts[1], _VOTES[parts[0]])


def is_name(name: str) -> bool:
    """Whether a metric has this name that is computed here."""
    return metric_named(name) is not None or vote_named(name) is not None


def _vote(classes: Ints, weights: Floats | None) -> Ints:
    """Column of the nearest member of the class with most votes; of classes with equal votes the nearest."""
    n, k = classes.shape
    order = np.argsort(classes, axis=1, kind="stable")
    ordered = np.take_along_axis(classes, order, axis=1)
    starts = np.ones((n, k), dtype=bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    party = np.cumsum(starts.ravel()) - 1
    cast = None if weights is None else np.take_along_axis(weights, order, axis=1).ravel()
    votes = np.bincount(party, weights=cast)
    rows, columns = np.nonzero(starts)
    totals = np.full((n, k), -np.inf)
    totals[rows, order[rows, columns]] = votes
    winner: Ints = totals.argmax(axis=1)
    return winner


# --- relevance -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """Relevant references by the class of the query, as compressed rows."""

    query_group: Ints
    """Group of each query, ``(n,)``."""
    offsets: Ints
    """Group ``g`` has the reference rows ``rows[offsets[g]:offsets[g + 1]]``."""
    rows: Ints

    @classmethod
    def of_codes(cls, query_codes: Ints, reference_codes: Ints, groups: int) -> Groups:
        """Equal codes are relevant. Codes of queries are from 0 to ``groups - 1``; a reference may have others."""
        rows = np.argsort(reference_codes, kind="stable")
        offsets = np.searchsorted(reference_codes[rows], np.arange(groups + 1))
        first, last = offsets[0], offsets[-1]  # before and behind are references of no group
        return cls(query_codes, (offsets - first).astype(np.int64), rows[first:last].astype(np.int64))

    @classmethod
    def of_pairs(cls, queries: Ints, rows: Ints, n: int) -> Groups:
        """Each of ``n`` queries has a group of its own. Pairs of query and reference row, ascending by query."""
        offsets = np.searchsorted(queries, np.arange(n + 1))
        return cls(np.arange(n, dtype=np.int64), offsets.astype(np.int64), rows.astype(np.int64))

    def part(self, start: int, stop: int) -> Groups:
        """The same references for the queries from ``start`` to ``stop``."""
        return Groups(self.query_group[start:stop], self.offsets, self.rows)


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


# --- averages ------------------------------------------------------------------------------------------------------


def mean_of(values: Floats) -> float:
    """Mean of the values that are not NaN, rounded once; NaN where none is left."""
    counted = values[~np.isnan(values)]
    if not len(counted):
        return math.nan
    try:
        return math.fsum(counted) / len(counted)
    except (OverflowError, ValueError):  # a sum beyond float64, infinities of both signs
        with np.errstate(all="ignore"):
            return float(counted.mean())


def class_means(values: Floats, classes: Ints, number: int) -> Floats:
    """Mean of each class's values that are not NaN, ``(number,)``; NaN where none is left."""
    counted = ~np.isnan(values)
    sums = np.bincount(classes[counted], weights=values[counted], minlength=number)
    return _divided(sums, np.bincount(classes[counted], minlength=number))
