"""``select_threshold``: which thresholds there are, which one wins, and that it decides as it was counted."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactknn.distances import CosineSimilarity, LpDistance
from exactknn.evaluation import (
    MatchCounts,
    match_accuracy,
    match_balanced_accuracy,
    match_f1,
    match_recall_at_fmr,
    select_threshold,
    threshold_curve,
)
from tests.python.evaluation.threshold_helpers import (
    CASES,
    DTYPES,
    INF,
    METRICS,
    NAN,
    SIMILARITIES,
    as_numpy,
    by_loop,
    labelled_scores,
)

DISTANCES = ([0.125, 0.25, 0.25, 0.75, 1.25], [True, True, False, False, False])


def false_minus_true(counts):
    return counts.false_positives - counts.true_positives


# What is asked for, by hand.
def test_similarities_by_hand():
    thresholds, counts = threshold_curve(*SIMILARITIES, is_inverted=True)
    assert thresholds.tolist() == [INF, 0.90625, 0.75, 0.5625, 0.3125, 0.125]
    assert counts.true_positives.tolist() == [0, 1, 2, 2, 3, 3]
    assert counts.false_positives.tolist() == [0, 0, 0, 1, 1, 2]
    assert counts.true_negatives.tolist() == [2, 2, 2, 1, 1, 0]
    assert counts.false_negatives.tolist() == [3, 2, 1, 1, 0, 0]
    assert select_threshold(*SIMILARITIES, match_f1, is_inverted=True) == (0.3125, 6 / 7)
    assert select_threshold(*SIMILARITIES, match_accuracy, is_inverted=True) == (0.75, 0.8)
    found = select_threshold(*SIMILARITIES, match_balanced_accuracy, is_inverted=True)
    assert found.threshold == 0.75
    assert found.value == pytest.approx(5 / 6, rel=1e-15)


def test_distances_by_hand():
    thresholds, counts = threshold_curve(*DISTANCES, is_inverted=False)
    assert thresholds.tolist() == [-INF, 0.1875, 0.5, 1.0, 1.25]
    assert counts.true_positives.tolist() == [0, 1, 2, 2, 2]
    assert counts.false_positives.tolist() == [0, 0, 1, 2, 3]
    assert select_threshold(*DISTANCES, match_f1, is_inverted=False) == (0.5, 0.8)
    assert select_threshold(*DISTANCES, match_accuracy, is_inverted=False) == (0.1875, 0.8)
    found = select_threshold(*DISTANCES, match_balanced_accuracy, is_inverted=False)
    assert found.threshold == 0.5
    assert found.value == pytest.approx(5 / 6, rel=1e-15)


def test_rejecting_all_can_be_best():
    labels = [False, False, True]
    assert select_threshold([0.75, 0.5, 0.25], labels, match_accuracy, is_inverted=True) == (INF, 2 / 3)
    assert select_threshold([0.25, 0.5, 0.75], labels, match_accuracy, is_inverted=False) == (-INF, 2 / 3)


def test_accepting_all_can_be_best():
    labels = [False, True, True]
    assert select_threshold([0.75, 0.5, 0.25], labels, match_f1, is_inverted=True) == (0.25, 0.8)
    assert select_threshold([0.25, 0.5, 0.75], labels, match_f1, is_inverted=False) == (0.75, 0.8)


@pytest.mark.parametrize(
    ("dtype", "similarity"),
    [
        (torch.float16, 1.0009765625),
        (torch.bfloat16, 1.0078125),
        (torch.float32, 1.0000001192092896),
        (torch.float64, 1.0000000000000002),
    ],
)
def test_between_adjacent_values_the_matching_one_is_the_threshold(dtype, similarity):
    scores = torch.tensor([similarity, 1.0], dtype=dtype)
    assert scores[0] == similarity
    assert select_threshold(scores, [True, False], match_f1, is_inverted=True) == (similarity, 1.0)
    assert select_threshold(scores.flip(0), [True, False], match_f1, is_inverted=False) == (1.0, 1.0)


def test_recall_where_few_non_matches_are_accepted():
    def by_hand(counts):
        tp, fp, tn, fn = counts
        return torch.where(fp / (fp + tn) <= 0.01, tp / (tp + fn), NAN)

    for metric in (by_hand, match_recall_at_fmr(0.01)):
        assert select_threshold(*SIMILARITIES, metric, is_inverted=True) == (0.75, 2 / 3)


def test_equal_scores_are_never_separated():
    assert select_threshold([0.5, 0.5], [True, False], match_f1, is_inverted=True) == (0.5, 2 / 3)
    curve = threshold_curve([1.0] * 200, [True] * 120 + [False] * 80, is_inverted=True)
    assert curve.thresholds.tolist() == [INF, 1.0]
    assert curve.counts.true_positives.tolist() == [0, 120]
    assert curve.counts.false_positives.tolist() == [0, 80]
    tied = [0.9, 0.8, 0.8, 0.3], [True, True, False, False]
    assert select_threshold(*tied, match_accuracy, is_inverted=True) == ((0.9 + 0.8) / 2, 0.75)
    assert threshold_curve(*tied, is_inverted=True).thresholds.tolist() == [INF, (0.9 + 0.8) / 2, (0.8 + 0.3) / 2, 0.3]


def test_midpoints_do_not_overflow():
    found = select_threshold([1.7e308, 1.6e308], [False, True], false_minus_true, is_inverted=True)
    assert found.threshold == pytest.approx(1.65e308, rel=1e-15)
    assert found.value == 1.0
    halves = torch.tensor([60000.0, 65504.0, -65504.0], dtype=torch.float16)
    assert threshold_curve(halves, [True, False, True], is_inverted=False).thresholds.tolist() == [
        -INF,
        (60000 - 65504) / 2,
        (60000 + 65504) / 2,
        65504,
    ]


def test_both_zeros_are_one_score():
    curve = threshold_curve([0.0, -0.0, -1.0], [True, False, False], is_inverted=True)
    assert curve.thresholds.tolist() == [INF, -0.5, -1.0]
    weakest = threshold_curve([-0.0, 0.0, 1.0], [True, False, False], is_inverted=True).thresholds[-1]
    assert weakest == 0
    assert not weakest.signbit()


def test_verification():
    pairs = torch.tensor([[1.0, 0.1], [1.0, 0.3], [0.2, 1.0], [-1.0, 0.0]])
    labels = torch.tensor([True, True, False, False])
    scores = CosineSimilarity().pairwise(torch.tensor([[1.0, 0.0]]).expand(4, 2), pairs)
    assert scores.tolist() == pytest.approx([0.995037, 0.957826, 0.196116, -1], rel=1e-5)
    threshold, value = select_threshold(scores, labels, match_accuracy, is_inverted=True)
    assert threshold == pytest.approx(0.576971, rel=1e-5)
    assert value == 1.0
    assert (scores >= threshold).tolist() == labels.tolist()


def test_one_shot_with_an_unknown_class():
    references = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    queries = torch.tensor([[1.0, 0.1], [0.1, 1.0], [1.0, 1.0], [-1.0, -2.0]])
    known = torch.tensor([True, True, False, False])
    best = CosineSimilarity()(queries, references).max(dim=1).values
    assert best.tolist() == pytest.approx([0.995037, 0.995037, 0.707107, -0.447214], rel=1e-5)
    for metric in (match_accuracy, match_recall_at_fmr(0.0)):
        threshold, value = select_threshold(best, known, metric, is_inverted=CosineSimilarity().is_inverted)
        assert threshold == pytest.approx(0.851072, rel=1e-5)
        assert value == 1.0
        assert (best >= threshold).tolist() == known.tolist()


def test_the_distances_of_the_package_say_their_direction():
    x = torch.randn(40, 3, generator=torch.manual_seed(0))
    labels = torch.arange(40) % 2 == 0
    y = torch.where(labels[:, None], x + 0.01, -x)
    for distance in (LpDistance(normalize_embeddings=False), CosineSimilarity()):
        scores = distance.pairwise(x, y)
        found = select_threshold(scores, labels, match_f1, is_inverted=distance.is_inverted)
        assert found.value == 1.0


def choose(thresholds, values):
    best = None
    for threshold, value in zip(thresholds, values, strict=True):
        if not math.isnan(value) and (best is None or value > best[1]):
            best = threshold, value
    return best


@settings(max_examples=250, deadline=None)
@given(labelled_scores(), st.booleans())
def test_agrees_with_a_loop_over_all_candidates(pairs, is_inverted):
    scores, labels = pairs
    thresholds, counts = by_loop(scores, labels, is_inverted)
    curve = threshold_curve(scores, labels, is_inverted=is_inverted)
    assert curve.thresholds.tolist() == thresholds
    assert list(zip(*(field.tolist() for field in curve.counts), strict=True)) == counts
    for metric in METRICS:
        values = [float(metric(MatchCounts(*count))) for count in counts]
        found = select_threshold(scores, labels, metric, is_inverted=is_inverted)
        assert found == choose(thresholds, values)
        assert {type(field) for field in found} == {float}


@settings(max_examples=250, deadline=None)
@given(labelled_scores(), st.booleans())
def test_the_decisions_counted_are_the_decisions_made(pairs, is_inverted):
    scores, labels = pairs
    is_match = torch.tensor(labels)
    thresholds, counts = threshold_curve(scores, labels, is_inverted=is_inverted)
    array, wide = as_numpy(scores), scores.double()
    for threshold, *counted in zip(thresholds.tolist(), *(field.tolist() for field in counts), strict=True):
        if is_inverted:
            made = [scores >= threshold, array >= threshold, wide >= threshold]
        else:
            made = [scores <= threshold, array <= threshold, wide <= threshold]
        for decided in made:
            decided = torch.as_tensor(decided)
            assert [int(((decided == d) & (is_match == y)).sum()) for d, y in CASES] == counted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_inverted", [False, True])
def test_many_scores_with_ties(dtype, is_inverted):
    generator = torch.Generator().manual_seed(5)
    labels = torch.rand(30_000, generator=generator) < 0.3
    scores = (torch.randn(30_000, generator=generator) + labels.float() * (1 if is_inverted else -1)).to(dtype)
    for metric in (*METRICS, match_recall_at_fmr(0.05)):
        threshold, value = select_threshold(scores, labels, metric, is_inverted=is_inverted)
        accepted = scores >= threshold if is_inverted else scores <= threshold
        counts = MatchCounts(*(((accepted == d) & (labels == y)).sum() for d, y in CASES))
        assert float(metric(counts)) == value
        curve = threshold_curve(scores, labels, is_inverted=is_inverted)
        assert value == float(metric(curve.counts).nan_to_num(-1).max())
    assert len(curve.thresholds) == len(scores.double().unique()) + 1


# Which candidate wins.
def test_a_nan_is_left_out_and_the_strictest_of_equals_wins():
    scores, labels = [1.0, 2.0, 3.0], [True, False, True]

    def returns(*values, dtype=None):
        return select_threshold(scores, labels, lambda counts: torch.tensor(values, dtype=dtype), is_inverted=False)

    assert returns(NAN, 1.0, 2.0, 2.0) == (2.5, 2.0)
    assert returns(NAN, -INF, NAN, -INF) == (1.5, -INF)
    assert returns(0.0, INF, NAN, INF) == (1.5, INF)
    assert returns(0, 3, 7, 7) == (2.5, 7.0)
    assert returns(False, False, True, True) == (2.5, 1.0)
    assert returns(0.1, 0.5, 0.25, 0.0, dtype=torch.float16) == (1.5, 0.5)
    assert returns(0.1, 0.5, 0.25, 0.0, dtype=torch.bfloat16) == (1.5, 0.5)
    negated = torch.imag(torch.tensor([0j, 1j, -2j, 0j], dtype=torch.complex128).conj())
    assert select_threshold(scores, labels, lambda counts: negated, is_inverted=False) == (2.5, 2.0)


def test_the_metric_is_called_once_with_plain_counts():
    calls = []

    def metric(*args, **kwargs):
        calls.append((args, kwargs))
        return (args[0].true_positives * torch.ones(4, requires_grad=True)).double()

    assert select_threshold(torch.rand(3, requires_grad=True), [True, False, True], metric, is_inverted=True).value == 2
    [([counts], kwargs)] = calls
    assert kwargs == {}
    assert type(counts) is MatchCounts
    assert MatchCounts._fields == ("true_positives", "false_positives", "true_negatives", "false_negatives")
    for field in counts:
        assert (field.dtype, field.shape, field.device.type) == (torch.float64, (4,), "cpu")
        assert not field.requires_grad


def test_what_the_metric_raises_arrives():
    error = LookupError("mine")

    def metric(counts):
        raise error

    with pytest.raises(LookupError) as caught:
        select_threshold([0.5, 0.25], [True, False], metric, is_inverted=True)
    assert caught.value is error
