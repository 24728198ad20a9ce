"""Errors of `CustomKNN`, and its choice of backend."""

import logging
import math
import re

import numpy as np
import pytest
import torch

from exactknn.distances import (
    BaseDistance,
    BatchedDistance,
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
    SNRDistance,
)
from exactknn.evaluation import CustomKNN, RustKNN
from exactknn.evaluation._dispatch import native_metric
from tests.python.evaluation.knn_helpers import SQUARED, Foreign, rows


@pytest.mark.parametrize("inverted", [False, True])
def test_nan_distances_rank_last(inverted):
    class WithNaN:
        is_inverted = inverted

        def __call__(self, query, reference):
            return torch.tensor([[torch.nan, 1.0, 2.0, -torch.inf], [3.0, torch.nan, torch.nan, 4.0]])

    distances, indices = CustomKNN(WithNaN())(torch.zeros(2, 1), 4, torch.zeros(4, 1))
    assert indices[:, :2].tolist() == ([[2, 1], [3, 0]] if inverted else [[3, 1], [0, 3]])
    assert distances.isnan().tolist() == [[False, False, False, True], [False, False, True, True]]


def test_a_constant_query_under_snr_ranks_nothing_first():
    query = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 3.0]])
    reference = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 3.5], [4.0, 0.0, 0.0]])
    distances, indices = CustomKNN(SNRDistance(normalize_embeddings=False))(query, 3, reference)
    assert distances[0].isinf().tolist() == [True, True, False]
    assert distances[0, 2].isnan()
    assert indices[0, 2] == 0
    assert indices[1].tolist() == [1, 0, 2]


@pytest.mark.parametrize("distance", [LpDistance(), SNRDistance(), CosineSimilarity()], ids=str)
@pytest.mark.parametrize("batch_size", [None, 2])
class TestRefusals:
    query = rows(4, 3)
    reference = rows(6, 3, seed=1)

    def test_k_beyond_the_references(self, distance, batch_size):
        knn = CustomKNN(distance, batch_size)
        assert knn(self.query, 6, self.reference)[0].shape == (4, 6)
        with pytest.raises(ValueError, match="k must be at most the number of references, got k=7 with 6 references"):
            knn(self.query, 7, self.reference)
        assert knn(self.reference, 5, self.reference, True)[0].shape == (6, 5)
        with pytest.raises(ValueError, match="without the query itself, got k=6 with 6 references"):
            knn(self.reference, 6, self.reference, True)

    def test_k_of_another_kind(self, distance, batch_size):
        knn = CustomKNN(distance, batch_size)
        for k in (True, 1.0, "1", None):
            with pytest.raises(TypeError, match="k must be an integer"):
                knn(self.query, k, self.reference)
        with pytest.raises(ValueError, match="k must be at least 0, got -1"):
            knn(self.query, -1, self.reference)
        assert knn(self.query, np.int32(2), self.reference)[0].shape == (4, 2)

    def test_empty_sides(self, distance, batch_size):
        knn = CustomKNN(distance, batch_size)
        for query, k, flag in ((self.query, 0, False), (self.query[:0], 3, False), (self.reference, 0, True)):
            distances, indices = knn(query, k, self.reference, flag)
            assert distances.shape == indices.shape == (len(query), k)
            assert (distances.dtype, indices.dtype) == (torch.float32, torch.long)
        with pytest.raises(ValueError, match="k must be at most the number of references, got k=1 with 0 references"):
            knn(self.query, 1, self.reference[:0])

    def test_shapes(self, distance, batch_size):
        knn = CustomKNN(distance, batch_size)
        with pytest.raises(ValueError, match=r"2-D .*\(3,\)"):
            knn(self.query[0], 1, self.reference)
        with pytest.raises(ValueError, match=r"2-D .*\(1, 6, 3\)"):
            knn(self.query, 1, self.reference[None])
        with pytest.raises(ValueError, match="same dimension, got 3 and 2"):
            knn(self.query, 1, self.reference[:, :2])
        with pytest.raises(ValueError, match=r"must begin with the queries .* wanted at least 6 references, got 4"):
            knn(self.reference, 1, self.query, True)

    def test_types(self, distance, batch_size):
        knn = CustomKNN(distance, batch_size)
        with pytest.raises(TypeError, match=r"query must be a torch tensor, got ndarray"):
            knn(self.query.numpy(), 1, self.reference)
        with pytest.raises(TypeError, match=r"reference must be a torch tensor, got list"):
            knn(self.query, 1, self.reference.tolist())
        with pytest.raises(ValueError, match=r"must hold .* got torch.int64"):
            knn(self.query.long(), 1, self.reference)
        with pytest.raises(ValueError, match=r"one device, got meta and cpu"):
            knn(self.query.to("meta"), 1, self.reference)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_values_that_are_not_finite(self, distance, batch_size, bad):
        for backend in ("auto", "torch"):
            knn = CustomKNN(distance, batch_size, backend=backend)
            broken = self.query.clone()
            broken[2:, 1] = bad
            with pytest.raises(ValueError, match=r"query\b.*\brow 2\b"):
                knn(broken, 1, self.reference)
            broken = self.reference.clone()
            broken[5, 0] = bad
            with pytest.raises(ValueError, match=r"reference\b.*\brow 5\b"):
                knn(self.query, 1, broken)


def test_construction():
    distance = LpDistance()
    knn = CustomKNN(distance)
    assert knn.distance is distance
    assert knn.batch_size is None
    for batch_size in (0, -1):
        with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {batch_size}"):
            CustomKNN(distance, batch_size)
    for batch_size in (1.5, True):
        with pytest.raises(TypeError, match="batch_size must be an integer"):
            CustomKNN(distance, batch_size)
    with pytest.raises(ValueError, match="backend must be one of auto, rust, torch, got 'gpu'"):
        CustomKNN(distance, backend="gpu")
    with pytest.raises(TypeError, match="distance must be callable, got str"):
        CustomKNN("l2")
    with pytest.raises(TypeError, match="distance must have an attribute is_inverted"):
        CustomKNN(torch.cdist)


def test_a_distance_must_return_the_whole_block():
    class Short:
        is_inverted = False

        def __call__(self, query, reference):
            return torch.zeros(len(query), 1)

    with pytest.raises(ValueError, match=re.escape("distance must return a tensor of shape (2, 3), got (2, 1)")):
        CustomKNN(Short())(torch.zeros(2, 1), 1, torch.zeros(3, 1))


@pytest.mark.parametrize(
    ("distance", "metric"),
    [
        (LpDistance(), "normalized_euclidean"),
        (LpDistance(power=2.0), "normalized_sqeuclidean"),
        (LpDistance(normalize_embeddings=False), "euclidean"),
        (LpDistance(**SQUARED), "sqeuclidean"),
        (CosineSimilarity(), "cosine_similarity"),
        (DotProductSimilarity(), "inner_product"),
        (DotProductSimilarity(normalize_embeddings=True), "cosine_similarity"),
        (BatchedDistance(LpDistance(**SQUARED)), "sqeuclidean"),
    ],
)
def test_the_core_knows_these(distance, metric):
    assert native_metric(distance).metric == metric


@pytest.mark.parametrize("p", [0.5, 1, 1.5, 3, np.float32(2.5), math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_core_knows_every_exponent_of_rows_as_they_are(p, dtype):
    distance = LpDistance(normalize_embeddings=False, p=p)
    assert native_metric(distance)[::3] == ("minkowski", p)
    generator = torch.Generator().manual_seed(0)
    query, reference = (torch.randn(n, 9, generator=generator).to(dtype) for n in (12, 70))
    distances, indices = CustomKNN(distance, backend="rust")(query, 7, reference)
    wanted, order = torch.sort(distance(query.double(), reference.double()), stable=True)
    assert indices.equal(order[:, :7])
    assert distances.dtype == distance(query, reference).dtype
    torch.testing.assert_close(distances.double(), wanted[:, :7], rtol=1e-6, atol=0)
    assert distances.equal(RustKNN(distance)(query, 7, reference)[0])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"p": 1}, "normalises by p=1"),
        ({"p": 3, "power": 3, "normalize_embeddings": False}, "p=3 and power=3"),
    ],
)
def test_other_uses_of_an_exponent_take_the_torch_path(settings, reason):
    assert reason in native_metric(LpDistance(**settings)).reason


class Doubled(LpDistance):
    def compute_mat(self, query_emb, ref_emb):
        return 2 * super().compute_mat(query_emb, ref_emb)


def replaced():
    distance = LpDistance(normalize_embeddings=False)
    distance.compute_mat = lambda query, reference: 2 * torch.cdist(query, reference)
    return distance


def hooked():
    distance = LpDistance(normalize_embeddings=False)
    distance.register_forward_hook(lambda module, inputs, output: 2 * output)
    return distance


class OwnCall(LpDistance):
    def __call__(self, query, reference):
        return 2 * super().__call__(query, reference)


@pytest.mark.parametrize(
    "distance",
    [Doubled(normalize_embeddings=False), replaced(), hooked(), OwnCall(normalize_embeddings=False)],
    ids=["subclass", "method replaced", "hook", "call"],
)
def test_whatever_is_overridden_is_obeyed(distance):
    assert native_metric(distance).metric is None
    query, reference = torch.tensor([[0.0]]), torch.tensor([[3.0], [1.0]])
    distances, indices = CustomKNN(distance)(query, 2, reference)
    assert distances.tolist() == [[2, 6]]
    assert indices.tolist() == [[1, 0]]
    with pytest.raises(ValueError, match="backend='rust' cannot search"):
        CustomKNN(distance, backend="rust")


def test_a_patched_class_is_obeyed(monkeypatch):
    assert native_metric(LpDistance()).metric is not None
    monkeypatch.setattr(LpDistance, "compute_mat", lambda self, query, reference: torch.cdist(query, reference) + 1)
    assert "compute_mat" in native_metric(LpDistance()).reason
    assert CustomKNN(LpDistance())(torch.ones(1, 2), 1, torch.ones(1, 2))[0].item() == 1


def test_an_overridden_check_of_shapes_is_obeyed():
    class Strict(LpDistance):
        def check_shapes(self, query_emb, ref_emb):
            raise ValueError("not these")

    with pytest.raises(ValueError, match="not these"):
        CustomKNN(Strict())(rows(2, 2), 1, rows(3, 2))


@pytest.mark.parametrize(
    ("distance", "reason"),
    [
        (LpDistance(p=1), "p=1"),
        (LpDistance(p=1, power=2, normalize_embeddings=False), "p=1"),
        (LpDistance(power=3), "power=3"),
        (CosineSimilarity(power=2), "power=2"),
        (CosineSimilarity(p=1), "p=1"),
        (SNRDistance(), "SNRDistance"),
        (LpDistance(collect_stats=True), "statistics"),
        (Foreign(), "Foreign"),
    ],
)
def test_the_rust_backend_says_why_not(distance, reason):
    with pytest.raises(ValueError, match=f"backend='rust' cannot search.*{reason}"):
        CustomKNN(distance, backend="rust")
    assert CustomKNN(distance)(rows(3, 4), 2, rows(5, 4, seed=1))[0].shape == (3, 2)


def test_a_distance_changed_later_is_looked_at_again():
    distance = LpDistance(normalize_embeddings=False)
    knn = CustomKNN(distance, backend="rust")
    query, reference = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    assert knn(query, 1, reference)[0].item() == 5
    distance.power = 2
    assert knn(query, 1, reference)[0].item() == 25
    distance.power = 3
    with pytest.raises(ValueError, match="power=3"):
        knn(query, 1, reference)


def test_the_rust_backend_refuses_other_devices():
    with pytest.raises(ValueError, match="query is on meta, the core searches CPU memory"):
        CustomKNN(LpDistance(), backend="rust")(torch.zeros(2, 2, device="meta"), 1, torch.zeros(2, 2, device="meta"))


def test_a_subclass_of_the_base_works_unchanged():
    class Chebyshev(BaseDistance):
        def compute_mat(self, query_emb, ref_emb):
            return (query_emb.unsqueeze(1) - ref_emb).abs().amax(2)

        def pairwise_distance(self, query_emb, ref_emb):
            return (query_emb - ref_emb).abs().amax(1)

    distances, indices = CustomKNN(Chebyshev(normalize_embeddings=False))(
        torch.tensor([[0.0, 0.0]]), 2, torch.tensor([[1.0, 5.0], [2.0, 2.0]])
    )
    assert distances.tolist() == [[2, 5]]
    assert indices.tolist() == [[1, 0]]


def test_log_records(caplog):
    with caplog.at_level(logging.INFO, logger="exactknn"):
        CustomKNN(LpDistance())(rows(3, 4), 2, rows(5, 4, seed=1))
    assert all(record.name.startswith("exactknn.") for record in caplog.records)
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    assert "k=2" in caplog.records[0].getMessage()
    assert "dimension is 4" in caplog.records[1].getMessage()
