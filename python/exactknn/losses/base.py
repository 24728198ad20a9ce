r"""The base class of the losses: checks, distance, reducer and regulariser.

embeddings, labels -- checked --> compute_loss -> terms -------> reducer --> value
                                                    \             (+)        in the type of the result
                       embedding_regularizer ------> one more term, or added to the value
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exactknn._arrays.scalars import as_real
from exactknn.distances import LpDistance
from exactknn.distances.base import check_dense, check_floating, is_default_check, result_dtype
from exactknn.reducers import MeanReducer
from exactknn.types import LossDict

# Reducers that distinguish the terms of a loss: they also get the regulariser's term, and are not copied. By name, to
# include those of pytorch-metric-learning.
_OF_TERMS = {"MultipleReducers", "DoNothingReducer"}


class BaseMetricLossFunction(torch.nn.Module):
    """Base class of the losses; a subclass implements ``compute_loss``.

    Args:
        distance: not copied. ``None``: the result of ``default_distance``.
        reducer: copied, except ``MultipleReducers`` and ``DoNothingReducer``. Reducers of pytorch-metric-learning work
            too. ``None``: the result of ``default_reducer``.
        embedding_regularizer: maps the embeddings to a scalar that is added to the loss.
        embedding_reg_weight: weight of that scalar.
        collect_stats: ignored, for compatibility; distances and reducers collect their own statistics.

    Raises:
        TypeError: a distance, reducer or regulariser is not callable.
    """

    def __init__(
        self,
        *,
        distance: Callable[..., Tensor] | None = None,
        reducer: Callable[[LossDict, Tensor, Tensor | None], Any] | None = None,
        embedding_regularizer: Callable[[Tensor], Any] | None = None,
        embedding_reg_weight: float = 1,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__()
        for name, given in (
            ("distance", distance),
            ("reducer", reducer),
            ("embedding_regularizer", embedding_regularizer),
        ):
            if not (given is None or callable(given)):
                raise TypeError(f"{name} must be callable, got {given!r} of type {type(given).__name__}")
        self.distance = self.get_default_distance() if distance is None else distance
        if reducer is None:
            self.reducer = self.get_default_reducer()
        else:
            self.reducer = reducer if _takes_all_terms(reducer) else copy.deepcopy(reducer)
        self.embedding_regularizer = embedding_regularizer
        as_real(embedding_reg_weight, "embedding_reg_weight")
        self.embedding_reg_weight = embedding_reg_weight
        self.collect_stats = bool(collect_stats)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return the loss of a batch.

        Args:
            embeddings: ``(n, d)``, floating. float16 and bfloat16 are computed in float32.
            labels: ``(n,)``, of any type and on any device.
            indices_tuple: pairs or triplets, for losses that accept them.
            ref_emb: other embeddings to compare with, for losses that accept them.
            ref_labels: the labels of ``ref_emb``.

        Returns:
            A scalar in the type of the embeddings, or the reducer's result of another type. Half types give float32 for
            a distance that does not normalise, whose values may overflow them. A batch without rows gives 0.

        Raises:
            TypeError: embeddings or labels are not tensors.
            ValueError: embeddings or labels have a wrong shape or type, the loss does not accept an argument, or the
                regulariser returns more than one value.
        """
        terms = self.loss_terms(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        if labels is not None:
            labels = labels.to(embeddings.device)
        if _takes_all_terms(self.reducer):
            value = self.reducer(terms, embeddings, labels)
        else:
            regularization = terms.pop("embedding_reg_loss", None)
            # Reducers of pytorch-metric-learning accept exactly one term.
            value = self.reducer(terms, embeddings, labels) if terms else embeddings[:0].sum()
            if regularization is not None:
                value = value + regularization["losses"]
        normalized = bool(getattr(self.distance, "normalize_embeddings", False))
        return value.to(result_dtype(embeddings.dtype, normalized)) if isinstance(value, Tensor) else value

    def loss_terms(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> LossDict:
        """Return the reducer's input, after the same checks as in a call.

        Returns:
            The terms of ``compute_loss``, and ``embedding_reg_loss`` if there is a regulariser. Losses of half types
            are float32.
        """
        self._check(embeddings, labels)
        if labels is not None:
            labels = labels.to(embeddings.device)
        terms = self.compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        if self.embedding_regularizer is not None and len(embeddings):
            value = _as_scalar(self.embedding_regularizer(embeddings), embeddings) * self.embedding_reg_weight
            terms["embedding_reg_loss"] = {"losses": value, "indices": None, "reduction_type": "already_reduced"}
        return terms

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> LossDict:
        """Hook: return the terms of a checked batch; ``{}`` for a loss of 0."""
        raise NotImplementedError

    def default_distance(self) -> Callable[..., Tensor]:
        """Hook: return the default distance; here the Euclidean distance of normalised rows."""
        return LpDistance()

    def default_reducer(self) -> Callable[..., Any]:
        """Hook: return the default reducer; here the mean."""
        return MeanReducer()

    def get_default_distance(self) -> Callable[..., Tensor]:
        """Return ``default_distance()``; the older name, for subclasses that override it."""
        return self.default_distance()

    def get_default_reducer(self) -> Callable[..., Any]:
        """Return ``default_reducer()``; the older name, for subclasses that override it."""
        return self.default_reducer()

    def _check(self, embeddings: Tensor, labels: Tensor | None) -> None:
        for name, value in (("embeddings", embeddings), ("labels", labels)):
            if not (name == "labels" and value is None):
                check_dense(value, name)
        check_floating(embeddings, "embeddings")
        # A distance may accept other shapes.
        check_shapes = getattr(self.distance, "check_shapes", None)
        if check_shapes is not None and not is_default_check(check_shapes):
            check_shapes(embeddings, None)
        elif embeddings.ndim != 2:
            raise ValueError(f"embeddings must be 2-D (rows, dimensions), got shape {tuple(embeddings.shape)}")
        if labels is not None and tuple(labels.shape) != (len(embeddings),):
            raise ValueError(
                f"labels must be 1-D, one for each of the {len(embeddings)} embeddings, got shape {tuple(labels.shape)}"
            )


def _as_scalar(regularization: Any, embeddings: Tensor) -> Tensor:
    """Return the result of a regulariser, a tensor of one value or a number, as a 0-D tensor."""
    if not isinstance(regularization, Tensor):
        number = as_real(regularization, "the value of embedding_regularizer", finite=False)
        return embeddings.new_tensor(number, dtype=result_dtype(embeddings.dtype, normalized=False))
    if regularization.numel() != 1:
        raise ValueError(f"embedding_regularizer must return one value, got shape {tuple(regularization.shape)}")
    return regularization.reshape(())


def _takes_all_terms(reducer: object) -> bool:
    return not _OF_TERMS.isdisjoint(kind.__name__ for kind in type(reducer).__mro__)
