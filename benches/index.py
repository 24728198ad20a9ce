"""An index built once and searched many times: `exactknn.Index` beside faiss `IndexFlatL2` on the same rows.

    python -m benches.index [--rows N --dimension D --block B --seconds S]

One process holds both indexes and searches them in turn, so that both see the same machine load. faiss is at its best:
with the matrix kernel that the processor has, and its blocking tuned for each number of queries. The rows are added
block by block; then the index is saved and loaded by memory-mapping, compared with reading an array of the rows. The
first search of a loaded index verifies the checksums of the file; it is shown separately.

Results are compared before any figure is printed: distances may differ by the rounding of float32 products, ids only
where distances are within that; any other difference ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import psutil

import exactknn
from benches import blas
from benches.competitors import tune_faiss
from benches.data import clustered_rows, cores, cpu
from benches.peak_memory import MIB
from benches.workloads import Workload

K = 10
COUNTS = (1, 10, 1000)
CLOSE = 1e-5
"""Relative difference that float32 products leave between squared distances of such rows."""


def blocks(count: int, dimension: int, block: int) -> list[npt.NDArray[np.float32]]:
    """The rows, block by block."""
    starts = range(0, count, block)
    return [clustered_rows(min(block, count - start), dimension, seed=start, clusters=1000) for start in starts]


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """How long it takes, and what it returns."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def in_turn(sides: Sequence[Callable[[], Any]], budget: float) -> list[float]:
    """Median seconds of each side, asked in turn until each has had its budget, five times at least."""
    times: list[list[float]] = [[] for _ in sides]
    while len(times[0]) < 5 or sum(map(sum, times)) < budget * len(sides):
        for side, taken in zip(sides, times, strict=True):
            taken.append(seconds_of(side)[0])
    return [statistics.median(taken) for taken in times]


def agree(
    ours: tuple[npt.NDArray[Any], npt.NDArray[np.int64]], theirs: tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
) -> bool:
    """Whether both found the same, up to rounding."""
    close = np.isclose(ours[0], theirs[0], rtol=CLOSE, atol=CLOSE)
    ties = np.isclose(ours[0][:, :-1], ours[0][:, 1:], rtol=CLOSE, atol=CLOSE)
    beside_tie = np.zeros(close.shape, bool)
    beside_tie[:, :-1] |= ties
    beside_tie[:, 1:] |= ties
    beside_tie[:, -1] = True  # the row behind the last may be as near
    return bool(close.all() and ((ours[1] == theirs[1]) | beside_tie).all())


def memory_of(work: Callable[[], Any]) -> tuple[float, Any, float]:
    """Seconds, result, and the bytes by which the process grew."""
    before = psutil.Process().memory_info().rss
    taken, result = seconds_of(work)
    return taken, result, psutil.Process().memory_info().rss - before


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when the answers differ."""
    parser = argparse.ArgumentParser(prog="python -m benches.index", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--block", type=int, default=100_000, help="rows added at once")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each side of each search")
    options = parser.parse_args(arguments)
    kernel = blas.restart_at_best() if arguments is None else "as it is"
    faiss.omp_set_num_threads(cores())
    parts = blocks(options.rows, options.dimension, options.block)
    queries = clustered_rows(max(COUNTS), options.dimension, seed=1, clusters=1000)

    ours = exactknn.Index("sqeuclidean")
    theirs = faiss.IndexFlatL2(options.dimension)

    def fill(add: Callable[[npt.NDArray[np.float32]], object]) -> None:
        for part in parts:
            add(part)

    built, _, grown = memory_of(lambda: fill(ours.add))
    built_by_faiss, _, grown_by_faiss = memory_of(lambda: fill(theirs.add))
    size = f"{options.rows:,} x {options.dimension} float32, added {options.block:,} at once"
    print(f"{size}; {cpu()}, {cores()} threads; faiss: {kernel}")
    print(f"{'':<28}{'exactknn':>12}{'faiss':>12}{'ratio':>8}")
    print(f"{'build':<28}{built:>10.2f} s{built_by_faiss:>10.2f} s")
    rows = options.rows
    print(f"{'memory of a row':<28}{grown / rows:>10.0f} B{grown_by_faiss / rows:>10.0f} B")

    if not all(agree(ours.search(queries[:n], K), theirs.search(queries[:n], K)) for n in COUNTS):
        print("the answers differ by more than rounding", file=sys.stderr)
        return 1
    for n in COUNTS:
        query = queries[:n]
        chosen = tune_faiss(Workload("clustered", n, len(parts[0]), options.dimension, K), query, parts[0])
        mine, faisss = in_turn([lambda: ours.search(query, K), lambda: theirs.search(query, K)], options.seconds)  # noqa: B023
        name = f"{n:,} quer{'y' if n == 1 else 'ies'}, k {K}"
        print(f"{name:<28}{1000 * mine:>9.2f} ms{1000 * faisss:>9.2f} ms{faisss / mine:>7.1f}x   {chosen}")

    with tempfile.TemporaryDirectory() as folder:
        path, array = Path(folder) / "rows.index", Path(folder) / "rows.npy"
        saved, _ = seconds_of(lambda: ours.save(path))
        np.save(array, np.concatenate(parts))
        print(f"{'save':<28}{saved:>10.2f} s   ({path.stat().st_size / MIB:,.0f} MiB)")
        exactknn.Index.load(path), np.load(array)  # both files are now in the page cache
        loading, reading = in_turn([lambda: exactknn.Index.load(path), lambda: np.load(array)], options.seconds)
        name = "load, or read the rows"
        print(f"{name:<28}{1000 * loading:>9.2f} ms{1000 * reading:>9.2f} ms{reading / loading:>7.0f}x")
        loaded = exactknn.Index.load(path)
        first, answer = seconds_of(lambda: loaded.search(queries[:1], K))
        second = statistics.median(seconds_of(lambda: loaded.search(queries[:1], K))[0] for _ in range(9))
        print(f"{'1 query, loaded':<28}{1000 * first:>9.2f} ms the first time, {1000 * second:.2f} ms then")
        if not all(np.array_equal(a, b) for a, b in zip(answer, ours.search(queries[:1], K), strict=True)):
            print("the loaded index answers differently", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
