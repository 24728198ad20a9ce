"""``FaissKNN`` and ``FaissKMeans`` with the real Faiss; GPUs by a fake of the symbols that only GPU builds have."""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import types

import faiss
import numpy as np
import pytest
import torch

from exactknn.evaluation import AccuracyCalculator, FaissKMeans, FaissKNN
from exactknn.evaluation import faiss as module


def rows_of(n, d=8, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32))


def expected(query, reference, k):
    found = torch.cdist(query.double(), reference.double()).square().topk(k, largest=False)
    return found.values.float(), found.indices


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- construction -----------------------------------------------------------------------------------------------------


def test_the_defaults_are_attributes():
    knn = FaissKNN()
    assert (knn.reset_before, knn.reset_after, knn.gpus, knn.index) == (True, True, None, None)
    assert knn.index_init_fn is faiss.IndexFlatL2


@pytest.mark.parametrize("name", ["FaissKNN", "FaissKMeans"])
def test_without_faiss_the_constructor_names_the_extra(run_python, name):
    program = f"""
import sys
sys.modules["faiss"] = None
from exactknn.evaluation import {name}
try:
    {name}()
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    printed = run_python(program)
    assert printed.startswith("faiss ")
    assert "exactknn[faiss]" in printed


def test_the_import_leaves_no_faiss(run_python):
    program = """
import sys
from exactknn.evaluation import FaissKNN, FaissKMeans
print([name for name in sys.modules if name.startswith(("faiss", "sklearn"))])
FaissKNN()
print("faiss" in sys.modules)
"""
    assert run_python(program).splitlines() == ["[]", "True"]


@pytest.mark.parametrize("gpus", ["0", 0, {0}, [0.5], ["0"], [True]])
def test_gpus_of_another_type(gpus):
    with pytest.raises(TypeError, match="gpus"):
        FaissKNN(gpus=gpus)


@pytest.mark.parametrize("gpus", [[], (), [-1]])
def test_gpus_that_are_none(gpus):
    with pytest.raises(ValueError, match="gpus"):
        FaissKNN(gpus=gpus)


@pytest.mark.parametrize("gpus", [[0], (0, 1)])
def test_gpus_without_a_gpu_build_mean_the_cpu(gpus, caplog):
    query, reference = rows_of(5), rows_of(20, seed=1)
    distances, indices = FaissKNN(gpus=gpus)(query, 3, reference)
    assert indices.equal(expected(query, reference, 3)[1])
    assert distances.device.type == "cpu"
    assert warnings_in(caplog) == []


def test_an_index_init_fn_that_is_no_function():
    with pytest.raises(TypeError, match="index_init_fn"):
        FaissKNN(index_init_fn=3)


# --- one index for each call ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_neighbours_by_squared_distance(dtype):
    query, reference = rows_of(7).to(dtype), rows_of(30, seed=1).to(dtype)
    distances, indices = FaissKNN()(query, 5, reference)
    values, columns = expected(query, reference, 5)
    assert indices.equal(columns)
    assert (distances.dtype, indices.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(distances, values, rtol=1e-5, atol=1e-5)


def test_another_index_type_has_its_own_order():
    query, reference = rows_of(7), rows_of(30, seed=1)
    knn = FaissKNN(reset_after=False, index_init_fn=faiss.IndexFlatIP)
    distances, indices = knn(query, 4, reference)
    found = (query @ reference.T).topk(4)
    assert indices.equal(found.indices)
    torch.testing.assert_close(distances, found.values)
    assert isinstance(knn.index, faiss.IndexFlatIP)


def test_each_call_has_an_index_of_its_own():
    knn = FaissKNN(reset_after=False)
    for seed in (1, 2):
        query, reference = rows_of(4), rows_of(12, seed=seed)
        assert knn(query, 3, reference)[1].equal(expected(query, reference, 3)[1])
        assert isinstance(knn.index, faiss.IndexFlatL2)
        assert knn.index.ntotal == 12


@pytest.mark.parametrize("k", [3, 50])
def test_the_index_is_dropped_after_a_call_failed_or_not(k):
    knn = FaissKNN(reset_before=False)
    knn.train(rows_of(10))
    with contextlib.nullcontext() if k < 10 else pytest.raises(ValueError, match="k must be at most"):
        knn(rows_of(2), k)
    assert knn.index is None


def test_own_rows_are_left_out_by_number():
    x = torch.tensor([[0.0], [0.0], [0.0], [5.0], [9.0]])
    distances, indices = FaissKNN()(x[:4], 2, x, True)
    assert [set(row) for row in indices.tolist()] == [{1, 2}, {0, 2}, {0, 1}, {4, indices[3, 1].item()}]
    assert indices[3, 1].item() in (0, 1, 2)
    assert distances.tolist() == [[0, 0], [0, 0], [0, 0], [16, 25]]


def test_a_row_whose_own_is_not_found_loses_the_last():
    # Eight equal rows: Faiss finds three of them, not each row among its own.
    x = torch.zeros(8, 2)
    distances, indices = FaissKNN()(x, 2, x, True)
    assert distances.tolist() == [[0, 0]] * 8
    for row, found in enumerate(indices.tolist()):
        assert row not in found
        assert len(set(found)) == 2


def test_an_index_type_that_learns_is_trained_on_the_reference():
    def init(d):
        return faiss.IndexIVFFlat(faiss.IndexFlatL2(d), d, 2)

    reference = rows_of(200)
    knn = FaissKNN(index_init_fn=init, reset_after=False)
    _, indices = knn(reference[:20], 1, reference)
    assert indices.flatten().tolist() == list(range(20))
    assert knn.index.is_trained
    assert knn.index.ntotal == 200
    knn = FaissKNN(reset_before=False, reset_after=False, index_init_fn=init)
    with pytest.raises(ValueError, match="the rows to train on must be small enough"):
        knn.train(reference * 1e30)
    knn.train(reference)
    assert knn.index.is_trained
    assert knn(reference[:20], 1)[1].flatten().tolist() == list(range(20))


@pytest.mark.parametrize(("n", "k", "own"), [(0, 3, False), (0, 3, True), (4, 0, False), (4, 0, True), (0, 0, True)])
def test_nothing_to_find(n, k, own):
    x = rows_of(9)
    distances, indices = FaissKNN()(x[:n], k, x, own)
    assert distances.shape == indices.shape == (n, k)
    assert (distances.dtype, indices.dtype) == (torch.float32, torch.int64)


def test_layouts_and_modes():
    wide = rows_of(20, 16)
    with torch.inference_mode():
        query = rows_of(5)[:, ::2] * 1
    reference = wide[:, ::4]
    columns = expected(query, reference, 3)[1]
    knn = FaissKNN()
    assert knn(query, 3, reference)[1].equal(columns)
    assert knn(query.clone().requires_grad_(), 3, reference.numpy())[1].equal(columns)
    read_only = reference.numpy().copy()
    read_only.flags.writeable = False
    assert knn(query, 3, read_only)[1].equal(columns)
    negative = torch.complex(torch.zeros(5, 4), -query.clone()).conj().imag
    assert negative.is_neg()
    assert knn(negative, 3, reference)[1].equal(columns)


def test_float64_rows_that_float32_cannot_tell_apart_are_warned_of_once(caplog):
    x = (1e8 + torch.arange(6, dtype=torch.float64)).unsqueeze(1)
    knn = FaissKNN()
    for _ in range(2):
        distances, _ = knn(x, 2, x)
    assert distances.dtype == torch.float32
    assert distances[:5].max() == 0  # they all become 1e8; the sixth row becomes 1e8 + 8
    assert distances[5].tolist() == [0, 64]
    messages = warnings_in(caplog)
    assert len(messages) == 1
    assert "float32" in messages[0]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((rows_of(2).numpy(), 1, rows_of(3)), TypeError, "query must be a torch tensor"),
        ((rows_of(2)[0], 1, rows_of(3)), ValueError, "query must be 2-D"),
        ((rows_of(2), 1, rows_of(3)[0]), ValueError, "reference must be 2-D"),
        ((rows_of(2), 1, rows_of(3, 4)), ValueError, "got 8 and 4 dimensions"),
        ((rows_of(2)[:, :0], 1, rows_of(3)[:, :0]), ValueError, "at least one column"),
        ((rows_of(2).long(), 1, rows_of(3)), ValueError, "query must hold float32"),
        ((rows_of(2).to_sparse(), 1, rows_of(3)), ValueError, "query must be a dense tensor"),
        ((rows_of(2), 1.0, rows_of(3)), TypeError, "k must be"),
        ((rows_of(2), -1, rows_of(3)), ValueError, "k must be"),
        ((rows_of(2), 4, rows_of(3)), ValueError, "k must be at most the number of rows in the index, 3 of 3, got 4"),
        ((rows_of(3), 3, rows_of(3), True), ValueError, "besides the query itself, 2 of 3, got 3"),
        ((rows_of(4), 1, rows_of(3), True), ValueError, "must begin with the 4 query rows"),
        ((rows_of(2), 1), ValueError, "reference must be given"),
        ((torch.tensor([[0.0], [torch.nan]]), 1, torch.ones(3, 1)), ValueError, "query must be finite.* row 1"),
        ((torch.ones(3, 1), 1, torch.tensor([[0.0], [torch.inf]])), ValueError, "reference must be finite.* row 1"),
        ((torch.tensor([[1e300]]).double() * 1e300, 1, torch.ones(3, 1)), ValueError, "query must be finite"),
        ((torch.tensor([[1e200]], dtype=torch.float64), 1, torch.ones(3, 1)), ValueError, "query rounded to float32"),
    ],
)
def test_what_cannot_be_searched(arguments, error, message):
    with pytest.raises(error, match=message):
        FaissKNN()(*arguments)


def test_an_index_of_another_dimension():
    with pytest.raises(ValueError, match="index_init_fn must return an index of dimension 8, got 9"):
        FaissKNN(index_init_fn=lambda d: faiss.IndexFlatL2(d + 1))(rows_of(2), 1, rows_of(3))
    knn = FaissKNN(reset_before=False, reset_after=False)
    knn.train(rows_of(5))
    with pytest.raises(ValueError, match="query must have the dimension of the index, 8, got 4"):
        knn(rows_of(2, 4), 1)
    with pytest.raises(ValueError, match="reference must have the dimension of the index, 8, got 4"):
        knn(rows_of(2), 1, rows_of(2, 4))
    with pytest.raises(ValueError, match="embeddings must have the dimension of the index, 8, got 4"):
        knn.add(rows_of(2, 4))
    assert knn.index.ntotal == 5


def test_without_an_index(tmp_path):
    knn = FaissKNN(reset_before=False)
    for call in (
        lambda: knn(rows_of(2), 1),
        lambda: knn(rows_of(2), 1, rows_of(5)),
        lambda: knn.add(rows_of(2)),
        lambda: knn.save(tmp_path / "index"),
    ):
        with pytest.raises(ValueError, match=r"there is no index to .*train"):
            call()


def test_a_refused_call_adds_nothing():
    knn = FaissKNN(reset_before=False, reset_after=False)
    knn.train(rows_of(5))
    for k, reference in ((8, rows_of(2)), (1, torch.full((2, 8), torch.nan))):
        with pytest.raises(ValueError, match=r"k must|reference must"):
            knn(rows_of(2), k, reference)
    assert knn.index.ntotal == 5


def test_an_error_of_faiss_is_raised_and_nothing_tried_again():
    class Refusing(faiss.IndexFlatL2):
        added = 0

        def add(self, x):
            Refusing.added += 1
            raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        FaissKNN(index_init_fn=Refusing)(rows_of(2), 1, rows_of(3))
    assert Refusing.added == 1


# --- an index that is kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_array", [False, True])
def test_train_add_search_save_load(tmp_path, as_array):
    x = rows_of(70, 16)
    given = x.numpy() if as_array else x
    knn = FaissKNN(reset_before=False, reset_after=False)
    knn.train(given[:50])
    knn.add(given[50:])
    assert knn.index.ntotal == 70
    query = rows_of(6, 16, seed=3)
    distances, indices = knn(query, 10)
    assert indices.equal(expected(query, x, 10)[1])

    knn.save(tmp_path / "rows.index")
    other = FaissKNN(reset_before=False, reset_after=False)
    other.load(str(tmp_path / "rows.index"))
    loaded_distances, loaded_indices = other(query, 10)
    assert loaded_indices.equal(indices)
    assert loaded_distances.equal(distances)
    assert faiss.read_index(str(tmp_path / "rows.index")).ntotal == 70

    knn.train(given[:5])
    assert knn.index.ntotal == 5
    knn.reset()
    assert knn.index is None


def test_references_accumulate():
    knn = FaissKNN(reset_before=False, reset_after=False)
    first, second, query = rows_of(10), rows_of(5, seed=1), rows_of(4, seed=2)
    knn.train(first)
    assert knn(query, 6, second)[1].equal(expected(query, torch.cat([first, second]), 6)[1])
    knn(query, 1, second)
    assert knn.index.ntotal == 20
    _, indices = knn(second, 2)
    assert [sorted(row) for row in indices.tolist()] == [[10 + row, 15 + row] for row in range(5)]


def test_an_approximate_index_that_finds_fewer_says_so_once(caplog):
    def init(d):
        return faiss.IndexIVFFlat(faiss.IndexFlatL2(d), d, 2)

    reference = torch.cat([torch.zeros(50, 2), torch.full((50, 2), 9.0)]) + rows_of(100, 2) / 10
    _, indices = FaissKNN(index_init_fn=init)(reference[:3], 60, reference)
    assert ((indices == -1).sum(dim=1) == 10).all()
    messages = warnings_in(caplog)
    assert len(messages) == 1
    assert "fewer than 60 rows for 3 of 3 queries" in messages[0]

    labels = torch.arange(100) // 50
    calculator = AccuracyCalculator(include=("recall_at_60",), knn_func=FaissKNN(index_init_fn=init))
    with pytest.raises(ValueError, match="indices from 0 to 99, got -1"):
        calculator.get_accuracy(reference, labels)


@pytest.mark.parametrize("knn", [FaissKNN(), FaissKMeans(seed=3)], ids=repr)
def test_pickled_and_back(knn):
    again = pickle.loads(pickle.dumps(knn))
    assert repr(again) == repr(knn)


def test_distances_beyond_float32_are_not_found(caplog):
    _, indices = FaissKNN()(torch.zeros(1, 2), 2, torch.tensor([[1e30, 0.0], [1.0, 0.0]]))
    assert indices.tolist() == [[1, -1]]
    assert "beyond float32" in warnings_in(caplog)[0]


# --- in the calculator ------------------------------------------------------------------------------------------------


def blobs():
    centres = rows_of(4, 8) * 10
    labels = torch.arange(80) % 4
    return centres[labels] + rows_of(80, 8, seed=1), labels


@pytest.mark.parametrize("separate", [False, True])
def test_the_calculator_agrees_with_exact_search(separate):
    x, labels = blobs()
    x, noisy = x / 5, labels.clone()
    noisy[::7] = 0
    given = (x[:30], noisy[:30], x[30:], noisy[30:]) if separate else (x, noisy)
    include = ("precision_at_1", "mean_average_precision", "r_precision", "knn_accuracy_at_5")
    by_faiss = AccuracyCalculator(include, k=7, knn_func=FaissKNN()).get_accuracy(*given)
    assert by_faiss == pytest.approx(AccuracyCalculator(include, k=7).get_accuracy(*given), rel=1e-12)
    assert 0 < by_faiss["mean_average_precision"] < 1


def test_the_calculator_clusters_by_faiss():
    x, labels = blobs()
    kmeans = FaissKMeans(init_method=faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS, nredo=3, min_points_per_centroid=1)
    calculator = AccuracyCalculator(knn_func=FaissKNN(), kmeans_func=kmeans)
    values = calculator.get_accuracy(x, labels)
    assert values["NMI"] == pytest.approx(1)
    assert values["AMI"] == pytest.approx(1)
    assert values["precision_at_1"] == 1


def test_more_neighbours_than_references_are_cut_off_by_the_calculator():
    values = AccuracyCalculator(k=50, knn_func=FaissKNN()).get_accuracy(
        rows_of(20), torch.arange(20) % 2, rows_of(6, seed=1), torch.arange(6) % 2
    )
    assert values.keys() >= {"mean_average_precision", "precision_at_1"}
    assert all(0 <= value <= 1 for value in values.values())


def test_rows_of_earlier_calls_are_refused_by_the_calculator():
    x, labels = blobs()
    knn = FaissKNN(reset_before=False, reset_after=False)
    knn.train(x)
    calculator = AccuracyCalculator(include=("precision_at_1",), k=3, knn_func=knn)
    with pytest.raises(ValueError, match="knn_func must return indices from 0 to 79"):
        calculator.get_accuracy(x, labels)


# --- k-means ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_cluster_for_each_row(dtype, caplog):
    caplog.set_level(logging.INFO, "exactknn")
    x = torch.cat([rows_of(60), rows_of(60, seed=1) + 50]).to(dtype)
    clusters = FaissKMeans(niter=5, seed=1)(x, 2)
    assert (clusters.dtype, clusters.shape) == (torch.long, (120,))
    assert len(set(clusters[:60].tolist())) == len(set(clusters[60:].tolist())) == 1
    assert clusters[0] != clusters[60]
    assert sum(record.levelno == logging.INFO for record in caplog.records) == 1
    assert len(warnings_in(caplog)) == (dtype == torch.float64)


def test_the_keywords_reach_faiss():
    x = rows_of(300)
    kmeans = faiss.Kmeans(8, 4, niter=3, seed=9, nredo=2)
    kmeans.train(x.numpy())
    own = FaissKMeans(niter=3, seed=9, nredo=2)
    assert own.kwargs == {"niter": 3, "seed": 9, "nredo": 2}
    assert own(x.numpy(), 4).tolist() == kmeans.assign(x.numpy())[1].tolist()
    with pytest.raises(AttributeError, match="no_such"):
        FaissKMeans(no_such=1)(x, 2)


@pytest.mark.parametrize(
    ("x", "num_clusters", "error", "message"),
    [
        (rows_of(3), 5, ValueError, "num_clusters must be at most the number of rows, 3, got 5"),
        (rows_of(0), 1, ValueError, "num_clusters must be at most the number of rows, 0, got 1"),
        (rows_of(3), 0, ValueError, "num_clusters"),
        (rows_of(3), 1.5, TypeError, "num_clusters"),
        (rows_of(3)[0], 1, ValueError, "x must be 2-D"),
        (torch.tensor([[0.0], [torch.nan], [1.0]]), 2, ValueError, "x must be finite, got NaN or infinity in row 1"),
        (rows_of(3).long(), 1, ValueError, "x must hold float32"),
        (rows_of(5) * 1e30, 2, ValueError, "x must be small enough for squared distances in float32, got length"),
    ],
)
def test_what_cannot_be_clustered(x, num_clusters, error, message):
    with pytest.raises(error, match=message):
        FaissKMeans()(x, num_clusters)


def test_clusters_that_stay_empty_are_warned_of(caplog):
    clusters = FaissKMeans(min_points_per_centroid=1)(torch.ones(10, 8), 3)
    assert len(set(clusters.tolist())) == 1
    messages = warnings_in(caplog)
    assert len(messages) == 1
    assert "only 1 of 3 clusters" in messages[0]


@pytest.mark.parametrize("seed", range(6))
def test_two_values_give_two_clusters_or_a_warning(seed, caplog):
    x = torch.cat([torch.zeros(124, 8), torch.ones(125, 8)])
    labels = (torch.arange(249) >= 124).long()
    values = AccuracyCalculator(("NMI",), kmeans_func=FaissKMeans(seed=seed)).get_accuracy(x, labels)
    degenerated = any("degenerated: only 1 of 2" in message for message in warnings_in(caplog))
    assert values["NMI"] == pytest.approx(0 if degenerated else 1, abs=1e-12)


# --- GPUs, by a fake -------------------------------------------------------------------------------------------------


class GpuIndex:
    """An index in CPU memory that says it lies on a GPU, and tells what it was called with."""

    def __init__(self, index, gpu, calls):
        self.inner, self.gpu, self.calls = index, gpu, calls

    d = property(lambda self: self.inner.d)
    ntotal = property(lambda self: self.inner.ntotal)
    is_trained = property(lambda self: self.inner.is_trained)

    def getDevice(self):
        return self.gpu

    def add(self, x):
        self.calls.append(("add", self.gpu, type(x).__name__))
        self.inner.add(np.asarray(x))

    def search(self, x, k):
        self.calls.append(("search", self.gpu, type(x).__name__))
        found = self.inner.search(np.asarray(x), k)
        return tuple(map(torch.from_numpy, found)) if isinstance(x, torch.Tensor) else found


class Replicas:
    """One index on several GPUs."""

    def __init__(self, parts):
        self.parts = parts

    d = property(lambda self: self.parts[0].d)
    ntotal = property(lambda self: self.parts[0].ntotal)

    def count(self):
        return len(self.parts)

    def at(self, part):
        return self.parts[part]

    def add(self, x):
        for part in self.parts:
            part.add(x)

    def search(self, x, k):
        return self.parts[0].search(x, k)


class Fake(types.ModuleType):
    """The real Faiss and what a GPU build has besides; ``calls`` tells what was done."""

    def __init__(self, gpus, *, with_gpu_index=True):
        super().__init__("faiss")
        self.calls, self.gpus = [], gpus
        self.IndexReplicas = Replicas
        self.downcast_index = lambda index: index
        if with_gpu_index:
            self.GpuIndex = GpuIndex

    def __getattr__(self, name):
        return getattr(faiss, name)

    def get_num_gpus(self):
        return self.gpus

    def index_cpu_to_gpus_list(self, index, gpus):
        assert not isinstance(index, (GpuIndex, Replicas))
        self.calls.append(("to", *gpus))
        parts = [GpuIndex(faiss.clone_index(index), gpu, self.calls) for gpu in gpus]
        return parts[0] if len(parts) == 1 else Replicas(parts)

    def index_gpu_to_cpu(self, index):
        self.calls.append(("to cpu",))
        return faiss.clone_index((index.parts[0] if isinstance(index, Replicas) else index).inner)


@pytest.fixture
def fake(monkeypatch):
    def install(gpus, **options):
        installed = Fake(gpus, **options)
        monkeypatch.setitem(sys.modules, "faiss", installed)
        return installed

    return install


class OnCuda(torch.Tensor):
    """A tensor in CPU memory that says it is on CUDA."""

    is_cuda = True


def on_cuda(rows):
    return rows.as_subclass(OnCuda)


def test_a_list_of_gpus_is_used_for_queries_in_cpu_memory(fake):
    made = fake(3)
    query, reference = rows_of(4), rows_of(20, seed=1)
    _, indices = FaissKNN(gpus=(2,))(query, 3, reference)
    assert made.calls == [("to", 2), ("add", 2, "ndarray"), ("search", 2, "ndarray")]
    assert indices.equal(expected(query, reference, 3)[1])


def test_a_query_in_cpu_memory_stays_off_the_gpu_without_a_list(fake):
    made = fake(1)
    FaissKNN()(rows_of(4), 3, rows_of(20))
    assert made.calls == []


def test_a_query_on_cuda_uses_all_gpus(fake):
    made = fake(2)
    query, reference = rows_of(4), rows_of(20, seed=1)
    _, indices = FaissKNN()(on_cuda(query), 3, reference)
    assert made.calls == [("to", 0, 1), ("add", 0, "ndarray"), ("add", 1, "ndarray"), ("search", 0, "ndarray")]
    assert indices.equal(expected(query, reference, 3)[1])


@pytest.mark.parametrize(("gpus", "with_gpu_index"), [(0, True), (4, False)])
def test_builds_that_cannot_use_a_gpu_search_on_the_cpu_silently(fake, gpus, with_gpu_index, caplog):
    made = fake(gpus, with_gpu_index=with_gpu_index)
    query, reference = rows_of(4), rows_of(20, seed=1)
    for knn in (FaissKNN(), FaissKNN(gpus=[0])):
        assert knn(on_cuda(query), 3, reference)[1].equal(expected(query, reference, 3)[1])
    assert made.calls == []
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(("k", "own", "on_gpu"), [(2048, False, True), (2049, False, False), (2048, True, False)])
def test_the_most_neighbours_on_a_gpu(fake, k, own, on_gpu, caplog):
    made = fake(1)
    reference = rows_of(2100, 2)
    _, indices = FaissKNN(gpus=[0])(reference[:2], k, reference, own)
    assert indices.shape == (2, k)
    assert (("to", 0) in made.calls) == on_gpu
    assert len(warnings_in(caplog)) == (not on_gpu)
    assert all("2048" in message for message in warnings_in(caplog))


def test_rows_accumulate_on_gpus_too_and_are_saved_from_there(fake, tmp_path):
    made = fake(2)
    first, second, query = rows_of(10), rows_of(5, seed=1), rows_of(4, seed=2)
    knn = FaissKNN(reset_before=False, reset_after=False, gpus=[0, 1])
    knn.train(first)
    both = torch.cat([first, second])
    assert knn(query, 6, second)[1].equal(expected(query, both, 6)[1])
    assert knn(query, 6)[1].equal(expected(query, both, 6)[1])
    assert knn.index.ntotal == 15
    assert made.calls.count(("to", 0, 1)) == 1

    knn.save(tmp_path / "rows.index")
    assert faiss.read_index(str(tmp_path / "rows.index")).ntotal == 15
    assert isinstance(knn.index, Replicas)

    knn.gpus = [1]
    made.calls.clear()
    assert knn(query, 6)[1].equal(expected(query, both, 6)[1])
    assert made.calls == [("to cpu",), ("to", 1), ("search", 1, "ndarray")]
    knn.gpus = None
    assert knn(query, 6)[1].equal(expected(query, both, 6)[1])
    assert isinstance(knn.index, faiss.IndexFlatL2)


@pytest.mark.parametrize(("where", "direct"), [(1, True), (0, False)])
def test_rows_on_the_gpu_of_the_index_are_not_copied(fake, monkeypatch, where, direct):
    made, entered = fake(2), []

    @contextlib.contextmanager
    def device(gpu):
        entered.append(gpu)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(module, "_gpu_of", lambda rows: where)
    monkeypatch.setitem(sys.modules, "faiss.contrib.torch_utils", types.ModuleType("faiss.contrib.torch_utils"))
    query, reference = rows_of(4), rows_of(20, seed=1)
    distances, indices = FaissKNN(gpus=[1])(query, 3, reference)
    kind = "Tensor" if direct else "ndarray"
    assert made.calls == [("to", 1), ("add", 1, kind), ("search", 1, kind)]
    assert entered == ([1, "left", 1, "left"] if direct else [])
    assert indices.equal(expected(query, reference, 3)[1])
    assert distances.dtype == torch.float32
