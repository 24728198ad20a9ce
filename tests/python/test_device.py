"""The search on other devices: run on CPU tensors, where its answers must be the core's, byte for byte.

The core is the oracle. What needs a device is skipped without one; ``FakeTensorMode`` runs the same operations on CUDA
tensors without numbers, and refuses whatever would wait for them.
"""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from exactknn import _core
from exactknn.distances import BatchedDistance, CosineSimilarity, DotProductSimilarity, LpDistance, SNRDistance
from exactknn.evaluation import AccuracyCalculator, CustomKNN, RustKNN
from exactknn.evaluation import knn as knn_module
from exactknn.evaluation._device import filter as device_filter
from exactknn.evaluation._device import memory
from exactknn.evaluation._device.values import METRICS
from exactknn.evaluation._dispatch import NativeSupport, native_metric, native_pair, unsupported
from exactknn.evaluation._torch_blocks import _all_or_what_fits, _Blocks, without_self

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
KINDS = ("plain", "offset", "far", "duplicates", "tiny", "huge", "zeros", "giant", "whole", "equal", "mixed", "sphere")


def rows(n, d, kind="plain", dtype=torch.float32, seed=0):
    generator = torch.manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    largest = torch.finfo(dtype).max
    if kind == "offset":
        x = 100 + 0.1 * x
    elif kind == "far":
        x = 1e4 + x
    elif kind == "duplicates":
        x = x[torch.randint(0, n // 6 + 1, (n,), generator=generator)]
    elif kind == "tiny":
        x = x * torch.finfo(dtype).tiny * 8
    elif kind == "huge":
        x = x.clamp(-3, 3) * (largest / 4)
    elif kind == "zeros":
        x[::3] = 0
    elif kind == "giant":
        x[n // 2] *= largest / 64
    elif kind == "whole":
        x = x.round()
    elif kind == "equal":
        x = x[:1].expand(n, d).clone()
    elif kind == "sphere":  # all equally far from zero, up to rounding
        x = 3 * x / x.norm(dim=1, keepdim=True)
    elif kind == "mixed":
        x = x * torch.logspace(-30, 30, n, dtype=torch.float64).unsqueeze(1)
    return x.clamp(-largest, largest).to(dtype)


def by_the_core(metric, query, reference, k, exclude_self=False):
    pair = native_pair(query, reference)
    return _core.knn(pair.query, pair.searched, k, metric, exclude_self=exclude_self, bfloat16=pair.bfloat16)


def search(metric, query, reference, k, exclude_self=False):
    return device_filter.search(NativeSupport(metric, False, ""), query, k, reference, exclude_self)


def check(metric, query, reference, k, exclude_self=False):
    wanted = by_the_core(metric, query, reference, k, exclude_self)
    distances, indices = search(metric, query, reference, k, exclude_self)
    assert indices.numpy().tobytes() == wanted[1].tobytes()
    assert distances.numpy().tobytes() == wanted[0].tobytes()


@pytest.fixture(params=[True, False], ids=["float64", "no float64"])
def has_float64(request, monkeypatch):
    """With and without a device that has float64; without, the finalists are measured on the CPU all the same."""
    if not request.param:
        monkeypatch.setattr("exactknn.evaluation._device.filter._FLOAT64_DEVICES", ())
    return request.param


@pytest.fixture
def by_core(monkeypatch):
    """How many queries the core had to answer."""
    counted = []

    def count(query, *args, **kwargs):
        counted.append(len(query))
        return _core.knn(query, *args, **kwargs)

    monkeypatch.setattr("exactknn.evaluation._device.filter._core", SimpleNamespace(knn=count))
    return counted


# --- the answers ----------------------------------------------------------------------------------------------------


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


# --- the bound ------------------------------------------------------------------------------------------------------


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


class Products(TorchDispatchMode):
    """Looks at each matrix product first."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            args = self.before(*args)
        return func(*args, **(kwargs or {}))


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


# --- memory ---------------------------------------------------------------------------------------------------------


def test_the_share_of_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device: (2 << 30, 4 << 30))
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 << 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4 << 30)
    wanted = {"cuda": 4 << 30, "xpu": 1 << 30, "mps": 3 << 30, "cpu": 1 << 28, "meta": 1 << 28}
    assert {device: memory.free_bytes(torch.device(device)) for device in wanted} == wanted
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 11 << 30)
    assert memory.free_bytes(torch.device("mps")) == 1 << 16
    monkeypatch.delattr(torch.mps, "recommended_max_memory")
    assert memory.free_bytes(torch.device("mps")) == 1 << 28


@pytest.mark.parametrize("room", [1 << 16, 1 << 18, 1 << 22])
@pytest.mark.parametrize("n", [1, 30, 200])
def test_blocks_keep_to_the_room(monkeypatch, room, n):
    monkeypatch.setattr("exactknn.evaluation._device.memory.free_bytes", lambda _: room)
    query, reference = rows(n, 24), rows(1000, 24, seed=1)
    shapes = []

    def look(left, right):
        shapes.append((len(left), right.shape[1] - 1))
        return left, right

    with Products(look):
        check("euclidean", query, reference, 3)
    assert sum(queries * references for queries, references in shapes) == n * 1000
    assert max(4 * 4 * queries * references for queries, references in shapes) <= room
    # Large enough to be worth while, too: or the room is filled, or there is one block.
    queries, references = shapes[0]
    assert (queries, references) == (n, 1000) or 16 * queries * references + 72 * 28 * references > room / 4


def failing(times, error):
    left = [times]

    def fail(*factors):
        seen.append(tuple(len(factor) for factor in factors))
        if left[0]:
            left[0] -= 1
            raise error
        return factors

    seen = []
    return fail, seen


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("CUDA out of memory."), RuntimeError("MPS: out of memory")]
)
def test_a_device_that_runs_out_of_memory_gets_half_the_block(monkeypatch, error):
    monkeypatch.setattr("exactknn.evaluation._device.memory.free_bytes", lambda _: 1 << 20)
    fail, seen = failing(1, error)
    with Products(fail):
        check("sqeuclidean", rows(400, 8), rows(900, 8, seed=1), 4)
    assert [queries for queries, _ in seen[:2]] == [
        181,
        128,
    ]  # sides of squares of keys that fill 2**20 and 2**19 bytes


def test_a_device_without_memory_is_an_error(monkeypatch):
    monkeypatch.setattr("exactknn.evaluation._device.memory.free_bytes", lambda _: 1 << 20)
    fail, seen = failing(99, torch.cuda.OutOfMemoryError("CUDA out of memory."))
    with Products(fail), pytest.raises(torch.cuda.OutOfMemoryError):
        search("sqeuclidean", rows(400, 8), rows(900, 8, seed=1), 4)
    assert len(seen) == 5  # 2**20 down to 2**16


def test_other_errors_are_not_swallowed():
    fail, seen = failing(1, RuntimeError("something else"))
    with Products(fail), pytest.raises(RuntimeError, match="something else"):
        search("sqeuclidean", rows(4, 8), rows(9, 8), 4)
    assert len(seen) == 1


# --- nothing waits --------------------------------------------------------------------------------------------------


class NothingWaits(TorchDispatchMode):
    """Refuses what copies from a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.device.type == "cpu" and any(x.is_cuda for x in given):
            raise AssertionError(f"{func} waits for the device")
        return result


@pytest.fixture
def on_fake_cuda():
    with FakeTensorMode(), NothingWaits():
        yield lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pass_waits_for_nothing(metric, dtype, on_fake_cuda):
    query, reference = on_fake_cuda(50, 19, dtype=dtype), on_fake_cuda(300, 19, dtype=dtype)
    output = torch.float64 if dtype == torch.float64 else torch.float32
    for level in (device_filter._SINGLE, device_filter._DOUBLE):
        find = device_filter._Filter(metric, level, reference, 5, True, output)
        values, found, certified = find(query, torch.arange(50, device="cuda"), 1 << 18)
        assert {x.device.type for x in (values, found, certified)} == {"cuda"}
        assert (values.dtype, found.dtype, certified.dtype) == (output, torch.long, torch.bool)
        assert values.shape == found.shape == (50, 5)


def test_a_search_waits_once_a_pass_is_over(on_fake_cuda, monkeypatch):
    monkeypatch.setattr("exactknn.evaluation._device.memory.free_bytes", lambda _: 1 << 16)
    with pytest.raises(DynamicOutputShapeException, match=r"aten\.(nonzero|index)"):
        search("sqeuclidean", on_fake_cuda(50, 19), on_fake_cuda(300, 19), 5, exclude_self=True)


@pytest.mark.parametrize("inverted", [False, True])
def test_blocks_of_a_distance_wait_for_nothing(inverted, on_fake_cuda):
    blocks = _Blocks(20, 3, inverted, True, 4)
    for start in (0, 10):
        blocks.take(on_fake_cuda(10, 50), start)
    assert {x.device.type for x in blocks.result()} == {"cuda"}


def test_without_self():
    values, columns = torch.arange(12.0).view(3, 4), torch.tensor([[5, 1, 2, 3], [0, 1, 2, 7], [4, 6, 8, 9]])
    kept, left = without_self(values, columns, torch.tensor([5, 7, 1]))
    assert left.tolist() == [[1, 2, 3], [0, 1, 2], [4, 6, 8]]
    assert kept.tolist() == [[1, 2, 3], [4, 5, 6], [8, 9, 10]]


# --- CustomKNN, RustKNN ---------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch):
    """As if all tensors were on a device."""
    reason = "query is on cuda:0, the core searches CPU memory"
    monkeypatch.setattr(knn_module, "native_support", lambda *args: unsupported(reason))
    of_cpu = knn_module._device_support

    def support(knn_func, query, reference):
        assert of_cpu(knn_func, query, reference) is None
        found = native_metric(knn_func.distance)
        torch_only = getattr(knn_func, "backend", "") == "torch" or found.metric not in METRICS
        return None if torch_only else found

    monkeypatch.setattr(knn_module, "_device_support", support)


NATIVE = [LpDistance(normalize_embeddings=n, power=power) for n in (True, False) for power in (1, 2)] + [
    CosineSimilarity(),
    DotProductSimilarity(),
    BatchedDistance(CosineSimilarity(), batch_size=3),
]


@pytest.mark.parametrize("distance", NATIVE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_known_distances_are_answered_as_on_the_cpu(distance, dtype, request):
    reference = rows(200, 12, dtype=dtype)
    functions = [CustomKNN(distance), CustomKNN(distance, 7), RustKNN(distance, 7, num_threads=1)]
    wanted = [knn(reference[:30], 6, reference, True) for knn in functions]
    request.getfixturevalue("elsewhere")
    for knn, (distances, indices) in zip(functions, wanted, strict=True):
        got = knn(reference[:30], 6, reference, True)
        assert got[0].dtype == distances.dtype
        assert got[0].equal(distances)
        assert got[1].equal(indices)


def test_the_device_path_is_logged_once(elsewhere, caplog):
    knn = RustKNN()
    with caplog.at_level(logging.INFO, logger="exactknn"):
        knn(rows(3, 2), 1, rows(5, 2))
        knn(rows(3, 2), 1, rows(5, 2))
    told = [record.getMessage() for record in caplog.records if "instead of the Rust core" in record.getMessage()]
    assert told == ["searching with torch instead of the Rust core: query is on cuda:0, the core searches CPU memory"]


@pytest.mark.parametrize("knn", [CustomKNN(LpDistance(), backend="torch"), CustomKNN(SNRDistance())], ids=str)
def test_other_distances_are_called(knn, elsewhere, monkeypatch):
    monkeypatch.setattr("exactknn.evaluation.knn.device_search", None)
    query, reference = rows(6, 4), rows(20, 4, seed=1)
    wanted = knn.distance(query, reference).topk(3, largest=False)
    distances, indices = knn(query, 3, reference)
    torch.testing.assert_close(distances, wanted.values)
    assert indices.equal(wanted.indices)


def test_bad_rows_are_named(elsewhere):
    query, reference = rows(4, 3), rows(9, 3, seed=1)
    reference[6, 1] = torch.nan
    for knn in (RustKNN(), CustomKNN(CosineSimilarity())):
        with pytest.raises(ValueError, match=r"^reference must be finite, got NaN or infinity in row 6$"):
            knn(query, 2, reference)


def test_kinds_of_rows_are_checked():
    support = knn_module._device_support
    with pytest.raises(ValueError, match=r"reference must hold .* got torch.int32"):
        support(RustKNN(), torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta", dtype=torch.int32))
    with pytest.raises(ValueError, match="query must have at least one column, got 0"):
        support(RustKNN(), torch.empty(2, 0, device="meta"), torch.empty(2, 0, device="meta"))
    there = torch.empty(2, 3, device="meta")
    assert support(RustKNN(), there, there).metric == "sqeuclidean"
    assert support(CustomKNN(LpDistance()), there, there).metric == "normalized_euclidean"
    assert support(CustomKNN(LpDistance(), backend="torch"), there, there) is None
    assert support(CustomKNN(LpDistance(p=1, normalize_embeddings=False)), there, there) is None
    assert support(RustKNN(), torch.empty(2, 3), torch.empty(2, 3)) is None


def test_blocks_of_an_unknown_distance_follow_the_free_memory(monkeypatch):
    monkeypatch.setattr("exactknn.evaluation._device.memory.free_bytes", lambda device: 1 << 20)
    there = torch.empty(100, 3, device="meta")
    assert _all_or_what_fits(there, torch.empty(1024, 3, device="meta")) == 32
    assert _all_or_what_fits(there, torch.empty(1 << 30, 3, device="meta")) == 1
    assert _all_or_what_fits(torch.empty(100, 3), torch.empty(1 << 20, 3)) == 100


@pytest.mark.parametrize("k", [None, 5, "max_bin_count"])
def test_retrieval_metrics_are_those_of_the_cpu(k, request):
    embeddings = rows(90, 6, "duplicates")
    labels = torch.randint(0, 5, (90,), generator=torch.manual_seed(1))
    calculators = [AccuracyCalculator(k=k, knn_func=knn) for knn in (RustKNN(), CustomKNN(CosineSimilarity()))]
    chosen = ("precision_at_1", "r_precision", "mean_average_precision_at_r", "mean_reciprocal_rank")
    wanted = [calculator.get_accuracy(embeddings, labels, include=chosen) for calculator in calculators]
    request.getfixturevalue("elsewhere")
    for calculator, values in zip(calculators, wanted, strict=True):
        assert calculator.get_accuracy(embeddings, labels, include=chosen) == values


# --- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("distance", NATIVE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_answers_of_a_gpu_are_the_cpus(distance, dtype):
    reference = rows(3000, 40, "duplicates", dtype)
    wanted = RustKNN(distance)(reference[:500], 9, reference, True)
    for precision in ("highest", "high"):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            distances, indices = RustKNN(distance)(reference[:500].cuda(), 9, reference.cuda(), True)
        finally:
            torch.set_float32_matmul_precision(before)
        assert distances.is_cuda
        assert distances.cpu().equal(wanted[0])
        assert indices.cpu().equal(wanted[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("metric", METRICS)
def test_a_pass_on_a_gpu_waits_for_nothing(metric):
    reference = rows(3000, 40).cuda()
    own = torch.arange(500, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        find = device_filter._Filter(metric, device_filter._SINGLE, reference, 9, True, torch.float32)
        answer = find(reference[:500], own, 1 << 22)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert answer[2].all()


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")
@pytest.mark.parametrize("distance", NATIVE, ids=str)
def test_the_answers_of_an_apple_gpu_are_the_cpus(distance):
    reference = rows(3000, 40, "duplicates")
    wanted = RustKNN(distance)(reference[:500], 9, reference, True)
    distances, indices = RustKNN(distance)(reference[:500].to("mps"), 9, reference.to("mps"), True)
    assert distances.device.type == "mps"
    assert distances.cpu().equal(wanted[0])
    assert indices.cpu().equal(wanted[1])


@pytest.mark.parametrize("float64", [("cpu", "cuda"), ()])
def test_a_thread_that_flushes_subnormal_numbers_gets_the_cores_answer(monkeypatch, float64):
    monkeypatch.setattr("exactknn.evaluation._device.filter._FLOAT64_DEVICES", float64)
    reference, query = torch.tensor([[3e-45], [1e-45], [0.0]]), torch.tensor([[1e-45]])
    torch.set_flush_denormal(True)
    try:
        _, found = device_filter.search(NativeSupport("euclidean", False, ""), query, 2, reference, False)
    finally:
        torch.set_flush_denormal(False)
    assert found.tolist() == [[1, 0]]
