"""What the measurements share: their rows, the float64 truth to compare answers with, and what machine this is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Values = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

CLUSTERS = 2_000
SPREAD = 0.6  # norm of a row's offset from its cluster's unit centre, before the row is brought back to unit length


def clustered_rows(count: int, dimension: int, *, seed: int, clusters: int = CLUSTERS) -> Rows:
    """Unit rows around common centres, as embeddings of a trained model lie.

    Args:
        count: number of rows.
        dimension: their length. The centres depend on it and on `clusters` alone: rows of two seeds share them.
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


def squared_distances(query: Rows, reference: Rows, indices: Ids) -> npt.NDArray[np.float64]:
    """Squared Euclidean distances of query `i` to the reference rows `indices[i]`, by float64 differences."""
    differences = reference[indices].astype(np.float64) - query[:, None].astype(np.float64)
    squares: npt.NDArray[np.float64] = np.einsum("nkd,nkd->nk", differences, differences)
    return squares


def truth(query: Rows, reference: Rows, k: int) -> tuple[Values, Ids]:
    """The `k` nearest references of each query by float64, ranked by (value rounded to float32, row number).

    A float64 matrix product proposes candidates, differences decide. Enough candidates are taken for the ones left out
    to lie farther away than the `k`-th neighbour by a thousand times what the product can be wrong by, on unit rows.
    """
    q, r = query.astype(np.float64), reference.astype(np.float64)
    approximate = (q * q).sum(axis=1)[:, None] + (r * r).sum(axis=1) - 2 * (q @ r.T)
    taken = min(len(reference), k + 32)
    while True:
        candidates = np.argpartition(approximate, taken - 1, axis=1)[:, :taken].astype(np.int64)
        candidates.sort(axis=1)
        values = squared_distances(query, reference, candidates).astype(np.float32)
        order = np.argsort(values, axis=1, kind="stable")[:, :k]
        values = np.take_along_axis(values, order, axis=1)
        indices = np.take_along_axis(candidates, order, axis=1)
        if taken == len(reference):
            return values, indices
        border = np.partition(approximate, taken - 1, axis=1)[:, taken - 1]
        if (border > values[:, -1] * (1 + 1e-6) + 1e-12).all():
            return values, indices
        taken = min(len(reference), 2 * taken)


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
    """The installed versions, in one line; distributions that are not installed are left out."""
    found = []
    for name in distributions:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
