r"""The base class of all reducers.

loss_dict -> term -> checked -> a hook by its kind -> value -> sum over the terms
                        \-> nothing to reduce: a zero with a gradient of zero
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from exactknn.types import LossDict, LossTerm

# Number of index tensors of each kind.
_KINDS = {"element": 1, "pos_pair": 2, "neg_pair": 2, "triplet": 3}
_KIND_OF_COUNT = {1: "element", 2: "pos_pair", 3: "triplet"}
_INDEX_DTYPES = (torch.int64, torch.int32)


class BaseReducer(torch.nn.Module):
    """Base class of the reducers; a subclass implements ``element_reduction``, or one method per kind of losses.

    Args:
        collect_stats: record the number of losses of each call as the attribute ``losses_size``. ``None``: no.
    """

    losses_size: int

    def __init__(self, collect_stats: bool | None = None) -> None:
        super().__init__()
        self.collect_stats = bool(collect_stats)
        self.reset_stats()

    def forward(self, loss_dict: LossDict, embeddings: Tensor, labels: Tensor | None) -> Any:
        """Return the sum of the reduced terms.

        Args:
            loss_dict: terms by name, see ``exactknn.types.LossTerm``.
            embeddings: ``(n, d)``: the rows that the indices refer to. Without losses the result is a zero whose
                gradient with respect to them is zero.
            labels: ``(n,)``; ``None`` if the reducer does not need them.

        Returns:
            A scalar of the losses' type.

        Raises:
            ValueError: a kind is unknown, losses and indices have different sizes, or a term has a ``divisor`` that
                this reducer would ignore.
            TypeError: indices are neither int64 nor int32.
        """
        self.reset_stats()
        values = [self.reduce_term(name, term, embeddings, labels) for name, term in loss_dict.items()]
        return functools.reduce(operator.add, values) if values else self.zero_loss(embeddings)

    def reduce_term(self, name: str, term: LossTerm, embeddings: Tensor, labels: Tensor | None) -> Tensor:
        """Hook: return the value of one term."""
        if "divisor" in term:
            raise ValueError(
                f"loss_dict[{name!r}] has a divisor, which {type(self).__name__} would ignore: use DivisorReducer"
            )
        return self.reduce_the_loss(name, term, embeddings, labels)

    def reduce_the_loss(
        self, name: str, term: LossTerm, embeddings: Tensor, labels: Tensor | None, **options: Any
    ) -> Tensor:
        """Return the value of a checked term, from the method of its kind, called with the options."""
        losses, indices = term["losses"], term["indices"]
        if not isinstance(losses, Tensor):
            if losses != 0:
                raise ValueError(f"loss_dict[{name!r}]['losses'] must be a tensor or the number 0, got {losses!r}")
            return self.zero_loss(embeddings)
        kind = kind_of(name, term)
        if self.collect_stats:
            self.losses_size += losses.numel()
        if kind == "already_reduced":
            if losses.numel() != 1 or losses.ndim > 1:
                raise ValueError(
                    f"loss_dict[{name!r}]['losses'] must be one value for already_reduced, "
                    f"got shape {tuple(losses.shape)}"
                )
            return losses
        _check_sizes(name, kind, losses, indices)
        if len(losses) == 0:
            return self.zero_loss(embeddings).to(losses.dtype)
        value: Tensor = getattr(self, f"{kind}_reduction")(losses, indices, embeddings, labels, **options)
        return value

    def element_reduction(
        self, losses: Tensor, loss_indices: Tensor, embeddings: Tensor, labels: Tensor | None, **options: Any
    ) -> Tensor:
        """Hook: return the value of one loss per row; ``loss_indices`` are the rows. There is at least one loss."""
        raise NotImplementedError

    def pos_pair_reduction(self, losses: Tensor, loss_indices: Any, *args: Any, **options: Any) -> Tensor:
        """Hook: return the value of losses of positive pairs. Here: as elements, by their anchors."""
        return self.element_reduction(losses, loss_indices[0], *args, **options)

    def neg_pair_reduction(self, losses: Tensor, loss_indices: Any, *args: Any, **options: Any) -> Tensor:
        """Hook: return the value of losses of negative pairs. Here: as elements, by their anchors."""
        return self.element_reduction(losses, loss_indices[0], *args, **options)

    def triplet_reduction(self, losses: Tensor, loss_indices: Any, *args: Any, **options: Any) -> Tensor:
        """Hook: return the value of losses of triplets. Here: as elements, by their anchors."""
        return self.element_reduction(losses, loss_indices[0], *args, **options)

    def zero_loss(self, embeddings: Tensor) -> Tensor:
        """Return a zero whose gradient with respect to the embeddings is zero, whatever their values."""
        return embeddings[:0].sum()

    def reset_stats(self) -> None:
        """Reset the statistics to 0, if ``collect_stats`` is set."""
        if self.collect_stats:
            self.losses_size = 0


def kind_of(name: str, term: LossTerm) -> str:
    """Return the kind of a term's losses, as given or inferred from its indices."""
    if "reduction_type" in term:
        kind = term["reduction_type"]
        if kind != "already_reduced" and kind not in _KINDS:
            raise ValueError(
                f"loss_dict[{name!r}]['reduction_type'] must be {', '.join(_KINDS)} or already_reduced, got {kind!r}"
            )
        return kind
    indices = term["indices"]
    if indices is None:
        return "already_reduced"
    count = 1 if isinstance(indices, Tensor) else len(indices)
    if count not in _KIND_OF_COUNT:
        raise ValueError(f"loss_dict[{name!r}]['indices'] must be one to three tensors, got {count}")
    return _KIND_OF_COUNT[count]


def _check_sizes(name: str, kind: str, losses: Tensor, indices: Any) -> None:
    tensors = [indices] if kind == "element" else indices
    wanted = _KINDS[kind]
    if (
        not isinstance(tensors, (list, tuple))
        or len(tensors) != wanted
        or not all(isinstance(tensor, Tensor) for tensor in tensors)
    ):
        raise ValueError(
            f"loss_dict[{name!r}]['indices'] must be {'a tensor' if wanted == 1 else f'{wanted} tensors'} for {kind}, "
            f"got {type(indices).__name__}"
        )
    for tensor in tensors:
        if tensor.dtype not in _INDEX_DTYPES:
            raise TypeError(f"loss_dict[{name!r}]['indices'] must be int64 or int32, got {tensor.dtype}")
    shapes = [tuple(tensor.shape) for tensor in (losses, *tensors)]
    if losses.ndim != 1 or len(set(shapes)) != 1:
        raise ValueError(
            f"loss_dict[{name!r}] must hold as many losses as indices, in one dimension, "
            f"got shapes {', '.join(map(str, shapes))}"
        )
