"""``CustomKNN``: the contract of a ``knn_func``, on both backends."""

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path

import pytest
import torch

from exactknn.distances import (
    BatchedDistance,
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
    SNRDistance,
)
from exactknn.evaluation import CustomKNN
from tests.python.evaluation.knn_helpers import SQUARED, Foreign, rows

BACKENDS = ("rust", "torch")


@pytest.mark.parametrize("backend", BACKENDS)
def test_squared_distances_by_hand(backend):
    query, reference = torch.tensor([[0.0, 0], [3, 0]]), torch.tensor([[0, 1], [3, 0.5], [9, 9]])
    knn = CustomKNN(LpDistance(**SQUARED), backend=backend)
    distances, indices = knn(query, 1, reference)
    assert distances.tolist() == [[1], [0.25]]
    assert indices.tolist() == [[0], [1]]
    distances, indices = knn(query, 3, reference)
    torch.testing.assert_close(distances, torch.tensor([[1, 9.25, 162], [0.25, 10, 117]]))
    assert indices.tolist() == [[0, 1, 2], [1, 0, 2]]
    assert indices.dtype == torch.long


@pytest.mark.parametrize("backend", BACKENDS)
def test_self_is_dropped_by_index(backend):
    points = torch.tensor([[1.0], [2.0], [3.0]])
    distances, indices = CustomKNN(DotProductSimilarity(), backend=backend)(points, 1, points, True)
    assert distances.tolist() == [[3], [6], [6]]
    assert indices.tolist() == [[2], [2], [1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_cosine_by_hand(backend):
    query = torch.tensor([[1, 0.2], [0.1, 1]])
    reference = torch.tensor([[2.0, 0], [0, 3], [1, 1], [-1, 0]])
    distances, indices = CustomKNN(CosineSimilarity(), backend=backend)(query, 4, reference)
    wanted = [
        [0.980580675691, 0.832050294338, 0.196116135138, -0.980580675691],
        [0.99503719021, 0.773957299203, 0.099503719021, -0.099503719021],
    ]
    torch.testing.assert_close(distances, torch.tensor(wanted), rtol=1e-6, atol=1e-7)
    assert indices.tolist() == [[0, 2, 1, 3], [1, 2, 0, 3]]


NATIVE = [LpDistance(normalize_embeddings=n, power=power) for n in (True, False) for power in (1, 2)] + [
    CosineSimilarity(),
    DotProductSimilarity(),
    DotProductSimilarity(normalize_embeddings=True),
]


@pytest.mark.parametrize("distance", NATIVE, ids=str)
@pytest.mark.parametrize("ref_includes_query", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_backends_agree(distance, ref_includes_query, dtype):
    reference = rows(150, 12, dtype=dtype)
    query = reference[:40] if ref_includes_query else rows(40, 12, seed=1, dtype=dtype)
    native = CustomKNN(distance, backend="rust")(query, 9, reference, ref_includes_query)
    plain = CustomKNN(distance, batch_size=7, backend="torch")(query, 9, reference, ref_includes_query)
    assert native[1].equal(plain[1])
    assert native[0].dtype == plain[0].dtype == dtype
    torch.testing.assert_close(native[0], plain[0])
    wanted = distance(query.double(), reference.double()).gather(1, native[1])
    torch.testing.assert_close(native[0].double(), wanted, rtol=1e-6, atol=1e-6)
    auto = CustomKNN(distance)(query, 9, reference, ref_includes_query)
    assert auto[0].equal(native[0])
    assert auto[1].equal(native[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_squared_distances_far_from_the_origin(backend):
    points = (100 + 0.01 * rows(100, 32)).float()
    distances, indices = CustomKNN(LpDistance(**SQUARED), backend=backend)(points, 1, points, True)
    exact = (points.double().unsqueeze(1) - points.double()).square().sum(2).fill_diagonal_(torch.inf).min(1)
    assert indices[:, 0].equal(exact.indices)
    torch.testing.assert_close(distances[:, 0].double(), exact.values, rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_duplicates_of_a_query_are_neighbours(backend):
    points = torch.zeros(2, 1)
    distances, indices = CustomKNN(LpDistance(**SQUARED), backend=backend)(points, 1, points, True)
    assert indices.tolist() == [[1], [0]]
    assert distances.tolist() == [[0], [0]]


@pytest.mark.parametrize("batch_size", [1, 7, 40, 41])
def test_batches_change_nothing(batch_size):
    query, reference = rows(40, 6), rows(90, 6, seed=1)
    for distance in (LpDistance(), CosineSimilarity()):
        whole = CustomKNN(distance)(query, 5, reference)
        parts = CustomKNN(distance, batch_size)(query, 5, reference)
        assert whole[0].equal(parts[0])
        assert whole[1].equal(parts[1])
    for distance in (SNRDistance(), Foreign()):
        whole = CustomKNN(distance)(query, 5, reference)
        parts = CustomKNN(distance, batch_size)(query, 5, reference)
        torch.testing.assert_close(whole[0], parts[0])
        assert whole[1].equal(parts[1])


def test_a_foreign_distance_is_called_once_per_block_in_order():
    distance = Foreign()
    query, reference = rows(10, 3), rows(20, 3, seed=1)
    CustomKNN(distance, batch_size=4)(query, 2, reference)
    assert [block.shape for block, _ in distance.calls] == [(4, 3), (4, 3), (2, 3)]
    assert torch.cat([block for block, _ in distance.calls]).equal(query)
    assert all(given.equal(reference) for _, given in distance.calls)
    distance.calls.clear()
    CustomKNN(distance)(query, 2, reference)
    assert len(distance.calls) == 1


def test_a_batched_distance_uses_its_own_batch_size():
    inner = Foreign()

    class Wrapped(torch.nn.Module):
        is_inverted = False

        def forward(self, query, reference):
            return inner(query, reference)

    batched = BatchedDistance(Wrapped(), batch_size=3)
    distances, indices = CustomKNN(batched)(rows(8, 2), 2, rows(9, 2, seed=1))
    assert [len(block) for block, _ in inner.calls] == [3, 3, 2]
    wanted = torch.cdist(rows(8, 2), rows(9, 2, seed=1), p=1).topk(2, largest=False)
    assert indices.equal(wanted.indices)
    torch.testing.assert_close(distances, wanted.values)
    assert batched.iter_fn is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch_size", [None, 3])
def test_distances_have_the_type_that_the_distance_returns(dtype, backend, batch_size):
    query, reference = rows(8, 5, dtype=dtype), rows(20, 5, seed=1, dtype=dtype)
    for distance in NATIVE:
        values, indices = CustomKNN(distance, batch_size, backend=backend)(query, 4, reference)
        assert values.dtype == distance(query, reference).dtype
        exact = distance(query.double(), reference.double()).topk(4, largest=distance.is_inverted)
        assert indices.equal(exact.indices)


def test_two_types_are_promoted():
    query, reference = rows(4, 3, dtype=torch.float16), rows(9, 3, seed=1, dtype=torch.float64)
    for backend in BACKENDS:
        assert CustomKNN(LpDistance(), backend=backend)(query, 2, reference)[0].dtype == torch.float64


def test_layouts_give_the_same_answer():
    query, reference = rows(6, 4), rows(11, 4, seed=1)
    for backend in BACKENDS:
        knn = CustomKNN(LpDistance(**SQUARED), backend=backend)
        wanted = knn(query, 3, reference)
        views = knn(query.t().contiguous().t(), 3, torch.stack([reference] * 2, 2)[..., 1])
        assert views[0].equal(wanted[0])
        assert views[1].equal(wanted[1])
        expanded = knn(query[:1].expand(6, 4), 3, reference)
        assert expanded[1].equal(wanted[1][:1].expand(6, 3))


@pytest.mark.parametrize("distance", [LpDistance(), SNRDistance(), Foreign()], ids=lambda x: type(x).__name__)
def test_nothing_carries_a_graph(distance):
    query, reference = rows(5, 3).requires_grad_(), rows(9, 3, seed=1).requires_grad_()
    before = query.detach().clone()
    distances, indices = CustomKNN(distance)(query, 2, reference)
    assert not distances.requires_grad
    assert distances.grad_fn is None
    assert not indices.requires_grad
    assert query.detach().equal(before)
    with torch.inference_mode():
        frozen = rows(5, 3)
    assert CustomKNN(distance)(frozen, 2, reference.detach())[1].equal(indices)


@pytest.mark.parametrize("distance", [LpDistance(), SNRDistance(), BatchedDistance(SNRDistance())], ids=str)
def test_no_tensor_stays_behind(distance):
    knn = CustomKNN(distance, batch_size=2)
    results = knn(rows(5, 3), 2, rows(9, 3, seed=1))
    watched = [weakref.ref(result) for result in results]
    del results
    gc.collect()
    assert [watch() for watch in watched] == [None, None]


def test_no_tensor_stays_behind_after_a_failure():
    class Fails:
        is_inverted = False

        def __init__(self):
            self.watched = []

        def __call__(self, query, reference):
            if self.watched:
                raise RuntimeError("second block")
            mat = torch.cdist(query, reference)
            self.watched.append(weakref.ref(mat))
            return mat

    distance = Fails()
    knn = CustomKNN(distance, batch_size=2)
    with pytest.raises(RuntimeError, match="second block"):
        knn(rows(5, 3), 2, rows(9, 3, seed=1))
    gc.collect()
    assert distance.watched[0]() is None


@pytest.mark.parametrize("distance", [LpDistance(), SNRDistance(), BatchedDistance(LpDistance(p=1))], ids=str)
def test_copies_search_alike_before_and_after_use(distance):
    knn = CustomKNN(distance, batch_size=3)
    query, reference = rows(7, 3), rows(9, 3, seed=1)
    early = pickle.loads(pickle.dumps(knn)), copy.deepcopy(knn)
    wanted = knn(query, 2, reference)
    for twin in (*early, pickle.loads(pickle.dumps(knn)), copy.deepcopy(knn)):
        assert twin.batch_size == 3
        assert twin(query, 2, reference)[1].equal(wanted[1])


@pytest.mark.parametrize("distance", [LpDistance(), SNRDistance(), BatchedDistance(SNRDistance())], ids=str)
def test_one_object_serves_many_threads(distance):
    knn = CustomKNN(distance, batch_size=5)
    queries = [rows(20, 8, seed=i) for i in range(4)]
    reference = rows(60, 8, seed=9)
    wanted = [knn(query, 3, reference) for query in queries]
    found = [None] * 4
    barrier = threading.Barrier(4)

    def work(i):
        barrier.wait()
        for _ in range(5):
            found[i] = knn(queries[i], 3, reference)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (distances, indices), (want_distances, want_indices) in zip(found, wanted, strict=True):
        assert indices.equal(want_indices)
        assert distances.equal(want_distances)


@pytest.mark.parametrize("distance", [LpDistance(), DotProductSimilarity(), SNRDistance()], ids=str)
def test_autocast_changes_nothing(distance):
    query, reference = rows(9, 16), rows(30, 16, seed=1)
    for backend in ("auto", "torch"):
        knn = CustomKNN(distance, backend=backend)
        wanted = knn(query, 4, reference)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = knn(query, 4, reference)
        assert got[0].equal(wanted[0])
        assert got[1].equal(wanted[1])


MEMORY = """
import re, torch
from exactknn.distances import DotProductSimilarity
from exactknn.evaluation import CustomKNN, RustKNN

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) >> 10

def added(knn, rows, k):
    x = torch.randn(rows, 8, generator=torch.manual_seed(0))
    knn(x[:100], 5, x[:100])
    before = peak()
    assert knn(x, k, x, True)[1].shape == (rows, k)
    return peak() - before

print(added(CustomKNN(DotProductSimilarity(), batch_size=64, backend="torch"), 6_000, 10), added(RustKNN(), 8_000, 100))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read there")
def test_memory_grows_with_the_neighbours_and_not_with_the_pairs(run_python):
    # The matrices of all pairs would be 137 MiB and 244 MiB, the second result is 9 MiB.
    one, other = map(int, run_python(MEMORY).split())
    assert one < 60
    assert other < 80
