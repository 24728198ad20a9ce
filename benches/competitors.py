"""The same search by each library.

    Workload, query, reference --> {library: [Backend, ...]}     a search: () -> (values, row numbers)

Every library starts from the same two arrays; only `FAISS` has its index built beforehand. For self-exclusion, a
library without such a search finds one more neighbour, and the row itself is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import faiss
import numpy as np
import numpy.typing as npt
import torch
from pytorch_metric_learning.distances import DotProductSimilarity, LpDistance
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.neighbors import NearestNeighbors

import exactknn
from benches import workloads
from benches.data import Rows, without_self
from benches.workloads import Workload

try:
    import usearch.index as usearch_index

    HAS_USEARCH = True
except ImportError:
    HAS_USEARCH = False

Found = tuple[npt.NDArray[Any], npt.NDArray[Any]]
Search = Callable[[], Found]


class Backend(NamedTuple):
    """A search by one library, and its approximate peak memory: a search that cannot fit is skipped."""

    search: Search
    bytes_needed: int


def backends(workload: Workload, query: Rows, reference: Rows, threads: int) -> dict[str, list[Backend]]:
    """The backends of each library of `workload`, `OURS` first; where there are several, the fastest one counts."""
    usual, matrix = workload.outputs + (512 << 20), 4 * workload.count * workload.references
    # CustomKNN copies its result several times to drop the rows themselves: measured, 3.2 to 3.5 times the outputs.
    copies = 7 * workload.outputs // 2 + (512 << 20)
    makers: dict[str, Callable[[], list[Backend]]] = {
        workloads.FAISS: lambda: [Backend(_faiss(workload, query, reference, built=True), usual)],
        workloads.FAISS_BUILDING: lambda: [Backend(_faiss(workload, query, reference, built=False), usual)],
        workloads.TORCH: lambda: [Backend(_torch(workload, query, reference), matrix + 2 * usual)],
        workloads.CUSTOM_KNN: lambda: [
            Backend(_custom_knn(workload, query, reference, None), matrix + copies),
            Backend(_custom_knn(workload, query, reference, 256), copies),
        ],
        workloads.SKLEARN: lambda: [Backend(_sklearn(workload, query, reference), 2 * usual)],
        workloads.USEARCH: lambda: (
            [Backend(_usearch(workload, query, reference, threads), usual)] if HAS_USEARCH else []
        ),
        workloads.ONE_THREAD: lambda: [Backend(ours(workload, query, reference, 1), workload.allowed)],
    }
    asked = {workloads.OURS: [Backend(ours(workload, query, reference, threads), workload.allowed)]}
    for name in workload.peers:
        # scikit-learn's brute force does not rank by inner product.
        if not (name == workloads.SKLEARN and workload.metric == "inner_product") and (several := makers[name]()):
            asked[name] = several
    return asked


def ours(workload: Workload, query: Rows, reference: Rows, threads: int) -> Search:
    """The search of this package."""
    other = None if workload.is_self else reference
    return lambda: exactknn.knn(query, other, workload.columns, metric=workload.metric, num_threads=threads)


def _asked(workload: Workload) -> int:
    """Return the number of neighbours to search for, if the row itself may be among them."""
    return workload.columns + workload.is_self


def _cleaned(workload: Workload, values: npt.NDArray[Any], ids: npt.NDArray[Any]) -> Found:
    if not workload.is_self:
        return values, ids
    return without_self(values, ids, np.arange(len(ids)))


def _faiss(workload: Workload, query: Rows, reference: Rows, *, built: bool) -> Search:
    def build() -> Any:
        kind = faiss.IndexFlatIP if workload.metric == "inner_product" else faiss.IndexFlatL2
        index = kind(reference.shape[1])
        index.add(reference)
        return index

    beforehand = build() if built else None

    def search() -> Found:
        index = build() if beforehand is None else beforehand
        return _cleaned(workload, *index.search(query, _asked(workload)))

    return search


def _torch(workload: Workload, query: Rows, reference: Rows) -> Search:
    q, r = torch.from_numpy(query), torch.from_numpy(reference)

    def search() -> Found:
        if workload.metric == "inner_product":
            values, ids = (q @ r.T).topk(_asked(workload))
        else:
            values, ids = torch.cdist(q, r).topk(_asked(workload), largest=False)
        return _cleaned(workload, values.numpy(), ids.numpy())

    return search


def _custom_knn(workload: Workload, query: Rows, reference: Rows, batch_size: int | None) -> Search:
    q, r = torch.from_numpy(query), torch.from_numpy(reference)
    inner = workload.metric == "inner_product"
    distance = (
        DotProductSimilarity(normalize_embeddings=False) if inner else LpDistance(normalize_embeddings=False, power=2)
    )
    knn = CustomKNN(distance, batch_size=batch_size)

    def search() -> Found:
        with torch.no_grad():
            values, ids = knn(q, workload.columns, r, workload.is_self)
        return values.numpy(), ids.numpy()

    return search


def _sklearn(workload: Workload, query: Rows, reference: Rows) -> Search:
    def search() -> Found:
        fitted = NearestNeighbors(n_neighbors=workload.columns, algorithm="brute").fit(reference)
        # Without queries it excludes each row from its own neighbours.
        values, ids = fitted.kneighbors(None if workload.is_self else query)
        return values, ids

    return search


def _usearch(workload: Workload, query: Rows, reference: Rows, threads: int) -> Search:
    metric = "ip" if workload.metric == "inner_product" else "l2sq"

    def search() -> Found:
        found = usearch_index.search(reference, query, _asked(workload), metric, exact=True, threads=threads)
        shape = (len(query), _asked(workload))
        return _cleaned(workload, found.distances.reshape(shape), found.keys.astype(np.int64).reshape(shape))

    return search
