"""The evaluation of whole arrays: values against the definitions, labels, pairs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from exactknn._retrieval.evaluate import evaluate as evaluate_task
from exactknn._retrieval.metrics import BUILT_IN, mean_of
from exactknn._retrieval.pairs import confusions, pair_sample
from tests.python.cli.evaluate_helpers import CLASSES, MEANS, OTHERS, POINTS, task_of

PER_QUERY = {
    "mean_average_precision": [1, 1, 5 / 12, 1, 1, np.nan],
    "mean_average_precision_at_r": [1, 1, 0, 1, 1, np.nan],
    "mean_reciprocal_rank": [1, 1, 1 / 3, 1, 1, np.nan],
    "precision_at_1": [1, 1, 0, 1, 1, np.nan],
    "r_precision": [1, 1, 0, 1, 1, np.nan],
}


def value_of_one(metric: str, relevance: np.ndarray, count: int, k: int, winner) -> float:
    """A metric of one query by its definition: relevance of all neighbours, nearest first."""
    if count == 0:
        return np.nan
    name, _, number = metric.partition("_at_")
    precision = np.cumsum(relevance) / np.arange(1, len(relevance) + 1)
    if metric == "mean_average_precision":
        return (relevance * precision)[:k].sum() / count
    if metric == "mean_average_precision_at_r":
        return (relevance * precision)[: min(k, count)].sum() / count
    if metric == "mean_reciprocal_rank":
        ranks = np.flatnonzero(relevance[:k]) + 1
        return 1 / ranks[0] if len(ranks) else 0.0
    if metric == "r_precision":
        return relevance[: min(k, count)].mean()
    first = relevance[: int(number)]
    if name == "precision":
        return first.sum() / int(number)
    if name in ("recall", "hit_rate"):
        return float(first.any())
    if name == "found_fraction":
        return first.sum() / count
    if name == "ndcg":
        gains = 1 / np.log2(np.arange(2, len(relevance) + 2))
        return (first * gains[: len(first)]).sum() / gains[: min(count, int(number))].sum()
    return float(winner(name, int(number)))


def by_definition(query, labels, reference, reference_labels, exclude_self, metrics, k) -> dict[str, np.ndarray]:
    """Every metric of every query, from squared distances in float64."""
    values = {metric: [] for metric in metrics}
    for i, row in enumerate(query.astype(np.float64)):
        distances = ((reference.astype(np.float64) - row) ** 2).sum(axis=1).astype(np.float32)
        order = np.argsort(distances, kind="stable")
        order = order[order != i] if exclude_self else order
        near, gaps = reference_labels[order], distances[order].astype(np.float64)
        relevance = near == labels[i]

        def winner(name, number, near=near, gaps=gaps, label=labels[i]):
            votes: dict[object, float] = {}
            for other, gap in zip(near[:number], gaps[:number], strict=True):
                votes[other] = votes.get(other, 0) + (np.exp((gaps[0] - gap) / 0.07) if "softmax" in name else 1)
            return max(votes, key=votes.get) == label  # the first of equal ones has the nearest member

        for metric in metrics:
            values[metric].append(value_of_one(metric, relevance, int(relevance.sum()), k, winner))
    return {metric: np.array(column) for metric, column in values.items()}


def test_the_worked_example():
    evaluation = evaluate_task(task_of(POINTS, CLASSES), BUILT_IN)
    assert list(evaluation.values) == list(BUILT_IN)
    for name, values in evaluation.values.items():
        np.testing.assert_allclose(values, PER_QUERY[name], rtol=1e-15)
        assert mean_of(values) == pytest.approx(MEANS[name], rel=1e-15)
    assert evaluation.counted.tolist() == [True] * 5 + [False]
    assert (evaluation.k, evaluation.cut_short) == (5, [])


def test_the_worked_example_with_one_neighbour():
    evaluation = evaluate_task(task_of(POINTS, CLASSES), BUILT_IN, k=1)
    means = {name: mean_of(values) for name, values in evaluation.values.items()}
    assert means == {
        "mean_average_precision": 0.6,
        "mean_average_precision_at_r": 0.6,
        "mean_reciprocal_rank": 0.8,
        "precision_at_1": 0.8,
        "r_precision": 0.8,
    }
    assert evaluation.cut_short == ["mean_average_precision_at_r", "r_precision"]
    assert evaluate_task(task_of(POINTS, CLASSES), BUILT_IN, k="max").k == 2


@pytest.mark.parametrize("path", ["neighbours", "ranks", "neighbours in blocks", "ranks in blocks"])
@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("k", ["all", "max", 4])
def test_values_are_those_of_the_definitions_on_every_path(monkeypatch, path, with_reference, k):
    if path.startswith("ranks"):
        monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: True)
    else:
        monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: False)
    if path.endswith("blocks"):
        monkeypatch.setattr("exactknn._arrays.blocks.BLOCK_ELEMENTS", 300)
        monkeypatch.setattr("exactknn._retrieval.engine._BLOCK_RANKS", 100)
    random = np.random.default_rng(7)
    # Small whole numbers: many equal distances and copies of rows.
    query = random.integers(0, 4, size=(70, 3)).astype(np.float32)
    labels = np.concatenate([random.integers(0, 6, size=68), [77, 88]])
    reference, reference_labels = query, labels
    if with_reference:
        reference = random.integers(0, 4, size=(90, 3)).astype(np.float32)
        reference_labels = random.integers(2, 9, size=90)
    task = task_of(query, labels, *((reference, reference_labels) if with_reference else ()))
    evaluation = evaluate_task(task, [*BUILT_IN, *OTHERS], k, details=True)
    most = int(evaluation.relevant_counts.max())
    expected = by_definition(
        query,
        labels,
        reference,
        reference_labels,
        not with_reference,
        [*BUILT_IN, *OTHERS],
        {"all": 10**6, "max": most}.get(k, k),
    )
    assert evaluation.counted.sum() < len(query)
    for name, values in evaluation.values.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-12, err_msg=name)

    assert evaluation.details is not None
    curve = np.arange(1, len(evaluation.details.first_at) + 1)
    counted = int(evaluation.counted.sum())
    names = [f"{name}_at_{number}" for number in curve for name in ("recall", "precision")]
    scores = by_definition(query, labels, reference, reference_labels, not with_reference, names, 1)
    recall = [np.nanmean(scores[f"recall_at_{number}"]) for number in curve]
    precision = [np.nanmean(scores[f"precision_at_{number}"]) for number in curve]
    np.testing.assert_allclose(np.cumsum(evaluation.details.first_at) / counted, recall, rtol=1e-12)
    np.testing.assert_allclose(np.cumsum(evaluation.details.relevant_at) / counted / curve, precision, rtol=1e-12)


@pytest.mark.parametrize("k", ["all", "max", 4])
def test_values_are_those_of_the_calculator(k):
    from exactknn.evaluation import AccuracyCalculator

    random = np.random.default_rng(11)
    query, reference = random.normal(size=(90, 4)).astype(np.float32), random.normal(size=(400, 4)).astype(np.float32)
    labels, reference_labels = random.integers(0, 9, size=90), random.integers(1, 9, size=400)
    names = [*BUILT_IN, *OTHERS]
    evaluation = evaluate_task(task_of(query, labels, reference, reference_labels), names, k)
    calculator = AccuracyCalculator(include=tuple(names), k={"all": None, "max": "max_bin_count"}.get(k, k))
    means = {name: mean_of(values) for name, values in evaluation.values.items()}
    expected = calculator.get_accuracy(query, labels, reference, reference_labels)
    assert {name: pytest.approx(value, rel=1e-12) for name, value in means.items()} == expected


@pytest.mark.parametrize("distance", ["cosine", "inner_product", "cityblock", "chebyshev", "minkowski", "euclidean"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ranks_and_neighbours_agree_in_every_distance(monkeypatch, distance, dtype):
    random = np.random.default_rng(3)
    query, labels = random.normal(size=(60, 5)).astype(dtype), random.integers(0, 5, size=60)
    task = task_of(query, labels, distance=distance, p=3 if distance == "minkowski" else None)
    monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: False)
    neighbours = evaluate_task(task, BUILT_IN).values
    monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: True)
    ranks = evaluate_task(task, BUILT_IN).values
    for name in BUILT_IN:
        np.testing.assert_array_equal(neighbours[name], ranks[name])
        assert 0 < mean_of(ranks[name]) < 1


def test_infinite_distances_have_equal_votes():
    # Squares beyond float64: all distances are infinite, and the lowest row comes first.
    rows = np.array([[1e200], [-1e200], [3e200], [-3e200]])
    evaluation = evaluate_task(task_of(rows, [0, 1, 1, 0]), ["knn_softmax_accuracy_at_3"])
    assert evaluation.values["knn_softmax_accuracy_at_3"].tolist() == [0, 0, 0, 0]


def test_nothing_is_searched_when_every_query_is_lone(monkeypatch):
    monkeypatch.setattr("exactknn._references._core", None)
    evaluation = evaluate_task(task_of(POINTS, range(6)), [*BUILT_IN, *OTHERS], details=True)
    assert all(np.isnan(values).all() for values in evaluation.values.values())
    assert not evaluation.counted.any()


@pytest.mark.parametrize("path", ["neighbours", "ranks"])
def test_the_finished_fraction_never_falls_and_ends_at_one(monkeypatch, path):
    monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: path == "ranks")
    monkeypatch.setattr("exactknn._arrays.blocks.BLOCK_ELEMENTS", 3000)
    monkeypatch.setattr("exactknn._retrieval.engine._BLOCK_RANKS", 500)
    random = np.random.default_rng(3)
    task = task_of(random.normal(size=(200, 5)), np.arange(200) % 10)
    told: list[float] = []
    evaluate_task(task, [*BUILT_IN, "knn_accuracy_at_5"], progress=told.append)
    assert told == sorted(told) and told[-1] == 1.0 and len(told) > 5


@pytest.mark.parametrize(
    ("labels", "others", "classes"),
    [
        ([2**53 + 1, 2**53], None, [2**53, 2**53 + 1]),
        (np.array([3, 2**63 - 1], np.uint64), np.array([-1], np.int8), [-1, 3, 2**63 - 1]),
        ([True, False], [1, 2], [0, 1, 2]),
        ([1.5, 2.0], [2, 3], [1.5, 2.0, 3.0]),
        (np.array([0.1], np.float32), np.array([0.1]), [0.1, float(np.float32(0.1))]),
        (["10", "9"], None, [9, 10]),
        (["10", "9"], [9, 8], [8, 9, 10]),
        (["10", "09"], None, ["09", "10"]),
        (["10", "+9"], ["9"], ["+9", "10", "9"]),
        (["10", str(2**70)], None, ["10", str(2**70)]),
        (["b", "a "], ["a", "é"], ["a", "a ", "b", "é"]),
    ],
)
def test_labels_are_compared_exactly(labels, others, classes):
    rows = [[0.0]] * len(labels)
    task = task_of(rows, labels, *(() if others is None else ([[0.0]] * len(others), others)))
    assert task.classes.tolist() == classes
    assert task.classes[task.query_class].tolist() == list(labels) or task.classes.dtype.kind != "U"


@pytest.mark.parametrize(
    ("labels", "others", "message"),
    [
        (["a", "b"], [1, 2], "the labels of one side are text, those of the other are numbers; expected the same kind"),
        ([1.5], [2**53 + 1], "those of the other are integers beyond 2**53"),
        (np.array([2**63], np.uint64), [1], "the label 9223372036854775808 is beyond 2**63 - 1"),
    ],
)
def test_labels_that_cannot_be_compared_are_refused(labels, others, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        task_of([[0.0]] * len(labels), labels, [[0.0]] * len(others), others)


@pytest.mark.parametrize("with_reference", [False, True])
def test_all_pairs_of_a_small_set_are_measured(with_reference):
    random = np.random.default_rng(5)
    query, labels = random.normal(size=(30, 3)), random.integers(0, 4, size=30)
    reference, reference_labels = query, labels
    if with_reference:
        reference, reference_labels = random.normal(size=(20, 3)), random.integers(1, 6, size=20)
    task = task_of(query, labels, *((reference, reference_labels) if with_reference else ()))
    distances = ((query[:, None] - reference) ** 2).sum(axis=2)
    same = labels[:, None] == reference_labels
    itself = np.zeros_like(same) if with_reference else np.eye(30, dtype=bool)
    for wanted, mask in ((True, same & ~itself), (False, ~same)):
        sample = pair_sample(task, same_class=wanted)
        assert (sample.total, sample.measured, sample.drawn) == (mask.sum(), mask.sum(), False)
        np.testing.assert_allclose(np.sort(sample.values), np.sort(distances[mask]), rtol=1e-12)


def test_of_many_pairs_a_sample_is_drawn_that_does_not_change(monkeypatch):
    monkeypatch.setattr("exactknn._retrieval.pairs.PAIRS_AT_MOST", 500)
    monkeypatch.setattr("exactknn._arrays.blocks.BLOCK_ELEMENTS", 64)
    labels = np.arange(400) % 4
    rows = (labels * 1000.0 + np.arange(400) / 400)[:, None]  # classes far apart, no two rows equal
    task = task_of(rows, labels, distance="euclidean")
    same, other = (pair_sample(task, same_class=wanted) for wanted in (True, False))
    assert (same.total, same.measured, same.drawn) == (400 * 99, 500, True)
    assert (other.total, other.measured, other.drawn) == (400 * 300, 500, True)
    assert same.values.min() > 0 and same.values.max() < 1
    assert other.values.min() > 998
    again = pair_sample(task, same_class=True)
    np.testing.assert_array_equal(again.values, same.values)


@pytest.mark.parametrize(
    ("distance", "p", "value"),
    [
        ("sqeuclidean", None, 25),
        ("euclidean", None, 5),
        ("cityblock", None, 7),
        ("chebyshev", None, 4),
        ("minkowski", None, 5),
        ("minkowski", 3.0, 91 ** (1 / 3)),
        ("minkowski", np.inf, 4),
        ("inner_product", None, 31),
        ("cosine", None, 1 - 31 / np.sqrt(13 * 74)),
    ],
)
def test_pairs_are_measured_in_the_distance_of_the_search(distance, p, value):
    task = task_of([[2.0, 3.0], [5.0, 7.0]], [1, 1], distance=distance, p=p)
    np.testing.assert_allclose(pair_sample(task, same_class=True).values, [value, value], rtol=1e-12)


def test_confusions_come_most_frequent_first():
    # Two of "a" are nearest to a "b", two to a "c"; these find their own; the lone "z" is not counted.
    points = np.array([[0.0], [10], [20], [30], [0.1], [0.15], [9.9], [9.85], [20.1], [20.15], [1000]])
    labels = list("aaaabbbbccz")
    task = task_of(points, labels)
    evaluation = evaluate_task(task, BUILT_IN, details=True)
    names = [
        (str(task.classes[pair.query_class]), str(task.classes[pair.nearest_class]), pair.count)
        for pair in confusions(task, evaluation, 10)
    ]
    assert names == [("a", "b", 2), ("a", "c", 2)]
    assert len(confusions(task, evaluation, 1)) == 1
