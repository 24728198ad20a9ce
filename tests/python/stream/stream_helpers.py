"""Rows and helpers that the tests of this folder share."""

from __future__ import annotations

import threading

import numpy as np


def rows(count: int, dimension: int, dtype: str = "f4", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dimension)).astype(dtype)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("exactknn")]


def assert_same(found, expected) -> None:
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert left.tobytes() == right.tobytes()


def blocks_of(matrix, sizes):
    start = 0
    for size in sizes:
        yield matrix[start : start + size]
        start += size
    yield matrix[start:]


def mapped(folder, array, mode="r"):
    np.save(folder / "x.npy", array)
    return np.load(folder / "x.npy", mmap_mode=mode)
