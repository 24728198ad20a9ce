"""Votes of the nearest neighbours for the class of a query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exactknn._arrays.blocks import blocks, rows_in
from exactknn._retrieval.types import Floats, Ints

# Votes counted at a time; each takes about 200 bytes of temporaries.
VOTES_AT_ONCE = 1 << 19


def vote_blocks(n: int, k: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of blocks of ``n`` queries with ``k`` votes each, to be counted at a time."""
    return blocks(n, rows_in(VOTES_AT_ONCE, k))


@dataclass(frozen=True)
class Vote:
    """The vote of the first ``k`` neighbours for the class of a query."""

    k: int
    temperature: float | None = None
    """Of the weights ``exp(similarity / temperature)``, similarity being -distance; ``None``: equal weights."""

    def winners(self, classes: Ints, values: npt.NDArray[Any] | None) -> Ints:
        """Return the column of the nearest member of the winning class, ``(n,)``.

        Args:
            classes: class of each neighbour, ``(n, c)``, nearest first, ``c`` at least 1; the first ``k`` vote.
            values: distances or similarities of these neighbours, ``(n, c)``; ignored with equal weights.
        """
        columns = np.empty(len(classes), np.int64)
        for start, stop in vote_blocks(*classes.shape):
            part = slice(start, stop), slice(self.k)
            weights = None if self.temperature is None or values is None else _weights(values[part], self.temperature)
            columns[part[0]] = _vote(classes[part], weights)
        return columns


def _weights(values: npt.NDArray[Any], temperature: float) -> Floats:
    # The weights depend only on the difference to the nearest value, so distances and similarities work alike. Equal
    # infinities differ by 0, and a NaN gets weight 0.
    wide = values.astype(np.float64)
    # The caller may have NumPy raise: infinities, NaN and weights that round to 0 are expected here.
    with np.errstate(all="ignore"):
        behind = np.where(wide == wide[:, :1], 0.0, np.abs(wide - wide[:, :1])) / temperature
        weights: Floats = np.exp(-np.where(np.isnan(behind), np.inf, behind))
    return weights


def _vote(classes: Ints, weights: Floats | None) -> Ints:
    """Return the column of the nearest member of the class with the most votes; ties go to the nearest class."""
    n, k = classes.shape
    order = np.argsort(classes, axis=1, kind="stable")
    ordered = np.take_along_axis(classes, order, axis=1)
    starts = np.ones((n, k), dtype=bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    party = np.cumsum(starts.ravel()) - 1
    cast = None if weights is None else np.take_along_axis(weights, order, axis=1).ravel()
    votes = np.bincount(party, weights=cast)
    rows, columns = np.nonzero(starts)
    totals = np.full((n, k), -np.inf)
    totals[rows, order[rows, columns]] = votes
    winner: Ints = totals.argmax(axis=1)
    return winner
