"""Names of pytorch-metric-learning 2.9, for gradual migration.

Each module has the names of the corresponding module of that library. New code should use the names of
`exactknn.evaluation`, `exactknn.distances`, `exactknn.reducers` and `exactknn.losses`.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "exactknn.compat needs PyTorch, which is not installed: pip install 'exactknn[torch]'", name="torch"
    ) from error
