"""References block by block in the core: the same bytes as one search of them all."""

import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactknn import _core

METRICS = ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev", "minkowski")


def stored(rows, dtype):
    """Rows as the core takes them, and whether they are the bits of bfloat16 numbers."""
    if dtype == "bfloat16":
        return rows.astype(ml_dtypes.bfloat16).view(np.uint16), True
    return rows.astype(dtype), False


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    metric=st.sampled_from(METRICS),
    exclude_self=st.booleans(),
    n=st.integers(1, 60),
    m=st.integers(61, 900),
    share=st.floats(0, 1),
    coarse=st.booleans(),
)
def test_blocks_of_any_size_give_the_bytes_of_the_whole(seed, dtype, metric, exclude_self, n, m, share, coarse):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((m, 5))
    if coarse:
        rows = np.round(rows)  # many ties
    reference, bfloat16 = stored(rows, dtype)
    query = reference[:n].copy() if exclude_self else stored(rng.standard_normal((n, 5)), dtype)[0]
    k = 1 + int(share**3 * (m - 2))
    options = dict(exclude_self=exclude_self, bfloat16=bfloat16, p=3.0 if metric == "minkowski" else None)
    whole = _core.knn(query, reference, k, metric, **options)
    search = _core.BlockSearch(query, k, metric, **options)
    while search.rows < m:
        start, size = search.rows, int(rng.integers(0, m // 2))
        search.add(reference[start : start + size])
        assert search.rows == min(start + size, m)
        if rng.integers(4) == 0:
            state = search.state()
            rows_so_far = search.rows
            search = _core.BlockSearch(query, k, metric, **options)
            search.restore(*state, rows_so_far)
    for wanted, found in zip(whole, search.result(), strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert found.tobytes() == wanted.tobytes()


def test_values_that_no_float32_holds_keep_the_order_of_float64():
    # All distances are infinite in float32, or zero; float64 still tells them apart.
    for scale in (1e25, 1e-30):
        reference = (np.arange(40, 0, -1, dtype=np.float32) * np.float32(scale)).reshape(-1, 1)
        query = np.zeros((1, 1), np.float32)
        search = _core.BlockSearch(query, 5, "sqeuclidean")
        for start in range(0, 40, 7):
            search.add(reference[start : start + 7])
        assert search.result()[1].tolist() == [[39, 38, 37, 36, 35]]


def test_k_of_zero_and_no_queries():
    reference = np.ones((3, 2), np.float32)
    for query, k in ((np.ones((2, 2), np.float32), 0), (np.ones((0, 2), np.float32), 2)):
        search = _core.BlockSearch(query, k, "sqeuclidean")
        search.add(reference)
        distances, indices = search.result()
        assert distances.shape == indices.shape == (len(query), k)
        with pytest.raises(ValueError, match="got NaN in row 4, column 1"):
            search.add(np.array([[0, 0], [0, np.nan]], np.float32))


def test_errors_name_what_is_wrong():
    query = np.zeros((2, 3), np.float32)
    search = _core.BlockSearch(query, 2, "sqeuclidean", exclude_self=True)
    with pytest.raises(ValueError, match="begin with the queries"):
        search.result()
    with pytest.raises(ValueError, match="same number of columns, got 3 and 2"):
        search.add(np.zeros((4, 2), np.float32))
    with pytest.raises(TypeError, match="one dtype"):
        search.add(np.zeros((4, 3)))
    with pytest.raises(ValueError, match="C-contiguous"):
        search.add(np.zeros((3, 4), np.float32).T)
    search.add(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="without the query itself"):
        search.result()
    with pytest.raises(ValueError, match="query must be finite, got NaN in row 1"):
        _core.BlockSearch(np.array([[0.0], [np.nan]]), 1, "sqeuclidean")
    ranks, indices = search.state()
    assert ranks.tolist() == [[0.0, np.inf], [0.0, np.inf]] and indices.tolist() == [[1, -1], [0, -1]]
    with pytest.raises(ValueError, match=r"ranks must be C-contiguous of shape \[2, 2\]"):
        search.restore(ranks[:, :1], indices[:, :1], 2)
    with pytest.raises(ValueError, match="indices must be below 1"):
        search.restore(ranks, indices, 1)
    with pytest.raises(ValueError, match="nearest of 3 references"):
        search.restore(ranks, indices, 3)


def test_an_interrupted_block_is_not_taken_in():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((500, 64)).astype(np.float32)
    reference = rng.standard_normal((30000, 64)).astype(np.float32)
    search = _core.BlockSearch(query, 10, "sqeuclidean")
    search.add(reference[:10000])
    before = search.state()

    def stop(fraction):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search.add(reference[10000:], progress=stop)
    assert search.rows == 10000
    for old, new in zip(before, search.state(), strict=True):
        assert old.tobytes() == new.tobytes()
    search.add(reference[10000:])
    for wanted, found in zip(_core.knn(query, reference, 10, "sqeuclidean"), search.result(), strict=True):
        assert found.tobytes() == wanted.tobytes()


def test_one_thread_at_a_time():
    rng = np.random.default_rng(0)
    search = _core.BlockSearch(rng.standard_normal((2000, 64)).astype(np.float32), 10, "sqeuclidean")
    block = rng.standard_normal((40000, 64)).astype(np.float32)
    inside, leave = threading.Event(), threading.Event()

    def hold(fraction):
        inside.set()
        leave.wait(30)

    thread = threading.Thread(target=search.add, args=(block,), kwargs={"progress": hold})
    thread.start()
    assert inside.wait(30)
    with pytest.raises(RuntimeError, match="used by another thread"):
        search.result()
    leave.set()
    thread.join(30)
    assert search.rows == 40000
