"""Rows and helpers that the tests of this folder share."""

import torch
from pytorch_metric_learning import distances as pml

from exactknn.distances import (
    BatchedDistance,
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
    SNRDistance,
)
from exactknn.evaluation import CustomKNN, MatchFinder


def rows(n, d, seed=0, dtype=torch.float32):
    return torch.randn(n, d, generator=torch.manual_seed(seed), dtype=torch.float64).to(dtype)


# Subclasses are measured by torch.
class TorchLp(LpDistance):
    pass


class TorchCosine(CosineSimilarity):
    pass


class TorchDot(DotProductSimilarity):
    pass


NATIVE = {
    "euclidean": LpDistance(normalize_embeddings=False),
    "squared": LpDistance(normalize_embeddings=False, power=2),
    "normalised": LpDistance(),
    "normalised squared": LpDistance(power=2),
    "cityblock": LpDistance(normalize_embeddings=False, p=1),
    "minkowski": LpDistance(normalize_embeddings=False, p=3),
    "cosine": CosineSimilarity(),
    "dot": DotProductSimilarity(),
    "batched": BatchedDistance(LpDistance(power=2), batch_size=3),
    "pml cosine": pml.CosineSimilarity(),
    "pml squared": pml.LpDistance(normalize_embeddings=False, power=2),
}
TORCH = {
    "euclidean": TorchLp(normalize_embeddings=False),
    "normalised squared": TorchLp(power=2),
    "cosine": TorchCosine(),
    "dot": TorchDot(),
    "snr": SNRDistance(),
    "p=1, squared": LpDistance(normalize_embeddings=False, p=1, power=2),
    "batched": BatchedDistance(TorchLp(power=2), batch_size=3),
    "pml": pml.SNRDistance(),
}
ALL = [*NATIVE.values(), *TORCH.values()]
ALL_IDS = [*(f"native {name}" for name in NATIVE), *(f"torch {name}" for name in TORCH)]


def values_of_all_pairs(distance, query, reference):
    """The matrix of the values that ``CustomKNN`` returns."""
    values, indices = CustomKNN(distance)(query, len(reference), reference)
    return torch.empty_like(values).scatter_(1, indices, values)


def decided(values, threshold, distance):
    return values >= threshold if distance.is_inverted else values <= threshold


def assert_agree(distance, query, reference, threshold, exact=True):
    """All methods decide as the values of ``CustomKNN`` do; ``exact=False`` leaves out what rounding may move."""
    values = values_of_all_pairs(distance, query, reference)
    wanted = decided(values, threshold, distance)
    finder = MatchFinder(distance, threshold)
    matrix = finder.get_match_matrix(query, reference)
    indices = finder.get_match_indices(query, reference)
    assert (matrix.dtype, matrix.shape) == (torch.bool, wanted.shape)
    assert indices.dtype == torch.long
    n = min(len(query), len(reference))
    paired = finder.is_match(query[:n], reference[:n])
    assert (paired.dtype, paired.shape) == (torch.bool, (n,))
    measured = finder.pairwise(query[:n], reference[:n])
    assert measured.dtype == values.dtype
    assert indices.equal(matrix.nonzero())
    if exact:
        assert matrix.equal(wanted)
        assert paired.equal(wanted[:n].diagonal())
        assert measured.equal(values[:n].diagonal())
    else:
        near = (values.double() - threshold).abs() <= 64 * torch.finfo(values.dtype).eps * max(1, abs(threshold))
        assert (matrix == wanted)[~near].all()
        assert (paired == wanted[:n].diagonal())[~near[:n].diagonal()].all()
