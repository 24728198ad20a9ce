"""Rank metrics: functions of the ranks of the relevant references, one value per query, and their means.

The value is NaN if the query has no relevant reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exactknn._retrieval.hits import Hits
from exactknn._retrieval.types import Floats, Ints


def divided(values: npt.NDArray[Any], divisors: npt.NDArray[Any]) -> Floats:
    out = np.full(len(values), np.nan)
    with np.errstate(all="ignore"):  # values of custom metrics may be denormal or infinite
        np.divide(values, divisors, out=out, where=divisors > 0)
    return out


def _defined(values: npt.NDArray[Any], hits: Hits) -> Floats:
    return np.where(hits.relevant_counts > 0, values, np.nan)


def r_precision(hits: Hits) -> Floats:
    """Return the precision among the first ``h`` neighbours, ``h`` the minimum of the relevant references and ``k``."""
    height = np.minimum(hits.relevant_counts, hits.k)
    return divided(hits.sums(hits.ranks <= height[hits.queries]), height)


def average_precision(hits: Hits) -> Floats:
    """Return the sum of the precisions at the relevant ranks, divided by the number of all relevant references."""
    return divided(hits.sums(hits.precisions), hits.relevant_counts)


def average_precision_at_r(hits: Hits) -> Floats:
    """Return the average precision over ranks up to the number of relevant references."""
    counted = hits.ranks <= hits.relevant_counts[hits.queries]
    return divided(hits.sums(np.where(counted, hits.precisions, 0.0)), hits.relevant_counts)


def reciprocal_rank(hits: Hits) -> Floats:
    """Return 1 / rank of the nearest relevant reference, 0 if none was found."""
    return _defined(1.0 / hits.first_rank, hits)


def precision_at(hits: Hits, k: int) -> Floats:
    """Return the share of relevant references among the first ``k``, divided by ``k`` even if there are fewer."""
    return _defined(hits.first(k).found / k, hits)


def hit_rate_at(hits: Hits, k: int) -> Floats:
    """Return 1 if any of the first ``k`` neighbours is relevant, else 0."""
    return _defined(hits.first_rank <= k, hits)


def found_fraction_at(hits: Hits, k: int) -> Floats:
    """Return the share of all relevant references that are among the first ``k``."""
    return divided(hits.first(k).found, hits.relevant_counts)


def ndcg_at(hits: Hits, k: int) -> Floats:
    """Return the discounted gain of the first ``k``, divided by that of a list with all relevant references first."""
    kept = hits.first(k)
    in_front = np.minimum(hits.relevant_counts, k)
    ideal = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(2, in_front.max(initial=0) + 2)))])
    return divided(kept.sums(1.0 / np.log2(kept.ranks + 1.0)), ideal[in_front])


@dataclass(frozen=True)
class Metric:
    """A function of the ranks of the relevant references."""

    name: str
    values: Callable[[Hits], Floats]
    neighbours: int | None = None
    """Cutoff, in neighbours; ``None``: the calculator's ``k``."""
    up_to_relevant: bool = False
    """Whether it needs no more neighbours than the largest number of relevant references."""

    def depth(self, resolved: int, most: int, candidates: int) -> int:
        """Return how many neighbours of each query the metric needs.

        Args:
            resolved: the calculator's ``k``, at most ``candidates``.
            most: the largest number of relevant references.
            candidates: the references of one query, self excluded.
        """
        if self.neighbours is not None:
            return min(self.neighbours, candidates)
        return min(resolved, most) if self.up_to_relevant else resolved


def values_of(metrics: Mapping[str, Metric], hits: Hits, resolved: int) -> dict[str, Floats]:
    """Return one value per query for each metric; those without a cutoff use ``resolved`` neighbours."""
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


def mean_of(values: Floats) -> float:
    """Return the mean of the values that are not NaN, rounded once; NaN if all are."""
    counted = values[~np.isnan(values)]
    if not len(counted):
        return math.nan
    try:
        return math.fsum(counted) / len(counted)
    except (OverflowError, ValueError):  # a sum beyond float64, or infinities of both signs
        with np.errstate(all="ignore"):
            return float(counted.mean())


def class_means(values: Floats, classes: Ints, number: int) -> Floats:
    """Return the mean of each class's values that are not NaN, ``(number,)``; NaN if all are."""
    counted = ~np.isnan(values)
    sums = np.bincount(classes[counted], weights=values[counted], minlength=number)
    return divided(sums, np.bincount(classes[counted], minlength=number))
