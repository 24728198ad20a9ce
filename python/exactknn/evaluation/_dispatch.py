"""Distances that the Rust core computes, exactly as shipped, and conversion of rows for the core."""

from __future__ import annotations

from typing import Any, NamedTuple

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
from exactknn.distances.base import check_floating

Names = tuple[str, str]
OURS = "exactknn.distances"
PML = "pytorch_metric_learning.distances"

# The methods that determine what a distance computes; this package's distances also have ``pairwise``.
METHODS: tuple[str, ...] = (
    "forward",
    "check_shapes",
    "normalize",
    "maybe_normalize",
    "compute_mat",
    "pairwise_distance",
)
SHIPPED = (LpDistance, CosineSimilarity, DotProductSimilarity, SNRDistance)


class NativeSupport(NamedTuple):
    """How the core computes a distance, or why it cannot."""

    metric: str | None
    normalized: bool
    reason: str
    p: float | None = None
    """The exponent, for ``"minkowski"``."""


def native_metric(distance: Any) -> NativeSupport:
    """Return the core's metric for a distance object, or why there is none.

    Only the shipped classes qualify, without overrides: a subclass, a method replaced on the object or the class, or a
    hook may change what is computed.
    """
    if type(distance) is BatchedDistance and not overridden(distance, ("forward",), OURS):
        # Blocks do not change native results.
        return native_metric(distance.distance)
    kind = type(distance)
    if kind in SHIPPED:
        package, name, methods = OURS, kind.__name__, (*METHODS, "pairwise")
    elif kind.__module__.partition(".")[0] == "pytorch_metric_learning" and kind.__module__.startswith(PML):
        package, name, methods = PML, kind.__qualname__, METHODS
    else:
        return unsupported(f"{kind.__module__}.{kind.__qualname__} is not a distance that the core computes")
    changed = overridden(distance, methods, package)
    if changed:
        return unsupported(f"{changed} of this {name} is not the one shipped")
    if getattr(distance, "collect_stats", False):
        return unsupported(f"this {name} records statistics on each call")
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
    """Return the core's metric for unnormalised rows and an exponent other than 2."""
    if power != 1:
        return unsupported(f"{name} has p={p} and power={power}, the core only power=1 with that p")
    try:
        exponent = as_exponent(p, "p")
    except (TypeError, ValueError) as error:  # such as p=0, which torch supports
        return unsupported(f"{name} has p={p}: {error}")
    return NativeSupport("minkowski", False, "", exponent)


def unsupported(reason: str) -> NativeSupport:
    return NativeSupport(None, False, reason)


def overridden(distance: Any, methods: tuple[str, ...], package: str) -> str | None:
    """Return the name of the first attribute of the object or its class that differs from ``package``'s, or None."""
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
    """Return how the core computes a distance of these tensors, or why it cannot.

    Raises:
        ValueError: the core computes it, but the tensors are not of a floating type or have no columns.
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
    """Raise ``ValueError`` for a type that distances do not accept, or rows without columns."""
    # Neither the core nor a distance accepts integer rows: raise before the conversion to the core's arrays does.
    check_floating(query, names[0])
    check_floating(reference, names[1])
    if query.shape[1] == 0:
        raise ValueError(f"{names[0]} must have at least one column, got 0")


def native_pair(query: Tensor, reference: Tensor) -> Pair:
    """Return both sides as the core takes them; a single array if both are the same tensor."""
    return as_pair(query, None if same_memory(query, reference) else reference)


def same_memory(left: Tensor, right: Tensor) -> bool:
    return left is right or (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.is_neg() == right.is_neg()
    )
