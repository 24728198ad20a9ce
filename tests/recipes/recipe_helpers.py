"""Rows and a calculator that the tests of the evaluation recipe share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from docs.recipes import evaluation as recipe
from exactknn.evaluation import AccuracyCalculator

METRICS = (
    "mean_average_precision",
    "mean_average_precision_at_r",
    "mean_reciprocal_rank",
    "precision_at_1",
    "r_precision",
)


def column(*values: float) -> Tensor:
    """Embeddings of one dimension."""
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def at_angles(*degrees: float) -> Tensor:
    """Rows at these angles on an ellipse, of unequal lengths until they are normalised."""
    radians = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return recipe.unit_rows(torch.stack([2 * radians.cos(), radians.sin() / 2], dim=1))


def exactly(expected: dict[str, float]) -> Any:
    """The fractions worked out by hand, to the last two bits: means of fractions that are not binary are rounded."""
    return pytest.approx(expected, rel=4e-16, abs=0)


VAL = (column(0, 1, 4, 5.2), torch.tensor([0, 0, 1, 1]))


class Recorder(AccuracyCalculator):
    """Notes the query and reference sets that it is given."""

    def __init__(self) -> None:
        super().__init__(include=METRICS)
        self.calls: list[dict[str, Any]] = []

    def get_accuracy(
        self,
        query: Tensor,
        query_labels: Tensor,
        reference: Tensor,
        reference_labels: Tensor,
        ref_includes_query: bool,
    ) -> Any:
        self.calls.append(
            {
                "query": query,
                "query_labels": query_labels,
                "reference": reference,
                "reference_labels": reference_labels,
                "ref_includes_query": ref_includes_query,
            }
        )
        return super().get_accuracy(query, query_labels, reference, reference_labels, ref_includes_query)


def centroids_of(reference: recipe.Split, query: recipe.Split) -> tuple[Tensor, list[int]]:
    """The rows that stand for the classes, and the classes."""
    recorder = Recorder()
    recipe.nearest_centroid_accuracy(recorder, query, reference)
    (call,) = recorder.calls
    assert call["query"] is query[0]
    assert call["query_labels"] is query[1]
    assert call["ref_includes_query"] is False
    return call["reference"], call["reference_labels"].tolist()
