"""``_core.ranks`` against the whole ranking that ``exactknn.knn(k=None)`` sorts, and its refusals."""

import signal

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exactknn
from exactknn import _core

METRICS = ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev")


def rows(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def groups(query_labels, reference_labels):
    """The rows of each label as a group, and the group of each query."""
    names, codes = np.unique(np.concatenate([reference_labels, query_labels]), return_inverse=True)
    reference_codes, query_codes = codes[: len(reference_labels)], codes[len(reference_labels) :]
    counts = np.bincount(reference_codes, minlength=len(names))
    return {
        "query_group": query_codes.astype(np.int64),
        "group_offsets": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        "group_rows": np.argsort(reference_codes, kind="stable").astype(np.int64),
    }


def by_sorting(query, reference, metric, *, query_group, group_offsets, group_rows, first_row=None):
    """Sort all references of each query and look its targets up."""
    _, indices = exactknn.knn(query, reference, k=None, metric=metric)
    offsets, ranks = [0], []
    for i, order in enumerate(indices):
        group = query_group[i]
        if first_row is not None:
            order = order[order != first_row + i]
        found = np.flatnonzero(np.isin(order, group_rows[group_offsets[group] : group_offsets[group + 1]]))
        ranks.append(found + 1)
        offsets.append(offsets[-1] + len(found))
    return np.array(offsets), np.concatenate([np.zeros(0, np.int64), *ranks])


def same(found, wanted):
    return all(x.dtype == np.int64 and x.tolist() == y.tolist() for x, y in zip(found, wanted, strict=True))


def test_small_values_by_hand():
    reference = np.array([[0.0], [1], [3], [6], [-1]], np.float32)
    query = np.array([[0.0], [6]], np.float32)
    # From 0: rows 0, 1 and 4 (both at 1, the lower row first), 2, 3. From 6: 3, 2, 1, 0, 4.
    targets = {
        "query_group": np.array([1, 0]),
        "group_offsets": np.array([0, 2, 5]),
        "group_rows": np.array([4, 0, 3, 4, 1]),
    }
    offsets, ranks = _core.ranks(query, reference, "sqeuclidean", **targets)
    assert offsets.tolist() == [0, 3, 5]
    assert ranks.tolist() == [2, 3, 5, 4, 5]
    assert (offsets.dtype, ranks.dtype) == (np.int64, np.int64)


def test_self_is_not_counted_and_has_no_rank():
    x = np.array([[0.0], [2], [3]], np.float32)
    targets = {"query_group": np.zeros(3, int), "group_offsets": np.array([0, 2]), "group_rows": np.array([0, 2])}
    # Row 0: only row 2 is left, behind row 1. Row 1: row 2, then row 0. Row 2: row 0 behind row 1.
    offsets, ranks = _core.ranks(x, None, "euclidean", exclude_self=True, **targets)
    assert (offsets.tolist(), ranks.tolist()) == ([0, 1, 3, 4], [2, 1, 2, 2])
    targets["query_group"] = np.zeros(2, int)
    offsets, ranks = _core.ranks(x[1:], x, "euclidean", exclude_self=True, first_query=1, **targets)
    assert (offsets.tolist(), ranks.tolist()) == ([0, 2, 3], [1, 2, 2])
    offsets, ranks = _core.ranks(x[1:], x, "euclidean", **targets)
    assert (offsets.tolist(), ranks.tolist()) == ([0, 2, 4], [2, 3, 1, 3])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_equals_the_sorted_ranking_at_every_level(metric, dtype, level):
    x = rows(400, 19).astype(dtype)
    given, bfloat16 = (x.view(np.uint16), True) if dtype == ml_dtypes.bfloat16 else (x, False)
    for classes in (1, 3, 60, 400):
        labels = np.random.default_rng(1).integers(0, classes, 400)
        targets = groups(labels, labels)
        found = _core.ranks(given, None, metric, exclude_self=True, bfloat16=bfloat16, **targets)
        assert same(found, by_sorting(x, x, metric, first_row=0, **targets))
        targets = groups(labels[100:160], labels)
        found = _core.ranks(
            given[100:160], given, metric, exclude_self=True, first_query=100, bfloat16=bfloat16, **targets
        )
        assert same(found, by_sorting(x[100:160], x, metric, first_row=100, **targets))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 60),
    m=st.integers(1, 400),
    d=st.integers(1, 20),
    classes=st.integers(1, 40),
    step=st.sampled_from([0.25, 1.0, 1e-30]),
    offset=st.sampled_from([0.0, 100.0, -1e4]),
    metric=st.sampled_from(METRICS),
)
def test_ties_and_offsets(seed, n, m, d, classes, step, offset, metric):
    random = np.random.default_rng(seed)
    query, reference = ((random.integers(-2, 3, (size, d)) * step + offset).astype(np.float32) for size in (n, m))
    targets = groups(random.integers(0, classes, n), random.integers(0, classes, m))
    assert same(_core.ranks(query, reference, metric, **targets), by_sorting(query, reference, metric, **targets))


def test_rows_far_from_the_origin(level):
    x = (100 + 0.01 * rows(700, 32)).astype(np.float32)
    for classes in (3, 100):
        labels = np.arange(700) % classes
        targets = groups(labels, labels)
        found = _core.ranks(x, None, "sqeuclidean", exclude_self=True, **targets)
        assert same(found, by_sorting(x, x, "sqeuclidean", first_row=0, **targets))


def test_minkowski():
    x = rows(300, 6)
    labels = np.arange(300) % 30
    targets = groups(labels, labels)
    for p in (0.5, 3, 2.7):
        found = _core.ranks(x, None, "minkowski", p=p, exclude_self=True, **targets)
        _, indices = exactknn.knn(x, k=None, metric="minkowski", p=p)
        wanted = np.nonzero(labels[indices] == labels[:, None])[1] + 1
        assert found[1].tolist() == wanted.tolist()


@pytest.mark.parametrize("classes", [4, 300])
def test_threads_and_batches_change_nothing(classes, level):
    x = rows(1500, 24).astype(np.float32)
    labels = np.arange(1500) % classes
    targets = groups(labels, labels)
    wanted = _core.ranks(x, None, "cosine", exclude_self=True, num_threads=1, **targets)
    for threads in (2, 3):
        assert same(_core.ranks(x, None, "cosine", exclude_self=True, num_threads=threads, **targets), wanted)
    for size in (1, 7, 500):
        for first in (0, 1000):
            targets["query_group"] = labels[first : first + size]
            offsets, ranks = _core.ranks(
                x[first : first + size], x, "cosine", exclude_self=True, first_query=first, **targets
            )
            places = wanted[0][first : first + size + 1]
            assert offsets.tolist() == (places - places[0]).tolist()
            assert ranks.tolist() == wanted[1][places[0] : places[-1]].tolist()


def test_no_queries_no_references_no_targets():
    none, some = np.zeros((0, 3)), np.ones((2, 3))
    empty, one = np.zeros(0, np.int64), np.zeros(1, np.int64)
    for query, reference in [(none, none), (none, some), (some, none), (some, some), (some, None)]:
        offsets, ranks = _core.ranks(
            query,
            reference,
            "cosine",
            query_group=np.zeros(len(query), np.int64),
            group_offsets=np.zeros(2, np.int64),
            group_rows=empty,
        )
        assert offsets.tolist() == [0] * (len(query) + 1)
        assert (ranks.size, ranks.dtype) == (0, np.int64)
    offsets, _ = _core.ranks(none, some, "cosine", query_group=empty, group_offsets=one, group_rows=empty)
    assert offsets.tolist() == [0]


def test_progress_ends_at_one():
    told = []
    x = rows(3000, 16).astype(np.float32)
    labels = np.arange(3000) % 100
    _core.ranks(x, None, "sqeuclidean", exclude_self=True, progress=told.append, **groups(labels, labels))
    assert told[-1] == 1.0
    assert told == sorted(told)


def test_an_exception_of_the_progress_function_stops_the_search():
    def stop(fraction):
        raise RuntimeError("enough")

    x = rows(20000, 256).astype(np.float32)
    labels = np.arange(20000) % 4
    with pytest.raises(RuntimeError, match="enough"):
        _core.ranks(x, None, "sqeuclidean", exclude_self=True, progress=stop, **groups(labels, labels))


def test_an_interrupt_stops_the_search():
    def interrupt(fraction):
        signal.raise_signal(signal.SIGINT)

    x = rows(20000, 256).astype(np.float32)
    labels = np.arange(20000) % 4
    with pytest.raises(KeyboardInterrupt):
        _core.ranks(x, None, "sqeuclidean", exclude_self=True, progress=interrupt, **groups(labels, labels))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"query_group": np.zeros(3, np.int64)},
            ValueError,
            "query_group must have one entry for each of the 4 queries",
        ),
        (
            {"query_group": np.array([0, 1, 2, 0])},
            ValueError,
            "query_group must name groups from 0 to below 2, got 2 at",
        ),
        ({"query_group": np.zeros((4, 1), np.int64)}, ValueError, "query_group must have one dimension, got 2"),
        ({"query_group": np.zeros(4, np.int32)}, TypeError, "query_group must be an array of int64 .* got int32"),
        ({"query_group": np.zeros(8, np.int64)[::2]}, ValueError, "query_group must be C-contiguous"),
        ({"group_offsets": np.array([0, 5, 3])}, ValueError, "group_offsets must not fall, got 5 at position 1"),
        ({"group_offsets": np.array([0, 1, 2])}, ValueError, "group_offsets must end with the number of group_rows, 3"),
        ({"group_offsets": np.zeros(0, np.int64)}, ValueError, "group_offsets must begin with 0, got no entries"),
        (
            {"group_rows": np.array([0, 1, 4])},
            ValueError,
            "group_rows must name rows from 0 to below 4, got 4 at position 2",
        ),
        ({"group_rows": np.array([0, 1, -1])}, ValueError, "group_rows must name rows from 0 to below 4, got -1"),
        (
            {"group_rows": np.array([1, 1, 2])},
            ValueError,
            "name a row once in a group, got 1 at position 1 again in group 0",
        ),
        ({"first_query": 1}, ValueError, "reference must hold the queries, row 1 first, when self is excluded"),
        ({"first_query": -1}, ValueError, "first_query must be at least 0, got -1"),
        ({"first_query": 0.5}, TypeError, "first_query must be an integer, got <class 'float'>"),
        ({"first_query": 2**64}, ValueError, "first_query must be below"),
        ({"metric": "manhattan"}, ValueError, "metric must be one of sqeuclidean, "),
        ({"num_threads": 0}, ValueError, "num_threads must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_answered_is_refused(change, error, text):
    good = {
        "metric": "sqeuclidean",
        "query_group": np.array([0, 1, 1, 0]),
        "group_offsets": np.array([0, 2, 3]),
        "group_rows": np.array([0, 1, 2]),
        "exclude_self": True,
    }
    x = rows(4, 2)
    assert _core.ranks(x, None, **good)[0].tolist() == [0, 1, 2, 2, 4]
    with pytest.raises(error, match=text):
        _core.ranks(x, None, **(good | change))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_named(value, level):
    x = rows(500, 5).astype(np.float32)
    bad = x.copy()
    bad[311, 2] = value
    labels = np.arange(500) % 50
    targets = groups(labels, labels)
    with pytest.raises(ValueError, match=r"query must be finite, got .* in row 311, column 2"):
        _core.ranks(bad, None, "cosine", **targets)
    with pytest.raises(ValueError, match=r"reference must be finite, got .* in row 311, column 2"):
        _core.ranks(x, bad, "cosine", **targets)
