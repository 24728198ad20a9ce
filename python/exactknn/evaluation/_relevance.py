"""Relevance of references to queries, from their labels.

    query labels (n,) or (n, L) ──Classes──> distinct labels, and the code of each query
    without comparison:  reference labels ──> code of each reference ──> Codes: equal codes are relevant
    with comparison:     called for blocks of labels ──────────────────> Compared
    both ──> relevant references of each query, relevance of its neighbours, Groups for the core

The matrix of all queries and all references is never formed.
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
from exactknn.evaluation._labels import in_common_type

Comparison = Callable[[Any, Any], Any]


class Classes:
    """The distinct labels, or rows of labels, ascending, and the code (position) of each label."""

    def __init__(self, labels: Tensor) -> None:
        self.labels: Tensor
        self.codes: Ints
        if labels.ndim == 1 and labels.device.type == "cpu" and labels.dtype in (torch.int64, torch.float64):
            # NumPy: torch's thread pool does not survive a fork, and a child would hang here.
            distinct, self.codes = np.unique(labels.numpy(), return_inverse=True)
            self.labels = torch.from_numpy(distinct)
            return
        dim = None if labels.ndim == 1 else 0  # None is much faster
        self.labels, codes = torch.unique(labels, dim=dim, return_inverse=True)
        self.codes = codes.cpu().numpy()

    def __len__(self) -> int:
        return len(self.labels)

    def chosen(self, mask: Bools) -> Tensor:
        """Return the distinct labels where the mask, ``(len(self),)``, is set."""
        if self.labels.device.type == "cpu":
            return torch.from_numpy(self.labels.numpy()[mask])  # as above
        return self.labels[torch.from_numpy(mask).to(self.labels.device)]


def codes_among(labels: Tensor, known: Tensor) -> Ints:
    """Return the position of each label, or row of labels, in ``known``, -1 if it is not there, ``(n,)``."""
    distinct = Classes(torch.cat(in_common_type((known, "label_counts"), (labels, "query_labels"))))
    place = np.full(len(distinct), -1, np.int64)
    place[distinct.codes[: len(known)]] = np.arange(len(known))
    codes: Ints = place[distinct.codes[len(known) :]]
    return codes


class Relevance(Protocol):
    """The relevance of references, as the calculator needs it."""

    match_counts: Tensor
    """References that match each distinct query label, the query's own row included, int64 ``(u,)``."""
    relevant_counts: Ints
    """Relevant references of each query, self excluded, ``(n,)``."""

    def of_neighbours(self, start: int, stop: int, indices: Tensor) -> Bools:
        """Return the relevance of the neighbours with these reference rows, for the queries ``start`` to ``stop``."""
        ...

    def groups(self) -> Iterator[tuple[int, int, Groups]]:
        """Yield blocks of queries, each with the groups of relevant references of its queries."""
        ...


class Codes:
    """Relevance is label equality."""

    def __init__(self, classes: Classes, query_labels: Tensor, reference_labels: Tensor, own_included: bool) -> None:
        for labels, name in ((query_labels, "query_labels"), (reference_labels, "reference_labels")):
            unequal = np.isnan(labels.cpu().numpy())
            if unequal.any():
                row = int(unequal.argmax())
                raise ValueError(f"{name} must not be NaN, which equals nothing, got NaN in row {row}")
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
    """Relevance is decided by the user's function, called as ``fn(query_label, reference_label)``."""

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
        # If a label does not match itself, the counts do not include the query's own row.
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
    """Yield start, stop and that block of the ``(n, k)`` neighbours, small enough for a mask of it."""
    for start, stop in small_blocks(*indices.shape):
        yield start, stop, indices[start:stop]


def hit_blocks(relevance: Relevance, indices: Tensor) -> Iterator[tuple[int, int, Hits]]:
    """Yield start, stop and the hits of these queries, from the reference rows of all ``(n, k)`` neighbours."""
    for start, stop, part in row_blocks(indices):
        found = relevance.of_neighbours(start, stop, part)
        yield start, stop, Hits.from_relevance(found, relevance.relevant_counts[start:stop])
