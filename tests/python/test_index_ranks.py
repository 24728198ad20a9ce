"""Ranks in an index: places of chosen rows in the order of a search for all rows, after any history."""

import itertools

import numpy as np
import pytest

from exactknn import Index


def sorted_ranks(index, query, lists, exclude_self):
    """The ranks by a search for all rows."""
    _, indices = index.search(query, k=None, exclude_self=exclude_self)
    ranks = []
    for i, rows in enumerate(lists):
        wanted = [row for row in rows if not (exclude_self and row == i)]
        ranks.append(np.flatnonzero(np.isin(indices[i], wanted)) + 1)
    return ranks


@pytest.mark.parametrize("metric", ["sqeuclidean", "cosine", "inner_product", "cityblock"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_ranks_are_places_in_the_full_order(metric, dtype, exclude_self):
    rng = np.random.default_rng(5)
    rows = rng.integers(-4, 5, (9000, 12)).astype("float32") + 0.5
    index = Index(metric, dtype)
    for start in (0, 8500, 8700):
        index.add(rows[start : {0: 8500, 8500: 8700, 8700: 9000}[start]])
    index.remove(np.arange(9000) % 97 == 3)
    count = len(index)
    query = rows[np.arange(9000) % 97 != 3][:40]
    lists = [rng.permutation(count)[: int(rng.integers(0, 90))] for _ in query]
    lists[3] = np.array([3, 8, count - 1])
    indptr, ranks = index.ranks(query, lists, exclude_self=exclude_self)
    expected = sorted_ranks(index, query, lists, exclude_self)
    assert [ranks[a:b].tolist() for a, b in itertools.pairwise(indptr)] == [r.tolist() for r in expected]
    packed = (np.cumsum([0, *map(len, lists)]), np.concatenate(lists))
    again = index.ranks(query, packed, exclude_self=exclude_self, num_threads=2)
    assert np.array_equal(again[0], indptr) and np.array_equal(again[1], ranks)


def test_one_query_and_no_targets():
    index = Index()
    index.add([[0.0], [1.0]])
    assert [part.tolist() for part in index.ranks([[0.0]], [[]])] == [[0, 0], []]
    assert [part.tolist() for part in index.ranks(np.empty((0, 1)), [])] == [[0], []]
    assert [part.tolist() for part in Index().ranks(np.empty((1, 1)) * 0, [[]])] == [[0, 0], []]


@pytest.mark.parametrize(
    ("targets", "error", "words"),
    [
        ([[0]], ValueError, "targets must have a list for each of the 2 queries, got 1"),
        ([[0], [2]], ValueError, "targets must name rows from 0 to below 2, got 2 for query 1"),
        ([[0], [-1]], ValueError, "targets must name rows from 0 to below 2, got -1 for query 1"),
        ([[0], [1, 0, 1]], ValueError, "targets must name a row once for a query, got 1 twice for query 1"),
        ([[0], [0.5]], TypeError, "targets must be integers, got float64"),
        ([[0], [[1]]], ValueError, "targets must have one dimension for a query, got 2"),
        ((np.array([0, 2]), np.array([0, 1])), ValueError, "an indptr of 3 entries that rises from 0"),
    ],
)
def test_targets_that_do_not_fit_are_refused(targets, error, words):
    index = Index()
    index.add([[0.0], [1.0]])
    with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")):
        index.ranks([[0.0], [1.0]], targets)
