from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "__version__",
    "available_simd_levels",
    "build_info",
    "get_num_threads",
    "knn",
    "set_num_threads",
    "set_simd_level",
    "simd_level",
]

__version__: str

def knn(
    query: npt.NDArray[Any],
    reference: npt.NDArray[Any] | None,
    k: int,
    metric: str,
    *,
    exclude_self: bool = False,
    bfloat16: bool = False,
    num_threads: int | None = None,
    progress: Callable[[float], object] | None = None,
    p: float | None = None,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]: ...
def set_num_threads(num_threads: int | None) -> None: ...
def get_num_threads() -> int: ...
def simd_level() -> str: ...
def available_simd_levels() -> list[str]: ...
def set_simd_level(level: str | None) -> None: ...
def build_info() -> dict[str, str]: ...
