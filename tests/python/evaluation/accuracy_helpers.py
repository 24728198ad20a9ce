"""Rows and helpers that the tests of this folder share."""

import math

import pytest
import torch
from torch import tensor

from exactknn.distances import LpDistance
from exactknn.evaluation import (
    AccuracyCalculator,
    CustomKNN,
)

NAMES = (
    "mean_average_precision",
    "mean_average_precision_at_r",
    "mean_reciprocal_rank",
    "precision_at_1",
    "r_precision",
)
NAN = math.nan


def column(*values):
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


# Six rows on a line: two classes with relevant rows, and one row alone in its class.
LINE = column(0, 1, 2.5, 10, 11, 30)
LINE_LABELS = tensor([0, 0, 1, 1, 1, 2])
LINE_MEANS = (53 / 60, 4 / 5, 13 / 15, 4 / 5, 4 / 5)


def first_and_other(x, y):
    return (x[..., 0] == y[..., 0]) & (x[..., 1] != y[..., 1])


def squared(**options):
    return CustomKNN(LpDistance(normalize_embeddings=False, power=2), **options)


def check(result, means, names=NAMES):
    assert list(result) == list(names)
    for name, wanted in zip(names, means, strict=True):
        assert result[name] == pytest.approx(wanted, rel=1e-12, nan_ok=True), name


class Spy:
    """A search that writes down how it was called."""

    def __init__(self, answer=None):
        self.calls = []
        self.answer = answer or squared()

    def __call__(self, *arguments, **named):
        assert not named
        query, k, reference, ref_includes_query = arguments
        self.calls.append((len(query), k, len(reference), ref_includes_query, torch.is_grad_enabled()))
        return self.answer(query, k, reference, ref_includes_query)


class WithClusters(AccuracyCalculator):
    def calculate_clusters(self, cluster_labels, label_counts, lone_query_labels, not_lone_query_mask, **kwargs):
        assert "knn_labels" not in kwargs
        return len(cluster_labels)

    def requires_clustering(self):
        return [*super().requires_clustering(), "clusters"]
