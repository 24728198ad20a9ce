"""Searches of references that do not fit in memory, or are generated on the fly.

::

    for each block of queries, if they do not all fit           (one block if the references can be read only once)
        _core.BlockSearch(queries)
        for each block of references  <── the next one is read, or made by an iterable, meanwhile (rows)
            add ──> the k nearest so far      (between two blocks: state, a checkpoint)
        result ──> rows of (distances, indices)

The bytes of the result do not depend on the blocks: the core orders all rows by value and row number, and the first k
of all rows are the first k among the first k of each block.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from exactknn import _core
from exactknn._arrays.blocks import rows_in
from exactknn._arrays.dtypes import Matrix, converted
from exactknn._arrays.matrix import as_view, is_blocks
from exactknn._progress import Report, part_of
from exactknn._stream.plan import (
    Plan,
    Search,
    check_shapes,
    common_dtype_of,
    plan_blocks,
    value_dtype,
)
from exactknn._stream.rows import PIECE_BYTES, ArrayRows, Rows, Stream
from exactknn._stream.thread import Call

FIRST_WORK = 1 << 25
"""Multiply-adds of the first piece, if blocks are searched in pieces: milliseconds, seconds where each is a power."""

_PIECE_SECONDS = 1.0
"""Time that a piece should take: about the work that an interrupt may lose."""

_SECONDS = 0.04
"""Time between two progress reports while another thread searches, the same as in the core."""

Array = npt.NDArray[Any]


class State(NamedTuple):
    """State of a search between two blocks."""

    first_query: int
    """First query of the current block of queries; all before it are finished."""
    rows: int
    """References searched for the current block."""
    ranks: Array
    """`_core.BlockSearch.state` of the current block: (queries, k), or (0, k) if `rows` is 0."""
    candidates: Array
    distances: Array
    """Result of the finished queries: (first_query, k)."""
    indices: Array


class ResumableSearch:
    """A search in blocks that can be interrupted between two of them and resumed later.

    Args:
        queries: the queries.
        references: the references; a `Stream` can be read only once.
        search: the parameters. ``k`` is at most the number of references, if that is known.
        plan: from `plan_blocks`.
    """

    def __init__(self, queries: Rows, references: Rows | Stream, search: Search, plan: Plan) -> None:
        self.dtype_name = common_dtype_of(queries, references)
        self._queries = queries
        self._references = references
        self._search = search
        self._plan = plan
        self._in_parts = plan.queries < queries.rows
        shape = (queries.rows if self._in_parts else 0, search.k)
        self._distances = np.empty(shape, value_dtype(self.dtype_name))
        self._indices = np.empty(shape, np.int64)
        # One tuple, so that an interrupt cannot separate the two.
        self._at: tuple[int, _core.BlockSearch | None] = (0, None)

    def state(self) -> State:
        """Return the state for `restore`, valid until the search continues."""
        first, block = self._at
        done = self._distances[:first], self._indices[:first]
        if block is None or block.rows == 0:
            return State(first, 0, np.empty((0, self._search.k)), np.empty((0, self._search.k), np.int64), *done)
        return State(first, block.rows, *block.state(), *done)

    def restore(self, state: State) -> None:
        """Resume from the state of a search with the same arguments."""
        self._distances[: state.first_query] = state.distances
        self._indices[: state.first_query] = state.indices
        block = None
        if state.rows:
            block = self._begin(state.first_query)
            block.restore(state.ranks, state.candidates, state.rows)
        self._at = (state.first_query, block)

    def state_shapes(self, first_query: int, rows: int) -> dict[str, tuple[np.dtype[Any], tuple[int, int]]]:
        """Return type and shape of each array of a state at this position.

        Raises:
            ValueError: the position is not a block boundary of these queries and references.
        """
        n, part = self._queries.rows, self._plan.queries
        if (
            not 0 <= first_query <= n
            or not 0 <= rows <= (self._references.rows or 0)
            or (first_query % part and first_query < n)
        ):
            raise ValueError(f"query {first_query} and {rows} references are not a block boundary")
        queries = min(part, n - first_query) if rows else 0
        floats, integers = np.dtype(np.float64), np.dtype(np.int64)
        return {
            "ranks": (floats, (queries, self._search.k)),
            "candidates": (integers, (queries, self._search.k)),
            "distances": (self._distances.dtype, (first_query, self._search.k)),
            "indices": (integers, (first_query, self._search.k)),
        }

    @property
    def fraction(self) -> float:
        """The finished share of the work; 0.0 if the number of references is unknown."""
        first, block = self._at
        stop = min(first + self._plan.queries, self._queries.rows)
        return self._share(first, stop, block.rows if block is not None else 0)

    def _share(self, first: int, stop: int, rows: int) -> float:
        """Return the share of the work: queries before ``first``, then those to ``stop`` with ``rows`` references."""
        whole = self._references.rows
        if not whole:  # none, or an unknown number
            return 0.0
        return (first * whole + (stop - first) * rows) / max(1, self._queries.rows * whole)

    def run(self, progress: Report | None, after_block: Callable[[], None] | None = None) -> tuple[Array, Array]:
        """Return distances and indices, both ``(n, k)``, after searching to the end.

        Args:
            progress: called with the finished fraction; 0.0 until the end if the number of references is unknown.
            after_block: called between two blocks, when `state` is valid. Blocks are then searched in pieces of about
                a second, since an interrupt loses the piece that it meets.

        Raises:
            ValueError: a row holds a NaN or infinity (the message names it), or there are too few references for ``k``.
        """
        if self._in_parts and self._at == (0, None):
            self._check_queries()
        found = self._distances, self._indices
        if self._in_parts:
            while self._at[0] < self._queries.rows:
                self._run_block(progress, after_block)
        else:
            found = self._run_block(progress, after_block)
        if progress is not None:
            progress(1.0)
        return found

    def _run_block(self, progress: Report | None, after_block: Callable[[], None] | None) -> tuple[Array, Array]:
        first, block = self._at
        if block is None:
            block = self._begin(first)
            self._at = (first, block)
        stop = min(first + self._plan.queries, self._queries.rows)
        if isinstance(self._references, Stream):
            self._add_behind(self._references, block, progress)
        else:
            with contextlib.closing(
                self._references.blocks(block.rows, self._plan.references, self.dtype_name)
            ) as blocks:
                pieces = blocks if after_block is None else self._pieces(blocks, stop - first)
                for rows in pieces:
                    block.add(rows, progress=self._part_of(progress, first, stop, block.rows, len(rows)))
                    if after_block is not None:
                        after_block()
        found: tuple[Array, Array] = block.result()
        if self._in_parts:
            self._distances[first:stop], self._indices[first:stop] = found
            self._at = (stop, None)
        return found

    def _pieces(self, blocks: Iterable[Array], queries: int) -> Iterator[Array]:
        """Yield the rows of the blocks in pieces, each of a size for which the next is requested after about a second.

        The first piece is small, the others at most twice as large as the one before.
        """
        size = max(1, FIRST_WORK // max(1, queries * self._queries.dimension))
        for block in blocks:
            at = 0
            while at < len(block):
                start = time.monotonic()
                yield block[at : at + size]
                at += size
                seconds = max(time.monotonic() - start, 1e-9)
                size = max(1, int(size * min(2.0, max(0.5, _PIECE_SECONDS / seconds))))

    def _begin(self, first: int) -> _core.BlockSearch:
        stop = min(first + self._plan.queries, self._queries.rows)
        return _core.BlockSearch(
            self._queries.take(first, stop, self.dtype_name),
            self._search.k,
            self._search.metric,
            exclude_self=self._search.exclude_self,
            first_query=first,
            bfloat16=self.dtype_name == "bfloat16",
            num_threads=self._search.num_threads,
            p=self._search.p,
        )

    def _add_behind(self, references: Stream, block: _core.BlockSearch, progress: Report | None) -> None:
        """Search each block on another thread while this thread makes the next one."""
        stopped, latest = threading.Event(), 0.0

        def add(rows: Array) -> None:
            part = self._part_of(tell, 0, self._queries.rows, block.rows, len(rows))
            block.add(rows, progress=part)

        def tell(fraction: float) -> None:
            nonlocal latest
            latest = fraction
            if stopped.is_set():
                raise InterruptedError("the calling thread has abandoned this search")

        def finish(searched: Call[None]) -> None:
            while progress is not None and not searched.wait(_SECONDS):
                progress(latest)
            searched.result()
            if progress is not None:
                progress(latest)

        searched = None
        try:
            for rows in references.blocks(self._plan.references, self.dtype_name):
                if searched is not None:
                    finish(searched)
                searched = Call(add, rows)
            if searched is not None:
                finish(searched)
        finally:
            stopped.set()
            if searched is not None:
                searched.join()

    def _part_of(self, progress: Report | None, first: int, stop: int, done: int, count: int) -> Report | None:
        """Return the progress function for a block of references, as a part of the whole work."""
        return part_of(progress, self._share(first, stop, done), self._share(first, stop, done + count))

    def _check_queries(self) -> None:
        """Check all queries before the search, so that an error names the row number among all queries."""
        dtype_name, start = self._queries.dtype_name, 0
        step = rows_in(PIECE_BYTES, self._queries.dimension * 8)
        with contextlib.closing(self._queries.blocks(0, step, dtype_name)) as blocks:
            for block in blocks:
                # A bfloat16 whose exponent bits are all ones is not finite.
                bad = (block & 0x7F80) == 0x7F80 if dtype_name == "bfloat16" else ~np.isfinite(block)
                if bad.any():
                    row, column = (int(i) for i in np.argwhere(bad)[0])
                    value = converted(Matrix(block[row : row + 1], dtype_name == "bfloat16"), "float64")
                    name = str(value[0, column]).replace("nan", "NaN")
                    raise ValueError(f"query must be finite, got {name} in row {start + row}, column {column}")
                start += len(block)


def knn(
    query: Any,
    reference: Any,
    k: int | None,
    *,
    metric: str,
    p: float | None,
    exclude_self: bool,
    num_threads: int | None,
    max_memory: int | None,
    progress: Report | None,
) -> tuple[Array, Array]:
    """Return the result of `exactknn.knn`, searched in blocks.

    The arguments are those of `exactknn.knn`, checked; ``max_memory`` in bytes, None for no limit. Queries may be
    arrays of any layout; so may references, unless they are blocks of rows (`is_blocks`).

    Raises:
        TypeError, ValueError: as `exactknn.knn`.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(reference, Generator):
            stack.callback(reference.close)
        queries = _array_rows(query, "query")
        references: Rows | Stream
        if reference is None:
            references = queries
        elif is_blocks(reference):
            references = Stream(reference, "reference")
        else:
            references = _array_rows(reference, "reference")
        if k is None:
            if references.rows is None:
                raise ValueError("k must be a number if the reference is an iterable of unknown length, got None")
            k = max(references.rows - exclude_self, 0)
        search = Search(k, metric, p, exclude_self, num_threads)
        check_shapes(queries, references, search)
        plan = plan_blocks(queries, references, search, max_memory)
        return ResumableSearch(queries, references, search, plan).run(progress)


def _array_rows(values: Any, name: str) -> ArrayRows:
    array, bfloat16 = as_view(values, name)
    return ArrayRows(array, array.dtype.newbyteorder("="), bfloat16)
