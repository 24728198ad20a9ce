"""Rows and helpers that the tests of this folder share."""

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st

from exactknn.evaluation import (
    match_accuracy,
    match_balanced_accuracy,
    match_f1,
)

INF, NAN = math.inf, math.nan
METRICS = (match_accuracy, match_balanced_accuracy, match_f1)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = dict(zip(DTYPES, (torch.int16, torch.int16, torch.int32, torch.int64), strict=True))

# The decisions in the order of ``MatchCounts``: accepted, and a match.
CASES = ((True, True), (True, False), (False, False), (False, True))
SIMILARITIES = ([0.9375, 0.875, 0.625, 0.5, 0.125], [True, True, False, True, False])


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
