"""Faiss behind the interfaces of this package: neighbours by ``FaissKNN``, clusters by ``FaissKMeans``.

    query, k, reference
        -> _rows            float32, finite, two-dimensional, on their device
        -> an index         index_init_fn(d), trained on the reference if its type requires it; or the stored one
        -> _placed          on the GPUs that this call uses, or in CPU memory
        -> _check_sizes     before anything is added, so that an invalid call leaves no rows behind
        -> _add, _search    with one GPU, rows on it are passed without a copy; else through CPU memory
        -> (distances, indices), both (n, k), on the query's device

Faiss is imported by the constructors, never by this module. Results are those of Faiss: float32, ties in its order.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from exactknn._arrays.matrix import as_matrix
from exactknn._arrays.scalars import as_count, as_flag
from exactknn._arrays.sizes import check_sizes
from exactknn._arrays.tensors import oddity, resolved
from exactknn.distances.base import check_floating
from exactknn.evaluation._checks import OWN_INCLUDED, check_finite
from exactknn.evaluation._torch_blocks import Neighbours, without_self

_LOGGER = logging.getLogger(__name__)

# Maximum k of Faiss on a GPU.
_MOST_ON_GPU = 2048


class FaissKNN:
    """Search in a Faiss index: a new one for each call, or a stored one that grows.

    By default every call builds an index of its reference, searches, and drops it. With ``reset_before=False`` and
    ``reset_after=False``, `train` creates the index, `add` and the reference of each call append to it, and rows are
    numbered in insertion order.

    Values and order are those of Faiss: squared Euclidean distances in float32 by default, ties in any order.
    `CustomKNN` and `RustKNN` are exact.

    A GPU is used if Faiss is built with GPU support and detects one, and the query is on CUDA or ``gpus`` is given. An
    index searched on GPUs stays there; `save` copies it back.

    Args:
        reset_before: build a new index from the reference of each call, instead of searching the stored one.
        reset_after: drop the index after each call, even a failed one.
        index_init_fn: called with a dimension, returns an empty Faiss index. ``None``: ``faiss.IndexFlatL2``.
        gpus: numbers of the GPUs to search on, even for queries in CPU memory. ``None``: all that Faiss detects, for
            queries on CUDA.

    Raises:
        ModuleNotFoundError: Faiss is not installed.
        TypeError: ``gpus`` is not a list or tuple of integers, or ``index_init_fn`` is not callable.
        ValueError: ``gpus`` is empty or holds a negative number.
    """

    def __init__(
        self,
        reset_before: bool = True,
        reset_after: bool = True,
        index_init_fn: Callable[[int], Any] | None = None,
        gpus: Sequence[int] | None = None,
    ) -> None:
        faiss = _faiss()
        if not (index_init_fn is None or callable(index_init_fn)):
            raise TypeError(f"index_init_fn must be callable or None, got {type(index_init_fn).__name__}")
        if gpus is not None:
            if not isinstance(gpus, (list, tuple)):
                raise TypeError(f"gpus must be a list or tuple of GPU numbers, got {type(gpus).__name__}")
            if not gpus:
                raise ValueError("gpus must name at least one GPU, got none")
            for gpu in gpus:
                as_count(gpu, "gpus", minimum=0)
        self.reset_before = as_flag(reset_before, "reset_before")
        self.reset_after = as_flag(reset_after, "reset_after")
        self.index_init_fn: Callable[[int], Any] = faiss.IndexFlatL2 if index_init_fn is None else index_init_fn
        self.gpus = gpus
        self.index: Any = None
        self._narrowing_logged = False

    def __call__(self, query: Tensor, k: int, reference: Any = None, ref_includes_query: bool = False) -> Neighbours:
        """Return the ``k`` nearest rows of the index for each query row.

        Args:
            query: ``(n, d)`` float16, bfloat16, float32 or float64, finite, on any device. Faiss gets float32.
            k: number of neighbours, from 0 to the rows of the index (one less with ``ref_includes_query``).
            reference: ``(m, d)``, tensor or array: the rows of the new index; with ``reset_before=False`` appended to
                the index before the search.
            ref_includes_query: the first ``n`` rows of the index are the queries; query ``i`` never gets row ``i``.

        Returns:
            ``(distances, indices)``, both ``(n, k)``, float32 and int64, nearest first, on the query's device. An
            approximate index may find fewer than ``k``, and so may any index if distances overflow float32: the rest
            has the sentinel index -1, and a WARNING is logged.

        Raises:
            TypeError: ``query`` is not a tensor, ``k`` is not an integer, or ``ref_includes_query`` is not a bool.
            ValueError: a shape, dimension, type or ``k`` is invalid, a row holds a NaN or infinity (the message names
                argument and row), or there is nothing to search: no reference with ``reset_before=True``, no index with
                ``reset_before=False``.
            RuntimeError: Faiss raises it.
        """
        try:
            return self._search(query, k, reference, as_flag(ref_includes_query, "ref_includes_query"))
        finally:
            if self.reset_after:
                self.reset()

    def train(self, embeddings: Any) -> None:
        """Replace the index by a new one with these rows, trained on them if its type requires training.

        Args:
            embeddings: ``(m, d)``, finite: a tensor on any device, or an array.

        Raises:
            TypeError, ValueError: as for a call, for the argument ``embeddings``.
        """
        rows = self._rows(embeddings, "embeddings")
        index = self._new_index(rows)
        _add(index, rows)
        self.index = index

    def add(self, embeddings: Any) -> None:
        """Append rows to the index; their numbers continue after the last row.

        Args:
            embeddings: ``(m, d)``, finite: a tensor on any device, or an array.

        Raises:
            TypeError, ValueError: as for a call, for the argument ``embeddings``; or there is no index.
        """
        index = self._index("add to")
        rows = self._rows(embeddings, "embeddings")
        _check_dimension(index, rows, "embeddings")
        _add(index, rows)

    def save(self, filename: str | os.PathLike[str]) -> None:
        """Write the index to a file that ``faiss.read_index`` reads.

        Raises:
            ValueError: there is no index.
            RuntimeError: the file cannot be written; raised by Faiss.
        """
        index = self._index("save")
        faiss = _faiss()
        faiss.write_index(faiss.index_gpu_to_cpu(index) if _gpus_of(index) else index, os.fspath(filename))

    def load(self, filename: str | os.PathLike[str]) -> None:
        """Replace the index by the one in a file.

        Raises:
            RuntimeError: the file cannot be read or is not an index; raised by Faiss.
        """
        self.index = _faiss().read_index(os.fspath(filename))

    def reset(self) -> None:
        """Drop the index."""
        self.index = None

    def _search(self, query: Any, k: Any, reference: Any, own_included: bool) -> Neighbours:
        if not isinstance(query, Tensor):
            raise TypeError(f"query must be a torch tensor, got {type(query).__name__}")
        # One more, as the query's own row is among the neighbours.
        searched = as_count(k, "k", minimum=0) + own_included
        rows = self._rows(query, "query")
        added = None if reference is None else self._rows(reference, "reference")
        if not self.reset_before:
            index = self._index("search")
        elif added is None:
            raise ValueError("reference must be given with reset_before=True: each call builds its index from it")
        else:
            _check_same_dimension(rows, added)
            index = self._new_index(added)
        _check_sizes(index, rows, added, searched, own_included)
        index = _placed(index, self._gpus(query, searched))
        self.index = index
        if added is not None:
            _add(index, added)
        _LOGGER.info("k-nn search in Faiss with k=%d: %d queries among %d rows", searched, len(rows), index.ntotal)
        _LOGGER.info("embedding dimension is %d", rows.shape[1])
        distances, indices = (found.to(query.device) for found in _found(index, rows, searched))
        _warn_of_padding(indices, searched)
        own = torch.arange(len(indices), device=indices.device)
        return without_self(distances, indices, own) if own_included else (distances, indices)

    def _index(self, purpose: str) -> Any:
        if self.index is None:
            raise ValueError(f"there is no index to {purpose}: call train() or load() first")
        return self.index

    def _new_index(self, rows: Tensor) -> Any:
        index = self.index_init_fn(rows.shape[1])
        if index.d != rows.shape[1]:
            raise ValueError(f"index_init_fn must return an index of dimension {rows.shape[1]}, got {index.d}")
        if not index.is_trained:
            learnt = rows.cpu().numpy()
            _check_distances_fit(learnt, "the rows to train on")
            index.train(learnt)
        return index

    def _gpus(self, query: Tensor, searched: int) -> list[int] | None:
        """Return the GPUs that a call uses; ``None``: the CPU."""
        faiss = _faiss()
        if not (query.is_cuda or self.gpus is not None):
            return None
        # Some builds report GPUs that they cannot use.
        if not hasattr(faiss, "GpuIndex") or faiss.get_num_gpus() < 1:
            return None
        if searched > _MOST_ON_GPU:
            _LOGGER.warning(
                "k=%d exceeds the maximum of Faiss on a GPU, %d: searching on the CPU", searched, _MOST_ON_GPU
            )
            return None
        return list(range(faiss.get_num_gpus()) if self.gpus is None else self.gpus)

    def _rows(self, values: Any, name: str) -> Tensor:
        rows, narrowed = _float32(values, name)
        if narrowed and not self._narrowing_logged:
            self._narrowing_logged = True
            _LOGGER.warning("Faiss searches in float32: the float64 values of %s are rounded to it", name)
        return rows

    def __repr__(self) -> str:
        return f"FaissKNN(reset_before={self.reset_before}, reset_after={self.reset_after}, gpus={self.gpus})"


class FaissKMeans:
    """Clusters by Faiss's k-means, for use as ``kmeans_func``.

    Faiss starts from rows sampled with a fixed seed. If it samples equal rows, clusters can end up empty, which is
    logged as a WARNING.

    Args:
        **kwargs: for ``faiss.Kmeans(d, num_clusters, **kwargs)``, such as ``niter``, ``nredo``, ``seed``, ``gpu``, or
            ``init_method=faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS``.

    Raises:
        ModuleNotFoundError: Faiss is not installed.
    """

    def __init__(self, **kwargs: Any) -> None:
        _faiss()
        self.kwargs = kwargs

    def __call__(self, x: Any, num_clusters: int) -> Tensor:
        """Return the cluster of each row, among ``num_clusters`` clusters.

        Args:
            x: ``(n, d)``, finite: a tensor on any device, or an array. Faiss gets float32, in CPU memory.
            num_clusters: from 1 to ``n``.

        Returns:
            ``(n,)`` int64, from 0 to ``num_clusters - 1``, on the device of ``x``.

        Raises:
            TypeError: ``x`` does not hold numbers, or ``num_clusters`` is not an integer.
            ValueError: the shape or type is invalid, a row holds a NaN or infinity, there are fewer rows than clusters,
                or squared distances would overflow float32.
            AttributeError: Faiss's k-means does not have a keyword argument.
        """
        faiss = _faiss()
        num_clusters = as_count(num_clusters, "num_clusters", minimum=1)
        rows, narrowed = _float32(x, "x")
        if len(rows) < num_clusters:
            raise ValueError(f"num_clusters must be at most the number of rows, {len(rows)}, got {num_clusters}")
        _LOGGER.info(
            "k-means in Faiss of %d rows of dimension %d into %d clusters", len(rows), rows.shape[1], num_clusters
        )
        if narrowed:
            _LOGGER.warning("Faiss clusters in float32: the float64 values of x are rounded to it")
        points = rows.cpu().numpy()
        _check_distances_fit(points, "x")
        kmeans = faiss.Kmeans(rows.shape[1], num_clusters, **self.kwargs)
        kmeans.train(points)
        _, clusters = kmeans.assign(points)
        filled = len(np.unique(clusters))
        if filled < num_clusters:
            _LOGGER.warning(
                "k-means degenerated: only %d of %d clusters are not empty. Rows may be equal; another seed, nredo or "
                "init_method may find more clusters",
                filled,
                num_clusters,
            )
        return torch.from_numpy(clusters.astype(np.int64, copy=False)).to(rows.device)

    def __repr__(self) -> str:
        return f"FaissKMeans({', '.join(f'{name}={value!r}' for name, value in self.kwargs.items())})"


def _faiss() -> Any:
    try:
        import faiss
    except ModuleNotFoundError as error:
        if error.name != "faiss":
            raise
        raise ModuleNotFoundError(
            "FaissKNN and FaissKMeans need Faiss, which is not installed: pip install 'exactknn[faiss]'", name="faiss"
        ) from error
    return faiss


# --- rows -----------------------------------------------------------------------------------------------------------


def _float32(values: Any, name: str) -> tuple[Tensor, bool]:
    """Return finite float32 rows on their device, and whether they were rounded from float64."""
    if not isinstance(values, Tensor):
        matrix = as_matrix(values, name)
        array = matrix.array if matrix.array.flags.writeable else matrix.array.copy()  # torch needs writable memory
        if matrix.bfloat16:
            values = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            values = torch.from_numpy(array)
    odd = oddity(values)
    if odd is not None:
        raise ValueError(f"{name} must be a dense tensor, got {odd}")
    if values.ndim != 2:
        raise ValueError(f"{name} must be 2-D (rows, dimensions), got shape {tuple(values.shape)}")
    if values.shape[1] == 0:
        raise ValueError(f"{name} must have at least one column, got 0")
    check_floating(values, name)
    check_finite(values, name)
    rows = resolved(values, name).float().contiguous()
    narrowed = values.dtype == torch.float64
    if narrowed:
        check_finite(rows, f"{name} rounded to float32")
    return rows, narrowed


def _check_dimension(index: Any, rows: Tensor, name: str) -> None:
    if rows.shape[1] != index.d:
        raise ValueError(f"{name} must have the dimension of the index, {index.d}, got {rows.shape[1]}")


def _check_distances_fit(points: npt.NDArray[np.float32], name: str) -> None:
    """Reject rows whose squared distances may overflow, which makes Faiss's k-means abort the process."""
    norms = np.einsum("ij,ij->i", points, points, dtype=np.float64)
    # A row and a centroid are at most twice the largest norm apart.
    if 4 * norms.max(initial=0) > np.finfo(np.float32).max:
        raise ValueError(
            f"{name} must be small enough for squared distances in float32, "
            f"got length {norms.max() ** 0.5:.3g} in row {int(norms.argmax())}"
        )


def _check_same_dimension(rows: Tensor, added: Tensor) -> None:
    if rows.shape[1] != added.shape[1]:
        raise ValueError(
            f"query and reference must have the same dimension, got {rows.shape[1]} and {added.shape[1]} dimensions"
        )


def _check_sizes(index: Any, rows: Tensor, added: Tensor | None, searched: int, own_included: bool) -> None:
    _check_dimension(index, rows, "query")
    total = index.ntotal
    if added is not None:
        _check_dimension(index, added, "reference")
        total += len(added)
    check_sizes(len(rows), total, searched - own_included, own_included, when=OWN_INCLUDED, where="index")


# --- Faiss ----------------------------------------------------------------------------------------------------------


def _single_gpu(index: Any) -> int | None:
    """Return the GPU of an index; ``None`` for one in CPU memory or on several GPUs."""
    gpu_index = getattr(_faiss(), "GpuIndex", None)
    return int(index.getDevice()) if gpu_index is not None and isinstance(index, gpu_index) else None


def _gpus_of(index: Any) -> list[int]:
    """Return the GPUs of an index; empty for one in CPU memory."""
    faiss = _faiss()
    if isinstance(index, (faiss.IndexReplicas, faiss.IndexShards)):
        return [gpu for part in range(index.count()) for gpu in _gpus_of(faiss.downcast_index(index.at(part)))]
    gpu = _single_gpu(index)
    return [] if gpu is None else [gpu]


def _placed(index: Any, gpus: list[int] | None) -> Any:
    """Return the index with its rows on these GPUs, or in CPU memory for ``None``."""
    faiss = _faiss()
    where = _gpus_of(index)
    if where == (gpus or []):
        return index
    if where:
        index = faiss.index_gpu_to_cpu(index)
    return index if gpus is None else faiss.index_cpu_to_gpus_list(index, gpus=gpus)


def _gpu_of(rows: Tensor) -> int | None:
    gpu: int | None = rows.device.index if rows.is_cuda else None
    return gpu


@contextlib.contextmanager
def _as_faiss_takes(index: Any, rows: Tensor) -> Iterator[Any]:
    """Yield rows for a method of the index: a tensor if they are on the GPU of the index, else an array."""
    gpu = _gpu_of(rows)
    if gpu is None or _single_gpu(index) != gpu:
        yield rows.cpu().numpy()
        return
    # Makes Faiss's methods accept tensors, on torch's current stream of the current device.
    importlib.import_module("faiss.contrib.torch_utils")
    with torch.cuda.device(gpu):
        yield rows


def _add(index: Any, rows: Tensor) -> None:
    with _as_faiss_takes(index, rows) as taken:
        index.add(taken)


def _found(index: Any, rows: Tensor, searched: int) -> tuple[Tensor, Tensor]:
    if searched == 0 or len(rows) == 0:
        shape = (len(rows), searched)
        return rows.new_empty(shape), rows.new_empty(shape, dtype=torch.long)
    with _as_faiss_takes(index, rows) as taken:
        distances, indices = index.search(taken, searched)
    return torch.as_tensor(distances), torch.as_tensor(indices)


def _warn_of_padding(indices: Tensor, searched: int) -> None:
    short = int((indices < 0).any(dim=1).sum()) if indices.numel() else 0
    if short:
        _LOGGER.warning(
            "the index found fewer than %d rows for %d of %d queries, -1 marks the rest: it is approximate, or "
            "distances overflow float32",
            searched,
            short,
            len(indices),
        )
