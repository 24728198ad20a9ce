"""Times of `exactknn.knn` alone, by pytest-benchmark: `make bench`, or `pytest --benchmark-enable benches`.

Small enough for a check before and after a change (`--benchmark-save NAME`, then `--benchmark-compare`). Each also
looks at the answer, since a fast wrong one is worth nothing; the comparison with other libraries is `benches.peers`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import exactknn
from benches.data import clustered_rows, squared_distances, truth

REFERENCES = 16_384


def check(query: Any, reference: Any, k: int, found: tuple[Any, Any]) -> None:
    """Compare the first few queries with float64."""
    few = query[:4].astype(np.float32)
    values, ids = truth(few, reference.astype(np.float32), k)
    np.testing.assert_array_equal(found[1][:4], ids)
    np.testing.assert_array_equal(found[0][:4], values)


@pytest.mark.parametrize("k", [1, 10, 100])
@pytest.mark.parametrize("queries", [1, 256, 2048])
def test_queries_and_k(benchmark: BenchmarkFixture, queries: int, k: int) -> None:
    reference = clustered_rows(REFERENCES, 128, seed=1)
    query = clustered_rows(queries, 128, seed=2)
    check(query, reference, k, benchmark(exactknn.knn, query, reference, k))


@pytest.mark.parametrize("dimension", [3, 32, 100, 512, 768])
def test_dimension(benchmark: BenchmarkFixture, dimension: int) -> None:
    reference = clustered_rows(REFERENCES, dimension, seed=1)
    query = clustered_rows(256, dimension, seed=2)
    check(query, reference, 10, benchmark(exactknn.knn, query, reference, 10))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtype(benchmark: BenchmarkFixture, dtype: str) -> None:
    reference = clustered_rows(REFERENCES, 128, seed=1).astype(dtype)
    query = clustered_rows(256, 128, seed=2).astype(dtype)
    check(query, reference, 10, benchmark(exactknn.knn, query, reference, 10))


def test_offset_from_the_origin(benchmark: BenchmarkFixture) -> None:
    """Rows at 100 with a spread of 0.01: what centring is for."""
    random = np.random.default_rng(3)
    reference = (100 + 0.01 * random.standard_normal((REFERENCES, 128))).astype(np.float32)
    query = (100 + 0.01 * random.standard_normal((256, 128))).astype(np.float32)
    check(query, reference, 10, benchmark(exactknn.knn, query, reference, 10))


def test_against_itself(benchmark: BenchmarkFixture) -> None:
    rows = clustered_rows(8_192, 128, seed=1)
    distances, indices = benchmark(exactknn.knn, rows, k=10)
    assert (indices != np.arange(len(rows))[:, None]).all()
    np.testing.assert_array_equal(distances[:4], squared_distances(rows[:4], rows, indices[:4]).astype(np.float32))


def test_each_level(benchmark: BenchmarkFixture, level: str) -> None:
    reference = clustered_rows(REFERENCES, 128, seed=1)
    query = clustered_rows(256, 128, seed=2)
    exactknn.set_simd_level(level)
    try:
        found = benchmark(exactknn.knn, query, reference, 10)
    finally:
        exactknn.set_simd_level(None)
    check(query, reference, 10, found)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run `test_each_level` at the levels that this processor has."""
    if "level" in metafunc.fixturenames:
        metafunc.parametrize("level", exactknn.available_simd_levels())
