"""Retrieval evaluation for PyTorch embeddings.

``AccuracyCalculator`` scores embeddings by their labels; ``RetrievalMetric`` adds a custom metric.

``CustomKNN`` and ``RustKNN`` find nearest neighbours, called as ``knn(query, k, reference, ref_includes_query)``. They
also work as the ``knn_func`` of pytorch-metric-learning's ``AccuracyCalculator``. ``RustKNN`` can keep its references
in an index between calls. ``FaissKNN`` and ``FaissKMeans`` use Faiss, which only their constructors import.

``MatchFinder`` finds the pairs that match at a threshold; ``select_threshold`` picks the threshold from labelled pairs.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "exactknn.evaluation needs PyTorch, which is not installed: pip install 'exactknn[torch]'", name="torch"
    ) from error

from exactknn.evaluation.accuracy import AccuracyCalculator
from exactknn.evaluation.faiss import FaissKMeans, FaissKNN
from exactknn.evaluation.knn import CustomKNN, RustKNN
from exactknn.evaluation.match import MatchFinder
from exactknn.evaluation.metrics import (
    RetrievalInputs,
    RetrievalMetric,
    knn_vote_metric,
    ndcg_metric,
    precision_at_k,
)
from exactknn.evaluation.threshold import (
    MatchCounts,
    ThresholdCurve,
    ThresholdSelection,
    equal_error_rate,
    match_accuracy,
    match_balanced_accuracy,
    match_f1,
    match_recall_at_fmr,
    select_threshold,
    threshold_curve,
)

__all__ = [
    "AccuracyCalculator",
    "CustomKNN",
    "FaissKMeans",
    "FaissKNN",
    "MatchCounts",
    "MatchFinder",
    "RetrievalInputs",
    "RetrievalMetric",
    "RustKNN",
    "ThresholdCurve",
    "ThresholdSelection",
    "equal_error_rate",
    "knn_vote_metric",
    "match_accuracy",
    "match_balanced_accuracy",
    "match_f1",
    "match_recall_at_fmr",
    "ndcg_metric",
    "precision_at_k",
    "select_threshold",
    "threshold_curve",
]
