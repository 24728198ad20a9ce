"""Matching pairs of embeddings: those whose distance is within a threshold.

    MatchFinder.get_match_matrix, get_match_indices (query_emb, ref_emb, threshold)
        -> native_support: does the Rust core compute this distance?
             yes, CPU   -> _core_bound: the equivalent bound for the core -> _core.radius
             otherwise  -> each_block:  distance(block, ref_emb) compared with the threshold, on the tensors' device

    MatchFinder.is_match (x, y, threshold)
        -> pairwise: _core.pairwise, or distance.pairwise -> compared with the threshold

A pair is decided by the value that ``CustomKNN`` returns for it on the CPU, compared as torch compares a tensor with a
number: the threshold is first rounded to the type of the values. The core compares float64 numbers, so it gets a bound
that gives the same decisions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from exactknn import _core
from exactknn._arrays.blocks import blocks, rows_in
from exactknn._arrays.scalars import as_flag, as_real
from exactknn._environment import undisturbed
from exactknn._references import References
from exactknn.distances.base import autocast_off, result_dtype
from exactknn.evaluation._checks import check_distance, check_embeddings, check_finite, checked_pair_rows
from exactknn.evaluation._dispatch import NativeSupport, native_pair, native_support
from exactknn.evaluation._torch_blocks import HALF_DTYPES, each_block, is_batched, prepare_for_torch

Take = Callable[[Tensor, int], object]

_NAMES = ("query_emb", "ref_emb")
_PAIRED_NAMES = ("x", "y")
_ELSEWHERE = "exactknn.radius"

# Elements of a block of the distance matrix on the torch path (32 MiB in float32).
_BLOCK_ELEMENTS = 1 << 23

# Rows of the small matrices whose diagonals replace a missing ``pairwise`` of a distance.
_DIAGONAL_ROWS = 16

# Minimum cells of a block of the match matrix, and maximum number of blocks. A block whose pairs all match takes 16
# bytes per cell, and about 21 in the core, so never more than the matrix itself, or 64 MiB.
_BLOCK_CELLS = 3 << 20
_MOST_BLOCKS = 24


class MatchFinder:
    """Finds the pairs of embeddings whose distance is at most a threshold, or whose similarity is at least a threshold.

    Both comparisons are inclusive, and a NaN distance never matches. Values are those of the distance, with its
    normalisation and power: a squared distance for ``power=2``. A pair is decided by the value that ``CustomKNN``
    returns for it, as ``value <= threshold`` (or ``>=``) on that tensor.

    On the CPU, distances that ``CustomKNN`` searches in the Rust core are measured there, with the same float64 values:
    all methods agree on every pair. Other distances and devices are measured by torch, in blocks; on a device, the
    values of ``CustomKNN`` may differ from these in the last digits.

    Args:
        distance: called as ``distance(query_block, ref_emb)`` for a matrix; ``is_inverted`` says whether larger is
            nearer. ``distance.pairwise(x, y)``, if it exists, gives the values of pairs.
        threshold: a number, possibly infinite; ``None``: each call passes one.

    Raises:
        TypeError: ``distance`` is not callable or has no ``is_inverted``, or ``threshold`` is not a number.
        ValueError: ``threshold`` is NaN.

    Examples:
        >>> from exactknn.distances import CosineSimilarity
        >>> finder = MatchFinder(CosineSimilarity(), threshold=0.9)
        >>> query, reference = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.1], [1.0, 1.0]])
        >>> finder.get_match_matrix(query, reference).tolist()
        [[True, False], [False, False]]
        >>> finder.get_match_indices(query, reference, threshold=0.7).tolist()
        [[0, 0], [0, 1], [1, 1]]
        >>> finder.is_match(query, reference).tolist()
        [True, False]
    """

    @undisturbed
    def __init__(self, distance: Any, threshold: float | None = None) -> None:
        check_distance(distance)
        self.distance = distance
        self.threshold = None if threshold is None else _as_threshold(threshold)

    @undisturbed
    def get_match_matrix(
        self, query_emb: Tensor, ref_emb: Tensor | None = None, threshold: float | None = None
    ) -> Tensor:
        """Return which pairs match, as a matrix.

        Args:
            query_emb: ``(n, d)``, finite.
            ref_emb: ``(m, d)``, finite, on the same device; ``None``: the queries, each also paired with itself.
            threshold: for this call; ``None``: the finder's.

        Returns:
            ``(n, m)`` bool, on the embeddings' device: one byte per pair. Temporaries take at most as much again, or
            64 MiB if that is more.

        Raises:
            TypeError: an embedding is not a tensor, or ``threshold`` is not a number.
            ValueError: there is no threshold, a shape, type, dimension or device is invalid, or a row holds a NaN or
                infinity (the message names argument and row).
        """
        query, reference, number = self._checked(query_emb, ref_emb, threshold)
        n, m = len(query), len(reference)
        support = native_support(self.distance, query, reference, _NAMES)
        if support.metric is not None:
            search = _NativeSearch(support, query, reference, number, bool(self.distance.is_inverted))
            cells = np.zeros(n * m, dtype=np.bool_)
            for start, stop in blocks(n, rows_in(max(_BLOCK_CELLS, n * m // _MOST_BLOCKS), m)):
                places, columns = search.matches(start, stop)
                places *= m
                places += columns
                cells[places] = True
                del places, columns  # free them before the next block is searched
            return torch.from_numpy(cells.reshape(n, m))
        matrix = torch.zeros((n, m), dtype=torch.bool, device=query.device)

        def take(mat: Tensor, start: int) -> None:
            matrix[start : start + len(mat)] = mat

        self._each_block_of_matches(query, reference, number, take)
        return matrix

    @undisturbed
    def get_match_indices(
        self, query_emb: Tensor, ref_emb: Tensor | None = None, threshold: float | None = None
    ) -> Tensor:
        """Return all matching pairs, with memory for these pairs only.

        Args:
            query_emb: as for ``get_match_matrix``.
            ref_emb: as for ``get_match_matrix``.
            threshold: as for ``get_match_matrix``.

        Returns:
            ``(number of matches, 2)`` int64, on the embeddings' device: query row and reference row, in the order of
            the matrix read row by row.

        Raises:
            TypeError: as ``get_match_matrix``.
            ValueError: as ``get_match_matrix``.
            MemoryError: the matching pairs do not fit in memory.
        """
        query, reference, number = self._checked(query_emb, ref_emb, threshold)
        support = native_support(self.distance, query, reference, _NAMES)
        if support.metric is not None:
            search = _NativeSearch(support, query, reference, number, bool(self.distance.is_inverted))
            rows, columns = search.matches(0, len(query))
            pairs = np.empty((len(rows), 2), dtype=np.int64)
            pairs[:, 0] = rows
            pairs[:, 1] = columns
            return torch.from_numpy(pairs)
        found = [torch.empty((0, 2), dtype=torch.long, device=query.device)]

        def take(mat: Tensor, start: int) -> None:
            pairs = mat.nonzero()
            pairs[:, 0] += start
            found.append(pairs)

        self._each_block_of_matches(query, reference, number, take)
        return torch.cat(found)

    @undisturbed
    def is_match(self, x: Tensor, y: Tensor, threshold: float | None = None) -> Tensor:
        """Return which pairs of rows at equal positions match, without the matrix.

        Args:
            x: ``(n, d)``, finite.
            y: ``(n, d)``, finite, on the same device.
            threshold: for this call; ``None``: the finder's.

        Returns:
            ``(n,)`` bool, on the embeddings' device, even for one row: whether row ``i`` of ``x`` matches row ``i`` of
            ``y``.

        Raises:
            TypeError: as ``get_match_matrix``.
            ValueError: as ``get_match_matrix``, or the numbers of rows differ.
        """
        number = self._threshold(threshold)
        return _keeps_to(self.pairwise(x, y), number, bool(self.distance.is_inverted))

    @undisturbed
    def pairwise(self, x: Tensor, y: Tensor, pairs: Tensor | None = None) -> Tensor:
        """Return the values of pairs of rows at equal positions, which all methods compare with the threshold.

        A threshold selected on these scores gives the same decisions in ``is_match``.

        Args:
            x: ``(n, d)``, finite.
            y: ``(n, d)``, finite, on the same device.
            pairs: ``(n, 2)`` integers: measure row ``pairs[i, 0]`` of ``x`` and row ``pairs[i, 1]`` of ``y``, which may
                then have different numbers of rows. They are gathered in blocks: no copy of all pairs is made.

        Returns:
            ``(n,)`` distances or similarities in the dtype that ``CustomKNN`` returns, on the embeddings' device,
            without a graph.

        Raises:
            TypeError: an embedding is not a tensor.
            ValueError: a shape, type, dimension or device is invalid, the numbers of rows differ, or a row holds a NaN
                or infinity.
        """
        check_embeddings(self.distance, x, y, _PAIRED_NAMES, arrays_go_to=_ELSEWHERE)
        if pairs is not None:
            check_finite(x, "x")
            check_finite(y, "y")
            left, right = checked_pair_rows(pairs, len(x), len(y))
            parts = [
                self.pairwise(x[left[start:stop]], y[right[start:stop]])
                for start, stop in blocks(len(left), rows_in(_BLOCK_ELEMENTS, x.shape[-1]))
            ]
            return torch.cat(parts) if parts else self.pairwise(x[:0], y[:0])
        if len(x) != len(y):
            raise ValueError(f"x and y must have the same number of rows, got {len(x)} and {len(y)}")
        check_finite(x, "x")
        check_finite(y, "y")
        support = native_support(self.distance, x, y, _PAIRED_NAMES)
        if support.metric is not None:
            pair = native_pair(x, y)
            measured = _core.pairwise(pair.query, pair.searched, support.metric, bfloat16=pair.bfloat16, p=support.p)
            return torch.from_numpy(measured).to(_dtype_of_values(support, x, y))
        with torch.no_grad(), autocast_off(x.device.type):
            values = _measured_by_torch(self.distance, x.detach(), y.detach())
        if not isinstance(values, Tensor) or values.shape != (len(x),):
            given = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"distance.pairwise must return a tensor of shape {(len(x),)}, got {given}")
        return values.detach()

    @undisturbed
    def get_matching_pairs(
        self,
        query_emb: Tensor,
        ref_emb: Tensor | None = None,
        threshold: float | None = None,
        return_tuples: bool = False,
    ) -> npt.NDArray[np.bool_] | list[tuple[int, int]]:
        """Return the matches in the form of pytorch-metric-learning 2.9.

        Args:
            query_emb: as for ``get_match_matrix``.
            ref_emb: as for ``get_match_matrix``.
            threshold: as for ``get_match_matrix``.
            return_tuples: whether to return a list of pairs.

        Returns:
            The match matrix as a NumPy array, ``(n, m)`` bool; with ``return_tuples`` a list of the matching pairs
            ``(query row, reference row)``, in the order of the matrix read row by row.

        Raises:
            TypeError: as ``get_match_matrix``, or ``return_tuples`` is not a bool.
            ValueError: as ``get_match_matrix``.
        """
        if as_flag(return_tuples, "return_tuples"):
            return [(row, column) for row, column in self.get_match_indices(query_emb, ref_emb, threshold).tolist()]
        matrix: npt.NDArray[np.bool_] = self.get_match_matrix(query_emb, ref_emb, threshold).cpu().numpy()
        return matrix

    def __repr__(self) -> str:
        return f"MatchFinder({self.distance!r}, threshold={self.threshold})"

    def _threshold(self, given: float | None) -> float:
        chosen = self.threshold if given is None else given
        if chosen is None:
            raise ValueError("threshold must be given to the finder or to the call, got None for both")
        return _as_threshold(chosen)

    def _checked(
        self, query_emb: Tensor, ref_emb: Tensor | None, threshold: float | None
    ) -> tuple[Tensor, Tensor, float]:
        number = self._threshold(threshold)
        reference = query_emb if ref_emb is None else ref_emb
        check_embeddings(self.distance, query_emb, reference, _NAMES, arrays_go_to=_ELSEWHERE)
        return query_emb, reference, number

    def _each_block_of_matches(self, query: Tensor, reference: Tensor, threshold: float, take: Take) -> None:
        """Call ``take(matches, start)`` with blocks of rows of the match matrix, measured by torch."""
        query, reference, dtype = prepare_for_torch(self.distance, query, reference, _NAMES)
        if len(query) == 0 or len(reference) == 0:
            return
        inverted = bool(self.distance.is_inverted)

        def decide(mat: Tensor, start: int) -> None:
            take(_keeps_to(mat if dtype is None else mat.to(dtype), threshold, inverted), start)

        each_block(self.distance, query, reference, rows_in(_BLOCK_ELEMENTS, len(reference)), decide)


class _NativeSearch:
    """Matches of blocks of queries, found by the core."""

    def __init__(
        self, support: NativeSupport, query: Tensor, reference: Tensor, threshold: float, inverted: bool
    ) -> None:
        # Checked here, so that errors have the argument names, and row numbers over all blocks.
        check_finite(query, _NAMES[0])
        if reference is not query:
            check_finite(reference, _NAMES[1])
        assert support.metric is not None, "otherwise the callers measure with torch"
        self.m = len(reference)
        self.references = References(native_pair(query, reference), support.metric, p=support.p)
        self.bound = _core_bound(threshold, _dtype_of_values(support, query, reference), inverted)

    def matches(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return query and reference rows of the matches of the queries ``start`` to ``stop``, row by row."""
        if self.bound is None:
            return np.repeat(np.arange(start, stop), self.m), np.tile(np.arange(self.m), stop - start)
        query, columns, _ = self.references.pairs(start, stop, self.bound, return_distances=False)
        return query, columns


def _as_threshold(value: Any) -> float:
    """Return ``value`` as a ``float``; a 0-D tensor is accepted."""
    if isinstance(value, Tensor) and value.ndim == 0:
        value = value.item()
    return as_real(value, "threshold", finite=False)


def _keeps_to(values: Tensor, threshold: float, inverted: bool) -> Tensor:
    return values >= threshold if inverted else values <= threshold


def _dtype_of_values(support: NativeSupport, query: Tensor, reference: Tensor) -> torch.dtype:
    """Return the type of the values that ``CustomKNN`` returns for a distance that the core computes."""
    return result_dtype(torch.promote_types(query.dtype, reference.dtype), support.normalized)


def _core_bound(threshold: float, dtype: torch.dtype, inverted: bool) -> float | None:
    """Return the core's bound that gives the same decisions as ``threshold`` on a tensor of ``dtype``.

    The core compares values rounded to float32, or float64 for float64 rows, with a finite float64 number. The largest
    finite number stands for infinity: it differs only for an inner product of float64 rows with exactly that value.

    Returns:
        The bound; ``None`` if every pair is within the threshold.
    """
    # Rounding is symmetric about zero, so a minimum similarity is a maximum of the negated values.
    sign = -1.0 if inverted else 1.0
    largest = _largest_within(sign * threshold, dtype)
    return None if largest == math.inf else sign * max(largest, -sys.float_info.max)


def _largest_within(threshold: float, dtype: torch.dtype) -> float:
    """Return the largest number that, rounded to ``dtype``, is at most ``threshold`` rounded to ``dtype``."""
    rounded = torch.tensor(threshold, dtype=dtype, device="cpu")
    if dtype not in HALF_DTYPES or rounded.isinf():
        return float(rounded)
    # Only values of normalised rows, at most 4 in magnitude, are rounded to half types. Their bits increase with the
    # magnitude.
    bits = int(rounded.view(torch.int16))
    bits = 1 if rounded == 0 else bits + 1 if rounded > 0 else bits - 1
    above = torch.tensor(bits, dtype=torch.int16, device="cpu").view(dtype)
    # The midpoint is exact in float32, the type of the values before rounding; the midpoint itself rounds to even.
    middle = (float(rounded) + float(above)) / 2
    of_middle = torch.tensor(middle, dtype=torch.float32, device="cpu").to(dtype)
    return middle if of_middle <= rounded else math.nextafter(middle, -math.inf)


def _measured_by_torch(distance: Any, x: Tensor, y: Tensor) -> Any:
    """Return ``distance.pairwise(x, y)`` or, if the distance lacks it, the diagonals of small matrices."""
    if hasattr(distance, "pairwise"):
        return distance.pairwise(x, y)
    matrix = distance.distance if is_batched(distance) else distance
    diagonals = [
        matrix(left, right).diagonal()
        for left, right in zip(torch.split(x, _DIAGONAL_ROWS), torch.split(y, _DIAGONAL_ROWS), strict=True)
        if len(left)
    ]
    return torch.cat(diagonals) if diagonals else x.new_empty(0)
