"""Reducers of the losses of rows, pairs or triplets to one value, as ``torch.nn.Module`` objects.

    {name: {"losses", "indices", "reduction_type"}}  -> reducer(loss_dict, embeddings, labels) -> scalar

Names, dictionaries and hooks for subclasses are those of pytorch-metric-learning.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "exactknn.reducers needs PyTorch, which is not installed: pip install 'exactknn[torch]'", name="torch"
    ) from error

from exactknn.reducers.base import BaseReducer
from exactknn.reducers.composed import DoNothingReducer, MultipleReducers, PerAnchorReducer
from exactknn.reducers.single import (
    AvgNonZeroReducer,
    ClassWeightedReducer,
    DivisorReducer,
    MeanReducer,
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
