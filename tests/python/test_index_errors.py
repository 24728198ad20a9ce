"""What an index refuses, its borders, and its copies."""

import copy
import pickle

import numpy as np
import pytest
import torch

import exactknn
from exactknn import Index
from tests.python.index_helpers import DTYPES, SEALED, assert_same, rows


def test_an_index_without_rows():
    index = Index()
    assert (len(index), index.dim, index.dtype, index.nbytes) == (0, None, None, 0)
    distances, indices = index.search(rows(2, 3), None)
    assert distances.shape == indices.shape == (2, 0)
    assert [x.tolist() for x in index.radius(rows(2, 3), 1)] == [[0, 0, 0], [], []]
    with pytest.raises(ValueError, match="k must be at most the number of references, got k=1 with 0"):
        index.search(rows(2, 3), 1)
    index.remove(np.zeros(0, bool))
    with pytest.raises(ValueError, match="mask must have one entry for each of the 0 rows, got 1"):
        index.remove([True])
    with pytest.raises(ValueError, match="no rows to copy"):
        index.rows()
    with pytest.raises(ValueError, match="no rows to save"):
        index.save("never")
    index.add(np.zeros((0, 3), np.float32))
    assert (len(index), index.dim, index.dtype) == (0, 3, "float32")
    assert index.rows().shape == (0, 3)
    with pytest.raises(ValueError, match="same number of columns, got 2 and 3"):
        index.search(rows(2, 2), 0)


def test_removing_every_row_leaves_the_dimension():
    index = Index()
    index.add(rows(10, 3))
    index.remove(np.ones(10, bool))
    assert (len(index), index.dim) == (0, 3)
    index.add(rows(4, 3))
    assert index.search(rows(4, 3), 1)[1].ravel().tolist() == [0, 1, 2, 3]
    index.reset()
    assert (len(index), index.dim, index.nbytes) == (0, None, 0)


def test_train_replaces_all_rows_or_none():
    index = Index()
    index.train(rows(10, 3))
    index.train(rows(5, 2))
    assert (len(index), index.dim) == (5, 2)
    with pytest.raises(ValueError, match="reference must be finite, got NaN in row 1, column 0"):
        index.train([[0.0], [np.nan]])
    assert index.rows().tobytes() == rows(5, 2).tobytes()


def test_rows_come_back_as_they_are_stored():
    index = Index()
    index.add(rows(SEALED, 2))
    index.add(rows(10, 2, seed=1))
    both = np.concatenate([rows(SEALED, 2), rows(10, 2, seed=1)])
    assert index.rows(SEALED - 2, SEALED + 3).tobytes() == both[SEALED - 2 : SEALED + 3].tobytes()
    assert index.rows(SEALED + 10).shape == (0, 2)
    copied = index.rows()
    copied[:] = 0
    assert index.rows().tobytes() == both.tobytes()
    for start, stop in ((3, 2), (0, SEALED + 11), (SEALED + 11, None)):
        with pytest.raises(ValueError, match="rows must lie within the 8202 rows"):
            index.rows(start, stop)
    with pytest.raises(ValueError, match="start must be at least 0, got -1"):
        index.rows(-1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(metric="l2"), ValueError, 'metric must be one of sqeuclidean, .*got "l2"'),
        (dict(metric=None), TypeError, "metric must be a string"),
        (dict(p=3), ValueError, 'p is for metric "minkowski" only'),
        (dict(metric="minkowski", p=0), ValueError, "p must be a number above 0"),
        (dict(metric="minkowski", p="3"), TypeError, "p must be a number"),
        (dict(dtype="int8"), ValueError, "dtype must be float32, float64, float16 or bfloat16, got 'int8'"),
        (dict(dtype=torch.int64), ValueError, "dtype must be .* got 'int64'"),
        (dict(dtype=np.int32), ValueError, "dtype must be .* got 'int32'"),
        (dict(dtype=32), TypeError, "dtype must be the name or type"),
        (dict(num_threads=0), ValueError, "num_threads must be at least 1"),
        (dict(num_threads=True), TypeError, "num_threads must be an integer"),
    ],
)
def test_an_index_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message):
        Index(**arguments)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda i: i.add(rows(2, 4)), ValueError, "reference must have 3 columns like the rows of the index, got 4"),
        (lambda i: i.add(rows(2, 3)[0]), ValueError, "reference must be 2-D"),
        (lambda i: i.add(np.zeros((2, 3), np.int64)), TypeError, "reference must hold float32"),
        (lambda i: i.add([[0.0, np.inf, 0.0]]), TypeError, "got float64"),
        (lambda i: i.add(rows(1, 3) * np.nan), ValueError, "reference must be finite, got NaN in row 0, column 0"),
        (lambda i: i.add(rows(1, 3), num_threads=0), ValueError, "num_threads must be at least 1"),
        (lambda i: i.add(rows(1, 3), progress=3), TypeError, "progress must be"),
        (lambda i: i.search(rows(2, 4), 1), ValueError, "same number of columns, got 4 and 3"),
        (lambda i: i.search(rows(2, 3)[0], 1), ValueError, "query must be 2-D"),
        (lambda i: i.search("rows", 1), (TypeError, ValueError), "query must"),
        (lambda i: i.search(rows(1, 3) * np.inf, 1), ValueError, "query must be finite"),
        (lambda i: i.search(rows(2, 3), 6), ValueError, "k must be at most the number of references, got k=6 with 5"),
        (lambda i: i.search(rows(2, 3), -1), ValueError, "k must be at least 0"),
        (lambda i: i.search(rows(2, 3), 1.0), TypeError, "k must be an integer"),
        (lambda i: i.search(rows(2, 3), 5, exclude_self=True), ValueError, "without the query itself"),
        (lambda i: i.search(rows(6, 3), 1, exclude_self=True), ValueError, "begin with the queries"),
        (lambda i: i.search(rows(2, 3), 1, exclude_self=None), TypeError, "exclude_self must be True or False"),
        (lambda i: i.radius(rows(2, 3), np.nan), ValueError, "r must be a finite number"),
        (lambda i: i.radius(rows(2, 3), None), TypeError, "r must be a real number"),
        (lambda i: i.radius(rows(2, 3), 1, sort=1), TypeError, "sort must be True or False"),
        (lambda i: i.remove([0, 1]), TypeError, "mask must hold one bool per row, got int64; for row numbers"),
        (lambda i: i.remove(np.zeros(4, bool)), ValueError, "mask must have one entry for each of the 5 rows, got 4"),
        (lambda i: i.remove(np.zeros((5, 1), bool)), ValueError, "mask must be 1-D"),
        (lambda i: i.remove(np.ma.array([True] * 5, mask=[True] * 5)), TypeError, "mask must not be a masked array"),
    ],
)
def test_what_is_refused_changes_nothing(call, error, message):
    index = Index()
    index.add(rows(5, 3))
    with pytest.raises(error, match=message):
        call(index)
    assert index.rows().tobytes() == rows(5, 3).tobytes()


def test_masks_of_other_kinds():
    for mask in (torch.tensor([True, False, True]), [True, False, True], np.array([1, 0, 0, 1, 1], bool)[::2]):
        index = Index()
        index.add(np.array([[0.0], [1.0], [2.0]]))
        index.remove(mask)
        assert index.rows().tolist() == [row for row, gone in zip([[0.0], [1.0], [2.0]], mask, strict=True) if not gone]


def test_k_none_is_all_rows():
    stored = rows(300, 3)
    index = Index("cosine")
    index.add(stored)
    assert_same(index.search(stored[:5], None), exactknn.knn(stored[:5], stored, None, metric="cosine"))
    wanted = exactknn.knn(stored, k=None, metric="cosine")
    assert_same(index.search(stored, None, exclude_self=True), wanted)


def test_levels_and_threads_change_no_byte(level):
    stored, query = rows(SEALED + 100, 24), rows(300, 24, seed=1)
    wanted = exactknn.knn(query, stored, 10)
    index = Index(num_threads=2)
    index.add(stored)
    for threads in (None, 1, 3):
        assert_same(index.search(query, 10, num_threads=threads), wanted)


@pytest.mark.parametrize("metric", ["sqeuclidean", "cosine", "chebyshev"])
def test_an_index_packed_at_another_level(level, metric, tmp_path):
    stored, query = rows(SEALED + 9, 16), rows(200, 16, seed=1)
    index = Index(metric)
    index.add(stored)
    index.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    for other in exactknn.available_simd_levels():
        exactknn.set_simd_level(other)
        for count in (1, 20, 200):
            wanted = exactknn.knn(query[:count], stored, 10, metric=metric)
            assert_same(index.search(query[:count], 10), wanted)
            assert_same(loaded.search(query[:count], 10), wanted)


def test_parts_that_lost_a_row_stay_packed():
    parts = [rows(SEALED, 8, seed) for seed in range(3)]
    index = Index()
    for part in parts:
        index.add(part)
    held = np.concatenate(parts)
    mask = np.zeros(len(held), bool)
    mask[[5, SEALED + 5]] = True
    index.remove(mask)
    query = rows(300, 8, seed=9)
    assert_same(index.search(query, 10), exactknn.knn(query, held[~mask], 10))
    # At least a code for each number beside the rows themselves.
    assert index.nbytes >= (held.itemsize + 1) * (held.size - 16)


def test_what_is_left_of_many_parts():
    parts = [rows(SEALED, 3, seed) for seed in range(4)]
    index = Index()
    for part in parts:
        index.add(part)
    held = np.concatenate(parts)
    query = rows(50, 3, seed=9)
    rng = np.random.default_rng(0)
    for share in (0.6, 0.7, 0.9):
        mask = rng.random(len(held)) < share
        index.remove(mask)
        held = held[~mask]
        assert_same(index.search(query, 10), exactknn.knn(query, held, 10))
        assert index.rows().tobytes() == held.tobytes()
    index.add(parts[0])
    assert_same(index.search(query, 10), exactknn.knn(query, np.concatenate([held, parts[0]]), 10))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pickles_and_copies_are_indexes_of_their_own(dtype):
    stored = rows(40, 3, dtype=DTYPES[dtype])
    index = Index("minkowski", p=3, num_threads=2)
    index.add(stored)
    wanted = index.search(stored[:9], 4)
    for make in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        other = make(index)
        assert repr(other) == repr(index)
        assert_same(other.search(stored[:9], 4), wanted)
        other.add(stored[:1])
        other.remove([True] * 41)
        assert len(index) == 40
    empty = pickle.loads(pickle.dumps(Index("cosine", "float16")))
    assert repr(empty) == "Index(metric='cosine', dtype='float16', rows=0, dim=None)"
