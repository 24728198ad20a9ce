"""AccuracyCalculator: worked values, the number of neighbours it requests, and its errors."""

import logging
import math

import numpy as np
import pytest
import torch
from torch import tensor

from exactknn.compat import accuracy_calculator as compat
from exactknn.evaluation import (
    AccuracyCalculator,
)
from tests.python.evaluation.accuracy_helpers import LINE, LINE_LABELS, LINE_MEANS, NAN, check, column, first_and_other


def test_every_metric_of_the_line(make):
    check(make().get_accuracy(LINE, LINE_LABELS), LINE_MEANS)


def test_class_means_and_their_labels(make):
    calculator = make(return_per_class=True)
    result = calculator.get_accuracy(LINE, LINE_LABELS)
    check(result, ([1, 29 / 36], [1, 2 / 3], [1, 7 / 9], [1, 2 / 3], [1, 2 / 3]))
    assert all(type(values) is list and type(values[0]) is float for values in result.values())
    assert calculator.per_class_labels.tolist() == [0, 1]


def test_average_of_class_means(make):
    check(make(avg_of_avgs=True).get_accuracy(LINE, LINE_LABELS), (65 / 72, 5 / 6, 8 / 9, 5 / 6, 5 / 6))


@pytest.mark.parametrize(
    ("k", "means", "warned"),
    [
        (1, (0.6, 0.6, 0.8, 0.8, 0.8), True),
        (2, (0.8, 0.8, 0.8, 0.8, 0.8), False),
        ("max_bin_count", (0.8, 0.8, 0.8, 0.8, 0.8), False),
        (3, (5 / 6, 0.8, 13 / 15, 0.8, 0.8), False),
        (5, LINE_MEANS, False),
        (100, LINE_MEANS, False),
        (np.int64(3), (5 / 6, 0.8, 13 / 15, 0.8, 0.8), False),
    ],
)
def test_fewer_neighbours(make, caplog, k, means, warned):
    check(make(k=k).get_accuracy(LINE, LINE_LABELS), means)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == warned
    if warned:
        assert "k=1 is below the largest number of relevant references, 2" in warnings[0]
        assert "mean_average_precision_at_r and r_precision" in warnings[0]


def test_a_gallery_in_which_one_label_is_missing(make):
    query, labels = column(0, 1, 2, 3), tensor([0, 0, 1, 1])
    reference, reference_labels = column(0.5, 2.9, 9, 2.2, 3.3), tensor([1, 1, 1, 2, 2])
    means = (37 / 60, 0.25, 0.75, 0.5, 1 / 3)
    check(make().get_accuracy(query, labels, reference, reference_labels), means)
    per_class = make(return_per_class=True)
    check(per_class.get_accuracy(query, labels, reference, reference_labels), tuple([mean] for mean in means))
    assert per_class.per_class_labels.tolist() == [1]


def test_labels_of_two_columns(make):
    query, labels = column(0, 2), tensor([[5, 1], [8, 2]])
    reference = column(0.3, 1.9, 2.2, 3.1, 4.6)
    reference_labels = tensor([[5, 1], [8, 9], [5, 2], [8, 2], [5, 7]])
    result = make(label_comparison_fn=first_and_other).get_accuracy(query, labels, reference, reference_labels)
    check(result, (41 / 60, 0.5, 2 / 3, 0.5, 0.5))


def test_a_comparison_that_never_matches_a_label_with_itself(make):
    embeddings = column(0, 1, 2.2, 3.5, 5.1)
    labels = tensor([[1, 3], [1, 3], [1, 4], [2, 5], [2, 6]])
    check(make(label_comparison_fn=first_and_other).get_accuracy(embeddings, labels), (2 / 3, 0.3, 0.7, 0.4, 0.3))
    per_class = make(label_comparison_fn=first_and_other, return_per_class=True)
    result = per_class.get_accuracy(embeddings, labels)
    assert result["mean_average_precision"] == pytest.approx([0.5, 5 / 6, 0.5, 1])
    assert result["r_precision"] == [0, 0.5, 0, 1]
    assert per_class.per_class_labels.tolist() == [[1, 3], [1, 4], [2, 5], [2, 6]]


def test_a_comparison_is_asked_with_the_query_label_first(make):
    query, reference = column(0, 1), column(0.1, 0.9, 3)
    arguments = (query, tensor([1, 2]), reference, tensor([2, 1, 5]))
    result = make(label_comparison_fn=torch.lt).get_accuracy(*arguments)
    check(result, (7 / 12, 1 / 4, 2 / 3, 1 / 2, 1 / 4))
    assert all(type(value) is float for value in result.values())


def test_class_means_of_labels_of_two_columns(make):
    embeddings, labels = column(0, 1, 2.2, 3.5, 5.1), tensor([[1, 3], [1, 3], [1, 4], [2, 5], [2, 6]])
    result = make(label_comparison_fn=first_and_other, avg_of_avgs=True).get_accuracy(embeddings, labels)
    assert result["mean_average_precision"] == pytest.approx((0.5 + 5 / 6 + 0.5 + 1) / 4)
    assert result["r_precision"] == (0 + 0.5 + 0 + 1) / 4


def test_rows_of_two_classes_on_one_place(make):
    names = ("mean_average_precision_at_r", "precision_at_1", "r_precision")
    result = make(include=names).get_accuracy(column(5, 5, 7, 7), tensor([3, 4, 3, 4]))
    check(result, (0, 0, 0), names)


def test_queries_at_the_head_of_a_longer_reference(make):
    reference = column(0, 1, 2, 3, 4, 5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5)
    labels = tensor([0, 1, 2, 3, 4, 5, 1, 1, 1, 1, 1, 1])
    result = make().get_accuracy(reference[:6], labels[:6], reference, labels, ref_includes_query=True)
    check(result, ((1 + 2 / 2 + 3 / 5 + 4 / 7 + 5 / 9 + 6 / 11) / 6, 13 / 30, 1, 1, 0.5))


def test_float_labels_within_a_tolerance(make):
    def near(x, y):
        return abs(x - y) < 0.5

    query, labels = column(0, 4), tensor([0.2, 0.9])
    result = make(label_comparison_fn=near).get_accuracy(
        query, labels, column(0.1, 3.5, 1, 2.2), tensor([7, 0.25, 0.6, 1.3])
    )
    check(result, (13 / 24, 0.25, 0.5, 0, 0.5))
    result = make(label_comparison_fn=near).get_accuracy(
        query, labels, column(0, 4, 1, 2.2), tensor([0.2, 0.9, 1.3, 0.6]), ref_includes_query=True
    )
    check(result, (0.75, 0.5, 0.75, 0.5, 0.5))


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_labels_beyond_the_precision_of_float32(make, kind):
    big = 2**24
    result = make(include=("precision_at_1",)).get_accuracy(column(0, 0.1, 5, 5.1), kind([big, big + 1, big, big + 1]))
    assert result == {"precision_at_1": 0.0}


def test_no_query_has_a_relevant_reference(make, caplog):
    calculator = make()
    check(calculator.get_accuracy(column(0, 1, 2), tensor([4, 5, 6])), (NAN,) * 5)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    per_class = make(return_per_class=True)
    result = per_class.get_accuracy(column(0, 1, 2), tensor([4, 5, 6]))
    check(result, ([NAN] * 3,) * 5)
    assert per_class.per_class_labels.tolist() == [4, 5, 6]
    check(make(avg_of_avgs=True).get_accuracy(column(0, 1, 2), tensor([4, 5, 6])), (NAN,) * 5)
    check(make(k="max_bin_count").get_accuracy(column(0, 1, 2), tensor([4, 5, 6])), (NAN,) * 5)
    check(make(k=3).get_accuracy(column(7), tensor([4])), (NAN,) * 5)


def test_a_reference_without_rows(make, caplog):
    check(make().get_accuracy(column(0, 1), tensor([0, 0]), torch.empty(0, 1), torch.empty(0)), (NAN,) * 5)
    compared = make(label_comparison_fn=first_and_other)
    result = compared.get_accuracy(column(0), tensor([[0, 1]]), torch.empty(0, 1), torch.empty(0, 2))
    check(result, (NAN,) * 5)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_a_perfect_list_of_two_among_ten_relevant_references():
    # Divided by all ten relevant references, not by the two neighbours; precision divides by its two.
    reference, labels = torch.arange(1.0, 11).unsqueeze(1), torch.ones(10, dtype=torch.long)
    calculator = AccuracyCalculator(include=("mean_average_precision", "precision_at_2", "found_fraction_at_2"), k=2)
    result = calculator.get_accuracy(column(0), tensor([1]), reference, labels)
    assert result == {"found_fraction_at_2": 0.2, "mean_average_precision": 0.2, "precision_at_2": 1.0}


def test_more_neighbours_asked_for_than_there_are_references():
    generator = torch.manual_seed(0)
    query, reference = torch.randn(20, 4, generator=generator), torch.randn(6, 4, generator=generator)
    labels, reference_labels = torch.arange(20) % 3, torch.arange(6) % 3
    capped = AccuracyCalculator(k=50).get_accuracy(query, labels, reference, reference_labels)
    assert capped == AccuracyCalculator().get_accuracy(query, labels, reference, reference_labels)
    assert all(0 <= value <= 1 for value in capped.values())


@pytest.mark.parametrize("by_rank", [True, False])
def test_tied_references_count_in_the_order_of_their_rows(monkeypatch, by_rank):
    monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: by_rank)
    # Forty references at one place, one of them relevant: it has the rank of its row.
    names = ("mean_average_precision", "mean_reciprocal_rank", "recall_at_1")
    query, reference = torch.ones(1, 3), torch.ones(40, 3)
    for row in (0, 7, 39):
        labels = torch.zeros(40, dtype=torch.long)
        labels[row] = 1
        result = AccuracyCalculator(include=names).get_accuracy(query, tensor([1]), reference, labels)
        check(result, (1 / (row + 1), 1 / (row + 1), float(row == 0)), names)


def test_duplicates_of_a_query_are_its_neighbours(make):
    result = make(include=("precision_at_1",)).get_accuracy(column(0, 0), tensor([0, 0]))
    assert result == {"precision_at_1": 1.0}


def test_mean_reciprocal_rank_works_alone(make):
    assert make(include=("mean_reciprocal_rank",)).get_accuracy(LINE, LINE_LABELS) == {
        "mean_reciprocal_rank": pytest.approx(13 / 15, rel=1e-12)
    }


def test_averages_of_simple_fractions_are_exact(make):
    result = make(include=("precision_at_1",)).get_accuracy(
        column(0, 10, 20), tensor([0, 1, 2]), column(0.1, 10.1, 20.1, 12), tensor([0, 5, 2, 1])
    )
    assert result["precision_at_1"] == 2 / 3


HAND = {
    "query_labels": tensor([0, 1, 1, 2]),
    "knn_labels": tensor([[1, 0, 2, 0], [1, 2, 1, 1], [2, 2, 1, 0], [0, 1, 1, 1]]),
    "label_counts": ([0, 1, 2], [3, 3, 2]),
    "not_lone_query_mask": torch.ones(4, dtype=torch.bool),
}


@pytest.mark.parametrize("calculator", [AccuracyCalculator, compat.AccuracyCalculator])
def test_functions_called_with_arguments_made_by_hand(calculator):
    plain = calculator(exclude=("NMI", "AMI"))
    apart = plain._get_accuracy(plain.get_function_dict(), ref_includes_query=False, **HAND)
    check(apart, (0.3125, 5 / 24, 11 / 24, 1 / 4, 1 / 3))
    averaged = calculator(exclude=("NMI", "AMI"), avg_of_avgs=True)
    result = averaged._get_accuracy(averaged.get_function_dict(), ref_includes_query=False, **HAND)
    check(result, ((1 / 3 + 11 / 24) / 3, 1 / 6, 7 / 18, 1 / 6, 5 / 18))
    per_class = calculator(exclude=("NMI", "AMI"), return_per_class=True)
    result = per_class._get_accuracy(per_class.get_function_dict(), ref_includes_query=False, **HAND)
    assert result["mean_average_precision"] == pytest.approx([1 / 3, 11 / 24, 0])

    own = {**HAND, "knn_labels": HAND["knn_labels"][:, 1:]}
    check(
        plain._get_accuracy(plain.get_function_dict(), ref_includes_query=True, **own),
        (5 / 12, 1 / 4, 1 / 2, 1 / 4, 3 / 8),
    )
    result = per_class._get_accuracy(per_class.get_function_dict(), ref_includes_query=True, **own)
    assert result["mean_average_precision"] == pytest.approx([5 / 6, 5 / 12, 0])
    check(
        averaged._get_accuracy(averaged.get_function_dict(), ref_includes_query=True, **own),
        (5 / 12, 1 / 4, 1 / 2, 1 / 3, 1 / 3),
    )

    none = {**HAND, "not_lone_query_mask": torch.zeros(4, dtype=torch.bool)}
    check(plain._get_accuracy(plain.get_function_dict(), ref_includes_query=False, **none), (NAN,) * 5)
    result = per_class._get_accuracy(per_class.get_function_dict(), ref_includes_query=False, **none)
    assert all(len(values) == 3 and all(map(math.isnan, values)) for values in result.values())


def test_the_helpers_of_version_2_9():
    labels, reference_labels = tensor([1, 1, 2, 7]), tensor([2, 1, 1, 1, 3])
    counts = compat.get_label_match_counts(labels, reference_labels, compat.EQUALITY)
    assert [part.tolist() for part in counts] == [[1, 2, 7], [3, 1, 0]]
    lone, mask = compat.get_lone_query_labels(labels, counts, False, compat.EQUALITY)
    assert lone.tolist() == [7]
    assert mask.tolist() == [True, True, True, False]
    lone, mask = compat.get_lone_query_labels(labels, counts, True, compat.EQUALITY)
    assert lone.tolist() == [2, 7]
    assert mask.tolist() == [True, True, False, False]
    mask, number = compat.get_relevance_mask((4, 3), labels[:, None], False, counts)
    assert number.tolist() == [3, 3, 1, 0]
    assert mask.long().tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]]
    knn_labels, query_labels = tensor([[1, 2, 1], [2, 1, 2]]), tensor([1, 1])
    # Three arguments, as the documentation of 2.9 calls it, and divided by k where there are fewer columns.
    assert compat.precision_at_k(knn_labels, query_labels[:, None], 2) == 0.5
    assert compat.precision_at_k(knn_labels, query_labels[:, None], 6) == 0.25
    assert compat.mean_reciprocal_rank(knn_labels, query_labels[:, None], False, False, torch.eq) == 0.75
    both = (False, counts, False, False, torch.eq)
    assert compat.r_precision(knn_labels, query_labels[:, None], *both) == 0.5
    assert compat.mean_average_precision(knn_labels, query_labels[:, None], *both) == pytest.approx((5 / 9 + 1 / 6) / 2)
    assert compat.try_getting_not_lone_labels(knn_labels, query_labels, tensor([False, False])) == (None, None)
    kept = compat.try_getting_not_lone_labels(knn_labels, query_labels, tensor([False, True]))
    assert [part.tolist() for part in kept] == [[[2, 1, 2]], [1]]
    assert math.isnan(compat.nan_accuracy(counts[0], False))
    assert len(compat.nan_accuracy(counts[0], True)) == 3
    assert compat.maybe_get_avg_of_avgs(tensor([1.0, 0, 1]), tensor([4, 4, 2]), False, True) == [1.0, 0.5]
    assert compat.get_unique_labels(tensor([[2, 1], [1, 5], [2, 1]])).tolist() == [[1, 5], [2, 1]]
