"""Reducers composed of other reducers, and the identity."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from exactknn._arrays.scalars import check_callable
from exactknn.reducers.base import BaseReducer
from exactknn.reducers.single import MeanReducer
from exactknn.types import LossDict


def row_mean(values: Tensor, counts: Tensor) -> Tensor:
    """Return ``(n,)`` means over the pairs of each anchor; 0 for an anchor without pairs.

    Args:
        values: ``(n, n)``, 0 where there is no pair.
        counts: ``(n,)``, the number of pairs of each row.
    """
    return values.sum(dim=1) / counts.clamp(min=1)


class PerAnchorReducer(BaseReducer):
    """Aggregates the losses of pairs to one value per anchor, and reduces these with another reducer.

    All ``n`` anchors count, even those without pairs. Half types are averaged in float32, the type of the result.
    Losses of rows are passed to the inner reducer unchanged.

    Args:
        reducer: the inner reducer. ``None``: ``MeanReducer()``.
        aggregation_func: maps the ``(n, n)`` losses by anchor and other row (0 where there is no pair) and the ``(n,)``
            numbers of pairs to ``(n,)`` values.
        collect_stats: see ``BaseReducer``.
    """

    def __init__(
        self,
        reducer: Callable[[LossDict, Tensor, Tensor | None], Any] | None = None,
        aggregation_func: Callable[[Tensor, Tensor], Tensor] = row_mean,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__(collect_stats=collect_stats)
        self.reducer = MeanReducer() if reducer is None else reducer
        check_callable(self.reducer, "reducer")
        check_callable(aggregation_func, "aggregation_func")
        self.aggregation_func = aggregation_func

    def element_reduction(
        self, losses: Tensor, loss_indices: Tensor, embeddings: Tensor, labels: Tensor | None, **options: Any
    ) -> Any:
        """Return the inner reducer's value of the losses."""
        terms: LossDict = {"loss": {"losses": losses, "indices": loss_indices, "reduction_type": "element"}}
        return self.reducer(terms, embeddings, labels)

    def pos_pair_reduction(
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **options: Any
    ) -> Any:
        """Return the inner reducer's value of the anchors' values."""
        n = len(embeddings)
        wide = losses.float() if losses.dtype in (torch.float16, torch.bfloat16) else losses
        places = tuple(tensor.long() for tensor in loss_indices)
        # A pair that is listed twice counts twice, in the sum and in the number.
        values = wide.new_zeros(n, n).index_put(places, wide, accumulate=True)
        counts = torch.zeros(n, dtype=torch.int64, device=losses.device)
        counts = counts.index_add(0, places[0], torch.ones_like(places[0]))
        anchors = torch.arange(n, device=losses.device)
        return self.element_reduction(self.aggregation_func(values, counts), anchors, embeddings, labels)

    def neg_pair_reduction(
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Tensor | None, **options: Any
    ) -> Any:
        """Return the inner reducer's value of the anchors' values."""
        return self.pos_pair_reduction(losses, loss_indices, embeddings, labels)

    def triplet_reduction(self, losses: Tensor, loss_indices: Any, *args: Any, **options: Any) -> Tensor:
        """Raise ``NotImplementedError``: a triplet has two other rows."""
        raise NotImplementedError("PerAnchorReducer takes losses of rows and of pairs, got triplets")


class MultipleReducers(BaseReducer):
    """Reduces each term with the reducer of its name, and adds the results.

    Args:
        reducers: reducers by the name of the term.
        default_reducer: for terms of other names. ``None``: ``MeanReducer()``.
        collect_stats: see ``BaseReducer``.
    """

    def __init__(
        self,
        reducers: Mapping[str, torch.nn.Module],
        default_reducer: torch.nn.Module | None = None,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__(collect_stats=collect_stats)
        given: Any = reducers
        if not (isinstance(given, (Mapping, torch.nn.ModuleDict)) and all(map(callable, given.values()))):
            raise TypeError(f"reducers must map names to reducers, got {given!r} of type {type(given).__name__}")
        self.reducers = torch.nn.ModuleDict(reducers)
        self.default_reducer = MeanReducer() if default_reducer is None else default_reducer
        check_callable(self.default_reducer, "default_reducer")

    def forward(self, loss_dict: LossDict, embeddings: Tensor, labels: Tensor | None) -> Tensor:
        """Return the sum of the terms, each reduced by its own reducer; see ``BaseReducer.forward``."""
        reducers = dict(self.reducers.items())
        values: list[Tensor] = [
            reducers.get(name, self.default_reducer)({name: term}, embeddings, labels)
            for name, term in loss_dict.items()
        ]
        return functools.reduce(operator.add, values) if values else self.zero_loss(embeddings)


class DoNothingReducer(BaseReducer):
    """Returns its input unchanged."""

    def forward(self, loss_dict: LossDict, embeddings: Tensor | None = None, labels: Tensor | None = None) -> LossDict:
        """Return ``loss_dict`` itself."""
        return loss_dict
