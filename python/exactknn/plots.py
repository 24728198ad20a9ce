"""Plots of thresholds, error rates and score distributions. Needs the extra ``plots`` (matplotlib and torch).

    scores, labels
        -> evaluation.threshold_curve: every candidate threshold and its counts
             plot_threshold            a metric over the thresholds, and the threshold that maximises it
             plot_roc                  true-match rate over false-match rate
             plot_det                  false non-match rate over false-match rate, both on a normal scale
             plot_precision_recall     precision over recall
        -> plot_score_histogram:       scores of matches and of non-matches, and a threshold

Each returns the ``matplotlib.figure.Figure`` and draws in ``ax`` if given. ``pyplot`` is neither used nor imported: no
window opens, no figure is retained, and threads share no state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "exactknn.plots needs PyTorch, which is not installed: pip install 'exactknn[plots]'", name="torch"
    ) from error

from exactknn._arrays.scalars import as_count, as_flag, as_real
from exactknn.evaluation.threshold import (
    MatchCounts,
    Metric,
    as_float64,
    best_candidate,
    checked_pairs,
    rate_where_equal,
    threshold_curve,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "plot_det",
    "plot_precision_recall",
    "plot_roc",
    "plot_score_histogram",
    "plot_threshold",
]

# Curves of at most this many candidates show each of them as a dot.
_DOTS = 50

# Scores that differ by less are drawn as equal: a density over a smaller range may overflow float64.
_LEAST_RANGE = 1e-200

# Ticks of a normal scale, if within the limits.
_RATES = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99, 0.999)


def plot_threshold(
    scores: Any, labels: Any, metric: Metric, *, is_inverted: bool, label: str | None = None, ax: Axes | None = None
) -> Figure:
    """Return a figure of a metric over the thresholds, with the threshold of ``select_threshold`` marked.

    The threshold at which no pair matches is infinite, so it is not on the axis: if it is the best, its value is drawn
    as a horizontal line.

    Args:
        scores: ``(pairs,)``, as for ``exactknn.evaluation.select_threshold``.
        labels: ``(pairs,)`` bool, ``True`` for a match.
        metric: as for ``select_threshold``; called once.
        is_inverted: ``True`` for similarities.
        label: name of the curve in the legend.
        ax: axes to draw in. ``None``: those of a new figure.

    Returns:
        The figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: as ``select_threshold``.
        ValueError: as ``select_threshold``.
    """
    ax = _axes(ax)
    candidates, counts = threshold_curve(scores, labels, is_inverted=is_inverted)
    values, best = best_candidate(metric, counts)
    thresholds = candidates.numpy()
    (line,) = ax.plot(thresholds[1:], values[1:], **_style(len(thresholds)))
    color = line.get_color()
    if best == 0:
        text = _named(label, f"no pair accepted: {values[0]:.4g}")
        ax.axhline(values[0], color=color, linestyle="--", linewidth=1, label=text)
    else:
        text = _named(label, f"threshold {thresholds[best]:.4g}: {values[best]:.4g}")
        ax.axvline(thresholds[best], color=color, linestyle="--", linewidth=1)
        ax.plot(thresholds[best], values[best], "o", color=color, markersize=8, label=text)
    return _finished(ax, f"{_quantity(is_inverted)} threshold", _metric_name(metric))


def plot_roc(
    scores: Any, labels: Any, *, is_inverted: bool, label: str | None = None, ax: Axes | None = None
) -> Figure:
    """Return a figure of the ROC curve: true-match rate over false-match rate, one point per candidate threshold.

    The legend gives the area under the straight lines between the points, which is the probability that a match scores
    better than a non-match, ties counted as half. Dotted: uninformative scores.

    Args:
        scores: ``(pairs,)``, as for ``exactknn.evaluation.select_threshold``.
        labels: ``(pairs,)`` bool, ``True`` for a match.
        is_inverted: ``True`` for similarities.
        label: name of the curve in the legend.
        ax: axes to draw in. ``None``: those of a new figure.

    Returns:
        The figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: as ``threshold_curve``.
        ValueError: as ``threshold_curve``.
    """
    ax = _axes(ax)
    false_matches, false_rejections = _error_rates(threshold_curve(scores, labels, is_inverted=is_inverted).counts)
    true_matches = 1 - false_rejections
    area = float(torch.trapezoid(torch.from_numpy(true_matches), torch.from_numpy(false_matches)))
    ax.plot(false_matches, true_matches, label=_named(label, f"area {area:.4g}"), **_style(len(true_matches)))
    ax.axline((0, 0), (1, 1), color="0.6", linestyle=":", linewidth=1)
    return _finished(ax, "false-match rate", "true-match rate")


def plot_det(
    scores: Any, labels: Any, *, is_inverted: bool, label: str | None = None, ax: Axes | None = None
) -> Figure:
    """Return a figure of the detection error trade-off: false non-match rate over false-match rate.

    Both axes are scaled by the quantile function of the normal distribution, so that normally distributed scores give
    straight lines (Martin et al., "The DET curve in assessment of detection task performance", Eurospeech 1997). Rates
    of 0 and 1 are infinite on this scale and are drawn a quarter of a pair inside. The dot marks the
    ``exactknn.evaluation.equal_error_rate``, given in the legend.

    Args:
        scores: ``(pairs,)``, as for ``exactknn.evaluation.select_threshold``.
        labels: ``(pairs,)`` bool, ``True`` for a match.
        is_inverted: ``True`` for similarities.
        label: name of the curve in the legend.
        ax: axes to draw in. ``None``: those of a new figure.

    Returns:
        The figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: as ``threshold_curve``.
        ValueError: as ``threshold_curve``.
    """
    ax = _axes(ax)
    counts = threshold_curve(scores, labels, is_inverted=is_inverted).counts
    false_matches, false_rejections = _error_rates(counts)
    rate = rate_where_equal(counts)
    least_x, least_y = 0.25 / float(counts.false_positives[-1]), 0.25 / float(counts.false_negatives[0])
    _set_normal_scales(ax, least_x, least_y)
    x, y = _clipped(false_matches, least_x), _clipped(false_rejections, least_y)
    (line,) = ax.plot(x, y, label=_named(label, f"equal error rate {100 * rate:.3g} %"), **_style(len(x)))
    ax.plot(_clipped(rate, least_x), _clipped(rate, least_y), "o", color=line.get_color(), markersize=8)
    return _finished(ax, "false-match rate", "false non-match rate")


def plot_precision_recall(
    scores: Any, labels: Any, *, is_inverted: bool, label: str | None = None, ax: Axes | None = None
) -> Figure:
    """Return a figure of precision over recall, one point per candidate threshold that accepts a pair.

    The legend gives the average precision: the sum of each precision times the recall gained at its candidate, which is
    the area under the steps. Dotted: the precision of accepting every pair.

    Args:
        scores: ``(pairs,)``, as for ``exactknn.evaluation.select_threshold``.
        labels: ``(pairs,)`` bool, ``True`` for a match.
        is_inverted: ``True`` for similarities.
        label: name of the curve in the legend.
        ax: axes to draw in. ``None``: those of a new figure.

    Returns:
        The figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: as ``threshold_curve``.
        ValueError: as ``threshold_curve``.
    """
    ax = _axes(ax)
    tp, fp, _, fn = (field.numpy() for field in threshold_curve(scores, labels, is_inverted=is_inverted).counts)
    recall = tp / (tp + fn)
    precision = tp[1:] / (tp[1:] + fp[1:])
    average = float(np.sum(np.diff(recall) * precision))
    steps = np.append(precision[0], precision)
    ax.plot(
        recall,
        steps,
        label=_named(label, f"average precision {average:.4g}"),
        drawstyle="steps-pre",
        **_style(len(steps)),
    )
    ax.axhline(precision[-1], color="0.6", linestyle=":", linewidth=1)
    ax.set_ylim(-0.05, 1.05)
    return _finished(ax, "recall", "precision")


def plot_score_histogram(
    scores: Any,
    labels: Any,
    *,
    is_inverted: bool,
    threshold: float | None = None,
    bins: int = 50,
    ax: Axes | None = None,
) -> Figure:
    """Return a figure of the distributions of the scores of matches and non-matches, with area 1 over the same bins.

    Args:
        scores: ``(pairs,)``, as for ``exactknn.evaluation.select_threshold``.
        labels: ``(pairs,)`` bool, ``True`` for a match.
        is_inverted: ``True`` for similarities.
        threshold: drawn as a vertical line if finite; the legend says which side matches.
        bins: number of bins of equal width from the smallest score to the largest; fewer if the scores are so close
            that float64 cannot represent as many edges.
        ax: axes to draw in. ``None``: those of a new figure.

    Returns:
        The figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: ``bins`` is not an integer, ``threshold`` is not a number, or as ``threshold_curve``.
        ValueError: ``bins`` is below 1, ``threshold`` is NaN, or as ``threshold_curve``.
    """
    ax = _axes(ax)
    is_inverted = as_flag(is_inverted, "is_inverted")
    bins = as_count(bins, "bins", minimum=1)
    if threshold is not None:
        threshold = as_real(threshold, "threshold", finite=False)
    keys, dtype, is_match = checked_pairs(scores, labels)
    values = as_float64(keys, dtype)
    edges = _bin_edges(float(values.min()), float(values.max()), bins)
    for name, chosen in (("matches", values[is_match]), ("non-matches", values[~is_match])):
        density, _ = np.histogram(chosen, edges, density=True)
        ax.stairs(density, edges, fill=True, alpha=0.5, label=f"{len(chosen):,} {name}")
    if threshold is not None:
        sign = "\N{GREATER-THAN OR EQUAL TO}" if is_inverted else "\N{LESS-THAN OR EQUAL TO}"
        text = f"accepted: {_quantity(is_inverted)} {sign} {threshold:.4g}"
        if math.isfinite(threshold):
            ax.axvline(threshold, color="black", linestyle="--", label=text)
        else:
            ax.plot([], [], " ", label=text)
    return _finished(ax, _quantity(is_inverted), "density")


def _axes(ax: Axes | None) -> Axes:
    """Return the given axes, or those of a new figure."""
    if ax is not None:
        if not callable(getattr(ax, "plot", None)):
            raise TypeError(f"ax must be axes of matplotlib, got {ax!r} of type {type(ax).__name__}")
        return ax
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "exactknn.plots needs matplotlib, which is not installed: pip install 'exactknn[plots]'", name="matplotlib"
        ) from error
    return Figure(layout="constrained").subplots()


def _finished(ax: Axes, xlabel: str, ylabel: str) -> Figure:
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    # Above the axes, where it hides nothing: loc="best" is slow with many points.
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, frameon=False)
    return ax.figure.figure  # the root figure, even of sub-figures


def _style(points: int) -> dict[str, Any]:
    return {"marker": "." if points <= _DOTS else None}


def _named(label: str | None, text: str) -> str:
    return text if label is None else f"{label} ({text})"


def _quantity(is_inverted: bool) -> str:
    return "similarity" if is_inverted else "distance"


def _metric_name(metric: Metric) -> str:
    name = getattr(metric, "__name__", "metric").removeprefix("match_").replace("_", " ")
    return "metric" if name == "<lambda>" else name


def _bin_edges(lowest: float, highest: float, bins: int) -> npt.NDArray[np.float64]:
    if highest - lowest < _LEAST_RANGE:
        around = max(0.5, abs(lowest) / 1000)
        lowest, highest = lowest - around, highest + around
    return np.unique(np.linspace(lowest, highest, bins + 1))


def _error_rates(counts: MatchCounts) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the false-match rate and the false non-match rate of each candidate."""
    tp, fp, tn, fn = (field.numpy() for field in counts)
    return fp / (fp + tn), fn / (fn + tp)


def _set_normal_scales(ax: Axes, left: float, bottom: float) -> None:
    """Scale both axes by normal quantiles, with limits that include these rates and those of existing curves."""
    # A small margin between the smallest rates and the border.
    left, bottom = 0.7 * left, 0.7 * bottom
    if ax.get_xscale() == "function":
        left, bottom = min(left, ax.get_xlim()[0]), min(bottom, ax.get_ylim()[0])
    ax.set_xlim(left, 1 - left)
    ax.set_ylim(bottom, 1 - bottom)
    ax.set_xscale("function", functions=(_normal_quantile, _normal_probability))
    ax.set_yscale("function", functions=(_normal_quantile, _normal_probability))
    for limit, set_ticks, angle in ((left, ax.set_xticks, 45.0), (bottom, ax.set_yticks, 0.0)):
        ticks = [rate for rate in _RATES if limit <= rate <= 1 - limit]
        set_ticks(ticks, [f"{100 * rate:g} %" for rate in ticks], rotation=angle)


def _clipped(rates: npt.ArrayLike, least: float) -> npt.NDArray[np.float64]:
    return np.clip(np.asarray(rates, np.float64), least, 1 - least)


def _normal_quantile(rates: Any) -> Any:
    return torch.special.ndtri(torch.tensor(np.asarray(rates, np.float64))).numpy()


def _normal_probability(quantiles: Any) -> Any:
    return torch.special.ndtr(torch.tensor(np.asarray(quantiles, np.float64))).numpy()
