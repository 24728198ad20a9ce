"""Consecutive blocks of rows, and how many rows of a block fit into a budget."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK_ELEMENTS = 1 << 22
"""Elements of a copy or mask that is made at once."""


def rows_in(budget: int, row: int) -> int:
    """Return how many rows of this size fit into the budget: at least one."""
    return max(1, budget // max(1, row))


def blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of the consecutive blocks of ``size`` rows that make up ``count``."""
    for start in range(0, count, size):
        yield start, min(start + size, count)


def small_blocks(count: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of blocks of rows of so many columns that a copy or a mask of one block stays small."""
    return blocks(count, rows_in(BLOCK_ELEMENTS, columns))
