"""Groups of `benches.digest`: k nearest, radius, ranks and pairs, of rows that are searched once.

A group is a generator of cases: a name, and what one call returned. Sizes are the smallest that take a path; the
constants of `plan.rs` say which ones do. `exactknn._core` is called only where the package has no function: for metrics
that `knn` and `radius` do not name, for ranks, and for the values of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import exactknn
from benches.digest_rows import (
    DTYPES,
    Rows,
    Whole,
    bell,
    below,
    bits,
    clustered_rows,
    equidistant_rows,
    exactly,
    grid_rows,
    hard_rows,
    is_bfloat16,
    spread_rows,
    two_scales_rows,
)
from exactknn import _core

Cases = Iterator[tuple[str, Any]]

Metric = tuple[str, float | None]

PUBLIC: tuple[Metric, ...] = (
    ("sqeuclidean", None),
    ("euclidean", None),
    ("cosine", None),
    ("inner_product", None),
    ("cityblock", None),
    ("chebyshev", None),
    ("minkowski", 3),
)
CORE: tuple[Metric, ...] = (
    ("cosine_similarity", None),
    ("normalized_sqeuclidean", None),
    ("normalized_euclidean", None),
)
"""Metrics of `exactknn.Index` that `exactknn.knn` does not name."""
POWERS = (0.5, 1, 1.5, 2, 2.7, 4, 64.5, math.inf)

WITHIN = {
    "sqeuclidean": 0.1,
    "euclidean": 0.3,
    "cosine": 0.02,
    "inner_product": 4.5,
    "cityblock": 0.85,
    "chebyshev": 0.15,
    "minkowski": 0.2,
    "cosine_similarity": 0.98,
    "normalized_sqeuclidean": 0.03,
    "normalized_euclidean": 0.2,
}
"""Radii that contain a few rows of a query's cluster, of 12 columns."""


def named(metric: Metric) -> str:
    """The metric, with its exponent where it has one."""
    return metric[0] if metric[1] is None else f"{metric[0]} p={metric[1]:g}"


def _knn(query: Rows, reference: Rows | None, k: int, metric: Metric, **options: Any) -> Any:
    name, p = metric
    if metric not in CORE:
        return exactknn.knn(query, reference, k, metric=name, p=p, **options)
    searched = None if reference is None else bits(reference)
    return _core.knn(bits(query), searched, k, name, bfloat16=is_bfloat16(query), **options)


def _radius(query: Rows, reference: Rows | None, r: float, metric: Metric, **options: Any) -> Any:
    name, p = metric
    if metric not in CORE:
        return exactknn.radius(query, reference, r, metric=name, p=p, **options)
    searched = None if reference is None else bits(reference)
    return _core.radius(bits(query), searched, r, name, bfloat16=is_bfloat16(query), **options)


# --- k nearest -----------------------------------------------------------------------------------------------------


def metrics() -> Cases:
    """Every metric, by the paths of few and of many queries."""
    reference, queries = clustered_rows(900, 17, 1), clustered_rows(300, 17, 2)
    for metric in (*PUBLIC, *CORE, *(("minkowski", p) for p in POWERS)):
        for n, k in ((3, 5), (20, 1), (20, 12), (300, 1), (300, 12)):
            yield f"{named(metric)}, {n} queries, k {k}", _knn(queries[:n], reference, k, metric)
    # Below 1 there is no filter: every pair takes powers.
    yield "minkowski p=0.7", _knn(queries[:20], reference, 12, ("minkowski", 0.7))


def counts() -> Cases:
    """Numbers of queries and neighbours around those at which the plan changes."""
    reference, queries = clustered_rows(1500, 24, 1), clustered_rows(800, 24, 2)
    for metric in (("sqeuclidean", None), ("inner_product", None), ("cityblock", None)):
        for n in (0, 1, 2, 3, 5, 8, 9, 20, 32, 33, 40, 200, 800):
            for k in (0, 1, 7, 8, 30, 100, 187, 188, 1500):
                if n * k <= 80_000:
                    yield f"{metric[0]}, {n} queries, k {k}", _knn(queries[:n], reference, k, metric)
    yield "all neighbours", exactknn.knn(queries[:5], reference, None)


def shapes() -> Cases:
    """Dimensions and numbers of references that fill vectors, panels and blocks, or miss them by one."""
    for dimension in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 130, 770):
        reference, queries = clustered_rows(400, dimension, 1), clustered_rows(90, dimension, 2)
        for metric in (("sqeuclidean", None), ("cosine", None), ("chebyshev", None)):
            for n in (4, 90):
                yield f"{metric[0]}, dimension {dimension}, {n} queries", _knn(queries[:n], reference, 6, metric)
    reference, queries = spread_rows(4200, 10, 1), spread_rows(60, 10, 2)
    for rows in (1, 2, 5, 191, 192, 193, 255, 257, 1025, 4200):
        for n in (1, 60):
            yield f"{rows} references, {n} queries", exactknn.knn(queries[:n], reference[:rows], min(rows, 5))


def types() -> Cases:
    """Every floating type, and pairs of types."""
    for dtype in DTYPES:
        reference, queries = clustered_rows(700, 20, 1, dtype), clustered_rows(260, 20, 2, dtype)
        for metric in (*PUBLIC, *CORE):
            for n in (2, 20, 260):
                yield f"{dtype}, {named(metric)}, {n} queries", _knn(queries[:n], reference, 9, metric)
        yield f"{dtype}, self", exactknn.knn(reference, k=9)
    for left, right in (
        ("float16", "float32"),
        ("bfloat16", "float16"),
        ("float32", "float64"),
        ("bfloat16", "float64"),
    ):
        reference, queries = clustered_rows(700, 20, 1, right), clustered_rows(40, 20, 2, left)
        yield f"{left} among {right}", exactknn.knn(queries, reference, 9)


def ties() -> Cases:
    """Distances that many rows share: the lowest row comes first."""
    reference, queries = grid_rows(1200, 5, 1), grid_rows(300, 5, 2)
    for metric in (*PUBLIC, *CORE):
        for n in (2, 20, 300):
            for k in (1, 10, 100):
                yield f"{named(metric)}, {n} queries, k {k}", _knn(queries[:n], reference, k, metric)
        yield f"{named(metric)}, self", _knn(reference, None, 7, metric, exclude_self=True)
    one = np.repeat(grid_rows(1, 5, 3), 600, axis=0)
    for n in (2, 20, 300):
        yield f"equal rows, {n} queries", exactknn.knn(queries[:n], one, 12)
    yield "equal rows, self", exactknn.knn(one, k=12)
    wide, halves = grid_rows(900, 6, 4).astype(np.float64), grid_rows(900, 6, 5, values=2).astype(np.float16)
    yield "float64", exactknn.knn(wide[:100], wide, 20)
    yield "float16", exactknn.knn(halves[:100], halves, 20)


def extremes() -> Cases:
    """Numbers at the ends of their type's range."""
    for name, rows in hard_rows():
        queries = np.concatenate([rows[::40], rows[3:240:2]])
        for metric in (*PUBLIC, *CORE):
            for n in (20, len(queries)):
                yield f"{name}, {named(metric)}, {n} queries", _knn(queries[:n], rows, 7, metric)


def filters() -> Cases:
    """Rows for which the first filter does not pay, and a sample that misleads."""
    # Four threads try a filter on the first 96 queries, and only where there are eight times as many.
    queries = spread_rows(800, 16, 2)
    works: dict[str, tuple[Rows, Rows]] = {
        "int8 passes half": (two_scales_rows(800, 16, 2, 2), two_scales_rows(700, 16, 1, 2)),
        "float32 passes half": (two_scales_rows(800, 16, 2, 6), two_scales_rows(700, 16, 1, 6)),
        "every filter passes all": (exactly(bell(800, 16, 2), -40), equidistant_rows(700, 16, 1)),
        "equal rows": (queries, np.repeat(grid_rows(1, 16, 1), 700, axis=0)),
        "filters pass few": (spread_rows(800, 96, 2), spread_rows(700, 96, 1)),
    }
    # The sample is every eighth panel of rows. Here the first panel holds the nearest rows, so that the threshold from
    # the sample excludes neighbours and the queries are searched again.
    misled = spread_rows(700, 16, 3)
    misled[8:] += np.float32(16)
    works["sample misleads"] = (queries, misled)
    for name, (query, reference) in works.items():
        for metric in PUBLIC[:6]:
            yield f"{name}, {metric[0]}", _knn(query, reference, 20, metric)
        yield f"{name}, sqeuclidean, k 3", exactknn.knn(query, reference, 3)
        yield f"{name}, float64", exactknn.knn(query.astype(np.float64), reference.astype(np.float64), 5)
        if name in ("int8 passes half", "every filter passes all"):
            found = exactknn.knn(query[:200], reference[:210], 5, metric="minkowski", p=2.7)
            yield f"{name}, minkowski p=2.7", found


def self_search() -> Cases:
    """Rows among themselves, each without itself."""
    for rows in (2, 30, 150, 700):
        small = clustered_rows(rows, 14, 1)
        for metric in (*PUBLIC, *CORE):
            yield f"{rows} rows, {named(metric)}", _knn(small, None, min(rows - 1, 9), metric, exclude_self=True)
    yield "with itself", exactknn.knn(small, k=9, exclude_self=False)
    yield "all others", exactknn.knn(small[:200], k=None)
    yield "first rows of the reference", exactknn.knn(small[:90], small, 9, exclude_self=True)
    # From 4,096 queries after those that try the filter, a tile of pairs serves both sides where the kernel has one.
    many = spread_rows(4300, 24, 2)
    for metric in (("sqeuclidean", None), ("cosine", None), ("normalized_euclidean", None), ("inner_product", None)):
        yield f"4,300 rows, {metric[0]}", _knn(many, None, 6, metric, exclude_self=True)
    tied = grid_rows(4300, 24, 3, values=2)
    yield "4,300 rows, ties", exactknn.knn(tied, k=7)
    for dtype in ("float64", "bfloat16"):
        yield f"4,300 rows, {dtype}", exactknn.knn(spread_rows(4300, 24, 4, dtype), k=2)
    more = spread_rows(8000, 24, 5)
    yield "4,300 of 8,000 rows", exactknn.knn(more[:4300], more, 3, exclude_self=True)


# --- radius, ranks, pairs ------------------------------------------------------------------------------------------


ORDERS: dict[str, dict[str, Any]] = {
    "distances by value": {"return_distances": True, "sort": True},
    "distances by row": {"return_distances": True, "sort": False},
    "rows by value": {"return_distances": False, "sort": True},
    "rows by row": {"return_distances": False, "sort": False},
}
"""The forms of a result of `radius`."""


def radius() -> Cases:
    """Rows within a radius: with and without distances, by value and by row, from one side and from both."""
    for dtype in DTYPES:
        reference, queries = clustered_rows(1100, 12, 1, dtype), clustered_rows(120, 12, 2, dtype)
        for metric in (*PUBLIC, *CORE) if dtype == "float32" else PUBLIC[1:3]:
            name, r = f"{dtype}, {named(metric)}", WITHIN[metric[0]]
            yield f"{name}, defaults", _radius(queries, reference, r, metric)
            yield f"{name}, 3 queries", _radius(queries[:3], reference, r, metric)
            for order, form in ORDERS.items():
                yield f"{name}, {order}", _radius(queries, reference, r, metric, **form)
                # By row, from 1,024 rows: where the metric allows, each pair is formed from one side only.
                yield f"{name}, {order}, self", _radius(reference, None, r, metric, exclude_self=True, **form)
    reference, queries = clustered_rows(1100, 12, 1), clustered_rows(120, 12, 2)
    for order, form in ORDERS.items():
        yield f"{order}, with itself", exactknn.radius(reference, None, 0.1, exclude_self=False, **form)
        yield f"{order}, first rows", exactknn.radius(reference[:60], reference, 0.1, exclude_self=True, **form)
        yield f"{order}, all", exactknn.radius(queries[:20], reference, 1e6, **form)
        yield f"{order}, all, self", exactknn.radius(reference[:300], None, 1e6, **form)
        yield f"{order}, none", exactknn.radius(queries, reference, -1, **form)
        yield f"{order}, no queries", exactknn.radius(queries[:0], reference, 1, **form)
        yield f"{order}, few references", exactknn.radius(queries, reference[:50], 0.1, **form)
    tied = grid_rows(1100, 5, 3, values=4)
    for name, r in {"sqeuclidean": 2, "euclidean": 1, "cosine": 0, "inner_product": 25, "cityblock": 1}.items():
        for order, form in ORDERS.items():
            yield f"ties, {name}, {order}", exactknn.radius(tied, None, r, metric=name, **form)
    # A returned distance is inside a radius of that number; the number below it is not enough.
    wide, reference = queries[:40].astype(np.float64), reference.astype(np.float64)
    edge = float(exactknn.knn(wide, reference, 9)[0][0, -1])
    yield "edge", exactknn.radius(wide, reference, edge)
    yield "below the edge", exactknn.radius(wide, reference, math.nextafter(edge, 0))
    for name, rows in hard_rows():
        edge = float(exactknn.knn(rows[:1], rows, 9)[0][0, -1])
        if math.isfinite(edge):
            for order, form in ORDERS.items():
                yield f"{name}, {order}", exactknn.radius(rows[:200], rows, edge, **form)


def _targets(classes: Whole, query_classes: Whole, number: int) -> dict[str, Any]:
    """The references of each query's class, as `_core.ranks` takes them."""
    rows = np.argsort(classes, kind="stable").astype(np.int64)
    offsets = np.searchsorted(classes[rows], np.arange(number + 1)).astype(np.int64)
    return {"query_group": query_classes, "group_offsets": offsets, "group_rows": rows[: offsets[-1]]}


def ranks() -> Cases:
    """Ranks of the references of a query's class, few and many of them, with and without the query itself."""
    reference, queries = clustered_rows(800, 12, 1), clustered_rows(300, 12, 2)
    among_themselves = {
        "clustered": reference,
        "ties": grid_rows(800, 5, 3),
        "two scales": two_scales_rows(800, 12, 4, 2),
        "equidistant": equidistant_rows(800, 12, 5),
    }
    # With more than 64 targets of a query the core counts in buckets. Of 900 classes some have no row or no query.
    for number in (5, 40, 900):
        classes, query_classes = below(number, 800, 7), below(number, 300, 8)
        targets = _targets(classes, query_classes, number)
        own = {**targets, "query_group": classes}
        for metric, p in (*PUBLIC, *CORE) if number == 40 else PUBLIC[1:4]:
            yield f"{number} classes, {metric}", _core.ranks(queries, reference, metric, p=p, **targets)
        for n in (1, 2, 8, 40):
            few = {**targets, "query_group": query_classes[:n]}
            yield f"{number} classes, {n} queries", _core.ranks(queries[:n], reference, "euclidean", **few)
        for name, rows in among_themselves.items():
            if number == 40 or name == "ties":
                found = _core.ranks(rows, None, "sqeuclidean", exclude_self=True, **own)
                yield f"{number} classes, {name}, self", found
        for first in (0, 500):
            part = {**targets, "query_group": classes[first : first + 250]}
            found = _core.ranks(
                reference[first : first + 250], reference, "cosine", exclude_self=True, first_query=first, **part
            )
            yield f"{number} classes, from row {first}", found
    targets = _targets(below(40, 800, 7), below(40, 300, 8), 40)
    for dtype in DTYPES:
        left, right = clustered_rows(300, 12, 2, dtype), clustered_rows(800, 12, 1, dtype)
        for metric in ("sqeuclidean", "cosine"):
            found = _core.ranks(bits(left), bits(right), metric, bfloat16=is_bfloat16(left), **targets)
            yield f"{dtype}, {metric}", found


def splits() -> Cases:
    """Few queries among many references: threads share the references of a query."""
    reference, queries = spread_rows(9000, 30, 3), spread_rows(60, 30, 4)
    classes = below(300, 9000, 5)
    for n in (1, 2, 20, 60):
        for metric in (("sqeuclidean", None), ("cosine", None), ("cityblock", None)):
            for k in (1, 10, 100):
                yield f"{metric[0]}, {n} queries, k {k}", _knn(queries[:n], reference, k, metric)
        for order, form in ORDERS.items():
            yield f"radius, {n} queries, {order}", exactknn.radius(queries[:n], reference, 10, **form)
        targets = _targets(classes, below(300, n, 6), 300)
        yield f"ranks, {n} queries", _core.ranks(queries[:n], reference, "sqeuclidean", **targets)


def pairwise() -> Cases:
    """Values of pairs named by position."""
    for dtype in DTYPES:
        left, right = clustered_rows(700, 19, 1, dtype), clustered_rows(700, 19, 2, dtype)
        for metric in (*PUBLIC, *CORE, *(("minkowski", p) for p in (0.7, *POWERS))):
            values = _core.pairwise(bits(left), bits(right), metric[0], p=metric[1], bfloat16=is_bfloat16(left))
            yield f"{dtype}, {named(metric)}", values
    for name, rows in hard_rows():
        for metric in (*PUBLIC, *CORE):
            yield f"{name}, {named(metric)}", _core.pairwise(rows, rows[::-1].copy(), metric[0], p=metric[1])


GROUPS: tuple[Callable[[], Cases], ...] = (
    metrics,
    counts,
    shapes,
    types,
    ties,
    extremes,
    filters,
    self_search,
    radius,
    ranks,
    splits,
    pairwise,
)
