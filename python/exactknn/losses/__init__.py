"""Losses for training embedding models, as ``torch.nn.Module`` objects called as ``loss(embeddings, labels)``."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "exactknn.losses needs PyTorch, which is not installed: pip install 'exactknn[torch]'", name="torch"
    ) from error

from exactknn.losses.base import BaseMetricLossFunction
from exactknn.losses.ranked_list import RankedListLoss

__all__ = [
    "BaseMetricLossFunction",
    "RankedListLoss",
]
