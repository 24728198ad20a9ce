"""Parameters of a search in blocks, and block sizes that keep it within a memory limit."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from exactknn._arrays.dtypes import common_dtype
from exactknn._arrays.matrix import check_rows
from exactknn._arrays.sizes import check_sizes
from exactknn._stream.rows import Rows, Stream, dtype_of

BLOCK_BYTES = 1 << 27
"""Maximum bytes of a block of references: larger blocks take more memory and save no time."""

BLOCK_WORK = 1 << 43
"""Maximum multiply-adds of a block of references with all queries: about the work that an interrupt may lose."""

LEAST_ROWS = 1 << 12
"""Minimum rows of a block of references, to amortise the overhead per block."""

LEAST_BYTES = 1 << 22
"""Minimum bytes of a block, which limits it to fewer rows where rows are long."""

FIXED_BYTES = 48 << 20
"""Memory of a search besides its blocks: candidates of the running tasks, packed queries, pieces of files."""

_PACKED_BYTES = 4
"""The filter's copy of a value: float32 at most."""

_TERM_BYTES = 64
"""Norms and other terms of a packed row."""

_CANDIDATE_BYTES = 32
"""A neighbour in the core, its rank in float64 and its row, before and after a block."""


class Search(NamedTuple):
    """Parameters of a search."""

    k: int
    metric: str
    p: float | None
    exclude_self: bool
    num_threads: int | None


class Plan(NamedTuple):
    """Rows per block."""

    queries: int
    references: int


def check_shapes(queries: Rows, references: Rows | Stream, search: Search) -> None:
    """Check the dimensions and sizes, with the error messages of the core.

    Raises:
        ValueError: the dimensions differ, or the references are known to be too few or too many.
    """
    check_rows(queries.rows, "query")
    check_rows(references.rows or 0, "reference")
    if references.dimension not in (None, queries.dimension):
        raise ValueError(
            "query and reference must have the same number of columns, "
            f"got {queries.dimension} and {references.dimension}"
        )
    if references.rows is not None:  # else the core checks at the end
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
    """Return block sizes that keep the search within ``max_memory`` bytes.

    Args:
        queries: the queries.
        references: the references.
        search: the parameters of the search.
        max_memory: memory limit in bytes, not counting the arguments of the caller; None: no limit.
        held: bytes of the limit that are already in use.
        keeps_state: whether `ResumableSearch.state` will be called.

    Raises:
        ValueError: not even the smallest blocks fit; the message says how many bytes are needed.
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
    # The result of a block of queries is copied into that of all queries.
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
