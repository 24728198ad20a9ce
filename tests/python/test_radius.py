"""``exactknn.radius`` against float64 brute force, and where a radius is hard: on ties, at zero, at the ends."""

import os
import re
import signal
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exactknn
from exactknn import _core

METRICS = ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev")


def rows(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def within(brute_force, query, reference, r, *, metric="sqeuclidean", exclude_self=False):
    """Cut the whole ranking of each query at ``r``: what ``radius`` has to return."""
    k = len(reference) - exclude_self
    distances, indices = brute_force(query, reference, k, metric=metric, exclude_self=exclude_self)
    wide = distances.astype(np.float64)
    inside = wide >= r if metric == "inner_product" else wide <= r
    indptr = np.concatenate([[0], np.cumsum(inside.sum(axis=1))])
    return indptr, indices[inside], distances[inside]


def same(found, wanted):
    return [x.tobytes() for x in found] == [x.tobytes() for x in wanted]


def test_small_values_by_hand():
    reference = np.array([[0, 1], [3, 4], [0, 0], [0, -1], [9, 9]], np.float32)
    indptr, indices, distances = exactknn.radius(np.array([[0, 0], [50, 50], [3, 4]], np.float32), reference, 1.0)
    assert indptr.tolist() == [0, 3, 3, 4]
    assert indices.tolist() == [2, 0, 3, 1]
    assert distances.tolist() == [0, 1, 1, 0]
    assert (indptr.dtype, indices.dtype, distances.dtype) == (np.int64, np.int64, np.float32)


def test_each_metric_by_hand():
    query, reference = [[3.0, 4.0]], [[0.0, 5.0], [6.0, 8.0], [-3.0, -4.0]]
    for metric, r, order in [
        ("sqeuclidean", 25, [0, 1]),
        ("euclidean", 5, [0, 1]),
        ("cosine", 0.25, [1, 0]),
        ("inner_product", 20, [1, 0]),
        ("inner_product", -25, [1, 0, 2]),
    ]:
        indptr, indices, _ = exactknn.radius(query, reference, r, metric=metric)
        assert (indptr.tolist(), indices.tolist()) == ([0, len(order)], order)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_agrees_with_brute_force_at_every_level(metric, dtype, brute_force, level):
    query, reference = rows(30, 17).astype(dtype), rows(260, 17, seed=1).astype(dtype)
    every = brute_force(query, reference, 260, metric=metric)[0].astype(np.float64)
    for share in (0.002, 0.1, 0.7):
        # Between two values: the oracle sums in another order, and may differ in the last bit of one.
        values = np.unique(every)
        at = int(share * len(values))
        r = float(values[at : at + 2].mean())
        indptr, indices, distances = exactknn.radius(query, reference, r, metric=metric)
        want_indptr, want_indices, want_distances = within(brute_force, query, reference, r, metric=metric)
        assert indptr.tolist() == want_indptr.tolist()
        assert indices.tolist() == want_indices.tolist()
        assert distances.dtype == want_distances.dtype
        atol = 1e-14 if metric == "cosine" else 0
        np.testing.assert_allclose(distances, want_distances, 1e-11 if dtype == np.float64 else 1.2e-7, atol)


@pytest.mark.parametrize("metric", METRICS)
def test_is_the_ranking_of_knn_cut_at_r(metric, level):
    query, reference = rows(40, 24).astype(np.float32), rows(500, 24, seed=1).astype(np.float32)
    distances, indices = exactknn.knn(query, reference, 500, metric=metric)
    for r in (distances[3, 7], distances[39, 250], np.float32(0)):
        inside = distances >= r if metric == "inner_product" else distances <= r
        wanted = (np.concatenate([[0], np.cumsum(inside.sum(axis=1))]), indices[inside], distances[inside])
        assert same(exactknn.radius(query, reference, r, metric=metric), wanted)


def test_integer_grids_are_all_ties(brute_force, level):
    x = np.random.default_rng(0).integers(0, 3, (600, 4)).astype(np.float32)
    for r in (0, 1, 2, 2.5, 3, 16):
        assert same(exactknn.radius(x, x, r), within(brute_force, x, x, r))
        assert same(exactknn.radius(x, r=r), within(brute_force, x, x, r, exclude_self=True))
    for r in (0, 7, 7.5, -1):
        assert same(
            exactknn.radius(x, x, r, metric="inner_product"),
            within(brute_force, x, x, r, metric="inner_product"),
        )


def test_a_value_equal_to_r_is_inside_and_the_number_below_leaves_it_out(level):
    x = rows(300, 9).astype(np.float32)
    distances, indices = exactknn.knn(x[:20], x, 5)
    r = float(distances[4, 3])
    indptr, found, values = exactknn.radius(x[:20], x, r)
    assert indices[4, 3] in found[indptr[4] : indptr[5]]
    assert values.max() == r
    indptr, found, values = exactknn.radius(x[:20], x, np.nextafter(r, 0))
    assert indices[4, 3] not in found[indptr[4] : indptr[5]]
    assert values.max() < r


def test_r_is_not_rounded_to_the_type_of_the_rows():
    # 0.1 lies below float32(0.1), the distance of these rows.
    query, reference = np.zeros((1, 1), np.float32), np.array([[0.1]], np.float32)
    assert exactknn.radius(query, reference, 0.1, metric="euclidean")[0].tolist() == [0, 0]
    assert exactknn.radius(query, reference, np.float32(0.1), metric="euclidean")[0].tolist() == [0, 1]


def test_r_zero_finds_the_copies(level):
    x = rows(50, 6).astype(np.float32)[np.arange(400) % 50]
    for metric in ("sqeuclidean", "euclidean", "cosine"):
        indptr, indices, distances = exactknn.radius(x, r=0, metric=metric)
        assert np.diff(indptr).tolist() == [7] * 400
        assert indices[:7].tolist() == [50, 100, 150, 200, 250, 300, 350]
        assert not distances.any()
        assert exactknn.radius(x, r=-0.0, metric=metric)[1].tolist() == indices.tolist()


def test_a_distance_returned_as_zero_is_within_zero():
    # Its square is 1e-60: zero in float32.
    query, reference = np.zeros((1, 1), np.float32), np.array([[1e-30], [1.0], [0.0]], np.float32)
    indptr, indices, distances = exactknn.radius(query, reference, 0)
    assert (indptr.tolist(), indices.tolist(), distances.tolist()) == ([0, 2], [2, 0], [0, 0])


def test_a_distance_returned_as_infinity_is_within_no_radius():
    query, reference = np.zeros((1, 1), np.float32), np.array([[1e30], [1.0]], np.float32)
    assert exactknn.radius(query, reference, 1e300)[1].tolist() == [1]
    assert exactknn.radius(query.astype(np.float64), reference, 1e300)[1].tolist() == [1, 0]


def test_nothing_inside():
    x = rows(300, 5).astype(np.float32)
    for r in (-1, -1e300, -5e-324, 1e-12):
        indptr, indices, distances = exactknn.radius(x, r=r)
        assert indptr.tolist() == [0] * 301
        assert indices.shape == distances.shape == (0,)
        assert (indices.dtype, distances.dtype) == (np.int64, np.float32)


def test_no_queries_and_no_references():
    x = np.zeros((0, 3), np.float64)
    for query, reference in [(x, x), (x, np.ones((4, 3))), (np.ones((2, 3)), x), (x, None)]:
        indptr, indices, distances = exactknn.radius(query, reference, 1)
        assert indptr.tolist() == [0] * (len(query) + 1)
        assert (indices.size, distances.size, distances.dtype) == (0, 0, np.float64)


def test_self(brute_force):
    x = rows(260, 4).astype(np.float32)
    alone = exactknn.radius(x, r=2.0)
    assert same(alone, exactknn.radius(x, x, 2.0, exclude_self=True))
    assert same(alone, within(brute_force, x, x, 2.0, exclude_self=True))
    indptr, indices, _ = exactknn.radius(x, r=2.0, exclude_self=False)
    assert same(exactknn.radius(x, x, 2.0), exactknn.radius(x, r=2.0, exclude_self=False))
    assert indices[indptr[:-1]].tolist() == list(range(260))
    first = exactknn.radius(x[:30], x, 2.0, exclude_self=True)
    assert first[1].tolist() == alone[1][: alone[0][30]].tolist()
    with pytest.raises(ValueError, match="reference must begin with the queries"):
        exactknn.radius(x, x[:30], 2.0, exclude_self=True)
    with pytest.raises(TypeError, match="exclude_self must be True, False or None, got 'yes'"):
        exactknn.radius(x, r=2.0, exclude_self="yes")


@pytest.mark.parametrize("metric", METRICS)
def test_without_distances_the_same_rows_come_by_number(metric, level):
    query, reference = rows(60, 32).astype(np.float32), rows(700, 32, seed=1).astype(np.float32)
    r = float(np.median(exactknn.knn(query, reference, 200, metric=metric)[0]))
    indptr, indices, distances = exactknn.radius(query, reference, r, metric=metric)
    assert 60 < len(indices) < 60 * 700
    ordered = np.concatenate([np.sort(part) for part in np.split(indices, indptr[1:-1])])
    assert same(exactknn.radius(query, reference, r, metric=metric, return_distances=False), (indptr, ordered))
    by_row = exactknn.radius(query, reference, r, metric=metric, sort=False)
    assert same(by_row[:2], (indptr, ordered))
    assert sorted(by_row[2].tolist()) == sorted(distances.tolist())
    nearest_first = exactknn.radius(query, reference, r, metric=metric, sort=True, return_distances=False)
    assert same(nearest_first, (indptr, indices))


@pytest.mark.parametrize("return_distances", [True, False])
def test_threads_and_batches_change_no_byte(return_distances, level):
    query, reference = rows(500, 24).astype(np.float32), rows(3000, 24, seed=1).astype(np.float32)
    wanted = exactknn.radius(query, reference, 30.0, num_threads=1, return_distances=return_distances)
    assert 0 < len(wanted[1]) < 500 * 3000
    for threads in (2, 3):
        found = exactknn.radius(query, reference, 30.0, num_threads=threads, return_distances=return_distances)
        assert same(found, wanted)
    for size in (1, 3, 64):
        indptr, indices, *_ = exactknn.radius(query[:size], reference, 30.0, return_distances=return_distances)
        assert indptr.tolist() == wanted[0][: size + 1].tolist()
        assert indices.tolist() == wanted[1][: wanted[0][size]].tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 40),
    m=st.integers(1, 300),
    d=st.integers(1, 20),
    step=st.sampled_from([0.25, 1.0]),
    offset=st.sampled_from([0.0, 100.0, -1e4]),
    r=st.integers(-1, 40),
)
def test_exact_arithmetic_agrees_to_the_byte(brute_force, seed, n, m, d, step, offset, r):
    # Multiples of 1/4 of few bits: every sum is exact in any order, and many values equal r.
    random = np.random.default_rng(seed)
    query, reference = (random.integers(-3, 4, (size, d)) * step + offset for size in (n, m))
    query, reference = query.astype(np.float32), reference.astype(np.float32)
    assert same(exactknn.radius(query, reference, r / 4), within(brute_force, query, reference, r / 4))


def test_other_containers_and_types_give_the_same_bytes():
    query, reference = rows(9, 6), rows(30, 6, seed=1)
    wanted = exactknn.radius(query, reference, 8.0)
    assert same(exactknn.radius(torch.tensor(query), torch.tensor(reference), 8.0), wanted)
    assert same(exactknn.radius(query.tolist(), np.asfortranarray(reference), 8.0), wanted)
    half, brain = query.astype(np.float16), reference.astype(ml_dtypes.bfloat16)
    assert same(
        exactknn.radius(half, brain, 8.0),
        exactknn.radius(half.astype(np.float32), brain.astype(np.float32), 8.0),
    )


def test_the_arrays_are_those_of_a_sparse_matrix(brute_force):
    sparse = pytest.importorskip("scipy.sparse")
    x = rows(50, 3)
    indptr, indices, distances = exactknn.radius(x, r=2.0, metric="euclidean")
    matrix = sparse.csr_matrix((distances, indices, indptr), shape=(50, 50))
    all_distances, order = brute_force(x, x, 50, metric="euclidean")
    dense = np.empty((50, 50))
    np.put_along_axis(dense, order, all_distances, axis=1)
    np.fill_diagonal(dense, 0)
    np.testing.assert_allclose(matrix.toarray(), np.where(dense <= 2.0, dense, 0), rtol=1e-12)


def test_radius_neighbors_of_scikit_learn():
    neighbors = pytest.importorskip("sklearn.neighbors")
    x = rows(300, 5)
    theirs = neighbors.NearestNeighbors(algorithm="brute").fit(x).radius_neighbors(x, 1.3, return_distance=False)
    indptr, indices = exactknn.radius(x, x, 1.3, metric="euclidean", return_distances=False)
    assert [sorted(found.tolist()) for found in theirs] == [part.tolist() for part in np.split(indices, indptr[1:-1])]


@pytest.mark.parametrize("r", ["1", None, True, np.True_, 1j, [1.0], np.array([1.0]), Decimal("0.5")])
def test_r_must_be_a_real_number(r):
    with pytest.raises(TypeError, match=r"^r must be a real number, got"):
        exactknn.radius([[0.0]], [[1.0]], r)


def test_r_has_no_default():
    with pytest.raises(TypeError, match=r"^r must be a real number, got None: it has no default"):
        exactknn.radius([[0.0]], [[1.0]])


@pytest.mark.parametrize("r", [np.nan, np.inf, -np.inf, np.float32("nan"), 10**400])
def test_r_must_be_finite(r):
    with pytest.raises(ValueError, match=r"^r must be a finite number, got"):
        exactknn.radius([[0.0]], [[1.0]], r)


def test_numbers_of_many_types_are_taken():
    for r in (1, 1.0, np.int8(1), np.float16(1), np.float32(1), np.float64(1), Fraction(1)):
        assert exactknn.radius([[0.0]], [[1.0], [-1.0], [1.5]], r)[1].tolist() == [0, 1]


@pytest.mark.parametrize(("bad", "shown"), [(np.nan, "NaN"), (np.inf, "inf")])
@pytest.mark.parametrize("queries", [1, 300])
@pytest.mark.parametrize("r", [4.0, -1.0])
def test_rows_that_are_not_finite_are_named(bad, shown, queries, r):
    good = rows(300, 4).astype(np.float32)
    broken = good.copy()
    broken[[217, 260], 1] = bad
    with pytest.raises(ValueError, match=rf"reference must be finite, got {shown} in row 217, column 1"):
        exactknn.radius(good[:queries], broken, r)
    first = 218 - min(queries, 218)
    with pytest.raises(ValueError, match=rf"query must be finite, got {shown} in row {217 - first}, column 1"):
        exactknn.radius(broken[first : first + queries], good, r)


def test_other_arguments_are_checked():
    x = np.zeros((4, 2), np.float32)
    with pytest.raises(ValueError, match=r"metric must be one of sqeuclidean, euclidean, .* got 'l2'"):
        exactknn.radius(x, r=1, metric="l2")
    with pytest.raises(TypeError, match="sort must be True or False, got 1"):
        exactknn.radius(x, r=1, sort=1)
    with pytest.raises(TypeError, match="return_distances must be True or False, got 'no'"):
        exactknn.radius(x, r=1, return_distances="no")
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        exactknn.radius(x, r=1, num_threads=0)
    with pytest.raises(ValueError, match="query and reference must have the same number of columns, got 2 and 1"):
        exactknn.radius(x, x[:, :1], 1)
    with pytest.raises(ValueError, match=r"query must be 2-D .* got shape \(2,\)"):
        exactknn.radius(x[0], x, 1)
    with pytest.raises(TypeError, match="query must hold float32, float64, float16 or bfloat16 values, got int64"):
        exactknn.radius(x.astype(np.int64), x, 1)
    with pytest.raises(ValueError, match="r must be a finite number, got NaN"):
        _core.radius(x, None, float("nan"), "sqeuclidean")
    with pytest.raises(TypeError, match=re.escape("one dtype, got float32 and float64")):
        _core.radius(x, x.astype(np.float64), 1.0, "sqeuclidean")


def test_progress_rises_to_one_and_what_it_raises_stops_the_search():
    told = []
    x = rows(3000, 64).astype(np.float32)
    exactknn.radius(x, r=60.0, num_threads=1, progress=told.append)
    assert told[-1] == 1.0
    assert all(0 <= fraction <= 1 for fraction in told)

    def stop(_):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        exactknn.radius(x, r=60.0, num_threads=1, progress=stop)


INTERRUPT = """
import numpy as np
import exactknn

x = np.random.default_rng(0).standard_normal((120_000, 128)).astype(np.float32)
told = []

def progress(fraction):
    if not told:
        told.append(fraction)
        print("searching", flush=True)

try:
    exactknn.radius(x, r=100.0, progress=progress)
    print("finished")
except KeyboardInterrupt:
    print("interrupted")
print(exactknn.radius(x[:2], r=1e6)[1].tolist())
"""


def test_ctrl_c_ends_a_long_search():
    with subprocess.Popen([sys.executable, "-c", INTERRUPT], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "searching\n"
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=50)
        finally:
            process.kill()
    assert printed.splitlines() == ["interrupted", "[1, 0]"]
    assert process.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("queries", [1, 9, 2000])
def test_a_forked_child_answers(run_python, queries):
    program = f"""
import os
import numpy as np
import exactknn

x = np.random.default_rng(0).standard_normal((2000, 48)).astype(np.float32)
search = lambda: exactknn.radius(x[:{queries}], x, 80.0, num_threads=2)
exactknn.radius(x, r=80.0, num_threads=2)
wanted = search()
child = os.fork()
if child == 0:
    os._exit(0 if all(a.tobytes() == b.tobytes() for a, b in zip(search(), wanted)) else 3)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    assert run_python(program) == "0"


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc how much memory is in use")
def test_an_answer_beyond_memory_is_a_memory_error(run_python):
    # 12,000 x 12,000 pairs are all inside: 1 to 2 GB, of which the process may have 150 MiB.
    program = """
import resource
import numpy as np
import exactknn

x = np.random.default_rng(0).standard_normal((12_000, 2)).astype(np.float32)
exactknn.radius(x, r=0, num_threads=2)
with open("/proc/self/statm") as statm:
    limit = int(statm.read().split()[0]) * resource.getpagesize() + (150 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for distances in (True, False):
    try:
        exactknn.radius(x, r=1e9, num_threads=2, return_distances=distances)
    except MemoryError as error:
        print(error)
"""
    printed = run_python(program).splitlines()
    assert len(printed) == 2
    assert all("bytes for the rows within the radius" in line for line in printed)


def test_the_pairs_of_other_libraries_are_those_that_the_page_says():
    faiss, spatial = pytest.importorskip("faiss"), pytest.importorskip("scipy.spatial")
    # Whole numbers: many pairs are exactly at the radius, which only faiss leaves out.
    x, y = np.random.default_rng(3).integers(0, 4, (2, 60, 3)).astype(np.float32)
    for metric, index, beside in (
        ("sqeuclidean", faiss.IndexFlatL2(3), 3.0),
        ("inner_product", faiss.IndexFlatIP(3), 9.0),
    ):
        index.add(y)
        bound = np.nextafter(np.float32(beside), np.float32(np.inf if metric == "sqeuclidean" else -np.inf))
        lims, distances, ids = index.range_search(x, float(bound))
        indptr, indices, values = exactknn.radius(x, y, beside, metric=metric, sort=False)
        assert indptr.tolist() == lims.tolist()
        for start, stop in pairwise(lims):
            order = np.argsort(ids[start:stop])
            assert ids[start:stop][order].tolist() == indices[start:stop].tolist()
            assert distances[start:stop][order].tolist() == values[start:stop].tolist()
        fewer = index.range_search(x, beside)[0][-1]
        assert fewer == indptr[-1] - np.count_nonzero(values == beside) < indptr[-1]
    indptr, indices = exactknn.radius(x, y, 2.0, metric="euclidean", return_distances=False)
    wanted = spatial.cKDTree(y).query_ball_point(x, 2.0, return_sorted=True)
    assert [indices[start:stop].tolist() for start, stop in pairwise(indptr)] == wanted.tolist()
