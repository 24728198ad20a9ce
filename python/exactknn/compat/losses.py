"""`pytorch_metric_learning.losses` with the names of 2.9."""

from __future__ import annotations

from typing import Any

from exactknn import losses

__all__ = ["RankedListLoss"]


class RankedListLoss(losses.RankedListLoss):
    """`exactknn.losses.RankedListLoss` with the temperature names of 2.9.

    Args:
        margin: as in `exactknn.losses.RankedListLoss`.
        Tn: `neg_temperature`.
        imbalance: as in `exactknn.losses.RankedListLoss`.
        alpha: as in `exactknn.losses.RankedListLoss`.
        Tp: `pos_temperature`.
        options: as in `exactknn.losses.RankedListLoss`.
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
