"""The evaluation recipe: splits, galleries, centroids and two streams, by values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from docs.recipes import evaluation as recipe
from exactknn.evaluation import AccuracyCalculator
from tests.recipes.recipe_helpers import METRICS, VAL, Recorder, at_angles, centroids_of, column, exactly

# --- split_accuracy --------------------------------------------------------------------------------------------------

TRAIN = (column(0.45, 4.7, 0.7, 9), torch.tensor([1, 0, 0, 1]))


@pytest.mark.parametrize(
    ("references", "query_in_reference", "expected"),
    [
        ([], True, (1, 1, 1, 1, 1)),
        ([TRAIN], False, (7 / 12, 1 / 4, 7 / 12, 1 / 4, 3 / 8)),
        ([TRAIN], True, (41 / 70, 3 / 8, 5 / 8, 1 / 4, 7 / 12)),
    ],
)
def test_a_split_among_itself_from_another_and_from_both(
    calculator: AccuracyCalculator,
    references: list[recipe.Split],
    query_in_reference: bool,
    expected: tuple[float, ...],
) -> None:
    found = recipe.split_accuracy(calculator, VAL, references, query_in_reference)
    assert found == exactly(dict(zip(METRICS, expected, strict=True)))


@pytest.mark.parametrize("query_in_reference", [False, True])
def test_the_reference_is_the_query_if_wanted_then_the_splits_in_order(query_in_reference: bool) -> None:
    recorder = Recorder()
    other = (column(-3, 8), torch.tensor([1, 0]))
    recipe.split_accuracy(recorder, VAL, (split for split in (TRAIN, other)), query_in_reference)
    (call,) = recorder.calls
    parts = [VAL, TRAIN, other] if query_in_reference else [TRAIN, other]
    assert torch.equal(call["query"], VAL[0])
    assert torch.equal(call["query_labels"], VAL[1])
    assert torch.equal(call["reference"], torch.cat([embeddings for embeddings, _ in parts]))
    assert torch.equal(call["reference_labels"], torch.cat([labels for _, labels in parts]))
    assert call["ref_includes_query"] is query_in_reference


def test_a_copy_of_the_query_split_is_not_taken_for_the_queries_themselves(precision: AccuracyCalculator) -> None:
    lone_looking = (VAL[0], torch.arange(4))
    assert recipe.split_accuracy(precision, lone_looking, [lone_looking], False) == {"precision_at_1": 1.0}
    assert math.isnan(recipe.split_accuracy(precision, lone_looking, [], True)["precision_at_1"])


def test_splits_of_two_precisions_are_searched_in_the_wider(precision: AccuracyCalculator) -> None:
    query = (VAL[0].half(), VAL[1])
    assert recipe.split_accuracy(precision, query, [TRAIN], True) == {"precision_at_1": 1 / 4}


def test_a_large_gallery_may_have_classes_that_no_query_has(calculator: AccuracyCalculator) -> None:
    query = (column(0, 1_000), torch.tensor([5, 7]))
    # Relevant to the first query: every tenth row of 300; to the second: the 300 last rows of 600, from the end on.
    gallery = (
        torch.arange(1.0, 601.0, dtype=torch.float64).unsqueeze(1),
        torch.tensor([5 if row % 10 == 0 else 2 if row % 2 else 9 for row in range(1, 301)] + [7] * 300),
    )
    found = recipe.split_accuracy(calculator, query, [gallery], query_in_reference=False)
    assert found == exactly(
        {
            "mean_average_precision": (1 / 10 + 1) / 2,
            "mean_average_precision_at_r": (3 / 10 / 30 + 1) / 2,
            "mean_reciprocal_rank": (1 / 10 + 1) / 2,
            "precision_at_1": 1 / 2,
            "r_precision": (3 / 30 + 1) / 2,
        }
    )


def test_nothing_to_search_in_is_refused(precision: AccuracyCalculator) -> None:
    with pytest.raises(ValueError, match="references must hold at least one split"):
        recipe.split_accuracy(precision, VAL, [], query_in_reference=False)


# --- nearest_centroid_accuracy ---------------------------------------------------------------------------------------

CORNERS = (torch.tensor([[0.0, 0.0], [2.0, 0.0], [6.0, 0.0], [8.0, 0.0]]), torch.tensor([0, 0, 1, 1]))
BETWEEN = (torch.tensor([[0.5, 0.0], [3.0, 0.0], [5.0, 0.0]]), torch.tensor([0, 1, 1]))


def test_one_centroid_for_each_class(precision: AccuracyCalculator) -> None:
    centroids, classes = centroids_of(CORNERS, BETWEEN)
    assert (centroids.tolist(), classes) == ([[1.0, 0.0], [7.0, 0.0]], [0, 1])
    assert recipe.nearest_centroid_accuracy(precision, BETWEEN, CORNERS) == {"precision_at_1": 2 / 3}


def test_centroids_come_in_ascending_order_of_their_classes() -> None:
    reference = (column(10, 1, 4, 8), torch.tensor([30, -2, -2, 7]))
    centroids, classes = centroids_of(reference, (column(0, 1), torch.tensor([30, -2])))
    assert (centroids.tolist(), classes) == ([[2.5], [8.0], [10.0]], [-2, 7, 30])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_centroids_have_the_dtype_of_the_reference_and_their_sums_do_not_overflow(dtype: torch.dtype) -> None:
    reference = (torch.full((1_000, 2), 1_000.0, dtype=dtype), torch.zeros(1_000, dtype=torch.int64))
    centroids, _ = centroids_of(reference, (torch.zeros(1, 2), torch.tensor([0])))
    assert centroids.dtype == dtype
    assert centroids.tolist() == [[1_000.0, 1_000.0]]


def test_sums_keep_the_digits_of_float32_rows() -> None:
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    centroids, _ = centroids_of((rows, torch.zeros(4, dtype=torch.int64)), (rows[:1], torch.tensor([0])))
    assert centroids.tolist() == [[0.5]]


def test_a_query_class_without_reference_is_not_counted(precision: AccuracyCalculator) -> None:
    query = (torch.cat([BETWEEN[0], torch.tensor([[7.0, 0.0]])]), torch.tensor([0, 1, 1, 5]))
    assert recipe.nearest_centroid_accuracy(precision, query, CORNERS) == {"precision_at_1": 2 / 3}


def test_centroids_of_embeddings_from_inference_mode_and_of_ones_with_a_gradient(precision: AccuracyCalculator) -> None:
    extracted = recipe.extract_embeddings(torch.nn.Identity(), [(torch.eye(3), torch.arange(3))])
    assert recipe.nearest_centroid_accuracy(precision, extracted, extracted) == {"precision_at_1": 1.0}
    learned = (torch.eye(3).requires_grad_(), torch.arange(3))
    assert recipe.nearest_centroid_accuracy(precision, learned, learned) == {"precision_at_1": 1.0}


def test_means_of_whole_numbers_are_refused(precision: AccuracyCalculator) -> None:
    with pytest.raises(ValueError, match=r"embeddings must be floating point, got torch\.int64"):
        recipe.nearest_centroid_accuracy(precision, BETWEEN, (CORNERS[0].long(), CORNERS[1]))


# --- two_stream_accuracy ---------------------------------------------------------------------------------------------


def test_one_stream_searched_in_another(calculator: AccuracyCalculator) -> None:
    anchors, references = column(0, 1, 2, 3), column(0.1, 2.3, 1.8, 3.4)
    found = recipe.two_stream_accuracy(calculator, anchors, references, torch.arange(4))
    assert found == exactly(dict(zip(METRICS, (5 / 6, 3 / 4, 5 / 6, 3 / 4, 3 / 4), strict=True)))


def test_anchors_are_never_searched_and_no_row_is_left_out(precision: AccuracyCalculator) -> None:
    anchors = column(0, 1, 2, 3)
    # Each anchor's own copy is the nearest row of the other stream, and stays.
    assert recipe.two_stream_accuracy(precision, anchors, anchors.clone(), torch.arange(4)) == {"precision_at_1": 1.0}
    recorder = Recorder()
    labels, references = torch.arange(4), anchors + 0.25
    recipe.two_stream_accuracy(recorder, anchors, references, labels)
    (call,) = recorder.calls
    assert call["query"] is anchors
    assert call["reference"] is references
    assert call["query_labels"] is call["reference_labels"] is labels
    assert call["ref_includes_query"] is False


# --- what pytorch-metric-learning's testers give ---------------------------------------------------------------------

FLAT_TRAIN = (at_angles(0, 10, 20, 30, 50, 60, 70, 80), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
FLAT_VAL = (at_angles(1, 11, 21, 31, 51, 59, 71, 81), torch.tensor([1, 1, 1, 1, 1, 0, 0, 0]))
FAMILY_TRAIN = (
    at_angles(0, 9, 21, 29, 31, 39, 51, 59),
    torch.tensor([[2, 0], [2, 0], [3, 0], [3, 0], [4, 1], [4, 1], [5, 1], [5, 1]]),
)
FAMILY_VAL = (
    at_angles(2, 11, 23, 32, 33, 41, 53, 89, 90),
    torch.tensor([[2, 0], [2, 0], [4, 0], [3, 0], [4, 0], [4, 1], [4, 1], [5, 1], [5, 1]]),
)


def protocols(train: recipe.Split, val: recipe.Split) -> Iterator[tuple[recipe.Split, list[recipe.Split], bool]]:
    yield train, [], True
    yield val, [], True
    yield train, [val], True
    yield val, [train], True
    yield val, [train], False


def test_flat_labels_score_as_in_the_global_tester(precision: AccuracyCalculator) -> None:
    found = [
        recipe.split_accuracy(precision, *arguments)["precision_at_1"] for arguments in protocols(FLAT_TRAIN, FLAT_VAL)
    ]
    assert found == [1, 0.75, 0.125, 0.125, 0.125]


def test_two_streams_score_as_in_the_two_stream_tester(precision: AccuracyCalculator) -> None:
    anchors, references = at_angles(0, 10, 20, 30, 50, 60, 70, 80), at_angles(81, 71, 61, 31, 51, 21, 11, 1)
    found = recipe.two_stream_accuracy(precision, anchors, references, torch.arange(1, 9))
    assert found == {"precision_at_1": 0.25}


def test_hierarchies_score_as_in_the_parent_label_tester(precision: AccuracyCalculator) -> None:
    found = [
        recipe.parent_conditioned_accuracy(precision, *arguments)["precision_at_1_level0"]
        for arguments in protocols(FAMILY_TRAIN, FAMILY_VAL)
    ]
    assert found == [1, 0.75, 0.625, 0.575, 0.875]
