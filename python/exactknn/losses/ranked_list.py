"""Ranked list loss: every row of a batch against all others.

embeddings (n, d) -> distances (n, n), float32 or float64
    other rows of its label: d - (alpha - margin), where above 0 -> average weighted by exp(pos_temperature value)
    rows of other labels:    alpha - d,            where above 0 -> average weighted by exp(neg_temperature value)
                                           (1 - imbalance) first + imbalance second -> one loss per row
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from exactknn._arrays.scalars import as_real
from exactknn.distances.base import autocast_off, loop_over_batch, result_dtype
from exactknn.losses.base import BaseMetricLossFunction
from exactknn.types import LossDict


class RankedListLoss(BaseMetricLossFunction):
    """Ranked list loss.

    It pulls rows with the same label to within ``alpha - margin`` of each other and pushes rows with different labels
    beyond ``alpha``. With ``d`` the distance and ``a = alpha - margin``, the loss of row ``i`` is
    ``(1 - imbalance) L_P(i) + imbalance L_N(i)``, where

    - ``L_P(i)`` averages ``v = d_ij - a`` over the other rows of its label with ``v > 0``, weighted by
      ``exp(pos_temperature v)``;
    - ``L_N(i)`` averages ``u = alpha - d_ik`` over the rows of other labels with ``u > 0``, weighted by
      ``exp(neg_temperature u)``;

    and an empty average is 0. The averages are exact and finite for every finite temperature, and gradients flow
    through the weights. Only labels and distances determine which rows contribute: coinciding rows with different
    labels are the hardest, and are included.

    Source: Wang, Hua, Kodirov, Hu, Garnier, Robertson: Ranked List Loss for Deep Metric Learning, CVPR 2019,
    https://arxiv.org/abs/1903.03238.

    Args:
        margin: how much closer than ``alpha`` rows with the same label should be.
        neg_temperature: how much the nearest rows of other labels outweigh those farther away; 0: not at all.
        imbalance: weight of ``L_N``, in [0, 1].
        alpha: minimum desired distance to rows of other labels. ``None``: ``1 + margin / 2``.
        pos_temperature: how much the farthest rows of the same label outweigh nearer ones; 0: not at all.
        options: ``distance`` (default ``LpDistance()``; similarities are not allowed), ``reducer`` (default the mean
            over the rows), ``embedding_regularizer``, ``embedding_reg_weight``, ``collect_stats``: see
            ``BaseMetricLossFunction``.

    Raises:
        TypeError: a numeric argument is not a number, or an option is unknown.
        ValueError: ``imbalance`` is outside [0, 1], a number is not finite, or the distance is a similarity.
    """

    def __init__(
        self,
        margin: float,
        neg_temperature: float,
        imbalance: float = 0.5,
        alpha: float | None = None,
        pos_temperature: float = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if getattr(self.distance, "is_inverted", False):
            raise ValueError(
                f"distance must be one for which smaller is nearer, got the similarity {type(self.distance).__name__}"
            )
        self.margin = as_real(margin, "margin")
        self.neg_temperature = as_real(neg_temperature, "neg_temperature")
        self.imbalance = as_real(imbalance, "imbalance")
        if not 0 <= self.imbalance <= 1:
            raise ValueError(f"imbalance must be between 0 and 1, got {imbalance}")
        self.alpha = 1 + self.margin / 2 if alpha is None else as_real(alpha, "alpha")
        self.pos_temperature = as_real(pos_temperature, "pos_temperature")

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> LossDict:
        """Return one loss per row, as the term ``loss`` of kind ``element``.

        Raises:
            ValueError: there are no labels, any of the three arguments after them is given, or the distance does not
                return an ``(n, n)`` tensor.
        """
        if labels is None:
            raise ValueError("labels must be given for RankedListLoss, got None")
        for name, value in (("indices_tuple", indices_tuple), ("ref_emb", ref_emb), ("ref_labels", ref_labels)):
            if value is not None:
                raise ValueError(
                    f"{name} must be None for RankedListLoss, which compares all rows of the batch, "
                    f"got {type(value).__name__}"
                )
        n = len(embeddings)
        if n == 0:
            return {}
        with autocast_off(embeddings.device.type):
            rows = embeddings.to(result_dtype(embeddings.dtype, normalized=False))
            distances: Any = self.distance(rows)
            if not isinstance(distances, Tensor) or distances.shape != (n, n):
                given = tuple(distances.shape) if isinstance(distances, Tensor) else type(distances).__name__
                raise ValueError(f"distance must return a tensor of shape {(n, n)}, got {given}")
            distances = distances.to(rows.dtype)
            same = labels.unsqueeze(1) == labels
            other = same.logical_not()
            same.diagonal().fill_(False)
            other.diagonal().fill_(False)  # a NaN label differs from itself
            positive, _ = _Average.apply(distances - (self.alpha - self.margin), same, self.pos_temperature)
            negative, _ = _Average.apply(self.alpha - distances, other, self.neg_temperature)
            losses = (1 - self.imbalance) * positive + self.imbalance * negative
        indices = torch.arange(n, device=losses.device)
        return {"loss": {"losses": losses, "indices": indices, "reduction_type": "element"}}

    def extra_repr(self) -> str:
        """Return the settings, for ``repr``."""
        names = ("margin", "neg_temperature", "imbalance", "alpha", "pos_temperature")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class _Average(torch.autograd.Function):
    """``average_of_excess`` in few passes over the matrix, with its derivatives, computed in place."""

    @staticmethod
    def forward(excess: Tensor, candidates: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        rejected = (excess <= 0).logical_or_(candidates.logical_not())  # a NaN is not rejected, so it propagates
        chosen = rejected.logical_not()
        temperature = _within_range(temperature, excess.dtype)
        values = excess.masked_fill(rejected, math.copysign(math.inf, -temperature))
        heaviest = _heaviest(values, temperature)
        values.sub_(heaviest.unsqueeze(1)).masked_fill_(rejected, 0)
        weights = (values * temperature).exp_().mul_(chosen)
        weights.div_(weights.sum(dim=1, keepdim=True).clamp_(min=1))
        deviation = (weights * values).sum(dim=1)
        # The derivative by a value v is w (1 + T (v - average)). Multiply by the weight first: if it is 0, the
        # temperature times the difference may overflow.
        slopes = values.sub_(deviation.unsqueeze(1)).mul_(weights).mul_(temperature).add_(weights)
        return heaviest + deviation, slopes

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        return loop_over_batch(_Average.apply, info, in_dims, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        excess, candidates, ctx.temperature = inputs
        _, slopes = output
        ctx.mark_non_differentiable(slopes)
        ctx.save_for_backward(excess, candidates, slopes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        excess, candidates, slopes = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return slopes * grad.unsqueeze(1), None, None
        # create_graph: the plain formula has a second derivative.
        average = average_of_excess(excess, candidates, ctx.temperature)
        return (*torch.autograd.grad(average, excess, grad, create_graph=True), None, None)


def average_of_excess(excess: Tensor, candidates: Tensor, temperature: float) -> Tensor:
    """Return averages of each row's values above 0 among the candidates, weighted by ``exp(temperature value)``.

    The row's value of the largest weight is subtracted first, so that its weight is 1 and all others are at most 1:
    nothing overflows, and for equal values a large temperature multiplies a difference of exactly 0. For the gradient
    that value ``c`` is a constant, since the average of ``v - c``, plus ``c``, does not depend on it.

    Args:
        excess: ``(n, m)``.
        candidates: ``(n, m)``, boolean.
        temperature: finite.

    Returns:
        ``(n,)``; 0 for a row without such values, NaN for a row with a NaN among its candidates.
    """
    chosen = candidates & ~(excess <= 0)  # including NaN, so that it propagates
    temperature = _within_range(temperature, excess.dtype)
    heaviest = _heaviest(excess.detach().masked_fill(~chosen, math.copysign(math.inf, -temperature)), temperature)
    values = (excess - heaviest.unsqueeze(1)).masked_fill(~chosen, 0)
    weights = (values * temperature).exp() * chosen
    total = weights.sum(dim=1)  # at least 1, or 0 for a row without such values
    return heaviest + (weights * values).sum(dim=1) / total.masked_fill(total == 0, 1)


def _within_range(temperature: float, dtype: torch.dtype) -> float:
    limit = torch.finfo(dtype).max
    return float(min(max(temperature, -limit), limit))


def _heaviest(values: Tensor, temperature: float) -> Tensor:
    """Return ``(n,)`` largest values of the rows, smallest for a negative temperature; 0 where all are infinite."""
    heaviest = torch.amin(values, dim=1) if math.copysign(1, temperature) < 0 else torch.amax(values, dim=1)
    return heaviest.masked_fill_(heaviest.isinf(), 0)
