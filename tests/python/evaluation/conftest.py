"""Fixtures that the tests of this folder share."""

from functools import partial

import pytest

from exactknn.evaluation import (
    AccuracyCalculator,
)
from tests.python.evaluation.accuracy_helpers import squared


@pytest.fixture(params=["neighbours", "ranks", "torch"])
def make(request, monkeypatch):
    """A calculator that gets its hits from neighbours, from the core's ranks, or from blocks of torch's search."""
    if request.param != "neighbours":
        monkeypatch.setattr("exactknn._retrieval.engine.ranks_pay", lambda *_: True)
    if request.param == "torch":
        return partial(AccuracyCalculator, knn_func=squared(backend="torch", batch_size=2))
    return AccuracyCalculator
