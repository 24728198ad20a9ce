"""How the calculator searches: depth, ranks or neighbours, blocks."""

import copy
import gc
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

from exactknn._retrieval import engine
from exactknn.compat import accuracy_calculator as compat
from exactknn.distances import CosineSimilarity, LpDistance, SNRDistance
from exactknn.evaluation import (
    AccuracyCalculator,
    CustomKNN,
    RetrievalMetric,
    ndcg_metric,
    precision_at_k,
)
from tests.python.evaluation.accuracy_helpers import LINE, LINE_LABELS, NAMES, Spy, WithClusters, column, squared


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
    AccuracyCalculator(include=("precision_at_1",), knn_func=spy).get_accuracy(
        LINE, LINE_LABELS, LINE.clone(), LINE_LABELS
    )
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
    # Neither the core nor torch searches more than a block of queries at a time.
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


@pytest.mark.parametrize("make", [AccuracyCalculator, compat.AccuracyCalculator, WithClusters])
def test_metrics_of_clusters_do_not_ask_for_neighbours(monkeypatch, make):
    generator = torch.manual_seed(1)
    embeddings, labels = torch.randn(400, 8, generator=generator), torch.arange(400) % 40
    wanted = AccuracyCalculator().get_accuracy(embeddings, labels)
    monkeypatch.setattr(CustomKNN, "__call__", lambda *_: pytest.fail("all neighbours were requested"))
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
    result = AccuracyCalculator(include=names).get_accuracy(LINE, LINE_LABELS, LINE.clone(), LINE_LABELS)
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
