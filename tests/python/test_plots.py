"""``exactknn.plots``: what is drawn is what was counted."""

import math
import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from exactknn import plots
from exactknn.evaluation import (
    equal_error_rate,
    match_accuracy,
    match_f1,
    match_recall_at_fmr,
    select_threshold,
    threshold_curve,
)

SCORES = [0.9375, 0.875, 0.625, 0.5, 0.125]
LABELS = [True, True, False, True, False]
CURVES = (plots.plot_roc, plots.plot_det, plots.plot_precision_recall)


def drawn(figure):
    """The axes of a figure that has no others, rendered once: a warning there is an error here."""
    (ax,) = figure.axes
    figure.canvas.draw()
    return ax


def points(line):
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def many(n=3000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.rand(n, generator=generator) < 0.3
    return torch.randn(n, generator=generator) + 2 * labels, labels


def test_the_metric_and_the_chosen_threshold():
    ax = drawn(plots.plot_threshold(SCORES, LABELS, match_f1, is_inverted=True))
    curve, chosen_x, chosen = ax.lines
    thresholds, counts = threshold_curve(SCORES, LABELS, is_inverted=True)
    assert points(curve) == list(zip(thresholds[1:].tolist(), match_f1(counts)[1:].tolist(), strict=True))
    assert curve.get_xdata()[0] == 0.90625
    assert points(chosen) == [(0.3125, 6 / 7)]
    assert list(chosen_x.get_xdata()) == [0.3125, 0.3125]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("similarity threshold", "f1")
    assert legend(ax) == ["threshold 0.3125: 0.8571"]


def test_the_chosen_threshold_is_that_of_select_threshold():
    scores, labels = many()
    for metric in (match_accuracy, match_recall_at_fmr(0.01), lambda counts: -counts.false_positives):
        ax = drawn(plots.plot_threshold(scores, labels, metric, is_inverted=True, label="a"))
        selection = select_threshold(scores, labels, metric, is_inverted=True)
        if math.isinf(selection.threshold):
            assert list(ax.lines[1].get_ydata()) == [selection.value] * 2
            assert legend(ax) == [f"a (no pair accepted: {selection.value:.4g})"]
        else:
            assert points(ax.lines[2]) == [selection]
        assert ax.get_ylabel() == ("accuracy" if metric is match_accuracy else "metric")


def test_the_metric_is_called_once():
    calls = []

    def metric(counts):
        calls.append(counts)
        return match_f1(counts)

    plots.plot_threshold(SCORES, LABELS, metric, is_inverted=False)
    assert len(calls) == 1


def test_roc():
    ax = drawn(plots.plot_roc(SCORES, LABELS, is_inverted=True))
    expected = [(0, 0), (0, 1 / 3), (0, 2 / 3), (0.5, 2 / 3), (0.5, 1), (1, 1)]
    assert np.allclose(points(ax.lines[0]), expected, rtol=1e-15, atol=0)
    # Five of the six pairs of a match and a non-match are in order.
    assert legend(ax) == ["area 0.8333"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("false-match rate", "true-match rate")


def test_the_area_counts_ties_by_half():
    scores, labels = many(400)
    scores = scores.round(decimals=1)
    pairs = scores[labels][:, None] - scores[~labels]
    area = ((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean()
    ax = drawn(plots.plot_roc(scores, labels, is_inverted=True))
    assert legend(ax) == [f"area {area:.4g}"]


def test_det():
    ax = drawn(plots.plot_det(SCORES, LABELS, is_inverted=True))
    # Rates of 0 and 1 stand a quarter of a pair away: an eighth of two non-matches, a twelfth of three matches.
    expected = [(1 / 8, 11 / 12), (1 / 8, 2 / 3), (1 / 8, 1 / 3), (0.5, 1 / 3), (0.5, 1 / 12), (7 / 8, 1 / 12)]
    assert np.allclose(points(ax.lines[0]), expected, rtol=1e-15, atol=0)
    assert points(ax.lines[1]) == [(1 / 3, 1 / 3)]
    assert legend(ax) == ["equal error rate 33.3 %"]
    # One standard deviation is as long everywhere.
    deviations = torch.special.ndtr(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))
    places = ax.transData.transform(torch.stack([deviations, deviations], 1).numpy())
    assert np.allclose(places[2] - places[1], places[1] - places[0])
    assert ax.get_xlim()[0] < 1 / 8 < 7 / 8 < ax.get_xlim()[1]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["20 %", "50 %", "80 %"]


def test_det_of_many_scores():
    scores, labels = many()
    ax = drawn(plots.plot_det(-scores, labels, is_inverted=False, label="b"))
    assert legend(ax) == [f"b (equal error rate {100 * equal_error_rate(scores, labels, is_inverted=True):.3g} %)"]
    accepted = torch.stack([scores >= cut for cut in scores.sort(descending=True).values])
    false_matches = (accepted & ~labels).sum(1) / (~labels).sum().double()
    false_rejections = (~accepted & labels).sum(1) / labels.sum().double()
    inside = ((false_matches > 0) & (false_rejections > 0)).numpy()
    x, y = (np.asarray(values)[1:] for values in ax.lines[0].get_data())
    assert np.array_equal(x[inside], false_matches.numpy()[inside])
    assert np.array_equal(y[inside], false_rejections.numpy()[inside])


def test_precision_and_recall():
    ax = drawn(plots.plot_precision_recall(SCORES, LABELS, is_inverted=True))
    expected = [(0, 1), (1 / 3, 1), (2 / 3, 1), (2 / 3, 2 / 3), (1, 3 / 4), (1, 3 / 5)]
    assert np.allclose(points(ax.lines[0]), expected, rtol=1e-15, atol=0)
    assert ax.lines[0].get_drawstyle() == "steps-pre"
    assert legend(ax) == ["average precision 0.9167"]
    assert list(ax.lines[1].get_ydata()) == [3 / 5, 3 / 5]
    worse = drawn(plots.plot_precision_recall(SCORES, LABELS[::-1], is_inverted=True))
    assert points(worse.lines[0])[:3] == [(0, 0), (0, 0), (1 / 3, 1 / 2)]


def test_average_precision_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = many(500)
    scores = scores.round(decimals=1)
    ax = drawn(plots.plot_precision_recall(scores, labels, is_inverted=True))
    wanted = metrics.average_precision_score(labels.numpy(), scores.numpy())
    assert legend(ax) == [f"average precision {wanted:.4g}"]


def test_the_histogram():
    ax = drawn(plots.plot_score_histogram(SCORES, LABELS, is_inverted=True, threshold=0.75, bins=2))
    matches, others = (patch.get_data() for patch in ax.patches)
    assert matches.edges.tolist() == others.edges.tolist() == [0.125, 0.53125, 0.9375]
    width = 0.40625
    assert np.allclose(matches.values, [1 / 3 / width, 2 / 3 / width], rtol=1e-15)
    assert np.allclose(others.values, [1 / 2 / width, 1 / 2 / width], rtol=1e-15)
    assert list(ax.lines[0].get_xdata()) == [0.75, 0.75]
    assert legend(ax) == ["3 matches", "2 non-matches", "accepted: similarity \N{GREATER-THAN OR EQUAL TO} 0.75"]
    assert ax.get_xlabel() == "similarity"


@pytest.mark.parametrize(
    ("lowest", "highest", "edges"),
    [
        (1.0, 1 + 2**-51, [1, 1 + 2**-52, 1 + 2**-51]),  # two steps of float64 have room for two bins
        (1e16, 1e16 + 2, [1e16, 1e16 + 2]),
        (0.0, 5e-324, [-0.5, -0.25, 0, 0.25, 0.5]),  # a density over so little is beyond float64
        (1e16, 1e16, [1e16 - 1e13, 1e16 - 5e12, 1e16, 1e16 + 5e12, 1e16 + 1e13]),
        (0.25, 0.25, [-0.25, 0, 0.25, 0.5, 0.75]),
    ],
)
def test_the_histogram_of_close_scores(lowest, highest, edges):
    ax = drawn(plots.plot_score_histogram([lowest, highest], [True, False], is_inverted=True, bins=4))
    for patch in ax.patches:
        values, found, _ = patch.get_data()
        assert found.tolist() == edges
        assert (values * np.diff(found)).sum() == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_histogram_of_every_type_has_area_one(dtype):
    scores, labels = many()
    for threshold in (None, -math.inf):
        ax = drawn(plots.plot_score_histogram(scores.to(dtype), labels, is_inverted=False, threshold=threshold))
        for patch in ax.patches:
            values, edges, _ = patch.get_data()
            assert (values * np.diff(edges)).sum() == pytest.approx(1)
            assert len(values) == 50
            assert (edges[0], edges[-1]) == (scores.to(dtype).min(), scores.to(dtype).max())
    assert legend(ax)[-1] == "accepted: distance \N{LESS-THAN OR EQUAL TO} -inf"


def test_axes_that_are_given_are_drawn_in():
    figure = Figure()
    left, right = figure.subfigures(1, 2)
    ax = left.subplots()
    for label in ("a", "b"):
        for curve in CURVES:
            assert curve(SCORES, LABELS, is_inverted=True, label=label, ax=right.subplots()) is figure
        assert plots.plot_threshold(SCORES, LABELS, match_f1, is_inverted=True, label=label, ax=ax) is figure
    assert legend(ax) == ["a (threshold 0.3125: 0.8571)", "b (threshold 0.3125: 0.8571)"]
    assert plots.plot_score_histogram(SCORES, LABELS, is_inverted=True, ax=ax) is figure


@pytest.mark.parametrize("larger_first", [True, False])
def test_det_curves_of_different_sizes_fit_in_one_picture(larger_first):
    figure = Figure()
    ax = figure.subplots()
    for scores, labels in [many(), many(20)] if larger_first else [many(20), many()]:
        plots.plot_det(scores, labels, is_inverted=True, ax=ax)
    drawn(figure)
    for line in ax.lines:
        x, y = line.get_data()
        assert ax.get_xlim()[0] < np.min(x) <= np.max(x) < ax.get_xlim()[1]
        assert ax.get_ylim()[0] < np.min(y) <= np.max(y) < ax.get_ylim()[1]


@pytest.mark.parametrize("scores", [[0.5, 0.5], [0.5, 0.25], [0.25, 0.5]])
def test_two_pairs_are_enough(scores):
    for curve in (*CURVES, plots.plot_score_histogram):
        drawn(curve(scores, [True, False], is_inverted=True))
    drawn(plots.plot_threshold(scores, [True, False], match_f1, is_inverted=True))


def test_bad_input_is_refused_by_name():
    for curve in (*CURVES, plots.plot_score_histogram):
        with pytest.raises(ValueError, match="scores must be finite, got nan at position 1"):
            curve([0.5, math.nan], [True, False], is_inverted=True)
        with pytest.raises(TypeError, match="is_inverted must be True or False, got None"):
            curve(SCORES, LABELS, is_inverted=None)
    with pytest.raises(ValueError, match="metric must return a tensor, got int"):
        plots.plot_threshold(SCORES, LABELS, lambda counts: 0, is_inverted=True)
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        plots.plot_score_histogram(SCORES, LABELS, is_inverted=True, bins=0)
    selection = select_threshold(SCORES, LABELS, match_f1, is_inverted=True)
    with pytest.raises(TypeError, match="threshold must be a real number, got ThresholdSelection"):
        plots.plot_score_histogram(SCORES, LABELS, is_inverted=True, threshold=selection)
    with pytest.raises(ValueError, match="threshold must be a number or an infinity, got nan"):
        plots.plot_score_histogram(SCORES, LABELS, is_inverted=True, threshold=math.nan)


def test_pyplot_stays_out(run_python):
    program = """
import sys
from exactknn import plots
print("matplotlib" in sys.modules)
plots.plot_roc([0.5, 0.25], [True, False], is_inverted=True)
print("matplotlib.figure" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    assert run_python(program).split() == ["False", "True", "False"]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for curve in (*CURVES, plots.plot_score_histogram):
        with pytest.raises(ModuleNotFoundError, match=r"exactknn\[plots\]") as caught:
            curve(SCORES, LABELS, is_inverted=True)
        assert caught.value.name == "matplotlib"
    with pytest.raises(ModuleNotFoundError, match=r"exactknn\[plots\]"):
        plots.plot_threshold(SCORES, LABELS, match_f1, is_inverted=True)
