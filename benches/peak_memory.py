"""Peak memory of a search, measured in a separate process and compared with its limit.

    python -m benches.peak_memory [--queries N --references M --dimension D --k K --dtype NAME]

A search may take one packed copy of the reference (float32 numbers), its outputs, and 64 MiB for threads, blocks and
buffers, independent of its size. Each workload runs in a fresh process, because the peak of a process never falls. The
measured value is the peak resident size afterwards minus the resident size before.

The exit code is 1 if a workload exceeds its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

import exactknn
from benches.data import clustered_rows

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
SPARE = 64 * MIB
BLOCK = 1024  # rows made at a time, so that making them does not set the peak


@dataclass(frozen=True)
class Workload:
    """One search; `queries=0` searches the references against themselves, without self."""

    queries: int
    references: int
    dimension: int
    k: int
    dtype: str = "float32"

    @property
    def packed(self) -> int:
        """Bytes of one float32 copy of the reference."""
        return self.references * self.dimension * 4

    @property
    def outputs(self) -> int:
        """Bytes of the distances and the row numbers."""
        value = 8 if self.dtype == "float64" else 4
        return (self.queries or self.references) * self.k * (value + 8)

    @property
    def allowed(self) -> int:
        """Bytes that the search may add to the process."""
        return self.packed + self.outputs + SPARE


WORKLOADS = (
    Workload(4096, 65536, 512, 10),
    Workload(1, 262144, 128, 10),
    Workload(0, 20000, 128, 100),
    Workload(4096, 65536, 128, 1000),
    Workload(1024, 65536, 256, 10, "float64"),
    Workload(1024, 65536, 256, 10, "float16"),
)


def rows(count: int, dimension: int, dtype: str, seed: int) -> np.ndarray:
    """Rows of any dtype, made block by block."""
    made = np.empty((count, dimension), dtype)
    for start in range(0, count, BLOCK):
        block = clustered_rows(min(BLOCK, count - start), dimension, seed=seed + start, clusters=200)
        made[start : start + len(block)] = block
    return made


def peak() -> int:
    """The highest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # `ru_maxrss` of a fresh process starts at its parent's resident size.
        match = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
        if match:
            return int(match[1]) * 1024
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def measure(workload: Workload) -> dict[str, int]:
    """Run one search here; bytes resident before it, at its peak, and of its inputs."""
    reference = rows(workload.references, workload.dimension, workload.dtype, seed=1)
    query = rows(workload.queries, workload.dimension, workload.dtype, seed=2) if workload.queries else None
    return measure_search(query, reference, workload.k)


def measure_search(
    query: np.ndarray | None, reference: np.ndarray, k: int, metric: str = "sqeuclidean", threads: int | None = None
) -> dict[str, int]:
    """`measure`, of rows that are there; without a query the references against themselves."""
    exactknn.knn(reference[:2], reference[:2], 1)  # excludes what is loaded or built on first use
    before = psutil.Process().memory_info().rss
    if query is None:
        exactknn.knn(reference, k=k, metric=metric, num_threads=threads)
    else:
        exactknn.knn(query, reference, k, metric=metric, num_threads=threads)
    return {"before": before, "peak": peak(), "inputs": reference.nbytes + (query.nbytes if query is not None else 0)}


def in_own_process(*arguments: str) -> dict[str, int]:
    """Return the output of this module for one search, run in a fresh process."""
    command = [sys.executable, "-m", "benches.peak_memory", *arguments]
    here = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": here}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    measured: dict[str, int] = json.loads(done.stdout)
    return measured


def added(measured: Mapping[str, int]) -> int:
    """Bytes that the search added. The kernel counts pages in batches: none may seem to be given back."""
    return max(0, measured["peak"] - measured["before"])


def added_by_arrays(folder: Path, k: int, metric: str, threads: int) -> int:
    """Bytes that a search adds among the rows of `reference.npy` in `folder`, of `query.npy` if that is there."""
    call = {"folder": str(folder), "k": k, "metric": metric, "threads": threads}
    return added(in_own_process("--arrays", json.dumps(call)))


def measure_arrays(folder: str, k: int, metric: str, threads: int) -> dict[str, int]:
    """The search of `added_by_arrays`, here."""
    reference, path = np.load(Path(folder) / "reference.npy"), Path(folder) / "query.npy"
    return measure_search(np.load(path) if path.exists() else None, reference, k, metric, threads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each workload and print one table; 1 when one took more than it may."""
    parser = argparse.ArgumentParser(prog="python -m benches.peak_memory", description="Peak memory of a search.")
    parser.add_argument("--queries", type=int, default=4096, help="0: the references against themselves")
    parser.add_argument("--references", type=int, help="measure this one workload instead of the usual ones")
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--dtype", choices=["float16", "float32", "float64"], default="float32")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--arrays", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.arrays:
        print(json.dumps(measure_arrays(**json.loads(options.arrays))))
        return 0
    if options.one:
        print(json.dumps(measure(Workload(**json.loads(options.one)))))
        return 0
    workloads: Sequence[Workload] = WORKLOADS
    if options.references:
        workloads = [Workload(options.queries, options.references, options.dimension, options.k, options.dtype)]
    print("| queries x references x dimension, k, dtype | inputs | packed copy | outputs | may add | added |")
    print("|---|--:|--:|--:|--:|--:|")
    within = True
    for workload in workloads:
        measured = in_own_process("--one", json.dumps(asdict(workload)))
        within &= added(measured) <= workload.allowed
        sizes = (measured["inputs"], workload.packed, workload.outputs, workload.allowed, added(measured))
        cells = " | ".join(f"{size / MIB:,.0f} MiB" for size in sizes)
        queries = workload.queries or "self"
        print(
            f"| {queries} x {workload.references} x {workload.dimension}, {workload.k}, {workload.dtype} | {cells} |",
            flush=True,
        )
    print("\nEach within what it may add." if within else "\nA search took more than it may.")
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
