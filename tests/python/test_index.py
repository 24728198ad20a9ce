"""``exactknn.Index``: the bytes of ``knn`` and ``radius`` for its rows, independent of its history."""

import copy
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exactknn
from exactknn import Index, _core
from tests.python.index_helpers import DTYPES, SEALED, assert_same, rows

METRICS = ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev", "minkowski")


def test_an_index_by_hand():
    index = Index()
    index.add(np.array([[0, 0], [3, 4]], np.float32))
    index.add(np.array([[0, 1], [0, 1]], np.float32))
    distances, indices = index.search(np.array([[0, 0], [3, 3]], np.float32), 3)
    assert distances.tolist() == [[0, 1, 1], [1, 13, 13]]
    assert indices.tolist() == [[0, 2, 3], [1, 2, 3]]
    index.remove([True, False, True, False])
    distances, indices = index.search(np.array([[0, 0]], np.float32), None)
    assert distances.tolist() == [[1, 25]]
    assert indices.tolist() == [[1, 0]]
    indptr, indices = index.radius(np.zeros((1, 2), np.float32), 25, return_distances=False)
    assert (indptr.tolist(), indices.tolist()) == ([0, 2], [0, 1])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_of_knn_and_radius(metric, dtype):
    stored = np.round(rows(SEALED + 700, 3) * 4, 1).astype(DTYPES[dtype])  # many ties
    p = 3.0 if metric == "minkowski" else None
    index = Index(metric, p=p)
    for part in (stored[:300], stored[300 : SEALED + 400], stored[SEALED + 400 :]):
        index.add(part)
    assert (len(index), index.dim, index.dtype, index.metric, index.p) == (len(stored), 3, dtype, metric, p)
    query = rows(40, 3, seed=1, dtype=DTYPES[dtype])
    assert_same(index.search(query, 9), exactknn.knn(query, stored, 9, metric=metric, p=p))
    own = stored[:40]
    wanted = exactknn.knn(own, stored, 5, metric=metric, p=p, exclude_self=True)
    assert_same(index.search(own, 5, exclude_self=True, num_threads=1), wanted)
    r = float(wanted[0][:, -1].mean())
    for options in ({}, {"exclude_self": True, "return_distances": False}, {"sort": False}):
        assert_same(index.radius(own, r, **options), exactknn.radius(own, stored, r, metric=metric, p=p, **options))


@pytest.mark.parametrize("metric", ["normalized_sqeuclidean", "normalized_euclidean", "cosine_similarity"])
def test_metrics_of_distance_objects(metric):
    stored, query = rows(500, 4), rows(9, 4, seed=1)
    index = Index(metric)
    index.add(stored)
    assert_same(index.search(query, 7), _core.knn(query, stored, 7, metric))


def test_minkowski_of_an_exponent_with_a_name_of_its_own():
    for p, name in ((None, "euclidean"), (1, "cityblock"), (2, "euclidean"), (np.inf, "chebyshev")):
        index = Index("minkowski", p=p)
        assert (index.metric, index.p) == (name, None)
    assert repr(Index("minkowski", p=0.5)) == "Index(metric='minkowski', dtype=None, p=0.5, rows=0, dim=None)"


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_sequence_of_changes(tmp_path_factory, data):
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    metric = data.draw(st.sampled_from(METRICS))
    dim = data.draw(st.integers(2, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    coarse = data.draw(st.booleans())
    p = data.draw(st.sampled_from([0.5, 1.5, 3.0])) if metric == "minkowski" else None
    index = Index(metric, dtype, p=p)
    model = np.empty((0, dim), DTYPES[dtype])

    def draw_rows(n):
        numbers = rng.standard_normal((n, dim))
        return (np.round(numbers) if coarse else numbers).astype(DTYPES[dtype])

    sizes = st.one_of(st.integers(0, 40), st.sampled_from([SEALED - 1, SEALED, SEALED + 1, 2 * SEALED + 5]))
    for _ in range(data.draw(st.integers(1, 9))):
        match data.draw(st.sampled_from(["add", "add", "remove", "search", "radius", "save", "copy"])):
            case "add":
                more = draw_rows(data.draw(sizes))
                index.add(more)
                model = np.concatenate([model, more])
            case "remove":
                share = data.draw(st.sampled_from([0, 0.0003, 0.5, 1]))
                mask = rng.random(len(model)) < share
                index.remove(mask)
                model = model[~mask]
            case "search":
                exclude_self = data.draw(st.booleans())
                query = model[:6] if exclude_self else draw_rows(6)
                k = data.draw(st.integers(0, 30))
                k = min(k, max(len(model) - exclude_self, 0))
                wanted = exactknn.knn(query, model, k, metric=metric, p=p, exclude_self=exclude_self)
                assert_same(index.search(query, k, exclude_self=exclude_self), wanted)
            case "radius":
                query = draw_rows(4)
                sort = data.draw(st.sampled_from([None, False, True]))
                distances = data.draw(st.booleans())
                options = dict(return_distances=distances, sort=sort)
                wanted = exactknn.radius(query, model, 0.5, metric=metric, p=p, **options)
                assert_same(index.radius(query, 0.5, **options), wanted)
            case "save" if index.dim is not None:
                path = tmp_path_factory.getbasetemp() / "sequence.index"
                index.save(path)
                if data.draw(st.booleans()):
                    index = Index.load(path)
            case "copy":
                index = copy.copy(index)
        assert len(index) == len(model)
    if index.dim is not None:
        assert index.rows().astype(np.float64).tobytes() == model.astype(np.float64).tobytes()


@pytest.mark.parametrize(
    "given", ["bfloat16", torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)], ids=str
)
def test_names_of_a_type(given):
    assert Index(dtype=given).dtype == "bfloat16"


@pytest.mark.parametrize("given", [np.float16, "float16", np.dtype("float16"), torch.float16], ids=str)
def test_more_names_of_a_type(given):
    assert Index(dtype=given).dtype == "float16"


def rounded(value, fraction_bits, least_exponent):
    """To the nearest number of a format, the even one of two."""
    exponent = max(math.frexp(value)[1] - 1, least_exponent)
    unit = Fraction(2) ** (exponent - fraction_bits)
    return round(Fraction(value) / unit) * unit


@pytest.mark.parametrize(
    ("dtype", "fraction_bits", "least_exponent"), [("float32", 23, -126), ("float16", 10, -14), ("bfloat16", 7, -126)]
)
def test_rows_are_rounded_once_to_nearest_even(dtype, fraction_bits, least_exponent):
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(400) * 2.0 ** rng.integers(-160, 15, 400)
    # Numbers of the format; the middle between two; a little beside it; and about the smallest.
    narrow = np.array([float(rounded(value, fraction_bits, least_exponent)) for value in wide])
    half = 2.0 ** (np.maximum(np.frexp(narrow)[1] - 1, least_exponent) - fraction_bits - 1)
    smallest = 2.0 ** (least_exponent - fraction_bits) * np.array([0.49, 0.5, 0.51, 1.5, -0.5, 2.5, 0.0, -0.0])
    beside = [narrow + half * (1 + step) for step in (-(2.0**-20), 0, 2.0**-20)]
    values = np.concatenate([wide, narrow, *beside, smallest])
    for source in (values, values.astype(np.float32)):
        index = Index(dtype=dtype)
        index.add(source.reshape(-1, 1))
        for value, found in zip(source.tolist(), index.rows().ravel().tolist(), strict=True):
            assert Fraction(found) == rounded(value, fraction_bits, least_exponent), value
            assert math.copysign(1, found) == math.copysign(1, value)


def test_rounding_for_a_caller_that_flushes_subnormals(run_python):
    program = """
import numpy as np, torch
import exactknn

double = np.array([[3e-40, -1e-39, 2e-38, 1e-45, 4e-46, 1.5]])
single = double.astype(np.float32)

def stored():
    found = []
    for dtype in ("float32", "float16", "bfloat16"):
        for rows in (double, single):
            index = exactknn.Index(dtype=dtype)
            index.add(rows)
            found.append(index.rows())
    return found

before = stored()
assert torch.set_flush_denormal(True)
print([a.tobytes() for a in stored()] == [a.tobytes() for a in before], before[0].view(np.uint32)[0, 3:5].tolist())
"""
    assert run_python(program) == "True [1, 0]"


@pytest.mark.parametrize("source", [np.float64, np.float32])
@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("bfloat16", 3.3895314e38)])
def test_a_value_beyond_the_range_is_refused_by_row_and_column(source, dtype, largest):
    index = Index(dtype=dtype)
    values = np.zeros((3, 2), source)
    values[2, 1] = -largest
    index.add(values)
    assert index.rows()[2, 1] == np.float32(values.astype(DTYPES[dtype])[2, 1])
    values[2, 1] = -largest * 1.003
    with pytest.raises(
        ValueError, match=f"reference must hold values that {dtype} can hold, got -.* in row 2, column 1"
    ):
        index.add(values)
    values[1, 0] = np.inf
    values[2, 1] = 0
    with pytest.raises(ValueError, match="reference must be finite, got inf in row 1, column 0"):
        index.add(values)
    values[1, 0] = np.nan
    with pytest.raises(ValueError, match="reference must be finite, got NaN in row 1, column 0"):
        index.add(values)
    assert len(index) == 3


def test_float32_cannot_hold_all_of_float64():
    index = Index(dtype="float32")
    with pytest.raises(
        ValueError, match=r"reference must hold values that float32 can hold, got 1e\+39 in row 1, column 0"
    ):
        index.add([[0.0], [1e39]])
    assert (len(index), index.dim) == (0, None)


def test_without_a_dtype_no_row_is_rounded():
    index = Index()
    index.add(rows(3, 2))
    index.add(rows(2, 2, dtype=np.float16))
    index.add(torch.ones(2, 2, dtype=torch.bfloat16))
    assert (index.dtype, len(index)) == ("float32", 7)
    with pytest.raises(
        TypeError,
        match=r"reference must be of a type that float32, the type of the first rows, represents exactly.*got float64",
    ):
        index.add(np.zeros((1, 2)))
    half = Index()
    half.add(rows(3, 2, dtype=np.float16))
    for wider in (np.zeros((1, 2), np.float32), torch.zeros(1, 2, dtype=torch.bfloat16)):
        with pytest.raises(TypeError, match="create the index with dtype='float16'"):
            half.add(wider)
    half.reset()
    half.add(np.zeros((1, 5)))
    assert (half.dtype, half.dim) == ("float64", 5)


def test_a_float64_query_needs_float64_rows():
    for dtype in ("float32", "float16", "bfloat16"):
        index = Index(dtype=dtype)
        index.add(rows(4, 2))
        for call in (
            lambda index=index: index.search([[0.0, 1.0]], 1),
            lambda index=index: index.radius(np.zeros((1, 2)), 1),
        ):
            with pytest.raises(TypeError, match=f"query must be float32 or half.* {dtype} rows, got float64: pass"):
                call()
    index = Index(dtype="float64")
    index.add(rows(50, 2))
    query = rows(3, 2, dtype=np.float16)
    assert_same(index.search(query, 5), exactknn.knn(query, index.rows(), 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_of_narrower_types_are_widened(dtype):
    stored = rows(60, 3, dtype=DTYPES[dtype])
    index = Index()
    index.add(stored)
    for narrow in (np.float16, ml_dtypes.bfloat16, np.float32):
        query = rows(5, 3, seed=1, dtype=narrow)
        assert_same(index.search(query, 4), exactknn.knn(query, stored, 4))


def test_whatever_has_rows_is_taken():
    stored, query = rows(30, 4), rows(5, 4, seed=1)
    wanted = exactknn.knn(query, stored, 3)
    for make in (
        torch.from_numpy,
        np.asfortranarray,
        lambda x: x.astype(">f4"),
        lambda x: torch.from_numpy(x).requires_grad_(),
        lambda x: torch.from_numpy(np.repeat(x, 2, axis=0))[::2],
    ):
        index = Index()
        index.add(make(stored))
        assert_same(index.search(make(query), 3), wanted)
    with torch.inference_mode():
        index = Index()
        index.add(torch.from_numpy(stored) * 1)
        assert_same(index.search(torch.from_numpy(query) * 1, 3), wanted)


def test_methods_of_faiss_have_the_counterparts_of_the_page():
    faiss = pytest.importorskip("faiss")
    stored, query = np.random.default_rng(5).integers(-9, 9, (2, 90, 3)).astype(np.float32)
    stored = np.unique(stored, axis=0)
    for theirs, ours in ((faiss.IndexFlatL2(3), Index()), (faiss.IndexFlatIP(3), Index("inner_product"))):
        for index in (theirs, ours):
            index.add(stored[:50])
            index.add(stored[50:])
        theirs.remove_ids(np.array([3, 60]))
        mask = np.zeros(len(ours), bool)
        mask[[3, 60]] = True
        ours.remove(mask)
        assert (theirs.ntotal, theirs.d) == (len(ours), ours.dim)
        assert ours.search(query, 4)[0].tolist() == theirs.search(query, 4)[0].tolist()
        assert ours.rows(7, 7 + 5).tolist() == theirs.reconstruct_n(7, 5).tolist()
        with pytest.raises(ValueError, match="k must be at most the number of references"):
            ours.search(query, len(ours) + 1)
