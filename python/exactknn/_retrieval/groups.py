"""The relevant references of each query, by class or by pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exactknn._retrieval.types import Ints


@dataclass(frozen=True)
class Groups:
    """Relevant references by the class of the query, as compressed rows."""

    query_group: Ints
    """Group of each query, ``(n,)``."""
    offsets: Ints
    """Group ``g`` has the reference rows ``rows[offsets[g]:offsets[g + 1]]``."""
    rows: Ints

    @classmethod
    def of_codes(cls, query_codes: Ints, reference_codes: Ints, groups: int) -> Groups:
        """Return groups by equal codes: 0 to ``groups - 1`` for queries; other codes of references match no query."""
        rows = np.argsort(reference_codes, kind="stable")
        offsets = np.searchsorted(reference_codes[rows], np.arange(groups + 1))
        first, last = offsets[0], offsets[-1]  # references outside are in no group
        return cls(query_codes, (offsets - first).astype(np.int64), rows[first:last].astype(np.int64))

    @classmethod
    def of_pairs(cls, queries: Ints, rows: Ints, n: int) -> Groups:
        """Return one group for each of ``n`` queries, from pairs of query and reference row, ascending by query."""
        offsets = np.searchsorted(queries, np.arange(n + 1))
        return cls(np.arange(n, dtype=np.int64), offsets.astype(np.int64), rows.astype(np.int64))

    def part(self, start: int, stop: int) -> Groups:
        """Return the groups of the queries ``start`` to ``stop``."""
        return Groups(self.query_group[start:stop], self.offsets, self.rows)
