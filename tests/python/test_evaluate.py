"""`exactknn evaluate`: values against the definitions, files in and out, and what the page says."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from exactknn._arrays.matrix import as_pair
from exactknn._retrieval.evaluate import evaluate as evaluate_task
from exactknn._retrieval.metrics import BUILT_IN, mean_of
from exactknn._retrieval.names import known_metrics
from exactknn._retrieval.pairs import confusions, pair_sample
from exactknn._retrieval.task import Task
from exactknn.cli import main
from exactknn.cli.figures import _up
from exactknn.cli.page import page as page_text

OTHERS = (
    "precision_at_3",
    "recall_at_3",
    "hit_rate_at_3",
    "found_fraction_at_3",
    "ndcg_at_3",
    "knn_accuracy_at_5",
    "knn_softmax_accuracy_at_5",
    "precision_at_500",
    "knn_accuracy_at_500",
    "ndcg_at_999999999999999999",
)

# Six points on a line. The last is lone: no other has its class.
POINTS = np.array([[0], [1], [2.5], [10], [11], [30]], np.float32)
CLASSES = np.array([0, 0, 1, 1, 1, 2])
PER_QUERY = {
    "mean_average_precision": [1, 1, 5 / 12, 1, 1, np.nan],
    "mean_average_precision_at_r": [1, 1, 0, 1, 1, np.nan],
    "mean_reciprocal_rank": [1, 1, 1 / 3, 1, 1, np.nan],
    "precision_at_1": [1, 1, 0, 1, 1, np.nan],
    "r_precision": [1, 1, 0, 1, 1, np.nan],
}
MEANS = {
    "mean_average_precision": 53 / 60,
    "mean_average_precision_at_r": 4 / 5,
    "mean_reciprocal_rank": 13 / 15,
    "precision_at_1": 4 / 5,
    "r_precision": 4 / 5,
}


def task_of(query, labels, reference=None, reference_labels=None, distance="sqeuclidean", p=None) -> Task:
    rows = as_pair(query, reference)
    labels = np.asarray(labels)
    others = None if reference_labels is None else np.asarray(reference_labels)
    return Task.of(rows, labels, others, distance, p)


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


# --- values --------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr("exactknn._retrieval.evaluate._core", None)
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


# --- labels --------------------------------------------------------------------------------------------------------


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
        (["a", "b"], [1, 2], "the labels of one side are text, those of the other numbers; wanted the same kind"),
        ([1.5], [2**53 + 1], "those of the other integers beyond 2**53"),
        (np.array([2**63], np.uint64), [1], "the label 9223372036854775808 is beyond 2**63 - 1"),
    ],
)
def test_labels_that_cannot_be_compared_are_refused(labels, others, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        task_of([[0.0]] * len(labels), labels, [[0.0]] * len(others), others)


# --- pairs ---------------------------------------------------------------------------------------------------------


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


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path, monkeypatch) -> Path:
    """A folder with the worked example in it, which is the current one."""
    monkeypatch.chdir(tmp_path)
    np.save("e.npy", POINTS)
    np.save("l.npy", CLASSES)
    return tmp_path


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments)])


FILES = ("--embeddings", "e.npy", "--labels", "l.npy")


def refusal(capsys, *arguments: object) -> str:
    before = sorted(os.listdir())
    assert evaluate(*arguments) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.startswith("exactknn: error: ") and errors.count("\n") == 1, errors
    assert sorted(os.listdir()) == before
    return errors.removeprefix("exactknn: error: ").rstrip("\n")


def as_json(capsys, *arguments: object) -> dict:
    assert evaluate(*arguments, "--json") == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    return json.loads(output)


def test_the_table(example, capsys):
    assert evaluate(*FILES) == 0
    assert capsys.readouterr() == (
        """\
6 queries of 3 classes, each against 5 others; sqeuclidean, 5 neighbours

metric                         value    queries       lone
mean_average_precision        0.8833          5          1
mean_average_precision_at_r   0.8000          5          1
mean_reciprocal_rank          0.8667          5          1
precision_at_1                0.8000          5          1
r_precision                   0.8000          5          1

lone: queries without a reference of their class; they are left out of every metric
""",
        "",
    )


def test_json(example, capsys):
    shown = as_json(capsys, *FILES)
    assert {name: pytest.approx(value, rel=1e-15) for name, value in shown.pop("metrics").items()} == MEANS
    assert shown == {
        "queries": 6,
        "queries_counted": 5,
        "queries_lone": 1,
        "classes": 3,
        "references": 6,
        "reference_is_query": True,
        "distance": "sqeuclidean",
        "p": None,
        "neighbours": 5,
    }


def test_metrics_are_computed_in_the_order_asked_for(example, capsys):
    shown = as_json(capsys, *FILES, "--metrics", "recall_at_3", "precision_at_2", "precision_at_1", "recall_at_3")
    assert list(shown["metrics"].items()) == [("recall_at_3", 1.0), ("precision_at_2", 0.6), ("precision_at_1", 0.8)]


def test_a_gallery(example, capsys):
    np.save("g.npy", POINTS[1:5] + np.float32(0.1))
    np.save("gl.npy", CLASSES[1:5])
    gallery = ("--reference", "g.npy", "--reference-labels", "gl.npy")
    shown = as_json(capsys, *FILES, *gallery, "--metrics", "precision_at_1", "--distance", "cityblock")
    assert shown["metrics"] == {"precision_at_1": 1.0}
    assert (shown["queries_lone"], shown["references"], shown["reference_is_query"]) == (1, 4, False)
    assert (shown["distance"], shown["neighbours"]) == ("cityblock", 4)


def test_one_line_a_class(example, capsys):
    assert evaluate(*FILES, "--per-class", "c.csv", "--metrics", "precision_at_1", "mean_reciprocal_rank") == 0
    assert capsys.readouterr().out.endswith("\nwrote c.csv\n")
    head, *rows = csv.reader(io.StringIO(Path("c.csv").read_text()))
    assert head == ["class", "queries", "precision_at_1", "mean_reciprocal_rank"]
    assert rows[0] == ["0", "2", "1.0", "1.0"]
    assert rows[1][:2] == ["1", "3"]
    assert [float(value) for value in rows[1][2:]] == pytest.approx([2 / 3, 7 / 9], rel=1e-15)
    assert rows[2] == ["2", "1", "", ""]
    assert len(rows) == 3


def test_classes_that_only_references_have_are_no_line(example):
    np.save("gl.npy", [0, 1, 5, 7, 7, 7])
    gallery = ("--reference", "e.npy", "--reference-labels", "gl.npy")
    assert evaluate(*FILES, *gallery, "--per-class", "c.csv", "--metrics", "precision_at_1") == 0
    assert Path("c.csv").read_text() == "class,queries,precision_at_1\n0,2,0.5\n1,3,0.0\n2,1,\n"


NAMES = ["grün", 'say "x"', "a,b"]


@pytest.mark.parametrize("kind", ["l.txt", "l.csv", "l.npy", "l.npz", "l.npz:labels", "l.txt with a mark and CRLF"])
def test_labels_of_every_kind_of_file(example, capsys, kind):
    name, _, mark = kind.partition(" ")
    labels = [NAMES[code] for code in CLASSES]
    if name == "l.txt":
        Path(name).write_bytes((b"\xef\xbb\xbf" if mark else b"") + "\r\n".join(labels).encode() + b"\r\n")
    elif name == "l.csv":
        with open(name, "w", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows([label] for label in labels)
    elif name == "l.npy":
        np.save(name, labels)
    else:
        np.savez("l.npz", labels=labels, **({"others": [1]} if ":" in name else {}))
    assert evaluate("--embeddings", "e.npy", "--labels", name, "--per-class", "c.csv", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["metrics"]["mean_reciprocal_rank"] == pytest.approx(13 / 15, rel=1e-15)
    rows = list(csv.reader(io.StringIO(Path("c.csv").read_text(encoding="utf-8"))))
    assert [row[0] for row in rows[1:]] == ["a,b", "grün", 'say "x"']


def test_whole_numbers_in_text_are_in_the_order_of_numbers(example, capsys):
    Path("l.txt").write_text("".join(f"{8 + code}\n" for code in CLASSES))
    assert evaluate("--embeddings", "e.npy", "--labels", "l.txt", "--per-class", "c.csv") == 0
    assert re.findall(r"^(\d+),", Path("c.csv").read_text(), re.MULTILINE) == ["8", "9", "10"]


def test_a_small_k_is_warned_of(example, capsys):
    assert evaluate(*FILES, "-k", 1) == 0
    assert capsys.readouterr().err == (
        "exactknn: warning: -k 1 is below the largest number of references of a class, 2, and cuts "
        "mean_average_precision_at_r and r_precision short; -k max looks at as many as are needed\n"
    )
    assert evaluate(*FILES, "-k", 1, "--metrics", "precision_at_1") == 0
    assert evaluate(*FILES, "-k", "max") == 0
    assert evaluate(*FILES, "-k", 99) == 0
    assert capsys.readouterr().err == ""


def test_all_lone_is_a_warning_and_null(example, capsys):
    np.save("l.npy", np.arange(6))
    assert evaluate(*FILES, "--json", "--report", "r.html", "--per-class", "c.csv") == 0
    output, errors = capsys.readouterr()
    assert errors == "exactknn: warning: no query has a reference of its class: every metric is NaN\n"
    shown = json.loads(output)
    assert (shown["queries_lone"], set(shown["metrics"].values())) == (6, {None})
    assert Path("c.csv").read_text().splitlines()[1:] == [f"{code},1,,,,," for code in range(6)]


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --embeddings, --labels (see: exactknn evaluate --help)"),
        ((*FILES, "-k", "0"), "argument -k: wanted a whole number of at least 1, all or max, got '0'"),
        ((*FILES, "-k", "some"), "argument -k: wanted a whole number of at least 1, all or max, got 'some'"),
        ((*FILES, "--distance", "manhattan"), "argument --distance: invalid choice: 'manhattan'"),
        ((*FILES, "--p", "3"), "--p is for --distance minkowski only, got --distance sqeuclidean"),
        ((*FILES, "--reference", "e.npy"), "--reference and --reference-labels go together, got only one of them"),
        ((*FILES, "--reference-labels", "l.npy"), "--reference and --reference-labels go together"),
        ((*FILES, "--metrics", "f1"), "--metrics: unknown metric 'f1'; known: mean_average_precision, "),
        ((*FILES, "--metrics", "precision_at_0"), "known: mean_average_precision, mean_average_precision_at_r"),
        ((*FILES, "--metrics", "precision_at_1" + "0" * 18), "unknown metric 'precision_at_1000000000000000000'"),
        ((*FILES, "--metrics", "x_at_3"), "precision_at_<k>, recall_at_<k>, hit_rate_at_<k>, found_fraction_at_<k>"),
        ((*FILES, "--metrics", "NMI"), "ndcg_at_<k>, knn_accuracy_at_<k>, knn_softmax_accuracy_at_<k>"),
        ((*FILES, "--report", "r.pdf"), "r.pdf: unknown suffix '.pdf' for --report; wanted one of .html, .htm"),
        ((*FILES, "--per-class", "c.txt"), "c.txt: unknown suffix '.txt' for --per-class; wanted one of .csv"),
        ((*FILES, "--report", "no/r.html"), "does not exist"),
        (("--embeddings", "x.npy", "--labels", "l.npy"), "x.npy: no such file"),
        (("--embeddings", "e.npy", "--labels", "x.csv"), "x.csv: no such file"),
        (("--embeddings", "l.npy", "--labels", "l.npy"), "l.npy: holds int64 values, which look like ids or labels"),
        (("--embeddings", "e.npy", "--labels", "e.npy"), "e.npy: a 2-D array of shape (6, 1); wanted 1-D, one label"),
        (("--embeddings", "e.npy", "--labels", "e.fbin"), "e.fbin: unknown suffix '.fbin' for labels; wanted one of"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(example, capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


BAD_LABELS = {
    "too few": ("b.txt", "1\n2\n", "--labels b.txt has 2 labels, e.npy has 6 rows; wanted one label for each row"),
    "a header": ("b.csv", "class\n" + "1\n" * 6, "has 7 labels, e.npy has 6 rows; wanted one label for each row (the"),
    "several fields": ("b.csv", "1,2\n" * 6, "b.csv: line 1 has 2 fields; wanted one label a line"),
    "an empty line": ("b.txt", "1\n\n1\n1\n1\n1\n", "b.txt: label 2 is empty; wanted one label a line"),
    "an empty line in CSV": ("b.csv", "1\n\n1\n1\n1\n1\n", "b.csv: label 2 is empty; wanted one label a line"),
    "an open quote": ("b.csv", '"1\n2\n', "b.csv: line 2: unexpected end of data"),
    "a null": ("b.txt", "a\0\nb\n", "b.txt: label 1 holds a null character"),
    "not UTF-8": ("b.txt", b"\xff\xfe", "b.txt: is not UTF-8 text: byte 0xff"),
    "empty": ("b.txt", "", "b.txt: the file is empty"),
    "NaN": ("b.npy", np.array([1, 2, np.nan, 3, np.nan, 4]), "b.npy: the label of row 2 is NaN"),
    "objects": (
        "b.npy",
        np.array([1, "a", None], object),
        "b.npy: an array of Python objects, which is never unpickled",
    ),
    "complex": ("b.npy", np.ones(6, complex), "b.npy: holds complex128 values; wanted labels: integers, booleans"),
    "bytes": ("b.npy", np.array([b"a"] * 6), "b.npy: holds bytes8 values; wanted labels"),
    "0-D": ("b.npy", np.array(3), "b.npy: a 0-D array of shape (); wanted 1-D, one label per row"),
}


@pytest.mark.parametrize("kind", BAD_LABELS)
def test_bad_labels_are_refused_in_one_line(example, capsys, kind):
    name, content, message = BAD_LABELS[kind]
    if isinstance(content, np.ndarray):
        np.save(name, content, allow_pickle=True)
    else:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refusal(capsys, "--embeddings", "e.npy", "--labels", name, "--report", "r.html")


def test_embeddings_that_cannot_be_used(example, capsys):
    bad = POINTS.copy()
    bad[3] = np.nan
    bad[4] = np.inf
    np.save("bad.npy", bad)
    np.save("wide.npy", np.ones((6, 2), np.float32))
    np.save("none.npy", POINTS[:0])
    np.save("no-labels.npy", CLASSES[:0])
    Path("names.txt").write_text("a\n" * 6)
    text = "bad.npy: row 3 holds a NaN or an infinity; wanted finite values"
    assert refusal(capsys, "--embeddings", "bad.npy", "--labels", "l.npy") == text
    assert refusal(capsys, *FILES, "--reference", "bad.npy", "--reference-labels", "l.npy") == text
    assert refusal(capsys, *FILES, "--reference", "wide.npy", "--reference-labels", "l.npy") == (
        "--embeddings e.npy has dimension 1, --reference wide.npy has 2; they must be equal"
    )
    assert refusal(capsys, *FILES, "--reference", "e.npy", "--reference-labels", "names.txt") == (
        "l.npy, names.txt: the labels of one side are text, those of the other numbers; wanted the same kind"
    )
    assert refusal(capsys, "--embeddings", "none.npy", "--labels", "no-labels.npy") == (
        "--embeddings none.npy has no rows; wanted at least one query"
    )
    assert refusal(capsys, *FILES, "--reference", "e.npy", "--reference-labels", "no-labels.npy").startswith(
        "--reference-labels no-labels.npy has 0 labels, e.npy has 6 rows"
    )


def test_an_output_replaces_neither_an_input_nor_another(example, capsys):
    Path("l.csv").write_text("a\n" * 6)
    files = ("--embeddings", "e.npy", "--labels", "l.csv")
    assert refusal(capsys, *files, "--per-class", "./l.csv") == "--per-class ./l.csv would replace the input l.csv"
    Path("r.html").symlink_to("c.csv")
    assert refusal(capsys, *files, "--per-class", "c.csv", "--report", "r.html") == (
        "--per-class and --report are one file: r.html"
    )
    assert Path("l.csv").read_text() == "a\n" * 6


def test_a_full_disk_leaves_what_was_there(example):
    Path("r.html").write_text("before")
    limited = (
        "import resource, sys; from exactknn.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); sys.exit(main())"
    )
    command = [sys.executable, "-c", limited, "evaluate", *FILES, "--report", "r.html", "--per-class", "c.csv"]
    done = subprocess.run(command, cwd=example, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "exactknn: error: File too large\n")
    assert Path("r.html").read_text() == "before"
    assert sorted(os.listdir()) == ["e.npy", "l.npy", "r.html"]


def test_an_interrupt_ends_in_one_line_and_leaves_no_file(example):
    np.save("many.npy", np.random.default_rng(3).normal(size=(60_000, 256)).astype(np.float32))
    np.save("classes.npy", np.arange(60_000) % 500)
    Path("r.html").write_text("before")
    program = "import sys; sys.modules['tqdm'] = None; from exactknn.cli import main; sys.exit(main())"
    arguments = ["--embeddings", "many.npy", "--labels", "classes.npy", "--report", "r.html", "--progress"]
    command = [sys.executable, "-c", program, "evaluate", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stderr.read(len("\rexactknn:   0%")) == b"\rexactknn:   0%"  # written when the search starts
        assert [name for name in os.listdir() if name.startswith(".exactknn-")]
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=40)
    assert (process.returncode, output) == (130, b"")
    assert errors.decode().splitlines()[-1] == "exactknn: interrupted"
    assert Path("r.html").read_text() == "before"
    assert sorted(os.listdir()) == ["classes.npy", "e.npy", "l.npy", "many.npy", "r.html"]


@pytest.mark.parametrize("metrics", [(), ("--metrics", "precision_at_1")])
def test_progress_when_asked_for(example, capsys, metrics):
    assert evaluate(*FILES, "--progress", *metrics) == 0
    assert "exactknn:   0%" in capsys.readouterr().err


def test_the_command_loads_nothing_heavy(example, run_python):
    program = f"""
import sys
from exactknn.cli import main
assert main(["evaluate", *{FILES!r}, "--report", "r.html", "--json"]) == 0
print(sorted({{"torch", "faiss", "sklearn", "scipy", "matplotlib"}} & set(sys.modules)))
"""
    assert run_python(program).splitlines()[-1] == "[]"


# --- the page ------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tables by their name, text by tag, and whether all that is opened is closed."""

    VOID = ("meta", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self.tables[dict(attrs)["aria-label"]] = self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def page_of(*arguments: object) -> tuple[Page, str]:
    assert evaluate(*arguments, "--report", "r.html") == 0
    text = Path("r.html").read_text(encoding="utf-8")
    return Page(text), text


def test_the_page_shows_the_numbers(example):
    page, _ = page_of(*FILES)
    assert page.texts["title"][0] == page.texts["h1"][0] == "Retrieval evaluation: e.npy"
    head, *metrics = page.tables["Metrics"]
    assert head == ["metric, and what it shows", "value", "queries"]
    for (name, mean), (text, value, queries) in zip(MEANS.items(), metrics, strict=True):
        assert text.startswith(name) and len(text) > len(name) + 20
        assert (value, queries) == (f"{mean:.4f}", "5")
    assert "1 query is lone" in page.texts["p"][1]
    assert page.tables["Recall and precision by number of neighbours"] == [
        ["k", "1", "2", "5"],
        ["recall@k", "0.8000", "0.8000", "1.0000"],
        ["precision@k", "0.8000", "0.6000", "0.3200"],
        ["most possible", "1.0000", "0.8000", "0.3200"],
    ]
    assert page.tables["Worst classes"] == [
        ["class", "queries", "mean_average_precision", "nearest instead"],
        ["1", "3", f"{29 / 36:.4f}", "0 (33.3%)"],
        ["0", "2", "1.0000", "\u2013"],
    ]
    assert page.tables["Classes most often confused"] == [
        ["class of the query", "class of the nearest", "queries", "share of the class"],
        ["1", "0", "1", "33.3%"],
    ]
    text = " ".join(page.texts["p"])
    assert "Same-class pairs: all 8; median 28.62." in text
    assert "Other-class pairs: all 22; median 121." in text


def test_every_metric_is_explained():
    metrics = [name.replace("<k>", "3") for name in known_metrics()]
    task = task_of(np.arange(8.0)[:, None], [0, 0, 1, 1, 0, 0, 1, 1])
    text = page_text(task, evaluate_task(task, metrics, details=True), {"embeddings": "rows.npy"})
    explained = re.findall(r"<code>([a-z_0-9<>]+?)</code><small>([^<]+\.)</small>", text)
    assert [name.replace("<wbr>", "") for name, _ in explained] == metrics
    assert len(metrics) == 12


def test_the_first_metric_orders_the_classes(example):
    page, _ = page_of(*FILES, "--metrics", "found_fraction_at_1", "precision_at_1")
    assert page.tables["Worst classes"] == [
        ["class", "queries", "found_fraction_at_1", "nearest instead"],
        ["1", "3", "0.3333", "0 (33.3%)"],
        ["0", "2", "1.0000", "\u2013"],
    ]


def test_the_figures_are_described_and_their_points_are_the_curve(example):
    page, text = page_of(*FILES)
    figures = re.findall(r"<svg .*?</svg>", text)
    assert len(figures) == 3
    for figure in figures:
        names = re.search(r'role="img" aria-labelledby="(\S+) (\S+)"', figure)
        assert names is not None
        assert f'<title id="{names[1]}">' in figure and f'<desc id="{names[2]}">' in figure
    assert len({value for _, name, value in page.attributes if name == "id"}) == 6
    points = re.findall(r"<circle [^>]*><title>k = (\d+): ([\d.]+)</title>", figures[0])
    assert points == [("1", "0.8000"), ("2", "0.8000"), ("5", "1.0000")]
    # On an axis from 0.8 to 1 the first point lies on its lower end and the last on its upper.
    heights = [float(height) for height in re.findall(r'<circle [^>]*cy="([\d.]+)"', figures[0])]
    assert heights == [_up(0), _up(0), _up(1)]
    assert "The axis begins at 0.8." in page.texts["figcaption"][0]


def test_the_page_stands_alone_and_does_not_change(example):
    page, text = page_of(*FILES)
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img", text)
    assert not [name for _, name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert ("html", "lang", "en") in page.attributes
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert {value for tag, name, value in page.attributes if (tag, name) == ("th", "scope")} == {"row", "col"}
    assert page_of(*FILES)[1] == text


def test_names_are_text_whatever_they_hold(example):
    names = ["<script>alert('x')</script> & \"co\"", "שלום " * 30, "日本語"]
    np.save("l.npy", [names[code] for code in CLASSES])
    embeddings = "<b>\"e\" & 'x'.npy"
    np.save(embeddings, POINTS)
    page, text = page_of("--embeddings", embeddings, "--labels", "l.npy")
    assert "<script" not in text and '<b>"e' not in text
    assert page.texts["h1"][0] == f"Retrieval evaluation: {embeddings}"
    assert [row[0] for row in page.tables["Worst classes"][1:]] == [names[1][:59] + "…", names[0]]
    assert ("bdi", "title", names[1]) in page.attributes


def test_a_label_without_text_is_called_empty(example):
    np.save("l.npy", np.array(["", "x", "z"])[CLASSES])
    page, _ = page_of(*FILES)
    assert page.tables["Classes most often confused"][1] == ["x", "(empty)", "1", "33.3%"]


def test_a_path_that_is_no_text_is_shown_all_the_same(example):
    os.rename(b"l.npy", b"l\xff.npy")
    assert main(["evaluate", "--embeddings", "e.npy", "--labels", "l\udcff.npy", "--report", "r.html"]) == 0
    assert "<bdi>l\\udcff.npy</bdi>" in Path("r.html").read_text(encoding="utf-8")


EDGES = {
    "one class": (POINTS, [3] * 6, "Other-class pairs: there are none."),
    "all lone": (POINTS, range(6), "Nothing to draw: every query is lone."),
    "one row": (POINTS[:1], ["x"], "Nothing to draw: there are no pairs"),
    "two rows": (POINTS[:2], ["x", "x"], "None: the nearest reference of every query is of the same class."),
    "equal rows": (np.ones((8, 2), np.float32), [0, 1] * 4, "Same-class pairs: all 24; median 0."),
    "beyond float64": (POINTS.astype(np.float64) * 1e200, CLASSES, "or none with a value below 1e300"),
    "two classes": (np.arange(300, dtype=np.float32)[:, None], [0, 1] * 150, "All 2 classes by"),
    "many classes": (np.arange(5000.0)[:, None], np.arange(5000) // 2, "The lowest 10 of 2,500 classes by"),
}


@pytest.mark.parametrize("kind", EDGES)
def test_the_page_of_unusual_sets(kind):
    rows, labels, words = EDGES[kind]
    task = task_of(rows, labels)
    evaluation = evaluate_task(task, [*BUILT_IN, *OTHERS], details=True)
    text = page_text(task, evaluation, {"embeddings": "e.npy"})
    shown = re.sub("<[^>]*>", "", text)
    assert words in shown
    assert "nan" not in shown and not re.search(r'="[^"]*(nan|inf)[^"]*"', text)
    page = Page(text)
    assert [row[1] for row in page.tables["Metrics"][1:]] == [
        "undefined" if kind in ("all lone", "one row") else f"{mean_of(values):.4f}"
        for values in evaluation.values.values()
    ]
