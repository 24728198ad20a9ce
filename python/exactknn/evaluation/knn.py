"""Exact nearest-neighbour backends for torch embeddings.

    CustomKNN / RustKNN (query, k, reference, ref_includes_query)
        -> _checked:        types, shapes, k
        -> native_metric:   is this distance one that the Rust core computes, exactly as shipped?
             yes, CPU       -> _native_search: exactknn._core, without a copy where the layout allows
             otherwise      -> _torch_search:  distance(block, reference), topk, on the tensors' device
        -> (distances, indices), both (n, k), nearest first, on the query's device

Nothing of a call is kept in the object, so one object serves many threads and can be pickled at any time.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exactknn import _arrays, _core
from exactknn._retrieval import Groups, Ints, ranks_of
from exactknn.distances import (
    BatchedDistance,
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
    SNRDistance,
)
from exactknn.distances.base import autocast_off, check_floating, result_dtype

_LOGGER = logging.getLogger(__name__)

BACKENDS = ("auto", "rust", "torch")

_HALF_DTYPES = (torch.float16, torch.bfloat16)

# Elements looked at together in the search for NaN and infinity (16 MiB in float32).
_CHECK_ELEMENTS = 1 << 22

_OURS = "exactknn.distances"
_PML = "pytorch_metric_learning.distances"

# The methods that decide what a distance computes.
_METHODS = ("forward", "check_shapes", "normalize", "maybe_normalize", "compute_mat", "pairwise_distance")

_SHIPPED = (LpDistance, CosineSimilarity, DotProductSimilarity, SNRDistance)

Neighbours = tuple[Tensor, Tensor]


class CustomKNN:
    """Exact search with any distance object, on the device of the tensors.

    On the CPU, a distance that the Rust core knows is searched there: ``LpDistance`` (``p=2`` with power 1 or 2; any
    other ``p`` with power 1 and ``normalize_embeddings=False``), ``CosineSimilarity`` and ``DotProductSimilarity``, of
    this package or of pytorch-metric-learning, exactly as shipped. There values are float64 results rounded once, equal
    values go to the lowest row, and ``batch_size`` changes nothing. Any other distance is called on blocks of queries,
    and the order of equal values is open.

    Args:
        distance: called as ``distance(query_block, reference)`` for a matrix; its ``is_inverted`` says whether
            larger is nearer.
        batch_size: query rows of a block; ``None``: all at once.
        backend: ``"auto"``, ``"rust"`` (never torch) or ``"torch"`` (never the core).

    Raises:
        TypeError: ``distance`` is not callable or has no ``is_inverted``, or ``batch_size`` is not an integer.
        ValueError: ``batch_size`` below 1, unknown ``backend``, or ``"rust"`` for a distance that it does not know.
    """

    def __init__(self, distance: Any, batch_size: int | None = None, *, backend: str = "auto") -> None:
        _check_distance(distance)
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if backend == "rust":
            support = native_metric(distance)
            if support.metric is None:
                raise ValueError(f"backend='rust' cannot search with this distance: {support.reason}")
        self.distance = distance
        self.batch_size = _checked_batch_size(batch_size)
        self.backend = backend

    def __call__(self, query: Tensor, k: int, reference: Tensor, ref_includes_query: bool = False) -> Neighbours:
        """Find the ``k`` nearest reference rows of each query row.

        Args:
            query: ``(n, d)``, finite.
            k: number of neighbours, from 0 to ``m`` (``m - 1`` with ``ref_includes_query``).
            reference: ``(m, d)``, finite, on the same device.
            ref_includes_query: the first ``n`` reference rows are the queries; query ``i`` never gets row ``i``.

        Returns:
            ``(distances, indices)``, both ``(n, k)``, nearest first, on the query's device, without a graph.
            Distances have the dtype of the distance's own results, indices are int64.

        Raises:
            TypeError: not tensors, or ``k`` not an integer.
            ValueError: wrong shape, dimension, device or ``k``, or a NaN or infinity, by argument and row.
        """
        k = _checked(self.distance, query, k, reference, ref_includes_query)
        _log_search(query, k, reference)
        support = self.native_support(query, reference)
        if support.metric is None:
            return _torch_search(self.distance, query, k, reference, ref_includes_query, self.batch_size)
        distances, indices = _native_search(support, query, k, reference, ref_includes_query, None)
        dtype = torch.promote_types(query.dtype, reference.dtype)
        return distances.to(result_dtype(dtype, support.normalized)), indices

    def native_support(self, query: Tensor, reference: Tensor) -> NativeSupport:
        """Whether the core searches these embeddings, or why not."""
        if self.backend == "torch":
            return _unsupported("backend is 'torch'")
        support = _native_support(self.distance, query, reference)
        if support.metric is None and self.backend == "rust":
            raise ValueError(f"backend='rust' cannot search here: {support.reason}")
        return support

    def __repr__(self) -> str:
        return f"CustomKNN({self.distance!r}, batch_size={self.batch_size}, backend={self.backend!r})"


class RustKNN:
    """Exact search in the Rust core, made to be given as ``knn_func``.

    A distance or device that the core does not know is searched with torch, as ``CustomKNN`` would; that is logged
    once at INFO.

    Args:
        distance: as for ``CustomKNN``. ``None``: squared Euclidean, unnormalised.
        batch_size: query rows of a block on the torch path; it changes no native answer.
        num_threads: threads for each search, at least 1. ``None``: see ``exactknn.set_num_threads``.

    Raises:
        TypeError: as ``CustomKNN``, or ``num_threads`` is not an integer.
        ValueError: ``batch_size`` or ``num_threads`` below 1.
    """

    def __init__(self, distance: Any = None, batch_size: int | None = None, *, num_threads: int | None = None) -> None:
        if distance is None:
            distance = LpDistance(normalize_embeddings=False, p=2, power=2)
        _check_distance(distance)
        if num_threads is not None:
            num_threads = _arrays.as_count(num_threads, "num_threads", minimum=1)
        self.distance = distance
        self.batch_size = _checked_batch_size(batch_size)
        self.num_threads = num_threads
        self._fallback_logged = False

    def __call__(self, query: Tensor, k: int, reference: Tensor, ref_includes_query: bool = False) -> Neighbours:
        """Find the ``k`` nearest reference rows of each query row.

        Arguments and errors are those of ``CustomKNN.__call__``.

        Returns:
            ``(distances, indices)``, both ``(n, k)``, nearest first, on the query's device, without a graph.
            Distances are float32 for float16 and bfloat16 embeddings, indices are int64.
        """
        k = _checked(self.distance, query, k, reference, ref_includes_query)
        _log_search(query, k, reference)
        support = self.native_support(query, reference)
        if support.metric is not None:
            return _native_search(support, query, k, reference, ref_includes_query, self.num_threads)
        distances, indices = _torch_search(self.distance, query, k, reference, ref_includes_query, self.batch_size)
        return distances.float() if distances.dtype in _HALF_DTYPES else distances, indices

    def native_support(self, query: Tensor, reference: Tensor) -> NativeSupport:
        """Whether the core searches these embeddings, or why not; that is logged once."""
        support = _native_support(self.distance, query, reference)
        if support.metric is None and not self._fallback_logged:
            self._fallback_logged = True
            _LOGGER.info("searching with torch instead of the Rust core: %s", support.reason)
        return support

    def __repr__(self) -> str:
        return f"RustKNN({self.distance!r}, batch_size={self.batch_size}, num_threads={self.num_threads})"


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
        package, name = _OURS, kind.__name__
    elif kind.__module__.partition(".")[0] == "pytorch_metric_learning" and kind.__module__.startswith(_PML):
        package, name = _PML, kind.__qualname__
    else:
        return _unsupported(f"{kind.__module__}.{kind.__qualname__} is not a distance that the core computes")
    changed = _overridden(distance, _METHODS, package)
    if changed:
        return _unsupported(f"{changed} of this {name} is not the one shipped")
    if getattr(distance, "collect_stats", False):
        return _unsupported(f"this {name} records statistics at each call")
    normalized = bool(distance.normalize_embeddings)
    if normalized and distance.p != 2:
        return _unsupported(f"{name} normalises by p={distance.p}, the core only by p=2")
    if name == "LpDistance" and not distance.is_inverted:
        if distance.p != 2:
            return _native_lp(name, distance.p, distance.power)
        if distance.power not in (1, 2):
            return _unsupported(f"{name} has power={distance.power}, the core only 1 and 2")
        metric = "sqeuclidean" if distance.power == 2 else "euclidean"
        return NativeSupport(f"normalized_{metric}" if normalized else metric, normalized, "")
    if name in ("CosineSimilarity", "DotProductSimilarity") and distance.is_inverted:
        if distance.power != 1:
            return _unsupported(f"{name} has power={distance.power}, the core only 1")
        return NativeSupport("cosine_similarity" if normalized else "inner_product", normalized, "")
    return _unsupported(f"{name} is not a distance that the core computes")


def _native_lp(name: str, p: Any, power: Any) -> NativeSupport:
    """The core's metric for unnormalised rows and an exponent other than 2."""
    if power != 1:
        return _unsupported(f"{name} has p={p} and power={power}, the core only power=1 with that p")
    try:
        exponent = _arrays.as_exponent(p, "p")
    except (TypeError, ValueError) as error:  # torch gives p=0 a meaning of its own
        return _unsupported(f"{name} has p={p}: {error}")
    return NativeSupport("minkowski", False, "", exponent)


def _unsupported(reason: str) -> NativeSupport:
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


def _native_support(distance: Any, query: Tensor, reference: Tensor) -> NativeSupport:
    support = native_metric(distance)
    if support.metric is None:
        return support
    for tensor, name in ((query, "query"), (reference, "reference")):
        if tensor.device.type != "cpu":
            return _unsupported(f"{name} is on {tensor.device}, the core searches CPU memory")
        if tensor.layout != torch.strided:
            return _unsupported(f"{name} has layout {tensor.layout}, the core searches dense rows")
    # The core has no integer rows, and no distance here takes them: say so before the conversion does.
    check_floating(query, "query")
    check_floating(reference, "reference")
    return support


def _native_search(
    support: NativeSupport, query: Tensor, k: int, reference: Tensor, exclude_self: bool, num_threads: int | None
) -> Neighbours:
    pair = _arrays.as_pair(query, None if _same_memory(query, reference) else reference)
    assert support.metric is not None, "the callers search with torch otherwise"
    distances, indices = _core.knn(
        pair.query,
        pair.reference,
        k,
        support.metric,
        exclude_self=bool(exclude_self),
        bfloat16=pair.bfloat16,
        num_threads=num_threads,
        p=support.p,
    )
    return torch.from_numpy(distances), torch.from_numpy(indices)


def native_ranks(
    knn_func: CustomKNN | RustKNN,
    query: Tensor,
    reference: Tensor,
    exclude_self: bool,
    blocks: Iterable[tuple[int, int, Groups]],
) -> Iterator[tuple[int, int, Ints, Ints]] | None:
    """Ranks of each query's relevant references, as the search of ``knn_func`` orders all references.

    Args:
        knn_func: whose distance to use.
        query: ``(n, d)``.
        reference: ``(m, d)``.
        exclude_self: query ``i`` is reference row ``i``, and left out.
        blocks: of queries, from the first to the last: start, stop, and the relevant references.

    Returns:
        ``(start, stop, offsets, ranks)`` of each block, the last two as in `Hits`; ``None`` where the core does not
        search with this distance or here.
    """
    support = knn_func.native_support(query, reference)
    return None if support.metric is None else _ranks(support, knn_func, query, reference, exclude_self, blocks)


def _ranks(
    support: NativeSupport,
    knn_func: CustomKNN | RustKNN,
    query: Tensor,
    reference: Tensor,
    exclude_self: bool,
    blocks: Iterable[tuple[int, int, Groups]],
) -> Iterator[tuple[int, int, Ints, Ints]]:
    assert support.metric is not None, "the caller asked"
    pair = _arrays.as_pair(query, None if _same_memory(query, reference) else reference)
    among = pair.query if pair.reference is None else pair.reference
    for start, stop, groups in blocks:
        offsets, ranks = ranks_of(
            pair.query[start:stop],
            among,
            support.metric,
            groups,
            exclude_self=exclude_self,
            first_row=start,
            bfloat16=pair.bfloat16,
            num_threads=knn_func.num_threads if isinstance(knn_func, RustKNN) else None,
            p=support.p,
        )
        yield start, stop, offsets, ranks


def torch_blocks(
    knn_func: CustomKNN | RustKNN, query: Tensor, k: int, reference: Tensor, exclude_self: bool
) -> Iterator[tuple[int, int, Tensor]]:
    """``(start, stop, indices)`` of consecutive queries, as a call of ``knn_func`` would return them all."""
    k = _checked(knn_func.distance, query, k, reference, exclude_self)
    step = knn_func.batch_size or max(1, _CHECK_ELEMENTS // max(len(reference), 1))
    for start in range(0, len(query), step):
        block = query[start : start + step]
        _, indices = _torch_search(knn_func.distance, block, k, reference, exclude_self, None, first_row=start)
        yield start, start + len(block), indices


def _same_memory(left: Tensor, right: Tensor) -> bool:
    return left is right or (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.is_neg() == right.is_neg()
    )


def _torch_search(
    distance: Any,
    query: Tensor,
    k: int,
    reference: Tensor,
    exclude_self: bool,
    batch_size: int | None,
    first_row: int = 0,
) -> Neighbours:
    """Blocks of the distance matrix, the nearest of each row kept; never more than one block at a time.

    With ``exclude_self`` query ``i`` is reference row ``first_row + i``.
    """
    _check_finite(query, "query")
    _check_finite(reference, "reference")
    query, reference = query.detach(), reference.detach()
    n, largest, dtype = len(query), bool(distance.is_inverted), None
    if type(distance) in _SHIPPED and _overridden(distance, _METHODS, _OURS) is None:
        check_floating(query, "query")
        check_floating(reference, "reference")
        dtype = torch.promote_types(query.dtype, reference.dtype)
        dtype = result_dtype(dtype, distance.normalize_embeddings)
        if query.dtype in _HALF_DTYPES and reference.dtype in _HALF_DTYPES:
            # Widened once for all blocks; only the values handed back are rounded again, not the ranking.
            query, reference = query.float(), reference.float()
    if n == 0 or k == 0:
        dtype = dtype or torch.promote_types(query.dtype, reference.dtype)
        return query.new_empty((n, k), dtype=dtype), query.new_empty((n, k), dtype=torch.long)

    blocks = _Blocks(n, k, len(reference), largest, bool(exclude_self), first_row)
    with torch.no_grad(), autocast_off(query.device.type):
        if _is_batched(distance):
            # A copy, because its function for the blocks belongs to this call and not to the object.
            batched = copy.copy(distance)
            batched.iter_fn = blocks.take
            batched(query, reference)
        else:
            step = n if batch_size is None else batch_size
            for start in range(0, n, step):
                blocks.take(distance(query[start : start + step], reference), start, start + step)
    distances, indices = blocks.result()
    return distances if dtype is None else distances.to(dtype), indices


class _Blocks:
    """Collects the nearest of each row, block by block."""

    def __init__(self, n: int, k: int, m: int, largest: bool, exclude_self: bool, first_row: int) -> None:
        self.n, self.k, self.m = n, k, m
        self.largest = largest
        self.exclude_self = exclude_self
        self.first_row = first_row
        self.distances: Tensor | None = None
        self.indices: Tensor | None = None

    def take(self, mat: Any, start: int, end: int) -> None:
        rows = min(end, self.n) - start
        if not isinstance(mat, Tensor) or mat.shape != (rows, self.m):
            given = tuple(mat.shape) if isinstance(mat, Tensor) else type(mat).__name__
            raise ValueError(f"distance must return a tensor of shape {(rows, self.m)}, got {given}")
        values, columns = _nearest(mat.detach(), self.k + self.exclude_self, self.largest)
        if self.exclude_self:
            values, columns = _without_self(values, columns, self.first_row + start)
        if self.distances is None or self.indices is None:
            self.distances = values.new_empty((self.n, self.k))
            self.indices = columns.new_empty((self.n, self.k))
        self.distances[start : start + rows] = values
        self.indices[start : start + rows] = columns

    def result(self) -> Neighbours:
        if self.distances is None or self.indices is None:
            raise ValueError("distance must hand each block of its matrix to iter_fn, got none")
        return self.distances, self.indices


def _nearest(mat: Tensor, k: int, largest: bool) -> Neighbours:
    values, columns = torch.topk(mat, k, dim=1, largest=largest)
    # torch takes NaN for the largest value. Where one leads, rank the negated values instead, NaN then comes last.
    if largest and bool(values[:, 0].isnan().any()):
        columns = torch.topk(-mat, k, dim=1, largest=False).indices
        values = mat.gather(1, columns)
    return values, columns


def _without_self(values: Tensor, columns: Tensor, start: int) -> Neighbours:
    """Drop the entry of each row whose index is the row's own, or the last where there is none."""
    own = torch.arange(start, start + len(columns), device=columns.device).unsqueeze(1)
    drop = columns == own
    drop[~drop.any(dim=1), -1] = True
    shape = (len(columns), columns.shape[1] - 1)
    return values[~drop].view(shape), columns[~drop].view(shape)


def _is_batched(distance: Any) -> bool:
    if isinstance(distance, BatchedDistance):
        return True
    return any(
        kind.__qualname__ == "BatchedDistance" and kind.__module__.startswith(_PML) for kind in type(distance).__mro__
    )


def _check_finite(embeddings: Tensor, name: str) -> None:
    if not embeddings.is_floating_point() or embeddings.ndim == 0 or embeddings.numel() == 0:
        return
    rows = embeddings.detach().reshape(len(embeddings), -1)
    step = max(1, _CHECK_ELEMENTS // rows.shape[1])
    finite = torch.cat([torch.isfinite(block).all(dim=1) for block in torch.split(rows, step)])
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ValueError(f"{name} must be finite, got NaN or infinity in row {row}")


def _check_distance(distance: Any) -> None:
    if not callable(distance):
        raise TypeError(f"distance must be callable, got {type(distance).__name__}")
    if not hasattr(distance, "is_inverted"):
        raise TypeError(f"distance must have an attribute is_inverted, {type(distance).__name__} has none")


def _checked_batch_size(batch_size: int | None) -> int | None:
    return None if batch_size is None else _arrays.as_count(batch_size, "batch_size", minimum=1)


def _checked(distance: Any, query: Any, k: Any, reference: Any, ref_includes_query: bool) -> int:
    """Check all that does not depend on the backend; return ``k`` as an ``int``."""
    for value, name in ((query, "query"), (reference, "reference")):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(value).__name__}; arrays go to exactknn.knn")
    count = _arrays.as_count(k, "k", minimum=0)
    if query.device != reference.device:
        raise ValueError(f"query and reference must be on one device, got {query.device} and {reference.device}")
    _check_shapes(distance, query, reference)
    n, m = len(query), len(reference)
    if ref_includes_query and m < n:
        raise ValueError(f"reference must begin with the {n} query rows when ref_includes_query is set, got {m} rows")
    available = m - 1 if ref_includes_query and m else m
    if count > available:
        own = " besides the query itself" if ref_includes_query else ""
        raise ValueError(f"k must be at most the number of reference rows{own}, {available} of {m}, got {count}")
    return count


def _check_shapes(distance: Any, query: Tensor, reference: Tensor) -> None:
    own_check = getattr(distance, "check_shapes", None)
    if own_check is not None:
        own_check(query, reference)
        if getattr(own_check, "__qualname__", "") != "BaseDistance.check_shapes":
            return  # it decides, and may take what no other distance does
    for embeddings, name in ((query, "query"), (reference, "reference")):
        if embeddings.ndim != 2:
            raise ValueError(f"{name} must be 2-D (rows, dimensions), got shape {tuple(embeddings.shape)}")
    if query.shape[1] != reference.shape[1]:
        raise ValueError(
            "query and reference must have the same dimension, "
            f"got {query.shape[1]} and {reference.shape[1]} dimensions"
        )


def _log_search(query: Tensor, k: int, reference: Tensor) -> None:
    _LOGGER.info("k-nn search with k=%d: %d queries among %d references", k, len(query), len(reference))
    _LOGGER.info("embedding dimension is %d", query.shape[-1])
