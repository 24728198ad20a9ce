"""A state machine over `Index` and searches in blocks, compared with a NumPy model.

Rows hold small integers, so that NumPy computes every value exactly, and most values are tied.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import exactknn

TARGET = "index_machine"
METRICS = ("sqeuclidean", "inner_product", "cityblock", "chebyshev")
DTYPES = ("float32", "float64", "float16")

seeds = st.integers(0, 2**32 - 1)


def values(metric: str, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The value of each pair, exact since the numbers are small integers."""
    left, right = query.astype(np.float64)[:, None], rows.astype(np.float64)[None]
    if metric == "inner_product":
        return (left * right).sum(axis=2)
    differences = np.abs(left - right)
    if metric == "sqeuclidean":
        return (differences**2).sum(axis=2)
    return differences.sum(axis=2) if metric == "cityblock" else differences.max(axis=2)


class Machine(RuleBasedStateMachine):
    """An index, and the rows that it should hold."""

    @initialize(metric=st.sampled_from(METRICS), dtype=st.sampled_from(DTYPES), dim=st.integers(1, 9))
    def start(self, metric: str, dtype: str, dim: int) -> None:
        self.metric, self.dtype, self.dim = metric, dtype, dim
        self.index = exactknn.Index(metric)
        self.rows = np.empty((0, dim), dtype)
        self.folder = tempfile.TemporaryDirectory(prefix="exactknn-fuzz-")

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            del self.index
            self.folder.cleanup()

    def _integers(self, count: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(-2, 3, (count, self.dim)).astype(self.dtype)

    def _query(self, count: int, exclude_self: bool, seed: int) -> tuple[np.ndarray, bool]:
        if exclude_self and len(self.rows) > 0:
            return self.rows[:count], True
        return self._integers(count, seed), False

    def _order(self, query: np.ndarray, exclude_self: bool) -> tuple[list[np.ndarray], np.ndarray]:
        """For each query the rows in the order of a search, and the values of all pairs."""
        found = values(self.metric, query, self.rows)
        signed = -found if self.metric == "inner_product" else found
        orders = [np.lexsort((np.arange(len(self.rows)), row)) for row in signed]
        return [order[order != i] if exclude_self else order for i, order in enumerate(orders)], found

    def _output(self) -> type:
        return np.float64 if self.dtype == "float64" else np.float32

    def _assert_neighbours(self, found: Any, query: np.ndarray, k: int, exclude_self: bool) -> None:
        orders, exact = self._order(query, exclude_self)
        distances, indices = found
        assert distances.dtype == self._output()
        for i, order in enumerate(orders):
            assert indices[i].tolist() == order[:k].tolist()
            assert distances[i].tolist() == exact[i, order[:k]].tolist()

    # --- changes -----------------------------------------------------------------------------------------------------

    @rule(count=st.one_of(st.integers(0, 40), st.sampled_from((300, 8191, 8192, 9000))), seed=seeds)
    def add(self, count: int, seed: int) -> None:
        if len(self.rows) + count > 30_000:
            return
        rows = self._integers(count, seed)
        self.index.add(rows)
        self.rows = np.concatenate([self.rows, rows])

    @rule(seed=seeds, share=st.sampled_from((0.0, 0.01, 0.5, 1.0)))
    def remove(self, seed: int, share: float) -> None:
        mask = np.random.default_rng(seed).random(len(self.rows)) < share
        self.index.remove(mask)
        self.rows = self.rows[~mask]

    @rule()
    def reset(self) -> None:
        self.index.reset()
        self.rows = self.rows[:0]

    @rule(bad=st.sampled_from((np.nan, np.inf)), count=st.integers(1, 20))
    def add_refused(self, bad: float, count: int) -> None:
        rows = self._integers(count, 0)
        rows[-1, -1] = bad
        try:
            self.index.add(rows)
        except ValueError as error:
            assert f"row {count - 1}" in str(error)
        else:
            raise AssertionError("a row that is not finite was added")

    # --- copies ------------------------------------------------------------------------------------------------------

    @rule(mmap=st.booleans(), name=st.sampled_from(("a", "b")))
    def save_and_load(self, mmap: bool, name: str) -> None:
        if self.index.dim is None:
            return
        path = Path(self.folder.name) / name
        self.index.save(path)
        self.index = exactknn.Index.load(path, mmap=mmap)

    @rule(how=st.sampled_from(("copy", "deepcopy", "pickle")))
    def copy(self, how: str) -> None:
        if how == "pickle":
            self.index = pickle.loads(pickle.dumps(self.index))
        else:
            self.index = copy.copy(self.index) if how == "copy" else copy.deepcopy(self.index)

    # --- questions ---------------------------------------------------------------------------------------------------

    @rule(start=st.integers(0, 10_000), length=st.integers(0, 10_000))
    def look(self, start: int, length: int) -> None:
        assert len(self.index) == len(self.rows)
        if self.index.dim is None:
            return
        start = min(start, len(self.rows))
        stop = min(start + length, len(self.rows))
        assert np.array_equal(self.index.rows(start, stop), self.rows[start:stop])

    @rule(count=st.integers(0, 40), k=st.integers(0, 12), whole=st.booleans(), exclude_self=st.booleans(), seed=seeds)
    def search(self, count: int, k: int, whole: bool, exclude_self: bool, seed: int) -> None:
        query, exclude_self = self._query(count, exclude_self, seed)
        if whole:
            query, most = query[:2], None
        most = len(self.rows) - exclude_self
        k = most if whole else min(k, most)
        found = self.index.search(query, None if whole else k, exclude_self=exclude_self)
        self._assert_neighbours(found, query, k, exclude_self)

    @rule(count=st.integers(0, 40), r=st.integers(-3, 12), exclude_self=st.booleans(), sort=st.booleans(), seed=seeds)
    def radius(self, count: int, r: int, exclude_self: bool, sort: bool, seed: int) -> None:
        query, exclude_self = self._query(count, exclude_self, seed)
        indptr, indices, distances = self.index.radius(query, r, exclude_self=exclude_self, sort=sort)
        orders, exact = self._order(query, exclude_self)
        for i, order in enumerate(orders):
            inside = exact[i, order] >= r if self.metric == "inner_product" else exact[i, order] <= r
            wanted = order[inside] if sort else np.sort(order[inside])
            here = slice(indptr[i], indptr[i + 1])
            assert indices[here].tolist() == wanted.tolist()
            assert distances[here].tolist() == exact[i, wanted].tolist()

    @rule(count=st.integers(0, 10), most=st.integers(0, 60), exclude_self=st.booleans(), seed=seeds)
    def ranks(self, count: int, most: int, exclude_self: bool, seed: int) -> None:
        query, exclude_self = self._query(count, exclude_self, seed)
        random = np.random.default_rng(seed)
        lists = [random.permutation(len(self.rows))[: random.integers(0, most + 1)] for _ in query]
        indptr, ranks = self.index.ranks(query, lists, exclude_self=exclude_self)
        orders, _ = self._order(query, exclude_self)
        for (a, b), order, wanted in zip(itertools.pairwise(indptr), orders, lists, strict=True):
            assert ranks[a:b].tolist() == (np.flatnonzero(np.isin(order, wanted)) + 1).tolist()

    @rule(
        count=st.integers(1, 30),
        k=st.integers(1, 8),
        sizes=st.lists(st.integers(0, 9000), max_size=4),
        memory=st.sampled_from((None, 60_000, 300_000)),
        seed=seeds,
    )
    def knn_of_blocks(self, count: int, k: int, sizes: list[int], memory: int | None, seed: int) -> None:
        if len(self.rows) == 0:
            return
        query, k = self._integers(count, seed), min(k, len(self.rows))

        def blocks() -> Iterator[np.ndarray]:
            start = 0
            for size in [*sizes, len(self.rows)]:
                yield self.rows[start : start + size]
                start += size

        options = {"metric": self.metric}
        self._assert_neighbours(exactknn.knn(query, blocks(), k, **options), query, k, False)
        try:
            found = exactknn.knn(query, self.rows, k, max_memory=memory, **options)
        except ValueError as error:
            assert memory is not None and "max_memory" in str(error), error
        else:
            self._assert_neighbours(found, query, k, False)


def run(seed: int, examples: int, steps: int) -> None:
    """Run histories from a seed."""
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
    )
    # A class of its own: the seed is stored in it.
    run_state_machine_as_test(hypothesis.seed(seed)(type("Machine", (Machine,), {})), settings=settings)


def case(seed: int) -> int:
    """Run some histories; return their number."""
    run(seed, examples=20, steps=25)
    return 20


if __name__ == "__main__":
    from tests.fuzz.driver import fuzz

    fuzz(TARGET, case)
