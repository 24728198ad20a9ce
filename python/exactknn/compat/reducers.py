"""`pytorch_metric_learning.reducers`: the names are the same here."""

from __future__ import annotations

from exactknn.reducers import (
    AvgNonZeroReducer,
    BaseReducer,
    ClassWeightedReducer,
    DivisorReducer,
    DoNothingReducer,
    MeanReducer,
    MultipleReducers,
    PerAnchorReducer,
    SumReducer,
    ThresholdReducer,
)

__all__ = [
    "AvgNonZeroReducer",
    "BaseReducer",
    "ClassWeightedReducer",
    "DivisorReducer",
    "DoNothingReducer",
    "MeanReducer",
    "MultipleReducers",
    "PerAnchorReducer",
    "SumReducer",
    "ThresholdReducer",
]
