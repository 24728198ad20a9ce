"""Consecutive blocks of rows, and how many rows fit in a memory budget."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK_ELEMENTS = 1 << 22
"""Maximum elements of a copy or mask of one block."""


def rows_in(budget: int, row: int) -> int:
    """Return how many rows of this size fit in the budget, at least 1."""
    return max(1, budget // max(1, row))


def blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of consecutive blocks of ``size`` rows, ``count`` rows in all."""
    for start in range(0, count, size):
        yield start, min(start + size, count)


def small_blocks(count: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of blocks of ``columns``-wide rows, small enough for a copy or a mask of a block."""
    return blocks(count, rows_in(BLOCK_ELEMENTS, columns))
