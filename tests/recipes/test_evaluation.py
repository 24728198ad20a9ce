"""The evaluation recipe: values worked out by hand, each promise of its docstrings, and its output."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from docs.recipes import evaluation as recipe
from exactknn.evaluation import AccuracyCalculator

ROOT = Path(__file__).parents[2]

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


@pytest.fixture
def calculator() -> AccuracyCalculator:
    """All five metrics of the default set, from the exact default backend."""
    return AccuracyCalculator(include=METRICS)


@pytest.fixture
def precision() -> AccuracyCalculator:
    return AccuracyCalculator(include=("precision_at_1",))


# --- extract_embeddings ----------------------------------------------------------------------------------------------


class Doubling(torch.nn.Module):
    """Notes how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.inference: list[bool] = []

    def forward(self, data: Tensor) -> Tensor:
        self.inference.append(torch.is_inference_mode_enabled())
        return data * self.weight.to(data.dtype)


def test_embeddings_and_labels_come_in_the_order_of_the_loader() -> None:
    batches = [
        (torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([7, 5])),
        (torch.tensor([[-8.0, 6.0]]), torch.tensor([6])),
    ]
    embeddings, labels = recipe.extract_embeddings(Doubling(), batches)
    assert torch.equal(embeddings, torch.tensor([[0.6, 0.8], [0.0, 1.0], [-0.8, 0.6]]))
    assert labels.tolist() == [7, 5, 6]


def test_a_data_loader_is_read_to_its_last_short_batch() -> None:
    rows = torch.arange(1.0, 15.0).reshape(7, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, torch.arange(7)), batch_size=3)
    embeddings, labels = recipe.extract_embeddings(torch.nn.Identity(), loader)
    torch.testing.assert_close(embeddings, rows / rows.norm(dim=1, keepdim=True))
    assert labels.tolist() == list(range(7))


@pytest.mark.parametrize("training", [False, True])
def test_the_model_runs_in_inference_mode_and_keeps_its_own_mode(training: bool) -> None:
    model = Doubling().train(training)
    embeddings, _ = recipe.extract_embeddings(model, [(torch.ones(2, 3), torch.zeros(2))])
    assert model.inference == [True]
    assert model.training is training
    assert embeddings.is_inference()
    assert not embeddings.requires_grad
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_get_length_one_in_their_own_dtype_and_zero_rows_stay_zero(dtype: torch.dtype) -> None:
    data = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-6.0, 8.0]], dtype=dtype)
    embeddings, _ = recipe.extract_embeddings(torch.nn.Identity(), [(data, torch.arange(3))])
    assert torch.equal(embeddings, torch.tensor([[0.6, 0.8], [0.0, 0.0], [-0.6, 0.8]], dtype=torch.float64).to(dtype))
    assert embeddings.dtype == dtype


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 60_000.0), (torch.float16, 1e-7), (torch.float32, 1e30), (torch.float32, 1e-30)],
)
def test_lengths_neither_overflow_nor_vanish(dtype: torch.dtype, size: float) -> None:
    data = torch.full((1, 64), size, dtype=dtype)
    embeddings, _ = recipe.extract_embeddings(torch.nn.Identity(), [(data, torch.arange(1))])
    assert torch.equal(embeddings, torch.full((1, 64), 0.125, dtype=dtype))


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([2**24, 2**24 + 1], dtype=torch.int64),
        torch.tensor([3, 1], dtype=torch.int32),
        torch.tensor([0.25, -1.5], dtype=torch.float64),
        torch.tensor([[1, 0], [2, 0]]),
    ],
)
def test_labels_stay_as_they_are(labels: Tensor) -> None:
    _, found = recipe.extract_embeddings(torch.nn.Identity(), [(torch.ones(2, 3), labels)])
    assert found.dtype == labels.dtype
    assert found.tolist() == labels.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_embeddings_stay_there_and_labels_where_they_were() -> None:
    model = torch.nn.Linear(8, 4).cuda()
    batches = [(torch.randn(20, 8, device="cuda"), torch.arange(20) % 4) for _ in range(3)]
    split = embeddings, labels = recipe.extract_embeddings(model, batches)
    assert (embeddings.device.type, labels.device.type) == ("cuda", "cpu")
    levels = torch.stack([labels, labels // 2], dim=1)
    calculator = AccuracyCalculator(include=METRICS)
    on_cpu = (embeddings.cpu(), labels)
    for function, arguments, on_cpu_arguments in (
        (recipe.split_accuracy, (split, [split], False), (on_cpu, [on_cpu], False)),
        (recipe.nearest_centroid_accuracy, (split, split), (on_cpu, on_cpu)),
        (
            recipe.parent_conditioned_accuracy,
            ((embeddings, levels), [], True),
            ((embeddings.cpu(), levels), [], True),
        ),
    ):
        assert function(calculator, *arguments) == pytest.approx(function(calculator, *on_cpu_arguments), abs=1e-6)
    assert centroids_of(split, split)[0].device.type == "cuda"


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="loader must give at least one batch, got none"):
        recipe.extract_embeddings(torch.nn.Identity(), [])


def test_embeddings_of_whole_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embeddings must be floating point, got torch\.int64"):
        recipe.extract_embeddings(torch.nn.Identity(), [(torch.ones(2, 3, dtype=torch.int64), torch.arange(2))])


# --- split_accuracy --------------------------------------------------------------------------------------------------

VAL = (column(0, 1, 4, 5.2), torch.tensor([0, 0, 1, 1]))
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


def centroids_of(reference: recipe.Split, query: recipe.Split) -> tuple[Tensor, list[int]]:
    """The rows that stand for the classes, and the classes."""
    recorder = Recorder()
    recipe.nearest_centroid_accuracy(recorder, query, reference)
    (call,) = recorder.calls
    assert call["query"] is query[0]
    assert call["query_labels"] is query[1]
    assert call["ref_includes_query"] is False
    return call["reference"], call["reference_labels"].tolist()


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


# --- the program -----------------------------------------------------------------------------------------------------

WITHOUT_NETWORK = """
import runpy, sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "urllib.Request"):
        raise OSError(f"no network here: {event} {arguments}")

sys.addaudithook(refuse)
runpy.run_module("docs.recipes.evaluation", run_name="__main__")
"""


def test_the_program_prints_two_metrics_of_two_protocols_without_a_network() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["test split among itself", "test split in the gallery"]
    values: list[dict[str, Any]] = [
        {name: float(value) for name, value in re.findall(r"([a-z]+_\w+) ([01]\.\d{4})\b", line)} for line in lines
    ]
    assert all(list(found) == ["precision_at_1", "r_precision"] for found in values)
    assert all(0.3 < value < 1 for found in values for value in found.values())
    assert values[0] != values[1]
