"""The metrics that are no sums of squares: cityblock, Chebyshev, Minkowski."""

import math

import ml_dtypes
import numpy as np
import pytest
from scipy.spatial.distance import cdist

import exactknn

EXPONENTS = (0.3, 0.5, 1, 1.5, 2, 2.7, 3, 4, 100, math.inf)


def rows(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def same_bytes(left, right):
    return [x.tobytes() for x in left] == [x.tobytes() for x in right]


@pytest.mark.parametrize("metric", ["cityblock", "chebyshev"])
def test_values_are_those_of_scipy(metric):
    query, reference = rows(40, 33), rows(300, 33, seed=1)
    distances, indices = exactknn.knn(query, reference, 300, metric=metric)
    wanted = cdist(query, reference, metric)
    np.testing.assert_allclose(distances, np.sort(wanted, axis=1), rtol=1e-14)
    np.testing.assert_allclose(distances, np.take_along_axis(wanted, indices, axis=1), rtol=1e-14)


@pytest.mark.parametrize("p", EXPONENTS)
def test_every_exponent_gives_the_values_of_scipy(p):
    query, reference = rows(10, 17), rows(250, 17, seed=1)
    distances, indices = exactknn.knn(query, reference, 250, metric="minkowski", p=p)
    wanted = cdist(query, reference, "minkowski", p=p)
    np.testing.assert_allclose(distances, np.sort(wanted, axis=1), rtol=1e-13)
    np.testing.assert_allclose(distances, np.take_along_axis(wanted, indices, axis=1), rtol=1e-13)


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_every_type_agrees_with_brute_force(p, dtype, brute_force):
    query, reference = rows(20, 12).astype(dtype), rows(260, 12, seed=1).astype(dtype)
    distances, indices = exactknn.knn(query, reference, 9, metric="minkowski", p=p)
    wanted, wanted_indices = brute_force(query, reference, 9, metric="minkowski", p=p)
    assert indices.tolist() == wanted_indices.tolist()
    assert distances.dtype == wanted.dtype
    np.testing.assert_allclose(distances, wanted, rtol=1e-13 if dtype == np.float64 else 1.2e-7)


@pytest.mark.parametrize(
    ("p", "metric"), [(1, "cityblock"), (2, "euclidean"), (None, "euclidean"), (np.inf, "chebyshev")]
)
def test_exponents_that_are_another_metric_give_its_bytes(p, metric):
    points = rows(300, 7).astype(np.float32)
    found = exactknn.knn(points, k=12, metric="minkowski", p=p)
    assert same_bytes(found, exactknn.knn(points, k=12, metric=metric))


@pytest.mark.parametrize("p", [1, 1.5, 3, 2.7, math.inf])
def test_ties_go_to_the_lowest_row(p, brute_force):
    grid = np.random.default_rng(3).integers(0, 3, (400, 3)).astype(np.float32)
    distances, indices = exactknn.knn(grid, k=30, metric="minkowski", p=p)
    wanted, wanted_indices = brute_force(grid, grid, 30, metric="minkowski", p=p, exclude_self=True)
    assert indices.tolist() == wanted_indices.tolist()
    np.testing.assert_allclose(distances, wanted, rtol=1.2e-7)


def test_whole_numbers_tie_exactly_in_float64():
    # Each row is a permutation of the same differences; sums of their cubes are whole numbers.
    reference = np.array([[3, 1, 2, 0, 5, 4, 7, 6, 9], [9, 6, 7, 4, 5, 0, 2, 1, 3], [0, 1, 2, 3, 4, 5, 6, 7, 9]], float)
    for p in (1, 3, 4, 5):
        distances, indices = exactknn.knn(np.zeros((1, 9)), reference, 3, metric="minkowski", p=p)
        assert indices.tolist() == [[0, 1, 2]]
        assert len(set(distances[0])) == 1


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_identical_rows_are_exactly_0_apart(p, dtype):
    points = (1e3 + rows(250, 10)).astype(dtype)
    copies = np.concatenate([points, points])
    distances, indices = exactknn.knn(points, copies, 2, metric="minkowski", p=p)
    assert (distances == 0).all()
    assert (indices == np.arange(250)[:, None] + [0, 250]).all()


@pytest.mark.parametrize("p", EXPONENTS)
def test_zero_columns_change_nothing(p, level):
    points = rows(230, 5).astype(np.float32)
    padded = np.concatenate([points, np.zeros((230, 20), np.float32)], axis=1)
    found = exactknn.knn(points, k=6, metric="minkowski", p=p)
    assert same_bytes(found, exactknn.knn(padded, k=6, metric="minkowski", p=p))
    for threads in (1, 2):
        assert same_bytes(found, exactknn.knn(points, k=6, metric="minkowski", p=p, num_threads=threads))
    alone = exactknn.knn(points[5:6], points, 7, metric="minkowski", p=p)
    assert alone[1][0, 1:].tolist() == found[1][5].tolist()
    assert alone[0][0, 1:].tolist() == found[0][5].tolist()


@pytest.mark.parametrize("p", [1, 3, 2.7, 100, math.inf])
@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e150, 1e300])
def test_distances_in_range_are_right_whatever_their_powers_are(p, scale):
    query, reference = rows(10, 6), rows(220, 6, seed=1)
    distances, indices = exactknn.knn(query * scale, reference * scale, 5, metric="minkowski", p=p)
    wanted, wanted_indices = exactknn.knn(query, reference, 5, metric="minkowski", p=p)
    assert indices.tolist() == wanted_indices.tolist()
    np.testing.assert_allclose(distances / scale, wanted, rtol=1e-13)


@pytest.mark.parametrize("p", [0, -1, -0.0, math.nan, -math.inf, np.float32(-2), -(10**400)])
def test_an_exponent_that_cannot_be_is_refused(p):
    with pytest.raises(ValueError, match=r"^p must be a number above 0.*, got (-|0|nan)"):
        exactknn.knn(rows(3, 2), k=1, metric="minkowski", p=p)


@pytest.mark.parametrize("p", ["2", True, np.True_, 1j, [2], np.array([2.0])])
def test_an_exponent_that_is_no_number_is_refused(p):
    with pytest.raises(TypeError, match=r"^p must be a number, got"):
        exactknn.knn(rows(3, 2), k=1, metric="minkowski", p=p)


def test_an_exponent_without_minkowski_is_refused():
    with pytest.raises(ValueError, match=r"^p is for metric='minkowski' only, got p=1 with metric='euclidean'$"):
        exactknn.knn(rows(3, 2), k=1, metric="euclidean", p=1)


@pytest.mark.parametrize("p", [3, np.int64(3), np.float32(3), np.float16(3)])
def test_numbers_of_every_kind_are_exponents(p):
    points = rows(30, 4)
    assert same_bytes(
        exactknn.knn(points, k=3, metric="minkowski", p=p), exactknn.knn(points, k=3, metric="minkowski", p=3.0)
    )


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_radius_cuts_the_ranking_of_knn(p, dtype, level):
    query, reference = rows(30, 9).astype(dtype), rows(300, 9, seed=1).astype(dtype)
    distances, indices = exactknn.knn(query, reference, 300, metric="minkowski", p=p)
    for r in (distances[3, 7], distances[29, 150], dtype(0)):
        inside = distances <= r
        found = exactknn.radius(query, reference, r, metric="minkowski", p=p)
        assert found[0].tolist() == [0, *np.cumsum(inside.sum(axis=1))]
        assert same_bytes(found[1:], (indices[inside], distances[inside]))
        bare = exactknn.radius(query, reference, r, metric="minkowski", p=p, return_distances=False)
        by_row = exactknn.radius(query, reference, r, metric="minkowski", p=p, sort=False)
        assert same_bytes(bare, by_row[:2])
        assert sorted(by_row[1]) == sorted(found[1])


@pytest.mark.parametrize("p", [1, 1.5, 3, 2.7, math.inf])
def test_rows_on_the_radius_are_inside(p, brute_force):
    grid = np.random.default_rng(3).integers(0, 3, (400, 3)).astype(np.float32)
    distances, indices = brute_force(grid, grid, 399, metric="minkowski", p=p, exclude_self=True)
    for r in (0, 1, 2):
        indptr, found, values = exactknn.radius(grid, r=r, metric="minkowski", p=p)
        assert indptr.tolist() == [0, *np.cumsum((distances <= r).sum(axis=1))]
        assert found.tolist() == indices[distances <= r].tolist()
        np.testing.assert_allclose(values, distances[distances <= r], rtol=1.2e-7)


def test_a_radius_refuses_the_same_exponents():
    with pytest.raises(ValueError, match=r"^p must be a number above 0, or infinity, got 0$"):
        exactknn.radius(rows(3, 2), r=1, metric="minkowski", p=0)
    with pytest.raises(TypeError, match=r"^p must be a number, got '2' of type str$"):
        exactknn.radius(rows(3, 2), r=1, metric="minkowski", p="2")
    with pytest.raises(ValueError, match=r"^p is for metric='minkowski' only, got p=3 with metric='cosine'$"):
        exactknn.radius(rows(3, 2), r=1, metric="cosine", p=3)
