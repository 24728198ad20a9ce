"""Searches on devices: their memory, that nothing waits, and the backends that use them."""

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from exactknn.distances import BatchedDistance, CosineSimilarity, DotProductSimilarity, LpDistance, SNRDistance
from exactknn.evaluation import AccuracyCalculator, CustomKNN, RustKNN
from exactknn.evaluation import knn as knn_module
from exactknn.evaluation._device import filter as device_filter
from exactknn.evaluation._device import memory
from exactknn.evaluation._device.values import METRICS
from exactknn.evaluation._dispatch import NativeSupport, native_metric, unsupported
from exactknn.evaluation._torch_blocks import _all_or_what_fits, _Blocks, without_self
from tests.python.evaluation.device_helpers import DTYPES, Products, check, rows, search


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
