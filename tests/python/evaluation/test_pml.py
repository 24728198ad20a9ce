"""The real pytorch-metric-learning with this package as its search."""

import itertools

import pytest
import torch
from pytorch_metric_learning import distances as pml
from pytorch_metric_learning.distances.base_distance import BaseDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN as PMLCustomKNN
from pytorch_metric_learning.utils.inference import FaissKNN

from exactknn import distances
from exactknn.evaluation import CustomKNN, RustKNN
from exactknn.evaluation._dispatch import native_metric

METRICS = (
    "precision_at_1",
    "r_precision",
    "mean_average_precision",
    "mean_average_precision_at_r",
    "mean_reciprocal_rank",
)


def embeddings(n=120, d=16, classes=7, seed=0):
    generator = torch.manual_seed(seed)
    labels = torch.arange(n) % classes
    centres = torch.randn(classes, d, generator=generator)
    return centres[labels] + 1.5 * torch.randn(n, d, generator=generator), labels


BACKENDS = {
    "default": (FaissKNN, RustKNN),
    "euclidean": (
        lambda: PMLCustomKNN(pml.LpDistance(normalize_embeddings=False)),
        lambda: RustKNN(pml.LpDistance(normalize_embeddings=False)),
    ),
    "normalised": (lambda: PMLCustomKNN(pml.LpDistance(power=2)), lambda: RustKNN(distances.LpDistance(power=2))),
    "cosine": (lambda: PMLCustomKNN(pml.CosineSimilarity()), lambda: RustKNN(pml.CosineSimilarity())),
    "dot product": (
        lambda: PMLCustomKNN(pml.DotProductSimilarity(normalize_embeddings=False), batch_size=32),
        lambda: RustKNN(distances.DotProductSimilarity(), batch_size=32),
    ),
    "foreign": (lambda: PMLCustomKNN(pml.SNRDistance()), lambda: CustomKNN(pml.SNRDistance(), batch_size=32)),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("k", [None, 5, "max_bin_count"])
@pytest.mark.parametrize("setting", ["self", "with query", "apart"])
def test_the_calculator_finds_the_same_metrics(name, k, setting):
    reference, reference_labels = embeddings()
    if setting == "self":
        arguments = (reference, reference_labels)
    elif setting == "with query":
        arguments = (reference[:50], reference_labels[:50], reference, reference_labels, True)
    else:
        arguments = (*embeddings(50, seed=1), reference, reference_labels)
    results = []
    for backend in BACKENDS[name]:
        calculator = AccuracyCalculator(include=METRICS, k=k, device=torch.device("cpu"), knn_func=backend())
        results.append(calculator.get_accuracy(*arguments))
    theirs, ours = results
    assert set(ours) == set(METRICS)
    assert ours == theirs
    assert 0 < ours["precision_at_1"] <= 1


@pytest.mark.parametrize(
    ("distance", "metric"),
    [
        (pml.LpDistance(), "normalized_euclidean"),
        (pml.LpDistance(normalize_embeddings=False), "euclidean"),
        (pml.LpDistance(normalize_embeddings=False, p=1), "minkowski"),
        (pml.LpDistance(normalize_embeddings=False, p=3.5), "minkowski"),
        (pml.LpDistance(normalize_embeddings=False, p=float("inf")), "minkowski"),
        (pml.LpDistance(power=2), "normalized_sqeuclidean"),
        (pml.LpDistance(normalize_embeddings=False, power=2), "sqeuclidean"),
        (pml.CosineSimilarity(), "cosine_similarity"),
        (pml.DotProductSimilarity(normalize_embeddings=True), "cosine_similarity"),
        (pml.DotProductSimilarity(normalize_embeddings=False), "inner_product"),
    ],
)
def test_its_distances_are_recognised(distance, metric):
    assert native_metric(distance).metric == metric
    query, reference = embeddings(20)[0], embeddings(60, seed=1)[0]
    native = CustomKNN(distance, backend="rust")(query, 9, reference)
    wanted = torch.topk(distance(query.double(), reference.double()), 9, largest=distance.is_inverted)
    assert native[1].equal(wanted.indices)
    torch.testing.assert_close(native[0].double(), wanted.values, rtol=1e-6, atol=1e-6)


class Doubled(pml.LpDistance):
    def compute_mat(self, query_emb, ref_emb):
        return 2 * super().compute_mat(query_emb, ref_emb)


def replaced():
    distance = pml.LpDistance()
    distance.compute_mat = lambda query, reference: 2 * torch.cdist(query, reference)
    return distance


@pytest.mark.parametrize(
    ("distance", "reason"),
    [
        (pml.LpDistance(p=1), "normalises by p=1"),
        (pml.LpDistance(p=0, normalize_embeddings=False), "p=0"),
        (pml.LpDistance(p=3, power=3, normalize_embeddings=False), "p=3 and power=3"),
        (pml.LpDistance(power=3), "power=3"),
        (pml.CosineSimilarity(power=2), "power=2"),
        (pml.SNRDistance(), "SNRDistance"),
        (Doubled(), "Doubled"),
        (replaced(), "compute_mat"),
        (pml.BatchedDistance(pml.LpDistance()), "BatchedDistance"),
    ],
)
def test_other_distances_of_it_are_obeyed(distance, reason):
    assert reason in native_metric(distance).reason
    query, reference = embeddings(10)[0], embeddings(30, seed=1)[0]
    distances_found, indices = CustomKNN(distance)(query, 4, reference)
    plain = distance.distance if isinstance(distance, pml.BatchedDistance) else distance
    wanted = torch.topk(plain(query, reference), 4, largest=plain.is_inverted)
    assert indices.equal(wanted.indices)
    torch.testing.assert_close(distances_found, wanted.values)


def test_a_batched_distance_of_it_uses_its_own_batch_size():
    sizes = []

    class Counting(pml.LpDistance):
        def compute_mat(self, query_emb, ref_emb):
            sizes.append(len(query_emb))
            return super().compute_mat(query_emb, ref_emb)

    CustomKNN(pml.BatchedDistance(Counting(), batch_size=4))(embeddings(10)[0], 2, embeddings(30)[0])
    assert sizes == [4, 4, 2]


PAIRS = [
    (pml.LpDistance, distances.LpDistance, {}),
    (pml.LpDistance, distances.LpDistance, {"normalize_embeddings": False, "power": 2}),
    (pml.LpDistance, distances.LpDistance, {"p": 1}),
    (pml.CosineSimilarity, distances.CosineSimilarity, {}),
    (pml.DotProductSimilarity, distances.DotProductSimilarity, {"normalize_embeddings": True}),
    (pml.SNRDistance, distances.SNRDistance, {}),
]


@pytest.mark.parametrize(("theirs", "ours", "options"), PAIRS)
def test_our_distances_have_its_values_and_gradients(theirs, ours, options):
    results = []
    for kind in (theirs, ours):
        query = embeddings(9)[0].double().requires_grad_()
        reference = embeddings(12, seed=1)[0].double().requires_grad_()
        mat = kind(**options)(query, reference)
        mat.square().sum().backward()
        results.append((mat.detach(), query.grad, reference.grad))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_its_subclasses_work_unchanged():
    class Manhattan(BaseDistance):
        def compute_mat(self, query_emb, ref_emb):
            return (query_emb.unsqueeze(1) - ref_emb).abs().sum(2)

        def pairwise_distance(self, query_emb, ref_emb):
            return (query_emb - ref_emb).abs().sum(1)

    query, reference = embeddings(8)[0], embeddings(20, seed=1)[0]
    wanted = torch.topk(torch.cdist(query, reference, p=1), 3, largest=False)
    for batch_size in (None, 3):
        found = CustomKNN(Manhattan(normalize_embeddings=False), batch_size)(query, 3, reference)
        assert found[1].equal(wanted.indices)
        torch.testing.assert_close(found[0], wanted.values)


def test_shapes_its_distances_let_through_are_refused():
    query, reference = torch.zeros(3, 4), torch.zeros(5, 3)
    for distance, knn in itertools.product((pml.LpDistance(), pml.SNRDistance()), (CustomKNN, RustKNN)):
        with pytest.raises(ValueError, match="same dimension, got 4 and 3"):
            knn(distance)(query, 1, reference)
