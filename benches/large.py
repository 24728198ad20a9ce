"""A reference file above the memory limit: `exactknn search --max-memory` beside `exactknn.knn` on a part in memory.

    python -m benches.large [--rows N --dimension D --queries Q --memory SIZE --part N --folder F]

Makes a file of unit rows around common centres (`.fbin`, about 12 GB by default), then

1. searches its first rows, read into memory, with `exactknn.knn`: the rate without a limit;
2. searches the file with the limit, in a separate process that reports its peak resident size;
3. repeats this, interrupts it about half-way, and continues from the saved state by running the same command.

Exit code 1 when the resumed search writes other bytes, or the searches of the part differ from one another.
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import exactknn
from benches.data import clustered_rows, cores, cpu
from benches.peak_memory import MIB, ROOT

K = 10
MADE_AT_ONCE = 100_000
CLUSTERS = 1000

# The command line in a process that reports its peak resident size and, with --progress, numeric progress.
COMMAND = """
import sys
from exactknn.cli import main
code = main(sys.argv[1:])
with open("/proc/self/status") as status:
    peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
print("peak", int(peak) * 1024)
sys.exit(code)
"""


def make(path: Path, rows: int, dimension: int) -> None:
    """Write the file block by block."""
    with path.open("wb") as file:
        file.write(struct.pack("<II", rows, dimension))
        for start in range(0, rows, MADE_AT_ONCE):
            count = min(MADE_AT_ONCE, rows - start)
            file.write(clustered_rows(count, dimension, seed=start, clusters=CLUSTERS).tobytes())


def start(folder: Path, memory: str, *words: str) -> subprocess.Popen[str]:
    """The search of the file, in a separate process."""
    here = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", COMMAND, "search", "--query", "query.fbin", "--reference", "base.fbin"]
    return subprocess.Popen(
        [*command, "-k", str(K), "--max-memory", memory, *words],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": here},
    )


def finished(search: subprocess.Popen[str], code: int = 0) -> tuple[str, int]:
    """What it said on stderr, and its highest resident size (0 where it did not tell)."""
    output, complaint = search.communicate()
    if search.returncode != code:
        raise SystemExit(f"exit code {search.returncode}: {complaint}")
    peak = output.rpartition("peak ")[2]
    return complaint.strip(), int(peak) if peak.strip().isdigit() else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when answers differ."""
    parser = argparse.ArgumentParser(prog="python -m benches.large", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=24_000_000)
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--memory", default="2GB")
    parser.add_argument("--part", type=int, default=4_000_000, help="rows that are searched in memory too")
    parser.add_argument("--folder", help="where the file is made; it is removed at the end")
    options = parser.parse_args(arguments)
    rows, dimension = options.rows, options.dimension
    part = min(options.part, rows)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make(folder / "base.fbin", rows, dimension)
        queries = clustered_rows(options.queries, dimension, seed=1, clusters=CLUSTERS)
        (folder / "query.fbin").write_bytes(struct.pack("<II", *queries.shape) + queries.tobytes())
        size = (folder / "base.fbin").stat().st_size
        print(f"{rows:,} x {dimension} float32 ({size / 1e9:.1f} GB), {len(queries):,} queries, k {K}")
        print(f"{cpu()}, {cores()} threads, {exactknn.simd_level()}")

        base = np.memmap(folder / "base.fbin", np.float32, "r", offset=8, shape=(rows, dimension))
        in_memory = np.array(base[:part])
        started = time.perf_counter()
        whole = exactknn.knn(queries, in_memory, K)
        seconds = time.perf_counter() - started
        gigabytes = in_memory.nbytes / 1e9
        print(f"{part:,} rows in memory ({gigabytes:.1f} GB): {seconds:.1f} s, {part / seconds / 1e6:.2f} M rows/s")
        bounded = exactknn.knn(queries, in_memory, K, max_memory=options.memory)
        if any(a.tobytes() != b.tobytes() for a, b in zip(whole, bounded, strict=True)):
            print("a bound changes the answer", file=sys.stderr)
            return 1
        del in_memory, base

        started = time.perf_counter()
        _, peak = finished(start(folder, options.memory, "--output", "straight.npz"))
        seconds = time.perf_counter() - started
        print(f"--max-memory {options.memory}: {seconds:.1f} s, {rows / seconds / 1e6:.2f} M rows/s, ", end="")
        print(f"{peak / MIB:,.0f} MiB at most, Python and NumPy included")

        resumed = ["--output", "resumed.npz", "--resume", "state"]
        search = start(folder, options.memory, *resumed)
        time.sleep(seconds / 2)  # half-way is anywhere: what is compared does not depend on it
        search.send_signal(signal.SIGINT)
        said, _ = finished(search, 128 + signal.SIGINT)
        kept = (folder / "state").stat().st_size
        print(f"interrupted: {said!r}; the state takes {kept / 1024:,.0f} KiB")
        started = time.perf_counter()
        said, _ = finished(start(folder, options.memory, *resumed))
        print(f"resumed: {said!r}, {time.perf_counter() - started:.1f} s more")
        if (folder / "straight.npz").read_bytes() != (folder / "resumed.npz").read_bytes():
            print("the resumed search wrote other bytes", file=sys.stderr)
            return 1
        print("the same bytes as without the interrupt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
