"""The names of ``pytorch_metric_learning.utils.accuracy_calculator`` 2.9.

    knn_labels, gt_labels ──label_comparison_fn──> relevance ──Hits──> one value per query ──> reported value

``gt_labels`` have one more axis than the labels of the queries, so that they broadcast against ``knn_labels``:
``query_labels[:, None]``. All arguments are tensors; ``label_counts`` may also be two plain lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exactknn._retrieval import metrics
from exactknn._retrieval.hits import Hits
from exactknn._retrieval.metrics import (
    average_precision,
    average_precision_at_r,
    class_means,
    mean_of,
    reciprocal_rank,
)
from exactknn.evaluation import accuracy as _accuracy
from exactknn.evaluation._labels import in_common_type
from exactknn.evaluation._relevance import Classes, Compared, codes_among

__all__ = [
    "EQUALITY",
    "AccuracyCalculator",
    "get_label_match_counts",
    "get_lone_query_labels",
    "get_relevance_mask",
    "get_unique_labels",
    "maybe_get_avg_of_avgs",
    "mean_average_precision",
    "mean_reciprocal_rank",
    "nan_accuracy",
    "precision_at_k",
    "r_precision",
    "try_getting_not_lone_labels",
]

EQUALITY = torch.eq

Comparison = Callable[[Any, Any], Any]
LabelCounts = tuple[Any, Any]


class AccuracyCalculator(_accuracy.AccuracyCalculator):
    """`exactknn.evaluation.AccuracyCalculator` with ``NMI`` and ``AMI`` in the default set.

    Without a ``kmeans_func``, scikit-learn's ``KMeans`` is used, with a fixed seed. As in 2.9, a
    ``label_comparison_fn`` needs ``exclude=("NMI", "AMI")``.
    """

    def _default_names(self) -> tuple[str, ...]:
        return tuple(self._fixed_names())


def get_unique_labels(labels: Tensor) -> Tensor:
    """Return distinct labels, or rows of labels, ascending."""
    return Classes(labels).labels


def get_label_match_counts(
    query_labels: Tensor, reference_labels: Tensor, label_comparison_fn: Comparison
) -> tuple[Tensor, Tensor]:
    """Return distinct query labels, ascending, and the number of references that each matches."""
    query_labels, reference_labels = _comparable(query_labels, reference_labels, label_comparison_fn)
    classes = Classes(query_labels)
    compared = Compared(classes, query_labels, reference_labels, False, label_comparison_fn)
    return classes.labels, compared.match_counts


def get_lone_query_labels(
    query_labels: Tensor, label_counts: LabelCounts, ref_includes_query: bool, label_comparison_fn: Comparison
) -> tuple[Tensor, Tensor]:
    """Return distinct labels that match no other reference, and a mask of the queries that match one."""
    labels, counts = _as_tensors(label_counts, query_labels)
    own = label_comparison_fn(labels, labels).long() if ref_includes_query else 0
    lone = counts - own <= 0
    place = torch.from_numpy(codes_among(query_labels, labels)).to(query_labels.device)
    return labels[lone], ~lone[place]


def get_relevance_mask(
    shape: torch.Size | tuple[int, int], gt_labels: Tensor, ref_includes_query: bool, label_counts: LabelCounts
) -> tuple[Tensor, Tensor]:
    """Return a mask of each query's first R columns, and R, its number of relevant references."""
    counts = _counts_of(gt_labels, ref_includes_query, label_counts)
    return torch.arange(shape[1], device=counts.device) < counts.unsqueeze(1), counts


def maybe_get_avg_of_avgs(
    accuracy_per_sample: Tensor, sample_labels: Tensor, avg_of_avgs: bool, return_per_class: bool
) -> float | list[float]:
    """Return the mean of the values, the mean of the class means, or the class means in label order."""
    values = accuracy_per_sample.detach().cpu().double().numpy()
    if not (avg_of_avgs or return_per_class):
        return mean_of(values)
    labels = sample_labels.squeeze(1) if sample_labels.ndim > 1 else sample_labels
    classes = Classes(labels)
    means = class_means(values, classes.codes, len(classes))
    if return_per_class:
        listed: list[float] = means.tolist()
        return listed
    return mean_of(means)


def precision_at_k(
    knn_labels: Tensor,
    gt_labels: Tensor,
    k: int,
    avg_of_avgs: bool = False,
    return_per_class: bool = False,
    label_comparison_fn: Comparison = EQUALITY,
) -> float | list[float]:
    """Return the share of relevant references among the first ``k``, divided by ``k`` even with fewer columns."""
    relevance = label_comparison_fn(*_comparable(gt_labels, knn_labels[:, :k], label_comparison_fn))
    return maybe_get_avg_of_avgs(relevance.sum(dim=1).cpu().double() / k, gt_labels, avg_of_avgs, return_per_class)


def r_precision(
    knn_labels: Tensor,
    gt_labels: Tensor,
    ref_includes_query: bool,
    label_counts: LabelCounts,
    avg_of_avgs: bool,
    return_per_class: bool,
    label_comparison_fn: Comparison,
) -> float | list[float]:
    """Return the precision among the first R neighbours, R being the number of relevant references."""
    hits = _hits(knn_labels, gt_labels, ref_includes_query, label_counts, label_comparison_fn)
    return _reported(metrics.r_precision(hits), gt_labels, avg_of_avgs, return_per_class)


def mean_average_precision(
    knn_labels: Tensor,
    gt_labels: Tensor,
    ref_includes_query: bool,
    label_counts: LabelCounts,
    avg_of_avgs: bool,
    return_per_class: bool,
    label_comparison_fn: Comparison,
    at_r: bool = False,
) -> float | list[float]:
    """Return mean average precision over the relevant references; with ``at_r``, of the first ``R`` neighbours."""
    hits = _hits(knn_labels, gt_labels, ref_includes_query, label_counts, label_comparison_fn)
    values = average_precision_at_r(hits) if at_r else average_precision(hits)
    return _reported(values, gt_labels, avg_of_avgs, return_per_class)


def mean_reciprocal_rank(
    knn_labels: Tensor,
    gt_labels: Tensor,
    avg_of_avgs: bool,
    return_per_class: bool,
    label_comparison_fn: Comparison,
) -> float | list[float]:
    """Return 1 / rank of the nearest relevant reference, 0 if there is none."""
    relevance = label_comparison_fn(*_comparable(gt_labels, knn_labels, label_comparison_fn)).cpu().numpy()
    ones = torch.ones(len(relevance), dtype=torch.long).numpy()
    values = reciprocal_rank(Hits.from_relevance(relevance, ones))
    return _reported(values, gt_labels, avg_of_avgs, return_per_class)


def try_getting_not_lone_labels(
    knn_labels: Tensor, query_labels: Tensor, not_lone_query_mask: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the labels of the queries that are not lone; ``(None, None)`` if all are."""
    if not bool(not_lone_query_mask.any()):
        return None, None
    return knn_labels[not_lone_query_mask], query_labels[not_lone_query_mask]


def nan_accuracy(unique_labels: Any, return_per_class: bool) -> float | list[float]:
    """Return the reported value if every query is lone."""
    return [math.nan] * len(unique_labels) if return_per_class else math.nan


def _comparable(labels: Tensor, others: Tensor, label_comparison_fn: Comparison) -> tuple[Tensor, ...]:
    """Return both in one type for equality, which would round integers to float32; for another comparison as given."""
    if label_comparison_fn is not EQUALITY or labels.dtype == others.dtype:
        return labels, others
    return in_common_type((labels, "labels of the queries"), (others, "labels of the references"))


def _as_tensors(label_counts: LabelCounts, like: Tensor) -> tuple[Tensor, Tensor]:
    labels, counts = label_counts
    return torch.as_tensor(labels, device=like.device), torch.as_tensor(counts, device=like.device)


def _counts_of(gt_labels: Tensor, ref_includes_query: bool, label_counts: LabelCounts) -> Tensor:
    query_labels = gt_labels.squeeze(1)
    labels, counts = _as_tensors(label_counts, gt_labels)
    place = torch.from_numpy(codes_among(query_labels, labels)).to(gt_labels.device)
    return torch.where(place >= 0, counts[place] - int(ref_includes_query), 0)


def _hits(
    knn_labels: Tensor,
    gt_labels: Tensor,
    ref_includes_query: bool,
    label_counts: LabelCounts,
    label_comparison_fn: Comparison,
) -> Hits:
    relevance = label_comparison_fn(*_comparable(gt_labels, knn_labels, label_comparison_fn)).cpu().numpy()
    counts = _counts_of(gt_labels, ref_includes_query, label_counts).cpu().numpy()
    return Hits.from_relevance(relevance, counts)


def _reported(values: Any, gt_labels: Tensor, avg_of_avgs: bool, return_per_class: bool) -> float | list[float]:
    return maybe_get_avg_of_avgs(torch.from_numpy(values), gt_labels, avg_of_avgs, return_per_class)
