"""Search with the core's metrics on CUDA, MPS and other devices, with the core's results.

    query, reference, on one device
        -> _Filter._kept:   blocks of references x blocks of queries, one product each
                              an upper bound of every key; the k + margin largest across the blocks are candidates
        -> _Filter._scored: float64 values of the candidates, as in the core; sorted by (value, row)
                              certified: no bound of a rejected row reaches the k-th value
        -> not certified    -> again with products in float64, if the device has them
        -> still not        -> _core.knn on the CPU: ties at the cutoff, numbers out of range

The host synchronises once per pass, when it transfers which queries are not certified. The bound is derived in
docs/exactness.md ("The filter on devices"). It holds for any summation order, and each product contains a probe that
detects truncated factors (TF32, bfloat16), independently of the settings. Tensors in CPU memory work too, which tests
this code without a device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from exactknn._arrays.blocks import blocks
from exactknn._references import References
from exactknn.distances.base import autocast_off
from exactknn.evaluation._device import memory
from exactknn.evaluation._device.memory import LEAST_BYTES
from exactknn.evaluation._device.values import Values, norm_of, normalizes
from exactknn.evaluation._dispatch import NativeSupport, native_pair

# Devices with IEEE float64 arithmetic. For others, candidates are measured on the CPU.
_FLOAT64_DEVICES = ("cpu", "cuda")


# Maximum query rows of a block, cells of a block of keys (1 GiB in float32), and bytes of rows measured at a time.
_BLOCK_ROWS = 4096
_BLOCK_CELLS = 1 << 28
_SCORED_BYTES = 1 << 28

# Rows sampled for the centre and the scale.
_SAMPLE = 1024

# At this many columns or more, the bound does not hold in float32.
_LONGEST = 1 << 18

# Exceeds the underflow error of a float64 value.
_TINY = 2.0**-960

Scored = tuple[Tensor, Tensor, Tensor]
"""Values and rows, nearest first, and for each query whether they are certified."""


class _Level(NamedTuple):
    """Floating type of the keys, with the constants of the error bound."""

    dtype: torch.dtype
    unit: float
    """Unit roundoff."""
    tau: float
    """``unit * tau`` exceeds the underflow error of a row's numbers."""
    floor: float
    """Exceeds the underflow error of a key's products."""
    largest: float
    """Norm up to which no key overflows."""
    probe: float
    """A number that a type with fewer digits cannot represent."""


_SINGLE = _Level(torch.float32, 2.0**-24, 2.0**-50, 2.0**-98, 2.0**58, 1 + 2.0**-12)
_DOUBLE = _Level(torch.float64, 2.0**-53, 2.0**-500, 2.0**-990, 2.0**480, 1 + 2.0**-40)


def search(
    support: NativeSupport,
    query: Tensor,
    k: int,
    reference: Tensor,
    exclude_self: bool,
    *,
    num_threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` nearest references of each query, with the core's results.

    Args:
        support: the metric, one of `METRICS`.
        query: ``(n, d)``, finite, floating, ``d`` at least 1.
        k: from 0 to the number of references that are not excluded.
        reference: ``(m, d)``, likewise, on the same device.
        exclude_self: query ``i`` is reference row ``i``, and excluded.
        num_threads: threads of the core, for queries that fall back to it.

    Returns:
        ``(distances, indices)``, ``(n, k)``, on the device: float64 if either side is, else float32; int64.
    """
    assert support.metric is not None, "otherwise the caller calls the distance"
    n, device = len(query), query.device
    wide = torch.float64 in (query.dtype, reference.dtype)
    query, reference = query.detach(), reference.detach()
    distances = query.new_empty((n, k), dtype=torch.float64 if wide else torch.float32)
    indices = query.new_empty((n, k), dtype=torch.long)
    if n == 0 or k == 0:
        return distances, indices
    remaining = torch.arange(n, device=device)
    with torch.no_grad(), autocast_off(device.type):
        for level in _levels(device, query.shape[1], wide):
            rows = query if len(remaining) == n else query[remaining]
            find = _Filter(support.metric, level, reference, k, exclude_self, distances.dtype)
            values, found, certified = _with_memory(device, find, rows, remaining if exclude_self else None)
            distances[remaining], indices[remaining] = values, found
            remaining = remaining[~certified]  # synchronises with the device
            if len(remaining) == 0:
                return distances, indices
        references = References(
            native_pair(query[remaining].cpu(), reference.cpu()),
            support.metric,
            exclude_self=exclude_self,
            own=remaining.cpu().numpy(),
            num_threads=num_threads,
        )
        answer = references.knn(0, len(remaining), k)
        values, found = torch.from_numpy(answer[0]), torch.from_numpy(answer[1])
        distances[remaining], indices[remaining] = values.to(device), found.to(device)
    return distances, indices


def _levels(device: torch.device, d: int, wide: bool) -> list[_Level]:
    """Return the levels of the passes before the fallback to the core."""
    if d >= _LONGEST or (device.type not in ("cuda",) and _flushes()):
        return []
    singles = [] if wide else [_SINGLE]
    return singles + ([_DOUBLE] if device.type in _FLOAT64_DEVICES else [])


def _flushes() -> bool:
    """Return whether this thread has denormals-are-zero set; torch's values then differ from the core's."""
    return bool(torch.tensor(2.0**-149).double() == 0)


def _with_memory(device: torch.device, find: _Filter, query: Tensor, own: Tensor | None) -> Scored:
    """Search, halving the block size each time the device runs out of memory."""
    room = memory.free_bytes(device)
    while True:
        try:
            return find(query, own, room)
        except RuntimeError as error:  # MPS has no specific exception type
            short = isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error)
            if not short or room < 2 * LEAST_BYTES:
                raise
        room //= 2  # outside the handler, where the exception no longer references tensors


# --- one pass -------------------------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """Rows encoded for the keys."""

    codes: Tensor
    """``(rows, d)`` centred, scaled and rounded; zeros if out of range."""
    size: Tensor
    """Upper bound of the norm before and after rounding."""
    error: Tensor
    """Upper bound of the norm of the rounding error, plus the noise of float64 values."""
    half: Tensor
    """Half the squared norm."""
    usable: Tensor
    """Whether the row is in range."""


class _Filter:
    """One pass over the references, with keys of one type."""

    def __init__(
        self, metric: str, level: _Level, reference: Tensor, k: int, exclude_self: bool, output: torch.dtype
    ) -> None:
        device, d = reference.device, reference.shape[1]
        self.metric, self.level, self.reference, self.k = metric, level, reference, k
        self.unit_rows = normalizes(metric)
        self.euclidean = metric.endswith("euclidean")
        others = len(reference) - exclude_self
        self.kept = min(k + 16 + k // 8, others)
        self.all_kept = self.kept == others
        exact = device.type in _FLOAT64_DEVICES
        self.home = device if exact else torch.device("cpu")
        self.wide = torch.float64 if exact else torch.float32
        self.noise = (d + 128) * (2.0**-53 if exact else 2.0**-24)
        self.output = output
        sample = self._widened(reference[:: max(1, len(reference) // _SAMPLE)]).nan_to_num()
        self.centre = sample.sort(dim=0).values[len(sample) // 2]  # the median, of any algorithm
        self.scale = _or_one((sample - self.centre).abs().amax())

    def __call__(self, query: Tensor, own: Tensor | None, room: int) -> Scored:
        """Return the nearest, in blocks that take about ``room`` bytes; ``own`` are reference rows to exclude."""
        kept, highest, sound = self._kept(query, own, room)
        return self._scored(query, kept, highest, sound, room)

    def _kept(self, query: Tensor, own: Tensor | None, room: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows with the largest bounds, ``(n, kept)``, the smallest of these bounds, and sound queries."""
        n, m, d = len(query), *self.reference.shape
        size = self.level.dtype.itemsize
        coded = (size + 32) * (d + 4)  # peak bytes of a row while it is encoded
        step = max(1, min(n, _BLOCK_ROWS, math.isqrt(room // (8 * size)), room // (4 * coded)))
        columns = max(1, min(m, _BLOCK_CELLS // step, room // (4 * size * step + 2 * coded)))
        best = query.new_full((n, self.kept), -math.inf, dtype=self.level.dtype)
        rows = query.new_zeros((n, self.kept), dtype=torch.long)
        sound = query.new_ones(n, dtype=torch.bool)
        for start, end in blocks(m, columns):
            references = self._references(self.reference[start:end])
            here = len(references) - 1
            for part in (slice(*block) for block in blocks(n, step)):
                queries, usable = self._queries(query[part])
                keys = queries @ references.T
                sound[part] &= usable & (keys[:, here] == self.level.probe)
                keys[:, here] = -math.inf
                if own is not None:
                    place = own[part] - start
                    place = torch.where((place >= 0) & (place < here), place, here)
                    keys.scatter_(1, place.unsqueeze(1), -math.inf)
                values, places = keys.topk(min(self.kept, here), dim=1, sorted=False)
                values, places = torch.cat([best[part], values], 1), torch.cat([rows[part], places + start], 1)
                best[part], chosen = values.topk(self.kept, dim=1, sorted=False)
                rows[part] = places.gather(1, chosen)
        return rows, best.amin(dim=1), sound

    def _references(self, reference: Tensor) -> Tensor:
        """Return ``(rows + 1, d + 4)``: codes and terms of the bound; the last row is nonzero only for the probe."""
        side, d = self._side(reference, self.centre, self.scale), reference.shape[1]
        share = 2 * (d + 16) * self.level.unit
        offset = torch.full_like(side.half, self.level.floor)
        if self.euclidean:
            offset += 1.25 * (side.size * side.error + (share + self.noise) * side.half) - side.half
        slope = (1.25 * (share * side.size + side.error)).masked_fill(~side.usable, math.inf)
        terms = torch.stack([slope, 1.25 * side.size, offset, torch.zeros_like(offset)], 1)
        terms[:, 1:].masked_fill_(~side.usable.unsqueeze(1), 0)
        block = side.codes.new_zeros((len(reference) + 1, d + 4))
        block[:-1, :d], block[:-1, d:] = side.codes, terms
        block[-1, -1] = 1
        return block

    def _queries(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(rows, d + 4)``, the factors of `_references`, and which rows are in range."""
        if self.euclidean:
            side = self._side(query, self.centre, self.scale)
        else:
            side = self._side(query, None, self._query_scale(query).to(self.wide))
        size = torch.where(side.usable, side.size, 1)
        error = torch.where(side.usable, side.error, 0)
        ones = torch.ones_like(size)
        terms = torch.stack([size, error, ones, self.level.probe * ones], 1)
        return torch.cat([side.codes, terms.to(self.level.dtype)], 1), side.usable

    def _side(self, rows: Tensor, centre: Tensor | None, scale: Tensor) -> _Side:
        level, moved = self.level, self._widened(rows)
        plain = self.euclidean and not self.unit_rows
        noise = 0 if plain else self.noise * norm_of(moved / scale)
        moved = (moved if centre is None else moved - centre) / scale
        norm = norm_of(moved)
        error = 4.25 * level.unit * norm + 1.0625 * noise + level.unit * level.tau
        size = 1.0625 * norm + error + level.tau
        usable = size <= level.largest
        codes = torch.where(usable.unsqueeze(1), moved, 0).to(level.dtype)
        return _Side(codes, size, error, norm.square() / 2, usable)

    def _widened(self, rows: Tensor) -> Tensor:
        """Return the rows for the keys, with norm 1 if the metric normalises."""
        rows = rows.to(self.wide)
        if not self.unit_rows:
            return rows
        largest = rows.abs().amax(dim=1, keepdim=True)
        if self.wide == torch.float32:
            # A device without float64 may treat denormals as zero. A NaN makes the row a candidate in any case.
            largest = largest.masked_fill(largest < 2.0**-120, math.nan)
        rows = rows / _or_one(largest)
        return rows / _or_one(norm_of(rows).unsqueeze(1))

    def _query_scale(self, query: Tensor) -> Tensor:
        """Return ``(rows, 1)`` query divisors, used if only references are centred; the same on every device."""
        if self.unit_rows:
            return query.new_ones((len(query), 1))
        return query.abs().amax(dim=1, keepdim=True).to(self.output).clamp(min=2.0**-100)

    def _scored(self, query: Tensor, rows: Tensor, highest: Tensor, sound: Tensor, room: int) -> Scored:
        device, home = query.device, self.home
        query, highest, sound, reference = (part.to(home) for part in (query, highest, sound, self.reference))
        rows = rows.to(home).sort(dim=1).values  # equal values keep this order
        room = min(room, _SCORED_BYTES)
        values = Values(self.metric, reference, self.output, room)
        step = values.rows_of(room, self.kept)
        parts = [torch.split(whole, step) for whole in (query, rows, highest, sound)]
        answers = [self._nearest(values, *block) for block in zip(*parts, strict=True)]
        nearest, found, certified = (torch.cat(blocks).to(device) for blocks in zip(*answers, strict=True))
        return nearest, found, certified

    def _nearest(self, values: Values, query: Tensor, rows: Tensor, highest: Tensor, sound: Tensor) -> Scored:
        """Return the nearest of the candidates."""
        measured = values.of(query, rows)
        rounded = measured.values.to(self.output)
        # Values outside float32's normal range are ranked by their float64 value.
        normal = rounded.isfinite() & (rounded.abs() >= torch.finfo(self.output).tiny)
        ranked = torch.where(normal, rounded.double(), measured.values)
        order = (ranked if self.euclidean else -ranked).sort(dim=1, stable=True).indices[:, : self.k]
        sound = sound & measured.as_core
        if not self.all_kept:
            last = measured.before_root.gather(1, order[:, -1:]).squeeze(1)
            sound = sound & self._certified(measured.query, self._query_scale(query), last, highest.double())
        return rounded.gather(1, order), rows.gather(1, order), sound

    def _certified(self, query: Tensor, scale: Tensor, last: Tensor, highest: Tensor) -> Tensor:
        """Return whether any row with a key of at most ``highest`` certainly ranks behind the value ``last``.

        Args:
            query: ``(n, d)``, float64, unit rows if the metric normalises.
            scale: of `_query_scale`.
            last: ``(n,)`` squared distance or similarity of the ``k``-th row.
            highest: ``(n,)``.
        """
        noise = 8 * (query.shape[1] / 2 + 64) * 2.0**-53
        rounding = noise + 8 * (2.0**-24 if self.output == torch.float32 else 2.0**-53)
        centre, unit = self.centre.to(self.home).double(), self.scale.to(self.home).double()
        if self.euclidean:
            square, key = (query - centre).square().sum(dim=1), 2 * unit.square() * highest
            gap = square - key - last
            room = rounding * last + noise * (square + key.abs() + 2 * self.unit_rows)
        else:
            key = scale.squeeze(1).double() * unit * highest
            most = key + (query * centre).sum(dim=1)
            gap = last - most
            room = rounding * (last.abs() + most.abs()) + noise * (norm_of(query) * norm_of(centre) + key.abs())
        return gap > room + _TINY


def _or_one(values: Tensor) -> Tensor:
    """Return the values, with zeros replaced by 1."""
    return torch.where(values == 0, 1, values)
