"""Search with torch for distances that the core does not compute: in blocks of queries, on the tensors' device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exactknn._arrays.blocks import blocks
from exactknn.distances import (
    BatchedDistance,
)
from exactknn.distances.base import autocast_off, check_floating, result_dtype
from exactknn.evaluation._checks import check_finite
from exactknn.evaluation._device import memory
from exactknn.evaluation._dispatch import METHODS, OURS, PML, SHIPPED, Names, overridden

HALF_DTYPES = (torch.float16, torch.bfloat16)


class ForTorch(NamedTuple):
    """Arguments of a distance, detached from the graph."""

    query: Tensor
    reference: Tensor
    dtype: torch.dtype | None
    """The type of the returned values; ``None``: the type that the distance returns."""


def prepare_for_torch(distance: Any, query: Tensor, reference: Tensor, names: Names) -> ForTorch:
    """Return the arguments for a call of the distance.

    Raises:
        ValueError: a row holds a NaN or infinity, or the type is one that this package's distances do not accept.
    """
    check_finite(query, names[0])
    check_finite(reference, names[1])
    query, reference, dtype = query.detach(), reference.detach(), None
    if type(distance) in SHIPPED and overridden(distance, METHODS, OURS) is None:
        check_floating(query, names[0])
        check_floating(reference, names[1])
        dtype = result_dtype(torch.promote_types(query.dtype, reference.dtype), distance.normalize_embeddings)
        if query.dtype in HALF_DTYPES and reference.dtype in HALF_DTYPES:
            # Widened once for all blocks; only the returned values are rounded again.
            query, reference = query.float(), reference.float()
    return ForTorch(query, reference, dtype)


def each_block(
    distance: Any, query: Tensor, reference: Tensor, rows: int, take: Callable[[Tensor, int], object]
) -> None:
    """Call ``take(mat, start)`` with each block of rows of the distance matrix; ``start`` is its first row.

    Args:
        distance: any distance; a ``BatchedDistance`` uses its own block size.
        query: ``(n, d)``, at least one row.
        reference: ``(m, d)``.
        rows: query rows per block.
        take: called with a detached ``(rows, m)`` matrix, and a row number.

    Raises:
        ValueError: the distance did not return a matrix of that shape.
    """

    def checked(mat: Any, start: int, end: int) -> None:
        shape = (min(end, len(query)) - start, len(reference))
        if not isinstance(mat, Tensor) or mat.shape != shape:
            given = tuple(mat.shape) if isinstance(mat, Tensor) else type(mat).__name__
            raise ValueError(f"distance must return a tensor of shape {shape}, got {given}")
        take(mat.detach(), start)

    with torch.no_grad(), autocast_off(query.device.type):
        if is_batched(distance):
            # A copy, because iter_fn is specific to this call.
            batched = copy.copy(distance)
            batched.iter_fn = checked
            batched(query, reference)
        else:
            for start, stop in blocks(len(query), rows):
                checked(distance(query[start:stop], reference), start, stop)


def is_batched(distance: Any) -> bool:
    """Return whether this is a ``BatchedDistance`` of this package or of pytorch-metric-learning."""
    if isinstance(distance, BatchedDistance):
        return True
    return any(
        kind.__qualname__ == "BatchedDistance" and kind.__module__.startswith(PML) for kind in type(distance).__mro__
    )


def without_self(values: Tensor, columns: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and indices without the entry of the row's own index, or without the last if there is none.

    Args:
        values: ``(n, k)``.
        columns: ``(n, k)``, the indices.
        own: ``(n,)``, the own index of each row.
    """
    # Arithmetic, because a boolean mask would synchronise host and device.
    last = columns.shape[1] - 1
    passed = (columns == own.unsqueeze(1))[:, :last].cumsum(dim=1)
    places = torch.arange(last, device=columns.device) + passed
    return values.gather(1, places), columns.gather(1, places)


# Peak bytes per cell of a distance matrix during computation and selection, in float64.
_CELL_BYTES = 32
Neighbours = tuple[Tensor, Tensor]


def torch_search(
    distance: Any,
    query: Tensor,
    k: int,
    reference: Tensor,
    exclude_self: bool,
    batch_size: int | None,
    first_row: int = 0,
) -> Neighbours:
    """Return the nearest of each row, from one block of the distance matrix at a time.

    With ``exclude_self`` query ``i`` is reference row ``first_row + i``.
    """
    query, reference, dtype = prepare_for_torch(distance, query, reference, ("query", "reference"))
    n = len(query)
    if n == 0 or k == 0:
        dtype = dtype or torch.promote_types(query.dtype, reference.dtype)
        return query.new_empty((n, k), dtype=dtype), query.new_empty((n, k), dtype=torch.long)
    blocks = _Blocks(n, k, bool(distance.is_inverted), bool(exclude_self), first_row)
    each_block(distance, query, reference, batch_size or _all_or_what_fits(query, reference), blocks.take)
    distances, indices = blocks.result()
    return distances if dtype is None else distances.to(dtype), indices


def _all_or_what_fits(query: Tensor, reference: Tensor) -> int:
    """Return the query rows of a block without a given ``batch_size``."""
    if query.device.type == "cpu":
        return len(query)
    return max(1, memory.free_bytes(query.device) // (_CELL_BYTES * max(1, len(reference))))


class _Blocks:
    """Collects the nearest of each row, block by block."""

    def __init__(self, n: int, k: int, largest: bool, exclude_self: bool, first_row: int) -> None:
        self.n, self.k = n, k
        self.largest = largest
        self.exclude_self = exclude_self
        self.first_row = first_row
        self.distances: Tensor | None = None
        self.indices: Tensor | None = None

    def take(self, mat: Tensor, start: int) -> None:
        values, columns = _nearest(mat, self.k + self.exclude_self, self.largest)
        if self.exclude_self:
            own = torch.arange(start, start + len(mat), device=mat.device) + self.first_row
            values, columns = without_self(values, columns, own)
        if self.distances is None or self.indices is None:
            self.distances = values.new_empty((self.n, self.k))
            self.indices = columns.new_empty((self.n, self.k))
        self.distances[start : start + len(mat)] = values
        self.indices[start : start + len(mat)] = columns

    def result(self) -> Neighbours:
        if self.distances is None or self.indices is None:
            raise ValueError("distance must pass each block of its matrix to iter_fn, got none")
        return self.distances, self.indices


def _nearest(mat: Tensor, k: int, largest: bool) -> Neighbours:
    if not largest:
        values, columns = torch.topk(mat, k, dim=1, largest=False)
        return values, columns
    # torch sorts NaN as the largest value; among the negated values it comes last. Checking for NaN would synchronise
    # host and device at each block.
    columns = torch.topk(-mat, k, dim=1, largest=False).indices
    return mat.gather(1, columns), columns
