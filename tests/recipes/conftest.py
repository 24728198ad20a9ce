"""Calculators for the tests of the evaluation recipe."""

from __future__ import annotations

import pytest

from exactknn.evaluation import AccuracyCalculator
from tests.recipes.recipe_helpers import METRICS


@pytest.fixture
def calculator() -> AccuracyCalculator:
    """All five metrics of the default set, from the exact default backend."""
    return AccuracyCalculator(include=METRICS)


@pytest.fixture
def precision() -> AccuracyCalculator:
    return AccuracyCalculator(include=("precision_at_1",))
