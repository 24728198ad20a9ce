"""``RustKNN``: the native backend, and its fallback."""

import copy
import logging
import pickle

import numpy as np
import pytest
import torch

import exactknn
from exactknn.distances import CosineSimilarity, LpDistance, SNRDistance
from exactknn.evaluation import AccuracyCalculator, CustomKNN, MatchFinder, RustKNN


def rows(n, d, seed=0, dtype=torch.float32):
    return torch.randn(n, d, generator=torch.manual_seed(seed), dtype=torch.float64).to(dtype)


def test_the_default_is_squared_euclidean_unnormalised():
    knn = RustKNN()
    assert type(knn.distance) is LpDistance
    distances, indices = knn(torch.tensor([[0.0, 0], [3, 0]]), 3, torch.tensor([[0, 1], [3, 0.5], [9, 9]]))
    assert distances.tolist() == [[1, 9.25, 162], [0.25, 10, 117]]
    assert indices.tolist() == [[0, 1, 2], [1, 0, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ref_includes_query", [False, True])
def test_it_is_the_core(dtype, ref_includes_query):
    reference = rows(80, 9, dtype=dtype)
    query = reference[:30].clone() if ref_includes_query else rows(30, 9, seed=1, dtype=dtype)
    distances, indices = RustKNN()(query, 7, reference, ref_includes_query)
    wanted = exactknn.knn(query, reference, 7, exclude_self=ref_includes_query)
    assert distances.numpy().tobytes() == wanted[0].tobytes()
    assert indices.numpy().tobytes() == wanted[1].tobytes()
    assert distances.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_same_tensor_the_same_memory_and_a_copy_search_alike():
    points = rows(60, 5)
    knn = RustKNN()
    wanted = knn(points, 4, points, True)
    for reference in (points.view(60, 5), points.clone()):
        got = knn(points, 4, reference, True)
        assert got[0].equal(wanted[0])
        assert got[1].equal(wanted[1])
    including = knn(points, 1, points)
    assert including[1][:, 0].tolist() == list(range(60))
    assert (including[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("distance", [CosineSimilarity(), LpDistance(), SNRDistance(), LpDistance(p=1)], ids=str)
def test_half_embeddings_give_float32(dtype, distance):
    query, reference = rows(6, 4, dtype=dtype), rows(20, 4, seed=1, dtype=dtype)
    distances, indices = RustKNN(distance)(query, 5, reference)
    assert distances.dtype == torch.float32
    exact = distance(query.double(), reference.double()).topk(5, largest=distance.is_inverted)
    assert indices.equal(exact.indices)


@pytest.mark.parametrize("batch_size", [None, 1, 7])
def test_batches_and_threads_change_no_byte(batch_size):
    query, reference = rows(70, 40), rows(400, 40, seed=1)
    wanted = RustKNN(CosineSimilarity())(query, 10, reference)
    for threads in (1, 2, 3):
        knn = RustKNN(CosineSimilarity(), batch_size, num_threads=threads)
        got = knn(query, 10, reference)
        assert got[0].equal(wanted[0])
        assert got[1].equal(wanted[1])


def test_the_fallback_is_logged_once(caplog):
    knn = RustKNN(SNRDistance(), batch_size=2)
    query, reference = rows(5, 6), rows(9, 6, seed=1)
    with caplog.at_level(logging.INFO, logger="exactknn"):
        first = knn(query, 3, reference)
        knn(query, 3, reference)
    told = [record for record in caplog.records if "instead of the Rust core" in record.getMessage()]
    assert len(told) == 1
    assert told[0].levelno == logging.INFO
    assert "SNRDistance" in told[0].getMessage()
    wanted = CustomKNN(SNRDistance())(query, 3, reference)
    assert first[1].equal(wanted[1])
    torch.testing.assert_close(first[0], wanted[0])


def test_a_search_states_k(caplog):
    with caplog.at_level(logging.INFO, logger="exactknn"):
        RustKNN()(rows(3, 4), 2, rows(5, 4))
    assert [record for record in caplog.records if "k=2" in record.getMessage()]


def test_construction():
    knn = RustKNN(CosineSimilarity(), 5, num_threads=np.int64(2))
    assert (knn.batch_size, knn.num_threads) == (5, 2)
    with pytest.raises(TypeError):
        RustKNN(None, None, 2)
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        RustKNN(num_threads=0)
    with pytest.raises(TypeError, match="num_threads must be an integer"):
        RustKNN(num_threads=True)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        RustKNN(batch_size=0)
    with pytest.raises(TypeError, match="distance must be callable"):
        RustKNN(3)


def test_copies():
    knn = RustKNN(CosineSimilarity(), num_threads=1)
    query, reference = rows(5, 3), rows(9, 3, seed=1)
    wanted = knn(query, 2, reference)
    for twin in (pickle.loads(pickle.dumps(knn)), copy.deepcopy(knn)):
        assert twin.num_threads == 1
        assert twin(query, 2, reference)[1].equal(wanted[1])


def test_refusals():
    knn = RustKNN()
    query, reference = rows(3, 2), rows(4, 2)
    with pytest.raises(ValueError, match="k must be at most the number of references, got k=5 with 4 references"):
        knn(query, 5, reference)
    with pytest.raises(TypeError, match="query must be a torch tensor, got ndarray"):
        knn(query.numpy(), 1, reference)
    with pytest.raises(ValueError, match=r"query must hold .* got torch.int32"):
        knn(query.int(), 1, reference)
    broken = query.clone()
    broken[1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"query\b.*\brow 1\b"):
        knn(broken, 1, reference)


def test_each_backend_and_the_finder_return_their_own_measure():
    # Unit vectors with cosine 1, 0.9 and 0 to the first.
    x = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.19**0.5], [0.0, 1.0]]))
    squared, similarities = [0, 0.2, 2], [1, 0.9, 0]
    for knn in (RustKNN(), AccuracyCalculator().knn_func):
        assert knn(x[:1], 3, x)[0][0].tolist() == pytest.approx(squared, abs=1e-6)
    for distance, wanted in (
        (LpDistance(), [0, 0.2**0.5, 2**0.5]),
        (LpDistance(power=2), squared),
        (CosineSimilarity(), similarities),
    ):
        for knn in (RustKNN(distance), CustomKNN(distance), CustomKNN(distance, backend="torch")):
            assert knn(x[:1], 3, x)[0][0].tolist() == pytest.approx(wanted, abs=1e-6)
        found = MatchFinder(distance).pairwise(x[:1].expand(3, 2), x)
        assert found.tolist() == pytest.approx(wanted, abs=1e-6)
