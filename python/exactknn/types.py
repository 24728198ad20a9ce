"""Types of the data that losses pass to reducers. Plain dictionaries and tuples work too."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LossDict", "LossTerm", "PairIndices", "TripletIndices"]


class PairIndices(NamedTuple):
    """Row numbers of pairs, int64 or int32, each ``(number of pairs,)``."""

    anchors: Tensor
    others: Tensor


class TripletIndices(NamedTuple):
    """Row numbers of triplets, int64 or int32, each ``(number of triplets,)``."""

    anchors: Tensor
    positives: Tensor
    negatives: Tensor


class _Losses(TypedDict):
    losses: Tensor | float
    indices: Tensor | tuple[Tensor, ...] | list[Tensor] | None


class LossTerm(_Losses, total=False):
    """One kind of losses.

    ``losses``: ``(number of losses,)``, or the number 0. ``indices``: the row of each loss, a pair or a triplet of such
    tensors, or ``None`` for a value that is already reduced. ``reduction_type``: ``"element"``, ``"pos_pair"``,
    ``"neg_pair"``, ``"triplet"`` or ``"already_reduced"``; by default inferred from ``indices``. ``divisor``: the
    divisor of ``DivisorReducer``.
    """

    reduction_type: str
    divisor: Tensor | float


LossDict = dict[str, LossTerm]
"""Terms by name."""
