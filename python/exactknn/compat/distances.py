"""`pytorch_metric_learning.distances` with the defaults of 2.9."""

from __future__ import annotations

from exactknn import distances
from exactknn.distances import BaseDistance, BatchedDistance, CosineSimilarity, LpDistance, SNRDistance

__all__ = [
    "BaseDistance",
    "BatchedDistance",
    "CosineSimilarity",
    "DotProductSimilarity",
    "LpDistance",
    "SNRDistance",
]


class DotProductSimilarity(distances.DotProductSimilarity):
    """`exactknn.distances.DotProductSimilarity`, normalising by default.

    Args:
        normalize_embeddings: divide each row by its `p`-norm first.
        p: the norm used for that.
        power: the similarities are raised to this power.
        collect_stats: see `BaseDistance`.
    """

    def __init__(
        self,
        *,
        normalize_embeddings: bool = True,
        p: float = 2,
        power: float = 1,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__(normalize_embeddings=normalize_embeddings, p=p, power=power, collect_stats=collect_stats)
