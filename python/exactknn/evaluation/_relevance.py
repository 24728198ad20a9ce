"""Which references are relevant to which query, by their labels.

    query labels (n,) or (n, L) ──Classes──> distinct labels, and the place of each query's
    no comparison given:  reference labels ──> code of each reference ──> Codes: equal codes are relevant
    comparison given:     asked for each block of labels ───────────────> Compared
    both ──> relevant references of each query, relevance of its neighbours, Groups for the core

Nothing here holds a matrix of all queries and all references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from exactknn._arrays.blocks import small_blocks
from exactknn._retrieval.engine import group_blocks
from exactknn._retrieval.groups import Groups
from exactknn._retrieval.hits import Hits
from exactknn._retrieval.types import Bools, Ints

Comparison = Callable[[Any, Any], Any]


class Classes:
    """The distinct labels, or rows of labels, ascending, and the place of each among them."""

    def __init__(self, labels: Tensor) -> None:
        self.labels: Tensor
        self.codes: Ints
        if labels.ndim == 1 and labels.device.type == "cpu" and labels.dtype in (torch.int64, torch.float64):
            # Torch's own threads do not survive a fork, and would hang a child here.
            distinct, self.codes = np.unique(labels.numpy(), return_inverse=True)
            self.labels = torch.from_numpy(distinct)
            return
        dim = None if labels.ndim == 1 else 0  # much faster without
        self.labels, codes = torch.unique(labels, dim=dim, return_inverse=True)
        self.codes = codes.cpu().numpy()

    def __len__(self) -> int:
        return len(self.labels)

    def chosen(self, mask: Bools) -> Tensor:
        """The distinct labels at which the mask, ``(len(self),)``, is set."""
        if self.labels.device.type == "cpu":
            return torch.from_numpy(self.labels.numpy()[mask])  # as above
        return self.labels[torch.from_numpy(mask).to(self.labels.device)]


def codes_among(labels: Tensor, known: Tensor) -> Ints:
    """Place of each label, or row of labels, in ``known``, -1 where it is not there, ``(n,)``."""
    distinct = Classes(torch.cat([known.to(labels.dtype), labels]))
    place = np.full(len(distinct), -1, np.int64)
    place[distinct.codes[: len(known)]] = np.arange(len(known))
    codes: Ints = place[distinct.codes[len(known) :]]
    return codes


class Relevance(Protocol):
    """What the calculator asks of the labels."""

    match_counts: Tensor
    """References that match each distinct query label, the query's own row included, int64 ``(u,)``."""
    relevant_counts: Ints
    """Relevant references of each query, its own row left out, ``(n,)``."""

    def of_neighbours(self, start: int, stop: int, indices: Tensor) -> Bools:
        """Relevance of the neighbours with these reference rows, for the queries from ``start`` to ``stop``."""
        ...

    def groups(self) -> Iterator[tuple[int, int, Groups]]:
        """Blocks of queries, each with the groups of relevant references of its queries."""
        ...


class Codes:
    """Relevant is what has an equal label."""

    def __init__(self, classes: Classes, query_labels: Tensor, reference_labels: Tensor, own_included: bool) -> None:
        for labels, name in ((query_labels, "query_labels"), (reference_labels, "reference_labels")):
            unequal = np.isnan(labels.cpu().numpy())
            if unequal.any():
                row = int(unequal.argmax())
                raise ValueError(f"{name} must not be NaN, which equals nothing, got it in row {row}")
        self._classes = classes
        known, wanted = classes.labels.cpu().numpy(), reference_labels.cpu().numpy()
        places = np.searchsorted(known, wanted)
        places[places == len(known)] = 0
        self._reference_codes = np.where(known[places] == wanted, places, -1)
        counts = np.bincount(self._reference_codes + 1, minlength=len(known) + 1)[1:]
        self.match_counts = torch.from_numpy(counts).to(query_labels.device)
        self.relevant_counts = counts[classes.codes] - int(own_included)

    def of_neighbours(self, start: int, stop: int, indices: Tensor) -> Bools:
        codes = self._reference_codes[indices.cpu().numpy()]
        relevant: Bools = codes == self._classes.codes[start:stop, np.newaxis]
        return relevant

    def groups(self) -> Iterator[tuple[int, int, Groups]]:
        groups = Groups.of_codes(self._classes.codes, self._reference_codes, len(self._classes))
        return group_blocks(groups, self.relevant_counts)


class Compared:
    """Relevant is what a function of the user says, the query's label its first argument."""

    def __init__(
        self,
        classes: Classes,
        query_labels: Tensor,
        reference_labels: Tensor,
        own_included: bool,
        comparison: Comparison,
    ) -> None:
        self._query_labels = query_labels
        self._reference_labels = reference_labels
        self._comparison = comparison
        m = len(reference_labels)
        counts = torch.zeros(len(classes), dtype=torch.int64, device="cpu")
        for start, stop in small_blocks(len(classes), m):
            block = classes.labels[start:stop]
            counts[start:stop] = self._compare(block.unsqueeze(1), reference_labels, (len(block), m)).sum(1)
        own = torch.zeros(1, device="cpu")
        if own_included:
            own = self._compare(classes.labels, classes.labels, (len(classes),))
        self.match_counts = counts.to(query_labels.device)
        # A comparison that does not match a label with itself has not counted the own row either.
        self.relevant_counts = (counts - own.to(torch.int64)).numpy()[classes.codes]

    def _compare(self, query: Tensor, reference: Tensor, shape: tuple[int, ...]) -> Tensor:
        given = self._comparison(query, reference)
        if not isinstance(given, Tensor) or given.shape != shape or given.dtype != torch.bool:
            form = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(
                f"label_comparison_fn must return a bool tensor of shape {shape} for labels of shapes "
                f"{tuple(query.shape)} and {tuple(reference.shape)}, got {form}"
            )
        return given.detach().cpu()

    def of_neighbours(self, start: int, stop: int, indices: Tensor) -> Bools:
        rows = self._query_labels[start:stop].unsqueeze(1)
        relevant: Bools = self._compare(rows, self._reference_labels[indices], tuple(indices.shape)).numpy()
        return relevant

    def groups(self) -> Iterator[tuple[int, int, Groups]]:
        n, m = len(self._query_labels), len(self._reference_labels)
        for start, stop in small_blocks(n, m):
            rows = self._query_labels[start:stop].unsqueeze(1)
            queries, columns = self._compare(rows, self._reference_labels, (stop - start, m)).numpy().nonzero()
            yield start, stop, Groups.of_pairs(queries, columns, stop - start)


def row_blocks(indices: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Start, stop and the rows of ``(n, k)`` neighbours between them, so many that a mask of them is small."""
    for start, stop in small_blocks(*indices.shape):
        yield start, stop, indices[start:stop]


def hit_blocks(relevance: Relevance, indices: Tensor) -> Iterator[tuple[int, int, Hits]]:
    """Start, stop and the hits of the queries between them, from the reference rows of their ``(n, k)`` neighbours."""
    for start, stop, part in row_blocks(indices):
        found = relevance.of_neighbours(start, stop, part)
        yield start, stop, Hits.from_relevance(found, relevance.relevant_counts[start:stop])
