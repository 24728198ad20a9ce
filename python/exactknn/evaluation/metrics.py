"""Metrics of a ranked list that a user adds to the calculator.

    AccuracyCalculator ──RetrievalInputs──> RetrievalMetric.function ──one value per query──> its averages

The metrics that the calculator knows by name are functions of ranks alone (`exactknn._retrieval`); what is here also
needs the labels of the neighbours, their distances, or grades of relevance.
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
from exactknn._arrays.scalars import as_count, as_optional_count, as_real
from exactknn._retrieval.votes import Vote, vote_blocks
from exactknn.evaluation._relevance import Classes

WEIGHTS = ("uniform", "softmax")

NO_COMPARISON = (
    "labels with several columns have no default meaning of relevant: "
    "give the calculator a label_comparison_fn, or use metrics with grades of relevance (ndcg_metric)"
)


class _Undefined:
    """Stands for what cannot be said of the labels at hand."""

    def __reduce__(self) -> str:
        return "UNDEFINED"


UNDEFINED: Any = _Undefined()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RetrievalInputs:
    """What a metric is given: ``n`` queries, the first ``k`` neighbours of each, nearest first.

    A query that is its own reference row is left out of its neighbours and counts.

    Raises:
        ValueError: ``relevance`` or ``relevant_counts`` is read although labels of several columns have no comparison.
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
            where it is undefined. The calculator forms the averages, without NaN.
        neighbors: neighbours that the function is given, at most those that there are. ``None``: as the
            calculator's ``k`` says.
        exclude_lone_queries: whether queries without a relevant reference are left out of the average.

    Raises:
        TypeError: ``function`` cannot be called.
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


def precision_at_k(inputs: RetrievalInputs, k: int) -> Tensor:
    """Share of relevant references among the first ``k`` neighbours of each query.

    Args:
        inputs: of ``n`` queries, with ``relevance``.
        k: neighbours to look at, at least 1. It is the divisor even where there are fewer neighbours.

    Returns:
        float64 ``(n,)``, from 0 to 1.

    Raises:
        TypeError: ``k`` is not an integer.
        ValueError: ``k`` below 1, or ``inputs`` without ``relevance``.
    """
    k = as_count(k, "k", minimum=1)
    relevance = _given(inputs, "relevance")
    return relevance[:, :k].sum(dim=1).cpu().double() / k


def ndcg_metric(relevance_fn: Callable[[Tensor, Tensor], Tensor], k: int | None = None) -> RetrievalMetric:
    """Normalised discounted cumulative gain for grades of relevance.

    ``sum(gain(j) / log2(j + 1))`` over the first ``k`` neighbours, ``j`` from 1, divided by the same sum of the best
    possible order of all references (Järvelin and Kekäläinen, 2002, with the gains themselves and not ``2**gain - 1``).
    It is NaN, and the query not counted, where no reference has a gain.

    Args:
        relevance_fn: ``relevance_fn(query_labels, reference_labels)`` for label tensors that broadcast against each
            other over the leading dimensions; returns finite gains of at least 0. A last axis of several label columns
            is consumed.
        k: neighbours to look at; ``None``: as the calculator's ``k`` says.

    Returns:
        A metric for ``custom_metrics``. Queries without an equal label are counted: the gains decide.

    Raises:
        TypeError: ``relevance_fn`` cannot be called, or ``k`` is neither an integer nor ``None``.
        ValueError: ``k`` below 1; when it is computed: a gain that is negative, NaN or infinite, or of the wrong shape.
    """
    if not callable(relevance_fn):
        raise TypeError(f"relevance_fn must be callable, got {type(relevance_fn).__name__}")
    k = as_optional_count(k, "k")
    return RetrievalMetric(_Ndcg(relevance_fn), neighbors=k, exclude_lone_queries=False)


def knn_vote_metric(k: int, *, weights: str = "uniform", temperature: float = 0.07) -> RetrievalMetric:
    """Accuracy of the class that wins the vote of the first ``k`` neighbours.

    With ``weights="softmax"`` a neighbour's vote is ``exp(s / temperature)`` for its similarity ``s`` (Wu et al., 2018,
    "Unsupervised Feature Learning via Non-parametric Instance Discrimination", with cosine similarity): search with
    ``CustomKNN(CosineSimilarity())`` for the published form. For a distance ``s`` is the negative distance; the squared
    distance of normalised rows with twice the temperature weighs as cosine similarity does.

    Among classes with equal votes the one whose nearest member comes first wins.

    Args:
        k: neighbours that vote, at least 1.
        weights: ``"uniform"`` or ``"softmax"``.
        temperature: above 0.

    Returns:
        A metric for ``custom_metrics``: 1 where the winning class is relevant to the query, else 0.

    Raises:
        TypeError: ``k`` not an integer, or ``temperature`` no number.
        ValueError: ``k`` below 1, an unknown ``weights``, or a ``temperature`` that is not finite and above 0.
    """
    k = as_count(k, "k", minimum=1)
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    temperature = as_real(temperature, "temperature")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature:g}")
    return vote_metric(Vote(k, temperature if weights == "softmax" else None))


def vote_metric(vote: Vote) -> RetrievalMetric:
    """1 where the class that wins this vote is relevant to the query, else 0."""
    return RetrievalMetric(_VoteIsRight(vote), neighbors=vote.k)


def _given(inputs: RetrievalInputs, name: str) -> Tensor:
    value = getattr(inputs, name)
    if value is None:
        raise ValueError(f"inputs must have {name}, which these were made without")
    tensor: Tensor = value
    return tensor


@dataclass(frozen=True)
class _VoteIsRight:
    vote: Vote

    def __call__(self, inputs: RetrievalInputs) -> Tensor:
        labels, relevance = _given(inputs, "knn_labels"), _given(inputs, "relevance")
        n, k = relevance.shape
        if k == 0:
            return torch.zeros(n, dtype=torch.float64, device="cpu")
        distances = None if self.vote.temperature is None else _given(inputs, "knn_distances")
        winners = np.empty(n, np.int64)
        for part in (slice(*block) for block in vote_blocks(n, k)):
            # Numbered within a block: classes are compared within a row only.
            classes = Classes(labels[part].reshape(-1, *labels.shape[2:])).codes.reshape(-1, k)
            values = None if distances is None else distances[part].cpu().double().numpy()
            winners[part] = self.vote.winners(classes, values)
        return relevance.cpu().gather(1, torch.from_numpy(winners).unsqueeze(1)).squeeze(1).double()


@dataclass(frozen=True)
class _Ndcg:
    relevance_fn: Callable[[Tensor, Tensor], Tensor]

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
                gains = gains.scatter(1, own, -1.0)  # behind every other
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
            raise ValueError("relevance_fn must return gains that are finite and at least 0, got another")
        return gains
