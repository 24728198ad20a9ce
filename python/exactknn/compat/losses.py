"""`pytorch_metric_learning.losses` in the spelling of 2.9."""

from __future__ import annotations

from typing import Any

from exactknn import losses

__all__ = ["RankedListLoss"]


class RankedListLoss(losses.RankedListLoss):
    """`exactknn.losses.RankedListLoss` with the temperatures' names of 2.9.

    Args:
        margin: as there.
        Tn: its `neg_temperature`.
        imbalance: as there.
        alpha: as there.
        Tp: its `pos_temperature`.
        options: as there.
    """

    def __init__(
        self,
        margin: float,
        Tn: float,
        imbalance: float = 0.5,
        alpha: float | None = None,
        Tp: float = 0,
        **options: Any,
    ) -> None:
        super().__init__(margin, Tn, imbalance, alpha, Tp, **options)

    @property
    def Tn(self) -> float:
        """The temperature of rows of other labels."""
        return self.neg_temperature

    @property
    def Tp(self) -> float:
        """The temperature of rows of the same label."""
        return self.pos_temperature
