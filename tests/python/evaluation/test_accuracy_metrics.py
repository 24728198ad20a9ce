"""Metrics of clusters, and metrics that a user adds to the calculator."""

import math

import numpy as np
import pytest
import torch
from torch import tensor

import exactknn.evaluation.accuracy as accuracy
from exactknn.compat import accuracy_calculator as compat
from exactknn.evaluation import (
    AccuracyCalculator,
    RetrievalInputs,
    RetrievalMetric,
    ndcg_metric,
    precision_at_k,
)
from tests.python.evaluation.accuracy_helpers import (
    LINE,
    LINE_LABELS,
    NAMES,
    NAN,
    Spy,
    WithClusters,
    column,
    first_and_other,
)


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
