"""SVG figures of the report: curves and histograms, without scripts or external files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from exactknn._retrieval.pairs import PairSample
from exactknn._retrieval.types import Floats, Ints

_BINS = 50

# Minimum width of an axis: relative to its values, so that tick labels differ, and absolute, so that float64 can
# represent a fifth of it.
_NARROWEST = 1e-5
_SMALLEST = 1e-300
_WIDTH, _HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 42


def _across(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _up(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _svg(
    title: str, description: str, axis: str, x_ticks: Mapping[str, float], y_ticks: Mapping[str, float], content: str
) -> str:
    """Return a figure with its axes; ticks are given by label, as shares of the axis."""
    name = title.lower().replace(" ", "-")
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="{name}-title {name}-text">',
        f'<title id="{name}-title">{title}</title><desc id="{name}-text">{description}</desc>',
    ]
    for text, share in y_ticks.items():
        y = _up(share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for text, share in x_ticks.items():
        x = _across(share)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_up(0):.1f}" y2="{_up(0) + 5:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_up(0) + 18:.1f}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{_across(0.5):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{axis}</text>')
    return "".join([*parts, content, "</svg>"])


def curve(title: str, number: Ints, curves: Sequence[Floats], shown: Sequence[int]) -> str:
    """Return a figure of curves over k on a logarithmic axis; the first has dots with their values."""
    low, high = _limits(curves)
    along = np.log(number) / max(math.log(len(number)), 1e-9)

    def height(value: float) -> float:
        return _up((value - low) / (high - low))

    parts = []
    for curve, style in reversed(list(zip(curves, ("one", "two"), strict=False))):
        points = " ".join(f"{_across(x):.1f},{height(y):.1f}" for x, y in zip(along, curve, strict=True))
        parts.append(f'<polyline class="{style}" points="{points}"/>')
    for k in shown:
        value = float(curves[0][k - 1])
        parts.append(
            f'<circle class="dot" cx="{_across(along[k - 1]):.1f}" cy="{height(value):.1f}" r="3.5">'
            f"<title>k = {k}: {value:.4f}</title></circle>"
        )
    ticks = [low + (high - low) * i / 5 for i in range(6)]
    return _svg(
        title,
        f"{title} for k from 1 to {len(number)}: from {curves[0][0]:.4f} to {curves[0][-1]:.4f}. The values are in the "
        "table below.",
        "neighbours k (logarithmic)",
        {str(k): float(along[k - 1]) for k in shown},
        {f"{tick:.3f}".rstrip("0").rstrip("."): i / 5 for i, tick in enumerate(ticks)},
        "".join(parts),
    )


def axis_words(curves: Sequence[Floats]) -> str:
    """Return a sentence that says where the axis of the values begins; empty if that is 0."""
    low, _ = _limits(curves)
    return f" The axis begins at {low:g}." if low else ""


def _limits(curves: Sequence[Floats]) -> tuple[float, float]:
    """Return the smallest of a few ranges within 0 to 1 that contains all values."""
    lowest, highest = (min(float(curve.min()) for curve in curves), max(float(curve.max()) for curve in curves))
    for low in (0.98, 0.95, 0.9, 0.8, 0.5):
        if low <= lowest < 1.0:
            return low, 1.0
    return 0.0, next(high for high in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if highest <= high)


def span(kinds: Sequence[Floats]) -> tuple[float, float]:
    """Return the limits of the axis, without outliers, which would squeeze all other values into one bar."""
    ends = []
    for values in kinds:
        least, first, third, most = np.quantile(values, [0.0, 0.25, 0.75, 1.0])
        reach = 4 * (third - first)
        ends.append((max(least, first - reach), min(most, third + reach)))
    low, high = float(min(end[0] for end in ends)), float(max(end[1] for end in ends))
    size = max(abs(low), abs(high))
    if high - low > max(_NARROWEST * size, _SMALLEST):
        return low, high
    reach = size / 2 if size > _SMALLEST else 0.5
    return low - reach, high + reach


def histogram(title: str, axis: str, kinds: Sequence[tuple[str, PairSample, str]], low: float, high: float) -> str:
    """Return a figure of the share of values per bin for each kind, from ``low`` to ``high``."""
    edges = np.linspace(low, high, _BINS + 1)
    shares = [np.histogram(sample.values, edges)[0] / len(sample.values) for _, sample, _ in kinds]
    top = max(float(share.max()) for share in shares)
    parts = []
    for (_, _, style), share in reversed(list(zip(kinds, shares, strict=True))):
        steps = [f"{_across(0):.1f},{_up(0):.1f}"]
        for i, part in enumerate(share):
            y = _up(part / top)
            steps += [f"{_across(i / _BINS):.1f},{y:.1f}", f"{_across((i + 1) / _BINS):.1f},{y:.1f}"]
        steps.append(f"{_across(1):.1f},{_up(0):.1f}")
        parts.append(f'<polyline class="area {style}" points="{" ".join(steps)}"/>')
    medians = ", ".join(f"{name} {np.median(sample.values):.4g}" for name, sample, _ in kinds)
    return _svg(
        title,
        f"Two histograms of pairs of a query and a reference. Medians: {medians}.",
        axis,
        {f"{tick:g}": (tick - low) / (high - low) for tick in _round_numbers(low, high, 5)},
        {f"{tick:.3%}".rstrip("0%").rstrip(".") + "%": tick / top for tick in _round_numbers(0.0, top, 4)},
        "".join(parts),
    )


def _round_numbers(low: float, high: float, about: int) -> list[float]:
    """Return ``about`` multiples, approximately, of 1, 2 or 5 times a power of ten between two numbers."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough)
    return [float(f"{i * step:.12g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
