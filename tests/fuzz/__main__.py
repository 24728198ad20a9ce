"""Run the fuzz targets for some minutes: `python -m tests.fuzz --minutes 10`, or `make fuzz MINUTES=10`.

A target runs cases from random seeds until its share of the time is up. A case that fails prints the command that
repeats it. Targets in Rust are ignored tests of `exactknn-core`; those in Python are modules beside this one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: The targets in Rust, with their share of the time and the test binary that has them.
RUST = {
    "bound": (4, "exactknn_core"),
    "selection": (1, "exactknn_core"),
    "knn": (2, "core"),
    "radius": (2, "core"),
    "ranks": (2, "core"),
    "index": (2, "core"),
    "saved": (1, "core"),
}
#: The targets in Python, with their share of the time.
PYTHON = {"index_machine": 2, "readers": 2}


@dataclass
class Outcome:
    """What a target did."""

    target: str
    cases: int
    checks: int
    seconds: int
    output: str

    @property
    def failed(self) -> bool:
        """Whether it ended before its last line."""
        return self.cases == 0


def binaries() -> dict[str, str]:
    """Build the tests of the core; return the path of each test binary."""
    command = ["cargo", "test", "--package", "exactknn-core", "--lib", "--test", "core", "--no-run"]
    done = subprocess.run([*command, "--message-format=json"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    built = [message for message in messages if message.get("executable")]
    return {message["target"]["name"]: message["executable"] for message in built}


def run(target: str, command: list[str], variables: dict[str, str]) -> Outcome:
    """Run one target in a process of its own."""
    # A backtrace tells little: the seed repeats the case.
    environment = os.environ | variables | {"RUST_BACKTRACE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    found = re.search(r"^.*FUZZED (\S+) (\d+) (\d+) (\d+)$", output, flags=re.MULTILINE)
    if done.returncode or found is None:
        return Outcome(target, 0, 0, 0, f"{output}\nexit status {done.returncode}")
    cases, checks, seconds = (int(number) for number in found.groups()[1:])
    return Outcome(target, cases, checks, seconds, output)


def main() -> int:
    """Run the targets and print what they did; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="time for all targets together (default: 10)")
    parser.add_argument("--target", choices=[*RUST, *PYTHON], action="append", help="only this target")
    parser.add_argument("--seed", type=int, help="run one case, of this seed")
    arguments = parser.parse_args()
    targets = arguments.target or [*RUST, *PYTHON]
    jobs = min(len(targets), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

    built = binaries() if any(target in RUST for target in targets) else {}
    shares = {target: RUST[target][0] if target in RUST else PYTHON[target] for target in targets}
    # Shares add up to the whole time of all cores; a target has at most the whole time.
    unit = arguments.minutes * 60 * jobs / sum(shares.values())

    def start(target: str) -> Outcome:
        seconds = max(1, min(round(unit * shares[target]), round(arguments.minutes * 60)))
        variables = {"EXACTKNN_FUZZ_SECONDS": str(seconds)}
        if arguments.seed is not None:
            variables = {"EXACTKNN_FUZZ_SEED": str(arguments.seed)}
        if target in RUST:
            name = f"fuzz_{target}"
            command = [built[RUST[target][1]], "--ignored", "--nocapture", name]
        else:
            command = [sys.executable, "-m", f"tests.fuzz.{target}"]
        return run(target, command, variables)

    began = time.monotonic()
    print(f"{'target':<14} {'cases':>10} {'checks':>14} {'seconds':>8}", flush=True)
    failed = False
    with ThreadPoolExecutor(jobs) as pool:
        # The longest first, so that all cores are busy to the end.
        for outcome in pool.map(start, sorted(targets, key=lambda target: -shares[target])):
            if outcome.failed:
                failed = True
                print(f"{outcome.target:<14} FAILED\n{outcome.output}", flush=True)
            else:
                print(
                    f"{outcome.target:<14} {outcome.cases:>10,} {outcome.checks:>14,} {outcome.seconds:>8}", flush=True
                )
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
