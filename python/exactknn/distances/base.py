"""The frame that all distances share.

forward:   check_shapes -> float32 for half types -> normalise -> compute_mat        -> power -> result type
pairwise:  check_shapes -> float32 for half types -> normalise -> pairwise_distance  -> power -> result type
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_DTYPES = (torch.float32, torch.float64, *_HALF_DTYPES)


def result_dtype(dtype: torch.dtype, normalized: bool) -> torch.dtype:
    """The type of a distance's values for embeddings of ``dtype``.

    Half types stay only for normalised embeddings, whose values are bounded: others may exceed their range.
    """
    return torch.float32 if dtype in _HALF_DTYPES and not normalized else dtype


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast changes no type, also on devices that have none."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def check_floating(embeddings: Tensor, name: str) -> None:
    """Raise ``ValueError`` unless the embeddings are of a floating type that distances take."""
    if embeddings.dtype not in _DTYPES:
        raise ValueError(f"{name} must hold float32, float64, float16 or bfloat16 values, got {embeddings.dtype}")


class BaseDistance(torch.nn.Module):
    """Base of the distances; a subclass gives ``compute_mat`` and ``pairwise_distance``.

    Args:
        normalize_embeddings: divide each row by its ``p``-norm first. Zero rows stay zero.
        p: the norm used for that, and by ``LpDistance`` the exponent of the distance.
        power: the values are raised to this power.
        is_inverted: ``True`` for similarities, where larger means nearer.
        collect_stats: record the average row norms before and after normalisation at each matrix call, as the
            attributes ``initial_avg_query_norm``, ``initial_avg_ref_norm``, ``final_avg_query_norm`` and
            ``final_avg_ref_norm``. ``None``: no.
    """

    initial_avg_query_norm: float
    initial_avg_ref_norm: float
    final_avg_query_norm: float
    final_avg_ref_norm: float

    def __init__(
        self,
        normalize_embeddings: bool = True,
        p: float = 2,
        power: float = 1,
        is_inverted: bool = False,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__()
        self.normalize_embeddings = normalize_embeddings
        self.p = p
        self.power = power
        self.is_inverted = is_inverted
        self.collect_stats = bool(collect_stats)
        self.reset_stats()

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """Distances of all pairs.

        Args:
            query_emb: ``(n, d)``, floating. float16 and bfloat16 are computed in float32.
            ref_emb: ``(m, d)``; ``None``: the query rows.

        Returns:
            ``(n, m)``. Half types give float32, or their own type when embeddings are normalised.

        Raises:
            ValueError: wrong shape or type of the embeddings, or of the matrix a subclass returned.
        """
        self.reset_stats()
        self.check_shapes(query_emb, ref_emb)
        query, ref, dtype = _prepared(query_emb, ref_emb, "query_emb", "ref_emb")
        query_normalized = self.maybe_normalize(query)
        ref_normalized = query_normalized if ref is query else self.maybe_normalize(ref)
        self.set_default_stats(query, ref, query_normalized, ref_normalized)
        mat = self.compute_mat(query_normalized, ref_normalized)
        if self.power != 1:
            mat = mat**self.power
        if mat.shape != (len(query), len(ref)):
            raise ValueError(
                f"{type(self).__name__}.compute_mat must return shape {(len(query), len(ref))}, got {tuple(mat.shape)}"
            )
        return self._in_result_dtype(mat, dtype)

    def pairwise(self, x: Tensor, y: Tensor) -> Tensor:
        """Distances of rows paired by position, with the same normalisation and power as the matrix.

        Args:
            x: ``(n, d)``, floating.
            y: ``(n, d)``.

        Returns:
            ``(n,)``: the diagonal of ``self(x, y)`` up to rounding, without building that matrix.

        Raises:
            ValueError: wrong shape or type, or different numbers of rows.
        """
        self.check_shapes(x, y)
        if len(x) != len(y):
            raise ValueError(f"x and y must have the same number of rows, got {len(x)} and {len(y)}")
        left, right, dtype = _prepared(x, y, "x", "y")
        values = self.pairwise_distance(self.maybe_normalize(left), self.maybe_normalize(right))
        if self.power != 1:
            values = values**self.power
        return self._in_result_dtype(values, dtype)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Hook: ``(n, m)`` values of normalised embeddings, before ``power``."""
        raise NotImplementedError

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Hook: ``(n,)`` values of normalised embeddings paired by position, before ``power``."""
        raise NotImplementedError

    def check_shapes(self, query_emb: Tensor, ref_emb: Tensor | None) -> None:
        """Hook: raise ``ValueError`` for embeddings that are not 2-D or of different dimension."""
        if query_emb.ndim != 2 or (ref_emb is not None and ref_emb.ndim != 2):
            shapes = [tuple(query_emb.shape)] + ([] if ref_emb is None else [tuple(ref_emb.shape)])
            raise ValueError("embeddings must be 2-D (rows, dimensions), got shape " + " and ".join(map(str, shapes)))
        if ref_emb is not None and query_emb.shape[1] != ref_emb.shape[1]:
            raise ValueError(
                f"embeddings must have the same dimension, got {query_emb.shape[1]} and {ref_emb.shape[1]}"
            )

    def smallest_dist(self, *args: Any, **kwargs: Any) -> Any:
        """``torch.min``, or ``torch.max`` for similarities: the value of the nearest."""
        return torch.max(*args, **kwargs) if self.is_inverted else torch.min(*args, **kwargs)

    def largest_dist(self, *args: Any, **kwargs: Any) -> Any:
        """``torch.max``, or ``torch.min`` for similarities: the value of the farthest."""
        return torch.min(*args, **kwargs) if self.is_inverted else torch.max(*args, **kwargs)

    def margin(self, x: Any, y: Any) -> Any:
        """How much farther ``x`` is than ``y``: ``x - y``, or ``y - x`` for similarities."""
        return y - x if self.is_inverted else x - y

    def normalize(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """Divide by the ``p``-norm along ``dim``, which is taken as at least 1e-12."""
        return torch.nn.functional.normalize(embeddings, p=self.p, dim=dim, **kwargs)

    def maybe_normalize(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """``normalize`` if ``normalize_embeddings`` is set, else the embeddings themselves."""
        return self.normalize(embeddings, dim=dim, **kwargs) if self.normalize_embeddings else embeddings

    def get_norm(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """The ``p``-norm along ``dim``."""
        norm: Tensor = torch.linalg.vector_norm(embeddings, ord=self.p, dim=dim, **kwargs)
        return norm

    def reset_stats(self) -> None:
        """Set the recorded norms to 0, if they are recorded."""
        if self.collect_stats:
            self.initial_avg_query_norm = self.initial_avg_ref_norm = 0.0
            self.final_avg_query_norm = self.final_avg_ref_norm = 0.0

    def set_default_stats(
        self, query_emb: Tensor, ref_emb: Tensor, query_emb_normalized: Tensor, ref_emb_normalized: Tensor
    ) -> None:
        """Record the average row norms, if ``collect_stats`` is set."""
        if not self.collect_stats:
            return
        with torch.no_grad():
            self.initial_avg_query_norm = self.get_norm(query_emb).mean().item()
            self.initial_avg_ref_norm = self.get_norm(ref_emb).mean().item()
            self.final_avg_query_norm = self.get_norm(query_emb_normalized).mean().item()
            self.final_avg_ref_norm = self.get_norm(ref_emb_normalized).mean().item()

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"normalize_embeddings={self.normalize_embeddings}, p={self.p}, power={self.power}"

    def _in_result_dtype(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        # Full types keep what the hooks gave, so that autocast decides there as it does in torch.
        return values.to(result_dtype(dtype, self.normalize_embeddings)) if dtype in _HALF_DTYPES else values


def _prepared(
    left: Tensor, right: Tensor | None, left_name: str, right_name: str
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Both sides in the type to compute in, row-major, and the type they were given in.

    A row's norm is summed in an order that depends on the memory layout, so equal rows of differently laid out
    tensors would be normalised to unequal ones without the common layout.
    """
    check_floating(left, left_name)
    dtype = left.dtype
    if right is not None:
        check_floating(right, right_name)
        dtype = torch.promote_types(dtype, right.dtype)
    compute_dtype = torch.float32 if dtype in _HALF_DTYPES else dtype
    query = left.to(compute_dtype).contiguous()
    return query, query if right is None else right.to(compute_dtype).contiguous(), dtype
