"""`pytorch_metric_learning.reducers`, which has the same names as `exactknn.reducers`."""

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
