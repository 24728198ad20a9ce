"""Signal-to-noise ratio distance."""

from __future__ import annotations

import torch
from torch import Tensor

from exactknn._arrays.blocks import rows_in
from exactknn._arrays.scalars import as_flag
from exactknn.distances.base import BaseDistance

# Elements of a (rows, m, d) block of differences; 64 MiB in float32.
_BLOCK_ELEMENTS = 1 << 24


class SNRDistance(BaseDistance):
    """``var(q - r) / var(q)`` with the unbiased variance over the coordinates; not symmetric.

    A query whose coordinates are all equal gives infinity, or NaN if the difference is constant too. One dimension has
    no variance: all values are NaN.

    Args:
        normalize_embeddings: divide each row by its ``p``-norm first.
        p: the norm used for that.
        power: the distances are raised to this power.
        is_inverted: only ``False`` is possible.
        collect_stats: see ``BaseDistance``.

    Raises:
        ValueError: ``is_inverted`` is ``True``.
    """

    def __init__(
        self,
        *,
        normalize_embeddings: bool = True,
        p: float = 2,
        power: float = 1,
        is_inverted: bool = False,
        collect_stats: bool | None = None,
    ) -> None:
        if as_flag(is_inverted, "is_inverted"):
            raise ValueError("is_inverted must be False for SNRDistance: smaller values are nearer")
        super().__init__(
            normalize_embeddings=normalize_embeddings, p=p, power=power, is_inverted=False, collect_stats=collect_stats
        )

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return ``(n, m)`` ratios, before ``power``."""
        rows = rows_in(_BLOCK_ELEMENTS, ref_emb.numel())
        noise = [_variance(block.unsqueeze(1) - ref_emb) for block in torch.split(query_emb, rows)]
        return torch.cat(noise) / _variance(query_emb).unsqueeze(1)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return ``(n,)`` ratios of rows paired by position, before ``power``."""
        return _variance(query_emb - ref_emb) / _variance(query_emb)


def _variance(values: Tensor) -> Tensor:
    # torch.var warns for a single coordinate, although NaN is documented for it, and for no values at all.
    if values.shape[-1] < 2 or values.numel() == 0:
        return values.sum(-1) * float("nan")
    return torch.var(values, dim=-1)
