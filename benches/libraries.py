"""How each library is asked for the same neighbours.

    Work, query, reference --> {library: [Way, ...]}     a search: () -> (values, row numbers)

Every library starts from the same two bare arrays; only `FAISS` has its index built beforehand. Without self, a library
that has no such search is asked for one neighbour more, from which the row itself is dropped.
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
from benches import works
from benches.data import Rows, without_self
from benches.works import Work

try:
    import usearch.index as usearch_index

    HAS_USEARCH = True
except ImportError:
    HAS_USEARCH = False

Found = tuple[npt.NDArray[Any], npt.NDArray[Any]]
Search = Callable[[], Found]


class Way(NamedTuple):
    """One way to ask a library, and about how much memory it takes at its peak: what cannot fit is not tried."""

    search: Search
    bytes_needed: int


def ways(work: Work, query: Rows, reference: Rows, threads: int) -> dict[str, list[Way]]:
    """For each library of `work` the ways to ask it, `OURS` first; where there are several, the fastest one counts."""
    usual, matrix = work.outputs + (512 << 20), 4 * work.count * work.references
    # CustomKNN copies what it found several times to drop the rows themselves: measured, 3.2 to 3.5 times the outputs.
    copies = 7 * work.outputs // 2 + (512 << 20)
    makers: dict[str, Callable[[], list[Way]]] = {
        works.FAISS: lambda: [Way(_faiss(work, query, reference, built=True), usual)],
        works.FAISS_BUILDING: lambda: [Way(_faiss(work, query, reference, built=False), usual)],
        works.TORCH: lambda: [Way(_torch(work, query, reference), matrix + 2 * usual)],
        works.CUSTOM_KNN: lambda: [
            Way(_custom_knn(work, query, reference, None), matrix + copies),
            Way(_custom_knn(work, query, reference, 256), copies),
        ],
        works.SKLEARN: lambda: [Way(_sklearn(work, query, reference), 2 * usual)],
        works.USEARCH: lambda: [Way(_usearch(work, query, reference, threads), usual)] if HAS_USEARCH else [],
        works.ONE_THREAD: lambda: [Way(ours(work, query, reference, 1), work.allowed)],
    }
    asked = {works.OURS: [Way(ours(work, query, reference, threads), work.allowed)]}
    for name in work.peers:
        # scikit-learn's brute force does not rank by inner product.
        if not (name == works.SKLEARN and work.metric == "inner_product") and (several := makers[name]()):
            asked[name] = several
    return asked


def ours(work: Work, query: Rows, reference: Rows, threads: int) -> Search:
    """The search of this package."""
    other = None if work.is_self else reference
    return lambda: exactknn.knn(query, other, work.columns, metric=work.metric, num_threads=threads)


def _asked(work: Work) -> int:
    """Neighbours to ask for where the row itself may be among them."""
    return work.columns + work.is_self


def _cleaned(work: Work, values: npt.NDArray[Any], ids: npt.NDArray[Any]) -> Found:
    if not work.is_self:
        return values, ids
    return without_self(values, ids, np.arange(len(ids)))


def _faiss(work: Work, query: Rows, reference: Rows, *, built: bool) -> Search:
    def build() -> Any:
        kind = faiss.IndexFlatIP if work.metric == "inner_product" else faiss.IndexFlatL2
        index = kind(reference.shape[1])
        index.add(reference)
        return index

    beforehand = build() if built else None

    def search() -> Found:
        index = build() if beforehand is None else beforehand
        return _cleaned(work, *index.search(query, _asked(work)))

    return search


def _torch(work: Work, query: Rows, reference: Rows) -> Search:
    q, r = torch.from_numpy(query), torch.from_numpy(reference)

    def search() -> Found:
        if work.metric == "inner_product":
            values, ids = (q @ r.T).topk(_asked(work))
        else:
            values, ids = torch.cdist(q, r).topk(_asked(work), largest=False)
        return _cleaned(work, values.numpy(), ids.numpy())

    return search


def _custom_knn(work: Work, query: Rows, reference: Rows, batch_size: int | None) -> Search:
    q, r = torch.from_numpy(query), torch.from_numpy(reference)
    inner = work.metric == "inner_product"
    distance = (
        DotProductSimilarity(normalize_embeddings=False) if inner else LpDistance(normalize_embeddings=False, power=2)
    )
    knn = CustomKNN(distance, batch_size=batch_size)

    def search() -> Found:
        with torch.no_grad():
            values, ids = knn(q, work.columns, r, work.is_self)
        return values.numpy(), ids.numpy()

    return search


def _sklearn(work: Work, query: Rows, reference: Rows) -> Search:
    def search() -> Found:
        fitted = NearestNeighbors(n_neighbors=work.columns, algorithm="brute").fit(reference)
        # Without queries it leaves each row out of its own neighbours.
        values, ids = fitted.kneighbors(None if work.is_self else query)
        return values, ids

    return search


def _usearch(work: Work, query: Rows, reference: Rows, threads: int) -> Search:
    metric = "ip" if work.metric == "inner_product" else "l2sq"

    def search() -> Found:
        found = usearch_index.search(reference, query, _asked(work), metric, exact=True, threads=threads)
        shape = (len(query), _asked(work))
        return _cleaned(work, found.distances.reshape(shape), found.keys.astype(np.int64).reshape(shape))

    return search
