"""Retrieval evaluation for PyTorch embeddings.

Nearest-neighbour backends, called as ``knn(query, k, reference, ref_includes_query)``. They also serve as the
``knn_func`` of pytorch-metric-learning's ``AccuracyCalculator``.
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
from exactknn.evaluation.knn import CustomKNN, RustKNN
from exactknn.evaluation.metrics import (
    RetrievalInputs,
    RetrievalMetric,
    knn_vote_metric,
    ndcg_metric,
    precision_at_k,
)

__all__ = [
    "AccuracyCalculator",
    "CustomKNN",
    "RetrievalInputs",
    "RetrievalMetric",
    "RustKNN",
    "knn_vote_metric",
    "ndcg_metric",
    "precision_at_k",
]
