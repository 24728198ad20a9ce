"""References that blocks of queries share: packed once, each query without itself, the bytes of one search."""

import numpy as np
import pytest

from exactknn import _core, knn, radius
from exactknn._arrays.matrix import Pair
from exactknn._references import References

X = np.random.default_rng(3).integers(-9, 10, (3000, 24)).astype("float32")


def same(found, expected):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("metric", ["sqeuclidean", "cosine", "inner_product", "cityblock"])
def test_blocks_of_queries_find_what_one_search_finds_and_pack_once(metric):
    whole = knn(X, X, k=7, metric=metric, exclude_self=True)
    references = References(Pair(X, None, False), metric, exclude_self=True)
    parts = [references.knn(start, min(start + 700, 3000), 7) for start in range(0, 3000, 700)]
    assert same([np.concatenate(part) for part in zip(*parts, strict=True)], whole)
    assert references.packings == 1


def test_queries_that_are_any_rows_do_not_find_them():
    own = np.random.default_rng(4).permutation(3000)[:500]
    references = References(Pair(X[own], X, False), "euclidean", exclude_self=True, own=own)
    distances, indices = references.knn(0, 500, 4)
    assert not (indices == own[:, np.newaxis]).any()
    all_distances, all_indices = knn(X, X, k=4, metric="euclidean", exclude_self=True)
    assert same((distances, indices), (all_distances[own], all_indices[own]))


def test_pairs_within_a_radius_come_once_where_blocks_skip_the_rows_before_them():
    indptr, columns, values = radius(X, X, 800.0, sort=False, exclude_self=True)
    rows = np.repeat(np.arange(3000), np.diff(indptr))
    upper = columns > rows
    references = References(Pair(X, None, False), "sqeuclidean", exclude_self=True)
    parts = []
    for start in range(0, 3000, 1000):
        query, reference, distances = references.pairs(start, start + 1000, 800.0, since=start)
        once = reference > query
        parts.append((query[once], reference[once], distances[once]))
    found = [np.concatenate(part) for part in zip(*parts, strict=True)]
    assert same(found, (rows[upper], columns[upper], values[upper]))
    assert references.packings == 1


def test_searches_report_their_filter_and_the_rows_they_rescored():
    for search in (
        lambda: _core.radius(X[:1000], X, 500.0, "sqeuclidean"),
        lambda: _core.References(X, "sqeuclidean").knn(X[:1000], 3),
    ):
        search()
        report = _core.last_search()
        assert report["filter"] in ("float32", "int8")
        assert 1000 <= report["rescored"] < 1000 * 3000


def test_evaluation_and_matching_in_blocks_pack_once(monkeypatch):
    torch = pytest.importorskip("torch")
    from exactknn import _references
    from exactknn.distances import LpDistance
    from exactknn.evaluation import AccuracyCalculator, MatchFinder, RustKNN

    made = []
    original = _references.References.__init__

    def recorded(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(_references.References, "__init__", recorded)
    embeddings, labels = torch.from_numpy(X), torch.arange(3000) % 50
    found = AccuracyCalculator(k="max_bin_count", knn_func=RustKNN()).get_accuracy(embeddings, labels)
    assert 0 < found["precision_at_1"] < 1
    MatchFinder(LpDistance(), threshold=0.9).get_matching_pairs(embeddings)
    assert made and all(references.packings <= 1 for references in made)
    assert sum(references.packings for references in made) >= 1


def test_rows_of_another_type_are_refused():
    with pytest.raises(TypeError, match="query and reference must have one dtype, got float64 and float32"):
        _core.References(X, "cosine").knn(X[:3].astype("float64"), 1)
    with pytest.raises(ValueError, match="self_rows must name rows of the reference, got -1 at position 1"):
        _core.References(X, "cosine").knn(X[:2], 1, exclude_self=True, self_rows=np.array([0, -1]))
