"""Reducers of a list of losses to a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exactknn._arrays.scalars import as_real
from exactknn.reducers.base import BaseReducer, kind_of
from exactknn.types import LossTerm


class MeanReducer(BaseReducer):
    """The mean of the losses; 0 without losses."""

    def element_reduction(self, losses: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the mean."""
        return torch.mean(losses)


class SumReducer(BaseReducer):
    """The sum of the losses."""

    def element_reduction(self, losses: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the sum."""
        return torch.sum(losses)


class ThresholdReducer(BaseReducer):
    """The mean of the losses with ``low < loss < high``; 0 if there is none. A NaN is never between the bounds.

    Args:
        low: exclusive lower bound. ``None``: no lower bound.
        high: exclusive upper bound. ``None``: no upper bound.
        collect_stats: also record ``num_past_filter``, ``num_above_low`` and ``num_below_high``; see ``BaseReducer``.

    Raises:
        TypeError: a bound is not a real number.
        ValueError: neither bound is given, or a bound is NaN.
    """

    num_past_filter: int
    num_above_low: int
    num_below_high: int

    def __init__(self, low: float | None = None, high: float | None = None, collect_stats: bool | None = None) -> None:
        if low is None and high is None:
            raise ValueError("low or high must be given, got None for both")
        super().__init__(collect_stats=collect_stats)
        self.low = None if low is None else as_real(low, "low", finite=False)
        self.high = None if high is None else as_real(high, "high", finite=False)

    def element_reduction(
        self, losses: Tensor, loss_indices: Tensor, embeddings: Tensor, labels: Tensor | None, **options: Any
    ) -> Tensor:
        """The mean of the losses between the bounds."""
        above = torch.ones_like(losses, dtype=torch.bool) if self.low is None else losses > self.low
        below = torch.ones_like(above) if self.high is None else losses < self.high
        between = above & below
        chosen = losses[between]
        if self.collect_stats:
            self.num_past_filter += len(chosen)
            self.num_above_low += int(above.sum())
            self.num_below_high += int(below.sum())
        # Not a branch on values, which torch.compile cannot trace.
        return torch.where(between.any(), chosen.mean(), self.zero_loss(embeddings).to(losses.dtype))

    def reset_stats(self) -> None:
        """Reset the statistics to 0, if ``collect_stats`` is set."""
        super().reset_stats()
        if self.collect_stats:
            self.num_past_filter = self.num_above_low = self.num_below_high = 0

    def extra_repr(self) -> str:
        """Return the bounds, for ``repr``."""
        return f"low={self.low}, high={self.high}"


class AvgNonZeroReducer(ThresholdReducer):
    """The mean of the losses above 0; 0 if there is none."""

    def __init__(self, collect_stats: bool | None = None) -> None:
        super().__init__(low=0, collect_stats=collect_stats)


class ClassWeightedReducer(BaseReducer):
    """The mean of the losses, each times the weight of its row's class (its anchor's, for pairs and triplets).

    The sum is divided by the number of losses, not by the sum of the weights.

    Args:
        weights: ``(number of classes,)``, indexed by label.
        collect_stats: see ``BaseReducer``.

    Raises:
        TypeError: ``weights`` are not numbers.
        ValueError: ``weights`` is not 1-D.
    """

    weights: Tensor

    def __init__(self, weights: Tensor | list[float], collect_stats: bool | None = None) -> None:
        super().__init__(collect_stats=collect_stats)
        try:
            weights = torch.as_tensor(weights)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"weights must hold one number per class, got {type(weights).__name__}") from error
        if weights.is_complex():
            raise TypeError(f"weights must hold real numbers, got {weights.dtype}")
        if weights.ndim != 1:
            raise ValueError(f"weights must be 1-D, one per class, got shape {tuple(weights.shape)}")
        # Not part of the state dict, so that a loss saved with another reducer can be loaded.
        self.register_buffer("weights", weights, persistent=False)

    def element_reduction(
        self, losses: Tensor, loss_indices: Tensor, embeddings: Tensor, labels: Tensor | None, **options: Any
    ) -> Tensor:
        """Return the mean of the weighted losses.

        Raises:
            ValueError: labels are missing or not integers.
        """
        if labels is None or labels.is_floating_point():
            given = None if labels is None else labels.dtype
            raise ValueError(f"labels must be integer class numbers for ClassWeightedReducer, got {given}")
        classes = labels.to(losses.device)[loss_indices.to(losses.device)].long()
        return torch.mean(losses * self.weights.to(losses.device, losses.dtype)[classes])


class DivisorReducer(BaseReducer):
    """The sum of the losses divided by the term's ``divisor``; 0 if that is 0.

    Terms that are already reduced need no divisor and are not divided.
    """

    def reduce_term(self, name: str, term: LossTerm, embeddings: Tensor, labels: Tensor | None) -> Tensor:
        """Return the value of one term.

        Raises:
            KeyError: the divisor is missing.
        """
        if kind_of(name, term) == "already_reduced":
            return self.reduce_the_loss(name, term, embeddings, labels)
        return self.reduce_the_loss(name, term, embeddings, labels, divisor=term["divisor"])

    def element_reduction(
        self, losses: Tensor, loss_indices: Tensor, embeddings: Tensor, labels: Tensor | None, **options: Any
    ) -> Tensor:
        """Return the sum divided by ``divisor``."""
        divisor = options["divisor"]
        if divisor == 0:
            return self.zero_loss(embeddings).to(losses.dtype)
        value: Tensor = losses.sum() / divisor
        if losses.dtype == torch.float16:  # the sum may overflow even if the quotient does not
            value = torch.where(value.isfinite(), value, (losses.float().sum() / divisor).to(losses.dtype))
        return value.to(losses.dtype)
