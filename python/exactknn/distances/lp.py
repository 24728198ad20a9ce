"""Lp distance by coordinate differences, with a backward pass without an (n, m, d) tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from exactknn._arrays.blocks import blocks, rows_in
from exactknn._arrays.scalars import as_exponent, as_flag
from exactknn.distances.base import BaseDistance, loop_over_batch
from exactknn.distances.euclidean import euclidean_distances, euclidean_gradients

# Minimum elements of a (rows, m, d) block of differences (16 MiB in float32), so that small problems run in one block.
_MIN_BLOCK_ELEMENTS = 1 << 22


class LpDistance(BaseDistance):
    """``(sum |q - r|^p)^(1/p)``; the largest coordinate difference for ``p=inf``.

    Values are computed from coordinate differences, so identical rows have distance exactly 0, and rows near each other
    but far from the origin suffer no cancellation. Gradients at coinciding rows are 0.

    Args:
        normalize_embeddings: divide each row by its ``p``-norm first.
        p: exponent, above 0.
        power: the distances are raised to this power; 2 gives squared Euclidean distances.
        is_inverted: only ``False`` is possible.
        collect_stats: see ``BaseDistance``.

    Raises:
        TypeError: ``p`` or ``power`` is not a real number, or a flag is not a bool.
        ValueError: ``is_inverted`` is ``True``, or ``p`` is not above 0.
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
            raise ValueError("is_inverted must be False for LpDistance: smaller values are nearer")
        as_exponent(p, "p")
        super().__init__(
            normalize_embeddings=normalize_embeddings, p=p, power=power, is_inverted=False, collect_stats=collect_stats
        )

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return ``(n, m)`` distances, before ``power``."""
        mat: Tensor
        if self.p == 2 and query_emb.dtype == torch.float32 and query_emb.device.type == "cpu":
            mat = _Euclidean.apply(query_emb, None if ref_emb is query_emb else ref_emb)
            return mat
        # torch.compile does not accept the same tensor twice, but accepts a view of it.
        ref_emb = ref_emb.view_as(ref_emb) if ref_emb is query_emb else ref_emb
        mat = _DistancesByDifference.apply(query_emb, ref_emb, float(self.p))
        return mat

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return ``(n,)`` distances of rows paired by position, before ``power``."""
        distances: Tensor = torch.linalg.vector_norm(query_emb - ref_emb, ord=self.p, dim=1)
        return distances


class _Euclidean(torch.autograd.Function):
    """``euclidean_distances`` with its gradient."""

    @staticmethod
    def forward(query: Tensor, ref: Tensor | None) -> Tensor:
        mat: Tensor = euclidean_distances(query, ref)
        return mat

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        return loop_over_batch(_Euclidean.apply, info, in_dims, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        query, ref, mat = ctx.saved_tensors
        if not torch.is_grad_enabled():
            grad_query, grad_ref = euclidean_gradients(grad.to(mat.dtype), query, ref, mat)
            return grad_query, None if ref is None else grad_ref
        # create_graph: the difference formula has a second derivative.
        sides = (query,) if ref is None else (query, ref)
        again = _DistancesByDifference.apply(sides[0], sides[-1], 2.0)
        gradients = torch.autograd.grad(again, sides, grad, create_graph=True)
        return gradients[0], None if ref is None else gradients[1]


class _DistancesByDifference(torch.autograd.Function):
    """``torch.cdist`` without its matrix-product shortcut, and with a backward pass in row blocks.

    torch's own backward allocates an (n, m, d) buffer on CUDA. Here the buffer of a block of query rows is limited to
    n x m elements, so memory is of order nm + (n + m)d.
    """

    @staticmethod
    def forward(query: Tensor, ref: Tensor, p: float) -> Tensor:
        return torch.cdist(query, ref, p=p, compute_mode="donot_use_mm_for_euclid_dist")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        return loop_over_batch(_DistancesByDifference.apply, info, in_dims, arguments)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        query, ref, p = inputs
        ctx.save_for_backward(query, ref, output)
        ctx.p = p  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        query, ref, mat = ctx.saved_tensors
        grad = grad.to(mat.dtype).contiguous()
        # torch's kernels have no second derivative, which create_graph needs: it leaves gradient recording enabled.
        kernel = not torch.is_grad_enabled() and mat.device.type in ("cpu", "cuda")
        (n, m), d = mat.shape, query.shape[1]
        rows = rows_in(max(n * m, _MIN_BLOCK_ELEMENTS), m * d)
        if kernel and mat.device.type == "cpu":
            rows = max(1, n)  # this kernel needs no buffer
        grad_query = []
        grad_ref = torch.zeros_like(ref)
        for block in (slice(*part) for part in blocks(n, rows)):
            if kernel:
                grad_query.append(_kernel(grad[block], query[block], ref, ctx.p, mat[block]))
                transposed = (grad[block].t().contiguous(), ref, query[block], ctx.p, mat[block].t().contiguous())
                grad_ref += _kernel(*transposed)
            else:
                slopes = _slopes(grad[block], query[block], ref, ctx.p, mat[block])
                grad_query.append(slopes.sum(1))
                grad_ref = grad_ref - slopes.sum(0)
        return torch.cat(grad_query) if grad_query else torch.zeros_like(query), grad_ref, None


def _kernel(grad: Tensor, query: Tensor, ref: Tensor, p: float, mat: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten._cdist_backward(grad, query, ref, p, mat)
    return result


def _slopes(grad: Tensor, query: Tensor, ref: Tensor, p: float, mat: Tensor) -> Tensor:
    """Return ``(n, m, d)``: the derivative of each pair's distance by each query coordinate, times ``grad``."""
    difference = query.unsqueeze(1) - ref
    grad, mat = grad.unsqueeze(2), mat.unsqueeze(2)
    if p == 1:
        return grad * difference.sign()
    if math.isinf(p):
        return grad * difference.sign() * (difference.abs() == mat)
    # Both replacements avoid 0/0 and 0**negative, in this derivative and the next.
    moved = difference != 0
    ratio = torch.where(moved, difference, 1).abs() / torch.where(mat > 0, mat, 1)
    return torch.where(moved & (mat > 0), grad * difference.sign() * ratio ** (p - 1), 0)
