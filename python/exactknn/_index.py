"""References that are prepared once and searched many times.

    add, train ──as_matrix──> rows ──rounded──> _core.Index: packed in segments, in memory or mapped from a file
    search, radius, ranks ──as_matrix──> queries ──widened──> _core.Index: a snapshot of the rows ──> NumPy arrays
    save, load ──────────────────────────────────────> the file of an index
    pickle, copy ──rows──> a new index

A core index has a fixed dimension and type, so it is created with the first rows. It is the only mutable attribute of
`Index`: a search reads it once, and the core searches a snapshot of its rows.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from exactknn import _core, _progress
from exactknn._arrays.dtypes import HELD_BY, Matrix, as_dtype_name, converted, rounded
from exactknn._arrays.matrix import as_array, as_matrix
from exactknn._arrays.row_lists import as_row_lists
from exactknn._arrays.scalars import as_count, as_exponent, as_flag, as_optional_count, as_real
from exactknn._progress import Progress


class Index:
    """Rows that are prepared once and searched many times.

    Results are, byte for byte, those of `exactknn.knn` and `exactknn.radius` for the stored rows. Rows are numbered
    from 0, in the order in which they were added.

    Any number of threads may search an index while others change it: each search uses a snapshot of the rows.

    Args:
        metric: as for `exactknn.knn`; or ``"cosine_similarity"`` (largest first), ``"normalized_sqeuclidean"`` or
            ``"normalized_euclidean"`` (of rows divided by their 2-norm, smallest first).
        dtype: type of the stored rows: ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"float64"``, or such a type of
            NumPy or torch. Rows of another type are rounded to it, to nearest, ties to even. ``None``: the type of the
            first rows; later rows may be of any type whose values it represents exactly.
        p: exponent of ``"minkowski"``, as for `exactknn.knn`.
        num_threads: default number of threads of each call, at least 1. ``None``: see ``set_num_threads``.

    Raises:
        TypeError: ``p`` is not a number, ``num_threads`` is not an integer, or ``dtype`` or ``metric`` is of a wrong
            type.
        ValueError: ``metric`` or ``dtype`` is unknown, or ``p`` or ``num_threads`` is out of range.

    Examples:
        >>> index = Index()
        >>> index.add([[0.0, 2.0], [1.0, 0.0]])
        >>> distances, indices = index.search([[0.0, 0.0]], k=2)
        >>> distances.tolist(), indices.tolist()
        ([[1.0, 4.0]], [[1, 0]])
        >>> index
        Index(metric='sqeuclidean', dtype='float64', rows=2, dim=2)
    """

    def __init__(
        self, metric: str = "sqeuclidean", dtype: Any = None, *, p: float | None = None, num_threads: int | None = None
    ) -> None:
        if not isinstance(metric, str):
            raise TypeError(f"metric must be a string, got {type(metric).__name__}")
        if p is not None:
            p = as_exponent(p, "p")
        # Checks metric and p, and normalises aliases: minkowski with p=1 becomes cityblock.
        checked = _core.Index(1, metric, "float32", p=p)
        self._metric = checked.metric
        self._p = checked.p
        self._dtype = None if dtype is None else as_dtype_name(dtype, "dtype")
        self._num_threads = as_optional_count(num_threads, "num_threads")
        self._native: _core.Index | None = None
        # Held only to replace the index, never while filling one: a forked child must find it unlocked.
        self._lock = threading.Lock()

    # --- properties ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of rows."""
        native = self._native
        return 0 if native is None else native.rows

    @property
    def metric(self) -> str:
        """Name of the metric; ``"minkowski"`` with ``p`` 1, 2 or infinity has the name of the equivalent metric."""
        return self._metric

    @property
    def p(self) -> float | None:
        """Exponent of ``"minkowski"``; ``None`` for all other metrics."""
        return self._p

    @property
    def dim(self) -> int | None:
        """Dimension of the rows; ``None`` before the first rows."""
        native = self._native
        return None if native is None else native.dim

    @property
    def dtype(self) -> str | None:
        """Name of the type of the stored rows; ``None`` before it is known."""
        native = self._native
        return self._dtype if native is None else native.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the rows and their packed panels; those mapped from a file do not count."""
        native = self._native
        return 0 if native is None else native.nbytes

    def __repr__(self) -> str:
        p = "" if self._p is None else f", p={self._p:g}"
        return f"Index(metric={self._metric!r}, dtype={self.dtype!r}{p}, rows={len(self)}, dim={self.dim})"

    def rows(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Return a copy of the stored rows ``start`` to ``stop``.

        Args:
            start: the first row, from 0 to the number of rows.
            stop: one past the last row; ``None``: the number of rows.

        Returns:
            ``(stop - start, dim)``, of the stored type; bfloat16 as float32, which represents the same values.

        Raises:
            TypeError: ``start`` or ``stop`` is not an integer.
            ValueError: the range is not in the index, no row was ever added, or the file that the rows are mapped from
                is damaged.
        """
        start = as_count(start, "start", minimum=0)
        stop = None if stop is None else as_count(stop, "stop", minimum=0)
        native = self._require_native("copy")
        copied = Matrix(native.copy(start, stop), native.dtype == "bfloat16")
        return converted(copied, "float32") if copied.bfloat16 else copied.array

    # --- adding and removing rows ----------------------------------------------------------------------------------

    def train(self, reference: Any, *, num_threads: int | None = None, progress: Progress = None) -> None:
        """Replace all rows by these, which may have another dimension. After an error the index is unchanged.

        Arguments and errors are those of `add`.
        """
        matrix = as_matrix(reference, "reference")
        threads = self._threads(num_threads)
        with _progress.reporting(progress) as report:
            native = self._filled(matrix, threads, report)
        with self._lock:
            self._native = native

    def add(self, reference: Any, *, num_threads: int | None = None, progress: Progress = None) -> None:
        """Append rows; their numbers continue after the last row.

        An error, or an exception from ``progress``, appends none of them; an interrupt appends all of them or none.

        Args:
            reference: ``(m, d)``, of the kinds that `exactknn.knn` accepts, finite.
            num_threads: threads for this call, at least 1. ``None``: the index's default.
            progress: as for `exactknn.knn`.

        Raises:
            TypeError: the rows are of an unsupported type or, if the index has no ``dtype``, of one that the type of
                the first rows does not represent exactly.
            ValueError: the shape, dimension or device is invalid, or a value is NaN, infinite or beyond the range of
                the stored type (the message names row and column).
        """
        matrix = as_matrix(reference, "reference")
        threads = self._threads(num_threads)
        with _progress.reporting(progress) as report:
            native = self._native
            if native is None:
                first = self._filled(matrix, threads, report)
                with self._lock:
                    native = self._native
                    if native is None:
                        self._native = first
                        return
                # Another thread was first: append these rows after its own.
            self._append(native, matrix, threads, report)

    def remove(self, mask: Any) -> None:
        """Remove rows and renumber those after them. Copies each segment of the index that loses a row.

        Args:
            mask: one bool per row, True to remove it: ``(m,)``, an array, a tensor in CPU memory, or a list.

        Raises:
            TypeError: ``mask`` does not hold bools, or is a masked array.
            ValueError: ``mask`` has a wrong shape, device or length, or the file that rows are mapped from is damaged.
                The index is then unchanged.
        """
        given = as_array(mask, "mask")
        if given.dtype != np.bool_:
            raise TypeError(
                f"mask must hold one bool per row, got {given.dtype.name}; "
                "for row numbers: mask = numpy.zeros(len(index), bool); mask[numbers] = True"
            )
        if given.ndim != 1:
            raise ValueError(f"mask must be 1-D, one bool per row, got shape {given.shape}")
        native = self._native
        if native is not None:
            native.remove(np.ascontiguousarray(given))
        elif len(given):
            raise ValueError(f"mask must have one entry for each of the 0 rows, got {len(given)}")

    def reset(self) -> None:
        """Remove all rows; new rows may have another dimension and, if the index has no ``dtype``, another type."""
        with self._lock:
            self._native = None

    # --- searches --------------------------------------------------------------------------------------------------

    def search(
        self,
        query: Any,
        k: int | None = 10,
        *,
        exclude_self: bool = False,
        num_threads: int | None = None,
        progress: Progress = None,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return the ``k`` exact nearest rows of each query row: `exactknn.knn` of the query and the stored rows.

        Args:
            query: ``(n, dim)``, of the kinds that `exactknn.knn` accepts. float16 and bfloat16 are widened; float64
                needs an index of float64 rows.
            k: number of neighbours, from 0 to the number of rows (one less with ``exclude_self``); ``None``: all.
            exclude_self: the first ``n`` rows of the index are the queries; query ``i`` never gets row ``i``.
            num_threads: threads for this call, at least 1. ``None``: the index's default.
            progress: as for `exactknn.knn`.

        Returns:
            ``(distances, indices)``, both ``(n, k)``, nearest first. Distances are float64 for float64 rows, else
            float32; indices are int64.

        Raises:
            TypeError: the query is of an unsupported type, or float64 although the rows are not, ``k`` is not an
                integer, or ``progress`` is neither a bool, a function nor ``None``.
            ValueError: the shape, dimension, ``k`` or device is invalid, a row holds a NaN or infinity, or the file
                that the rows are mapped from is damaged.
        """
        count = None if k is None else as_count(k, "k", minimum=0)
        exclude_self = as_flag(exclude_self, "exclude_self")
        threads = self._threads(num_threads)
        native, wide = self._searched(query)
        with _progress.reporting(progress) as report:
            return native.search(wide, count, exclude_self=exclude_self, num_threads=threads, progress=report)

    # The return type depends on ``return_distances``.
    @overload
    def radius(
        self,
        query: Any,
        r: float,
        *,
        exclude_self: bool = ...,
        return_distances: Literal[True] = ...,
        sort: bool | None = ...,
        num_threads: int | None = ...,
        progress: Progress = ...,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[Any]]: ...
    @overload
    def radius(
        self,
        query: Any,
        r: float,
        *,
        exclude_self: bool = ...,
        return_distances: Literal[False],
        sort: bool | None = ...,
        num_threads: int | None = ...,
        progress: Progress = ...,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    @overload
    def radius(
        self,
        query: Any,
        r: float,
        *,
        exclude_self: bool = ...,
        return_distances: bool,
        sort: bool | None = ...,
        num_threads: int | None = ...,
        progress: Progress = ...,
    ) -> tuple[npt.NDArray[Any], ...]: ...
    def radius(
        self,
        query: Any,
        r: float,
        *,
        exclude_self: bool = False,
        return_distances: bool = True,
        sort: bool | None = None,
        num_threads: int | None = None,
        progress: Progress = None,
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return all rows within ``r`` of each query row: `exactknn.radius` of the query and the stored rows.

        Args:
            query: as for `search`.
            r: the radius, a finite number, in the units of the metric, as for `exactknn.radius`.
            exclude_self: as for `search`.
            return_distances: as for `exactknn.radius`.
            sort: as for `exactknn.radius`.
            num_threads: threads for this call, at least 1. ``None``: the index's default.
            progress: as for `exactknn.knn`.

        Returns:
            ``(indptr, indices, distances)``, or ``(indptr, indices)`` with ``return_distances=False``, as
            `exactknn.radius`.

        Raises:
            TypeError: as for `search`, or ``r`` is not a real number.
            ValueError: as for `search`, or ``r`` is NaN or infinite.
            MemoryError: the rows inside do not fit in memory.
        """
        bound = as_real(r, "r")
        exclude_self = as_flag(exclude_self, "exclude_self")
        with_distances = as_flag(return_distances, "return_distances")
        by_value = with_distances if sort is None else as_flag(sort, "sort")
        threads = self._threads(num_threads)
        native, wide = self._searched(query)
        with _progress.reporting(progress) as report:
            indptr, indices, distances = native.radius(
                wide,
                bound,
                exclude_self=exclude_self,
                return_distances=with_distances,
                sort=by_value,
                num_threads=threads,
                progress=report,
            )
        return (indptr, indices) if distances is None else (indptr, indices, distances)

    def ranks(
        self,
        query: Any,
        targets: Any,
        *,
        exclude_self: bool = False,
        num_threads: int | None = None,
        progress: Progress = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the ranks of selected rows among all rows for each query, without sorting them.

        The rank of a row is 1 plus the number of rows that come before it in the order of `search` with ``k=None``.

        Args:
            query: ``(n, dim)``, as for `search`.
            targets: the rows to rank: for each query a sequence of distinct row numbers; or all of them in compressed
                rows, ``(indptr, indices)``, as `radius` returns them.
            exclude_self: as for `search`: query ``i`` is row ``i``, which then has no rank, and counts for no rank.
            num_threads: threads for this call, at least 1. ``None``: the index's default.
            progress: as for `exactknn.knn`.

        Returns:
            ``(indptr, ranks)``, int64: query ``i`` has the ranks ``ranks[indptr[i]:indptr[i + 1]]``, ascending, from 1.

        Raises:
            TypeError: as for `search`, or targets are not integers.
            ValueError: as for `search`, or targets do not match the queries, are not rows of the index, or name a row
                twice for one query.

        Examples:
            >>> index = Index()
            >>> index.add([[0.0], [1.0], [5.0], [2.0]])
            >>> indptr, ranks = index.ranks([[0.2], [4.0]], [[3, 0], [2]])
            >>> indptr.tolist(), ranks.tolist()
            ([0, 2, 3], [1, 3, 1])
        """
        exclude_self = as_flag(exclude_self, "exclude_self")
        threads = self._threads(num_threads)
        native, wide = self._searched(query)
        indptr, rows = as_row_lists(targets, "targets", len(wide), native.rows)
        with _progress.reporting(progress) as report:
            return native.ranks(
                wide,
                query_group=np.arange(len(wide), dtype=np.int64),
                group_offsets=indptr,
                group_rows=rows,
                exclude_self=exclude_self,
                num_threads=threads,
                progress=report,
            )

    # --- files and copies ------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, num_threads: int | None = None, progress: Progress = None) -> None:
        """Write the index to a file atomically, replacing an existing one.

        An interrupt leaves the old file or the new one. The file may be the one that the rows are mapped from.

        Args:
            path: the file.
            num_threads: threads for this call, at least 1. ``None``: the index's default.
            progress: as for `exactknn.knn`.

        Raises:
            OSError: the file cannot be written.
            ValueError: no row was ever added, or the file that rows are mapped from is damaged.
        """
        native = self._require_native("save")
        threads = self._threads(num_threads)
        with _progress.reporting(progress) as report:
            native.save(path, num_threads=threads, progress=report)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, num_threads: int | None = None, mmap: bool = True) -> Index:
        """Return a saved index. The file is memory-mapped: rows are read when a search needs them.

        Called on an index, it leaves that one unchanged. Later rows must be of a type that the stored one represents.

        Data is verified when it is first used. A mapped file can be replaced, as `save` does, but must not be written
        in place: a call that finds its size or time changed raises `ValueError`, and truncation during a call ends the
        process. ``mmap=False`` is safe for a file that other programs write.

        Args:
            path: the file.
            num_threads: as for the constructor.
            mmap: whether to map the file; ``False`` reads all of it to memory, and later changes have no effect.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not an index, was written by a newer version, or is damaged.
        """
        native = _core.Index.load(path, mmap=as_flag(mmap, "mmap"))
        index = cls(native.metric, p=native.p, num_threads=num_threads)
        index._native = native
        return index

    def __getstate__(self) -> dict[str, Any]:
        native = self._native
        return {
            "metric": self._metric,
            "p": self._p,
            "dtype": self._dtype,
            "num_threads": self._num_threads,
            "stored": None if native is None else (native.dtype, native.copy(0)),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Index.__init__(self, state["metric"], state["dtype"], p=state["p"], num_threads=state["num_threads"])
        if state["stored"] is not None:
            dtype, numbers = state["stored"]
            self._native = _core.Index(numbers.shape[1], self._metric, dtype, p=self._p)
            self._native.add(numbers, bfloat16=dtype == "bfloat16", num_threads=self._num_threads)

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _threads(self, num_threads: int | None) -> int | None:
        return self._num_threads if num_threads is None else as_count(num_threads, "num_threads", minimum=1)

    def _require_native(self, purpose: str) -> _core.Index:
        native = self._native
        if native is None:
            raise ValueError(f"there are no rows to {purpose}: call add() or train() first")
        return native

    def _filled(self, matrix: Matrix, num_threads: int | None, report: _progress.Report | None) -> _core.Index:
        """Return a new core index with these rows."""
        dtype = matrix.dtype_name if self._dtype is None else self._dtype
        native = _core.Index(matrix.array.shape[1], self._metric, dtype, p=self._p)
        self._append(native, matrix, num_threads, report)
        return native

    def _append(
        self,
        native: _core.Index,
        matrix: Matrix,
        num_threads: int | None,
        report: _progress.Report | None,
    ) -> None:
        columns = matrix.array.shape[1]
        if columns != native.dim:
            raise ValueError(f"reference must have {native.dim} columns like the rows of the index, got {columns}")
        if self._dtype is None and native.dtype not in HELD_BY[matrix.dtype_name]:
            raise TypeError(
                f"reference must be of a type that {native.dtype}, the type of the first rows, represents exactly, got "
                f"{matrix.dtype_name}: convert it, or create the index with dtype={native.dtype!r}, which rounds rows"
            )
        stored = rounded(matrix, native.dtype, "reference")
        native.add(stored.array, bfloat16=stored.bfloat16, num_threads=num_threads, progress=report)

    def _searched(self, query: Any) -> tuple[_core.Index, npt.NDArray[Any]]:
        """Return the core index, and the queries in the type that it takes."""
        matrix = as_matrix(query, "query")
        native = self._native
        if native is None:
            # An empty index accepts queries of any dimension.
            native = _core.Index(
                max(matrix.array.shape[1], 1), self._metric, self._dtype or matrix.dtype_name, p=self._p
            )
        wide = "float64" if native.dtype == "float64" else "float32"
        if wide not in HELD_BY[matrix.dtype_name]:
            raise TypeError(
                f"query must be {wide} or half precision for an index of {native.dtype} rows, got {matrix.dtype_name}: "
                f"pass numpy.asarray(query, {wide!r}), or create the index with dtype='float64'"
            )
        return native, converted(matrix, wide)
