"""Distances between embeddings, as ``torch.nn.Module`` objects for losses and searches.

    distance(query, reference)          -> (n, m) matrix
    distance.pairwise(x, y)             -> (n,)   rows paired by position

Both check shapes, normalise, compute, and raise to ``power``, in this order. Names and arguments are those of
pytorch-metric-learning, so its distances work here unchanged.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "exactknn.distances needs PyTorch, which is not installed: pip install 'exactknn[torch]'", name="torch"
    ) from error

from exactknn.distances.base import BaseDistance
from exactknn.distances.batched import BatchedDistance
from exactknn.distances.dot import CosineSimilarity, DotProductSimilarity
from exactknn.distances.lp import LpDistance
from exactknn.distances.snr import SNRDistance

__all__ = [
    "BaseDistance",
    "BatchedDistance",
    "CosineSimilarity",
    "DotProductSimilarity",
    "LpDistance",
    "SNRDistance",
]
