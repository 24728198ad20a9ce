"""Peak memory of a search, measured in a process of its own, against what it may take.

    python -m benches.peak_memory [--queries N --references M --dimension D --k K --dtype NAME]

A search may take one packed copy of the reference (float32 numbers), its outputs, and 64 MiB for everything else:
threads, blocks, buffers, whatever the size of the work. Each work runs in a fresh process, because a process never
lowers its own peak. Measured is the highest resident size afterwards (`ru_maxrss`) less the resident size before.

The exit code is 1 when a work took more.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import psutil

import exactknn
from benches.data import clustered_rows

MIB = 1 << 20
SPARE = 64 * MIB
BLOCK = 1024  # rows made at a time, so that making them does not set the peak


@dataclass(frozen=True)
class Work:
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


WORKS = (
    Work(4096, 65536, 512, 10),
    Work(1, 262144, 128, 10),
    Work(0, 20000, 128, 100),
    Work(4096, 65536, 128, 1000),
    Work(1024, 65536, 256, 10, "float64"),
    Work(1024, 65536, 256, 10, "float16"),
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
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def measure(work: Work) -> dict[str, int]:
    """Run one search here; bytes resident before it, at its peak, and of its inputs."""
    reference = rows(work.references, work.dimension, work.dtype, seed=1)
    query = rows(work.queries, work.dimension, work.dtype, seed=2) if work.queries else None
    exactknn.knn(reference[:2], reference[:2], 1)  # what is loaded or built on first use is not this search's
    before = psutil.Process().memory_info().rss
    if query is None:
        exactknn.knn(reference, k=work.k)
    else:
        exactknn.knn(query, reference, work.k)
    return {"before": before, "peak": peak(), "inputs": reference.nbytes + (query.nbytes if query is not None else 0)}


def in_own_process(work: Work) -> dict[str, int]:
    """`measure`, in a fresh process."""
    command = [sys.executable, "-m", "benches.peak_memory", "--one", json.dumps(asdict(work))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, int] = json.loads(done.stdout)
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each work and print one table; 1 when one took more than it may."""
    parser = argparse.ArgumentParser(prog="python -m benches.peak_memory", description="Peak memory of a search.")
    parser.add_argument("--queries", type=int, default=4096, help="0: the references against themselves")
    parser.add_argument("--references", type=int, help="measure this one work instead of the usual ones")
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--dtype", choices=["float16", "float32", "float64"], default="float32")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(Work(**json.loads(options.one)))))
        return 0
    works: Sequence[Work] = WORKS
    if options.references:
        works = [Work(options.queries, options.references, options.dimension, options.k, options.dtype)]
    print("| queries x references x dimension, k, dtype | inputs | packed copy | outputs | may add | added |")
    print("|---|--:|--:|--:|--:|--:|")
    within = True
    for work in works:
        measured = in_own_process(work)
        # The kernel counts pages in batches: a search that adds nothing may seem to have given some back.
        added = max(0, measured["peak"] - measured["before"])
        within &= added <= work.allowed
        sizes = (measured["inputs"], work.packed, work.outputs, work.allowed, added)
        cells = " | ".join(f"{size / MIB:,.0f} MiB" for size in sizes)
        queries = work.queries or "self"
        print(f"| {queries} x {work.references} x {work.dimension}, {work.k}, {work.dtype} | {cells} |", flush=True)
    print("\nEach within what it may add." if within else "\nA search took more than it may.")
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
