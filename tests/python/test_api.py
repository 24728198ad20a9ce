"""``exactknn.knn`` and the controls of the native core."""

import logging
import re
from importlib.metadata import version

import ml_dtypes
import numpy as np
import pytest
import torch

import exactknn
from exactknn import _core

METRICS = ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev")
QUERY = np.array([[0, 0], [3, 0]], np.float32)
REFERENCE = np.array([[0, 1], [3, 0.5], [9, 9]], np.float32)


def rows(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def test_small_values_by_hand():
    distances, indices = exactknn.knn(QUERY, REFERENCE, 3)
    assert distances.tolist() == [[1, 9.25, 162], [0.25, 10, 117]]
    assert indices.tolist() == [[0, 1, 2], [1, 0, 2]]
    assert (distances.dtype, indices.dtype) == (np.float32, np.int64)


def test_each_metric_by_hand():
    query, reference = [[3.0, 4.0]], [[0.0, 5.0], [6.0, 8.0], [-3.0, -4.0]]
    wanted = {
        "sqeuclidean": ([10, 25, 100], [0, 1, 2]),
        "euclidean": ([10**0.5, 5, 10], [0, 1, 2]),
        "cosine": ([0, 0.2, 2], [1, 0, 2]),
        "inner_product": ([50, 20, -25], [1, 0, 2]),
        "cityblock": ([4, 7, 14], [0, 1, 2]),
        "chebyshev": ([3, 4, 8], [0, 1, 2]),
    }
    for metric, (values, order) in wanted.items():
        distances, indices = exactknn.knn(query, reference, 3, metric=metric)
        np.testing.assert_allclose(distances, [values], rtol=1e-15, atol=1e-15)
        assert indices.tolist() == [order]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_agrees_with_brute_force(metric, dtype, brute_force):
    query, reference = rows(30, 17).astype(dtype), rows(200, 17, seed=1).astype(dtype)
    distances, indices = exactknn.knn(query, reference, 12, metric=metric)
    want_distances, want_indices = brute_force(query, reference, 12, metric=metric)
    assert indices.tolist() == want_indices.tolist()
    assert distances.dtype == want_distances.dtype
    np.testing.assert_allclose(
        distances,
        want_distances,
        rtol=1e-12 if dtype == np.float64 else 1.2e-7,
        atol=1e-14 if metric == "cosine" else 0,
    )


def test_a_missing_reference_searches_among_the_queries_without_self(brute_force):
    points = rows(50, 5).astype(np.float32)
    distances, indices = exactknn.knn(points, k=49)
    assert indices.tolist() == brute_force(points, points, 49, exclude_self=True)[1].tolist()
    assert not (indices == np.arange(50)[:, None]).any()
    same = exactknn.knn(points, points, 49, exclude_self=True)
    assert (distances.tobytes(), indices.tobytes()) == (same[0].tobytes(), same[1].tobytes())


def test_exclude_self_false_includes_self():
    points = rows(20, 3)
    distances, indices = exactknn.knn(points, k=1, exclude_self=False)
    assert indices[:, 0].tolist() == list(range(20))
    assert distances.tolist() == [[0]] * 20


def test_exclude_self_with_a_longer_reference(brute_force):
    reference = rows(40, 4)
    _, indices = exactknn.knn(reference[:10], reference, 39, exclude_self=True)
    assert indices.tolist() == brute_force(reference[:10], reference, 39, exclude_self=True)[1].tolist()
    with pytest.raises(ValueError, match="reference"):
        exactknn.knn(reference, reference[:10], 1, exclude_self=True)
    with pytest.raises(TypeError, match="exclude_self must be True, False or None, got 'yes'"):
        exactknn.knn(reference, exclude_self="yes")


def test_a_reference_includes_self_unless_told_otherwise():
    points = rows(10, 3)
    assert exactknn.knn(points, points, 1)[1][:, 0].tolist() == list(range(10))


@pytest.mark.parametrize(
    "convert", [torch.tensor, torch.Tensor.t, np.ndarray.tolist], ids=["tensor", "transposed", "list"]
)
def test_other_containers_give_the_same_bytes(convert):
    query, reference = rows(9, 6), rows(30, 6, seed=1)
    wanted = exactknn.knn(query, reference, 5)
    if convert is torch.Tensor.t:
        given = [torch.tensor(x.T.copy()).t() for x in (query, reference)]
    else:
        given = [convert(x) for x in (query, reference)]
    got = exactknn.knn(*given, 5)
    assert [x.tobytes() for x in got] == [x.tobytes() for x in wanted]


def test_two_types_are_promoted():
    query, reference = rows(4, 3).astype(np.float16), rows(9, 3, seed=1).astype(ml_dtypes.bfloat16)
    got = exactknn.knn(query, reference, 3)
    wanted = exactknn.knn(query.astype(np.float32), reference.astype(np.float32), 3)
    assert [x.tobytes() for x in got] == [x.tobytes() for x in wanted]
    assert exactknn.knn(query, reference.astype(np.float64), 3)[0].dtype == np.float64


def test_inputs_are_not_written_to():
    query, reference = rows(5, 3), rows(9, 3, seed=1)
    before = query.copy(), reference.copy()
    query.flags.writeable = reference.flags.writeable = False
    exactknn.knn(query, reference, 2, metric="cosine")
    assert (query == before[0]).all()
    assert (reference == before[1]).all()


def test_default_k_is_ten_and_numpy_integers_count():
    assert exactknn.knn(rows(3, 2), rows(20, 2))[0].shape == (3, 10)
    assert exactknn.knn(QUERY, REFERENCE, np.int8(2))[1].shape == (2, 2)


@pytest.mark.parametrize("k", [True, 2.0, "2", np.True_])
def test_k_must_be_an_integer(k):
    with pytest.raises(TypeError, match="k must be an integer"):
        exactknn.knn(QUERY, REFERENCE, k)


@pytest.mark.parametrize("k", [-1, 4])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=rf"\bk\b.*{re.escape(str(k))}"):
        exactknn.knn(QUERY, REFERENCE, k)


def test_k_zero_and_no_queries():
    distances, indices = exactknn.knn(QUERY, REFERENCE, 0)
    assert distances.shape == indices.shape == (2, 0)
    distances, indices = exactknn.knn(QUERY[:0], REFERENCE, 2)
    assert distances.shape == indices.shape == (0, 2)
    assert (distances.dtype, indices.dtype) == (np.float32, np.int64)


@pytest.mark.parametrize("metric", ["l2", "", None, 2, "SQEUCLIDEAN"])
def test_an_unknown_metric_names_the_choices(metric):
    with pytest.raises(ValueError, match=r"metric must be one of sqeuclidean, euclidean, .*, minkowski, got"):
        exactknn.knn(QUERY, REFERENCE, 1, metric=metric)


def test_wrong_shapes_name_the_argument():
    with pytest.raises(ValueError, match=r"query must be 2-D .* got shape \(2,\)"):
        exactknn.knn(QUERY[0], REFERENCE, 1)
    with pytest.raises(ValueError, match=r"reference must be 2-D .* got shape \(1, 3, 2\)"):
        exactknn.knn(QUERY, REFERENCE[None], 1)
    with pytest.raises(ValueError, match="query and reference must have the same number of columns, got 2 and 1"):
        exactknn.knn(QUERY, REFERENCE[:, :1], 1)


def test_integer_arrays_are_refused():
    with pytest.raises(TypeError, match="query must hold float32, float64, float16 or bfloat16 values, got int64"):
        exactknn.knn(QUERY.astype(np.int64), REFERENCE, 1)


def test_num_threads_is_checked_and_changes_no_byte():
    query, reference = rows(64, 24).astype(np.float32), rows(500, 24, seed=1).astype(np.float32)
    wanted = [x.tobytes() for x in exactknn.knn(query, reference, 7, num_threads=1)]
    for threads in (2, 3, np.int64(4)):
        assert [x.tobytes() for x in exactknn.knn(query, reference, 7, num_threads=threads)] == wanted
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        exactknn.knn(query, reference, 1, num_threads=0)
    with pytest.raises(TypeError, match="num_threads must be an integer"):
        exactknn.knn(query, reference, 1, num_threads=1.5)


def test_thread_controls():
    default = exactknn.get_num_threads()
    assert default >= 1
    try:
        exactknn.set_num_threads(3)
        assert exactknn.get_num_threads() == 3
        with pytest.raises(ValueError, match="num_threads"):
            exactknn.set_num_threads(0)
    finally:
        exactknn.set_num_threads(None)
    assert exactknn.get_num_threads() == default


def test_level_controls():
    levels = exactknn.available_simd_levels()
    assert "scalar" in levels
    best = exactknn.simd_level()
    assert best in levels
    try:
        for name in levels:
            exactknn.set_simd_level(name)
            assert exactknn.simd_level() == name
        with pytest.raises(ValueError, match="scalar"):
            exactknn.set_simd_level("mmx")
    finally:
        exactknn.set_simd_level(None)
    assert exactknn.simd_level() == best


def test_levels_give_the_same_bytes(level):
    query, reference = rows(40, 33).astype(np.float32), rows(300, 33, seed=1).astype(np.float32)
    got = [x.tobytes() for x in exactknn.knn(query, reference, 9)]
    exactknn.set_simd_level("scalar")
    assert got == [x.tobytes() for x in exactknn.knn(query, reference, 9)]


def test_version_and_build():
    assert exactknn.__version__ == version("exactknn")
    info = exactknn.build_info()
    assert info["version"] == exactknn.__version__
    assert all(isinstance(value, str) for value in info.values())


def test_all_names_exist():
    assert all(hasattr(exactknn, name) for name in exactknn.__all__)


def test_the_logger_is_left_to_the_application():
    logger = logging.getLogger("exactknn")
    assert logger.level == logging.NOTSET
    assert all(isinstance(handler, logging.NullHandler) for handler in logger.handlers)


@pytest.mark.parametrize("huge", [2**63, 2**70])
def test_integers_beyond_a_machine_word_are_refused_by_name(huge):
    x = np.zeros((4, 2), np.float32)
    with pytest.raises(ValueError, match=r"^k must be"):
        exactknn.knn(x, x, huge)
    with pytest.raises(ValueError, match=r"^num_threads must be"):
        exactknn.knn(x, x, 1, num_threads=huge)
    with pytest.raises(ValueError, match=r"^num_threads must be"):
        exactknn.set_num_threads(huge)


def test_all_neighbours():
    x = np.random.default_rng(5).standard_normal((300, 7)).astype(np.float32)
    for reference, exclude_self, most in ((None, None, 299), (x, None, 300), (x, True, 299)):
        found = exactknn.knn(x[:20] if reference is not None else x, reference, k=None, exclude_self=exclude_self)
        wanted = exactknn.knn(x[:20] if reference is not None else x, reference, k=most, exclude_self=exclude_self)
        assert found[0].shape[1] == most
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))


def test_the_last_search_says_how_it_went():
    x = np.random.default_rng(5).standard_normal((2_000, 16)).astype(np.float32)
    exactknn.knn(x[:2], x, k=300)
    assert _core.last_search() == {"filter": "none", "rescored": 4_000}
    exactknn.knn(x[:2], x, k=3)
    told = _core.last_search()
    assert told["filter"] == "unpacked" and 3 <= told["rescored"] < 2_000
    exactknn.knn(x, k=3)
    told = _core.last_search()
    assert told["filter"] == ("float32" if exactknn.simd_level() == "scalar" else "int8")
    assert 2_000 * 3 <= told["rescored"] < 2_000 * 2_000


def test_measured_rates_are_those_of_the_level(level):
    assert (_core.measure("int8") is not None) == (level != "scalar")
    assert _core.measure("float32", 20) > 0
    with pytest.raises(ValueError, match="codes must be 'int8' or 'float32', got \"int4\""):
        _core.measure("int4")
    with pytest.raises(ValueError, match="column"):
        _core.measure("int8", 0)
