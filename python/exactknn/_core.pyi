from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "BlockSearch",
    "__version__",
    "available_simd_levels",
    "build_info",
    "get_num_threads",
    "knn",
    "last_search",
    "measure",
    "pairwise",
    "radius",
    "ranks",
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
class BlockSearch:
    def __new__(
        cls,
        query: npt.NDArray[Any],
        k: int,
        metric: str,
        *,
        exclude_self: bool = False,
        bfloat16: bool = False,
        num_threads: int | None = None,
        p: float | None = None,
    ) -> BlockSearch: ...
    @property
    def rows(self) -> int: ...
    def add(
        self, reference: npt.NDArray[Any], *, progress: Callable[[float], object] | None = None
    ) -> None: ...
    def result(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]: ...
    def state(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]: ...
    def restore(self, ranks: npt.NDArray[np.float64], indices: npt.NDArray[np.int64], rows: int) -> None: ...

def radius(
    query: npt.NDArray[Any],
    reference: npt.NDArray[Any] | None,
    r: float,
    metric: str,
    *,
    exclude_self: bool = False,
    return_distances: bool = True,
    sort: bool = True,
    bfloat16: bool = False,
    num_threads: int | None = None,
    progress: Callable[[float], object] | None = None,
    p: float | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[Any] | None]: ...
def ranks(
    query: npt.NDArray[Any],
    reference: npt.NDArray[Any] | None,
    metric: str,
    *,
    query_group: npt.NDArray[np.int64],
    group_offsets: npt.NDArray[np.int64],
    group_rows: npt.NDArray[np.int64],
    exclude_self: bool = False,
    first_row: int | None = None,
    bfloat16: bool = False,
    num_threads: int | None = None,
    progress: Callable[[float], object] | None = None,
    p: float | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
def pairwise(
    query: npt.NDArray[Any],
    reference: npt.NDArray[Any],
    metric: str,
    *,
    bfloat16: bool = False,
    num_threads: int | None = None,
    p: float | None = None,
) -> npt.NDArray[Any]: ...
def set_num_threads(num_threads: int | None) -> None: ...
def get_num_threads() -> int: ...
def simd_level() -> str: ...
def available_simd_levels() -> list[str]: ...
def set_simd_level(level: str | None) -> None: ...
def build_info() -> dict[str, str]: ...
def last_search() -> dict[str, Any] | None: ...
def measure(codes: str, dim: int | None = None) -> float | None: ...
