"""Rows and helpers that the tests of this folder share."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

COMMAND = [sys.executable, "-m", "exactknn"]


def run(folder: Path, *arguments: object, command: list[str] = COMMAND, **options) -> subprocess.CompletedProcess[str]:
    words = [*command, *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=50, **options)


def refusal(folder: Path, *arguments: object, **options) -> str:
    """The text of the one line with which a command is refused."""
    before = sorted(os.listdir(folder))
    done = run(folder, *arguments, **options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("exactknn: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert sorted(os.listdir(folder)) == before
    return done.stderr.removeprefix("exactknn: error: ").rstrip("\n")


def save_bin(path: Path, matrix: np.ndarray, dtype: str = "<f4") -> None:
    path.write_bytes(struct.pack("<II", *matrix.shape) + matrix.astype(dtype).tobytes())


def assert_result(path: Path, expected) -> None:
    distances, indices = expected
    with np.load(path) as result:
        assert sorted(result.files) == ["distances", "indices"]
        assert result["indices"].dtype == np.int64 and result["distances"].dtype == distances.dtype
        np.testing.assert_array_equal(result["indices"], indices)
        tolerance = 1e-12 if distances.dtype == np.float64 else 2e-7
        np.testing.assert_allclose(result["distances"], distances, rtol=tolerance, atol=tolerance)
