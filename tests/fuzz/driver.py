"""The loop of the fuzz targets in Python, as `driver.rs` is of those in Rust: cases from seeds until the time is up."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable


def fuzz(target: str, case: Callable[[int], int]) -> None:
    """Run `case`, which returns the number of its checks, with the given seed, or with new seeds for the given time."""
    start, cases, checks = time.monotonic(), 0, 0
    given = os.environ.get("EXACTKNN_FUZZ_SEED")
    seconds = float(os.environ.get("EXACTKNN_FUZZ_SECONDS", "1"))
    seeds = random.SystemRandom()
    while True:
        seed = int(given) if given is not None else seeds.getrandbits(63)
        try:
            checks += case(seed)
        except BaseException:
            print(f"FAILED: python -m tests.fuzz --target {target} --seed {seed}", flush=True)
            raise
        cases += 1
        if given is not None or time.monotonic() - start >= seconds:
            break
    print(f"FUZZED {target} {cases} {checks} {time.monotonic() - start:.0f}")
