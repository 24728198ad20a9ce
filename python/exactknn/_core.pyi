import os
from collections.abc import Callable
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "BlockSearch",
    "Index",
    "References",
    "__version__",
    "after_fork",
    "available_simd_levels",
    "before_fork",
    "build_info",
    "get_num_threads",
    "knn",
    "last_search",
    "measure",
    "pairwise",
    "radius",
    "ranks",
    "replace_float_env",
    "restore_float_env",
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
    first_query: int | None = None,
    self_rows: npt.NDArray[np.int64] | None = None,
    bfloat16: bool = False,
    num_threads: int | None = None,
    progress: Callable[[float], object] | None = None,
    p: float | None = None,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]: ...

@final
class BlockSearch:
    def __new__(
        cls,
        query: npt.NDArray[Any],
        k: int,
        metric: str,
        *,
        exclude_self: bool = False,
        first_query: int | None = None,
        bfloat16: bool = False,
        num_threads: int | None = None,
        p: float | None = None,
    ) -> BlockSearch: ...
    @property
    def rows(self) -> int: ...
    def add(self, reference: npt.NDArray[Any], *, progress: Callable[[float], object] | None = None) -> None: ...
    def result(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]: ...
    def state(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]: ...
    def restore(self, ranks: npt.NDArray[np.float64], indices: npt.NDArray[np.int64], rows: int) -> None: ...

@final
class Index:
    def __new__(cls, dim: int, metric: str, dtype: str, *, p: float | None = None) -> Index: ...
    @staticmethod
    def load(path: str | os.PathLike[str], *, mmap: bool = True) -> Index: ...
    @property
    def rows(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def metric(self) -> str: ...
    @property
    def p(self) -> float | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def add(
        self,
        reference: npt.NDArray[Any],
        *,
        bfloat16: bool = False,
        num_threads: int | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> None: ...
    def remove(self, mask: npt.NDArray[np.bool_]) -> None: ...
    def copy(self, start: int, stop: int | None = None) -> npt.NDArray[Any]: ...
    def search(
        self,
        query: npt.NDArray[Any],
        k: int | None,
        *,
        exclude_self: bool = False,
        first_query: int | None = None,
        num_threads: int | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]: ...
    def radius(
        self,
        query: npt.NDArray[Any],
        r: float,
        *,
        exclude_self: bool = False,
        first_query: int | None = None,
        return_distances: bool = True,
        sort: bool = True,
        num_threads: int | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[Any] | None]: ...
    def ranks(
        self,
        query: npt.NDArray[Any],
        *,
        query_group: npt.NDArray[np.int64],
        group_offsets: npt.NDArray[np.int64],
        group_rows: npt.NDArray[np.int64],
        exclude_self: bool = False,
        first_query: int | None = None,
        num_threads: int | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        num_threads: int | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> None: ...

@final
class References:
    def __new__(
        cls,
        reference: npt.NDArray[Any],
        metric: str,
        *,
        bfloat16: bool = False,
        p: float | None = None,
    ) -> References: ...
    @property
    def rows(self) -> int: ...
    @property
    def packings(self) -> int: ...
    def knn(
        self,
        query: npt.NDArray[Any],
        k: int,
        *,
        exclude_self: bool = False,
        first_query: int | None = None,
        self_rows: npt.NDArray[np.int64] | None = None,
        num_threads: int | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]: ...
    def radius(
        self,
        query: npt.NDArray[Any],
        r: float,
        *,
        exclude_self: bool = False,
        first_query: int | None = None,
        self_rows: npt.NDArray[np.int64] | None = None,
        from_row: int | None = None,
        return_distances: bool = True,
        sort: bool = True,
        num_threads: int | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[Any] | None]: ...
    def ranks(
        self,
        query: npt.NDArray[Any],
        *,
        query_group: npt.NDArray[np.int64],
        group_offsets: npt.NDArray[np.int64],
        group_rows: npt.NDArray[np.int64],
        exclude_self: bool = False,
        first_query: int | None = None,
        num_threads: int | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...

def radius(
    query: npt.NDArray[Any],
    reference: npt.NDArray[Any] | None,
    r: float,
    metric: str,
    *,
    exclude_self: bool = False,
    first_query: int | None = None,
    self_rows: npt.NDArray[np.int64] | None = None,
    from_row: int | None = None,
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
    first_query: int | None = None,
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
def replace_float_env() -> int: ...
def restore_float_env(state: int) -> None: ...
def before_fork() -> None: ...
def after_fork() -> None: ...
def simd_level() -> str: ...
def available_simd_levels() -> list[str]: ...
def set_simd_level(level: str | None) -> None: ...
def build_info() -> dict[str, str]: ...
def last_search() -> dict[str, Any] | None: ...
def measure(codes: str, dim: int | None = None) -> float | None: ...
