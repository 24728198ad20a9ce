"""Shared by the benchmarks: rows, the float64 ground truth, and a description of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Values = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

CLUSTERS = 2_000
SPREAD = 0.6  # norm of a row's offset from its cluster's unit centre, before the row is brought back to unit length


def clustered_rows(count: int, dimension: int, *, seed: int, clusters: int = CLUSTERS) -> Rows:
    """Return unit rows around common centres, like embeddings of a trained model.

    Args:
        count: number of rows.
        dimension: their length. The centres depend only on it and on `clusters`: rows of two seeds share them.
        seed: decides which centre each row belongs to, and its offset.
        clusters: number of centres.

    Returns:
        `(count, dimension)` float32, each row of length 1 up to rounding.
    """
    centres = np.random.default_rng([dimension, clusters]).standard_normal((clusters, dimension), dtype=np.float32)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    random = np.random.default_rng(seed)
    rows = random.standard_normal((count, dimension), dtype=np.float32)
    rows *= SPREAD / np.sqrt(dimension)
    rows += centres[random.integers(clusters, size=count)]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def correlated_rows(count: int, dimension: int, *, seed: int, rank: int = 48, noise: float = 0.3) -> Rows:
    """Return rows with correlated columns, like embeddings of text: a common mean, few directions, and noise.

    Args:
        count: number of rows.
        dimension: their length. The mean and the directions depend only on it and on `rank`.
        seed: determines the rows.
        rank: number of common directions; the j-th is 1 / sqrt(j) as wide as the first.
        noise: norm of a row's noise; its part in the common directions has norm 1.

    Returns:
        `(count, dimension)` float32.
    """
    common = np.random.default_rng([dimension, rank])
    mean = common.standard_normal(dimension, dtype=np.float32) * np.float32(0.5 / np.sqrt(dimension))
    widths = 1 / np.sqrt(np.arange(1, rank + 1))
    widths /= np.linalg.norm(widths)
    directions = common.standard_normal((rank, dimension)) / np.sqrt(dimension) * widths[:, None]
    random = np.random.default_rng(seed)
    rows = random.standard_normal((count, dimension), dtype=np.float32)
    rows *= np.float32(noise / np.sqrt(dimension))
    rows += random.standard_normal((count, rank), dtype=np.float32) @ directions.astype(np.float32)
    rows += mean
    return rows


def grid_rows(count: int, dimension: int, *, seed: int, values: int = 3) -> Rows:
    """Small integers: distances take few values, each many times."""
    return np.random.default_rng(seed).integers(values, size=(count, dimension)).astype(np.float32)


def offset_rows(count: int, dimension: int, *, seed: int) -> Rows:
    """Rows far from the origin and close together: 100 + 0.01 noise."""
    rows = np.random.default_rng(seed).standard_normal((count, dimension), dtype=np.float32)
    rows *= np.float32(0.01)
    rows += np.float32(100)
    return rows


def gaussian_rows(count: int, dimension: int, *, seed: int) -> Rows:
    """Independent normal numbers: in many dimensions all rows are about equally far from each other."""
    return np.random.default_rng(seed).standard_normal((count, dimension), dtype=np.float32)


def squared_distances(query: Rows, reference: Rows, indices: Ids) -> npt.NDArray[np.float64]:
    """Squared Euclidean distances of query `i` to the reference rows `indices[i]`, by float64 differences."""
    return exact_values(query, reference, indices, "sqeuclidean")


def exact_values(query: Rows, reference: Rows, indices: Ids, metric: str) -> npt.NDArray[np.float64]:
    """`sqeuclidean` or `inner_product` of query `i` and the reference rows `indices[i]`, in float64."""
    values = np.empty(indices.shape, np.float64)
    for row, chosen in enumerate(indices):
        wide, own = reference[chosen].astype(np.float64), query[row].astype(np.float64)
        if metric == "inner_product":
            np.sum(wide * own, axis=1, out=values[row])
        else:
            wide -= own
            np.einsum("kd,kd->k", wide, wide, out=values[row])
    return values


def truth(query: Rows, reference: Rows, k: int, metric: str = "sqeuclidean") -> tuple[Values, Ids]:
    """The `k` nearest references of each query by float64, ranked by (value rounded to float32, row number).

    A float64 matrix product proposes candidates, `exact_values` decides. There are enough candidates that all other
    rows are farther than the `k`-th neighbour by much more than the rounding error of the product.
    """
    q, r = query.astype(np.float64), reference.astype(np.float64)
    sign = -1.0 if metric == "inner_product" else 1.0  # keys: smallest first
    squares = (q * q).sum(axis=1)[:, None], (r * r).sum(axis=1)
    keys = -(q @ r.T) if metric == "inner_product" else squares[0] + squares[1] - 2 * (q @ r.T)
    wrong = 1e-13 * (squares[0].max(initial=0) + squares[1].max(initial=0))
    taken = min(len(reference), k + 32)
    while True:
        if taken == len(reference):
            candidates = np.broadcast_to(np.arange(taken), (len(query), taken))
        else:
            candidates = np.argpartition(keys, taken - 1, axis=1)[:, :taken].astype(np.int64)
            candidates.sort(axis=1)
        ranked = sign * exact_values(query, reference, candidates, metric).astype(np.float32)
        order = np.argsort(ranked, axis=1, kind="stable")[:, :k]
        ranked = np.take_along_axis(ranked, order, axis=1)
        indices = np.take_along_axis(candidates, order, axis=1)
        last = ranked[:, -1].astype(np.float64)
        border = np.partition(keys, taken - 1, axis=1)[:, taken - 1]
        if taken == len(reference) or (border > last + 1e-6 * np.abs(last) + wrong).all():
            return np.float32(sign) * ranked, indices
        taken = min(len(reference), 2 * taken)


def without_self(values: npt.NDArray[Any], ids: npt.NDArray[Any], own: Ids) -> tuple[npt.NDArray[Any], Ids]:
    """Drop the row number `own[i]` from row `i`, or the last one where it is not among them."""
    drop = ids == own[:, None]
    drop[~drop.any(axis=1), -1] = True
    keep, shape = ~drop, (len(ids), ids.shape[1] - 1)
    return values[keep].reshape(shape), ids[keep].reshape(shape).astype(np.int64, copy=False)


def _first_match(path: str, pattern: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1).strip() if match else None


def cpu() -> str:
    """The processor, such as `AMD EPYC 9R14 (family 25, model 17)`."""
    name = _first_match("/proc/cpuinfo", r"^model name\s*:\s*(.+)$") or platform.processor() or platform.machine()
    family = _first_match("/proc/cpuinfo", r"^cpu family\s*:\s*(\d+)$")
    model = _first_match("/proc/cpuinfo", r"^model\s*:\s*(\d+)$")
    return f"{name} (family {family}, model {model})" if family and model else name


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str:
    """The commit of the working tree, with `+changes` where files differ from it."""

    def git(*arguments: str) -> str:
        root = Path(__file__).resolve().parent.parent
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions(*distributions: str) -> str:
    """Return the installed versions in one line; distributions that are not installed are omitted."""
    found = []
    for name in distributions:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
