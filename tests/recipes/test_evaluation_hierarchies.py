"""The evaluation recipe: hierarchies of labels, by values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from docs.recipes import evaluation as recipe
from exactknn.evaluation import AccuracyCalculator
from tests.recipes.recipe_helpers import METRICS, VAL, Recorder, column, exactly

# --- parent_conditioned_accuracy -------------------------------------------------------------------------------------

TREE = (
    column(0, 1, 1.75, 9, 2.15, 2.4, 8.05, 8.5, 3, 20, 3.55, 21.1),
    torch.tensor([[0, 0, 0], [1, 0, 0], [2, 1, 0], [3, 1, 0], [4, 2, 1], [5, 2, 1]]).repeat_interleave(2, dim=0),
)
TREE_VALUES = {
    "mean_average_precision": (17 / 24, 139 / 168, 43 / 56),
    "mean_average_precision_at_r": (1 / 2, 101 / 144, 173 / 288),
    "mean_reciprocal_rank": (17 / 24, 109 / 120, 97 / 120),
    "precision_at_1": (1 / 2, 7 / 8, 11 / 16),
    "r_precision": (1 / 2, 35 / 48, 59 / 96),
}


def test_classes_are_scored_among_those_of_their_parent(calculator: AccuracyCalculator) -> None:
    found = recipe.parent_conditioned_accuracy(calculator, TREE, [], query_in_reference=True)
    expected = {}
    for metric, (finest, middle, average) in TREE_VALUES.items():
        expected |= {f"{metric}_level0": finest, f"{metric}_level1": middle, f"AVERAGE_{metric}": average}
    assert found == exactly(expected)
    # Among all classes at once the same rows score otherwise.
    everywhere = recipe.split_accuracy(calculator, (TREE[0], TREE[1][:, 0]), [], query_in_reference=True)
    assert everywhere["precision_at_1"] == 5 / 12
    assert everywhere["mean_average_precision"] == pytest.approx(0.525962, abs=5e-7)


def test_two_levels_have_one_value_and_no_average(precision: AccuracyCalculator) -> None:
    found = recipe.parent_conditioned_accuracy(precision, (TREE[0], TREE[1][:, :2]), [], query_in_reference=True)
    assert found == {"precision_at_1_level0": 1 / 2}


def test_each_parent_has_its_own_search_and_its_queries_come_first() -> None:
    recorder = Recorder()
    query = (column(0, 1, 2, 3), torch.tensor([[0, 7], [0, 7], [1, 8], [1, 8]]))
    gallery = (column(10, 11, 12), torch.tensor([[0, 7], [1, 8], [2, 9]]))
    recipe.parent_conditioned_accuracy(recorder, query, (split for split in [gallery]), query_in_reference=True)
    found = [
        (call["query"].flatten().tolist(), call["reference"].flatten().tolist(), call["reference_labels"].tolist())
        for call in recorder.calls
    ]
    assert found == [([0, 1], [0, 1, 10], [0, 0, 0]), ([2, 3], [2, 3, 11], [1, 1, 1])]
    assert all(call["ref_includes_query"] is True for call in recorder.calls)


def test_values_of_the_parents_weigh_the_same_however_many_queries_they_have(precision: AccuracyCalculator) -> None:
    # Parent 0: four queries, all right. Parent 1: two queries, both wrong.
    query = (
        column(0, 1, 10, 11, 0, 10),
        torch.tensor([[0, 0], [0, 0], [1, 0], [1, 0], [2, 1], [3, 1]]),
    )
    gallery = (column(0, 10), torch.tensor([[3, 1], [2, 1]]))
    found = recipe.parent_conditioned_accuracy(precision, query, [gallery], query_in_reference=True)
    assert found == {"precision_at_1_level0": 1 / 2}


def test_a_parent_with_lone_queries_only_makes_its_level_nan(precision: AccuracyCalculator) -> None:
    # At level 0, parent 1 holds two classes of one row each; level 1 has nothing of the kind.
    labels = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 1, 0], [2, 1, 0]])
    split = (column(0, 1, 10, 11), labels)
    found = recipe.parent_conditioned_accuracy(precision, split, [], query_in_reference=True)
    assert found["precision_at_1_level1"] == 1.0
    assert math.isnan(found["precision_at_1_level0"])
    assert math.isnan(found["AVERAGE_precision_at_1"])


def test_a_parent_that_the_reference_lacks_makes_its_level_nan(precision: AccuracyCalculator) -> None:
    query = (column(0, 1), torch.tensor([[0, 0], [1, 1]]))
    gallery = (column(0, 3), torch.tensor([[0, 0], [0, 0]]))
    found = recipe.parent_conditioned_accuracy(precision, query, [gallery], query_in_reference=False)
    assert math.isnan(found["precision_at_1_level0"])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(4, 1, dtype=torch.int64), r"levels >= 2, got shape \(4, 1\)"),
        (torch.zeros(4, dtype=torch.int64), r"levels >= 2, got shape \(4,\)"),
        (torch.zeros(0, 2, dtype=torch.int64), r"n >= 1, levels >= 2, got shape \(0, 2\)"),
    ],
)
def test_labels_without_a_parent_are_refused(precision: AccuracyCalculator, labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.parent_conditioned_accuracy(precision, (VAL[0][: len(labels)], labels), [], query_in_reference=True)


def test_other_arguments_without_meaning_are_refused(precision: AccuracyCalculator) -> None:
    two = (TREE[0], TREE[1][:, :2])
    with pytest.raises(ValueError, match=r"reference labels must be \(m, 2\) as those of the query"):
        recipe.parent_conditioned_accuracy(precision, two, [TREE], query_in_reference=True)
    with pytest.raises(ValueError, match="references must hold at least one split"):
        recipe.parent_conditioned_accuracy(precision, two, [], query_in_reference=False)
    per_class = AccuracyCalculator(include=METRICS, return_per_class=True)
    with pytest.raises(ValueError, match="return_per_class=True"):
        recipe.parent_conditioned_accuracy(per_class, two, [], query_in_reference=True)
