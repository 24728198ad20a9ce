"""Fixtures that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.python.cli.evaluate_helpers import CLASSES, POINTS


@pytest.fixture
def floats() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(120, 24)).astype(np.float32)


@pytest.fixture
def example(tmp_path, monkeypatch) -> Path:
    """A folder with the worked example in it, which is the current one."""
    monkeypatch.chdir(tmp_path)
    np.save("e.npy", POINTS)
    np.save("l.npy", CLASSES)
    return tmp_path
