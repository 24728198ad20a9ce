"""The calculator's values beside those of pytorch-metric-learning, torchmetrics and scikit-learn."""

import math

import numpy as np
import pytest
import torch
import torchmetrics.functional.retrieval as peer
from pytorch_metric_learning.distances import LpDistance as PMLLpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator as PMLAccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN as PMLCustomKNN
from sklearn.metrics import ndcg_score
from sklearn.neighbors import KNeighborsClassifier

from exactknn._retrieval.votes import Vote
from exactknn.distances import CosineSimilarity
from exactknn.evaluation import AccuracyCalculator, CustomKNN, knn_vote_metric, ndcg_metric


def problem(seed):
    """Random embeddings with classes of many sizes, some labels without a partner; alone, with or within a gallery."""
    generator = np.random.default_rng(seed)
    n, m, d = generator.integers(2, 60), generator.integers(3, 90), generator.integers(1, 9)
    classes = generator.integers(1, 12)
    weights = generator.dirichlet(np.full(classes, 0.5))
    centres = generator.normal(size=(classes, d))

    def rows(number):
        labels = generator.choice(classes, number, p=weights)
        return (
            torch.from_numpy(centres[labels] + generator.normal(size=(number, d))).float(),
            torch.from_numpy(labels * 3 - 5),
        )

    query, labels = rows(n)
    setting = ("self", "gallery", "within")[seed % 3]
    if setting == "self":
        return (query, labels), n - 1
    gallery, gallery_labels = rows(m)
    if setting == "gallery":
        return (query, labels, gallery, gallery_labels), m
    return (query, labels, torch.cat([query, gallery]), torch.cat([labels, gallery_labels]), True), n + m - 1


@pytest.mark.parametrize("by_rank", [True, False])
@pytest.mark.parametrize("seed", range(200))
def test_values_of_pytorch_metric_learning(monkeypatch, seed, by_rank):
    monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: by_rank)
    arguments, available = problem(seed)
    reference_labels = arguments[3] if len(arguments) > 2 else arguments[1]
    counts = (arguments[1][:, None] == reference_labels).sum(1) - int(len(arguments) != 4)
    ks = (None, int(1 + seed % available), "max_bin_count" if counts.max() > 0 else None)
    averages = ({}, {"avg_of_avgs": True}, {"return_per_class": True})
    options = {"k": ks[(seed // 3) % 3], **averages[(seed // 9) % 3]}
    theirs = PMLAccuracyCalculator(
        exclude=("NMI", "AMI"),
        knn_func=PMLCustomKNN(PMLLpDistance(normalize_embeddings=False, power=2)),
        device=torch.device("cpu"),
        **options,
    )
    wanted = theirs.get_accuracy(*arguments)
    found = AccuracyCalculator(**options).get_accuracy(*arguments)
    assert set(found) == set(wanted)
    for name in found:
        assert found[name] == pytest.approx(wanted[name], abs=1e-6, nan_ok=True), name


def near(x, y):
    return (x - y).abs() < 2


def first_and_other(x, y):
    return (x[..., 0] == y[..., 0]) & (x[..., 1] != y[..., 1])


def by_definition(relevance, count, k):
    """The metrics of one query, from the relevance of all its neighbours, nearest first."""
    precision = [sum(relevance[:j]) / j for j in range(1, len(relevance) + 1)]
    hits = [j for j in range(1, len(relevance) + 1) if relevance[j - 1]]
    height = min(count, k)
    return {
        "mean_average_precision": sum(precision[j - 1] for j in hits if j <= k) / count,
        "mean_average_precision_at_r": sum(precision[j - 1] for j in hits if j <= height) / count,
        "mean_reciprocal_rank": 1 / hits[0] if hits[0] <= k else 0,
        "precision_at_1": relevance[0],
        "r_precision": sum(relevance[:height]) / height,
        "precision_at_4": sum(relevance[:4]) / 4,
        "recall_at_4": any(relevance[:4]),
        "found_fraction_at_4": sum(relevance[:4]) / count,
        "ndcg_at_4": sum(1 / math.log2(j + 1) for j in hits if j <= 4)
        / sum(1 / math.log2(j + 1) for j in range(1, min(count, 4) + 1)),
    }


@pytest.mark.parametrize("by_rank", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_values_by_definition_with_any_comparison(monkeypatch, seed, by_rank):
    # Whole numbers: many ties and copies of rows. Comparisons may have a direction, or deny a label itself.
    monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: by_rank)
    generator = np.random.default_rng(seed)
    n, m, columns = generator.integers(1, 14), generator.integers(0, 18), (2,) if seed % 4 == 3 else ()
    compare = (None, torch.lt, near, first_and_other)[seed % 4]
    rows = torch.from_numpy(generator.integers(0, 3, (n + m, 2))).float()
    labels = torch.from_numpy(generator.integers(0, 4, (n + m, *columns)))
    own = bool(seed // 4 % 2)
    reference, reference_labels = (rows, labels) if own else (rows[n:], labels[n:])
    k = (None, "max_bin_count", 1, 3, 100)[seed % 5]

    squares = ((rows[:n, None] - reference) ** 2).sum(2)
    orders = [
        [j for j in np.argsort(row, kind="stable").tolist() if not (own and j == i)]
        for i, row in enumerate(squares.numpy())
    ]
    relevant = (compare or torch.eq)(labels[:n, None], reference_labels[None]).tolist()
    ranked = [[relevant[i][j] for j in order] for i, order in enumerate(orders)]
    looked_at = {None: n + m, "max_bin_count": max(map(sum, ranked))}.get(k, k)
    values = [by_definition(relevance, sum(relevance), looked_at) for relevance in ranked if any(relevance)]
    names = tuple(by_definition([True], 1, 1))
    wanted = {name: np.mean([value[name] for value in values]) if values else math.nan for name in names}
    calculator = AccuracyCalculator(include=names, k=k, label_comparison_fn=compare)
    found = calculator.get_accuracy(rows[:n], labels[:n], reference, reference_labels, own)
    assert found == {name: pytest.approx(value, abs=1e-12, nan_ok=True) for name, value in wanted.items()}


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("by_rank", [True, False])
def test_values_of_torchmetrics_and_scikit_learn(monkeypatch, k, by_rank):
    monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: by_rank)
    generator = torch.manual_seed(4)
    query, labels = torch.randn(50, 3, generator=generator), torch.randint(0, 6, (50,), generator=generator)
    reference, reference_labels = torch.randn(70, 3, generator=generator), torch.arange(70) % 5
    names = [f"{name}_at_{k}" for name in ("precision", "recall", "hit_rate", "found_fraction", "ndcg")]
    names += ["mean_average_precision", "mean_reciprocal_rank", "r_precision"]
    found = AccuracyCalculator(include=names).get_accuracy(query, labels, reference, reference_labels)
    lists = {name: [] for name in names}
    for row, label in zip(query, labels, strict=True):
        relevant = reference_labels == label
        if not relevant.any():
            continue
        scores = 1 / (1 + ((reference - row) ** 2).sum(1))
        lists[f"precision_at_{k}"].append(peer.retrieval_precision(scores, relevant, top_k=k))
        lists[f"recall_at_{k}"].append(peer.retrieval_hit_rate(scores, relevant, top_k=k))
        lists[f"hit_rate_at_{k}"].append(peer.retrieval_hit_rate(scores, relevant, top_k=k))
        lists[f"found_fraction_at_{k}"].append(peer.retrieval_recall(scores, relevant, top_k=k))
        gain = peer.retrieval_normalized_dcg(scores, relevant, top_k=k)
        assert gain == pytest.approx(ndcg_score(relevant[None].float(), scores[None], k=k), abs=1e-6)
        lists[f"ndcg_at_{k}"].append(gain)
        lists["mean_average_precision"].append(peer.retrieval_average_precision(scores, relevant))
        lists["mean_reciprocal_rank"].append(peer.retrieval_reciprocal_rank(scores, relevant))
        lists["r_precision"].append(peer.retrieval_r_precision(scores, relevant))
    assert len(lists[names[0]]) == int((labels < 5).sum()) < 50
    assert found == {name: pytest.approx(float(np.mean(values)), abs=1e-6) for name, values in lists.items()}


@pytest.mark.parametrize("k", [None, 1, 4])
def test_graded_gain_of_scikit_learn(k):
    generator = torch.manual_seed(5)
    reference, grades = torch.randn(30, 2, generator=generator), torch.randint(0, 5, (30,), generator=generator)
    query = torch.randn(8, 2, generator=generator)

    def gain(query_labels, reference_labels):
        return reference_labels + 0 * query_labels

    calculator = AccuracyCalculator(include=("ndcg",), custom_metrics={"ndcg": ndcg_metric(gain, k)})
    found = calculator.get_accuracy(query, torch.zeros(8, dtype=torch.long), reference, grades)["ndcg"]
    scores = -torch.cdist(query, reference)
    assert found == pytest.approx(ndcg_score(grades.expand(8, 30), scores, k=k), abs=1e-9)


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("temperature", [None, 0.07, 1.0])
def test_votes_of_scikit_learn(k, temperature):
    generator = torch.manual_seed(6)
    reference, labels = torch.randn(80, 4, generator=generator), torch.randint(0, 3, (80,), generator=generator)
    query, query_labels = torch.randn(40, 4, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    unit, unit_query = (torch.nn.functional.normalize(rows, dim=1).numpy() for rows in (reference, query))

    # Cosine similarity weighs the votes. scikit-learn gives a tie of equal votes to the smallest label: no such here.
    def weights(distances):
        return np.ones_like(distances) if temperature is None else np.exp((1 - distances) / (temperature or 1))

    theirs = KNeighborsClassifier(k, weights=weights, metric="cosine").fit(unit, labels)
    votes = np.sort(theirs.predict_proba(unit_query), axis=1)
    untied = votes[:, -1] > votes[:, -2]
    wanted = theirs.score(unit_query[untied], query_labels[untied])
    metric = (
        knn_vote_metric(k) if temperature is None else knn_vote_metric(k, weights="softmax", temperature=temperature)
    )
    calculator = AccuracyCalculator(
        include=("vote",), custom_metrics={"vote": metric}, knn_func=CustomKNN(CosineSimilarity())
    )
    found = calculator.get_accuracy(query[untied], query_labels[untied], reference, labels)
    assert found == {"vote": pytest.approx(wanted, abs=1e-12)}
    if temperature in (None, 0.07):
        name = f"knn_accuracy_at_{k}" if temperature is None else f"knn_softmax_accuracy_at_{k}"
        by_name = AccuracyCalculator(include=(name,), knn_func=CustomKNN(CosineSimilarity()))
        assert by_name.get_accuracy(query[untied], query_labels[untied], reference, labels)[name] == found["vote"]


def test_the_nearest_class_wins_a_tie_of_votes():
    query, reference = torch.zeros(1, 1), torch.tensor([[1.0], [2], [3], [4], [9]])
    for labels, k, wanted in (
        ([5, 2, 2, 5, 5], 4, 5),  # two votes each: 5 is nearest
        ([2, 5, 5, 2, 5], 4, 2),
        ([5, 2, 2, 5, 5], 3, 2),
        ([5, 2, 2, 5, 5], 50, 5),  # all five that there are
        ([1, 2, 3, 4, 5], 5, 1),
    ):
        name = f"knn_accuracy_at_{k}"
        calculator = AccuracyCalculator(include=(name,))
        for label in set(labels):
            found = calculator.get_accuracy(query, torch.tensor([label]), reference, torch.tensor(labels))
            assert found == {name: float(label == wanted)}


def test_weights_of_votes_where_distances_are_infinite_or_missing():
    # The first class is nearest, the second has two votes; what has no distance has no weight beside what has one.
    classes = np.array([[0, 1, 1]])
    vote = Vote(3, 0.07)
    for values, wanted in (
        ([1.0, 1.0, 1.0], 1),
        ([1.0, 1.0, math.inf], 0),
        ([math.inf, math.inf, math.inf], 1),
        ([1.0, math.nan, math.nan], 0),
        ([math.nan, math.nan, math.nan], 0),
        ([-math.inf, 1.0, 1.0], 0),
        ([3.0, 3.0, 2.9], 1),
    ):
        assert classes[0, vote.winners(classes, np.array([values]))[0]] == wanted, values
    assert classes[0, vote.winners(classes[:, :2], np.ones((1, 2)))[0]] == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"k": 0}, ValueError),
        ({"k": 2.5}, TypeError),
        ({"k": 1, "weights": "distance"}, ValueError),
        ({"k": 1, "temperature": 0}, ValueError),
        ({"k": 1, "temperature": math.inf}, ValueError),
        ({"k": 1, "temperature": "cold"}, TypeError),
        ({"k": 1, "temperature": True}, TypeError),
    ],
)
def test_wrong_votes(options, error):
    with pytest.raises(error, match=r"k must|weights must|temperature must"):
        knn_vote_metric(**options)
