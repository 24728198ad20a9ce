"""exactknn beside the exact searches in common use: answers compared first, then times, in one run.

    python -m benches.peers [--quick] [--only NAME] [--threads N] [--repeats R]
                            [--json FILE] [--plot FILE.png] [--record]

    rows -> float64 truth of a few queries -> answers of each library -> times, interleaved -> table
                                                 (exit code 1 if exactknn's are not the truth)

Every library starts from the same two bare arrays and hands back distances and row numbers, so packing its rows is in
its time; faiss is also shown with an index built beforehand, and that is the figure to compare with. Operations are
counted as 2 x queries x references x dimension. A library's time is the median of several runs; runs of the libraries
take turns, so that a disturbance meets them alike.

Some machines set OPENBLAS_CORETYPE for other programs' sake, which slows NumPy and faiss: the command starts itself
again without it, in this process only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BLAS_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
if __name__ == "__main__" and any(name in os.environ for name in BLAS_VARIABLES):
    # Read by the BLAS libraries when they are loaded, so before any import below.
    clean = {name: value for name, value in os.environ.items() if name not in BLAS_VARIABLES}
    os.execve(sys.executable, [sys.executable, "-m", "benches.peers", *sys.argv[1:]], clean)

import faiss
import numpy as np
import numpy.typing as npt
import threadpoolctl
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.neighbors import NearestNeighbors

import exactknn
from benches.data import (
    CLUSTERS,
    Ids,
    Rows,
    clustered_rows,
    commit,
    cores,
    cpu,
    squared_distances,
    truth,
    versions,
)

try:
    import usearch.index as usearch_index

    HAS_USEARCH = True
except ImportError:
    HAS_USEARCH = False

OURS = "exactknn"
SAMPLE = 48  # queries whose answers are compared with float64
LONG = 20.0  # seconds: what a slow library may take for all its runs of one work
RECORDS = Path(__file__).parent / "record"

Search = Callable[[], tuple[npt.NDArray[Any], npt.NDArray[Any]]]


@dataclass(frozen=True)
class Work:
    """One search: `queries` rows against `references` rows of length `dimension`, for the `k` nearest."""

    queries: int
    references: int
    dimension: int
    k: int

    @property
    def name(self) -> str:
        """What `--only` takes a part of, such as `4096x65536x128-k10`."""
        return f"{self.queries}x{self.references}x{self.dimension}-k{self.k}"

    @property
    def operations(self) -> int:
        """A multiplication and an addition for each number of each pair of rows."""
        return 2 * self.queries * self.references * self.dimension


FULL = (
    Work(4096, 65536, 128, 10),
    Work(4096, 65536, 128, 100),
    Work(4096, 65536, 512, 10),
    Work(256, 65536, 128, 10),
    Work(1, 65536, 128, 10),
)
QUICK = (
    Work(1024, 16384, 128, 10),
    Work(1024, 16384, 128, 100),
    Work(1024, 16384, 512, 10),
    Work(256, 16384, 128, 10),
    Work(1, 16384, 128, 10),
)


@dataclass
class Result:
    """What one library did with one work."""

    work: str
    peer: str
    seconds: float
    gflops: float
    ratio: float  # its time over ours
    recall: float  # share of its neighbours that are no farther than the true k-th
    ids_differ: int  # places of the sample where another row number stands than in the truth
    ids_compared: int


def searches(query: Rows, reference: Rows, k: int, threads: int) -> dict[str, list[Search]]:
    """For each library the ways to ask it; where there are several, the fastest one counts."""
    q, r = torch.from_numpy(query), torch.from_numpy(reference)
    distance = LpDistance(normalize_embeddings=False, power=2)

    def by_faiss() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        index = faiss.IndexFlatL2(reference.shape[1])
        index.add(reference)
        values, ids = index.search(query, k)
        return values, ids

    built = faiss.IndexFlatL2(reference.shape[1])
    built.add(reference)

    def by_built_faiss() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        values, ids = built.search(query, k)
        return values, ids

    def by_torch() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        values, ids = torch.cdist(q, r).topk(k, largest=False)
        return values.numpy(), ids.numpy()

    def by_metric_learning(batch_size: int | None) -> Search:
        knn = CustomKNN(distance, batch_size=batch_size)

        def search() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
            with torch.no_grad():
                values, ids = knn(q, k, r, False)
            return values.numpy(), ids.numpy()

        return search

    def by_sklearn() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        values, ids = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(reference).kneighbors(query)
        return values, ids

    def by_usearch() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        found = usearch_index.search(reference, query, k, "l2sq", exact=True, threads=threads)
        return found.distances.reshape(len(query), k), found.keys.astype(np.int64).reshape(len(query), k)

    ways: dict[str, list[Search]] = {
        OURS: [lambda: exactknn.knn(query, reference, k, metric="sqeuclidean", num_threads=threads)],
        # The ratio that is claimed is against the second: faiss's own copy of the rows made beforehand.
        "faiss IndexFlatL2, index built in the time": [by_faiss],
        "faiss IndexFlatL2": [by_built_faiss],
        "torch cdist + topk": [by_torch],
        "pytorch-metric-learning CustomKNN": [by_metric_learning(None), by_metric_learning(256)],
        "scikit-learn brute": [by_sklearn],
    }
    if HAS_USEARCH:
        ways["usearch exact"] = [by_usearch]
    return ways


def seconds_of(search: Search) -> float:
    """How long one run of `search` takes."""
    start = time.perf_counter()
    search()
    return time.perf_counter() - start


def fastest(ways: Sequence[Search]) -> tuple[Search, float]:
    """The way that is fastest once warm, and its time; the first run of each is not counted if it was short."""
    best: tuple[Search, float] | None = None
    for way in ways:
        seconds = seconds_of(way)
        if seconds < LONG / 4:
            seconds = min(seconds, seconds_of(way))
        if best is None or seconds < best[1]:
            best = way, seconds
    if best is None:
        raise ValueError("ways: wanted at least one search, got none")
    return best


def compare(
    work: Work, query: Rows, reference: Rows, ways: dict[str, list[Search]]
) -> dict[str, tuple[float, int, int]]:
    """Recall by distance, places with another row number than the truth, and places compared, for each library."""
    chosen = np.unique(np.linspace(0, work.queries - 1, SAMPLE).astype(np.int64))
    values, ids = truth(query[chosen], reference, work.k)
    compared = {}
    for name, (way, *_) in ways.items():
        found: Ids = np.asarray(way()[1])[chosen].astype(np.int64)
        inside = (found >= 0) & (found < work.references)
        distances = squared_distances(query[chosen], reference, np.where(inside, found, 0)).astype(np.float32)
        near = inside & (distances <= values[:, -1:])
        compared[name] = float(near.mean()), int((found != ids).sum()), ids.size
    return compared


def run(work: Work, threads: int, repeats: int) -> list[Result]:
    """Compare the answers of all libraries for `work`, then time them in turns."""
    reference = clustered_rows(work.references, work.dimension, seed=1)
    query = clustered_rows(work.queries, work.dimension, seed=2)
    ways = searches(query, reference, work.k, threads)
    compared = compare(work, query, reference, ways)
    warm = {name: fastest(several) for name, several in ways.items()}
    # Short works are repeated more often: their medians are the noisier ones.
    rounds = repeats if max(seconds for _, seconds in warm.values()) > 0.2 else 5 * repeats
    allowed = {name: max(1, min(rounds, int(LONG / max(seconds, 1e-9)))) for name, (_, seconds) in warm.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name, (way, _) in warm.items():
            if turn < allowed[name]:
                times[name].append(seconds_of(way))
    medians = {name: statistics.median(several) for name, several in times.items()}
    return [
        Result(work.name, name, seconds, work.operations / seconds / 1e9, seconds / medians[OURS], *compared[name])
        for name, seconds in medians.items()
    ]


def matrix_product_gflops() -> float:
    """The float32 speed of torch's matrix product, in Gop/s: about what the processor can do in float32."""
    a = torch.randn(2048, 2048)
    torch.mm(a, a)
    return 2 * 2048**3 / min(seconds_of(lambda: (torch.mm(a, a).numpy(), a.numpy())) for _ in range(5)) / 1e9


def table(results: Sequence[Result]) -> str:
    """The results as one Markdown table."""
    lines = [
        "| work | library | median | Gop/s | time over ours | recall by distance | other ids |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        duration = f"{r.seconds * 1e3:,.2f} ms" if r.seconds < 0.1 else f"{r.seconds:,.3f} s"
        work = r.work if r.peer == OURS else ""
        lines.append(
            f"| {work} | {r.peer} | {duration} | {r.gflops:,.0f} | {r.ratio:.2f}x | {r.recall:.4f} "
            f"| {r.ids_differ:,} of {r.ids_compared:,} |"
        )
    return "\n".join(lines)


def plot(path: Path, results: Sequence[Result]) -> None:
    """Draw each library's time over ours, a group of bars for each work."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    works = list(dict.fromkeys(r.work for r in results))
    peers = [name for name in dict.fromkeys(r.peer for r in results) if name != OURS]
    height = 0.8 / len(peers)
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.24 * len(works) * (len(peers) + 1)), layout="constrained")
    for place, peer in enumerate(peers):
        ratios = [next(r.ratio for r in results if r.work == work and r.peer == peer) for work in works]
        bars = axes.barh([y + (place - (len(peers) - 1) / 2) * height for y in range(len(works))], ratios, height)
        bars.set_label(peer)
        axes.bar_label(bars, labels=[f"{ratio:.1f}x" for ratio in ratios], padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(yticks=range(len(works)), yticklabels=works, xlabel="time over exactknn's (1: equally fast)")
    axes.margins(x=0.12, y=0.02)
    axes.invert_yaxis()
    figure.legend(fontsize=8, loc="outside lower center", ncols=3, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(results: Sequence[Result], threads: int, peak: float) -> str:
    """The whole text of a record: where and with what it was measured, then the table."""
    built = exactknn.build_info()
    info = ", ".join(built[name] for name in ("profile", "target", "rustc") if name in built)
    libraries = versions("numpy", "faiss-cpu", "torch", "pytorch-metric-learning", "scikit-learn", "usearch")
    return "\n".join(
        [
            f"- exactknn {exactknn.__version__}, commit {commit()}, level {exactknn.simd_level()} ({info})",
            f"- {cpu()}, {threads} of {cores()} cores",
            f"- Python {sys.version.split()[0]}, {libraries}",
            f"- float32 matrix product by torch: {peak:,.0f} Gop/s",
            f"- rows: float32, unit length, around {CLUSTERS:,} centres",
            f"- answers of {SAMPLE} queries compared with float64",
            "",
            table(results),
        ]
    )


def write_record(text: str, threads: int) -> Path:
    """Write `text` to `benches/record/`, named after the day and the processor; a second run of the day replaces it."""
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    machine = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((?:R|TM)\)", "", cpu(), flags=re.IGNORECASE).lower()).strip("-")
    path = RECORDS / f"{today}-{machine}-{threads}-threads.md"
    path.write_text(f"# Peers, {today}\n\n{text}\n", encoding="utf-8")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 when exactknn's own answers are not the float64 truth."""
    parser = argparse.ArgumentParser(prog="python -m benches.peers", description="Compare exact searches.")
    parser.add_argument("--quick", action="store_true", help="smaller works, under a minute in all")
    parser.add_argument("--only", metavar="NAME", help="only works whose name contains NAME, such as 4096x65536x128")
    parser.add_argument("--threads", type=int, default=cores(), help="threads for every library (default: all cores)")
    parser.add_argument("--repeats", type=int, help="runs of each library (default: 5, with --quick 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios there (.png, .svg)")
    parser.add_argument("--record", action="store_true", help="write the table to benches/record/")
    options = parser.parse_args(arguments)
    works = [work for work in (QUICK if options.quick else FULL) if not options.only or options.only in work.name]
    if not works:
        names = ", ".join(work.name for work in (QUICK if options.quick else FULL))
        parser.error(f"--only: wanted part of one of {names}; got {options.only}")
    if options.threads < 1:
        parser.error(f"--threads: wanted at least 1, got {options.threads}")
    repeats = options.repeats or (3 if options.quick else 5)

    threadpoolctl.threadpool_limits(options.threads)
    faiss.omp_set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    results: list[Result] = []
    for work in works:
        print(f"{work.name} ...", file=sys.stderr, flush=True)
        results += run(work, options.threads, repeats)
    text = report(results, options.threads, matrix_product_gflops())
    print(text)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(options.plot, results)
    if options.record:
        print(f"\nrecorded in {write_record(text, options.threads)}")
    wrong = [r.work for r in results if r.peer == OURS and (r.recall < 1 or r.ids_differ)]
    if wrong:
        print(f"\nexactknn's answers differ from float64 for {', '.join(wrong)}: please report this", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
