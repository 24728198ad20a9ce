"""Rows for `benches.digest`: the same bits on every machine and with every version of NumPy.

    splitmix64(seed, i) ──bit fields, sums, shifts──> whole numbers ──times a power of two──> floating-point rows

Every step is integer arithmetic or exact; `exactly` checks the last one. The generators of NumPy and torch may change
from one version to the next, and functions such as `log` and `cos` differ between machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]
Whole = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E37_79B9_7F4A_7C15

_TYPES: dict[str, tuple[Any, int]] = {
    "float64": (np.float64, 0),
    "float32": (np.float32, 0),
    "float16": (np.float16, 7),
    "bfloat16": (ml_dtypes.bfloat16, 10),
}
"""Floating types, and the number of low bits of `bell` that are dropped so that the rest is exact."""

DTYPES = tuple(_TYPES)


def words(count: int, seed: int) -> npt.NDArray[np.uint64]:
    """`count` 64-bit words of the generator splitmix64."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64((seed << 32) & _MASK)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return z ^ (z >> np.uint64(31))


def below(bound: int, count: int, seed: int) -> Whole:
    """`count` numbers from 0 to `bound - 1`."""
    return (words(count, seed) % np.uint64(bound)).astype(np.int64)


def bell(count: int, dimension: int, seed: int) -> Whole:
    """Numbers within 2**17 of 0, most of them near 0: sums of four 16-bit numbers."""
    fields = words(count * dimension, seed)
    total = sum(((fields >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4))
    return np.asarray(total - 2 * 0xFFFF).reshape(count, dimension)


def exactly(whole: Whole, exponent: int, dtype: Any = np.float32) -> Rows:
    """`whole * 2**exponent` in a floating type, which must represent these numbers."""
    exact = whole.astype(np.float64) * 2.0**exponent
    rows = exact.astype(dtype)
    assert (rows.astype(np.float64) == exact).all(), "the type does not represent these numbers"
    return rows


def _rows(whole: Whole, dtype: str, seed: int) -> Rows:
    kind, dropped = _TYPES[dtype]
    if kind is np.float64:
        # 30 more bits than float32 represents.
        low = (words(whole.size, seed + 500) >> np.uint64(34)).astype(np.int64).reshape(whole.shape)
        return exactly((whole << 30) + low, -46, kind)
    return exactly(whole >> dropped, dropped - 16, kind)


def spread_rows(count: int, dimension: int, seed: int, dtype: str = "float32") -> Rows:
    """Independent numbers of deviation 0.58 about 0: many rows at similar distances."""
    return _rows(bell(count, dimension, seed), dtype, seed)


def clustered_rows(count: int, dimension: int, seed: int, dtype: str = "float32", clusters: int = 40) -> Rows:
    """Rows close to common centres, which depend on `dimension` and `clusters` alone."""
    centres = bell(clusters, dimension, 1000 + dimension)
    own = below(clusters, count, seed + 250)
    return _rows(centres[own] + (bell(count, dimension, seed) >> 3), dtype, seed)


def class_of_rows(count: int, seed: int) -> Whole:
    """Classes of the rows of `clustered_rows` with 40 clusters: four clusters form a class, a sixth of the rows strays.

    The first row is the only one of its class.
    """
    classes = below(40, count, seed + 250) // 4
    strays = below(6, count, seed + 251) == 0
    classes[strays] = below(13, count, seed + 252)[strays]
    classes[0] = 100 + seed
    return classes


def grid_rows(count: int, dimension: int, seed: int, values: int = 3) -> Rows:
    """Small whole numbers: few distinct distances, many equal rows."""
    return exactly(below(values, count * dimension, seed).reshape(count, dimension), 0)


def offset_rows(count: int, dimension: int, seed: int) -> Rows:
    """100 plus noise below 0.01: the differences of rows are small beside their norms."""
    return exactly((100 << 16) + (bell(count, dimension, seed) >> 8), -16)


def two_scales_rows(count: int, dimension: int, seed: int, column: int) -> Rows:
    """Rows whose first column is `2**column` or its negative, which leaves a filter few bits for the others."""
    whole = bell(count, dimension, seed) >> 8
    whole[:, 0] = (2 * below(2, count, seed + 250) - 1) << (column + 16)
    return exactly(whole, -16)


def subnormal_rows(count: int, dimension: int, seed: int) -> Rows:
    """Numbers of either sign below twice the smallest normal float32; half of them are subnormal."""
    bits = (words(count * dimension, seed) & np.uint64(0x80FF_FFFF)).astype(np.uint32)
    return bits.view(np.float32).reshape(count, dimension)


def subnormal_float16_rows(count: int, dimension: int, seed: int) -> Rows:
    """`subnormal_rows` of float16."""
    bits = (words(count * dimension, seed) & np.uint64(0x87FF)).astype(np.uint16)
    return bits.view(np.float16).reshape(count, dimension)


def subnormal_float64_rows(count: int, dimension: int, seed: int) -> Rows:
    """`subnormal_rows` of float64."""
    bits = words(count * dimension, seed) & np.uint64(0x801F_FFFF_FFFF_FFFF)
    return bits.view(np.float64).reshape(count, dimension)


def equidistant_rows(count: int, dimension: int, seed: int) -> Rows:
    """Unit vectors along the axes plus noise of 2**-23 at most: about equally far from rows near 0."""
    whole = bell(count, dimension, seed)
    whole[np.arange(count), np.arange(count) % dimension] = 1 << 40
    return exactly(whole, -40)


def hard_rows() -> Iterator[tuple[str, Rows]]:
    """Rows whose numbers are large, small, far away, or of very different sizes."""
    yield "offset", offset_rows(400, 12, 1)
    for exponent in (20, 60, 100):
        giant = clustered_rows(400, 12, 2)
        giant[5] *= np.float32(2.0**exponent)
        yield f"one row 2**{exponent} times as long", giant
    zeros = clustered_rows(400, 12, 3)
    zeros[::5] = 0
    yield "zero rows", zeros
    yield "only zeros", np.zeros((400, 12), np.float32)
    yield "subnormal", subnormal_rows(400, 12, 4)
    yield "subnormal float64", subnormal_float64_rows(400, 12, 5)
    yield "subnormal float16", subnormal_float16_rows(400, 12, 13)
    yield "large", exactly(bell(400, 12, 6), 108)
    yield "large float64", exactly(bell(400, 12, 7), 1000, np.float64)
    scales = clustered_rows(400, 12, 8)
    scales = np.ldexp(scales, (below(120, 400, 9) - 60).astype(np.int32)[:, None])
    yield "rows of many sizes", scales
    yield "equidistant", equidistant_rows(400, 12, 10)
    close = offset_rows(400, 12, 11).astype(np.float64)
    close += exactly(bell(400, 12, 12), -60, np.float64)
    yield "offset float64", close


def is_bfloat16(rows: Rows) -> bool:
    """Whether the rows are bfloat16, a type that NumPy itself does not have."""
    return bool(rows.dtype.name == "bfloat16")


def bits(rows: Rows) -> Rows:
    """The rows as `exactknn._core` reads them: bfloat16 as its bits."""
    return rows.view(np.uint16) if is_bfloat16(rows) else rows
