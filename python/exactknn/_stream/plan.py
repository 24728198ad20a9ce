"""What a search in blocks looks for, and blocks of queries and references that keep it within a bound of memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from exactknn._arrays.dtypes import common_dtype
from exactknn._arrays.sizes import check_sizes
from exactknn._stream.rows import Rows, Stream, dtype_of

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

_PACKED_BYTES = 4
"""The filter's copy of a value: float32 at most."""

_TERM_BYTES = 64
"""Norms and the like that go with a packed row."""

_CANDIDATE_BYTES = 32
"""A neighbour that the core keeps, its rank in float64 and its row, before and after a block."""


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


def check_shapes(queries: Rows, references: Rows | Stream, search: Search) -> None:
    """Refuse what no rows can make good, in the words of the core.

    Raises:
        ValueError: the dimensions differ, or the references are known to be too few.
    """
    if references.dimension not in (None, queries.dimension):
        raise ValueError(
            "query and reference must have the same number of columns, "
            f"got {queries.dimension} and {references.dimension}"
        )
    if references.rows is not None:  # else the core refuses at the end
        check_sizes(queries.rows, references.rows, search.k, search.exclude_self)


def plan_blocks(
    queries: Rows,
    references: Rows | Stream,
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
        keeps_state: whether `ResumableSearch.state` is going to be asked for.

    Raises:
        ValueError: not even the smallest blocks fit; says how many bytes are needed.
    """
    dtype_name = common_dtype_of(queries, references)
    n, k, dimension = queries.rows, search.k, queries.dimension
    once = isinstance(references, Stream)
    row = max(1, dimension * dtype_of(dtype_name).itemsize)
    most = min(max(1, BLOCK_BYTES // row), max(LEAST_ROWS, BLOCK_WORK // max(1, n * dimension)))
    if references.rows is not None:
        most = min(most, max(1, references.rows))
    if max_memory is None:
        return Plan(max(1, n), most)

    reference_bytes = references.buffers(dtype_name) * row + _PACKED_BYTES * dimension + _TERM_BYTES
    result_bytes = np.dtype(np.int64).itemsize + value_dtype(dtype_name).itemsize
    candidate_bytes = _CANDIDATE_BYTES * (2 if keeps_state else 1)
    query_bytes = (row if queries.buffers(dtype_name) else 0) + candidate_bytes * k
    # The result of a part of the queries is copied to that of all.
    part_bytes = query_bytes + result_bytes * k

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


def common_dtype_of(queries: Rows, references: Rows | Stream) -> str:
    return common_dtype(queries.dtype_name, references.dtype_name or queries.dtype_name)


def value_dtype(dtype_name: str) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype_name == "float64" else np.float32)
