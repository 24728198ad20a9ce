"""What the selection of a threshold takes and refuses, and its metrics."""

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
from tests.python.evaluation.threshold_helpers import (
    DTYPES,
    INF,
    METRICS,
    NAN,
    SIMILARITIES,
    as_numpy,
    by_loop,
    labelled_scores,
)


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


def test_integers_of_a_list_that_float64_would_round_are_refused():
    with pytest.raises(
        ValueError, match=r"scores must hold .* got the integer 9007199254740993 beyond 2\*\*53 in row 1"
    ):
        threshold_curve([0.5, 2**53 + 1], [True, False], is_inverted=False)
