"""What `MatchFinder` takes and refuses: shapes, devices, types, distances."""

import copy
import math
import pickle
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances as pml
from pytorch_metric_learning.utils.inference import MatchFinder as PMLMatchFinder

from exactknn import _core
from exactknn.distances import (
    LpDistance,
    SNRDistance,
)
from exactknn.evaluation import MatchFinder
from tests.python.evaluation.match_helpers import ALL, ALL_IDS, NATIVE, TorchLp, assert_agree, rows, values_of_all_pairs


@pytest.mark.parametrize("distance", ALL, ids=ALL_IDS)
def test_nothing_against_something(distance):
    finder, none, some = MatchFinder(distance, 0.5), torch.empty(0, 5), rows(4, 5)
    for query, reference in ((none, some), (some, none), (none, none)):
        assert finder.get_match_matrix(query, reference).shape == (len(query), len(reference))
        indices = finder.get_match_indices(query, reference)
        assert (indices.shape, indices.dtype) == ((0, 2), torch.long)
        assert finder.get_matching_pairs(query, reference, return_tuples=True) == []
    match = finder.is_match(none, none)
    assert (match.shape, match.dtype) == ((0,), torch.bool)


@pytest.mark.parametrize("distance", ALL, ids=ALL_IDS)
def test_the_queries_among_themselves(distance):
    x = rows(40, 6)
    threshold = values_of_all_pairs(distance, x, x).median().item() + 1e-4
    finder = MatchFinder(distance, threshold)
    assert finder.get_match_matrix(x).equal(finder.get_match_matrix(x, x.clone()))
    assert finder.get_match_indices(x).equal(finder.get_match_indices(x, x.clone()))
    assert 0 < len(finder.get_match_indices(x)) < 1600


@pytest.mark.parametrize("distance", [LpDistance(power=2), TorchLp(power=2)], ids=["native", "torch"])
@pytest.mark.parametrize("threshold", [1.2, 9.0])
def test_blocks_do_not_show(distance, threshold, monkeypatch):
    query, reference = rows(50, 6), rows(37, 6, seed=1)
    finder = MatchFinder(distance, threshold)
    matrix, indices = finder.get_match_matrix(query, reference), finder.get_match_indices(query, reference)
    assert matrix.sum() == len(indices) > 0
    monkeypatch.setattr("exactknn.evaluation.match._BLOCK_CELLS", 100)
    monkeypatch.setattr("exactknn.evaluation.match._BLOCK_ELEMENTS", 100)
    assert finder.get_match_matrix(query, reference).equal(matrix)
    assert finder.get_match_indices(query, reference).equal(indices)
    assert indices.equal(matrix.nonzero())


@pytest.mark.parametrize("distance", ALL, ids=ALL_IDS)
def test_layout_gradients_and_modes_change_nothing(distance):
    x, y = rows(12, 8), rows(12, 8, seed=1)
    threshold = values_of_all_pairs(distance, x, y).median().item() + 1e-4
    finder = MatchFinder(distance, threshold)

    def found(x, y):
        return finder.get_match_matrix(x, y), finder.get_match_indices(x, y), finder.is_match(x, y)

    wanted, values = found(x, y), finder.pairwise(x, y)
    wide = torch.stack([y, -y], dim=2).reshape(12, 16)
    with torch.inference_mode():
        inferred = x.clone()
    leaf = x.clone().requires_grad_()
    for left, right in [(x.t().contiguous().t(), wide[:, ::2]), (leaf, y), (x, y.clone().requires_grad_())]:
        results = found(left, right)
        assert all(result.equal(other) for result, other in zip(results, wanted, strict=True))
        assert not any(result.requires_grad for result in (*results, finder.pairwise(left, right)))
    assert all(result.equal(other) for result, other in zip(found(inferred, y), wanted, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(result.equal(other) for result, other in zip(found(x, y), wanted, strict=True))
        assert finder.pairwise(x, y).equal(values)
    with torch.inference_mode():
        assert all(result.equal(other) for result, other in zip(found(x, y), wanted, strict=True))
    assert leaf.grad is None


def test_two_types_are_compared_in_the_wider():
    x, y = rows(9, 5, dtype=torch.float16), rows(11, 5, seed=1, dtype=torch.float64)
    for threshold in values_of_all_pairs(LpDistance(), x, y)[0].tolist():
        assert_agree(LpDistance(), x, y, threshold)
    assert MatchFinder(LpDistance()).pairwise(x, y[:9]).dtype == torch.float64
    assert MatchFinder(LpDistance()).pairwise(x, y[:9].bfloat16()).dtype == torch.float32


def test_one_object_serves_many_threads_and_can_be_copied():
    finder = MatchFinder(LpDistance(power=2), 1.0)
    x = rows(300, 16)
    wanted = finder.get_match_indices(x)
    found = [None] * 4

    def work(i):
        found[i] = finder.get_match_indices(x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result.equal(wanted) for result in found)
    for other in (copy.deepcopy(finder), pickle.loads(pickle.dumps(finder))):
        assert other.get_match_indices(x).equal(wanted)
        assert other.threshold == 1.0
    assert repr(finder) == "MatchFinder(LpDistance(normalize_embeddings=True, p=2, power=2), threshold=1.0)"


class PairsOnly:
    """A distance whose matrix cannot be had."""

    is_inverted = False

    def __call__(self, query, reference):
        raise AssertionError("the matrix was requested")

    def pairwise(self, x, y):
        return (x - y).abs().sum(1)


class MatrixOnly:
    """A distance without ``pairwise``, whose matrices must stay small."""

    is_inverted = True

    def __call__(self, query, reference):
        assert len(query) * len(reference) <= 1000
        return -(query[:, None] - reference).abs().sum(2)


def test_pairs_are_decided_without_the_matrix():
    x, y = torch.zeros(3, 2), torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 2.0]])
    assert MatchFinder(PairsOnly(), 2).is_match(x, y).tolist() == [True, True, False]
    for n in (0, 1, 15, 16, 17, 100):
        x, y = rows(n, 3), rows(n, 3, seed=1)
        finder = MatchFinder(MatrixOnly(), -2.5)
        assert finder.is_match(x, y).equal((x - y).abs().sum(1) <= 2.5)
        torch.testing.assert_close(finder.pairwise(x, y), -(x - y).abs().sum(1))


def test_pml_distances_that_are_not_native_have_their_own_values_in_pairs():
    x, y = rows(40, 6), rows(40, 6, seed=1)
    for distance in (pml.LpDistance(p=1), pml.SNRDistance(), pml.LpDistance(power=3)):
        values = MatchFinder(distance).pairwise(x, y)
        torch.testing.assert_close(values, distance(x, y).diagonal())
        batched = pml.BatchedDistance(distance, batch_size=7)
        assert MatchFinder(batched).pairwise(x, y).equal(values)
        threshold = values.median().item()
        assert MatchFinder(batched, threshold).get_match_matrix(x, y).equal(distance(x, y) <= threshold)


def test_what_is_overridden_is_obeyed(monkeypatch):
    class Doubled(LpDistance):
        def pairwise_distance(self, query_emb, ref_emb):
            return 2 * super().pairwise_distance(query_emb, ref_emb)

        def compute_mat(self, query_emb, ref_emb):
            return 2 * super().compute_mat(query_emb, ref_emb)

    x, y = torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])
    doubled = MatchFinder(Doubled(normalize_embeddings=False), 1.5)
    assert not doubled.is_match(x, y)
    assert not doubled.get_match_matrix(x, y)
    finder = MatchFinder(LpDistance(normalize_embeddings=False), 1.5)
    assert finder.is_match(x, y)
    monkeypatch.setattr(LpDistance, "pairwise", lambda self, x, y: torch.full((len(x),), 7.0))
    assert finder.pairwise(x, y).tolist() == [7.0]


class Unordered:
    """A NaN for every pair whose first coordinates differ."""

    def __init__(self, is_inverted):
        self.is_inverted = is_inverted

    def __call__(self, query, reference):
        return torch.where(query[:, :1] == reference[:, 0], 1.0, torch.nan)

    def pairwise(self, x, y):
        return torch.where(x[:, 0] == y[:, 0], 1.0, torch.nan)


@pytest.mark.parametrize("is_inverted", [False, True])
@pytest.mark.parametrize("threshold", [1.0, math.inf, -math.inf])
def test_a_distance_that_is_not_a_number_matches_nothing(is_inverted, threshold):
    finder = MatchFinder(Unordered(is_inverted), threshold)
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [2.0]])
    one_matches = threshold == 1.0 or (threshold > 0) != is_inverted
    assert finder.get_match_matrix(x, y).tolist() == [[one_matches, False], [False, False]]
    assert finder.is_match(x, y).tolist() == [one_matches, False]
    assert len(finder.get_match_indices(x, y)) == one_matches


def test_a_constant_row_under_snr_matches_nothing():
    finder = MatchFinder(SNRDistance(), 1e9)
    x = torch.tensor([[2.0, 2.0, 2.0], [1.0, 2.0, 3.0]])
    assert finder.get_match_matrix(x).tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("distance", ALL, ids=ALL_IDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_named(distance, value):
    good = rows(6, 4)
    bad = good.clone()
    bad[3, 2] = bad[5, 0] = value
    finder = MatchFinder(distance, 0.5)
    for method in (finder.get_match_matrix, finder.get_match_indices, finder.get_matching_pairs):
        with pytest.raises(ValueError, match=r"^query_emb must be finite, got NaN or infinity in row 3$"):
            method(bad, good)
        with pytest.raises(ValueError, match=r"^ref_emb must be finite, got NaN or infinity in row 3$"):
            method(good, bad)
        with pytest.raises(ValueError, match=r"^query_emb must be finite, got NaN or infinity in row 3$"):
            method(bad)
    for x, y, name in ((bad, good, "x"), (good, bad, "y")):
        with pytest.raises(ValueError, match=rf"^{name} must be finite, got NaN or infinity in row 3$"):
            finder.is_match(x, y)


@pytest.mark.parametrize("distance", ALL, ids=ALL_IDS)
def test_pairs_need_two_sides(distance):
    finder = MatchFinder(distance, 0.5)
    with pytest.raises(ValueError, match=r"^x and y must have the same number of rows, got 3 and 4$"):
        finder.is_match(rows(3, 5), rows(4, 5))
    with pytest.raises(ValueError, match=r"^x and y must have the same number of rows, got 1 and 4$"):
        finder.is_match(rows(1, 5), rows(4, 5))


@pytest.mark.parametrize("distance", ALL, ids=ALL_IDS)
def test_what_cannot_be_compared_is_refused(distance):
    finder = MatchFinder(distance, 0.5)
    for call in (finder.get_match_matrix, finder.get_match_indices, finder.get_matching_pairs, finder.is_match):
        with pytest.raises(TypeError, match=r"^(query_emb|x) must be a torch tensor, got ndarray"):
            call(np.ones((2, 3)), rows(2, 3))
        with pytest.raises(TypeError, match=r"^(ref_emb|y) must be a torch tensor, got list"):
            call(rows(2, 3), [[1.0, 2, 3]])
        with pytest.raises(ValueError, match=r"2-D|2D"):
            call(rows(2, 3)[0], rows(2, 3)[0])
        with pytest.raises(ValueError, match=r"dimension"):
            call(rows(2, 3), rows(2, 4))
        with pytest.raises(
            ValueError, match=r"^(query_emb and ref_emb|x and y) must be on one device, got cpu and meta"
        ):
            call(rows(2, 3), rows(2, 3).to("meta"))


@pytest.mark.parametrize("distance", [LpDistance(), TorchLp()], ids=["native", "torch"])
def test_integers_are_refused(distance):
    finder, x = MatchFinder(distance, 0.5), torch.ones(2, 3, dtype=torch.long)
    for call in (finder.get_match_matrix, finder.get_match_indices, finder.is_match):
        with pytest.raises(ValueError, match=r"^(query_emb|x) must hold float32, float64, float16 or bfloat16 values"):
            call(x, x)


@pytest.mark.parametrize("distance", ALL, ids=ALL_IDS)
def test_sparse_rows_are_refused(distance):
    finder, x = MatchFinder(distance, 0.5), rows(2, 3)
    for call in (finder.get_match_matrix, finder.get_match_indices, finder.get_matching_pairs, finder.is_match):
        with pytest.raises(ValueError, match=r"^(ref_emb|y) must be a dense tensor, got layout torch\.sparse_coo$"):
            call(x, x.to_sparse())


def test_rows_without_columns_are_refused():
    finder, x = MatchFinder(LpDistance(), 0.5), torch.empty(3, 0)
    for call in (finder.get_match_matrix, finder.get_match_indices, finder.is_match):
        with pytest.raises(ValueError, match=r"^(query_emb|x) must have at least one column, got 0$"):
            call(x, x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NATIVE)
def test_embeddings_on_a_gpu(name):
    distance, x, y = NATIVE[name], rows(30, 6).cuda(), rows(40, 6, seed=1).cuda()
    threshold = values_of_all_pairs(distance, x, y).median().item() + 1e-4
    finder = MatchFinder(distance, threshold)
    matrix, indices, paired = finder.get_match_matrix(x, y), finder.get_match_indices(x, y), finder.is_match(x, y[:30])
    assert {found.device.type for found in (matrix, indices, paired)} == {"cuda"}
    assert matrix.cpu().equal(finder.get_match_matrix(x.cpu(), y.cpu()))
    assert indices.equal(matrix.nonzero())
    assert paired.equal(matrix[:, :30].diagonal())
    assert finder.get_matching_pairs(x, y).tolist() == matrix.tolist()


def test_another_default_device_or_type_changes_nothing():
    x, finder = rows(6, 4, dtype=torch.float16), MatchFinder(LpDistance(power=2), 0.7)
    wanted = finder.get_match_matrix(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert finder.get_match_matrix(x).equal(wanted)
            assert finder.get_match_indices(x).equal(wanted.nonzero())
            assert finder.is_match(x, x).tolist() == [True] * 6
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_distance_of_a_wrong_shape_is_refused():
    class Wrong(PairsOnly):
        def __call__(self, query, reference):
            return torch.zeros(1, 1)

        def pairwise(self, x, y):
            return torch.zeros(len(x), 1)

    finder = MatchFinder(Wrong(), 1)
    with pytest.raises(ValueError, match=r"distance must return a tensor of shape \(3, 2\), got \(1, 1\)"):
        finder.get_match_matrix(rows(3, 2), rows(2, 2))
    with pytest.raises(ValueError, match=r"distance.pairwise must return a tensor of shape \(3,\), got \(3, 1\)"):
        finder.is_match(rows(3, 2), rows(3, 2))


def test_a_distance_is_needed():
    with pytest.raises(TypeError, match="distance"):
        MatchFinder()
    with pytest.raises(TypeError, match=r"distance must be callable, got float"):
        MatchFinder(0.5)
    with pytest.raises(TypeError, match=r"distance must have an attribute is_inverted"):
        MatchFinder(torch.cdist)


@pytest.mark.parametrize(
    ("theirs", "threshold"),
    [
        (pml.CosineSimilarity(), 0.2),
        (pml.LpDistance(), 1.2),
        (pml.LpDistance(normalize_embeddings=False, power=2), 12.0),
        (pml.DotProductSimilarity(normalize_embeddings=False), 1.5),
        (pml.SNRDistance(), 1.6),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_reference", [False, True])
def test_the_matches_of_pml(theirs, threshold, with_reference):
    query, reference = rows(50, 8), rows(70, 8, seed=1) if with_reference else None
    old, new = PMLMatchFinder(distance=theirs, threshold=threshold), MatchFinder(theirs, threshold)
    matrix = old.get_matching_pairs(query, reference)
    assert 0 < matrix.sum() < matrix.size
    ours = new.get_matching_pairs(query, reference)
    assert (ours.dtype, ours.tolist()) == (matrix.dtype, matrix.tolist())
    assert new.get_match_matrix(query, reference).tolist() == matrix.tolist()
    pairs = new.get_matching_pairs(query, reference, return_tuples=True)
    assert pairs == [tuple(pair) for pair in old.get_matching_pairs(query, reference, return_tuples=True)]
    assert all(type(number) is int for pair in pairs for number in pair)
    strict = new.get_matching_pairs(query, reference, threshold=math.inf if theirs.is_inverted else -1)
    assert not strict.any()


@pytest.mark.parametrize("metric", ["sqeuclidean", "cosine", "inner_product", "normalized_euclidean", "chebyshev"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_pairs_of_the_core_have_the_values_of_a_search(metric, dtype, level):
    x, y = (np.random.default_rng(seed).standard_normal((3000, 7)).astype(dtype) for seed in (1, 2))
    y[::5] = x[::5]
    wanted = [_core.knn(x[i : i + 1], y[i : i + 1], 1, metric)[0][0, 0] for i in range(0, 3000, 50)]
    for threads in (1, 2):
        values = _core.pairwise(x, y, metric, num_threads=threads)
        assert values.dtype == (np.float64 if dtype == np.float64 else np.float32)
        assert values.shape == (3000,)
        assert values[::50].tobytes() == np.array(wanted).tobytes()


def test_pairs_of_the_core_by_hand_and_refused():
    x, y = np.array([[0.0, 0.0], [1.0, 2.0]]), np.array([[3.0, 4.0], [1.0, 2.0]])
    assert _core.pairwise(x, y, "minkowski", p=1).tolist() == [7, 0]
    assert _core.pairwise(x[:0], y[:0], "euclidean").tolist() == []
    with pytest.raises(ValueError, match="same number of rows to be paired, got 2 and 1"):
        _core.pairwise(x, y[:1], "euclidean")
    with pytest.raises(ValueError, match="same number of columns, got 2 and 1"):
        _core.pairwise(x, y[:, :1].copy(), "euclidean")
    with pytest.raises(ValueError, match="metric must be one of"):
        _core.pairwise(x, y, "manhattan")
    with pytest.raises(TypeError, match="one dtype"):
        _core.pairwise(x, y.astype(np.float32), "euclidean")
    with pytest.raises(ValueError, match="num_threads must be at least 1"):
        _core.pairwise(x, y, "euclidean", num_threads=0)
    y[1, 1] = np.nan
    with pytest.raises(ValueError, match="reference must be finite, got NaN in row 1, column 1"):
        _core.pairwise(x, y, "euclidean")


def test_the_matrix_needs_at_most_as_much_memory_again():
    x = torch.ones(1, 1).expand(9000, 1)
    finder = MatchFinder(LpDistance(normalize_embeddings=False), math.inf)
    tracemalloc.start()
    try:
        matrix = finder.get_match_matrix(x)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert matrix.all()
    assert peak <= 2 * matrix.numel()
