"""Data of the report besides the metrics: confused classes, and distances within and between classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exactknn._arrays.blocks import small_blocks
from exactknn._retrieval.evaluate import Evaluation
from exactknn._retrieval.task import Task
from exactknn._retrieval.types import Floats, Ints

PAIRS_AT_MOST = 100_000
"""Maximum pairs measured of either kind; of more, this many are sampled."""

_SEED = 0

# Sums of a few values up to here do not overflow.
_LARGEST_DRAWN = 1e300


@dataclass(frozen=True)
class Confusion:
    """Queries of one class whose nearest reference is of another."""

    query_class: int
    nearest_class: int
    count: int


def confusions(task: Task, evaluation: Evaluation, at_most: int) -> list[Confusion]:
    """Return the most often confused pairs of classes, most frequent first, ties in label order."""
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
    """All pairs of this kind."""
    measured: int
    """Pairs measured."""

    @property
    def drawn(self) -> bool:
        """Whether the pairs are a sample, with replacement, instead of all."""
        return self.measured < self.total


def pair_sample(task: Task, *, same_class: bool) -> PairSample:
    """Return the distances of same-class or other-class pairs of a query and a reference: all, or a seeded sample.

    With the references sorted by class, those of the query's class are one run, and the others lie before and after
    it. So the ``u``-th pair of either kind is found without a list of all pairs.
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
    """Return the values of pairs in float64, for a figure: sums are not in the core's order."""
    values = np.empty(len(query_rows))
    for start, stop in small_blocks(len(values), task.reference.shape[1]):
        part = slice(start, stop)
        left = task.rows.query[query_rows[part]].astype(np.float64)
        right = task.reference[reference_rows[part]].astype(np.float64)
        with np.errstate(all="ignore"):
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
