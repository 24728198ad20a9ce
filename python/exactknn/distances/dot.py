"""Similarities that are matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from exactknn.distances.base import BaseDistance


class DotProductSimilarity(BaseDistance):
    """``sum q * r``; larger is nearer.

    Args:
        normalize_embeddings: divide each row by its ``p``-norm first. Off by default: a plain dot product.
        p: the norm used for that.
        power: the similarities are raised to this power.
        collect_stats: see ``BaseDistance``.
    """

    def __init__(
        self,
        *,
        normalize_embeddings: bool = False,
        p: float = 2,
        power: float = 1,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__(
            normalize_embeddings=normalize_embeddings, p=p, power=power, is_inverted=True, collect_stats=collect_stats
        )

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return ``(n, m)`` dot products, before ``power``."""
        return torch.matmul(query_emb, ref_emb.transpose(-1, -2))

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return ``(n,)`` dot products of rows paired by position, before ``power``."""
        return torch.sum(query_emb * ref_emb, dim=1)


class CosineSimilarity(DotProductSimilarity):
    """Dot product of normalised rows, from -1 to 1 for ``p=2``; larger is nearer.

    Args:
        p: the norm that rows are divided by.
        power: the similarities are raised to this power.
        collect_stats: see ``BaseDistance``.
    """

    def __init__(self, *, p: float = 2, power: float = 1, collect_stats: bool | None = None) -> None:
        super().__init__(normalize_embeddings=True, p=p, power=power, collect_stats=collect_stats)
