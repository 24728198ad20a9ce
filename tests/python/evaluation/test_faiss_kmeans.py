"""Faiss in the calculator, its k-means, and its GPUs by a fake."""

from __future__ import annotations

import contextlib
import logging
import sys
import types

import faiss
import numpy as np
import pytest
import torch

from exactknn.evaluation import AccuracyCalculator, FaissKMeans, FaissKNN
from exactknn.evaluation import faiss as module
from tests.python.evaluation.faiss_helpers import expected, rows_of, warnings_in


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


class GpuIndex:
    """An index in CPU memory that claims to be on a GPU, and records its calls."""

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
