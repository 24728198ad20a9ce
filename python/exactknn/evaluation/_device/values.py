"""The core's float64 values, computed with torch: the same bytes on every device with IEEE float64 arithmetic.

    rows chosen for each query -> (queries, chosen, d) numbers in float64 -> terms -> eight lanes -> the core's tree

Each step is a separate operation on whole tensors, so that products and sums are not fused. The core uses another path
for float64 rows whose squares leave the range; those values are flagged.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

METRICS = (
    "sqeuclidean",
    "euclidean",
    "normalized_sqeuclidean",
    "normalized_euclidean",
    "cosine_similarity",
    "inner_product",
)

_LANES = 8

# Peak bytes per number while it is widened, subtracted and squared.
_BYTES = 32


class Measured(NamedTuple):
    """Values of the rows chosen for each query."""

    values: Tensor
    """``(queries, chosen)``, float64."""
    before_root: Tensor
    """The same values, but squared for all Euclidean metrics."""
    query: Tensor
    """``(queries, d)``, float64, unit rows where the metric normalises."""
    as_core: Tensor
    """``(queries,)``: whether these are the core's values."""


class Values:
    """Values of a metric, one of `METRICS`, against reference rows.

    Args:
        metric: name in the core.
        reference: ``(m, d)``.
        output: float64 if either side is, else float32.
        room: memory budget in bytes.
    """

    def __init__(self, metric: str, reference: Tensor, output: torch.dtype, room: int) -> None:
        self.metric, self.reference = metric, reference
        self.double = output == torch.float64
        self.unit_rows = normalizes(metric)
        if self.unit_rows:
            blocks = [self._squares(block.double()) for block in torch.split(reference, self.rows_of(room, 1))]
            self.squares, self.odd = (torch.cat(parts) for parts in zip(*blocks, strict=True))

    def rows_of(self, room: int, chosen: int) -> int:
        """Return how many queries with ``chosen`` rows each can be measured in ``room`` bytes, at least 1."""
        return max(1, room // (_BYTES * chosen * self.reference.shape[1]))

    def of(self, query: Tensor, rows: Tensor) -> Measured:
        """Return the values of ``(queries, d)`` against the reference rows ``(queries, chosen)``."""
        left, right = query.double(), self.reference[rows].double()
        sound = left.new_ones(len(left), dtype=torch.bool)
        unit = left
        if self.unit_rows:
            square, odd = self._squares(left)
            squares = self.squares[rows]
            sound = ~(odd | self.odd[rows].any(dim=1))
            unit = left * _inverse_root(square).unsqueeze(1)
        if self.metric == "inner_product":
            values = _lane_sum(left.unsqueeze(1) * right)
            return Measured(values, values, unit, values.isfinite().all(dim=1))
        if self.metric == "cosine_similarity":
            product = square.unsqueeze(1) * squares
            values = (_lane_sum(left.unsqueeze(1) * right) / _root(product)).clamp(-1, 1)
            values = torch.where(product == 0, 0, values)
            return Measured(values, values, unit, sound)
        if self.unit_rows:
            right = right * _inverse_root(squares).unsqueeze(2)
        difference = unit.unsqueeze(1) - right
        squared = _lane_sum(difference.square())
        if self.metric.endswith("sqeuclidean"):
            return Measured(squared, squared, unit, sound)
        if self.double and not self.unit_rows:
            sound = ~_outside(squared, difference, -900, 1000).any(dim=1)
        return Measured(_root(squared), squared, unit, sound)

    def _squares(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(rows,)`` squared norms, and a mask of those that the core computes on its other path."""
        squares = _lane_sum(rows.square())
        return squares, _outside(squares, rows, -400, 400) & self.double


def normalizes(metric: str) -> bool:
    """Return whether a metric divides rows by their norm."""
    return metric.startswith(("normalized", "cosine"))


def norm_of(rows: Tensor) -> Tensor:
    """Return Euclidean norms over the last dimension, summed in any order."""
    norm: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norm


def _lane_sum(terms: Tensor) -> Tensor:
    """Return sums over the last dimension, in the order of the core."""
    whole = terms.shape[-1] // _LANES * _LANES
    lanes = terms.new_zeros((*terms.shape[:-1], _LANES))
    for start in range(0, whole, _LANES):
        lanes += terms[..., start : start + _LANES]
    lanes[..., : terms.shape[-1] - whole] += terms[..., whole:]
    a, b, c, d, e, f, g, h = lanes.unbind(-1)
    return ((a + e) + (c + g)) + ((b + f) + (d + h))


def _outside(squares: Tensor, terms: Tensor, low: int, high: int) -> Tensor:
    """Return which sums of squares are outside a range between powers of two, except sums of zeros."""
    inside = (squares >= 2.0**low) & (squares <= 2.0**high)
    return ~inside & (terms != 0).any(dim=-1)


def _inverse_root(squares: Tensor) -> Tensor:
    return torch.where(squares > 0, 1 / _root(squares), 0)


def _root(squares: Tensor) -> Tensor:
    """Return the correctly rounded square root."""
    if squares.device.type == "cpu":  # torch's CPU library is sometimes off by one ulp
        return torch.from_numpy(np.sqrt(squares.numpy()))
    return squares.sqrt()
