"""The search on other devices: run on CPU tensors, where its answers must be the core's, byte for byte.

The core is the oracle. What needs a device is skipped without one; ``FakeTensorMode`` runs the same operations on CUDA
tensors without numbers, and refuses whatever would wait for them.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactknn._references import References
from exactknn.evaluation._device import filter as device_filter
from exactknn.evaluation._device.values import METRICS
from tests.python.evaluation.device_helpers import DTYPES, Products, check, rows, search

KINDS = ("plain", "offset", "far", "duplicates", "tiny", "huge", "zeros", "giant", "whole", "equal", "mixed", "sphere")


@pytest.fixture(params=[True, False], ids=["float64", "no float64"])
def has_float64(request, monkeypatch):
    """With and without float64 on the device; without it, candidates are measured on the CPU."""
    if not request.param:
        monkeypatch.setattr("exactknn.evaluation._device.filter._FLOAT64_DEVICES", ())
    return request.param


@pytest.fixture
def by_core(monkeypatch):
    """How many queries the core had to answer."""
    counted = []
    search = References.knn

    def count(self, start, stop, *args):
        counted.append(stop - start)
        return search(self, start, stop, *args)

    monkeypatch.setattr(References, "knn", count)
    return counted


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_are_the_cores(metric, dtype, kind, has_float64):
    reference = rows(300, 19, kind, dtype)
    check(metric, reference[:40], reference, 5, exclude_self=True)
    check(metric, rows(30, 19, "plain", dtype, seed=1), reference, 8)


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_any_sizes_blocks_and_types(data):
    metric = data.draw(st.sampled_from(METRICS))
    dtypes = data.draw(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)))
    n, m, d = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 120)), data.draw(st.integers(1, 40))
    kinds = data.draw(st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)))
    exclude_self = n <= m and m > 1 and data.draw(st.booleans())
    reference = rows(m, d, kinds[1], dtypes[1], seed=data.draw(st.integers(0, 99)))
    query = reference[:n] if exclude_self else rows(n, d, kinds[0], dtypes[0], seed=100)
    k = data.draw(st.integers(0, m - exclude_self))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exactknn.evaluation._device.filter._FLOAT64_DEVICES", data.draw(st.sampled_from([("cpu",), ()])))
        patch.setattr(
            "exactknn.evaluation._device.memory.free_bytes",
            lambda _: data.draw(st.sampled_from([1, 1 << 12, 1 << 15, 1 << 28])),
        )
        check(metric, query, reference, k, exclude_self)


@pytest.mark.parametrize("metric", METRICS)
def test_ordinary_rows_need_no_core(metric, has_float64, by_core):
    for dtype in (torch.float32, torch.float16):
        reference = rows(2000, 64, dtype=dtype)
        check(metric, reference[:100], reference, 10, exclude_self=True)
    assert by_core == []


def test_rows_far_from_the_origin_need_no_core(has_float64, by_core):
    reference = rows(2000, 64, "far")
    check("sqeuclidean", reference[:100], reference, 10, exclude_self=True)
    assert by_core == []


def test_ties_at_the_edge_go_to_the_lowest_row(has_float64, by_core):
    reference = torch.ones(200, 3)
    query = torch.cat([torch.zeros(1, 3), torch.full((1, 3), 5.0)])
    distances, indices = search("sqeuclidean", query, reference, 4)
    assert indices.tolist() == [[0, 1, 2, 3]] * 2
    assert distances.tolist() == [[3.0] * 4, [48.0] * 4]
    assert by_core == [2]


def test_only_the_queries_that_are_not_certified_are_searched_again(by_core):
    reference = torch.cat([rows(500, 8), 50 + torch.zeros(100, 8)])
    query = torch.cat([rows(20, 8, seed=1), 50 + torch.zeros(1, 8), rows(20, 8, seed=2)])
    check("euclidean", query, reference, 3)
    assert by_core == [1]


def test_all_rows_are_neighbours(has_float64):
    reference = rows(50, 7, "duplicates")
    for metric in METRICS:
        check(metric, rows(9, 7, seed=1), reference, 50)
        check(metric, reference, reference, 49, exclude_self=True)


def test_nothing_to_find():
    for n, m, k in ((0, 5, 3), (4, 5, 0), (0, 0, 0), (3, 0, 0)):
        distances, indices = search("sqeuclidean", torch.zeros(n, 2), torch.zeros(m, 2), k)
        assert distances.shape == indices.shape == (n, k)
        assert (distances.dtype, indices.dtype) == (torch.float32, torch.long)
    distances, indices = search("euclidean", torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), 1)
    assert (distances.tolist(), indices.tolist()) == ([[5.0]], [[0]])


def test_very_long_rows_are_the_cores(monkeypatch, by_core):
    monkeypatch.setattr("exactknn.evaluation._device.filter._LONGEST", 16)
    reference = rows(40, 16)
    check("euclidean", reference[:5], reference, 3)
    assert by_core == [5]


def test_layouts_gradients_and_modes_change_nothing():
    query, reference = rows(12, 16), rows(200, 16, seed=1)
    wanted = search("cosine_similarity", query, reference, 5)
    strided = torch.stack([reference] * 2, 2)[..., 1]
    answers = [search("cosine_similarity", query.t().contiguous().t(), strided, 5)]
    answers.append(search("cosine_similarity", query.clone().requires_grad_(), reference.clone().requires_grad_(), 5))
    with torch.inference_mode():
        answers.append(search("cosine_similarity", query.clone(), reference.clone(), 5))
        frozen = query.clone()
    answers.append(search("cosine_similarity", frozen, reference, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answers.append(search("cosine_similarity", query, reference, 5))
    for distances, indices in answers:
        assert distances.equal(wanted[0])
        assert indices.equal(wanted[1])
        assert not distances.requires_grad


def real_keys(find, query, reference):
    """Keys in extended precision, from the rows as they are."""
    q, r = query.double().numpy().astype(np.longdouble), reference.double().numpy().astype(np.longdouble)
    if find.unit_rows:
        lengths = [np.sqrt((x**2).sum(axis=1, keepdims=True)) for x in (q, r)]
        q, r = (np.divide(x, y, out=np.zeros_like(x), where=y > 0) for x, y in zip((q, r), lengths, strict=True))
    centre, scale = (part.double().numpy().astype(np.longdouble) for part in (find.centre, find.scale))
    rho = (r - centre) / scale
    if find.euclidean:
        return (q - centre) / scale @ rho.T - (rho**2).sum(axis=1) / 2
    return q / find._query_scale(query).double().numpy() @ rho.T


def downwards(queries, references):
    """Products summed column by column, each sum rounded down: an order and a rounding that no library has to avoid."""
    left, right = queries.double().numpy(), references.double().numpy()
    total = np.zeros((len(left), len(right)), np.float32)
    for column in range(left.shape[1]):
        # Exact but for the last bits of float64.
        real = total + np.outer(left[:, column], right[:, column])
        total = real.astype(np.float32)
        total = np.where(total > real, np.nextafter(total, np.float32(-np.inf)), total)
    return torch.from_numpy(total)


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_no_key_exceeds_its_bound(data):
    metric = data.draw(st.sampled_from(METRICS))
    kinds = data.draw(st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16)))
    d = data.draw(st.sampled_from((1, 2, 7, 64, 700)))
    query, reference = (
        rows(12, d, kinds[0], dtype, seed=3),
        rows(60, d, kinds[1], dtype, seed=data.draw(st.integers(4, 99))),
    )
    if data.draw(st.booleans()):
        # One sign and full mantissas: rounding errors that add up instead of cancelling.
        query, reference = query.abs() + query.abs().amax(), reference.abs() + reference.abs().amax() / 3
        query, reference = query.nan_to_num(), reference.nan_to_num()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exactknn.evaluation._device.filter._FLOAT64_DEVICES", data.draw(st.sampled_from([("cpu",), ()])))
        find = device_filter._Filter(metric, device_filter._SINGLE, reference, 5, False, torch.float32)
        queries, usable = find._queries(query)
        product = data.draw(st.sampled_from([downwards, lambda left, right: left @ right.T]))
        keys = product(queries, find._references(reference))[:, :-1]
        real = real_keys(find, query, reference)
    assert not keys.isnan().any()
    assert (keys.double().numpy() >= real)[usable.numpy()].all()


@pytest.mark.parametrize("metric", METRICS)
def test_the_bound_is_near_the_key(metric):
    query, reference = rows(20, 64), rows(200, 64, seed=1)
    find = device_filter._Filter(metric, device_filter._SINGLE, reference, 5, False, torch.float32)
    queries, usable = find._queries(query)
    excess = (queries @ find._references(reference).T)[:, :-1].double().numpy() - real_keys(find, query, reference)
    lengths = queries[:, 64].outer(find._references(reference)[:-1, 65]).double().numpy()
    assert usable.all()
    assert (excess < 2.0**-14 * lengths).all()


def tf32(*factors):
    return [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) if x.dtype == torch.float32 else x for x in factors]


def test_products_of_shortened_factors_are_not_trusted(has_float64, by_core):
    query, reference = rows(50, 32), rows(1000, 32, seed=1)
    products = []

    def shorten(*factors):
        products.append(factors[0].dtype)
        return tf32(*factors)

    with Products(shorten):
        check("sqeuclidean", query, reference, 5)
    assert products == ([torch.float32, torch.float64] if has_float64 else [torch.float32])
    assert by_core == ([] if has_float64 else [50])


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_precision_that_torch_is_told_changes_no_answer(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        check("cosine_similarity", rows(40, 64), rows(500, 64, seed=1), 5)
    finally:
        torch.set_float32_matmul_precision(before)
