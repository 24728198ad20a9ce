"""Retrieval evaluation for PyTorch embeddings.

Nearest-neighbour backends, called as ``knn(query, k, reference, ref_includes_query)``. They also serve as the
``knn_func`` of pytorch-metric-learning's ``AccuracyCalculator``. ``MatchFinder`` finds the pairs that match at a
threshold.
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

from exactknn.evaluation.knn import CustomKNN, RustKNN
from exactknn.evaluation.match import MatchFinder

__all__ = [
    "CustomKNN",
    "MatchFinder",
    "RustKNN",
]
