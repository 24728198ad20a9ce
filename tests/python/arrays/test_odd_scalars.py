"""Every public function that takes numbers, names, flags or functions, with odd ones: taken, or refused by name."""

import re

import numpy as np
import pytest
import torch

import exactknn
from exactknn import Index, plots
from exactknn.distances import BatchedDistance, CosineSimilarity, LpDistance, SNRDistance
from exactknn.evaluation import (
    AccuracyCalculator,
    CustomKNN,
    FaissKMeans,
    FaissKNN,
    MatchFinder,
    RetrievalMetric,
    RustKNN,
    equal_error_rate,
    knn_vote_metric,
    match_f1,
    match_recall_at_fmr,
    ndcg_metric,
    select_threshold,
    threshold_curve,
)
from exactknn.losses import RankedListLoss
from exactknn.reducers import ClassWeightedReducer, MultipleReducers, PerAnchorReducer, ThresholdReducer
from exactknn.sklearn import ExactNeighborsTransformer

ROWS = np.array([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0], [-2.0, 5.0]])
TENSOR = torch.tensor(ROWS)
LABELS = torch.tensor([0, 0, 1, 1])
SCORES, PAIRS = TENSOR[:, 0].clone(), torch.tensor([True, False, True, False])
VECTORS = {"query": [[1.0]], "reference": [[0.0]]}
INDEX = Index()
INDEX.add(ROWS)
FINDER = MatchFinder(LpDistance(), 1.0)
CALCULATOR = AccuracyCalculator()


def transformer(**options):
    return ExactNeighborsTransformer(**{"n_neighbors": 1} | options).fit(ROWS)


# By kind of argument: its name, and calls with the odd value as that argument.
COUNTS = {
    "k": [
        lambda v: exactknn.knn(ROWS, ROWS, v),
        lambda v: INDEX.search(ROWS, v),
        lambda v: CustomKNN(LpDistance())(TENSOR, v, TENSOR),
        lambda v: RustKNN()(TENSOR, v, TENSOR),
        lambda v: FaissKNN()(TENSOR, v, TENSOR),
        lambda v: AccuracyCalculator(k=v),
        knn_vote_metric,
        lambda v: ndcg_metric(torch.eq, v),
    ],
    "num_threads": [
        lambda v: exactknn.knn(ROWS, k=1, num_threads=v),
        lambda v: exactknn.radius(ROWS, r=1, num_threads=v),
        lambda v: Index(num_threads=v),
        lambda v: Index().add(ROWS, num_threads=v),
        lambda v: INDEX.search(ROWS, 1, num_threads=v),
        lambda v: INDEX.ranks(ROWS, [[0]] * 4, num_threads=v),
        lambda v: RustKNN(num_threads=v),
    ],
    "batch_size": [
        lambda v: CustomKNN(LpDistance(), v),
        lambda v: RustKNN(None, v),
        lambda v: BatchedDistance(LpDistance(), print, v),
    ],
    "start": [lambda v: INDEX.rows(v)],
    "stop": [lambda v: INDEX.rows(0, v)],
    "num_clusters": [lambda v: FaissKMeans()(TENSOR, v)],
    "neighbors": [lambda v: RetrievalMetric(len, neighbors=v)],
    "n_neighbors": [lambda v: transformer(n_neighbors=v), lambda v: transformer().kneighbors(None, v)],
}
NUMBERS = {
    "p": [
        lambda v: exactknn.knn(ROWS, k=1, metric="minkowski", p=v),
        lambda v: exactknn.radius(ROWS, r=1, metric="minkowski", p=v),
        lambda v: Index("minkowski", p=v),
        lambda v: exactknn.recall([[0]], [[0]], **VECTORS, metric="minkowski", p=v),
        lambda v: transformer(metric="minkowski", p=v),
        lambda v: LpDistance(p=v),
        lambda v: SNRDistance(p=v),
        lambda v: CosineSimilarity(p=v),
    ],
    "power": [lambda v: LpDistance(power=v), lambda v: SNRDistance(power=v), lambda v: CosineSimilarity(power=v)],
    "r": [lambda v: exactknn.radius(ROWS, r=v), lambda v: INDEX.radius(ROWS, v)],
    "tolerance": [lambda v: exactknn.recall([[0]], [[0]], [[0.0]], [[0.0]], tolerance=v)],
    "threshold": [
        lambda v: MatchFinder(LpDistance(), v),
        lambda v: FINDER.get_match_matrix(TENSOR, threshold=v),
        lambda v: FINDER.is_match(TENSOR, TENSOR, v),
        lambda v: plots.plot_score_histogram(SCORES, PAIRS, is_inverted=False, threshold=v),
    ],
    "temperature": [lambda v: knn_vote_metric(3, temperature=v)],
    "rate": [match_recall_at_fmr],
    "margin": [lambda v: RankedListLoss(v, 10)],
    "neg_temperature": [lambda v: RankedListLoss(0.4, v)],
    "imbalance": [lambda v: RankedListLoss(0.4, 10, v)],
    "alpha": [lambda v: RankedListLoss(0.4, 10, alpha=v)],
    "pos_temperature": [lambda v: RankedListLoss(0.4, 10, pos_temperature=v)],
    "embedding_reg_weight": [lambda v: RankedListLoss(0.4, 10, embedding_reg_weight=v)],
    "low": [lambda v: ThresholdReducer(low=v)],
}
FLAGS = {
    "exclude_self": [
        lambda v: exactknn.knn(ROWS, ROWS, 1, exclude_self=v),
        lambda v: exactknn.radius(ROWS, ROWS, 1, exclude_self=v),
        lambda v: INDEX.search(ROWS, 1, exclude_self=v),
        lambda v: INDEX.radius(ROWS, 1.0, exclude_self=v),
        lambda v: INDEX.ranks(ROWS, [[0]] * 4, exclude_self=v),
    ],
    "ref_includes_query": [
        lambda v: CustomKNN(LpDistance())(TENSOR, 1, TENSOR, v),
        lambda v: CustomKNN(LpDistance(), backend="torch")(TENSOR, 1, TENSOR, v),
        lambda v: RustKNN()(TENSOR, 1, TENSOR, v),
        lambda v: RustKNN(reset_before=False)(TENSOR, 1, TENSOR, v),
        lambda v: FaissKNN()(TENSOR, 1, TENSOR, v),
        lambda v: CALCULATOR.get_accuracy(TENSOR, LABELS, TENSOR, LABELS, v),
    ],
    "return_distances": [
        lambda v: exactknn.radius(ROWS, r=1, return_distances=v),
        lambda v: INDEX.radius(ROWS, 1.0, return_distances=v),
    ],
    "sort": [lambda v: exactknn.radius(ROWS, r=1, sort=v), lambda v: INDEX.radius(ROWS, 1.0, sort=v)],
    "mmap": [lambda v: Index.load("no file", mmap=v)],
    "per_query": [lambda v: exactknn.recall([[0]], [[0]], per_query=v)],
    "reset_before": [lambda v: RustKNN(reset_before=v), lambda v: FaissKNN(reset_before=v)],
    "reset_after": [lambda v: RustKNN(reset_after=v), lambda v: FaissKNN(reset_after=v)],
    "return_tuples": [lambda v: FINDER.get_matching_pairs(TENSOR, return_tuples=v)],
    "avg_of_avgs": [lambda v: AccuracyCalculator(avg_of_avgs=v)],
    "return_per_class": [lambda v: AccuracyCalculator(return_per_class=v)],
    "is_inverted": [
        lambda v: select_threshold(SCORES, PAIRS, match_f1, is_inverted=v),
        lambda v: threshold_curve(SCORES, PAIRS, is_inverted=v),
        lambda v: equal_error_rate(SCORES, PAIRS, is_inverted=v),
        lambda v: LpDistance(is_inverted=v),
        lambda v: SNRDistance(is_inverted=v),
    ],
    "normalize_embeddings": [lambda v: LpDistance(normalize_embeddings=v)],
    "progress": [lambda v: exactknn.knn(ROWS, k=1, progress=v), lambda v: INDEX.search(ROWS, 1, progress=v)],
}
NAMES = {
    "metric": [
        lambda v: exactknn.knn(ROWS, k=1, metric=v),
        lambda v: exactknn.radius(ROWS, r=1, metric=v),
        Index,
        lambda v: exactknn.recall([[0]], [[0]], **VECTORS, metric=v),
        lambda v: transformer(metric=v),
    ],
    "dtype": [lambda v: Index(dtype=v)],
    "level": [exactknn.set_simd_level],
    "path": [Index.load, INDEX.save],
    "backend": [lambda v: CustomKNN(LpDistance(), backend=v)],
    "weights": [lambda v: knn_vote_metric(3, weights=v)],
    "mode": [lambda v: transformer(mode=v)],
    "device": [lambda v: AccuracyCalculator(device=v)],
    "include": [lambda v: AccuracyCalculator(include=v), lambda v: CALCULATOR.get_accuracy(TENSOR, LABELS, include=v)],
    "max_memory": [lambda v: exactknn.knn(ROWS, k=1, max_memory=v)],
}
OBJECTS = {
    "distance": [CustomKNN, RustKNN, MatchFinder, BatchedDistance, lambda v: RankedListLoss(0.4, 10, distance=v)],
    "metric": [lambda v: select_threshold(SCORES, PAIRS, v, is_inverted=False)],
    "reducer": [lambda v: RankedListLoss(0.4, 10, reducer=v), PerAnchorReducer],
    "reducers": [MultipleReducers, lambda v: MultipleReducers({"loss": v})],
    "default_reducer": [lambda v: MultipleReducers({}, v)],
    "aggregation_func": [lambda v: PerAnchorReducer(aggregation_func=v)],
    "embedding_regularizer": [lambda v: RankedListLoss(0.4, 10, embedding_regularizer=v)],
    "weights": [lambda v: ClassWeightedReducer([v, 1.0])],
    "relevance_fn": [ndcg_metric],
    "knn_func": [lambda v: AccuracyCalculator(knn_func=v)],
    "kmeans_func": [lambda v: AccuracyCalculator(kmeans_func=v)],
    "label_comparison_fn": [lambda v: AccuracyCalculator(label_comparison_fn=v)],
    "custom_metrics": [lambda v: AccuracyCalculator(custom_metrics=v)],
    "index_init_fn": [lambda v: FaissKNN(index_init_fn=v)],
    "gpus": [lambda v: FaissKNN(gpus=v)],
    "ax": [lambda v: plots.plot_roc(SCORES, PAIRS, is_inverted=False, ax=v)],
}

ANYTHING = {
    "an object": object(),
    "an array": np.ones(2),
    "a tensor": torch.ones(2),
    "bytes": b"x",
    "a complex number": 1j,
}
TEXT = {"text": "unknown"}
ODD = {
    "counts": (COUNTS, ANYTHING | TEXT | {"a fraction": 1.5, "NaN": float("nan"), "a bool": True, "below 0": -1}),
    "numbers": (NUMBERS, ANYTHING | TEXT | {"NaN": float("nan"), "a huge integer": 10**400}),
    "flags": (FLAGS, ANYTHING | TEXT | {"1": 1, "a list": [True]}),
    "names": (NAMES, ANYTHING | {"a fraction": 1.5, "a bool": True}),
    "objects": (OBJECTS, ANYTHING | TEXT),
}
CASES = [
    pytest.param(name, call, value, id=f"{name}-{i}-{odd}")
    for kinds, values in ODD.values()
    for name, calls in kinds.items()
    for i, call in enumerate(calls)
    for odd, value in values.items()
]


@pytest.mark.parametrize(("name", "call", "value"), CASES)
def test_it_is_refused_by_name(name, call, value):
    with pytest.raises((TypeError, ValueError)) as refused:
        call(value)
    said = [str(refused.value), *getattr(refused.value, "__notes__", [])]
    assert re.search(rf"\b{name}\b", "\n".join(said)), f"no {name} in {type(refused.value).__name__}: {said}"
