"""Fixtures that the tests of this folder share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks and pieces of a few rows, and a bound that counts rows only."""
    monkeypatch.setattr("exactknn._stream.plan.BLOCK_BYTES", 3000)
    monkeypatch.setattr("exactknn._stream.plan.LEAST_ROWS", 5)
    monkeypatch.setattr("exactknn._stream.plan.FIXED_BYTES", 0)
    monkeypatch.setattr("exactknn._stream.rows.PIECE_BYTES", 700)
    monkeypatch.setattr("exactknn._stream.search.PIECE_BYTES", 700)
