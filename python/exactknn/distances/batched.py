"""A distance evaluated in blocks of query rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exactknn._arrays.scalars import as_count, check_callable


class BatchedDistance(torch.nn.Module):
    """Passes the rows of a distance matrix to a function block by block, without forming the whole matrix.

    For ``s = 0, batch_size, 2 * batch_size, ...`` it calls ``iter_fn(mat, s, s + batch_size)`` with
    ``mat = distance(query_emb[s : s + batch_size], ref_emb)``; the last end may exceed the number of rows. Other
    attributes are those of the wrapped distance.

    Args:
        distance: the wrapped distance.
        iter_fn: called with each block of rows. It may be set later, as an attribute.
        batch_size: query rows per block, at least 1.

    Raises:
        TypeError: ``distance`` is not callable, or ``batch_size`` is not an integer.
        ValueError: ``batch_size`` is below 1.
    """

    def __init__(
        self,
        distance: torch.nn.Module,
        iter_fn: Callable[[Tensor, int, int], Any] | None = None,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        check_callable(distance, "distance")
        self.batch_size = as_count(batch_size, "batch_size", minimum=1)
        self.distance = distance
        self.iter_fn = iter_fn

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> None:
        """Call ``iter_fn`` with each block of rows of the matrix.

        Args:
            query_emb: ``(n, d)``.
            ref_emb: ``(m, d)``; ``None``: all query rows.

        Raises:
            TypeError: ``iter_fn`` has not been set.
        """
        if self.iter_fn is None:
            raise TypeError("iter_fn must be a function of (mat, start, end), got None")
        ref = query_emb if ref_emb is None else ref_emb
        for start in range(0, len(query_emb), self.batch_size):
            end = start + self.batch_size
            self.iter_fn(self.distance(query_emb[start:end], ref), start, end)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # During copying or unpickling the wrapped distance is not set yet.
            if name == "distance" or name.startswith("__"):
                raise
            return getattr(self.distance, name)
