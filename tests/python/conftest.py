"""The oracle of the Python tests, and the switch between SIMD levels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import exactknn

LARGEST_FIRST = ("cosine_similarity", "inner_product")


def brute_force(
    query: Any, reference: Any, k: int, *, metric: str = "sqeuclidean", p: float = 2, exclude_self: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Float64 arithmetic on the values as they are, rounded to the output type, ties to the lowest row."""
    query, reference = np.asarray(query), np.asarray(reference)
    output = np.float64 if np.float64 in (query.dtype, reference.dtype) else np.float32
    query, reference = query.astype(np.float64), reference.astype(np.float64)
    distances = np.empty((len(query), k), output)
    indices = np.empty((len(query), k), np.int64)
    for row, left in enumerate(query):
        if metric == "inner_product":
            values = (reference * left).sum(axis=1)
        elif metric in ("cosine", "cosine_similarity"):
            norms = np.sqrt((reference**2).sum(axis=1) * (left**2).sum())
            values = np.divide((reference * left).sum(axis=1), norms, out=np.zeros(len(reference)), where=norms > 0)
            values = np.where((reference == left).all(axis=1) & (norms > 0), 1.0, np.clip(values, -1, 1))
            values = 1 - values if metric == "cosine" else values
        elif metric == "chebyshev" or (metric == "minkowski" and p == np.inf):
            values = np.abs(reference - left).max(axis=1)
        elif metric == "cityblock":
            values = np.abs(reference - left).sum(axis=1)
        elif metric == "minkowski":
            # Of differences divided by the largest: their powers may be out of range.
            largest = np.abs(reference - left).max(axis=1, keepdims=True)
            ratios = np.divide(np.abs(reference - left), largest, out=np.zeros_like(reference), where=largest > 0)
            values = largest[:, 0] * (ratios**p).sum(axis=1) ** (1 / p)
        else:
            values = ((reference - left) ** 2).sum(axis=1)
            values = np.sqrt(values) if metric == "euclidean" else values
        values = values.astype(output)
        order = np.lexsort((np.arange(len(values)), -values if metric in LARGEST_FIRST else values))
        if exclude_self:
            order = order[order != row]
        distances[row], indices[row] = values[order[:k]], order[:k]
    return distances, indices


# A shell's background jobs ignore Ctrl-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(name="brute_force", scope="session")
def _brute_force() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    return brute_force


@pytest.fixture(params=exactknn.available_simd_levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once at each SIMD level of this CPU."""
    exactknn.set_simd_level(request.param)
    yield request.param
    exactknn.set_simd_level(None)


@pytest.fixture(name="run_python", scope="session")
def _run_python() -> Callable[..., str]:
    """Run a program in a fresh interpreter, which must end well, and return what it printed."""

    def run(program: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
