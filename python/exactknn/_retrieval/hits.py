"""The relevant references among the neighbours of each query."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exactknn._retrieval.types import Bools, Floats, Ints


@dataclass(frozen=True)
class Hits:
    """The relevant references among the first ``k`` neighbours of ``n`` queries, as compressed rows."""

    ranks: Ints
    """Ranks from 1, ascending within a query."""
    offsets: Ints
    """Query ``i`` has the ranks ``offsets[i]`` to ``offsets[i + 1]``, ``(n + 1,)``."""
    relevant_counts: Ints
    """Relevant references of each query among all references, self excluded, ``(n,)``."""
    k: int
    """Number of neighbours considered."""

    @classmethod
    def from_relevance(cls, relevance: Bools, relevant_counts: Ints) -> Hits:
        """Return the hits for the relevance of each neighbour, ``(n, k)``, nearest first."""
        rows, columns = np.nonzero(relevance)
        offsets = np.zeros(len(relevance) + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=len(relevance)), out=offsets[1:])
        return cls(columns.astype(np.int64) + 1, offsets, relevant_counts, relevance.shape[1])

    def first(self, k: int) -> Hits:
        """Return the hits among the first ``k`` neighbours."""
        if k >= self.k:
            return self
        kept = self.ranks <= k
        before = np.zeros(len(kept) + 1, np.int64)
        np.cumsum(kept, out=before[1:])
        return Hits(self.ranks[kept], before[self.offsets], self.relevant_counts, k)

    @property
    def found(self) -> Ints:
        """Number of relevant references among the ``k`` neighbours of each query, ``(n,)``."""
        return np.diff(self.offsets)

    @functools.cached_property
    def queries(self) -> Ints:
        """Query of each rank, ``(len(ranks),)``."""
        return np.repeat(np.arange(len(self.relevant_counts)), self.found)

    def sums(self, values: npt.NDArray[Any]) -> Floats:
        """Return the sum over the ranks of each query, in rank order, ``(n,)``."""
        return np.bincount(self.queries, weights=values, minlength=len(self.relevant_counts)).astype(np.float64)

    @functools.cached_property
    def precisions(self) -> Floats:
        """Precision at each rank: the share of relevant references from the first neighbour to this one."""
        order = np.arange(len(self.ranks)) - self.offsets[self.queries] + 1
        precision: Floats = order / self.ranks
        return precision

    @property
    def first_rank(self) -> Floats:
        """Rank of the nearest relevant reference, infinity if none was found, ``(n,)``."""
        rank = np.full(len(self.relevant_counts), np.inf)
        some = self.found > 0
        rank[some] = self.ranks[self.offsets[:-1][some]]
        return rank
