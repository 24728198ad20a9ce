"""Selection of a match threshold from labelled pairs; it decides every pair exactly as counted.

    scores (float16 to float64), labels (bool)
        -> checked_pairs:   CPU copies; 1-D, finite, of equal length, both kinds of pair present
        -> _order_keys:     integers in the order of the scores, adjacent values differ by one; -0.0 is 0.0
        -> threshold_curve: sorted, strictest first; a candidate after each run of equal keys
             counts         pairs, and matches among them, up to each candidate
             thresholds     float64 midpoints; between adjacent values the one on the matching side
        -> select_threshold: metric(counts), the largest value, ties to the strictest candidate

torch and NumPy round the threshold, a Python float, to the type of the scores before they compare. The midpoint of two
values with another value between them never rounds to either of the two. The midpoint of adjacent values always does,
half of the time to the wrong one, hence the exception.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from exactknn._arrays.matrix import array_of
from exactknn._arrays.scalars import as_flag, as_real
from exactknn._arrays.tensors import oddity, resolved
from exactknn._environment import undisturbed

# The bits of infinity in each type of scores. Finite values have smaller magnitudes, NaNs larger ones.
_INFINITY_BITS = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
}


class MatchCounts(NamedTuple):
    """Decision counts at each candidate threshold, strictest candidate first.

    In ``select_threshold`` and ``threshold_curve`` each field is a ``(candidates,)`` float64 tensor in CPU memory.
    """

    true_positives: Tensor
    """Matches that the threshold accepts."""
    false_positives: Tensor
    """Non-matches that the threshold accepts."""
    true_negatives: Tensor
    """Non-matches that the threshold rejects."""
    false_negatives: Tensor
    """Matches that the threshold rejects."""


class ThresholdSelection(NamedTuple):
    """The selected threshold and the metric's value there."""

    threshold: float
    value: float


class ThresholdCurve(NamedTuple):
    """All candidate thresholds, ``(candidates,)`` float64 in CPU memory, strictest first, and their counts."""

    thresholds: Tensor
    counts: MatchCounts


Metric: TypeAlias = Callable[[MatchCounts], Tensor]


@undisturbed
def select_threshold(scores: Any, labels: Any, metric: Metric, *, is_inverted: bool) -> ThresholdSelection:
    """Return the threshold that maximises a metric.

    A pair matches if its distance is at most the threshold, or its similarity at least the threshold. Compared by torch
    or NumPy with the scores in their own type, the returned threshold makes exactly the counted decisions.

    Args:
        scores: ``(pairs,)``, one distance or similarity each, finite: a float16, bfloat16, float32 or float64 tensor
            on any device, an array, or a list of floats.
        labels: ``(pairs,)`` bool, ``True`` for a match: tensor, array or list; both kinds must occur.
        metric: called once, with the ``MatchCounts`` of all candidates; returns a real tensor with one value for each.
            Larger is better; NaN values are ignored, ties go to the strictest candidate.
        is_inverted: ``True`` for similarities, like the attribute of the distance.

    Returns:
        ``(threshold, value)``. The threshold is infinite, and no pair matches, if rejecting all pairs is best.

    Raises:
        TypeError: ``metric`` is not callable, or ``is_inverted`` is not a bool.
        ValueError: scores or labels have a wrong shape, type or length, a score is NaN or infinite, all labels are
            equal, or ``metric`` does not return a real tensor with one value per candidate, or returns only NaN.

    Examples:
        >>> select_threshold([0.9, 0.8, 0.8, 0.3], [True, True, False, False], match_accuracy, is_inverted=True)
        ThresholdSelection(threshold=0.8500000000000001, value=0.75)
    """
    if not callable(metric):
        raise TypeError(f"metric must be callable with one MatchCounts, got {metric!r}")
    thresholds, counts = threshold_curve(scores, labels, is_inverted=is_inverted)
    values, best = best_candidate(metric, counts)
    return ThresholdSelection(float(thresholds[best]), float(values[best]))


@undisturbed
def threshold_curve(scores: Any, labels: Any, *, is_inverted: bool) -> ThresholdCurve:
    """Return the decision counts at every distinct threshold.

    With ``u`` distinct scores there are ``u + 1`` candidates, strictest first: no pair matches (threshold infinity for
    similarities, minus infinity for distances), then one more distinct score each, until every pair matches (threshold
    the weakest score). Between two distinct scores the threshold is their midpoint; if their type has no value between
    them, it is the one of the two that still matches.

    Args:
        scores: as for ``select_threshold``.
        labels: as for ``select_threshold``.
        is_inverted: ``True`` for similarities.

    Returns:
        ``(thresholds, counts)``: ``(u + 1,)`` float64, and ``MatchCounts`` of such tensors, in CPU memory.

    Raises:
        TypeError: ``is_inverted`` is not a bool.
        ValueError: as ``select_threshold``, for scores and labels.

    Examples:
        >>> thresholds, counts = threshold_curve([0.25, 0.5, 1.0], [True, False, True], is_inverted=False)
        >>> thresholds.tolist()
        [-inf, 0.375, 0.75, 1.0]
        >>> counts.true_positives.tolist(), counts.false_positives.tolist()
        ([0.0, 1.0, 1.0, 2.0], [0.0, 0.0, 1.0, 1.0])
    """
    is_inverted = as_flag(is_inverted, "is_inverted")
    keys, dtype, is_match = checked_pairs(scores, labels)
    sign = -1 if is_inverted else 1
    keys = sign * keys  # ascending from the strictest score
    ascending = np.sort(keys)
    ends = np.flatnonzero(np.append(ascending[1:] != ascending[:-1], True))  # the last of each run of equal scores
    distinct = ascending[ends]

    fields = np.zeros((4, len(distinct) + 1))
    tp, fp, tn, fn = fields
    tp[1:] = np.searchsorted(np.sort(keys[is_match]), distinct, side="right")
    fp[1:] = ends + 1
    fp -= tp
    np.subtract(fp[-1], fp, out=tn)
    np.subtract(tp[-1], tp, out=fn)

    values = as_float64(sign * distinct, dtype)
    adjacent = distinct[1:] == distinct[:-1] + 1
    cuts = np.where(adjacent, values[:-1], _midpoints(values[:-1], values[1:]))
    thresholds = np.concatenate(([-sign * np.inf], cuts, values[-1:]))
    return ThresholdCurve(torch.from_numpy(thresholds), MatchCounts(*map(torch.from_numpy, fields)))


@undisturbed
def equal_error_rate(scores: Any, labels: Any, *, is_inverted: bool) -> float:
    """Return the rate where false matches, ``fp / (fp + tn)``, and false non-matches, ``fn / (fn + tp)``, are equal.

    Usually no threshold makes them equal; then the rate is interpolated linearly between the two adjacent candidates of
    ``threshold_curve``, where the ROC curve drawn with straight lines meets the falling diagonal. The crossing is
    computed in integers and rounded once.

    Args:
        scores: as for ``select_threshold``.
        labels: as for ``select_threshold``.
        is_inverted: ``True`` for similarities.

    Returns:
        The rate, from 0 (perfectly separated) to 1 (perfectly inverted).

    Raises:
        TypeError: as ``threshold_curve``.
        ValueError: as ``threshold_curve``.

    Examples:
        >>> equal_error_rate([0.9, 0.8, 0.7, 0.1], [True, False, True, False], is_inverted=True)
        0.5
    """
    return rate_where_equal(threshold_curve(scores, labels, is_inverted=is_inverted).counts)


def rate_where_equal(counts: MatchCounts) -> float:
    """Return the equal error rate of the counts of ``threshold_curve``."""
    false_matches, false_rejections = counts.false_positives.long(), counts.false_negatives.long()
    non_matches, matches = int(false_matches[-1]), int(false_rejections[0])
    # The difference of the rates, times both numbers of pairs: strictly decreasing, from above 0 to below 0.
    difference = false_rejections * non_matches - false_matches * matches
    after = int(torch.searchsorted(-difference, 0))
    above, below = int(difference[after - 1]), int(difference[after])
    crossing = above * int(false_matches[after]) - below * int(false_matches[after - 1])
    return crossing / (non_matches * (above - below))


@undisturbed
def match_accuracy(counts: MatchCounts) -> Tensor:
    """Return ``(tp + tn) / (tp + fp + tn + fn)``, the share of correct decisions.

    Args:
        counts: fields of any one shape.

    Returns:
        float64 of that shape; 0/0 is a NaN.

    Examples:
        >>> match_accuracy(MatchCounts(3, 1, 4, 2))
        tensor(0.7000, dtype=torch.float64)
    """
    tp, fp, tn, fn = _float64_fields(counts)
    return (tp + tn) / (tp + fp + tn + fn)


@undisturbed
def match_balanced_accuracy(counts: MatchCounts) -> Tensor:
    """Return ``(tp / (tp + fn) + tn / (tn + fp)) / 2``, the mean accuracy of matches and of non-matches.

    Args:
        counts: fields of any one shape.

    Returns:
        float64 of that shape; 0/0 is a NaN.
    """
    tp, fp, tn, fn = _float64_fields(counts)
    return (tp / (tp + fn) + tn / (tn + fp)) / 2


@undisturbed
def match_f1(counts: MatchCounts) -> Tensor:
    """``2 tp / (2 tp + fp + fn)``, the harmonic mean of precision and recall.

    Args:
        counts: fields of any one shape.

    Returns:
        float64 of that shape; 0/0 is a NaN.
    """
    tp, fp, _, fn = _float64_fields(counts)
    return 2 * tp / (2 * tp + fp + fn)


@undisturbed
def match_recall_at_fmr(rate: float) -> Metric:
    """Return the metric recall at a maximum false-match rate.

    Its value is ``tp / (tp + fn)`` where the false-match rate ``fp / (fp + tn)`` is at most ``rate``, and NaN
    elsewhere, so that ``select_threshold`` picks the largest recall among the thresholds within the rate.

    Args:
        rate: the largest accepted false-match rate, from 0 to 1, inclusive.

    Returns:
        A metric for ``select_threshold``, picklable.

    Raises:
        TypeError: ``rate`` is not a real number.
        ValueError: ``rate`` is not in [0, 1].

    Examples:
        >>> metric = match_recall_at_fmr(0.01)
        >>> select_threshold([0.9, 0.8, 0.7, 0.1], [True, True, False, True], metric, is_inverted=True)
        ThresholdSelection(threshold=0.75, value=0.6666666666666666)
    """
    rate = as_real(rate, "rate")
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be from 0 to 1, got {rate:g}")
    return functools.partial(_recall_at_fmr, rate=rate)


@undisturbed
def _recall_at_fmr(counts: MatchCounts, *, rate: float) -> Tensor:
    tp, fp, tn, fn = _float64_fields(counts)
    return torch.where(fp / (fp + tn) <= rate, tp / (tp + fn), torch.nan)


def _float64_fields(counts: MatchCounts) -> list[Tensor]:
    given: tuple[Any, ...] = counts  # plain numbers are accepted too
    # Tensors stay on their device: the default device may not support float64.
    return [
        count.to(torch.float64) if isinstance(count, Tensor) else torch.tensor(count, dtype=torch.float64)
        for count in given
    ]


def best_candidate(metric: Metric, counts: MatchCounts) -> tuple[npt.NDArray[np.float64], int]:
    """Return the metric at each candidate, and the position of the strictest candidate that maximises it.

    Raises:
        ValueError: as ``select_threshold``, for the result of ``metric``.
    """
    result, candidates = metric(counts), len(counts.true_positives)
    if not isinstance(result, Tensor):
        raise ValueError(f"metric must return a tensor, got {type(result).__name__}")
    if result.is_complex():
        raise ValueError(f"metric must return real values, got {result.dtype}")
    if result.shape != (candidates,):
        raise ValueError(
            f"metric must return one value for each of {candidates} candidates, shape ({candidates},), "
            f"got shape {tuple(result.shape)}"
        )
    values = result.detach().cpu().resolve_neg().to(torch.float64).numpy()
    defined = np.flatnonzero(~np.isnan(values))
    if len(defined) == 0:
        raise ValueError("metric must return a number for at least one candidate, got NaN for all of them")
    return values, int(defined[np.argmax(values[defined])])


def checked_pairs(scores: Any, labels: Any) -> tuple[npt.NDArray[Any], str, npt.NDArray[np.bool_]]:
    """Return the checked arguments of ``select_threshold`` in CPU memory.

    Returns:
        Integer keys in the order of the scores, which ``as_float64`` converts back; the name of the scores' type; and
        whether each pair is a match.
    """
    array, dtype = _as_vector(scores, "scores", tuple(_INFINITY_BITS))
    is_match, _ = _as_vector(labels, "labels", ("bool",))
    if len(is_match) != len(array):
        raise ValueError(f"labels must be as long as scores, got {len(is_match)} labels for {len(array)} scores")
    matches = int(np.count_nonzero(is_match))
    if matches in (0, len(is_match)):
        raise ValueError(
            "labels must hold at least one match (True) and one non-match (False), "
            f"got {matches} of True and {len(is_match) - matches} of False"
        )
    keys = _order_keys(array)
    bad = np.abs(keys) >= _INFINITY_BITS[dtype]
    if bad.any():
        position = int(np.argmax(bad))
        value = as_float64(keys[position : position + 1], dtype)[0]
        raise ValueError(f"scores must be finite, got {value} at position {position}")
    return keys, dtype, is_match


def _as_vector(values: Any, name: str, dtypes: tuple[str, ...]) -> tuple[npt.NDArray[Any], str]:
    """Return a 1-D array in CPU memory and the name of its type, one of ``dtypes``; bfloat16 as its bits."""
    if isinstance(values, Tensor):
        dtype = str(values.dtype).removeprefix("torch.")
        odd = oddity(values)
        if odd is not None:
            raise ValueError(f"{name} must be a dense tensor, got {odd}")
    elif isinstance(values, np.ma.MaskedArray):
        raise ValueError(f"{name} must not be a masked array")
    else:
        try:
            values = array_of(values, name, "be 1-D")
        except TypeError as error:
            raise ValueError(str(error)) from error
        dtype = values.dtype.name
    if values.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {tuple(values.shape)}")
    if len(values) == 0:
        raise ValueError(f"{name} must not be empty")
    if dtype not in dtypes:
        raise ValueError(f"{name} must hold {' or '.join(dtypes)} values, got {dtype}")
    if isinstance(values, Tensor):
        values = resolved(values, name).cpu()
        values = (values.view(torch.int16) if dtype == "bfloat16" else values).numpy()
    elif dtype == "bfloat16":
        values = values.view(np.int16)
    return values, dtype


def _order_keys(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return integers in the order of floating-point numbers, given as such or as ``int16`` bits: sign times magnitude.

    Adjacent numbers of their type have adjacent keys, and both zeros have key 0.
    """
    bits = array.astype(array.dtype.newbyteorder("="), copy=False).view(f"i{array.dtype.itemsize}")
    magnitudes = bits & np.iinfo(bits.dtype).max
    keys: npt.NDArray[Any] = np.where(bits < 0, -magnitudes, magnitudes)
    return keys


def as_float64(keys: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    """Return the numbers of these keys, for scores of the type named ``dtype``."""
    magnitudes = np.abs(keys)
    # A bfloat16 is the upper half of a float32.
    numbers = (magnitudes.astype(np.int32) << 16).view(np.float32) if dtype == "bfloat16" else magnitudes.view(dtype)
    values: npt.NDArray[np.float64] = np.where(keys < 0, -numbers, numbers).astype(np.float64)
    return values


def _midpoints(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ``(left + right) / 2``, rounded once."""
    # If the sum overflows, the halves are exact; if its half is denormal, the sum is exact.
    with np.errstate(all="ignore"):
        middle = left + right
        overflowed = np.isinf(middle)
        middle /= 2
        middle[overflowed] = left[overflowed] / 2 + right[overflowed] / 2
    return middle
