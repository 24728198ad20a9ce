r"""Euclidean distances of float32 rows on the CPU: a product in float64, and differences for near pairs.

    rows -> float64, centred -> |q|^2 + |r|^2 - 2 q.r -- far pairs --> root, rounded to float32
                                                     \-- near pairs -> |q - r| by coordinates, in float64

The product takes a tenth of the time of coordinate differences. Its rounding error is at most
``(d + 8) 2^-53 (|q|^2 + |r|^2)``, so a pair whose squared distance exceeds ``2^24`` times that has a relative error of
at most ``2^-24``, one rounding of float32. All other pairs, including duplicate rows, are measured by differences, and
so are rows with a NaN or infinity. Gradients are split in the same way, with a separate bound.

The distances and the gradients are custom operators, since the split depends on the values: ``torch.compile`` calls
them as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from exactknn.distances.base import loop_over_batch

# Above this share of near pairs, one kernel of differences for all pairs is faster than selecting the near ones.
_MANY = 0.2


@torch.library.custom_op(
    "exactknn::euclidean_distances", mutates_args=(), schema="(Tensor query, Tensor? ref) -> Tensor"
)
def euclidean_distances(query: Tensor, ref: Tensor | None) -> Tensor:
    """Return ``(n, m)`` distances of float32 rows.

    Args:
        query: ``(n, d)``.
        ref: ``(m, d)``; ``None``: the query rows, whose distances to themselves are set to 0 without a computation.
    """
    wide_query = query.double()
    wide_ref = wide_query if ref is None else ref.double()
    centre = wide_ref.mean(dim=0)
    centre = torch.where(centre.isfinite(), centre, 0)  # not finite with a non-finite row, or without rows
    centred_query = wide_query - centre
    centred_ref = centred_query if ref is None else wide_ref - centre
    query_square = centred_query.square().sum(dim=1)
    ref_square = query_square if ref is None else centred_ref.square().sum(dim=1)
    squares = (query_square.unsqueeze(1) + ref_square).addmm_(centred_query, centred_ref.t(), alpha=-2)
    distances = squares.sqrt_().to(query.dtype)  # NaN for a negative square, which then counts as near
    # The root of a sum is at most the sum of the roots.
    ratio = math.sqrt((query.shape[1] + 8) * 2**-29)
    query_bound, ref_bound = ((square.sqrt() * ratio).to(query.dtype) for square in (query_square, ref_square))
    near = torch.gt(distances, query_bound.unsqueeze(1) + ref_bound).logical_not_()  # including NaN
    if ref is None:
        near.diagonal().copy_(query_square.isfinite().logical_not_())
        distances.fill_diagonal_(0)
    count = int(torch.count_nonzero(near))
    if count > _MANY * near.numel():
        return torch.cdist(wide_query, wide_ref, compute_mode="donot_use_mm_for_euclid_dist").to(query.dtype)
    for i, j in _pairs(near, count, query.shape[1]):
        distances[i, j] = torch.linalg.vector_norm(wide_query[i] - wide_ref[j], dim=1).to(query.dtype)
    return distances


@torch.library.custom_op(
    "exactknn::euclidean_gradients",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor? ref, Tensor distances) -> (Tensor, Tensor)",
)
def euclidean_gradients(grad: Tensor, query: Tensor, ref: Tensor | None, distances: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both sides; without a reference, the gradient of the rows, and an empty tensor.

    Args:
        grad: ``(n, m)``, the gradient with respect to the distances.
        query: ``(n, d)``.
        ref: ``(m, d)`` or ``None``, as in ``euclidean_distances``.
        distances: ``(n, m)``, the result of ``euclidean_distances``.
    """
    wide_query = query.double()
    wide_ref = wide_query if ref is None else ref.double()
    # The derivative of |q - r| by q is (q - r) / |q - r|: a row's sum over r is (sum of weights) q - weights @ ref.
    # Its rounding error is about 2^-53 (|q| + |r|) / |q - r| of a pair's term.
    query_bound = torch.linalg.vector_norm(wide_query, dim=1).mul_(2**-26).to(query.dtype)
    ref_bound = query_bound if ref is None else torch.linalg.vector_norm(wide_ref, dim=1).mul_(2**-26).to(query.dtype)
    near = torch.le(distances, query_bound.unsqueeze(1) + ref_bound)
    weights = grad.double().div_(distances)
    if ref is None:
        near.fill_diagonal_(False)
        weights.fill_diagonal_(0)
    if near.any():
        weights.masked_fill_(near, 0)
        near.logical_and_(distances != 0)  # the gradient at coinciding rows is 0, even if all rows coincide
    total = weights + weights.t() if ref is None else weights
    grad_query = (wide_query * total.sum(dim=1, keepdim=True)).addmm_(total, wide_ref, alpha=-1)
    if ref is None:
        grad_ref = grad_query  # the rows are on both sides
    else:
        grad_ref = (wide_ref * weights.sum(dim=0).unsqueeze(1)).addmm_(weights.t(), wide_query, alpha=-1)
    for i, j in _pairs(near, int(torch.count_nonzero(near)), query.shape[1]):
        slopes = (wide_query[i] - wide_ref[j]).mul_((grad[i, j].double() / distances[i, j]).unsqueeze(1))
        grad_query.index_add_(0, i, slopes)
        grad_ref.index_add_(0, j, slopes, alpha=-1)
    if ref is None:
        return grad_query.to(query.dtype), query.new_empty(0)
    return grad_query.to(query.dtype), grad_ref.to(query.dtype)


@euclidean_distances.register_fake
def _(query: Tensor, ref: Tensor | None) -> Tensor:
    return query.new_empty(len(query), len(query if ref is None else ref))


@euclidean_gradients.register_fake
def _(grad: Tensor, query: Tensor, ref: Tensor | None, distances: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(0) if ref is None else torch.empty_like(ref)


def _batched_distances(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    return loop_over_batch(euclidean_distances, info, in_dims, arguments)


def _batched_gradients(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    return loop_over_batch(euclidean_gradients, info, in_dims, arguments)


if hasattr(torch.library, "register_vmap"):  # torch 2.5
    torch.library.register_vmap("exactknn::euclidean_distances", _batched_distances)
    torch.library.register_vmap("exactknn::euclidean_gradients", _batched_gradients)


def _pairs(near: Tensor, count: int, dimension: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield row and column numbers of the near pairs, in chunks whose differences fit in n x m elements."""
    if count:  # nonzero takes as long as a product of the rows, even with nothing to find
        for chunk in torch.split(near.nonzero(), max(1, near.numel() // max(1, dimension))):
            yield chunk.unbind(1)
