"""Searches of references that do not fit into memory, or come as they are made.

::

    for each block of queries, where not all of them fit        (one block when the references come once only)
        _core.BlockSearch(queries)
        for each block of references  <── the next one is read, or made by an iterable, meanwhile (_rows)
            add ──> the k nearest so far      (between two blocks: state, a checkpoint)
        result ──> rows of (distances, indices)

The bytes of the result do not depend on the blocks: the core orders all rows by value and row number, and the k first
of all rows are the k first of those of each part.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from exactknn import _core, _rows
from exactknn._arrays.dtypes import Matrix, common_dtype, converted
from exactknn._arrays.matrix import as_view, is_blocks
from exactknn._neighbours import without_self
from exactknn._progress import Report, part_of

BLOCK_BYTES = 1 << 27
"""Bytes of a block of references at most: larger ones take more memory and save no time."""
BLOCK_WORK = 1 << 43
"""Multiply-adds of a block of references with all queries at most: about what an interrupt may lose."""
LEAST_ROWS = 1 << 12
"""Rows of a block of references that are worth the hand-over from one block to the next."""
LEAST_BYTES = 1 << 22
"""The same for long rows."""
FIXED_BYTES = 48 << 20
"""What a search takes beside its blocks: candidates of the running tasks, packed queries, pieces of files."""
_SECONDS = 0.04
"""Time between two reports while another thread searches, as the core's own."""
_PACKED_BYTES = 4
"""The filter's copy of a value: float32 at most."""
_TERM_BYTES = 64
"""Norms and the like that go with a packed row."""
_CANDIDATE_BYTES = 32
"""A neighbour that the core keeps, its rank in float64 and its row, before and after a block."""

Array = npt.NDArray[Any]


class Search(NamedTuple):
    """What to look for."""

    k: int
    metric: str
    p: float | None
    exclude_self: bool
    num_threads: int | None


class Plan(NamedTuple):
    """How many rows are looked at together."""

    queries: int
    references: int


class State(NamedTuple):
    """A search between two blocks."""

    first_query: int
    """Where the block of queries begins that is being searched; all before it are done."""
    rows: int
    """References that it has been held against."""
    ranks: Array
    """Its `_core.BlockSearch.state`: (queries, k), or (0, k) where `rows` is 0."""
    candidates: Array
    distances: Array
    """The result of the queries that are done: (first_query, k)."""
    indices: Array


class LargeSearch:
    """A search in blocks, which can be left between two of them and continued later.

    Args:
        queries: the queries.
        references: what is searched; `_rows.Stream` where it can be gone through once only.
        search: what to look for. Its ``k`` is at most the number of references, if that is known.
        plan: from `plan`.
    """

    def __init__(self, queries: _rows.Rows, references: _rows.Rows | _rows.Stream, search: Search, plan: Plan) -> None:
        self.dtype_name = _common_dtype(queries, references)
        self._queries = queries
        self._references = references
        self._search = search
        self._plan = plan
        self._in_parts = plan.queries < queries.rows
        # Query i of a block is not row i of the references, but of k + 1 neighbours one at most is the query itself.
        self.block_k = search.k + 1 if self._in_parts and search.exclude_self else search.k
        shape = (queries.rows if self._in_parts else 0, search.k)
        self._distances = np.empty(shape, _value_dtype(self.dtype_name))
        self._indices = np.empty(shape, np.int64)
        # Together, so that an interrupt finds both or neither changed.
        self._at: tuple[int, _core.BlockSearch | None] = (0, None)

    def state(self) -> State:
        """Return what `restore` needs, good until the search goes on."""
        first, block = self._at
        done = self._distances[:first], self._indices[:first]
        if block is None or block.rows == 0:
            return State(first, 0, np.empty((0, self.block_k)), np.empty((0, self.block_k), np.int64), *done)
        return State(first, block.rows, *block.state(), *done)

    def restore(self, state: State) -> None:
        """Go on from the state of such a search that had the same arguments."""
        self._distances[: state.first_query] = state.distances
        self._indices[: state.first_query] = state.indices
        block = None
        if state.rows:
            block = self._begin(state.first_query)
            block.restore(state.ranks, state.candidates, state.rows)
        self._at = (state.first_query, block)

    def state_shapes(self, first_query: int, rows: int) -> dict[str, tuple[np.dtype[Any], tuple[int, int]]]:
        """Return type and shape of the arrays of a state at this place.

        Raises:
            ValueError: no search of these queries and references comes there.
        """
        n, part = self._queries.rows, self._plan.queries
        if (
            not 0 <= first_query <= n
            or not 0 <= rows <= (self._references.rows or 0)
            or (first_query % part and first_query < n)
        ):
            raise ValueError(f"query {first_query} and {rows} references are no place where a block ends")
        queries = min(part, n - first_query) if rows else 0
        floats, integers = np.dtype(np.float64), np.dtype(np.int64)
        return {
            "ranks": (floats, (queries, self.block_k)),
            "candidates": (integers, (queries, self.block_k)),
            "distances": (self._distances.dtype, (first_query, self._search.k)),
            "indices": (integers, (first_query, self._search.k)),
        }

    @property
    def fraction(self) -> float:
        """The share of the work that is done, where the number of references is known."""
        first, block = self._at
        stop = min(first + self._plan.queries, self._queries.rows)
        return self._share(first, stop, block.rows if block is not None else 0)

    def _share(self, first: int, stop: int, rows: int) -> float:
        """The share of the work when queries up to ``first`` are done and the next up to ``stop`` have met ``rows``."""
        whole = self._references.rows
        if not whole:  # none, or nobody knows how many
            return 0.0
        return (first * whole + (stop - first) * rows) / max(1, self._queries.rows * whole)

    def run(self, progress: Report | None, after_block: Callable[[], None] | None = None) -> tuple[Array, Array]:
        """Search to the end.

        Args:
            progress: is told the finished fraction; 0.0 until the end where the number of references is not known.
            after_block: is called between two blocks, when `state` is good.

        Raises:
            ValueError: a NaN or an infinity, by its row among all, or fewer references than ``k`` needs.
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
        if isinstance(self._references, _rows.Stream):
            self._add_behind(self._references, block, progress)
        else:
            with contextlib.closing(
                self._references.blocks(block.rows, self._plan.references, self.dtype_name)
            ) as blocks:
                for rows in blocks:
                    block.add(rows, progress=self._part_of(progress, first, stop, block.rows, len(rows)))
                    if after_block is not None:
                        after_block()
        found: tuple[Array, Array] = block.result()
        if self._in_parts:
            if self._search.exclude_self:
                found = without_self(*found, first)
            self._distances[first:stop], self._indices[first:stop] = found
            self._at = (stop, None)
        return found

    def _begin(self, first: int) -> _core.BlockSearch:
        stop = min(first + self._plan.queries, self._queries.rows)
        return _core.BlockSearch(
            self._queries.take(first, stop, self.dtype_name),
            self.block_k,
            self._search.metric,
            exclude_self=self._search.exclude_self and not self._in_parts,
            bfloat16=self.dtype_name == "bfloat16",
            num_threads=self._search.num_threads,
            p=self._search.p,
        )

    def _add_behind(self, references: _rows.Stream, block: _core.BlockSearch, progress: Report | None) -> None:
        """Search each block on another thread while this one makes the next."""
        stopped, latest = threading.Event(), 0.0

        def add(rows: Array) -> None:
            part = self._part_of(tell, 0, self._queries.rows, block.rows, len(rows))
            block.add(rows, progress=part)

        def tell(fraction: float) -> None:
            nonlocal latest
            latest = fraction
            if stopped.is_set():
                raise InterruptedError("nobody waits for this search any more")

        def finish(searched: Future[None]) -> None:
            while progress is not None and not wait([searched], _SECONDS).done:
                progress(latest)
            searched.result()
            if progress is not None:
                progress(latest)

        with ThreadPoolExecutor(1, "exactknn-search") as thread:
            try:
                searched = None
                for rows in references.blocks(self._plan.references, self.dtype_name):
                    if searched is not None:
                        finish(searched)
                    searched = thread.submit(add, rows)
                if searched is not None:
                    finish(searched)
            finally:
                stopped.set()

    def _part_of(self, progress: Report | None, first: int, stop: int, done: int, count: int) -> Report | None:
        """What to tell of a block of references, which is a part of the work."""
        return part_of(progress, self._share(first, stop, done), self._share(first, stop, done + count))

    def _check_queries(self) -> None:
        """Find a bad query now, and by its number among all, rather than when its block is searched."""
        dtype_name, start = self._queries.dtype_name, 0
        step = max(1, _rows.PIECE_BYTES // max(1, self._queries.dimension * 8))
        with contextlib.closing(self._queries.blocks(0, step, dtype_name)) as blocks:
            for block in blocks:
                # A bfloat16 without its lower bits is not finite when its exponent is all ones.
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
    """Do what `exactknn.knn` promises, in blocks.

    The arguments are those of `exactknn.knn`, checked; ``max_memory`` in bytes, None for no bound. Queries and, unless
    they are blocks of rows (`is_blocks`), references may be arrays of any layout.

    Raises:
        TypeError, ValueError: as `exactknn.knn`.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(reference, Generator):
            stack.callback(reference.close)
        queries = _array_rows(query, "query")
        references: _rows.Rows | _rows.Stream
        if reference is None:
            references = queries
        elif is_blocks(reference):
            references = _rows.Stream(reference, "reference")
        else:
            references = _array_rows(reference, "reference")
        if k is None:
            if references.rows is None:
                raise ValueError("k must be a number where the reference is an iterable of unknown length, got None")
            k = max(references.rows - exclude_self, 0)
        search = Search(k, metric, p, exclude_self, num_threads)
        check_shapes(queries, references, search)
        return LargeSearch(queries, references, search, plan(queries, references, search, max_memory)).run(progress)


def check_shapes(queries: _rows.Rows, references: _rows.Rows | _rows.Stream, search: Search) -> None:
    """Refuse what no rows can make good, in the words of the core.

    Raises:
        ValueError: the dimensions differ, or the references are known to be too few.
    """
    if references.dimension not in (None, queries.dimension):
        raise ValueError(
            "query and reference must have the same number of columns, "
            f"got {queries.dimension} and {references.dimension}"
        )
    k, rows = search.k, references.rows
    if rows is None:  # the core refuses at the end
        return
    if search.exclude_self and rows < queries.rows:
        raise ValueError(
            "the reference must begin with the queries when self is excluded: "
            f"wanted at least {queries.rows} references, got {rows}"
        )
    if k > rows:
        raise ValueError(f"k must be at most the number of references, got k={k} with {rows} references")
    if search.exclude_self and k > 0 and k == rows:
        raise ValueError(
            f"k must be at most the number of references without the query itself, got k={k} with {rows} references"
        )


def plan(
    queries: _rows.Rows,
    references: _rows.Rows | _rows.Stream,
    search: Search,
    max_memory: int | None,
    *,
    held: int = 0,
    keeps_state: bool = False,
) -> Plan:
    """Choose blocks with which the search keeps within ``max_memory`` bytes.

    Args:
        queries: the queries.
        references: what is searched.
        search: what to look for.
        max_memory: bytes that may be taken beside what the caller holds already; None: no bound.
        held: bytes of them that are taken already.
        keeps_state: whether `LargeSearch.state` is going to be asked for.

    Raises:
        ValueError: not even the smallest blocks fit; says how many bytes are needed.
    """
    dtype_name = _common_dtype(queries, references)
    n, k, dimension = queries.rows, search.k, queries.dimension
    once = isinstance(references, _rows.Stream)
    row = max(1, dimension * _rows.dtype_of(dtype_name).itemsize)
    most = min(max(1, BLOCK_BYTES // row), max(LEAST_ROWS, BLOCK_WORK // max(1, n * dimension)))
    if references.rows is not None:
        most = min(most, max(1, references.rows))
    if max_memory is None:
        return Plan(max(1, n), most)

    reference_bytes = references.buffers(dtype_name) * row + _PACKED_BYTES * dimension + _TERM_BYTES
    result_bytes = np.dtype(np.int64).itemsize + _value_dtype(dtype_name).itemsize
    candidate_bytes = _CANDIDATE_BYTES * (2 if keeps_state else 1)
    query_bytes = (row if queries.buffers(dtype_name) else 0) + candidate_bytes * k
    # The result of a part of the queries is copied to that of all; one more candidate may be the query itself.
    part_bytes = query_bytes + candidate_bytes + result_bytes * (k + 1)

    least = max(1, min(most, LEAST_ROWS, LEAST_BYTES // row))
    fixed = FIXED_BYTES + held + n * k * result_bytes + least * reference_bytes
    if fixed + n * query_bytes <= max_memory:
        part, taken = max(1, n), n * query_bytes
    elif not once and fixed + part_bytes <= max_memory:
        parts = math.ceil(n / ((max_memory - fixed) // part_bytes))
        part = math.ceil(n / parts)
        taken = part * part_bytes
    else:
        needed = fixed + (n * query_bytes if once else min(n * query_bytes, part_bytes))
        raise ValueError(
            f"max_memory must be at least {needed} bytes for this search, got {max_memory}; "
            f"its result alone, {n} queries with k={k}, takes {n * k * result_bytes}"
        )
    return Plan(part, min(most, least + (max_memory - fixed - taken) // reference_bytes))


def _array_rows(values: Any, name: str) -> _rows.ArrayRows:
    array, bfloat16 = as_view(values, name)
    return _rows.ArrayRows(array, array.dtype.newbyteorder("="), bfloat16)


def _common_dtype(queries: _rows.Rows, references: _rows.Rows | _rows.Stream) -> str:
    return common_dtype(queries.dtype_name, references.dtype_name or queries.dtype_name)


def _value_dtype(dtype_name: str) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype_name == "float64" else np.float32)
