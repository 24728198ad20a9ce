"""The benchmarked searches by name: their rows, sizes, competing libraries, and goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from benches import real_vectors
from benches.data import Rows, clustered_rows, correlated_rows, gaussian_rows, grid_rows, offset_rows

OURS = "exactknn"
ONE_THREAD = "exactknn, one thread"
FAISS = "faiss IndexFlat at its best"
FAISS_INSTALLED = "faiss IndexFlat as installed"
FAISS_BUILDING = "faiss at its best, built in the time"
PANORAMA = "faiss Panorama"
TORCH = "torch cdist + topk"
TORCH_BF16 = "torch bfloat16 mm + topk"
CUSTOM_KNN = "pytorch-metric-learning CustomKNN"
SKLEARN = "scikit-learn brute"
SKLEARN_INTEL = "scikit-learn-intelex brute"
USEARCH = "usearch exact"
HNSWLIB = "hnswlib BFIndex"
SCANN = "scann brute force, 8 bits"
SVS = "svs Flat"
DUCKDB = "duckdb"
SQLITE_VEC = "sqlite-vec"
LANCEDB = "lancedb flat"
MILVUS_LITE = "milvus-lite FLAT"

# Compared where they are installed; nothing here needs them.
LIBRARIES = {
    USEARCH: ("usearch",),
    HNSWLIB: ("hnswlib",),
    SKLEARN_INTEL: ("sklearnex",),
    SCANN: ("scann",),
    SVS: ("svs",),
}
# Databases that search without an index. SQLite's extension is loaded by apsw, as Python's own module often cannot.
DATABASES = {
    DUCKDB: ("duckdb", "pyarrow"),
    SQLITE_VEC: ("sqlite_vec", "apsw"),
    LANCEDB: ("lancedb",),
    MILVUS_LITE: ("milvus_lite", "pymilvus"),
}
MODULES = LIBRARIES | DATABASES

SHORT_NAMES = {FAISS: "faiss", CUSTOM_KNN: "CustomKNN", SKLEARN: "scikit-learn", ONE_THREAD: "one thread"}

BOTH = (FAISS, FAISS_INSTALLED)
USUAL = (*BOTH, FAISS_BUILDING, TORCH, CUSTOM_KNN, SKLEARN)
# A few workloads tell enough of those that are slower or not exact.
ALL = (*USUAL, PANORAMA, TORCH_BF16, *LIBRARIES)
# All that the tables may show, in their order.
SHOWN = (*ALL, *DATABASES, ONE_THREAD)

WORDS = "words"

_ROWS: dict[str, Callable[..., Rows]] = {
    "clustered": clustered_rows,
    "correlated": correlated_rows,
    "grid": grid_rows,
    "offset": offset_rows,
    "gaussian": gaussian_rows,
    WORDS: real_vectors.word_rows,
}


@dataclass(frozen=True)
class Workload:
    """One search: `queries` rows against `references` rows of length `dimension`, for the `k` nearest.

    Attributes:
        data: how the rows are made, see `benches.data` and `benches.real_vectors`.
        queries: number of queries; 0: the references among themselves, self excluded.
        references: number of references.
        dimension: length of a row.
        k: neighbours of each query; None: all, sorted.
        metric: `sqeuclidean` or `inner_product`.
        peers: the libraries to compare with.
        goals: at least how many times their time over ours should be.
        prefix: what the name begins with, if not `data`.
    """

    data: str
    queries: int
    references: int
    dimension: int
    k: int | None
    metric: str = "sqeuclidean"
    peers: tuple[str, ...] = USUAL
    goals: Mapping[str, float] = field(default_factory=dict)
    prefix: str = ""

    @property
    def name(self) -> str:
        """What `--only` takes a part of, such as `clustered-4096x65536x128-k10`."""
        k = "all" if self.k is None else f"k{self.k}"
        return f"{self.prefix or self.data}-{self.queries or 'self'}x{self.references}x{self.dimension}-{k}"

    @property
    def is_self(self) -> bool:
        """Whether the references are searched among themselves."""
        return self.queries == 0

    @property
    def count(self) -> int:
        """The number of queries."""
        return self.queries or self.references

    @property
    def columns(self) -> int:
        """The number of neighbours of each query."""
        return self.references - self.is_self if self.k is None else self.k

    @property
    def operations(self) -> int:
        """A multiplication and an addition for each number of each pair of rows."""
        return 2 * self.count * self.references * self.dimension

    @property
    def outputs(self) -> int:
        """Bytes of the distances (float32) and the row numbers (int64)."""
        return self.count * self.columns * 12

    @property
    def allowed(self) -> int:
        """Bytes that a search may add to the process."""
        if self.k is None:
            return self.outputs + (256 << 20)
        return self.outputs + self.references * self.dimension * 4 + (64 << 20)

    @property
    def missing(self) -> str | None:
        """Why its rows are not here, or None."""
        return real_vectors.missing(self.dimension) if self.data == WORDS else None

    def rows(self) -> tuple[Rows, Rows]:
        """Queries and references; the same array twice for a self-search."""
        reference = _ROWS[self.data](self.references, self.dimension, seed=1)
        query = reference if self.is_self else _ROWS[self.data](self.queries, self.dimension, seed=2)
        return query, reference


def _workloads(n: int, m: int, own: int, all_own: int) -> tuple[Workload, ...]:
    """The comparisons: `n` queries, `m` references, self-searches of `own` rows, all neighbours of `all_own` rows."""
    alike = {FAISS: 0.83}
    return (
        Workload("clustered", n, m, 128, 10, peers=ALL, goals={FAISS: 5.5, CUSTOM_KNN: 14, SKLEARN: 6}),
        Workload("clustered", n, m, 128, 100, goals={FAISS: 4}),
        Workload("clustered", n, m, 128, 1000, goals={FAISS: 2.8}),
        Workload("clustered", n, m, 512, 10, goals={FAISS: 3.5}),
        Workload("clustered", n, m, 768, 10, peers=(*USUAL, PANORAMA), goals={FAISS: 3.8}),
        Workload("clustered", n // 16, m, 128, 10, peers=ALL, goals={FAISS: 3.5}),
        Workload("clustered", 64, m, 128, 10, peers=(*ALL, *DATABASES), goals={FAISS: 2.2}),
        Workload("clustered", 8, m, 128, 10, peers=ALL, goals={FAISS: 1.2}),
        Workload("clustered", 4, m, 128, 10, peers=BOTH, goals={FAISS: 1.2}),
        Workload("clustered", 2, m, 128, 10, peers=BOTH, goals={FAISS: 1}),
        Workload("clustered", 1, m, 128, 10, peers=ALL, goals={FAISS: 1.2}),
        Workload("clustered", n, m, 128, 10, "inner_product", prefix="inner-product"),
        Workload("correlated", 0, own, 384, 1, peers=(*BOTH, CUSTOM_KNN, SKLEARN), goals={FAISS: 8}),
        Workload("correlated", 0, own, 384, 10, peers=(*BOTH, CUSTOM_KNN, SKLEARN, PANORAMA), goals={FAISS: 5.5}),
        Workload("correlated", 0, own, 384, 100, peers=(*BOTH, CUSTOM_KNN, SKLEARN), goals={FAISS: 3.2}),
        Workload("clustered", 0, all_own, 64, None, peers=(CUSTOM_KNN,), goals={CUSTOM_KNN: 3}),
        Workload("grid", n, m, 32, 10, peers=BOTH, goals=alike),
        Workload("offset", n, m, 128, 10, peers=(*BOTH, TORCH, SKLEARN), goals=alike),
        Workload("gaussian", n // 2, m, 512, 10, peers=(*BOTH, SKLEARN), goals=alike),
        Workload("clustered", n, m, 128, 10, peers=(ONE_THREAD,), goals={ONE_THREAD: 1.85}, prefix="threads"),
    )


def _of_words(n: int, m: int, own: int, wide: int) -> tuple[Workload, ...]:
    """The comparisons on real rows: `n` queries and `m` references, self-searches of `own`, and of `wide` long rows."""
    return (
        Workload(WORDS, 0, own, 384, 1, peers=BOTH, goals={FAISS: 8}),
        Workload(WORDS, 0, own, 384, 10, peers=(*BOTH, PANORAMA), goals={FAISS: 5.5}),
        Workload(WORDS, 0, own, 384, 100, peers=BOTH, goals={FAISS: 3.2}),
        Workload(WORDS, n, m, 384, 10, peers=(*BOTH, PANORAMA)),
        Workload(WORDS, 0, wide, 768, 10, peers=BOTH),
    )


def workloads(quick: bool) -> tuple[Workload, ...]:
    """The comparisons, in full or small. The goals are for the full sizes."""
    if quick:
        small = _workloads(2048, 16384, 4000, 2000) + _of_words(1024, 16384, 4000, 4000)
        return tuple(replace(workload, goals={}) for workload in small)
    return _workloads(4096, 65536, 30_000, 20_000) + _of_words(4096, 55_000, 30_000, 20_000)


CURVE = "curve"
"""The name of the times over the number of queries, beside the names of the workloads."""


def curve(quick: bool) -> tuple[Workload, ...]:
    """One search for each number of queries, each twice the one before."""
    references, most = (16384, 256) if quick else (65536, 1024)
    return tuple(
        Workload("clustered", 1 << power, references, 128, 10, peers=(FAISS,), prefix=CURVE)
        for power in range(most.bit_length())
    )
