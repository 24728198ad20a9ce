"""Times of `exactknn.knn` alone, by pytest-benchmark: `make bench`, or `pytest --benchmark-enable benches`.

Small enough for a check before and after a change (`--benchmark-save NAME`, then `--benchmark-compare`). Each also
checks the result, since a fast wrong result is worthless; `benches.peers` compares with other libraries.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import exactknn
from benches.data import (
    clustered_rows,
    correlated_rows,
    gaussian_rows,
    grid_rows,
    offset_rows,
    squared_distances,
    truth,
)

REFERENCES = 16_384


def check(query: Any, reference: Any, k: int, found: tuple[Any, Any], metric: str = "sqeuclidean") -> None:
    """Compare the first few queries with float64."""
    few = query[:4].astype(np.float32)
    values, ids = truth(few, reference.astype(np.float32), k, metric)
    np.testing.assert_array_equal(found[1][:4], ids)
    np.testing.assert_array_equal(found[0][:4], values)


@pytest.mark.parametrize("k", [1, 10, 100, 1000])
@pytest.mark.parametrize("queries", [1, 8, 32, 256, 2048])
def test_queries_and_k(benchmark: BenchmarkFixture, queries: int, k: int) -> None:
    reference = clustered_rows(REFERENCES, 128, seed=1)
    query = clustered_rows(queries, 128, seed=2)
    check(query, reference, k, benchmark(exactknn.knn, query, reference, k))


@pytest.mark.parametrize("references", [1024, 65_536])
def test_references(benchmark: BenchmarkFixture, references: int) -> None:
    reference = clustered_rows(references, 128, seed=1)
    query = clustered_rows(256, 128, seed=2)
    check(query, reference, 10, benchmark(exactknn.knn, query, reference, 10))


@pytest.mark.parametrize("dimension", [3, 32, 100, 512, 768])
def test_dimension(benchmark: BenchmarkFixture, dimension: int) -> None:
    reference = clustered_rows(REFERENCES, dimension, seed=1)
    query = clustered_rows(256, dimension, seed=2)
    check(query, reference, 10, benchmark(exactknn.knn, query, reference, 10))


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cosine", "inner_product"])
def test_metric(benchmark: BenchmarkFixture, metric: str) -> None:
    reference = clustered_rows(REFERENCES, 128, seed=1)
    query = clustered_rows(256, 128, seed=2)
    found = benchmark(exactknn.knn, query, reference, 10, metric=metric)
    if metric in ("sqeuclidean", "inner_product"):
        check(query, reference, 10, found, metric)
    else:
        # By definition; the tests hold every bit of it to an oracle.
        rows = reference[found[1][:4]].astype(np.float64)
        own = query[:4, None].astype(np.float64)
        distances = np.sqrt(((rows - own) ** 2).sum(axis=2))
        if metric == "cosine":
            lengths = np.linalg.norm(rows, axis=2) * np.linalg.norm(own, axis=2)
            distances = 1 - (rows * own).sum(axis=2) / lengths
        np.testing.assert_allclose(found[0][:4], distances, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtype(benchmark: BenchmarkFixture, dtype: str) -> None:
    reference = clustered_rows(REFERENCES, 128, seed=1).astype(dtype)
    query = clustered_rows(256, 128, seed=2).astype(dtype)
    check(query, reference, 10, benchmark(exactknn.knn, query, reference, 10))


@pytest.mark.parametrize("make", [offset_rows, grid_rows, gaussian_rows], ids=lambda make: make.__name__)
def test_rows_that_are_hard_to_tell_apart(benchmark: BenchmarkFixture, make: Any) -> None:
    reference, query = make(REFERENCES, 128, seed=1), make(256, 128, seed=2)
    check(query, reference, 10, benchmark(exactknn.knn, query, reference, 10))


@pytest.mark.parametrize("k", [1, 10, 100])
def test_against_itself(benchmark: BenchmarkFixture, k: int) -> None:
    rows = correlated_rows(8_192, 128, seed=1)
    distances, indices = benchmark(exactknn.knn, rows, k=k)
    assert (indices != np.arange(len(rows))[:, None]).all()
    np.testing.assert_array_equal(distances[:4], squared_distances(rows[:4], rows, indices[:4]).astype(np.float32))


def test_all_neighbours(benchmark: BenchmarkFixture) -> None:
    rows = clustered_rows(2_048, 64, seed=1)
    found = benchmark(exactknn.knn, rows, k=len(rows) - 1)
    assert (np.diff(found[0], axis=1) >= 0).all()
    np.testing.assert_array_equal(np.sort(found[1][0]), np.arange(1, len(rows)))


def test_each_level(benchmark: BenchmarkFixture, level: str) -> None:
    reference = clustered_rows(REFERENCES, 128, seed=1)
    query = clustered_rows(256, 128, seed=2)
    exactknn.set_simd_level(level)
    try:
        found = benchmark(exactknn.knn, query, reference, 10)
    finally:
        exactknn.set_simd_level(None)
    check(query, reference, 10, found)


@pytest.mark.parametrize("progress", [False, True])
def test_progress(benchmark: BenchmarkFixture, progress: bool) -> None:
    reference = clustered_rows(REFERENCES, 128, seed=1)
    query = clustered_rows(2048, 128, seed=2)
    told: list[float] = []
    report = told.append if progress else None
    check(query, reference, 10, benchmark(exactknn.knn, query, reference, 10, progress=report))
    assert (told[-1:] == [1.0]) == progress


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run `test_each_level` at the levels that this processor has."""
    if "level" in metafunc.fixturenames:
        metafunc.parametrize("level", exactknn.available_simd_levels())
