"""Inputs on which libraries in use today give wrong answers; the right ones, at every SIMD level.

The reference is float64 brute force over the same values, rounded to the output type, ties to the lowest row.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

import exactknn
from exactknn.distances import CosineSimilarity, LpDistance, SNRDistance
from exactknn.evaluation import CustomKNN, RustKNN

SQUARED = {"normalize_embeddings": False, "power": 2}

# The core, whatever leads to it.
pytestmark = pytest.mark.usefixtures("level")


def normal(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def same_bytes(left, right):
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


def test_an_answer_does_not_depend_on_the_rows_asked_with_it(brute_force):
    x = (100 + 0.01 * normal(1000, 128)).astype(np.float32)
    distances, indices = exactknn.knn(x, x, 10)
    some = exactknn.knn(x[:999], x, 10)
    assert same_bytes(some, (distances[:999], indices[:999]))
    for row in (0, 500, 999):
        assert same_bytes(exactknn.knn(x[row : row + 1], x, 10), (distances[row : row + 1], indices[row : row + 1]))
    want_distances, want_indices = brute_force(x, x, 10)
    assert indices.tolist() == want_indices.tolist()
    np.testing.assert_allclose(distances, want_distances, rtol=1.2e-7, atol=0)


def test_large_coordinates_of_one_dimension():
    near = torch.full((1, 1), 512000.0)
    far = torch.full((26, 1), 512100.0)
    for distance in (LpDistance(normalize_embeddings=False), LpDistance(**SQUARED)):
        distances, indices = RustKNN(distance)(near, 26, far)
        assert (distances == 100.0**distance.power).all()
        assert indices.tolist() == [list(range(26))]
    assert (LpDistance(normalize_embeddings=False)(near.expand(26, 1), far) == 100).all()


def test_a_tight_cluster_far_from_the_origin(brute_force):
    x = (1000 + 0.01 * normal(200, 8)).astype(np.float32)
    wanted = brute_force(x, x, 5, exclude_self=True)[1]
    assert exactknn.knn(x, k=5)[1].tolist() == wanted.tolist()
    for backend in ("rust", "torch"):
        found = CustomKNN(LpDistance(**SQUARED), backend=backend)(torch.tensor(x), 5, torch.tensor(x), True)[1]
        recall = np.mean([len(set(a) & set(b)) / 5 for a, b in zip(found.tolist(), wanted.tolist(), strict=True)])
        assert recall == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "metric", ["sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev", "minkowski"]
)
def test_values_that_are_not_finite_are_named(bad, metric):
    good = normal(6, 3).astype(np.float32)
    broken = good.copy()
    broken[4, 1] = bad
    with pytest.raises(ValueError, match=r"query\b.*\brow 4\b"):
        exactknn.knn(broken, good, 2, metric=metric)
    with pytest.raises(ValueError, match=r"reference\b.*\brow 4\b"):
        exactknn.knn(good, broken, 2, metric=metric)
    with pytest.raises(ValueError, match=r"query\b.*\brow 4\b"):
        exactknn.knn(broken, k=2, metric=metric)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("distance", [LpDistance(), CosineSimilarity(), SNRDistance(), LpDistance(p=1)], ids=str)
def test_values_that_are_not_finite_are_named_by_every_backend(bad, distance):
    good = torch.tensor(normal(6, 3))
    broken = good.clone()
    broken[4, 1] = bad
    for knn in (RustKNN(distance), CustomKNN(distance), CustomKNN(distance, 2, backend="torch")):
        with pytest.raises(ValueError, match=r"query\b.*\brow 4\b"):
            knn(broken, 2, good)
        with pytest.raises(ValueError, match=r"reference\b.*\brow 4\b"):
            knn(good, 2, broken)


def test_ties_go_to_the_lowest_row_and_top_k_is_a_prefix(brute_force):
    x = np.random.default_rng(0).integers(0, 3, (600, 4)).astype(np.float32)
    wanted = brute_force(x, x, 50)
    for k in (1, 10, 49, 50):
        distances, indices = exactknn.knn(x, x, k)
        assert distances.tolist() == wanted[0][:, :k].tolist()
        assert indices.tolist() == wanted[1][:, :k].tolist()


def test_batches_change_nothing():
    x = torch.tensor((5 + 0.1 * normal(500, 32)).astype(np.float32))
    for distance in (LpDistance(**SQUARED), CosineSimilarity()):
        whole = CustomKNN(distance)(x, 10, x, True)
        parts = CustomKNN(distance, batch_size=7)(x, 10, x, True)
        assert whole[0].equal(parts[0])
        assert whole[1].equal(parts[1])


def test_no_cosine_exceeds_one_and_the_own_is_exactly_one():
    x = normal(2000, 128).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    similarities, indices = RustKNN(CosineSimilarity())(torch.tensor(x), 3, torch.tensor(x))
    assert (similarities[:, 0] == 1).all()
    assert indices[:, 0].tolist() == list(range(2000))
    assert (similarities <= 1).all()
    assert (exactknn.knn(x, x, 1, metric="cosine")[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_ranked_as_float64_ranks_it(dtype, brute_force):
    x = torch.tensor(normal(40, 16)).to(dtype)
    wide = x.float().numpy()
    wanted = brute_force(wide, wide, 5, exclude_self=True)
    distances, indices = RustKNN()(x, 5, x, True)
    assert indices.tolist() == wanted[1].tolist()
    np.testing.assert_allclose(distances.numpy(), wanted[0], rtol=1.2e-7, atol=0)
    numpy_dtype = np.float16 if dtype == torch.float16 else ml_dtypes.bfloat16
    assert same_bytes(exactknn.knn(wide.astype(numpy_dtype), k=5), (distances.numpy(), indices.numpy()))
    for normalize in (True, False):
        got = CustomKNN(LpDistance(normalize_embeddings=normalize))(x, 5, x, True)
        assert got[0].dtype == (dtype if normalize else torch.float32)
        exact = LpDistance(normalize_embeddings=normalize)(x.double()).fill_diagonal_(torch.inf)
        assert got[1].equal(exact.topk(5, largest=False).indices)


def test_the_own_distance_is_exactly_zero():
    for dtype in (np.float32, np.float64):
        x = normal(300, 64).astype(dtype)
        distances, indices = exactknn.knn(x, x, 1)
        assert (distances == 0).all()
        assert indices[:, 0].tolist() == list(range(300))
        for distance in (LpDistance(), LpDistance(**SQUARED)):
            for backend in ("rust", "torch"):
                assert (CustomKNN(distance, backend=backend)(torch.tensor(x), 1, torch.tensor(x))[0] == 0).all()


def test_float64_is_kept_from_end_to_end():
    x = (1e8 + np.arange(6.0)).reshape(6, 1)
    distances, indices = exactknn.knn(x, k=2)
    assert distances.dtype == np.float64
    assert distances.tolist() == [[1, 4], [1, 1], [1, 1], [1, 1], [1, 1], [1, 4]]
    assert indices.tolist() == [[1, 2], [0, 2], [1, 3], [2, 4], [3, 5], [4, 3]]
    tensor = torch.tensor(x)
    for knn in (RustKNN(), CustomKNN(LpDistance(**SQUARED)), CustomKNN(LpDistance(**SQUARED), 4, backend="torch")):
        distances, _ = knn(tensor, 2, tensor, True)
        assert distances.dtype == torch.float64
        assert distances.tolist() == [[1, 4], [1, 1], [1, 1], [1, 1], [1, 1], [1, 4]]


def test_self_search_keeps_every_column(brute_force):
    x = normal(5, 3).astype(np.float32)
    _, indices = exactknn.knn(x, k=4)
    assert indices.tolist() == brute_force(x, x, 4, exclude_self=True)[1].tolist()
    assert [sorted(row) for row in indices.tolist()] == [[j for j in range(5) if j != i] for i in range(5)]
    with pytest.raises(ValueError, match=r"\bk\b.*5"):
        exactknn.knn(x, k=5)
    for backend in ("rust", "torch"):
        knn = CustomKNN(LpDistance(**SQUARED), backend=backend)
        assert knn(torch.tensor(x), 4, torch.tensor(x), True)[1].tolist() == indices.tolist()
        with pytest.raises(ValueError, match=r"\bk\b.*5"):
            knn(torch.tensor(x), 5, torch.tensor(x), True)


@pytest.mark.parametrize("d", [1, 5])
def test_empty_sides(d):
    some, none = np.ones((3, d), np.float32), np.ones((0, d), np.float32)
    with pytest.raises(ValueError, match=r"\bk\b.*1"):
        exactknn.knn(some, none, 1)
    distances, indices = exactknn.knn(none, some, 2)
    assert distances.shape == indices.shape == (0, 2)
    for backend in ("rust", "torch"):
        knn = CustomKNN(LpDistance(), backend=backend)
        with pytest.raises(ValueError, match=r"\bk\b.*1"):
            knn(torch.tensor(some), 1, torch.tensor(none))
        assert [x.shape for x in knn(torch.tensor(none), 2, torch.tensor(some))] == [(0, 2), (0, 2)]


def test_tiny_distances_of_large_rows(brute_force):
    x = np.array([[772, 112], [772.001, 112], [772.0001, 112]], np.float32)
    distances, indices = exactknn.knn(x, metric="euclidean", k=2)
    assert indices.tolist() == [[2, 1], [2, 0], [0, 1]]
    assert distances.tolist() == brute_force(x, x, 2, metric="euclidean", exclude_self=True)[0].tolist()
    # float32 numbers near 772 are 2**-14 apart: 0.0001, 0.0009 and 0.001 are 2, 14 and 16 such steps.
    assert (distances * 2**14).tolist() == [[2, 16], [14, 16], [2, 14]]
    mat = LpDistance(normalize_embeddings=False)(torch.tensor(x))
    np.testing.assert_allclose(mat.gather(1, torch.tensor(indices)), distances, rtol=1e-6)


def test_the_cosine_of_a_row_with_itself():
    x = torch.tensor([[1.0, 2.0, 3.0]])
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert RustKNN(CosineSimilarity())(x.to(dtype), 1, x.to(dtype))[0].tolist() == [[1.0]]
    assert exactknn.knn(x, x, 1, metric="cosine")[0].tolist() == [[0.0]]


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("power", [1, 2])
def test_a_root_is_taken_once(p, power):
    zero, two = torch.tensor([[0.0]]), torch.tensor([[2.0]])
    distance = LpDistance(normalize_embeddings=False, p=p, power=power)
    for knn in (RustKNN(distance), CustomKNN(distance), CustomKNN(distance, backend="torch")):
        assert knn(zero, 1, two)[0].item() == 2.0**power


@pytest.mark.parametrize("distance", [LpDistance(), SNRDistance()], ids=str)
def test_a_query_that_requires_grad_is_detached(distance):
    x = torch.tensor(normal(9, 4)).requires_grad_()
    for knn in (RustKNN(distance), CustomKNN(distance), CustomKNN(distance, 2, backend="torch")):
        distances, indices = knn(x, 2, x, True)
        assert distances.grad_fn is None
        assert not distances.requires_grad
        assert not indices.requires_grad
    assert exactknn.knn(x, k=2)[1].shape == (9, 2)


def test_threads_change_no_byte(brute_force):
    query, reference = normal(100, 16).astype(np.float32), normal(10_000, 16, seed=1).astype(np.float32)
    wanted = exactknn.knn(query, reference, 10, num_threads=1)
    assert wanted[1].tolist() == brute_force(query, reference, 10)[1].tolist()
    for threads in (2, 3, exactknn.get_num_threads()):
        assert same_bytes(exactknn.knn(query, reference, 10, num_threads=threads), wanted)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e20])
def test_scales(scale, brute_force):
    x = (normal(60, 7) * scale).astype(np.float32)
    with np.errstate(over="ignore"):
        exact = brute_force(x.astype(np.float64), x.astype(np.float64), 5, exclude_self=True)
        rounded = exact[0].astype(np.float32)
    distances, indices = exactknn.knn(x, k=5)
    # Values beyond the output type are still ranked by what they are.
    assert indices.tolist() == exact[1].tolist()
    np.testing.assert_allclose(distances, rounded, rtol=1.2e-7, atol=0)


def test_zero_columns_change_nothing():
    x = normal(50, 13).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, 19)))
    for metric in ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev"):
        assert same_bytes(exactknn.knn(x, k=6, metric=metric), exactknn.knn(padded, k=6, metric=metric))
