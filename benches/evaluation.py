"""Evaluation of embeddings by exactknn and by pytorch-metric-learning, in one run.

    python -m benches.evaluation [--quick] [--rounds R] [--json FILE]

    for each round, each workload, each calculator: a fresh process ──> seconds, MiB added, values
                                                  (exit code 1 if a value differs by more than 1e-4)

faiss runs with the matrix kernel that the processor has, where its own choice is a fallback. The peers search in
float32, where some neighbours at nearly equal distances swap, and average reciprocal ranks in float32: the largest
difference of a value is shown.

Every calculator starts from the same tensors and computes the five retrieval metrics. Every process first evaluates a
few rows untimed, so that nothing is loaded or built in the timed call. Calculators take turns, so that a disturbance
affects all; medians are shown. A process may use only the memory that is free at the start: if that is too little, the
table shows the error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benches import blas
from benches.data import cores
from benches.peak_memory import peak

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
OURS = "exactknn"
PML_FAISS = "pytorch-metric-learning, FaissKNN"
PML_CUSTOM = "pytorch-metric-learning, CustomKNN(batch_size=256)"
CALCULATORS = (OURS, PML_FAISS, PML_CUSTOM)
LIMIT_S = 600
LARGEST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Workload:
    """Embeddings in classes of one size, evaluated against themselves."""

    rows: int
    dimension: int
    classes: int
    k: str | None

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{self.rows:,} x {self.dimension}, {self.classes:,} classes, k={self.k}"


FULL = (
    Workload(60_000, 128, 6_000, None),
    Workload(60_000, 128, 6_000, "max_bin_count"),
    Workload(20_000, 64, 10, None),
    Workload(10_000, 128, 1_000, None),
)
QUICK = (Workload(4_000, 128, 400, None), Workload(10_000, 128, 1_000, "max_bin_count"))


def calculator(name: str, k: str | None) -> Any:
    """The calculator of this name, five metrics, squared Euclidean distance."""
    if name == OURS:
        from exactknn.evaluation import AccuracyCalculator

        return AccuracyCalculator(k=k)
    import torch
    from pytorch_metric_learning.distances import LpDistance
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator as PMLAccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN, FaissKNN

    custom = CustomKNN(LpDistance(normalize_embeddings=False, power=2), batch_size=256)
    return PMLAccuracyCalculator(
        exclude=("NMI", "AMI"),
        k=k,
        device=torch.device("cpu"),
        knn_func=FaissKNN() if name == PML_FAISS else custom,
    )


def measure(name: str, workload: Workload) -> dict[str, Any]:
    """Evaluate here: seconds, MiB added at the peak, and the values."""
    import torch

    generator = torch.manual_seed(0)
    labels = torch.arange(workload.rows) % workload.classes
    centres = torch.randn(workload.classes, workload.dimension, generator=generator)
    rows = centres[labels] + 1.5 * torch.randn(workload.rows, workload.dimension, generator=generator)
    subject = calculator(name, workload.k)
    subject.get_accuracy(rows[:50], labels[:50] % 5)
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    values = subject.get_accuracy(rows, labels)
    return {"seconds": time.perf_counter() - start, "mib": (peak() - before) / MIB, "values": values}


def in_own_process(name: str, workload: Workload, limit: int, environment: dict[str, str]) -> dict[str, Any]:
    """`measure` in a fresh process that may use ``limit`` bytes; ``{"error": ...}`` if it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    arguments = json.dumps([name, workload.rows, workload.dimension, workload.classes, workload.k])

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    command = [sys.executable, "-m", "benches.evaluation", "--measure", arguments]
    try:
        done = subprocess.run(
            command,
            env={**environment, "PYTHONPATH": path},
            preexec_fn=bound,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"more than {LIMIT_S} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1][:90] if lines else f"ended by signal {-done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def difference(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Return the largest difference of a value; infinity if one lacks a metric of the other."""
    return max(abs(ours[name] - theirs[name]) for name in ours) if set(ours) == set(theirs) else math.inf


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; 1 when values differ."""
    parser = argparse.ArgumentParser(description="Evaluation beside pytorch-metric-learning.")
    parser.add_argument("--quick", action="store_true", help="small workloads")
    parser.add_argument("--rounds", type=int, default=3, help="times of each, in turns (default 3)")
    parser.add_argument("--json", type=Path, help="write all times to this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        name, *workload = json.loads(options.measure)
        print(json.dumps(measure(name, Workload(*workload))))
        return 0
    limit = psutil.virtual_memory().available
    environment, kernel = blas.environment_at_best()
    print(f"{cores()} cores, {limit / (1 << 30):.1f} GiB of memory free, {options.rounds} rounds; medians")
    print(f"faiss: {kernel}")
    failed, everything = False, []
    for workload in QUICK if options.quick else FULL:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CALCULATORS}
        for _ in range(options.rounds):
            for name in CALCULATORS:
                if not (runs[name] and "error" in runs[name][0]):
                    runs[name].append(in_own_process(name, workload, limit, environment))
        print(f"\n{workload.name}\n{'':52}{'seconds':>10}{'ratio':>8}{'MiB added':>11}{'difference':>12}")
        ours = runs[OURS][0]
        for name in CALCULATORS:
            first = runs[name][0]
            if "error" in first:
                print(f"{name:52}  {first['error']}")
                failed |= name == OURS
                continue
            seconds = statistics.median(run["seconds"] for run in runs[name])
            ratio = seconds / statistics.median(run["seconds"] for run in runs[OURS])
            mib = statistics.median(run["mib"] for run in runs[name])
            apart = difference(ours["values"], first["values"])
            failed |= apart > LARGEST_DIFFERENCE
            print(f"{name:52}{seconds:>10.2f}{ratio:>7.1f}x{mib:>11,.0f}{apart:>12.1e}")
        everything.append({"work": workload.name, "runs": runs})
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
