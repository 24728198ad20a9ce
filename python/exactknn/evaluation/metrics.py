"""Custom metrics for the calculator, and metrics that need more than ranks.

    AccuracyCalculator ──RetrievalInputs──> RetrievalMetric.function ──one value per query──> averages

The built-in metrics are functions of ranks (`exactknn._retrieval`); those here also need the labels or distances of the
neighbours, or graded relevance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exactknn._arrays.blocks import small_blocks
from exactknn._arrays.scalars import as_choice, as_count, as_optional_count, as_real
from exactknn._environment import undisturbed
from exactknn._retrieval.votes import Vote, vote_blocks
from exactknn.evaluation._relevance import Classes

WEIGHTS = ("uniform", "softmax")

NO_COMPARISON = (
    "labels with several columns have no default relevance: "
    "give the calculator a label_comparison_fn, or use metrics of graded relevance (ndcg_metric)"
)


class _Undefined:
    """Sentinel for a value that the labels do not define."""

    def __reduce__(self) -> str:
        return "UNDEFINED"


UNDEFINED: Any = _Undefined()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RetrievalInputs:
    """Inputs of a metric: ``n`` queries and the first ``k`` neighbours of each, nearest first.

    Neighbours and counts exclude the query's own reference row.

    Raises:
        ValueError: ``relevance`` or ``relevant_counts`` is read, but the labels have several columns and no comparison.
    """

    relevant_counts: Tensor
    """Relevant references of each query among all references, int64 ``(n,)``."""
    reference_labels: Tensor
    """``(m,)`` or ``(m, columns)``."""
    ref_includes_query: bool
    """Whether query ``i`` is reference row ``i``."""
    query_labels: Tensor | None = None
    """``(n,)`` or ``(n, columns)``."""
    knn_labels: Tensor | None = None
    """Labels of the neighbours, ``(n, k)`` or ``(n, k, columns)``."""
    knn_distances: Tensor | None = None
    """Values of the neighbours, ``(n, k)``: ascending distances or descending similarities."""
    knn_indices: Tensor | None = None
    """Reference rows of the neighbours, int64 ``(n, k)``."""
    relevance: Tensor | None = None
    """Whether each neighbour is relevant to its query, bool ``(n, k)``."""

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if value is UNDEFINED:
            raise ValueError(NO_COMPARISON)
        return value


@dataclass(frozen=True)
class RetrievalMetric:
    """A metric for ``AccuracyCalculator(custom_metrics={name: metric})``.

    Args:
        function: called once with the `RetrievalInputs` of all queries; returns one real value per query, ``(n,)``, NaN
            if undefined. The calculator averages the values that are not NaN.
        neighbors: neighbours passed to the function, capped at those available. ``None``: the calculator's ``k``.
        exclude_lone_queries: whether the average excludes queries without a relevant reference.

    Raises:
        TypeError: ``function`` is not callable.
        ValueError: ``neighbors`` is neither an integer of at least 1 nor ``None``.
    """

    function: Callable[[RetrievalInputs], Tensor]
    neighbors: int | None = None
    exclude_lone_queries: bool = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be callable, got {type(self.function).__name__}")
        object.__setattr__(self, "neighbors", _checked_neighbors(self.neighbors))


def _checked_neighbors(neighbors: Any) -> int | None:
    if neighbors is None:
        return None
    try:
        return as_count(neighbors, "neighbors", minimum=1)
    except (TypeError, ValueError):
        raise ValueError(f"neighbors must be an integer of at least 1 or None, got {neighbors!r}") from None


@undisturbed
def precision_at_k(inputs: RetrievalInputs, k: int) -> Tensor:
    """Return the share of relevant references among the first ``k`` neighbours of each query.

    Args:
        inputs: of ``n`` queries, with ``relevance``.
        k: number of neighbours, at least 1. It is the divisor even if there are fewer neighbours.

    Returns:
        float64 ``(n,)``, from 0 to 1.

    Raises:
        TypeError: ``k`` is not an integer.
        ValueError: ``k`` is below 1, or ``inputs`` has no ``relevance``.
    """
    k = as_count(k, "k", minimum=1)
    relevance = _given(inputs, "relevance")
    return relevance[:, :k].sum(dim=1).cpu().double() / k


def ndcg_metric(relevance_fn: Callable[[Tensor, Tensor], Tensor], k: int | None = None) -> RetrievalMetric:
    """Return the metric normalised discounted cumulative gain (nDCG) for graded relevance.

    Its value is ``sum(gain(j) / log2(j + 1))`` over the first ``k`` neighbours, ``j`` from 1, divided by the same sum
    for the ideal order of all references (Järvelin and Kekäläinen, 2002, with linear gains, not ``2**gain - 1``). If no
    reference has a gain, the value is NaN and the query is not counted.

    Args:
        relevance_fn: ``relevance_fn(query_labels, reference_labels)`` for label tensors that broadcast over the leading
            dimensions; returns finite gains of at least 0. It reduces a last axis of several label columns.
        k: number of neighbours; ``None``: the calculator's ``k``.

    Returns:
        A metric for ``custom_metrics``. Queries without an equal label are counted: only the gains matter.

    Raises:
        TypeError: ``relevance_fn`` is not callable, or ``k`` is neither an integer nor ``None``.
        ValueError: ``k`` is below 1; on evaluation: a gain is negative, NaN or infinite, or the shape is wrong.
    """
    if not callable(relevance_fn):
        raise TypeError(f"relevance_fn must be callable, got {type(relevance_fn).__name__}")
    k = as_optional_count(k, "k")
    return RetrievalMetric(_Ndcg(relevance_fn), neighbors=k, exclude_lone_queries=False)


def knn_vote_metric(k: int, *, weights: str = "uniform", temperature: float = 0.07) -> RetrievalMetric:
    """Return the metric accuracy of the class that wins the vote of the first ``k`` neighbours.

    With ``weights="softmax"`` the vote of a neighbour with similarity ``s`` is ``exp(s / temperature)`` (Wu et al.,
    2018, "Unsupervised Feature Learning via Non-parametric Instance Discrimination", with cosine similarity): search
    with ``CustomKNN(CosineSimilarity())`` for the published form. For a distance, ``s`` is the negative distance; the
    squared distance of normalised rows with twice the temperature gives the same weights as cosine similarity.

    Ties go to the class whose nearest member comes first.

    Args:
        k: neighbours that vote, at least 1.
        weights: ``"uniform"`` or ``"softmax"``.
        temperature: above 0.

    Returns:
        A metric for ``custom_metrics``: 1 where the winning class is relevant to the query, else 0.

    Raises:
        TypeError: ``k`` is not an integer, or ``temperature`` is not a number.
        ValueError: ``k`` is below 1, ``weights`` is unknown, or ``temperature`` is not finite and above 0.
    """
    k = as_count(k, "k", minimum=1)
    as_choice(weights, "weights", WEIGHTS)
    temperature = as_real(temperature, "temperature")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature:g}")
    return vote_metric(Vote(k, temperature if weights == "softmax" else None))


def vote_metric(vote: Vote) -> RetrievalMetric:
    """Return a metric: 1 where the class that wins this vote is relevant to the query, else 0."""
    return RetrievalMetric(_VoteIsRight(vote), neighbors=vote.k)


def _given(inputs: RetrievalInputs, name: str) -> Tensor:
    value = getattr(inputs, name)
    if value is None:
        raise ValueError(f"inputs must have {name}, got None")
    tensor: Tensor = value
    return tensor


@dataclass(frozen=True)
class _VoteIsRight:
    vote: Vote

    @undisturbed
    def __call__(self, inputs: RetrievalInputs) -> Tensor:
        labels, relevance = _given(inputs, "knn_labels"), _given(inputs, "relevance")
        n, k = relevance.shape
        if k == 0:
            return torch.zeros(n, dtype=torch.float64, device="cpu")
        distances = None if self.vote.temperature is None else _given(inputs, "knn_distances")
        winners = np.empty(n, np.int64)
        for part in (slice(*block) for block in vote_blocks(n, k)):
            # Codes are per block, since classes are compared only within a row.
            classes = Classes(labels[part].reshape(-1, *labels.shape[2:])).codes.reshape(-1, k)
            values = None if distances is None else distances[part].cpu().double().numpy()
            winners[part] = self.vote.winners(classes, values)
        return relevance.cpu().gather(1, torch.from_numpy(winners).unsqueeze(1)).squeeze(1).double()


@dataclass(frozen=True)
class _Ndcg:
    relevance_fn: Callable[[Tensor, Tensor], Tensor]

    @undisturbed
    def __call__(self, inputs: RetrievalInputs) -> Tensor:
        query, neighbours = _given(inputs, "query_labels"), _given(inputs, "knn_labels")
        reference = inputs.reference_labels
        n, m = len(query), len(reference)
        k = min(neighbours.shape[1], m - int(inputs.ref_includes_query)) if m else 0
        discount = 1.0 / torch.log2(torch.arange(2, k + 2, dtype=torch.float64, device="cpu"))
        ndcg = torch.full((n,), math.nan, dtype=torch.float64, device="cpu")
        for start, stop in small_blocks(n, m):
            rows = query[start:stop].unsqueeze(1)
            found = self._gains(rows, neighbours[start:stop, :k], (stop - start, k))
            gains = self._gains(rows, reference.unsqueeze(0), (stop - start, m))
            if inputs.ref_includes_query:
                own = torch.arange(start, stop, device="cpu").unsqueeze(1)
                gains = gains.scatter(1, own, -1.0)  # sorts last
            best = torch.topk(gains, k, dim=1).values
            ideal = (best * discount).sum(dim=1)
            ndcg[start:stop] = torch.where(ideal > 0, (found * discount).sum(dim=1) / ideal, math.nan)
        return ndcg

    def _gains(self, query: Tensor, reference: Tensor, shape: tuple[int, int]) -> Tensor:
        given: Any = self.relevance_fn(query, reference)
        if not isinstance(given, Tensor) or given.shape != shape:
            form = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"relevance_fn must return a tensor of gains of shape {shape}, got {form}")
        gains = given.detach().cpu().double()
        if not bool((torch.isfinite(gains) & (gains >= 0)).all()):
            raise ValueError("relevance_fn must return gains that are finite and at least 0, got other values")
        return gains
