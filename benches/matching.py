"""All matching pairs of rows among themselves: `MatchFinder.get_match_indices` beside a torch loop over blocks.

    python -m benches.matching [--rows N --dimension D --block B --share S]

Rows are unit vectors in clusters of about ten; a pair matches at a squared Euclidean distance of at most 1. Each side
runs in a separate process, on the same rows, with all available cores. Shown are its time, its CPU time, and the
increase of its peak resident size. The torch loops are typical handwritten code: blocks of rows, `torch.cdist` or a
matrix product, a comparison, `nonzero`. All blocks take the same time, so with `--share` they run a part of the blocks,
and their times are scaled up.

Results are compared before the figures are printed. float32 products may decide a pair differently if it is within
rounding of the threshold; any other difference ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from benches.data import clustered_rows, cores, cpu
from benches.peak_memory import MIB, ROOT, added, peak
from exactknn.distances import LpDistance
from exactknn.evaluation import MatchFinder

THRESHOLD = 1.0
MADE_AT_ONCE = 8192
NEAR = 1e-5  # of the threshold: float32 products of unit rows are wrong by less

Find = Callable[[torch.Tensor, range], torch.Tensor]
"""Takes the rows and where their blocks start; what `range.stop` leaves out need not be found."""


def exactknn_finder(rows: torch.Tensor, blocks: range) -> torch.Tensor:
    """This package: all pairs, in its own blocks."""
    finder = MatchFinder(LpDistance(normalize_embeddings=False, power=2), threshold=THRESHOLD)
    return finder.get_match_indices(rows)


def torch_cdist(rows: torch.Tensor, blocks: range) -> torch.Tensor:
    """Distances of a block at a time; `cdist` takes the root."""
    found = []
    for start in blocks:
        pairs = (torch.cdist(rows[start : start + blocks.step], rows) <= THRESHOLD**0.5).nonzero()
        pairs[:, 0] += start
        found.append(pairs)
    return torch.cat(found)


def torch_product(rows: torch.Tensor, blocks: range) -> torch.Tensor:
    """Squared norms and a matrix product, in one buffer: the fastest that torch offers."""
    norms, found = rows.square().sum(1), []
    for start in blocks:
        mine = slice(start, start + blocks.step)
        squared = torch.addmm(norms, rows[mine], rows.t(), alpha=-2).add_(norms[mine, None])
        pairs = (squared <= THRESHOLD).nonzero()
        pairs[:, 0] += start
        found.append(pairs)
    return torch.cat(found)


SIDES: dict[str, Find] = {"exactknn": exactknn_finder, "torch cdist": torch_cdist, "torch product": torch_product}


def made(count: int, dimension: int) -> npt.NDArray[np.float32]:
    """The rows to match, made block by block so that making them does not set the peak."""
    rows = np.empty((count, dimension), np.float32)
    for start in range(0, count, MADE_AT_ONCE):
        block = rows[start : start + MADE_AT_ONCE]
        block[:] = clustered_rows(len(block), dimension, seed=start, clusters=max(1, count // 10))
    return rows


def measure(side: str, count: int, dimension: int, block: int, searched: int, output: str) -> dict[str, float]:
    """Run one side here, the torch loops for the first `searched` rows, and save its pairs."""
    rows = torch.from_numpy(made(count, dimension))
    SIDES[side](rows[:2048], range(0, 2048, block))  # what is loaded or built on first use is not part of it
    before = psutil.Process().memory_info().rss
    start, start_of_cores = time.perf_counter(), time.process_time()
    pairs = SIDES[side](rows, range(0, searched, block))
    seconds, of_cores = time.perf_counter() - start, time.process_time() - start_of_cores
    highest = peak()
    np.save(output, pairs.numpy())
    return {"seconds": seconds, "of cores": of_cores, "before": before, "peak": highest}


def in_own_process(call: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a fresh process."""
    command = [sys.executable, "-m", "benches.matching", "--one", json.dumps(call)]
    here = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # The environment may restrict OpenBLAS to an older instruction set.
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=environment | {"PYTHONPATH": here}
    )
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def differing(ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64], rows: npt.NDArray[np.float32]) -> list[float]:
    """Float64 squared distances of the pairs that only one side found."""
    count = np.int64(len(rows))
    keys = np.setxor1d(ours[:, 0] * count + ours[:, 1], theirs[:, 0] * count + theirs[:, 1], assume_unique=True)
    left, right = rows[keys // count].astype(np.float64), rows[keys % count].astype(np.float64)
    distances: list[float] = ((left - right) ** 2).sum(axis=1).tolist()
    return distances


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each side and print one table; 1 when the answers differ by more than rounding."""
    parser = argparse.ArgumentParser(prog="python -m benches.matching", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--block", type=int, default=1024, help="rows of a block of the torch loops")
    parser.add_argument("--share", type=float, default=1.0, help="share of the blocks that the torch loops do")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(**json.loads(options.one))))
        return 0
    rows = made(options.rows, options.dimension)
    # Whole blocks, so that scaling is fair.
    searched = min(options.rows, max(1, round(options.share * options.rows / options.block)) * options.block)
    with tempfile.TemporaryDirectory() as folder:
        found, measured = {}, {}
        for number, side in enumerate(SIDES):
            output = Path(folder) / f"{number}.npy"
            call = {"side": side, "count": options.rows, "dimension": options.dimension, "block": options.block}
            measured[side] = in_own_process(call | {"searched": searched, "output": str(output)})
            found[side] = np.load(output)
            output.unlink()
    ours = found["exactknn"]
    print(f"{cpu()}, {cores()} cores, torch {torch.__version__}")
    print(f"{options.rows} x {options.dimension}, {len(ours) / len(rows):.1f} matches a row")
    if searched < len(rows):
        print(f"torch loops: {searched} rows, times scaled up")
    print("\n| side | seconds | times ours | of cores | times ours | memory added | pairs decided otherwise |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    same, own = True, measured["exactknn"]
    for side, figures in measured.items():
        scale = 1.0 if side == "exactknn" else len(rows) / searched
        distances = differing(ours[ours[:, 0] < searched], found[side][found[side][:, 0] < searched], rows)
        same &= all(abs(distance - THRESHOLD) <= NEAR for distance in distances)
        cells = [side]
        for clock in ("seconds", "of cores"):
            cells += [f"{scale * figures[clock]:.1f}", f"{scale * figures[clock] / own[clock]:.1f}"]
        print("| " + " | ".join([*cells, f"{added(figures) / MIB:,.0f} MiB", str(len(distances))]) + " |")
    print("\nThe answers are the same, up to rounding." if same else "\nThe answers differ.")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
