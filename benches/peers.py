"""exactknn beside the exact searches in common use: results are compared first, then times, in one run.

    python benches/peers.py [--quick] [--only NAME] [--skip LIBRARY] [--threads N] [--repeats R] [--budget SECONDS]
                            [--json FILE] [--plot FILE.png] [--record] [--no-memory] [--list]

    rows -> float64 truth of a few queries -> answers of each library -> times, in turns -> memory -> tables, picture
                                                 (exit code 1 if exactknn's are not the truth)

Every library starts from the same two arrays and returns distances and row numbers, so its time includes packing the
rows; only faiss and the indexes like it are built beforehand. Operations are counted as 2 x queries x references x
dimension.

faiss is shown twice. As pip installs it, its bundled OpenBLAS may not know the processor and fall back to SSE3; at its
best it has the kernel that the processor has, and the blocking that was fastest on a part of the workload. The kernels
are printed. The goals are set against faiss at its best.

Times: exactknn runs before every run of another library, so that a disturbance affects both alike. The tables show
medians and their ratio; minima are in the last table and in the JSON file. If the first run of a library exceeds the
budget, it is the only one; a library that would not fit in the free memory is skipped, and the report says so.

Memory: the peak that one search adds to a fresh process that holds the rows.

Some machines set OPENBLAS_CORETYPE for other programs: the command restarts itself without it, in this process only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLAS_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
if __name__ == "__main__" and (not __package__ or any(name in os.environ for name in BLAS_VARIABLES)):
    # Read by the BLAS libraries when they are loaded, so before any import below. As a module, wherever it was started.
    clean = {name: value for name, value in os.environ.items() if name not in BLAS_VARIABLES}
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), clean.get("PYTHONPATH")]))
    os.execve(sys.executable, [sys.executable, "-m", "benches.peers", *sys.argv[1:]], clean)

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import threadpoolctl
import torch

from benches import blas, peak_memory, workloads
from benches.competitors import Backend, Found, Processes, Search, backends, missing
from benches.data import Ids, Rows, cores, exact_values, truth, without_self
from benches.remote import Process, RemoteSearch
from benches.report import SAMPLE, Ours, Report, Result, plot, write_record
from benches.workloads import CURVE, OURS, Workload, curve
from exactknn import _core

SETTLE = 0.02  # seconds between two libraries, in which the threads of the last one go to sleep
LEAST = 3  # turns of a library that a goal is set against
SHORT = 0.05  # seconds: shorter searches are run several times in a turn


@dataclass
class Settings:
    """The options of the command."""

    threads: int
    repeats: int
    budget: float
    memory: bool
    skip: Sequence[str]
    processes: Processes


@dataclass
class Asked:
    """A library: its backend, its first run, and all later ones beside ours."""

    search: Search
    first: float
    recall: float
    ids_differ: int
    ids_compared: int
    least: int = 1  # turns that it gets even beyond the budget
    times: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)


class Truth:
    """The float64 answers of a few queries of one workload."""

    def __init__(self, workload: Workload, query: Rows, reference: Rows) -> None:
        self.workload, self.query, self.reference = workload, query, reference
        self.chosen = np.unique(np.linspace(0, workload.count - 1, SAMPLE).astype(np.int64))
        self.values: npt.NDArray[Any]
        self.values, self.ids = truth(
            query[self.chosen], reference, workload.columns + workload.is_self, workload.metric
        )
        if workload.is_self:
            self.values, self.ids = without_self(self.values, self.ids, self.chosen)

    def compare(self, found: Found) -> tuple[float, int, int]:
        """Recall by distance, places with another row number than the truth, and places compared."""
        ids: Ids = np.asarray(found[1])[self.chosen].astype(np.int64)
        inside = (ids >= 0) & (ids < self.workload.references)
        query, known = self.query[self.chosen], np.where(inside, ids, 0)
        values = exact_values(query, self.reference, known, self.workload.metric).astype(np.float32)
        last = self.values[:, -1:]
        near = inside & (values >= last if self.workload.metric == "inner_product" else values <= last)
        return float(near.mean()), int((ids != self.ids).sum()), ids.size


def timed(search: Search) -> tuple[float, Found]:
    """How long one run of `search` takes, and what it finds."""
    if isinstance(search, RemoteSearch):
        return search.seconds(), search()
    start = time.perf_counter()
    found = search()
    return time.perf_counter() - start, found


def seconds_of(search: Search) -> float:
    """How long one run of `search` takes."""
    if isinstance(search, RemoteSearch):
        return search.seconds()
    start = time.perf_counter()
    search()
    return time.perf_counter() - start


def search_report(queries: int) -> tuple[str | None, float | None]:
    """The filter of this thread's last search, and the float64 values that it formed for each of its `queries`."""
    told = _core.last_search()
    return (str(told["filter"]), told["rescored"] / max(queries, 1)) if told else (None, None)


def core_peaks(threads: int) -> dict[str, float]:
    """Gop/s of multiply-adds that `threads` threads reach without touching memory, by kind of number."""
    peaks = {kind: _core.measure(kind) for kind in ("float32", "int8")}
    return {kind: threads * peak / 1e9 for kind, peak in peaks.items() if peak}


def product_gops() -> float:
    """The float32 speed of torch's matrix product, in Gop/s: about what the processor can do in float32."""
    a = torch.randn(2048, 2048)
    torch.mm(a, a)
    return 2 * 2048**3 / min(seconds_of(lambda: (torch.mm(a, a).numpy(), a.numpy())) for _ in range(5)) / 1e9


def kernels_of_peers() -> tuple[dict[str, str], list[str]]:
    """The environment of faiss at its best, and lines that name the matrix kernel of each library."""
    plain = blas.plain_environment()
    tuned, line = blas.environment_at_best()
    lines = [f"faiss as installed: OpenBLAS kernel {blas.kernel('faiss', plain) or 'unknown'}"]
    lines += [f"faiss at its best: {line}"]
    lines += [f"{name}: OpenBLAS kernel {blas.kernel(name, plain) or 'unknown'}" for name in ("numpy", "scipy")]
    return tuned, [*lines, f"torch: {blas.torch_product()}"]


def ask(several: Sequence[Callable[[], Backend]], right: Truth, budget: float) -> Asked:
    """Run each backend that fits once or, if that is short, twice, compare the answers, and keep the fastest one.

    Raises:
        MemoryError: none fits into the memory that is free.
    """
    best: Asked | None = None
    needed = 0
    for make in several:
        search, needed = make()
        if needed > 0.93 * psutil.virtual_memory().available:
            continue
        seconds, found = timed(search)
        compared = right.compare(found)
        del found
        if seconds < budget / 8:  # the first run of a library starts its threads
            seconds = min(seconds, seconds_of(search))
        if best is None or seconds < best.first:
            best = Asked(search, seconds, *compared)
        if seconds > budget:
            break
    if best is None:
        wanted, free = needed / (1 << 30), psutil.virtual_memory().available / (1 << 30)
        raise MemoryError(f"needs about {wanted:.1f} GiB, {free:.1f} GiB are free")
    return best


def take_turns(asked: dict[str, Asked], repeats: int, budget: float) -> None:
    """Time ours and each library alternately, as often as the budget of each allows."""
    ours = asked[OURS]
    peers = [peer for name, peer in asked.items() if name != OURS] or [ours]

    def runs(one: Asked) -> int:
        return min(10, math.ceil(SHORT / max(one.first, 1e-6)))

    def several(one: Asked) -> list[float]:
        time.sleep(SETTLE)
        return [seconds_of(one.search) for _ in range(runs(one))]

    for turn in range(3 * repeats):
        for peer in peers:
            both = sum(runs(one) * one.first + SETTLE for one in (ours, peer))
            turns = min(repeats if both > 4 * SHORT else 3 * repeats, max(peer.least, int(budget / both)))
            if turn >= turns or max(ours.first, peer.first) > budget:
                continue
            beside = several(ours)
            ours.times += beside
            if peer is not ours:
                peer.ours += beside
                peer.times += several(peer)


def run(workload: Workload, settings: Settings, report: Report) -> None:
    """Compare the answers of all libraries for `workload`, time them in turns, and add what was found to the report."""
    query, reference = workload.rows()
    right = Truth(workload, query, reference)
    on_curve = workload.prefix == CURVE
    budget = settings.budget / 4 if on_curve else settings.budget
    asked: dict[str, Asked] = {}
    told: tuple[str | None, float | None] = None, None
    for name, several in backends(workload, query, reference, settings.threads, settings.processes).items():
        if name != OURS and any(part.lower() in name.lower() for part in settings.skip):
            continue
        try:
            asked[name] = ask(several, right, budget)
            if name in workload.goals:  # a ratio with a goal is never from a single run
                asked[name].least = min(LEAST, settings.repeats)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            report.notes.append(f"{workload.name}: {name} skipped, {why}")
            if isinstance(error, MemoryError) and name == OURS:
                return
            if name == OURS:
                raise
            continue
        if name == OURS:
            told = search_report(len(query))
        search = asked[name].search
        if name == workloads.FAISS and isinstance(search, RemoteSearch):
            report.tuned.append(f"{workload.name}: {search.note}")
    take_turns(asked, settings.repeats, budget)

    ours = asked[OURS]
    ours.times = ours.times or [ours.first]
    for name, peer in asked.items():
        times, beside = peer.times or [peer.first], peer.ours or ours.times
        median, minimum = statistics.median(times), min(times)
        report.results.append(
            Result(
                workload.name,
                workload.count,
                name,
                len(times),
                median,
                minimum,
                median / statistics.median(beside),
                minimum / min(beside),
                workload.operations / median / 1e9,
                peer.recall,
                peer.ids_differ,
                peer.ids_compared,
                workload.goals.get(name),
            )
        )
    added = memory_added(workload, query, reference, settings.threads) if settings.memory and not on_curve else None
    report.ours.append(Ours(workload.name, *told, added, workload.allowed))


def memory_added(workload: Workload, query: Rows, reference: Rows, threads: int) -> int:
    """Bytes that one search of ours adds at its peak, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="exactknn-") as folder:
        np.save(Path(folder) / "reference.npy", reference)
        if not workload.is_self:
            np.save(Path(folder) / "query.npy", query)
        return peak_memory.added_by_arrays(Path(folder), workload.columns, workload.metric, threads)


def arguments_of(given: Sequence[str] | None) -> tuple[argparse.Namespace, list[Workload]]:
    """Read the command line; the second is what to compare."""
    parser = argparse.ArgumentParser(prog="python -m benches.peers", description="Compare exact searches.")
    parser.add_argument("--quick", action="store_true", help="smaller workloads, under a minute in all")
    parser.add_argument(
        "--only", metavar="NAME", help="only workloads whose name contains NAME, such as 4096x65536x128"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the workloads and stop")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="LIBRARY", help="leave out libraries whose name contains this"
    )
    parser.add_argument("--threads", type=int, default=cores(), help="threads for every library (default: all cores)")
    parser.add_argument("--repeats", type=int, help="runs of each library (default: 5, with --quick 3)")
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds for the runs of one library on one workload (default: 8, with --quick 0.5)",
    )
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", default=ROOT / "build" / "peers.png", help="picture (default: %(default)s)"
    )
    parser.add_argument("--record", action="store_true", help="write the tables to benches/record/")
    options = parser.parse_args(given)
    known = (*workloads.workloads(options.quick), *curve(options.quick))
    chosen = [workload for workload in known if not options.only or options.only in workload.name]
    if not chosen:
        parser.error(
            f"--only: expected part of one of {', '.join(workload.name for workload in known)}; got {options.only}"
        )
    if options.threads < 1:
        parser.error(f"--threads: expected at least 1, got {options.threads}")
    options.repeats = (3 if options.quick else 5) if options.repeats is None else options.repeats
    options.budget = (0.5 if options.quick else 8.0) if options.budget is None else options.budget
    if options.repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {options.repeats}")
    if not options.budget > 0:
        parser.error(f"--budget: expected more than 0 seconds, got {options.budget}")
    return options, chosen


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; 1 when exactknn's own answers are not the float64 truth."""
    options, chosen = arguments_of(given)
    if options.list:
        print("\n".join(workload.name for workload in chosen))
        return 0
    threadpoolctl.threadpool_limits(options.threads)
    torch.set_num_threads(options.threads)
    tuned, kernels = kernels_of_peers()
    processes = Processes(Process(blas.plain_environment(), options.threads), Process(tuned, options.threads))
    settings = Settings(options.threads, options.repeats, options.budget, options.memory, options.skip, processes)
    report = Report(options.threads, [], [], [], product_gops(), core_peaks(options.threads), kernels, [])
    absent = ", ".join(missing())
    if absent:
        report.notes.append(f"not installed here: {absent}")
    began = time.perf_counter()
    report.notes += [f"{workload.name} skipped: {workload.missing}" for workload in chosen if workload.missing]
    chosen = [workload for workload in chosen if not workload.missing]
    try:
        for number, workload in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {workload.name}", end=" ", file=sys.stderr, flush=True)
            run(workload, settings, report)
            print(f"({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
    finally:
        for process in processes:
            process.close()
    text = report.text()
    print(text)
    if options.json:
        options.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    for picture in plot(options.plot, report):
        print(f"drew {picture}", file=sys.stderr)
    if options.record:
        print(f"recorded in {write_record(text, options.threads)}", file=sys.stderr)
    exact = (OURS, workloads.ONE_THREAD)
    wrong = dict.fromkeys(r.work for r in report.results if r.peer in exact and (r.recall < 1 or r.ids_differ))
    if wrong:
        print(f"\nexactknn's answers differ from float64 for {', '.join(wrong)}: please report this", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
