"""The base class of all distances.

forward:   check_shapes -> float32 for half types -> normalise -> compute_mat        -> power -> result type
pairwise:  check_shapes -> float32 for half types -> normalise -> pairwise_distance  -> power -> result type
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from exactknn._arrays.scalars import as_flag, as_real
from exactknn._arrays.tensors import oddity

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_DTYPES = (torch.float32, torch.float64, *_HALF_DTYPES)


def result_dtype(dtype: torch.dtype, normalized: bool) -> torch.dtype:
    """Return the type of a distance's values for embeddings of ``dtype``.

    Half types are preserved only for normalised embeddings, whose values are bounded; other values may overflow them.
    """
    return torch.float32 if dtype in _HALF_DTYPES and not normalized else dtype


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that disables autocast; a null context on devices without autocast."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def check_floating(embeddings: Tensor, name: str) -> None:
    """Raise ``ValueError`` unless the embeddings are of a floating type that distances accept."""
    if embeddings.dtype not in _DTYPES:
        raise ValueError(f"{name} must hold float32, float64, float16 or bfloat16 values, got {embeddings.dtype}")


def loop_over_batch(function: Any, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the result of ``function`` for each item of a ``torch.vmap`` axis, stacked, and its axis.

    The functions choose by value how they compute, so that items cannot share one computation.

    Args:
        function: returns a tensor or a tuple of tensors.
        info: has ``batch_size``.
        in_dims: for each argument its axis, or ``None``.
        arguments: of the function.
    """
    results = [
        function(
            *(
                value if axis is None else value.select(axis, item)
                for value, axis in zip(arguments, in_dims, strict=True)
            )
        )
        for item in range(info.batch_size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])


def check_dense(value: object, name: str) -> None:
    """Raise unless this is a dense tensor; those without numbers, such as meta tensors, are accepted.

    Raises:
        TypeError: it is not a tensor.
        ValueError: it is sparse, nested or quantised.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    # Tested here, so that torch.compile can trace it.
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        raise ValueError(f"{name} must be a dense tensor, got {oddity(value)}")


def is_default_check(check_shapes: object) -> bool:
    """Return whether this is the `check_shapes` of a base class, here or in pytorch-metric-learning."""
    return getattr(check_shapes, "__qualname__", "") == "BaseDistance.check_shapes"


class BaseDistance(torch.nn.Module):
    """Base class of the distances; a subclass implements ``compute_mat`` and ``pairwise_distance``.

    Args:
        normalize_embeddings: divide each row by its ``p``-norm first. Zero rows stay zero.
        p: order of that norm and, for ``LpDistance``, the exponent of the distance.
        power: the values are raised to this power.
        is_inverted: ``True`` for similarities, where larger means nearer.
        collect_stats: record the average row norms before and after normalisation on each matrix call, as the
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
        as_real(p, "p", finite=False)
        as_real(power, "power")
        self.normalize_embeddings = as_flag(normalize_embeddings, "normalize_embeddings")
        self.p = p
        self.power = power
        self.is_inverted = as_flag(is_inverted, "is_inverted")
        self.collect_stats = bool(collect_stats)
        self.reset_stats()

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """Return the distances of all pairs.

        Args:
            query_emb: ``(n, d)``, floating. float16 and bfloat16 are computed in float32.
            ref_emb: ``(m, d)``; ``None``: the query rows.

        Returns:
            ``(n, m)``. Half types give float32, or their own type if embeddings are normalised.

        Raises:
            ValueError: the embeddings have a wrong shape or type, or a subclass returns a wrong shape.
        """
        self.reset_stats()
        _check_sides(query_emb, ref_emb, ("query_emb", "ref_emb"))
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
        """Return the distances of rows paired by position, with the same normalisation and power as the matrix.

        Args:
            x: ``(n, d)``, floating.
            y: ``(n, d)``.

        Returns:
            ``(n,)``: the diagonal of ``self(x, y)`` up to rounding, without forming that matrix.

        Raises:
            ValueError: a shape or type is wrong, or the numbers of rows differ.
        """
        _check_sides(x, y, ("x", "y"))
        if is_default_check(self.check_shapes):
            _check_shapes(x, y, ("x", "y"))
        else:
            self.check_shapes(x, y)
        if len(x) != len(y):
            raise ValueError(f"x and y must have the same number of rows, got {len(x)} and {len(y)}")
        left, right, dtype = _prepared(x, y, "x", "y")
        values = self.pairwise_distance(self.maybe_normalize(left), self.maybe_normalize(right))
        if self.power != 1:
            values = values**self.power
        return self._in_result_dtype(values, dtype)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Hook: return ``(n, m)`` values of normalised embeddings, before ``power``."""
        raise NotImplementedError

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Hook: return ``(n,)`` values of normalised embeddings paired by position, before ``power``."""
        raise NotImplementedError

    def check_shapes(self, query_emb: Tensor, ref_emb: Tensor | None) -> None:
        """Hook: raise ``ValueError`` for embeddings that are not 2-D or of different dimension."""
        _check_shapes(query_emb, ref_emb, ("query_emb", "ref_emb"))

    def smallest_dist(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``torch.min``, or ``torch.max`` for similarities: the value of the nearest."""
        return torch.max(*args, **kwargs) if self.is_inverted else torch.min(*args, **kwargs)

    def largest_dist(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``torch.max``, or ``torch.min`` for similarities: the value of the farthest."""
        return torch.min(*args, **kwargs) if self.is_inverted else torch.max(*args, **kwargs)

    def margin(self, x: Any, y: Any) -> Any:
        """Return how much farther ``x`` is than ``y``: ``x - y``, or ``y - x`` for similarities."""
        return y - x if self.is_inverted else x - y

    def normalize(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """Return the embeddings divided by their ``p``-norm along ``dim``, clamped to at least 1e-12."""
        return torch.nn.functional.normalize(embeddings, p=self.p, dim=dim, **kwargs)

    def maybe_normalize(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """Return normalised embeddings if ``normalize_embeddings`` is set, else the embeddings themselves."""
        return self.normalize(embeddings, dim=dim, **kwargs) if self.normalize_embeddings else embeddings

    def get_norm(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """Return the ``p``-norm along ``dim``."""
        norm: Tensor = torch.linalg.vector_norm(embeddings, ord=self.p, dim=dim, **kwargs)
        return norm

    def reset_stats(self) -> None:
        """Reset the recorded norms to 0, if ``collect_stats`` is set."""
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
        """Return the settings, for ``repr``."""
        return f"normalize_embeddings={self.normalize_embeddings}, p={self.p}, power={self.power}"

    def _in_result_dtype(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        # For full types the result of the hooks is unchanged, so that autocast applies as in torch.
        return values.to(result_dtype(dtype, self.normalize_embeddings)) if dtype in _HALF_DTYPES else values


def _prepared(
    left: Tensor, right: Tensor | None, left_name: str, right_name: str
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Return both sides in the type of the computation, row-major, and their original type.

    The summation order of a row's norm depends on the memory layout: without a common layout, equal rows of tensors
    with different layouts would be normalised to different rows.
    """
    check_floating(left, left_name)
    dtype = left.dtype
    if right is not None:
        check_floating(right, right_name)
        dtype = torch.promote_types(dtype, right.dtype)
    compute_dtype = torch.float32 if dtype in _HALF_DTYPES else dtype
    query = left.to(compute_dtype).contiguous()
    return query, query if right is None else right.to(compute_dtype).contiguous(), dtype


def _check_shapes(left: Tensor, right: Tensor | None, names: tuple[str, str]) -> None:
    for value, name in zip((left, right), names, strict=True):
        if value is not None and value.ndim != 2:
            raise ValueError(f"{name} must be 2-D (rows, dimensions), got shape {tuple(value.shape)}")
    if right is not None and left.shape[1] != right.shape[1]:
        both = " and ".join(names)
        raise ValueError(f"{both} must have the same dimension, got {left.shape[1]} and {right.shape[1]}")


def _check_sides(left: Tensor, right: Tensor | None, names: tuple[str, str]) -> None:
    for value, name in zip((left, right), names, strict=True):
        if value is not None:
            check_dense(value, name)
    if right is not None and left.device != right.device:
        raise ValueError(f"{names[0]} and {names[1]} must be on one device, got {left.device} and {right.device}")
