"""AccuracyCalculator: worked values, how many neighbours it asks for, what it refuses."""

import copy
import gc
import inspect
import logging
import math
import pickle
import threading
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import tensor

import exactknn.evaluation.accuracy as accuracy
from exactknn._retrieval import engine
from exactknn.compat import accuracy_calculator as compat
from exactknn.distances import CosineSimilarity, DotProductSimilarity, LpDistance, SNRDistance
from exactknn.evaluation import (
    AccuracyCalculator,
    CustomKNN,
    RetrievalInputs,
    RetrievalMetric,
    knn_vote_metric,
    ndcg_metric,
    precision_at_k,
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


@pytest.fixture(params=["neighbours", "ranks", "torch"])
def make(request, monkeypatch):
    """A calculator that gets its hits from neighbours, from the core's ranks, or from blocks of torch's search."""
    if request.param != "neighbours":
        monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: True)
    if request.param == "torch":
        return partial(AccuracyCalculator, knn_func=squared(backend="torch", batch_size=2))
    return AccuracyCalculator


def check(result, means, names=NAMES):
    assert list(result) == list(names)
    for name, wanted in zip(names, means, strict=True):
        assert result[name] == pytest.approx(wanted, rel=1e-12, nan_ok=True), name


# --- worked values -------------------------------------------------------------------------------------------------


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
    # Divided by all ten that are relevant, not by the two that were looked at; precision divides by its own two.
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


# --- arguments made by hand ----------------------------------------------------------------------------------------


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


# --- how it searches -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("include", "k", "asked"),
    [
        (("precision_at_1",), None, 1),
        (("r_precision",), None, 2),
        (("mean_average_precision_at_r", "precision_at_1"), None, 2),
        (("r_precision",), 1, 1),
        (("mean_average_precision",), None, 5),
        (("mean_reciprocal_rank",), 3, 3),
        (("mean_average_precision",), "max_bin_count", 2),
        ((), None, 5),
        (("precision_at_4",), 2, 4),
        (("precision_at_40", "ndcg_at_2"), 2, 5),
        (("knn_accuracy_at_3",), 1, 3),
    ],
)
def test_as_many_neighbours_as_the_metrics_need(include, k, asked):
    spy = Spy()
    AccuracyCalculator(include=include, k=k, knn_func=spy).get_accuracy(LINE, LINE_LABELS)
    assert spy.calls == [(6, asked, 6, True, False)]


def test_a_gallery_is_searched_without_leaving_out_a_row():
    spy = Spy()
    AccuracyCalculator(include=("precision_at_1",), knn_func=spy).get_accuracy(LINE, LINE_LABELS, LINE, LINE_LABELS)
    assert spy.calls == [(6, 1, 6, False, False)]


def test_a_metric_never_sees_what_another_asked_for():
    few = AccuracyCalculator(k=1).get_accuracy(LINE, LINE_LABELS)
    both = AccuracyCalculator(include=(*NAMES, "precision_at_4", "ndcg_at_3"), k=1).get_accuracy(LINE, LINE_LABELS)
    assert {name: both[name] for name in NAMES} == few


def test_no_search_when_no_query_can_be_counted():
    spy = Spy()
    AccuracyCalculator(knn_func=spy).get_accuracy(column(0, 1), tensor([0, 1]))
    AccuracyCalculator(knn_func=spy).get_accuracy(column(0, 1), tensor([0, 1]), torch.empty(0, 1), tensor([]))
    assert spy.calls == []
    # A metric that counts lone queries decides for itself.
    metric = RetrievalMetric(lambda inputs: inputs.knn_distances[:, 0], neighbors=1, exclude_lone_queries=False)
    calculator = AccuracyCalculator(knn_func=spy, custom_metrics={"distance": metric}, return_per_class=True)
    result = calculator.get_accuracy(column(0, 3), tensor([0, 1]))
    assert (result["distance"], len(spy.calls)) == ([9, 9], 1)


def test_a_small_k_is_warned_of_only_where_it_cuts_a_metric_short(caplog):
    AccuracyCalculator(k=1, include=("mean_reciprocal_rank", "precision_at_1")).get_accuracy(LINE, LINE_LABELS)
    assert caplog.records == []
    AccuracyCalculator(k=1, include=("precision_at_1", "r_precision")).get_accuracy(LINE, LINE_LABELS)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "average" not in caplog.messages[0]


def test_the_neighbour_matrix_is_not_formed_for_all_neighbours(monkeypatch):
    # Neither the core's nor torch's search is asked for more than a block of queries.
    n = 400
    generator = torch.manual_seed(1)
    embeddings, labels = torch.randn(n, 8, generator=generator), torch.arange(n) % 40
    wanted = AccuracyCalculator(knn_func=Spy()).get_accuracy(embeddings, labels)
    called = []
    monkeypatch.setattr(CustomKNN, "__call__", lambda *_: called.append(1))
    assert AccuracyCalculator().get_accuracy(embeddings, labels) == wanted
    torch_blocks = squared(backend="torch", batch_size=64)
    sizes = []
    torch_blocks.distance.forward = lambda query, reference: (
        sizes.append(len(query)),
        LpDistance.forward(torch_blocks.distance, query, reference),
    )[1]
    assert AccuracyCalculator(knn_func=torch_blocks).get_accuracy(embeddings, labels) == pytest.approx(wanted)
    assert sizes == [64] * 6 + [16]
    assert called == []


def test_neighbours_are_asked_for_where_they_are_fewer_than_the_relevant_references():
    assert engine.ranks_pay(129, np.full(7, 129))
    assert not engine.ranks_pay(128, np.full(7, 1))
    assert not engine.ranks_pay(129, np.full(7, 130))
    assert not engine.ranks_pay(200, np.array([0, 0, 601]))
    assert engine.ranks_pay(201, np.array([0, 0, 603]))


class WithClusters(AccuracyCalculator):
    def calculate_clusters(self, cluster_labels, label_counts, lone_query_labels, not_lone_query_mask, **kwargs):
        assert "knn_labels" not in kwargs
        return len(cluster_labels)

    def requires_clustering(self):
        return [*super().requires_clustering(), "clusters"]


@pytest.mark.parametrize("make", [AccuracyCalculator, compat.AccuracyCalculator, WithClusters])
def test_metrics_of_clusters_do_not_ask_for_neighbours(monkeypatch, make):
    generator = torch.manual_seed(1)
    embeddings, labels = torch.randn(400, 8, generator=generator), torch.arange(400) % 40
    wanted = AccuracyCalculator().get_accuracy(embeddings, labels)
    monkeypatch.setattr(CustomKNN, "__call__", lambda *_: pytest.fail("all neighbours were asked for"))
    found = make(kmeans_func=lambda rows, number: labels).get_accuracy(embeddings, labels)
    extra = {"clusters": 400} if make is WithClusters else {}
    assert found == {**wanted, "AMI": pytest.approx(1.0), "NMI": pytest.approx(1.0), **extra}


@pytest.mark.parametrize("distance", [CosineSimilarity(), LpDistance(), LpDistance(p=1), SNRDistance()])
@pytest.mark.parametrize("own", [True, False])
def test_ranks_are_those_of_the_search_with_any_distance(monkeypatch, distance, own):
    generator = torch.manual_seed(2)
    reference, labels = torch.randn(90, 6, generator=generator), torch.randint(0, 7, (90,), generator=generator)
    names = (*NAMES, "precision_at_5", "recall_at_3", "ndcg_at_7", "found_fraction_at_4", "hit_rate_at_2")
    arguments = (reference[:40], labels[:40], reference, labels, own)
    results = []
    for by_rank in (False, True):
        monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_, by_rank=by_rank: by_rank)
        results.append(AccuracyCalculator(include=names, knn_func=CustomKNN(distance)).get_accuracy(*arguments))
    assert results[0] == results[1]


def test_equal_shapes_and_values_do_not_make_a_reference_the_query():
    names = ("precision_at_1", "mean_average_precision")
    result = AccuracyCalculator(include=names).get_accuracy(LINE, LINE_LABELS, LINE, LINE_LABELS)
    assert result["precision_at_1"] == 1.0  # each row finds itself, the lone one too


def test_nothing_of_a_call_is_kept():
    found = []

    def knn_func(*arguments):
        distances, indices = squared()(*arguments)
        found.extend((weakref.ref(distances), weakref.ref(indices)))
        return distances, indices

    calculator = AccuracyCalculator(
        knn_func=knn_func, custom_metrics={"twice": RetrievalMetric(partial(precision_at_k, k=2))}
    )
    result = calculator.get_accuracy(LINE, LINE_LABELS)
    gc.collect()
    assert [reference() for reference in found] == [None, None]
    assert result["twice"] == 0.6


def test_records_say_how_many_neighbours_and_dimensions(caplog):
    caplog.set_level(logging.INFO)
    AccuracyCalculator(knn_func=Spy()).get_accuracy(LINE, LINE_LABELS)
    assert "evaluating 6 queries with k=5, dimension 1" in caplog.messages


def test_threads_share_a_calculator():
    calculator = AccuracyCalculator()
    wanted = calculator.get_accuracy(LINE, LINE_LABELS)
    results = [None] * 8

    def run(place):
        results[place] = calculator.get_accuracy(LINE, LINE_LABELS)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [wanted] * 8


def test_a_call_within_another_keeps_the_metrics_of_both():
    # As when two threads use one calculator with metrics of their own.
    class Rows:
        def __array__(self, dtype=None, copy=None):
            inner.append(calculator.get_accuracy(LINE, LINE_LABELS, include=("r_precision",)))
            return LINE.numpy()

    inner = []
    calculator = AccuracyCalculator()
    assert calculator.get_accuracy(Rows(), LINE_LABELS, include=("precision_at_1",)) == {"precision_at_1": 0.8}
    assert inner == [{"r_precision": 0.8}]


def test_values_under_autocast_are_those_outside():
    generator = torch.manual_seed(3)
    embeddings, labels = torch.randn(60, 8, generator=generator), torch.arange(60) % 6

    def foreign(query, k, reference, ref_includes_query):
        products = query @ reference.T
        return products.fill_diagonal_(-math.inf).topk(k, dim=1)

    for knn_func in (None, squared(backend="torch"), CustomKNN(SNRDistance()), foreign):
        calculator = AccuracyCalculator(knn_func=knn_func)
        wanted = calculator.get_accuracy(embeddings, labels)
        with torch.autocast("cpu", torch.bfloat16):
            assert calculator.get_accuracy(embeddings, labels) == wanted


@pytest.mark.parametrize("change", [pickle.dumps, copy.deepcopy])
def test_calculators_are_copied_before_and_after_use(change):
    calculator = AccuracyCalculator(
        include=("precision_at_1", "ndcg_at_3", "two"),
        custom_metrics={"two": RetrievalMetric(partial(precision_at_k, k=2), neighbors=2)},
    )
    copied = change(calculator)
    copied = pickle.loads(copied) if isinstance(copied, bytes) else copied
    assert copied.get_accuracy(LINE, LINE_LABELS) == calculator.get_accuracy(LINE, LINE_LABELS)
    copied = change(calculator)
    copied = pickle.loads(copied) if isinstance(copied, bytes) else copied
    assert copied.get_curr_metrics() == ["ndcg_at_3", "precision_at_1", "two"]


@pytest.mark.parametrize("comparison", [None, lambda x, y: x == y])
@pytest.mark.parametrize("by_rank", [True, False])
@pytest.mark.parametrize("backend", ["rust", "torch"])
def test_blocks_of_any_size_give_the_same(monkeypatch, comparison, by_rank, backend):
    generator = torch.manual_seed(7)
    reference, labels = torch.randn(80, 3, generator=generator), torch.randint(0, 9, (80,), generator=generator)
    grades = ndcg_metric(lambda x, y: 1.0 / (1 + (x - y).abs()), k=6)
    calculator = AccuracyCalculator(
        include=(*NAMES, "ndcg_at_4", "knn_accuracy_at_5", "knn_softmax_accuracy_at_5", "graded"),
        custom_metrics={"graded": grades},
        label_comparison_fn=comparison,
        knn_func=squared(backend=backend),
    )
    monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: by_rank)
    for arguments in (
        (reference, labels),
        (reference[:33], labels[:33], reference[33:], labels[33:]),
        (reference[:33].clone(), labels[:33], reference, labels, True),
    ):
        monkeypatch.undo()
        monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: by_rank)
        wanted = calculator.get_accuracy(*arguments)
        for size in (1, 17, 200):
            monkeypatch.setattr("exactknn._arrays.blocks.BLOCK_ELEMENTS", size)
            monkeypatch.setattr("exactknn._retrieval.votes.VOTES_AT_ONCE", size)
            monkeypatch.setattr("exactknn._retrieval.engine._BLOCK_RANKS", size)
            assert calculator.get_accuracy(*arguments) == wanted


MEMORY = """
import os, re, torch
from exactknn.evaluation import AccuracyCalculator

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])

rows, classes = int(os.environ["ROWS"]), int(os.environ["CLASSES"])
embeddings = torch.randn(rows, 16, generator=torch.manual_seed(0))
labels = torch.arange(rows) % classes
calculator = AccuracyCalculator(include=os.environ["INCLUDE"].split())
calculator.get_accuracy(embeddings[:500], labels[:500] % 50)
before = peak()
calculator.get_accuracy(embeddings, labels)
print((peak() - before) >> 10)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read there")
@pytest.mark.parametrize(
    ("rows", "classes", "include", "mib"),
    [
        (8_000, 800, NAMES, 100),  # the row numbers of all neighbours would be 490 MiB
        (20_000, 10_000, ["precision_at_1"], 60),  # labels against labels 190 MiB, of one byte each
    ],
)
def test_memory_grows_with_neither_neighbours_nor_pairs_of_labels(run_python, rows, classes, include, mib):
    added = run_python(MEMORY, ROWS=str(rows), CLASSES=str(classes), INCLUDE=" ".join(include))
    assert int(added) < mib


# --- inputs --------------------------------------------------------------------------------------------------------


def test_arguments_by_position():
    assert " ".join(inspect.signature(AccuracyCalculator).parameters) == (
        "include exclude avg_of_avgs return_per_class k label_comparison_fn device knn_func kmeans_func custom_metrics"
    )
    assert " ".join(inspect.signature(AccuracyCalculator().get_accuracy).parameters) == (
        "query query_labels reference reference_labels ref_includes_query include exclude"
    )


@pytest.mark.parametrize(
    ("query", "reference", "wanted"),
    [
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.int64, torch.bool, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float16, torch.float64),
        (torch.float64, torch.float64, torch.float64),
    ],
)
def test_embeddings_are_searched_in_a_common_type(query, reference, wanted):
    def knn_func(*arguments):
        given.extend((arguments[0].dtype, arguments[2].dtype))
        return squared()(*arguments)

    given = []
    calculator = AccuracyCalculator(include=("precision_at_1",), knn_func=knn_func)
    calculator.get_accuracy(LINE.to(query), LINE_LABELS, LINE.to(reference), LINE_LABELS)
    assert given == [wanted, wanted]


@pytest.mark.parametrize(
    ("query", "reference", "wanted"),
    [
        (torch.int32, torch.bool, torch.int64),
        (torch.uint8, torch.int64, torch.int64),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.int16, torch.float64),
    ],
)
def test_labels_are_compared_in_a_common_type(query, reference, wanted):
    def comparison(x, y):
        given.update((x.dtype, y.dtype))
        return x == y

    given = set()
    calculator = AccuracyCalculator(include=("precision_at_1",), label_comparison_fn=comparison)
    calculator.get_accuracy(LINE, LINE_LABELS.to(query), LINE, LINE_LABELS.to(reference))
    assert given == {wanted}


def test_neighbours_in_float64():
    far = 1e8 + torch.tensor([0, 1, 3, 10, 11, 13], dtype=torch.float64).unsqueeze(1)
    result = AccuracyCalculator(include=("precision_at_1",)).get_accuracy(far, [0, 0, 1, 2, 2, 1])
    assert result == {"precision_at_1": 4 / 6}


def test_layouts_of_memory_do_not_matter(make):
    generator = torch.manual_seed(8)
    embeddings, labels = torch.randn(40, 6, generator=generator), torch.arange(40) % 7
    wanted = make().get_accuracy(embeddings, labels)
    wide = torch.stack([embeddings, embeddings], dim=2)[:, :, 1]
    assert make().get_accuracy(embeddings.T.contiguous().T, labels) == wanted
    assert make().get_accuracy(wide, torch.stack([labels, labels], dim=1)[:, 0]) == wanted
    assert make().get_accuracy(wide[:20], labels[:20], wide, labels, ref_includes_query=True) == make().get_accuracy(
        embeddings[:20], labels[:20], embeddings, labels, ref_includes_query=True
    )
    one = torch.ones(1, 3).expand(6, 3)
    assert make(include=("precision_at_1",)).get_accuracy(one, tensor([1]).expand(6)) == {"precision_at_1": 1.0}
    assert torch.equal(one, torch.ones(6, 3))


def test_arrays_tensors_and_lists_mix():
    wanted = AccuracyCalculator().get_accuracy(LINE, LINE_LABELS)
    for embeddings in (LINE.numpy(), LINE.double(), LINE.tolist(), LINE.half(), LINE.bfloat16(), LINE[:, 0:1].flip(1)):
        for labels in (
            LINE_LABELS.numpy(),
            LINE_LABELS.tolist(),
            LINE_LABELS.double(),
            LINE_LABELS.bfloat16(),
            LINE_LABELS.to(torch.uint8),
            LINE_LABELS.to(torch.uint64),
            torch.view_as_complex(torch.stack([LINE_LABELS, -LINE_LABELS], dim=1).double()).conj().imag,
        ):
            assert AccuracyCalculator().get_accuracy(embeddings, labels) == wanted
    frozen = LINE.numpy().copy()
    frozen.flags.writeable = False
    assert AccuracyCalculator().get_accuracy(frozen[::-1][::-1], LINE_LABELS.numpy()[::-1][::-1]) == wanted
    assert AccuracyCalculator().get_accuracy(LINE.numpy().astype(">f4"), LINE_LABELS.numpy().astype(">i8")) == wanted
    with torch.inference_mode():
        rows, labels = LINE.clone(), LINE_LABELS.clone()
    assert AccuracyCalculator().get_accuracy(rows, labels) == wanted
    assert AccuracyCalculator().get_accuracy(LINE.clone().requires_grad_(), LINE_LABELS) == wanted
    assert AccuracyCalculator(device="cpu").get_accuracy(LINE, LINE_LABELS) == wanted


def test_whole_numbers_are_searched_as_numbers():
    result = AccuracyCalculator(include=("precision_at_1",)).get_accuracy(
        np.array([[0], [1], [10], [11]], dtype=np.uint16), [True, True, False, False]
    )
    assert result == {"precision_at_1": 1.0}


def test_labels_of_two_types_are_compared_as_values():
    result = AccuracyCalculator(include=("precision_at_1",)).get_accuracy(
        column(0, 1), tensor([3, 4]), column(0.1, 1.1), tensor([3.0, 4.5])
    )
    assert result == {"precision_at_1": 1.0}
    result = AccuracyCalculator(include=("precision_at_1",), return_per_class=True)
    assert result.get_accuracy(column(0, 1), tensor([3, 4]), column(0.1, 1.1), tensor([3.0, 4.0])) == {
        "precision_at_1": [1.0, 1.0]
    }


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((LINE, LINE_LABELS[:5]), ValueError, "query and query_labels must have the same length, got 6 and 5"),
        ((LINE, LINE_LABELS, LINE, LINE_LABELS[:5]), ValueError, "reference and reference_labels .* got 6 and 5"),
        ((LINE, LINE_LABELS, LINE), ValueError, "reference_labels must be given together with reference"),
        ((LINE, LINE_LABELS, None, LINE_LABELS), ValueError, "reference must be given together with reference_labels"),
        ((LINE[:, 0], LINE_LABELS), ValueError, r"query must be 2-D \(rows, dimensions\), got shape \(6,\)"),
        ((LINE, LINE_LABELS, torch.zeros(2, 3), tensor([0, 1])), ValueError, "same dimension, got 1 and 3"),
        ((torch.empty(0, 3), tensor([])), ValueError, "query must have at least one row"),
        ((LINE, LINE_LABELS.unsqueeze(1)), ValueError, "label_comparison_fn"),
        ((LINE, LINE_LABELS.view(6, 1, 1)), ValueError, "query_labels must be 1-D"),
        ((column(0, NAN, 1), tensor([0, 0, 0])), ValueError, "query must be finite, got NaN or infinity in row 1"),
        (
            (LINE, LINE_LABELS, column(0, 1, math.inf), tensor([0, 0, 0])),
            ValueError,
            "reference must be finite, got NaN or infinity in row 2",
        ),
        ((column(0, 1), tensor([0.5, NAN])), ValueError, "query_labels must not be NaN.* row 1"),
        ((np.array([["a"]]), [0]), TypeError, "query must hold numbers"),
        ((LINE, np.array(list("aabbbc"))), TypeError, "query_labels must hold numbers"),
        ((LINE, np.full(6, 2**63, np.uint64)), ValueError, "64-bit"),
        ((LINE.to(torch.complex64), LINE_LABELS), TypeError, "query must hold real numbers"),
        ((LINE, LINE_LABELS.to(torch.complex64)), TypeError, "query_labels must hold real numbers"),
        (([[0.0], [1.0, 2.0]], [0, 0]), ValueError, "query must have rows of equal length"),
        ((column(0, 1), [0, [0, 1]]), ValueError, "query_labels must have rows of equal length"),
    ],
)
def test_what_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        AccuracyCalculator().get_accuracy(*arguments)


@pytest.mark.parametrize(
    ("reference", "labels", "message"),
    [
        (LINE[:3], LINE_LABELS[:3], "reference must begin with the 6 query rows .* got 3 rows"),
        (LINE.flip(0), LINE_LABELS, "row 0 differs"),
        (LINE + column(0, 0, 0, 1e-3, 0, 0), LINE_LABELS, "row 3 differs"),
        (LINE + column(1e-9, 0, 0, 0, 0, 0), LINE_LABELS, "row 0 differs"),
        (LINE, LINE_LABELS + tensor([0, 0, 0, 0, 1, 0]), "row 4 has 2 for 1"),
    ],
)
def test_a_reference_that_does_not_begin_with_the_queries(reference, labels, message):
    with pytest.raises(ValueError, match=message):
        AccuracyCalculator().get_accuracy(LINE, LINE_LABELS, reference, labels, ref_includes_query=True)


def test_own_rows_may_differ_by_rounding():
    rounded = LINE * (1 + 5e-6)
    result = AccuracyCalculator(include=("precision_at_1",)).get_accuracy(LINE, LINE_LABELS, rounded, LINE_LABELS, True)
    assert result == {"precision_at_1": 0.8}


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.zeros(6, 2, dtype=torch.long), r"shape \(6, 1\), got \(6, 2\)"),
        (torch.full((6, 1), -1), "from 0 to 5, got -1"),
        (torch.full((6, 1), 6), "from 0 to 5, got 6"),
        (torch.zeros(6, 1), "integer indices, got torch.float32"),
    ],
)
def test_impossible_answers_of_a_search_are_refused(indices, message):
    calculator = AccuracyCalculator(
        include=("precision_at_1",), knn_func=lambda *_: (torch.zeros(indices.shape), indices)
    )
    with pytest.raises(ValueError, match=message):
        calculator.get_accuracy(LINE, LINE_LABELS)
    calculator.knn_func = squared()
    assert calculator.get_accuracy(LINE, LINE_LABELS) == {"precision_at_1": 0.8}


@pytest.mark.parametrize(
    ("distances", "message"),
    [(torch.zeros(6), r"distances of shape \(6, 1\), got \(6,\)"), (None, "distances, got NoneType")],
)
def test_impossible_distances_of_a_search_are_refused(distances, message):
    calculator = AccuracyCalculator(
        include=("precision_at_1",), knn_func=lambda *_: (distances, torch.zeros(6, 1, dtype=torch.long))
    )
    with pytest.raises(ValueError, match=message):
        calculator.get_accuracy(LINE, LINE_LABELS)


def test_indices_of_another_integer_type_are_taken():
    def knn_func(*arguments):
        distances, indices = squared()(*arguments)
        return distances.numpy(), indices.int().numpy()

    check(AccuracyCalculator(knn_func=knn_func).get_accuracy(LINE, LINE_LABELS), LINE_MEANS)


# --- the selection -------------------------------------------------------------------------------------------------


def test_the_default_search_and_metrics():
    calculator = AccuracyCalculator()
    assert calculator.get_curr_metrics() == list(NAMES)
    assert type(calculator.knn_func) is CustomKNN
    assert calculator.knn_func.batch_size == 256
    distance = calculator.knn_func.distance
    assert (type(distance), distance.p, distance.power, distance.normalize_embeddings) == (LpDistance, 2, 2, False)
    assert calculator.description() == ""
    assert AccuracyCalculator(avg_of_avgs=True).description() == "avg_of_avgs"
    assert calculator.device is None


def test_include_and_exclude_at_construction_and_in_a_call():
    calculator = AccuracyCalculator(include=("precision_at_1", "r_precision", "ndcg_at_3"), exclude=["r_precision"])
    assert calculator.get_curr_metrics() == ["ndcg_at_3", "precision_at_1"]
    assert list(calculator.get_accuracy(LINE, LINE_LABELS, exclude=("ndcg_at_3",))) == ["precision_at_1"]
    assert calculator.get_curr_metrics() == ["precision_at_1"]
    # Known, but left out at construction.
    assert calculator.get_accuracy(LINE, LINE_LABELS, include=("r_precision", "precision_at_10")) == {}
    assert list(calculator.get_accuracy(LINE, LINE_LABELS)) == ["ndcg_at_3", "precision_at_1"]
    assert list(AccuracyCalculator().get_accuracy(LINE, LINE_LABELS, include=("recall_at_2",))) == ["recall_at_2"]
    assert AccuracyCalculator(exclude=NAMES).get_accuracy(LINE, LINE_LABELS) == {}
    assert list(calculator.original_function_dict) == list(calculator.curr_function_dict)


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("precision_at_1", TypeError),
        ({"precision_at_1"}, TypeError),
        (("precision_at_x",), ValueError),
        (("precision_at_0",), ValueError),
        (("mean_average_precision_at_5",), ValueError),
        ((3,), ValueError),
    ],
)
def test_wrong_selections(argument, given, error):
    with pytest.raises(error, match=argument):
        AccuracyCalculator(**{argument: given})
    with pytest.raises(error, match=argument):
        AccuracyCalculator().get_accuracy(LINE, LINE_LABELS, **{argument: given})


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"r_precision.*recall_at_<k>.*knn_accuracy_at_<k>.*got 'recall'"):
        AccuracyCalculator(include=("recall",))


@pytest.mark.parametrize("k", [-1, 0, 1.5, "max", [1], True, 2.0])
def test_wrong_numbers_of_neighbours(k):
    with pytest.raises(ValueError, match="k must be"):
        AccuracyCalculator(k=k)


def test_two_averages_at_once():
    with pytest.raises(ValueError, match="avg_of_avgs and return_per_class"):
        AccuracyCalculator(avg_of_avgs=True, return_per_class=True)


@pytest.mark.parametrize("argument", ["label_comparison_fn", "knn_func", "kmeans_func"])
def test_what_cannot_be_called(argument):
    with pytest.raises(TypeError, match=f"{argument} must be callable or None, got str"):
        AccuracyCalculator(**{argument: "faiss"})


# --- clusters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "clusters", "nmi", "ami"),
    [
        ([0, 0, 1, 1, 2, 2], [0, 0, 1, 2, 2, 2], 0.739667376801, 0.502360702720),
        ([0, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0], 0.508091584608, 0.409856956253),
        ([0, 0], [1, 1], 1, 1),
        ([0, 1, 2, 3], [0, 0, 0, 0], 0, 0),
    ],
)
@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_mutual_information(labels, clusters, nmi, ami, kind):
    asked = []

    def kmeans_func(rows, number):
        asked.append((len(rows), number))
        return kind(clusters)

    calculator = AccuracyCalculator(include=("NMI", "AMI"), kmeans_func=kmeans_func)
    result = calculator.get_accuracy(torch.randn(len(labels), 2), tensor(labels))
    assert result == {"AMI": pytest.approx(ami, abs=1e-9), "NMI": pytest.approx(nmi, abs=1e-9)}
    assert asked == [(len(labels), len(set(labels)))]


def test_clusters_only_where_they_are_asked_for():
    assert "NMI" not in AccuracyCalculator().get_curr_metrics()
    with_kmeans = AccuracyCalculator(kmeans_func=lambda rows, number: torch.zeros(len(rows)))
    assert with_kmeans.get_curr_metrics() == sorted((*NAMES, "AMI", "NMI"))
    assert compat.AccuracyCalculator().get_curr_metrics() == sorted((*NAMES, "AMI", "NMI"))
    spy = Spy()
    result = AccuracyCalculator(include=("NMI",), knn_func=spy).get_accuracy(LINE, tensor([0, 0, 0, 1, 1, 2]))
    assert result == {"NMI": pytest.approx(1.0)}
    assert spy.calls == []
    assert list(AccuracyCalculator().get_accuracy(LINE, LINE_LABELS, include=("AMI",))) == ["AMI"]


def test_mutual_information_is_one_number_in_every_kind_of_average():
    for options in ({"return_per_class": True}, {"avg_of_avgs": True}):
        calculator = AccuracyCalculator(kmeans_func=lambda rows, number: LINE_LABELS, **options)
        assert calculator.get_accuracy(LINE, LINE_LABELS)["NMI"] == pytest.approx(1.0)


def test_clusters_that_cannot_be_compared_are_refused():
    calculator = AccuracyCalculator(include=("AMI",), kmeans_func=lambda rows, number: [0] * 5)
    with pytest.raises(ValueError, match=r"kmeans_func must return one cluster for each of 6 rows, got shape \(5,\)"):
        calculator.get_accuracy(LINE, LINE_LABELS)
    with pytest.raises(ValueError, match=r"query_labels must have one column .* got \(6, 2\)"):
        calculator.get_accuracy(LINE, LINE_LABELS.expand(2, 6).T)


def test_clusters_and_a_comparison_do_not_go_together():
    with pytest.raises(NotImplementedError, match=r'NMI.*exclude=\("NMI", "AMI"\)'):
        AccuracyCalculator(include=("NMI",), label_comparison_fn=first_and_other)
    compared = AccuracyCalculator(label_comparison_fn=first_and_other)
    assert compared.get_curr_metrics() == list(NAMES)
    with pytest.raises(NotImplementedError, match="AMI"):
        compared.get_accuracy(LINE, LINE_LABELS.expand(2, 6).T, include=("AMI",))
    with pytest.raises(NotImplementedError, match="AMI, NMI"):
        compat.AccuracyCalculator(label_comparison_fn=first_and_other)
    assert AccuracyCalculator(include=("NMI",), label_comparison_fn=torch.eq).get_curr_metrics() == ["NMI"]


def test_a_missing_extra_is_named(monkeypatch):
    find_spec = accuracy.importlib.util.find_spec
    monkeypatch.setattr(
        accuracy.importlib.util, "find_spec", lambda name: None if name == "sklearn" else find_spec(name)
    )
    with pytest.raises(ModuleNotFoundError, match=r"exactknn\[clustering\]"):
        AccuracyCalculator(include=("NMI",))
    AccuracyCalculator()
    with pytest.raises(ModuleNotFoundError, match=r"exactknn\[clustering\]"):
        WithClusters(include=("clusters",)).get_accuracy(LINE, LINE_LABELS)


# --- metrics of the user -------------------------------------------------------------------------------------------


class Extended(AccuracyCalculator):
    def calculate_precision_at_two(self, knn_labels, query_labels, not_lone_query_mask, **kwargs):
        self.seen = {"knn_labels": knn_labels, **kwargs}
        found = (knn_labels[:, :2] == query_labels[:, None]).double().mean(1)
        return found[not_lone_query_mask].mean().item()

    def calculate_size(self, query, **kwargs):
        return f"{len(query)} queries"

    def requires_knn(self):
        return [*super().requires_knn(), "precision_at_two"]


def test_methods_of_a_subclass():
    spy = Spy()
    calculator = Extended(knn_func=spy, k=3)
    result = calculator.get_accuracy(LINE, LINE_LABELS)
    assert result["precision_at_two"] == 0.6
    assert result["size"] == "6 queries"
    assert sorted(result) == sorted((*NAMES, "precision_at_two", "size"))
    assert spy.calls == [(6, 3, 6, True, False)]
    seen = calculator.seen
    assert seen["knn_labels"].shape == (6, 3)
    assert seen["knn_distances"][0].tolist() == [1, 6.25, 100]
    assert [part.tolist() for part in seen["label_counts"]] == [[0, 1, 2], [2, 3, 1]]
    assert seen["lone_query_labels"].tolist() == [2]
    assert seen["ref_includes_query"] is True
    assert "mean_reciprocal_rank" in calculator.requires_knn()
    assert Extended(include=("size",), knn_func=spy).get_accuracy(LINE, LINE_LABELS) == {"size": "6 queries"}
    assert len(spy.calls) == 1


def test_methods_get_all_columns_of_the_labels():
    class Columns(AccuracyCalculator):
        def calculate_columns(self, knn_labels, label_counts, lone_query_labels, **kwargs):
            return knn_labels.tolist(), [part.tolist() for part in label_counts], lone_query_labels.tolist()

        def requires_knn(self):
            return [*super().requires_knn(), "columns"]

    labels = tensor([[1, 3], [1, 4], [2, 5]])
    calculator = Columns(include=("columns",), k=1, label_comparison_fn=first_and_other)
    assert calculator.get_accuracy(column(0, 1, 5), labels) == {
        "columns": ([[[1, 4]], [[1, 3]], [[1, 4]]], [labels.tolist(), [1, 1, 0]], [[2, 5]])
    }


def test_a_subclass_replaces_a_metric_and_the_number_of_neighbours():
    class Other(AccuracyCalculator):
        def calculate_precision_at_1(self, **kwargs):
            return -super().calculate_precision_at_1(**kwargs)

        def determine_k(self, bin_counts, num_reference_embeddings, ref_includes_query):
            assert bin_counts.tolist() == [2, 3, 1]
            assert (num_reference_embeddings, ref_includes_query) == (6, True)
            return 4

    spy = Spy()
    result = Other(include=("precision_at_1", "mean_average_precision"), knn_func=spy).get_accuracy(LINE, LINE_LABELS)
    assert result["precision_at_1"] == -0.8
    assert spy.calls == [(6, 4, 6, True, False)]


def test_clusters_of_a_subclass():
    class Clustered(AccuracyCalculator):
        def calculate_clusters(self, cluster_labels, **kwargs):
            return cluster_labels

        def get_cluster_labels(self, query, **kwargs):
            return list(range(len(query)))

        def requires_clustering(self):
            return [*super().requires_clustering(), "clusters"]

    assert Clustered(include=("clusters",)).get_accuracy(LINE, LINE_LABELS) == {"clusters": [0, 1, 2, 3, 4, 5]}


def test_the_inputs_of_a_custom_metric():
    seen = []

    def metric(inputs):
        seen.append(inputs)
        return inputs.relevance.double().mean(1)

    calculator = AccuracyCalculator(
        include=("mean", "precision_at_1"), custom_metrics={"mean": RetrievalMetric(metric, neighbors=2)}
    )
    assert calculator.get_accuracy(LINE, LINE_LABELS)["mean"] == 0.6
    (inputs,) = seen
    assert inputs.relevant_counts.tolist() == [1, 1, 2, 2, 2, 0]
    assert inputs.relevant_counts.dtype == torch.int64
    assert inputs.ref_includes_query is True
    assert inputs.reference_labels.tolist() == inputs.query_labels.tolist() == LINE_LABELS.tolist()
    assert inputs.knn_indices.tolist() == [[1, 2], [0, 2], [1, 0], [4, 2], [3, 2], [4, 3]]
    assert inputs.knn_labels.tolist() == [[0, 1], [0, 1], [0, 0], [1, 1], [1, 1], [1, 1]]
    assert inputs.knn_distances[0].tolist() == [1, 6.25]
    assert inputs.relevance.tolist() == [[True, False], [True, False], [False] * 2, [True] * 2, [True] * 2, [False] * 2]
    with pytest.raises(AttributeError):
        inputs.relevance = None


@pytest.mark.parametrize(
    ("options", "left_out", "kept"),
    [
        ({}, 0.75, 0.8),
        ({"avg_of_avgs": True}, 5 / 6, 8 / 9),
        ({"return_per_class": True}, [1, 2 / 3], [1, 2 / 3, 1]),
    ],
)
def test_averages_of_a_custom_metric(options, left_out, kept):
    values = tensor([NAN, 1, 0, 1, 1, 1])
    metrics = {
        "left_out": RetrievalMetric(lambda inputs: values, neighbors=1),
        "kept": RetrievalMetric(lambda inputs: values, neighbors=1, exclude_lone_queries=False),
    }
    calculator = AccuracyCalculator(include=tuple(metrics), custom_metrics=metrics, **options)
    result = calculator.get_accuracy(LINE, LINE_LABELS)
    assert result == {"kept": pytest.approx(kept), "left_out": pytest.approx(left_out)}
    assert calculator.per_class_labels.tolist() == [0, 1]  # of the classes that are not lone


@pytest.mark.parametrize(
    ("values", "mean"),
    [([math.inf, 1, 1, 1, 1], math.inf), ([math.inf, -math.inf, 1, 1, 1], NAN), ([-math.inf, NAN, 1, 1, 1], -math.inf)],
)
def test_infinite_values_of_a_custom_metric(values, mean):
    metric = RetrievalMetric(lambda inputs: tensor([*values, 0.0]), neighbors=1)
    result = AccuracyCalculator(include=("x",), custom_metrics={"x": metric}).get_accuracy(LINE, LINE_LABELS)
    assert result == {"x": pytest.approx(mean, nan_ok=True)}


def test_custom_metrics_join_the_default_set():
    metrics = {"five": RetrievalMetric(lambda inputs: precision_at_k(inputs, 5), neighbors=5)}
    calculator = AccuracyCalculator(custom_metrics=metrics)
    assert calculator.get_curr_metrics() == sorted((*NAMES, "five"))
    # Divided by five.
    assert calculator.get_accuracy(LINE, LINE_LABELS)["five"] == pytest.approx((1 + 1 + 2 + 2 + 2) / 25)


@pytest.mark.parametrize(
    ("metrics", "error"),
    [
        ([], TypeError),
        ({"x": len}, TypeError),
        ({3: RetrievalMetric(len)}, TypeError),
        ({"r_precision": RetrievalMetric(len)}, ValueError),
        ({"NMI": RetrievalMetric(len)}, ValueError),
        ({"ndcg_at_5": RetrievalMetric(len)}, ValueError),
    ],
)
def test_wrong_custom_metrics(metrics, error):
    with pytest.raises(error, match="custom_metrics"):
        AccuracyCalculator(custom_metrics=metrics)


@pytest.mark.parametrize(
    "value", [torch.zeros(5), torch.zeros(6, 1), np.zeros(6), 0.5, torch.zeros(6, dtype=torch.cfloat)]
)
def test_wrong_values_of_a_custom_metric(value):
    calculator = AccuracyCalculator(include=("x",), custom_metrics={"x": RetrievalMetric(lambda inputs: value)})
    with pytest.raises(ValueError, match="metric x must return"):
        calculator.get_accuracy(LINE, LINE_LABELS)


@pytest.mark.parametrize("neighbors", [0, -1, 1.5, "all", True])
def test_wrong_neighbours_of_a_custom_metric(neighbors):
    with pytest.raises(ValueError, match="neighbors must be"):
        RetrievalMetric(len, neighbors=neighbors)
    with pytest.raises(TypeError, match="function must be callable"):
        RetrievalMetric(3)


def test_precision_of_inputs_made_by_hand():
    inputs = RetrievalInputs(
        relevant_counts=tensor([2, 1]),
        reference_labels=tensor([0, 0, 1]),
        ref_includes_query=False,
        relevance=tensor([[True, False, True], [False, False, True]]),
    )
    values = precision_at_k(inputs, 2)
    assert values.dtype == torch.float64
    assert values.tolist() == [0.5, 0]
    assert precision_at_k(inputs, 4).tolist() == [0.5, 0.25]
    with pytest.raises(ValueError, match="k must be"):
        precision_at_k(inputs, 0)
    with pytest.raises(ValueError, match="relevance"):
        precision_at_k(RetrievalInputs(relevant_counts=None, reference_labels=None, ref_includes_query=True), 1)


# --- grades of relevance -------------------------------------------------------------------------------------------


def grade(x, y):
    return torch.where(x[..., 0] == y[..., 0], 2, torch.where(x[..., 1] == y[..., 1], 1, 0))


def ndcg(k=None, **options):
    return AccuracyCalculator(include=("ndcg",), custom_metrics={"ndcg": ndcg_metric(grade, k)}, **options)


def test_gain_of_one_query():
    arguments = (column(0), tensor([[5, 1]]), column(1, 2, 3, 4), tensor([[6, 1], [7, 2], [5, 1], [8, 1]]))
    assert ndcg().get_accuracy(*arguments)["ndcg"] == pytest.approx(0.776343370624, abs=1e-12)
    assert ndcg(2).get_accuracy(*arguments)["ndcg"] == pytest.approx(0.380093766716, abs=1e-12)


def test_gain_beside_metrics_of_yes_and_no():
    seen = []

    def watched(inputs):
        seen.extend(ndcg_metric(grade).function(inputs).tolist())
        return torch.zeros(len(inputs.query_labels))

    calculator = AccuracyCalculator(
        include=("ndcg", "precision_at_1", "mean_reciprocal_rank", "seen"),
        label_comparison_fn=lambda x, y: x[..., 0] == y[..., 0],
        custom_metrics={"ndcg": ndcg_metric(grade), "seen": RetrievalMetric(watched)},
    )
    result = calculator.get_accuracy(column(0, 1, 2.2, 4), tensor([[0, 0], [1, 0], [0, 0], [2, 1]]))
    assert result["ndcg"] == pytest.approx(0.873302077761, abs=1e-12)
    assert result["precision_at_1"] == 0
    assert result["mean_reciprocal_rank"] == pytest.approx(5 / 12)
    assert seen == pytest.approx([0.859718699852, 1, 0.760187533432, NAN], abs=1e-12, nan_ok=True)


def test_only_metrics_of_yes_and_no_need_a_comparison_of_columns():
    labels = tensor([[0, 0], [1, 0], [0, 0], [2, 1]])
    assert ndcg().get_accuracy(column(0, 1, 2.2, 4), labels)["ndcg"] == pytest.approx(0.873302077761, abs=1e-12)
    for read in ("relevance", "relevant_counts"):
        metric = RetrievalMetric(lambda inputs, read=read: getattr(inputs, read), exclude_lone_queries=False)
        calculator = AccuracyCalculator(include=("x",), custom_metrics={"x": metric})
        with pytest.raises(ValueError, match="label_comparison_fn"):
            calculator.get_accuracy(column(0, 1, 2.2, 4), labels)


@pytest.mark.parametrize("shape", [(6, 6), (1, 6), (1, 1)])
def test_gains_of_the_user_are_not_written_to(shape):
    table = torch.rand(shape, dtype=torch.float64, generator=torch.manual_seed(0))
    gains = table.clone().expand(6, 6)

    def table_of(x, y):
        return gains if y.shape[0] == 1 else torch.ones(6, y.shape[1])

    metric = ndcg_metric(table_of, k=2)
    AccuracyCalculator(include=("x",), custom_metrics={"x": metric}).get_accuracy(LINE, LINE_LABELS)
    assert torch.equal(gains, table.expand(6, 6))


@pytest.mark.parametrize(
    "wrong", [lambda x, y: grade(x, y) - 1, lambda x, y: grade(x, y) * NAN, lambda x, y: tensor(1.0), lambda x, y: 1]
)
def test_wrong_gains(wrong):
    calculator = AccuracyCalculator(include=("x",), custom_metrics={"x": ndcg_metric(wrong)})
    with pytest.raises(ValueError, match="relevance_fn must return"):
        calculator.get_accuracy(column(0, 1, 2), tensor([[0, 0], [1, 2], [0, 0]]))
    with pytest.raises(TypeError, match="relevance_fn"):
        ndcg_metric(3)


@pytest.mark.parametrize("answer", [True, tensor([True]), "x", torch.ones(3, 6)])
def test_a_comparison_of_another_shape_is_refused(answer):
    calculator = AccuracyCalculator(label_comparison_fn=lambda x, y: answer)
    with pytest.raises(ValueError, match="label_comparison_fn must return a bool tensor of shape"):
        calculator.get_accuracy(LINE, LINE_LABELS)


# --- inputs that nobody chose --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_labels_of_narrow_floats(dtype):
    check(AccuracyCalculator().get_accuracy(LINE, LINE_LABELS.float().to(dtype)), LINE_MEANS)


def test_views_that_are_not_plain_memory():
    packed = np.zeros(6, dtype=[("flag", "i1"), ("row", "f4", (1,)), ("label", "i4")])
    packed["row"], packed["label"] = LINE, LINE_LABELS
    check(AccuracyCalculator().get_accuracy(packed["row"], packed["label"]), LINE_MEANS)
    rows, labels = (torch.complex(part, -part).conj().imag for part in (LINE, LINE_LABELS.float()))
    assert rows.is_neg() and labels.is_neg()
    check(AccuracyCalculator().get_accuracy(rows, labels, rows, labels, True), LINE_MEANS)


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_dense_array_is_refused(place):
    for wrong, word in ((lambda part: part.to_sparse(), "dense"), (lambda part: np.ma.array(part.numpy()), "masked")):
        arguments = [LINE, LINE_LABELS]
        arguments[place] = wrong(arguments[place])
        with pytest.raises(TypeError, match=f"{('query', 'query_labels')[place]} must .* {word}"):
            AccuracyCalculator().get_accuracy(*arguments)


def test_unsigned_labels_beyond_int64_are_refused():
    labels = tensor([0, 0, 1, 1, -1, 2]).view(torch.uint64)
    with pytest.raises(ValueError, match=r"query_labels must fit .* got 18446744073709551615 in row 4"):
        AccuracyCalculator().get_accuracy(LINE, labels)


def test_views_of_one_memory_may_hold_other_rows():
    rows = torch.arange(9.0).view(3, 3)
    for query in (rows.t(), rows[:1].expand(3, 3)):
        with pytest.raises(ValueError, match=r"begin with the query rows .* row [01] differs"):
            AccuracyCalculator().get_accuracy(query, [0, 0, 0], rows, [0, 0, 0], True)


def test_a_number_far_beyond_the_references():
    names = [f"{name}_at_100000000000" for name in ("found_fraction", "knn_accuracy", "ndcg", "precision", "recall")]
    found = AccuracyCalculator(include=names).get_accuracy(LINE, LINE_LABELS)
    assert found.pop("precision_at_100000000000") == pytest.approx(8 / 5 / 1e11)
    near = AccuracyCalculator(include=[name.replace("00000000000", "0") for name in names])
    wanted = near.get_accuracy(LINE, LINE_LABELS)
    del wanted["precision_at_10"]
    assert list(found.values()) == list(wanted.values())
    with pytest.raises(ValueError, match="include must name metrics among"):
        AccuracyCalculator(include=("ndcg_at_1" + "0" * 18,))


@pytest.mark.parametrize("knn_func", [None, CustomKNN(DotProductSimilarity())])
def test_votes_at_infinite_distance_weigh_the_same(knn_func):
    # Squares and products beyond float32; the class of two wins, although one of the other comes first.
    query, reference = column(1e30), column(-1e30, -1.1e30, -1.2e30)
    calculator = AccuracyCalculator(include=("knn_softmax_accuracy_at_3",), knn_func=knn_func)
    assert calculator.get_accuracy(query, [1], reference, [0, 1, 1]) == {"knn_softmax_accuracy_at_3": 1.0}


@pytest.mark.parametrize("at_once", [1, 40, 1000])
def test_votes_counted_in_parts(monkeypatch, at_once):
    monkeypatch.setattr("exactknn._retrieval.votes.VOTES_AT_ONCE", at_once)
    embeddings, labels = column(*range(12)), tensor([7, 7, 5, 5, 5, 7, 3, 3, 7, 3, 9, 3])
    found = AccuracyCalculator(include=("knn_accuracy_at_4",)).get_accuracy(embeddings, labels)
    # Rows 3, 4, 7, 9 and 11 of the eleven that are not lone; row 2 loses to the nearer of two classes with two votes.
    assert found["knn_accuracy_at_4"] == 5 / 11


@pytest.mark.parametrize(("values", "mean"), [((1e308, 1e308), math.inf), ((-math.inf, math.inf), NAN)])
def test_a_metric_whose_mean_is_no_number(values, mean):
    metric = RetrievalMetric(lambda inputs: tensor(values, dtype=torch.float64).repeat(3), neighbors=1)
    calculator = AccuracyCalculator(include=("wide",), custom_metrics={"wide": metric})
    assert calculator.get_accuracy(LINE, LINE_LABELS)["wide"] == pytest.approx(mean, nan_ok=True)


@pytest.mark.parametrize("options", [{}, {"label_comparison_fn": lambda x, y: x == y}])
def test_a_default_device_moves_nothing(make, options):
    # A device that holds no data: what went there could not come back.
    custom = {"graded": ndcg_metric(lambda x, y: (x == y).double()), "vote": knn_vote_metric(1)}
    clustered = {} if options else {"kmeans_func": lambda rows, number: LINE_LABELS.numpy()}
    calculator = make(custom_metrics=custom, **clustered, **options)
    wanted = calculator.get_accuracy(LINE, LINE_LABELS)
    with torch.device("meta"):
        found = calculator.get_accuracy(LINE, LINE_LABELS)
    assert found == wanted
