"""The demo from end to end, in a folder of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sklearn.datasets import load_digits

from docs.recipes import digits
from exactknn.evaluation import AccuracyCalculator


def test_the_demo_agrees_with_brute_force_and_ends_with_the_values_of_the_calculator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(digits, "RUNS", 1)
    assert digits.main() == 0
    printed = capsys.readouterr().out
    assert "RustKNN agrees with float64 brute force: 8,985 of 8,985 neighbours" in printed
    data = load_digits()
    expected = AccuracyCalculator().get_accuracy(data.data, data.target)
    table = dict(re.findall(r"^([a-z_]+(?:_1)?) +([01]\.\d{4}) +1,797 +0$", printed, flags=re.MULTILINE))
    assert table == {name: f"{value:.4f}" for name, value in expected.items()}
    for name in ("neighbours.png", "report.html", "digits.npy", "labels.npy"):
        assert (tmp_path / "build" / "demo" / name).stat().st_size > 1_000
