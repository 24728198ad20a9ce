"""``select_threshold``: which thresholds there are, which one wins, and that it decides as it was counted."""

import itertools
import math
import pickle
import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactknn.distances import CosineSimilarity, LpDistance
from exactknn.evaluation import (
    MatchCounts,
    ThresholdCurve,
    ThresholdSelection,
    equal_error_rate,
    match_accuracy,
    match_balanced_accuracy,
    match_f1,
    match_recall_at_fmr,
    select_threshold,
    threshold_curve,
)

INF, NAN = math.inf, math.nan
METRICS = (match_accuracy, match_balanced_accuracy, match_f1)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = dict(zip(DTYPES, (torch.int16, torch.int16, torch.int32, torch.int64), strict=True))
# The decisions in the order of ``MatchCounts``: accepted, and a match.
CASES = ((True, True), (True, False), (False, False), (False, True))
SIMILARITIES = ([0.9375, 0.875, 0.625, 0.5, 0.125], [True, True, False, True, False])
DISTANCES = ([0.125, 0.25, 0.25, 0.75, 1.25], [True, True, False, False, False])


def false_minus_true(counts):
    return counts.false_positives - counts.true_positives


def from_bits(bits, dtype):
    return torch.tensor(bits, dtype=INTEGERS[dtype]).view(dtype)


def bits_of(value, dtype):
    return int(torch.tensor([value], dtype=dtype).view(INTEGERS[dtype]))


def as_numpy(scores):
    if scores.dtype == torch.bfloat16:
        return scores.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return scores.numpy()


def follower(value, dtype):
    """The next larger value of the type."""
    array = as_numpy(torch.tensor([value, INF], dtype=dtype))
    return float(np.nextafter(array[0], array[1]))


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


# Against a plain loop over all candidates.


def has_value_between(left, right, dtype):
    return follower(min(left, right), dtype) != max(left, right)


def by_loop(scores, labels, is_inverted):
    """Thresholds and ``(tp, fp, tn, fn)``, one candidate and one pair at a time, midpoints in exact arithmetic."""
    values = [float(score) for score in scores]
    distinct = sorted({0.0 if value == 0 else value for value in values}, reverse=is_inverted)
    thresholds = [INF if is_inverted else -INF]
    for stricter, weaker in itertools.pairwise(distinct):
        middle = float((Fraction(stricter) + Fraction(weaker)) / 2)
        thresholds.append(middle if has_value_between(stricter, weaker, scores.dtype) else stricter)
    thresholds.append(distinct[-1])
    counts = []
    for accepted in range(len(distinct) + 1):
        decided = [value in distinct[:accepted] for value in values]
        counts.append(tuple(sum((d, y) == case for d, y in zip(decided, labels, strict=True)) for case in CASES))
    return thresholds, counts


def choose(thresholds, values):
    best = None
    for threshold, value in zip(thresholds, values, strict=True):
        if not math.isnan(value) and (best is None or value > best[1]):
            best = threshold, value
    return best


@st.composite
def labelled_scores(draw):
    """Scores that crowd around the edges of their type, neighbours among them, and labels of both kinds."""
    dtype = draw(st.sampled_from(DTYPES))
    largest = bits_of(torch.finfo(dtype).max, dtype)
    edges = [0, bits_of(torch.finfo(dtype).tiny, dtype), bits_of(1.0, dtype), largest]
    bases = draw(st.lists(st.sampled_from(edges) | st.integers(0, largest), min_size=1, max_size=3))
    picks = st.tuples(st.sampled_from(bases), st.integers(-2, 2), st.booleans())
    drawn = draw(st.lists(picks, min_size=2, max_size=12))
    scores = from_bits([min(max(base + step, 0), largest) for base, step, _ in drawn], dtype)
    scores = torch.where(torch.tensor([negative for *_, negative in drawn]), -scores, scores)
    labels = draw(st.lists(st.booleans(), min_size=len(drawn), max_size=len(drawn)))
    labels[:2] = True, False
    return scores, labels


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


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(2), r"one value for each of 3 candidates, shape \(3,\), got shape \(2,\)"),
        (torch.zeros(3, 1), r"got shape \(3, 1\)"),
        (torch.tensor(1.0), r"got shape \(\)"),
        (torch.full((3,), NAN), "at least one candidate, got NaN"),
        ([0.0, 1.0, 0.0], "a tensor, got list"),
        (np.zeros(3), "a tensor, got ndarray"),
        (0.5, "a tensor, got float"),
        (None, "a tensor, got NoneType"),
        (torch.zeros(3, dtype=torch.complex64), "real values, got torch.complex64"),
    ],
)
def test_a_bad_result_of_the_metric_is_refused(result, message):
    with pytest.raises(ValueError, match="^metric must return .*" + message):
        select_threshold([0.5, 0.25], [True, False], lambda counts: result, is_inverted=True)


def test_a_metric_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"^metric must be callable with one MatchCounts, got 'f1'"):
        select_threshold([0.5, 0.25], [True, False], "f1", is_inverted=True)


def test_is_inverted_is_a_keyword_that_must_be_given():
    with pytest.raises(TypeError, match="is_inverted"):
        select_threshold([0.5, 0.25], [True, False], match_f1)
    with pytest.raises(TypeError, match="positional"):
        select_threshold([0.5, 0.25], [True, False], match_f1, True)
    for function in (threshold_curve, equal_error_rate):
        with pytest.raises(TypeError, match="is_inverted"):
            function([0.5, 0.25], [True, False])
        with pytest.raises(TypeError, match="is_inverted must be True or False, got 1"):
            function([0.5, 0.25], [True, False], is_inverted=1)


# What is taken.


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([[0.5, 0.25]], r"must be 1-D, got shape \(1, 2\)"),
        (torch.tensor(0.5), r"must be 1-D, got shape \(\)"),
        (0.5, r"must be 1-D, got shape \(\)"),
        ([[0.5], [0.25, 1.0]], "must be 1-D"),
        ([], "must not be empty"),
        (torch.zeros(0), "must not be empty"),
        ([1, 0], "must hold float16 or bfloat16 or float32 or float64 values, got int64"),
        ([True, False], "got bool"),
        (torch.tensor([1, 0]), "got int64"),
        (torch.tensor([True, False]), "got bool"),
        (torch.zeros(2, dtype=torch.complex64), "got complex64"),
        (torch.zeros(2, dtype=torch.float8_e5m2), "got float8_e5m2"),
        (np.zeros(2, np.complex128), "got complex128"),
        (np.zeros(2, np.longdouble), f"got {np.dtype(np.longdouble).name}"),
        (["a", "b"], "got str"),
        (None, "1-D"),
        (np.ma.masked_array([0.5, 0.25]), "must not be a masked array"),
        (torch.tensor([0.5, 0.25]).to_sparse(), "must be a dense tensor"),
        ([0.5, NAN], "must be finite, got nan at position 1"),
        ([INF, 0.5], "must be finite, got inf at position 0"),
        ([0.5, -INF], "must be finite, got -inf at position 1"),
    ],
)
def test_bad_scores_are_refused(scores, message):
    for call in (
        lambda: select_threshold(scores, [True, False], match_f1, is_inverted=True),
        lambda: equal_error_rate(scores, [True, False], is_inverted=True),
    ):
        with pytest.raises(ValueError, match="^scores .*" + message):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
def test_the_first_score_that_is_not_finite_is_named(dtype, bad):
    scores = torch.zeros(9, dtype=dtype)
    scores[[4, 7]] = bad
    message = f"scores must be finite, got {'nan' if math.isnan(bad) else bad} at position 4"
    for given_scores in (scores, as_numpy(scores)):
        with pytest.raises(ValueError, match=re.escape(message)):
            threshold_curve(given_scores, [True] + [False] * 8, is_inverted=False)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 0], "must hold bool values, got int64"),
        (torch.tensor([1, 0]), "must hold bool values, got int64"),
        (np.array([1.0, 0.0]), "must hold bool values, got float64"),
        ([True, None], "must hold bool values, got object"),
        ([], "must not be empty"),
        ([True, False, True], "must be as long as scores, got 3 labels for 2 scores"),
        ([True], "must be as long as scores, got 1 labels for 2 scores"),
        ([[True, False]], r"must be 1-D, got shape \(1, 2\)"),
        ([True, True], r"at least one match \(True\) and one non-match \(False\), got 2 of True and 0 of False"),
        (torch.zeros(2, dtype=torch.bool), "got 0 of True and 2 of False"),
    ],
)
def test_bad_labels_are_refused(labels, message):
    with pytest.raises(ValueError, match="^labels .*" + message):
        select_threshold([0.5, 0.25], labels, match_f1, is_inverted=True)


def test_every_container_gives_the_same():
    scores, labels = SIMILARITIES
    array, is_match = np.array(scores), np.array(labels)
    frozen, frozen_labels = array.copy(), is_match.copy()
    frozen.flags.writeable = frozen_labels.flags.writeable = False
    with torch.inference_mode():
        inference = torch.tensor(scores)
    imaginary = torch.imag(torch.complex(torch.zeros(5), -torch.tensor(scores)).conj())
    assert imaginary.is_neg()
    given_pairs = [
        (tuple(scores), tuple(labels)),
        (frozen, frozen_labels),
        (array.astype(">f8"), is_match),
        (array.astype(np.float16), is_match),
        (array.astype(ml_dtypes.bfloat16), labels),
        (np.stack([array, -array], 1)[:, 0], np.stack([is_match, ~is_match], 1)[:, 0]),
        (torch.tensor(scores, requires_grad=True) * 1, torch.tensor(labels)),
        (torch.tensor(scores, dtype=torch.bfloat16)[:, None].expand(5, 3)[:, 1], torch.tensor(labels)),
        (inference, is_match),
        (imaginary, labels),
        (torch.nn.Parameter(torch.tensor(scores, dtype=torch.float64)), torch.tensor(labels)),
    ]
    for given_scores, given_labels in given_pairs:
        found = select_threshold(given_scores, given_labels, match_f1, is_inverted=True)
        assert found == ThresholdSelection(0.3125, 6 / 7)
    assert frozen.tolist() == scores


def test_the_inputs_are_not_written_to():
    scores, labels = torch.tensor(SIMILARITIES[0]), torch.tensor(SIMILARITIES[1])

    def destructive(counts):
        for field in counts:
            field.zero_()
        return counts.true_positives

    assert select_threshold(scores, labels, destructive, is_inverted=True) == (INF, 0.0)
    assert scores.tolist() == SIMILARITIES[0]
    assert labels.tolist() == SIMILARITIES[1]


def test_nothing_depends_on_the_error_state_of_numpy():
    with np.errstate(all="raise"):
        curve = threshold_curve([1.7e308, 1.6e308, 5e-324, 1.5e-323], [True, False, True, False], is_inverted=False)
    assert curve.thresholds.tolist() == [-INF, 1e-323, 0.8e308, 1.6e308 / 2 + 1.7e308 / 2, 1.7e308]


# The metrics.


def test_metrics_by_hand():
    counts = MatchCounts(*torch.tensor([[[3.0, 0.0]], [[1.0, 0.0]], [[4.0, 2.0]], [[2.0, 0.0]]]))
    assert match_accuracy(counts).tolist() == [[0.7, 1.0]]
    assert match_balanced_accuracy(counts)[0, 0] == pytest.approx(0.7, rel=1e-15)
    assert match_balanced_accuracy(counts)[0, 1].isnan()
    assert match_f1(counts)[0, 0] == pytest.approx(2 / 3, rel=1e-15)
    assert match_f1(counts)[0, 1].isnan()
    assert match_recall_at_fmr(0.2)(counts)[0, 0] == 0.6
    assert match_recall_at_fmr(0.19)(counts)[0, 0].isnan()


@pytest.mark.parametrize(
    "metric", [*METRICS, match_recall_at_fmr(1)], ids=lambda metric: getattr(metric, "__name__", "r")
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float16, torch.float64])
def test_metrics_are_float64_in_the_shape_of_the_counts(metric, dtype):
    counts = MatchCounts(*(torch.full((2, 3), 100, dtype=dtype) for _ in range(4)))
    values = metric(counts)
    assert values.dtype == torch.float64
    assert values.tolist() == [[0.5] * 3] * 2
    none = metric(MatchCounts(*torch.zeros(4)))
    assert none.shape == ()
    assert none.isnan()


def test_another_default_device_changes_nothing():
    with torch.device("meta"):
        for metric in (*METRICS, match_recall_at_fmr(1)):
            assert metric(threshold_curve(*SIMILARITIES, is_inverted=True).counts).device.type == "cpu"
        assert select_threshold(*SIMILARITIES, match_f1, is_inverted=True) == (0.3125, 6 / 7)
        assert equal_error_rate(*SIMILARITIES, is_inverted=True) == 1 / 3


def test_the_rate_of_false_matches_is_inclusive():
    scores = torch.arange(200, 0, -1, dtype=torch.float32)
    labels = torch.zeros(200, dtype=torch.bool)
    labels[[0, 50, 150]] = True
    # 49 of 197 non-matches stand above the second match.
    assert select_threshold(scores, labels, match_recall_at_fmr(49 / 197), is_inverted=True) == (149.5, 2 / 3)
    assert select_threshold(scores, labels, match_recall_at_fmr(48.99 / 197), is_inverted=True) == (199.5, 1 / 3)
    assert select_threshold(scores, labels, match_recall_at_fmr(np.float32(1)), is_inverted=True) == (49.5, 1.0)


def test_rates_that_are_none_are_refused():
    for rate in (-0.01, 1.01):
        with pytest.raises(ValueError, match=rf"rate must be from 0 to 1, got {rate}"):
            match_recall_at_fmr(rate)
    for rate in ("0.1", True, None):
        with pytest.raises(TypeError, match="rate must be a real number"):
            match_recall_at_fmr(rate)
    with pytest.raises(ValueError, match="rate must be a finite number, got nan"):
        match_recall_at_fmr(NAN)


def test_a_metric_of_the_factory_can_be_sent_to_another_process():
    metric = pickle.loads(pickle.dumps(match_recall_at_fmr(0.5)))
    assert select_threshold(*SIMILARITIES, metric, is_inverted=True) == (0.3125, 1.0)


# The equal error rate.


def error_rate_by_lines(scores, labels, is_inverted):
    """Exact: walk the candidates until false rejections are no longer more frequent than false matches."""
    _, counts = by_loop(scores, labels, is_inverted)
    rates = [(Fraction(fp, fp + tn), Fraction(fn, fn + tp)) for tp, fp, tn, fn in counts]
    for (x0, y0), (x1, y1) in itertools.pairwise(rates):
        if y1 <= x1:
            part = (y0 - x0) / ((y0 - x0) - (y1 - x1))
            return float(x0 + part * (x1 - x0))
    raise AssertionError("the last candidate accepts every pair")


@settings(max_examples=150, deadline=None)
@given(labelled_scores(), st.booleans())
def test_the_equal_error_rate_is_where_the_lines_cross(pairs, is_inverted):
    rate = equal_error_rate(*pairs, is_inverted=is_inverted)
    assert type(rate) is float
    assert rate == error_rate_by_lines(*pairs, is_inverted)


def test_equal_error_rates_by_hand():
    labels = [True, True, False, False]
    assert equal_error_rate([0.9, 0.8, 0.7, 0.1], labels, is_inverted=True) == 0.0
    assert equal_error_rate([0.9, 0.8, 0.7, 0.1], labels, is_inverted=False) == 1.0
    assert equal_error_rate([0.5] * 4, labels, is_inverted=True) == 0.5
    # From (fmr, fnmr) (0, 1/3) straight up to (1/2, 1/3): they are equal at 1/3.
    assert equal_error_rate(*SIMILARITIES, is_inverted=True) == 1 / 3


def test_the_curve_is_a_named_tuple():
    curve = threshold_curve(*SIMILARITIES, is_inverted=True)
    assert type(curve) is ThresholdCurve
    assert ThresholdCurve._fields == ("thresholds", "counts")
    assert ThresholdSelection._fields == ("threshold", "value")
    assert type(curve.counts) is MatchCounts
    assert curve.thresholds.dtype == torch.float64
    assert not curve.thresholds.requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_on_a_gpu(dtype):
    scores = torch.tensor(SIMILARITIES[0], dtype=dtype, device="cuda", requires_grad=True)
    labels = torch.tensor(SIMILARITIES[1], device="cuda")
    found = select_threshold(scores, labels, lambda counts: match_f1(counts).cuda(), is_inverted=True)
    assert found == ThresholdSelection(0.3125, 6 / 7)
    assert threshold_curve(scores, labels, is_inverted=True).thresholds.device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@settings(max_examples=100, deadline=None)
@given(labelled_scores(), st.booleans())
def test_the_decisions_counted_are_those_made_on_a_gpu(pairs, is_inverted):
    scores, labels = pairs
    thresholds, counts = threshold_curve(scores, labels, is_inverted=is_inverted)
    on_gpu = scores.cuda()
    accepted = counts.true_positives + counts.false_positives
    for threshold, count in zip(thresholds.tolist(), accepted.tolist(), strict=True):
        decided = on_gpu >= threshold if is_inverted else on_gpu <= threshold
        assert int(decided.sum()) == count
