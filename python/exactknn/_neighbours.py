"""What is done with the neighbours that a search returned.

The core leaves out row ``i`` for query ``i``, counting the queries from its first. Where the queries of a call are
other rows, a search asks for one neighbour more, and each query is taken out here. Order and ties being fixed, that is
the same answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def without_self(
    distances: npt.NDArray[Any], indices: npt.NDArray[np.int64], first_row: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Take each query out of its neighbours, or the last one where copies of the query come before it.

    Args:
        distances: ``(n, k + 1)``.
        indices: ``(n, k + 1)`` reference rows; query ``i`` is row ``first_row + i``.
        first_row: the row that the first query is.

    Returns:
        ``(distances, indices)``, both ``(n, k)``, in the same order.
    """
    others = indices != np.arange(first_row, first_row + len(indices))[:, np.newaxis]
    others[others.all(axis=1), -1] = False
    shape = (len(indices), indices.shape[1] - 1)
    return distances[others].reshape(shape), indices[others].reshape(shape)
