"""What every search with a distance object shares: who computes it, and what embeddings have to be.

    distance, query, reference
        -> check_distance, check_embeddings: kinds, device, shapes
        -> native_support: the metric of the Rust core, where it computes this distance exactly as shipped
             -> native_pair: both sides as the core reads them
        -> otherwise prepare_for_torch, then each_block: the distance called on blocks of queries

``Names`` are the names of the two arguments, for the messages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from exactknn._arrays.matrix import Pair, as_pair
from exactknn._arrays.scalars import as_exponent
from exactknn.distances import (
    BatchedDistance,
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
    SNRDistance,
)
from exactknn.distances.base import autocast_off, check_floating, result_dtype

HALF_DTYPES = (torch.float16, torch.bfloat16)

Names = tuple[str, str]

# Elements looked at together in the search for NaN and infinity (16 MiB in float32).
_CHECK_ELEMENTS = 1 << 22

_OURS = "exactknn.distances"
_PML = "pytorch_metric_learning.distances"

# The methods that decide what a distance computes; those of this package have ``pairwise`` too.
_METHODS: tuple[str, ...] = (
    "forward",
    "check_shapes",
    "normalize",
    "maybe_normalize",
    "compute_mat",
    "pairwise_distance",
)

_SHIPPED = (LpDistance, CosineSimilarity, DotProductSimilarity, SNRDistance)


# --- the core's metrics ---------------------------------------------------------------------------------------------


class NativeSupport(NamedTuple):
    """How the core computes a distance, or why it does not."""

    metric: str | None
    normalized: bool
    reason: str
    p: float | None = None
    """The exponent, for the metric that takes one."""


def native_metric(distance: Any) -> NativeSupport:
    """Name the core's metric for a distance object, or say why there is none.

    Only the classes themselves count, and only while nothing about them is overridden: a subclass, a method
    replaced on the object or the class, or a hook may change what is computed.
    """
    if type(distance) is BatchedDistance and not _overridden(distance, ("forward",), _OURS):
        # Blocks change no native answer.
        return native_metric(distance.distance)
    kind = type(distance)
    if kind in _SHIPPED:
        package, name, methods = _OURS, kind.__name__, (*_METHODS, "pairwise")
    elif kind.__module__.partition(".")[0] == "pytorch_metric_learning" and kind.__module__.startswith(_PML):
        package, name, methods = _PML, kind.__qualname__, _METHODS
    else:
        return unsupported(f"{kind.__module__}.{kind.__qualname__} is not a distance that the core computes")
    changed = _overridden(distance, methods, package)
    if changed:
        return unsupported(f"{changed} of this {name} is not the one shipped")
    if getattr(distance, "collect_stats", False):
        return unsupported(f"this {name} records statistics at each call")
    normalized = bool(distance.normalize_embeddings)
    if normalized and distance.p != 2:
        return unsupported(f"{name} normalises by p={distance.p}, the core only by p=2")
    if name == "LpDistance" and not distance.is_inverted:
        if distance.p != 2:
            return _native_lp(name, distance.p, distance.power)
        if distance.power not in (1, 2):
            return unsupported(f"{name} has power={distance.power}, the core only 1 and 2")
        metric = "sqeuclidean" if distance.power == 2 else "euclidean"
        return NativeSupport(f"normalized_{metric}" if normalized else metric, normalized, "")
    if name in ("CosineSimilarity", "DotProductSimilarity") and distance.is_inverted:
        if distance.power != 1:
            return unsupported(f"{name} has power={distance.power}, the core only 1")
        return NativeSupport("cosine_similarity" if normalized else "inner_product", normalized, "")
    return unsupported(f"{name} is not a distance that the core computes")


def _native_lp(name: str, p: Any, power: Any) -> NativeSupport:
    """The core's metric for unnormalised rows and an exponent other than 2."""
    if power != 1:
        return unsupported(f"{name} has p={p} and power={power}, the core only power=1 with that p")
    try:
        exponent = as_exponent(p, "p")
    except (TypeError, ValueError) as error:  # torch gives p=0 a meaning of its own
        return unsupported(f"{name} has p={p}: {error}")
    return NativeSupport("minkowski", False, "", exponent)


def unsupported(reason: str) -> NativeSupport:
    return NativeSupport(None, False, reason)


def _overridden(distance: Any, methods: tuple[str, ...], package: str) -> str | None:
    """Name of the first thing on the object or its class that is not as ``package`` ships it."""
    kind = type(distance)
    name: str
    for name in vars(distance):
        if callable(getattr(kind, name, None)):
            return name
    if kind.__call__ is not torch.nn.Module.__call__:
        return "__call__"
    for name in methods:
        module = getattr(getattr(kind, name, None), "__module__", None) or ""
        if module != package and not module.startswith(f"{package}."):
            return name
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        if getattr(distance, name, None):
            return name.strip("_").replace("_", " ")
    return None


def native_support(distance: Any, query: Tensor, reference: Tensor, names: Names) -> NativeSupport:
    """How the core computes a distance of these tensors, or why it does not.

    Raises:
        ValueError: the core would, but the tensors are of no floating type that distances take, or have no columns.
    """
    support = native_metric(distance)
    if support.metric is None:
        return support
    for tensor, name in zip((query, reference), names, strict=True):
        if tensor.device.type != "cpu":
            return unsupported(f"{name} is on {tensor.device}, the core searches CPU memory")
    check_core_rows(query, reference, names)
    return support


def check_core_rows(query: Tensor, reference: Tensor, names: Names) -> None:
    """Raise ``ValueError`` for a type that distances do not take, or rows without columns."""
    # The core has no integer rows, and no distance here takes them: say so before the conversion does.
    check_floating(query, names[0])
    check_floating(reference, names[1])
    if query.shape[1] == 0:
        raise ValueError(f"{names[0]} must have at least one column, got 0")


def native_pair(query: Tensor, reference: Tensor) -> Pair:
    """Both sides as the core reads them; one array where they are one tensor."""
    return as_pair(query, None if same_memory(query, reference) else reference)


def same_memory(left: Tensor, right: Tensor) -> bool:
    return left is right or (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.is_neg() == right.is_neg()
    )


# --- blocks with torch ----------------------------------------------------------------------------------------------


class ForTorch(NamedTuple):
    """Embeddings to call a distance on, without a graph."""

    query: Tensor
    reference: Tensor
    dtype: torch.dtype | None
    """The type of the values to hand back; ``None``: the one that the distance returns."""


def prepare_for_torch(distance: Any, query: Tensor, reference: Tensor, names: Names) -> ForTorch:
    """Embeddings as a distance is to be called on them.

    Raises:
        ValueError: a NaN or infinity, or a type that this package's distances do not take.
    """
    check_finite(query, names[0])
    check_finite(reference, names[1])
    query, reference, dtype = query.detach(), reference.detach(), None
    if type(distance) in _SHIPPED and _overridden(distance, _METHODS, _OURS) is None:
        check_floating(query, names[0])
        check_floating(reference, names[1])
        dtype = result_dtype(torch.promote_types(query.dtype, reference.dtype), distance.normalize_embeddings)
        if query.dtype in HALF_DTYPES and reference.dtype in HALF_DTYPES:
            # Widened once for all blocks; only the values handed back are rounded again.
            query, reference = query.float(), reference.float()
    return ForTorch(query, reference, dtype)


def each_block(
    distance: Any, query: Tensor, reference: Tensor, rows: int, take: Callable[[Tensor, int], object]
) -> None:
    """Call ``take(mat, start)`` with each block of rows of the distance matrix; ``start`` is the first of them.

    Args:
        distance: any distance; a ``BatchedDistance`` chooses its own blocks.
        query: ``(n, d)``, at least one row.
        reference: ``(m, d)``.
        rows: query rows of a block.
        take: gets a ``(rows, m)`` matrix without a graph, and a row number.

    Raises:
        ValueError: the distance returned no matrix of that shape.
    """

    def checked(mat: Any, start: int, end: int) -> None:
        shape = (min(end, len(query)) - start, len(reference))
        if not isinstance(mat, Tensor) or mat.shape != shape:
            given = tuple(mat.shape) if isinstance(mat, Tensor) else type(mat).__name__
            raise ValueError(f"distance must return a tensor of shape {shape}, got {given}")
        take(mat.detach(), start)

    with torch.no_grad(), autocast_off(query.device.type):
        if is_batched(distance):
            # A copy, because its function for the blocks belongs to this call and not to the object.
            batched = copy.copy(distance)
            batched.iter_fn = checked
            batched(query, reference)
        else:
            for start in range(0, len(query), rows):
                checked(distance(query[start : start + rows], reference), start, start + rows)


def is_batched(distance: Any) -> bool:
    """Whether this is a ``BatchedDistance``, of this package or of pytorch-metric-learning."""
    if isinstance(distance, BatchedDistance):
        return True
    return any(
        kind.__qualname__ == "BatchedDistance" and kind.__module__.startswith(_PML) for kind in type(distance).__mro__
    )


def without_self(values: Tensor, columns: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the entry of each row whose index is the row's own, or the last where there is none.

    Args:
        values: ``(n, k)``.
        columns: ``(n, k)``, the indices.
        own: ``(n,)``, the index of each row itself.
    """
    # By arithmetic, as a mask would make the host wait for the device.
    last = columns.shape[1] - 1
    passed = (columns == own.unsqueeze(1))[:, :last].cumsum(dim=1)
    places = torch.arange(last, device=columns.device) + passed
    return values.gather(1, places), columns.gather(1, places)


# --- checks ---------------------------------------------------------------------------------------------------------


def check_finite(embeddings: Tensor, name: str) -> None:
    """Raise ``ValueError`` for a NaN or infinity, by the first row that holds one."""
    if not embeddings.is_floating_point() or embeddings.ndim == 0 or embeddings.numel() == 0:
        return
    rows = embeddings.detach().reshape(len(embeddings), -1)
    step = max(1, _CHECK_ELEMENTS // rows.shape[1])
    blocks = torch.split(rows, step)
    if rows.device.type == "cpu":
        finite = np.concatenate([_finite_rows(block) for block in blocks])
    else:  # one transfer, after the last block
        finite = torch.cat([torch.isfinite(block).all(dim=1) for block in blocks]).cpu().numpy()
    if not finite.all():
        raise ValueError(f"{name} must be finite, got NaN or infinity in row {int(finite.argmin())}")


def _finite_rows(rows: Tensor) -> npt.NDArray[np.bool_]:
    finite: npt.NDArray[np.bool_]
    if rows.layout == torch.strided and rows.dtype in (torch.float32, torch.float64):
        # Torch's own threads do not survive a fork, and would hang a child here.
        finite = np.isfinite(rows.resolve_neg().numpy()).all(axis=1)
    else:
        finite = torch.isfinite(rows).all(dim=1).numpy()
    return finite


def check_distance(distance: Any) -> None:
    """Raise ``TypeError`` unless the object can be used as a distance."""
    if not callable(distance):
        raise TypeError(f"distance must be callable, got {type(distance).__name__}")
    if not hasattr(distance, "is_inverted"):
        raise TypeError(f"distance must have an attribute is_inverted, {type(distance).__name__} has none")


def check_embeddings(distance: Any, query: Any, reference: Any, names: Names, *, arrays_go_to: str) -> None:
    """Raise unless both are dense tensors on one device, of shapes that the distance takes.

    Raises:
        TypeError: not tensors.
        ValueError: not dense, two devices, wrong shape, or two dimensions.
    """
    for value, name in zip((query, reference), names, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(value).__name__}; arrays go to {arrays_go_to}")
        if value.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got layout {value.layout}")
    both = " and ".join(names)
    if query.device != reference.device:
        raise ValueError(f"{both} must be on one device, got {query.device} and {reference.device}")
    own_check = getattr(distance, "check_shapes", None)
    if own_check is not None:
        own_check(query, reference)
        if getattr(own_check, "__qualname__", "") != "BaseDistance.check_shapes":
            return  # it decides, and may take what no other distance does
    for embeddings, name in zip((query, reference), names, strict=True):
        if embeddings.ndim != 2:
            raise ValueError(f"{name} must be 2-D (rows, dimensions), got shape {tuple(embeddings.shape)}")
    if query.shape[1] != reference.shape[1]:
        raise ValueError(
            f"{both} must have the same dimension, got {query.shape[1]} and {reference.shape[1]} dimensions"
        )
