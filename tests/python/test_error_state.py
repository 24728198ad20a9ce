"""No result depends on NumPy's error state of the caller."""

import numpy as np
import pytest
import torch

import exactknn
from exactknn import distances, plots
from exactknn._arrays.matrix import as_pair
from exactknn._retrieval.evaluate import evaluate
from exactknn._retrieval.metrics import BUILT_IN
from exactknn._retrieval.pairs import pair_sample
from exactknn._retrieval.task import Task
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
from exactknn.sklearn import ExactNeighborsTransformer

METRICS = ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev", "minkowski")
TYPES = (np.float16, np.float32, np.float64)
NAMES = (*BUILT_IN, "precision_at_3", "recall_at_3", "found_fraction_at_3", "ndcg_at_4", "knn_softmax_accuracy_at_3")
DISTANCES = (
    distances.LpDistance(),
    distances.LpDistance(normalize_embeddings=False, p=1),
    distances.LpDistance(normalize_embeddings=False, p=3, power=2),
    distances.CosineSimilarity(),
    distances.DotProductSimilarity(),
    distances.SNRDistance(),
)
LABELS = np.arange(24) % 4


def rows_of(dtype):
    """Return rows of ordinary, zero, denormal and huge values, two of them equal."""
    rows = np.random.default_rng(4).standard_normal((24, 5)).astype(dtype)
    limits = np.finfo(dtype)
    rows[0], rows[1], rows[2], rows[4] = 0, limits.smallest_subnormal, limits.max / 8, rows[3]
    rows[5, 0] = limits.tiny
    return rows


def with_p(metric):
    return {"metric": metric, **({"p": 3} if metric == "minkowski" else {})}


def plain(result):
    """Return results in a form that can be compared with ``==``, by their bytes."""
    if isinstance(result, (np.ndarray, torch.Tensor)):
        return str(result.dtype), tuple(result.shape), np.asarray(result).tobytes()
    if isinstance(result, dict):
        return {name: plain(value) for name, value in result.items()}
    if isinstance(result, (tuple, list)):
        return [plain(value) for value in result]
    return repr(result)


def searches(dtype):
    rows, few = rows_of(dtype), rows_of(dtype)[:7]
    for metric in METRICS:
        yield exactknn.knn(few, rows, 5, **with_p(metric))
        yield exactknn.knn(rows, None, None, **with_p(metric))
        yield exactknn.radius(rows, None, 1.0, **with_p(metric))
        yield exactknn.knn(few, iter([rows[:9], rows[9:]]), 5, **with_p(metric))


def indexes(dtype):
    rows = rows_of(dtype)
    for metric in METRICS:
        for stored in ("float16", "bfloat16", "float32", "float64"):
            index = exactknn.Index(**with_p(metric), dtype=stored)
            index.add(rows[8:])
            index.add(rows[:2])
            query = rows if stored == "float64" else rows_of(np.float32)
            yield index.search(query, 3)
            yield index.radius(query, 1.0)
            yield index.ranks(query[:1], [[0, 3]])
            yield index.rows()


def evaluations(dtype):
    rows = rows_of(dtype)
    yield AccuracyCalculator(include=NAMES).get_accuracy(rows, LABELS)
    yield AccuracyCalculator(include=NAMES, k=3, return_per_class=True).get_accuracy(rows[:9], LABELS[:9], rows, LABELS)
    for distance in DISTANCES:
        calculator = AccuracyCalculator(include=NAMES, k=3, avg_of_avgs=True, knn_func=CustomKNN(distance))
        yield calculator.get_accuracy(rows, LABELS)


def custom_metrics(dtype):
    rows = rows_of(dtype)
    smallest = RetrievalMetric(lambda inputs: torch.full((24,), 5e-324, dtype=torch.float64), neighbors=1)
    custom = {
        "graded": ndcg_metric(lambda x, y: (x == y).double() * 1e-300),
        "smallest": smallest,
        "vote": knn_vote_metric(5, weights="softmax", temperature=1e-3),
    }
    for averages in ({}, {"avg_of_avgs": True}, {"return_per_class": True}):
        yield AccuracyCalculator(include=tuple(custom), custom_metrics=custom, **averages).get_accuracy(rows, LABELS)


def tasks(dtype):
    for metric in METRICS:
        task = Task.of(as_pair(rows_of(dtype)), LABELS, None, metric, 3 if metric == "minkowski" else None)
        scores = evaluate(task, (*NAMES, "knn_accuracy_at_2"), details=True)
        yield scores.values
        yield scores.details.nearest_class, scores.details.relevant_at
        for same_class in (True, False):
            yield pair_sample(task, same_class=same_class).values


def backends(dtype):
    rows = torch.from_numpy(rows_of(dtype))
    for distance in DISTANCES:
        for knn_func in (RustKNN(distance), CustomKNN(distance, batch_size=5)):
            yield knn_func(rows, 3, rows, True)
    if dtype != np.float64:
        yield FaissKNN()(rows[6:], 3, rows[6:], True)
    yield FaissKMeans()(rows[6:].float(), 2).shape


def matches(dtype):
    rows = torch.from_numpy(rows_of(dtype))
    for distance in DISTANCES:
        finder = MatchFinder(distance, 0.5)
        yield finder.get_matching_pairs(rows)
        yield finder.is_match(rows, rows.flip(0))
        yield finder.pairwise(rows, rows.flip(0))


def thresholds(dtype):
    scores = rows_of(dtype).ravel()
    labels = np.arange(len(scores)) % 3 == 0
    for is_inverted in (True, False):
        yield tuple(threshold_curve(scores, labels, is_inverted=is_inverted))
        yield equal_error_rate(scores, labels, is_inverted=is_inverted)
        for metric in (match_f1, match_recall_at_fmr(0.1)):
            yield select_threshold(scores, labels, metric, is_inverted=is_inverted)


def others(dtype):
    rows = rows_of(dtype)
    near, indices = exactknn.knn(rows[6:], None, 3)
    yield exactknn.recall(indices, indices, near, near)
    yield exactknn.recall(indices[:, ::-1], indices)
    transformer = ExactNeighborsTransformer(3, metric="cosine").fit(rows[6:])
    yield transformer.transform(rows[6:9]).toarray()
    embeddings = torch.from_numpy(rows).requires_grad_()
    RankedListLoss(1.0, 10.0)(embeddings, torch.from_numpy(LABELS)).backward()
    yield embeddings.grad


def figures(dtype):
    scores = rows_of(dtype).ravel()[15:]
    labels = np.arange(len(scores)) % 3 == 0
    for draw in (plots.plot_roc, plots.plot_det, plots.plot_precision_recall):
        yield [line.get_xydata() for line in draw(scores, labels, is_inverted=True).axes[0].lines]
    plots.plot_threshold(scores, labels, match_f1, is_inverted=False)
    plots.plot_score_histogram(scores, labels, is_inverted=False)


QUESTIONS = (searches, indexes, evaluations, custom_metrics, tasks, backends, matches, thresholds, others, figures)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.__name__)
def test_results_do_not_depend_on_the_error_state(question, dtype):
    with np.errstate(all="ignore"):
        wanted = [plain(result) for result in question(dtype)]
    with np.errstate(all="raise"):
        found = [plain(result) for result in question(dtype)]
    assert found == wanted


def test_softmax_votes_of_rows_far_apart():
    calculator = AccuracyCalculator(include=("knn_softmax_accuracy_at_2",))
    with np.errstate(all="raise"):
        found = calculator.get_accuracy([[0.0]], [1], [[0.0], [90.0]], [1, 0])
    assert found == {"knn_softmax_accuracy_at_2": 1.0}
