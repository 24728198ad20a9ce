"""Exact nearest-neighbour backends for torch embeddings.

    CustomKNN / RustKNN (query, k, reference, ref_includes_query)
        -> _checked:        types, shapes, k
        -> native_metric:   does the Rust core compute this distance, exactly as shipped?
             yes, CPU       -> _native_search: exactknn._core, zero-copy if the layout allows
             yes, elsewhere -> device_search:  the same results, computed with torch on the tensors' device
             otherwise      -> torch_search:   distance(block, reference), topk, on the tensors' device
        -> (distances, indices), both (n, k), nearest first, on the query's device
    RustKNN with an index
        -> exactknn.Index:  for the distance's metric; checked, the reference appended, then searched

Without an index a call stores nothing in the object, so threads can share it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from exactknn import Index
from exactknn._arrays.blocks import BLOCK_ELEMENTS, blocks, rows_in
from exactknn._arrays.matrix import as_matrix
from exactknn._arrays.scalars import as_choice, as_count, as_flag, as_optional_count
from exactknn._arrays.sizes import check_sizes
from exactknn._environment import undisturbed
from exactknn._references import References
from exactknn.distances import LpDistance
from exactknn.distances.base import result_dtype
from exactknn.evaluation._checks import OWN_INCLUDED, check_distance, check_embeddings, check_finite
from exactknn.evaluation._device.filter import search as device_search
from exactknn.evaluation._device.values import METRICS as DEVICE_METRICS
from exactknn.evaluation._dispatch import (
    NativeSupport,
    check_core_rows,
    native_metric,
    native_pair,
    native_support,
    same_memory,
    unsupported,
)
from exactknn.evaluation._torch_blocks import HALF_DTYPES, Neighbours, torch_search

_LOGGER = logging.getLogger(__name__)

BACKENDS = ("auto", "rust", "torch")

_NAMES = ("query", "reference")


class CustomKNN:
    """Exact search with any distance object, on the device of the tensors.

    On the CPU, distances that the Rust core supports are searched there: ``LpDistance`` (``p=2`` with power 1 or 2; any
    other ``p`` with power 1 and ``normalize_embeddings=False``), ``CosineSimilarity`` and ``DotProductSimilarity``, of
    this package or of pytorch-metric-learning, exactly as shipped. Values are then float64 results rounded once, ties
    go to the lowest row, and ``batch_size`` has no effect. On other devices torch finds the same results, except for
    ``LpDistance`` with another ``p``. Any other distance is called on blocks of queries, and the order of ties is
    unspecified.

    Args:
        distance: called as ``distance(query_block, reference)`` for a matrix; ``is_inverted`` says whether larger is
            nearer.
        batch_size: query rows per block; ``None``: all at once on the CPU, as many as fit in free memory elsewhere.
        backend: ``"auto"``, ``"rust"`` (never torch) or ``"torch"`` (always calls the distance).

    Raises:
        TypeError: ``distance`` is not callable or has no ``is_inverted``, or ``batch_size`` is not an integer.
        ValueError: ``batch_size`` is below 1, ``backend`` is unknown, or it is ``"rust"`` and the core does not support
            the distance.
    """

    def __init__(self, distance: Any, batch_size: int | None = None, *, backend: str = "auto") -> None:
        check_distance(distance)
        as_choice(backend, "backend", BACKENDS)
        if backend == "rust":
            support = native_metric(distance)
            if support.metric is None:
                raise ValueError(f"backend='rust' cannot search with this distance: {support.reason}")
        self.distance = distance
        self.batch_size = as_optional_count(batch_size, "batch_size")
        self.backend = backend

    @undisturbed
    def __call__(self, query: Tensor, k: int, reference: Tensor, ref_includes_query: bool = False) -> Neighbours:
        """Return the ``k`` nearest reference rows of each query row.

        Args:
            query: ``(n, d)``, finite.
            k: number of neighbours, from 0 to ``m`` (``m - 1`` with ``ref_includes_query``).
            reference: ``(m, d)``, finite, on the same device.
            ref_includes_query: the first ``n`` reference rows are the queries; query ``i`` never gets row ``i``.

        Returns:
            ``(distances, indices)``, both ``(n, k)``, nearest first, on the query's device, without a graph.
            Distances have the dtype that the distance returns, indices are int64.

        Raises:
            TypeError: an embedding is not a tensor, ``k`` is not an integer, or ``ref_includes_query`` is not a bool.
            ValueError: a shape, dimension, device or ``k`` is invalid, or a row holds a NaN or infinity (the message
                names argument and row).
        """
        k = _checked(self.distance, query, k, reference, ref_includes_query)
        _log_search(query, k, len(reference))
        support = self.native_support(query, reference)
        if support.metric is None:
            return _search_with_torch(self, query, k, reference, ref_includes_query)
        distances, indices = _native_search(support, query, k, reference, ref_includes_query, None)
        return distances.to(_values_dtype(support, query, reference)), indices

    def native_support(self, query: Tensor, reference: Tensor) -> NativeSupport:
        """Return whether the core searches these embeddings, or why not.

        Args:
            query: ``(n, d)``.
            reference: ``(m, d)``.

        Raises:
            ValueError: the core cannot, although ``backend="rust"``; or it would, but the embeddings have a type that
                distances do not accept, or no columns.
        """
        if self.backend == "torch":
            return unsupported("backend is 'torch'")
        support = native_support(self.distance, query, reference, _NAMES)
        if support.metric is None and self.backend == "rust":
            raise ValueError(f"backend='rust' cannot search here: {support.reason}")
        return support

    def __repr__(self) -> str:
        return f"CustomKNN({self.distance!r}, batch_size={self.batch_size}, backend={self.backend!r})"


class RustKNN:
    """Exact search in the Rust core, for use as ``knn_func``.

    Unsupported distances and devices are searched with torch, as in ``CustomKNN``, with the core's results for the
    distances that it supports. This is logged once at INFO.

    By default each call searches its own reference and stores nothing. With any other setting of ``reset_before`` and
    ``reset_after`` the references are stored in an `exactknn.Index`, which is prepared once and can be saved: `train`
    creates it, `add` and the reference of each call append to it, and rows are numbered in insertion order. An index is
    in CPU memory and needs a distance that the core supports. Results are the same as without an index.

    Args:
        distance: as for ``CustomKNN``. ``None``: squared Euclidean, unnormalised.
        batch_size: query rows per block on the torch path; no effect in the core.
        num_threads: threads for each search, at least 1. ``None``: see ``exactknn.set_num_threads``.
        reset_before: search only the reference of each call, instead of the stored index.
        reset_after: drop the index after each call, even a failed one.

    Attributes:
        index: the stored `exactknn.Index`, or ``None``.

    Raises:
        TypeError: as ``CustomKNN``, ``num_threads`` is not an integer, or ``reset_before`` or ``reset_after`` is not a
            bool.
        ValueError: ``batch_size`` or ``num_threads`` is below 1, or an index is needed for an unsupported distance.
    """

    def __init__(
        self,
        distance: Any = None,
        batch_size: int | None = None,
        *,
        num_threads: int | None = None,
        reset_before: bool = True,
        reset_after: bool = True,
    ) -> None:
        if distance is None:
            distance = LpDistance(normalize_embeddings=False, p=2, power=2)
        check_distance(distance)
        num_threads = as_optional_count(num_threads, "num_threads")
        self.distance = distance
        self.batch_size = as_optional_count(batch_size, "batch_size")
        self.num_threads = num_threads
        self.reset_before = as_flag(reset_before, "reset_before")
        self.reset_after = as_flag(reset_after, "reset_after")
        self.index: Index | None = None
        self._fallback_logged = False
        if self.keeps_index:
            self._new_index()  # raises for an unsupported distance

    @property
    def keeps_index(self) -> bool:
        """Whether calls use a stored index, instead of only their own reference."""
        return not (self.reset_before and self.reset_after)

    @undisturbed
    def __call__(self, query: Tensor, k: int, reference: Any = None, ref_includes_query: bool = False) -> Neighbours:
        """Return the ``k`` nearest reference rows of each query row.

        Arguments and errors are those of ``CustomKNN.__call__``, and a missing ``reference`` is a ``ValueError``.
        With a stored index:

        Args:
            query: ``(n, d)``, finite, in CPU memory. float64 rows need an index of float64 rows.
            k: number of neighbours, from 0 to the rows of the index (one less with ``ref_includes_query``).
            reference: ``(m, d)``, tensor or array: the rows of the new index; with ``reset_before=False`` appended to
                the index before the search, or ``None``. If an argument is invalid, no rows are appended.
            ref_includes_query: the first ``n`` rows of the index are the queries; query ``i`` never gets row ``i``.

        Returns:
            ``(distances, indices)``, both ``(n, k)``, nearest first, on the query's device, without a graph.
            Distances are float32 for float16 and bfloat16 embeddings, indices are int64.

        Raises:
            TypeError: ``query`` is not a tensor, ``k`` is not an integer, ``ref_includes_query`` is not a bool, or a
                query or reference is float64 although the stored rows are not.
            ValueError: a shape, dimension, device or ``k`` is invalid, a row holds a NaN or infinity, or there is
                nothing to search: no reference with ``reset_before=True``, no index with ``reset_before=False``.
        """
        if self.keeps_index:
            try:
                return self._search_index(query, k, reference, as_flag(ref_includes_query, "ref_includes_query"))
            finally:
                if self.reset_after:
                    self.reset()
        if reference is None:
            raise ValueError("reference must be given with reset_before=True: each call searches only its reference")
        k = _checked(self.distance, query, k, reference, ref_includes_query)
        _log_search(query, k, len(reference))
        support = self.native_support(query, reference)
        if support.metric is not None:
            return _native_search(support, query, k, reference, ref_includes_query, self.num_threads)
        distances, indices = _search_with_torch(self, query, k, reference, ref_includes_query)
        return distances.float() if distances.dtype in HALF_DTYPES else distances, indices

    def train(self, reference: Any) -> None:
        """Replace the index by a new one with these rows.

        Args:
            reference: ``(m, d)``, finite: a tensor in CPU memory or an array. Its type becomes that of the index.

        Raises:
            TypeError, ValueError: as `exactknn.Index.add`; or the core does not support the distance.
        """
        index = self._new_index()
        index.add(reference)
        self.index = index

    def add(self, reference: Any) -> None:
        """Append rows to the index; their numbers continue after the last row.

        Args:
            reference: ``(m, d)``, finite: a tensor in CPU memory or an array.

        Raises:
            TypeError, ValueError: as `exactknn.Index.add`; or there is no index.
        """
        self._kept("add to").add(reference)

    def save(self, filename: str | os.PathLike[str]) -> None:
        """Write the index to a file, as `exactknn.Index.save` does.

        Raises:
            ValueError: there is no index.
            OSError: the file cannot be written.
        """
        self._kept("save").save(filename)

    def load(self, filename: str | os.PathLike[str]) -> None:
        """Replace the index by the one in a file, as `exactknn.Index.load` does.

        Raises:
            ValueError: the file is not an index, is damaged, or has another metric than the distance.
            OSError: the file cannot be read.
        """
        index = Index.load(filename, num_threads=self.num_threads)
        self._check_metric(index)
        self.index = index

    def reset(self) -> None:
        """Drop the index."""
        self.index = None

    def native_support(self, query: Tensor, reference: Tensor) -> NativeSupport:
        """Return whether the core searches these embeddings, or why not, which is logged once.

        Args:
            query: ``(n, d)``.
            reference: ``(m, d)``.

        Raises:
            ValueError: the core would, but the embeddings have a type that distances do not accept, or no columns.
        """
        support = native_support(self.distance, query, reference, _NAMES)
        if support.metric is None and not self._fallback_logged:
            self._fallback_logged = True
            _LOGGER.info("searching with torch instead of the Rust core: %s", support.reason)
        return support

    def _search_index(self, query: Any, k: Any, reference: Any, own_included: bool) -> Neighbours:
        if not isinstance(query, Tensor):
            raise TypeError(f"query must be a torch tensor, got {type(query).__name__}")
        count = as_count(k, "k", minimum=0)
        queries = len(as_matrix(query, "query").array)
        if not self.reset_before:
            index = self._kept("search")
            index.search(query, 0)  # validates the query before rows are added
        elif reference is None:
            raise ValueError("reference must be given with reset_before=True: each call builds its index from it")
        else:
            index = self._new_index()
        added = 0 if reference is None else len(as_matrix(reference, "reference").array)
        check_sizes(queries, len(index) + added, count, own_included, when=OWN_INCLUDED, where="index")
        if reference is not None:
            index.add(reference)
        _log_search(query, count, len(index))
        distances, indices = index.search(query, count, exclude_self=own_included)
        self.index = index  # last, so that an error in the search leaves the previous index
        return torch.from_numpy(distances), torch.from_numpy(indices)

    def _new_index(self) -> Index:
        support = native_metric(self.distance)
        if support.metric is None:
            raise ValueError(f"distance must be supported by the Rust core to be used with an index: {support.reason}")
        return Index(support.metric, p=support.p, num_threads=self.num_threads)

    def _kept(self, purpose: str) -> Index:
        if self.index is None:
            raise ValueError(f"there is no index to {purpose}: call train() or load() first")
        self._check_metric(self.index)
        return self.index

    def _check_metric(self, index: Index) -> None:
        wanted = self._new_index()
        if (index.metric, index.p) != (wanted.metric, wanted.p):
            name = repr(wanted.metric) if wanted.p is None else f"{wanted.metric!r} with p={wanted.p:g}"
            raise ValueError(f"the index must have the metric of {self.distance!r}, {name}, got {index!r}")

    def __repr__(self) -> str:
        switches = f", reset_before={self.reset_before}, reset_after={self.reset_after}" if self.keeps_index else ""
        return f"RustKNN({self.distance!r}, batch_size={self.batch_size}, num_threads={self.num_threads}{switches})"


def _native_search(
    support: NativeSupport, query: Tensor, k: int, reference: Tensor, exclude_self: bool, num_threads: int | None
) -> Neighbours:
    assert support.metric is not None, "otherwise the callers search with torch"
    references = References(
        native_pair(query, reference),
        support.metric,
        p=support.p,
        exclude_self=bool(exclude_self),
        num_threads=num_threads,
    )
    distances, indices = references.knn(0, len(query), k)
    return torch.from_numpy(distances), torch.from_numpy(indices)


def native_references(
    knn_func: CustomKNN | RustKNN, query: Tensor, reference: Tensor, exclude_self: bool
) -> References | None:
    """Return the core's references for the distance of ``knn_func``; ``None`` if the core does not support it.

    Args:
        knn_func: provides the distance.
        query: ``(n, d)``.
        reference: ``(m, d)``.
        exclude_self: query ``i`` is reference row ``i``, and excluded.
    """
    support = knn_func.native_support(query, reference)
    if support.metric is None:
        known = _device_support(knn_func, query, reference)
        if known is None:
            return None
        # Count ranks in the core, on copies in CPU memory: on the device this would need a sort of all references.
        copy = query.cpu()
        support, query, reference = known, copy, copy if same_memory(query, reference) else reference.cpu()
    assert support.metric is not None, "unsupported distances have returned above"
    return References(
        native_pair(query, reference),
        support.metric,
        p=support.p,
        exclude_self=exclude_self,
        num_threads=knn_func.num_threads if isinstance(knn_func, RustKNN) else None,
    )


def torch_blocks(
    knn_func: CustomKNN | RustKNN, query: Tensor, k: int, reference: Tensor, exclude_self: bool
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ``(start, stop, indices)`` of consecutive blocks of queries, equal to the result of ``knn_func``."""
    k = _checked(knn_func.distance, query, k, reference, exclude_self)
    for start, stop in blocks(len(query), knn_func.batch_size or rows_in(BLOCK_ELEMENTS, len(reference))):
        block = query[start:stop]
        _, indices = torch_search(knn_func.distance, block, k, reference, exclude_self, None, first_row=start)
        yield start, stop, indices


def _search_with_torch(
    knn_func: CustomKNN | RustKNN, query: Tensor, k: int, reference: Tensor, exclude_self: bool
) -> Neighbours:
    """Return the neighbours found with torch, on the tensors' device."""
    support = _device_support(knn_func, query, reference)
    if support is None:
        return torch_search(knn_func.distance, query, k, reference, exclude_self, knn_func.batch_size)
    check_finite(query, _NAMES[0])
    check_finite(reference, _NAMES[1])
    threads = knn_func.num_threads if isinstance(knn_func, RustKNN) else None
    distances, indices = device_search(support, query, k, reference, bool(exclude_self), num_threads=threads)
    if isinstance(knn_func, CustomKNN):
        distances = distances.to(_values_dtype(support, query, reference))
    return distances, indices


def _device_support(knn_func: CustomKNN | RustKNN, query: Tensor, reference: Tensor) -> NativeSupport | None:
    """Return how `_device` searches with this distance on this device; ``None``: call the distance."""
    if query.device.type == "cpu" or (isinstance(knn_func, CustomKNN) and knn_func.backend == "torch"):
        return None
    support = native_metric(knn_func.distance)
    if support.metric not in DEVICE_METRICS:
        return None
    check_core_rows(query, reference, _NAMES)
    return support


def _values_dtype(support: NativeSupport, query: Tensor, reference: Tensor) -> torch.dtype:
    return result_dtype(torch.promote_types(query.dtype, reference.dtype), support.normalized)


def _checked(distance: Any, query: Any, k: Any, reference: Any, ref_includes_query: bool) -> int:
    """Return ``k`` as an ``int``, after the checks that do not depend on the backend."""
    check_embeddings(distance, query, reference, _NAMES, arrays_go_to="exactknn.knn")
    count = as_count(k, "k", minimum=0)
    own_included = as_flag(ref_includes_query, "ref_includes_query")
    check_sizes(len(query), len(reference), count, own_included, when=OWN_INCLUDED)
    return count


def _log_search(query: Tensor, k: int, references: int) -> None:
    _LOGGER.info("k-nn search with k=%d: %d queries among %d references", k, len(query), references)
    _LOGGER.info("embedding dimension is %d", query.shape[-1])
