"""The same search by each library.

    Workload, query, reference --> {library: [Backend, ...]}     a search: () -> (values, row numbers)

Every library starts from the same two arrays; only faiss and the indexes like it are built beforehand. For
self-exclusion, a library without such a search finds one more neighbour, and the row itself is dropped.

faiss and the optional libraries run in processes of their own (`benches.remote`), since what they are linked with
depends on variables that are read when they are loaded. faiss is shown twice: as pip installs it, and at its best, with
the kernel that the processor has and with the blocking that is fastest on a part of the workload.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import exactknn
from benches import databases, workloads
from benches.data import Rows, without_self
from benches.remote import Process
from benches.workloads import Workload

Found = tuple[npt.NDArray[Any], npt.NDArray[Any]]
Search = Callable[[], Found]


class Processes(NamedTuple):
    """The processes of the libraries that do not run in this one."""

    plain: Process  # as pip installs them
    tuned: Process  # with the matrix kernel that the processor has


class Backend(NamedTuple):
    """A search by one library, and its approximate peak memory: a search that cannot fit is skipped."""

    search: Search
    bytes_needed: int


def missing() -> dict[str, str]:
    """The optional libraries that are not installed here, with their module."""
    return {
        name: ", ".join(modules)
        for name, modules in workloads.MODULES.items()
        if any(importlib.util.find_spec(module) is None for module in modules)
    }


def backends(
    workload: Workload, query: Rows, reference: Rows, threads: int, processes: Processes
) -> dict[str, list[Callable[[], Backend]]]:
    """Makers of the backends of each library of `workload`, `OURS` first; the fastest backend counts."""
    usual, matrix = workload.outputs + (512 << 20), 4 * workload.count * workload.references
    # CustomKNN copies its result several times to drop the rows themselves: measured, 3.2 to 3.5 times the outputs.
    copies = 7 * workload.outputs // 2 + (512 << 20)

    def remote(name: str, process: Process) -> list[Callable[[], Backend]]:
        return [lambda: Backend(process.open(name, workload.name), 2 * usual)]

    makers: dict[str, list[Callable[[], Backend]]] = {
        workloads.FAISS: remote(workloads.FAISS, processes.tuned),
        workloads.FAISS_INSTALLED: remote(workloads.FAISS_INSTALLED, processes.plain),
        workloads.FAISS_BUILDING: remote(workloads.FAISS_BUILDING, processes.tuned),
        workloads.PANORAMA: remote(workloads.PANORAMA, processes.tuned),
        workloads.TORCH: [lambda: Backend(_torch(workload, query, reference), matrix + 2 * usual)],
        workloads.TORCH_BF16: [lambda: Backend(_torch_bf16(workload, query, reference), matrix + 2 * usual)],
        workloads.CUSTOM_KNN: [
            lambda: Backend(_custom_knn(workload, query, reference, None), matrix + copies),
            lambda: Backend(_custom_knn(workload, query, reference, 256), copies),
        ],
        workloads.SKLEARN: [lambda: Backend(_sklearn(workload, query, reference), 2 * usual)],
        workloads.ONE_THREAD: [lambda: Backend(ours(workload, query, reference, 1), workload.allowed)],
        **{name: remote(name, processes.plain) for name in workloads.MODULES},
    }
    asked = {workloads.OURS: [lambda: Backend(ours(workload, query, reference, threads), workload.allowed)]}
    absent = missing()
    for name in workload.peers:
        # scikit-learn's brute force does not rank by inner product.
        if name in absent or (name == workloads.SKLEARN and workload.metric == "inner_product"):
            continue
        asked[name] = makers[name]
    return asked


def prepare(library: str, workload: Workload, threads: int) -> tuple[Search, str]:
    """In a process of its own: the search of a library, built beforehand where it can be, and how it was tuned."""
    query, reference = workload.rows()
    if library in (workloads.FAISS, workloads.FAISS_INSTALLED, workloads.FAISS_BUILDING):
        import faiss

        faiss.omp_set_num_threads(threads)
        search = _faiss(workload, query, reference, built=library != workloads.FAISS_BUILDING)
        return search, "" if library == workloads.FAISS_INSTALLED else tune_faiss(workload, query, reference)
    makers: dict[str, Callable[[Workload, Rows, Rows, int], Search]] = {
        workloads.PANORAMA: _panorama,
        workloads.USEARCH: _usearch,
        workloads.HNSWLIB: _hnswlib,
        workloads.SKLEARN_INTEL: _sklearn_intel,
        workloads.SCANN: _scann,
        workloads.SVS: _svs,
        **databases.SEARCHES,
    }
    return makers[library](workload, query, reference, threads), ""


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


def _flat_index(workload: Workload, reference: Rows) -> Any:
    import faiss

    kind = faiss.IndexFlatIP if workload.metric == "inner_product" else faiss.IndexFlatL2
    index = kind(reference.shape[1])
    index.add(reference)
    return index


def _faiss(workload: Workload, query: Rows, reference: Rows, *, built: bool) -> Search:
    beforehand = _flat_index(workload, reference) if built else None

    def search() -> Found:
        index = _flat_index(workload, reference) if beforehand is None else beforehand
        return _cleaned(workload, *index.search(query, _asked(workload)))

    return search


# What decides how faiss's flat search is cut into blocks, and the values to try beside its own.
KNOBS = {
    "distance_compute_blas_threshold": (20, 2560, 1 << 30),
    "distance_compute_blas_database_bs": (4096, 16384),
    "distance_compute_blas_query_bs": (256, 1024),
    "distance_compute_min_k_reservoir": (1, 1 << 30),
}
DEFAULTS: dict[str, int] = {}  # faiss's own values, once known
SAMPLED = 1024, 16384  # most queries and references of the search that the knobs are tried on


def tune_faiss(workload: Workload, query: Rows, reference: Rows) -> str:
    """Set faiss's blocking to what is fastest on a part of the workload, one knob after the other.

    Returns:
        The knobs that differ from faiss's own values.
    """
    import faiss

    if not DEFAULTS:
        DEFAULTS.update({name: getattr(faiss.cvar, name) for name in KNOBS})
    for name, value in DEFAULTS.items():
        setattr(faiss.cvar, name, value)
    index = _flat_index(workload, reference[: SAMPLED[1]])
    part, k = query[: SAMPLED[0]], min(_asked(workload), SAMPLED[1])

    def seconds() -> float:
        times: list[float] = []
        while len(times) < 5 or (sum(times) < 0.05 and len(times) < 50):
            start = time.perf_counter()
            index.search(part, k)
            times.append(time.perf_counter() - start)
        return min(times)

    best, told = seconds(), []
    for name, values in KNOBS.items():
        own = kept = DEFAULTS[name]
        for value in values:
            setattr(faiss.cvar, name, value)
            now = seconds()
            if now < 0.97 * best:
                best, kept = now, value
        setattr(faiss.cvar, name, kept)
        if kept != own:
            told.append(f"{name} {kept}")
    return ", ".join(told) or "its own blocking"


def _panorama(workload: Workload, query: Rows, reference: Rows, threads: int) -> Search:
    """Exact pruning by levels of principal components."""
    import faiss

    faiss.omp_set_num_threads(threads)
    dim = reference.shape[1]
    index = faiss.index_factory(dim, f"PCA{dim},FlatL2Panorama8")
    index.train(reference)
    index.add(reference)
    return lambda: _cleaned(workload, *index.search(query, _asked(workload)))


def _torch(workload: Workload, query: Rows, reference: Rows) -> Search:
    import torch

    q, r = torch.from_numpy(query), torch.from_numpy(reference)

    def search() -> Found:
        if workload.metric == "inner_product":
            values, ids = (q @ r.T).topk(_asked(workload))
        else:
            values, ids = torch.cdist(q, r).topk(_asked(workload), largest=False)
        return _cleaned(workload, values.numpy(), ids.numpy())

    return search


def _torch_bf16(workload: Workload, query: Rows, reference: Rows) -> Search:
    """Products in bfloat16, as on a device: fast where the processor has them, and not exact."""
    import torch

    q, r = torch.from_numpy(query), torch.from_numpy(reference)

    def search() -> Found:
        products = q.bfloat16() @ r.bfloat16().T
        if workload.metric != "inner_product":
            products = (r * r).sum(1) / 2 - products
        values, ids = products.float().topk(_asked(workload), largest=workload.metric == "inner_product")
        return _cleaned(workload, values.numpy(), ids.numpy())

    return search


def _custom_knn(workload: Workload, query: Rows, reference: Rows, batch_size: int | None) -> Search:
    import torch
    from pytorch_metric_learning.distances import DotProductSimilarity, LpDistance
    from pytorch_metric_learning.utils.inference import CustomKNN

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
    from sklearn.neighbors import NearestNeighbors

    def search() -> Found:
        fitted = NearestNeighbors(n_neighbors=workload.columns, algorithm="brute").fit(reference)
        # Without queries it excludes each row from its own neighbours.
        values, ids = fitted.kneighbors(None if workload.is_self else query)
        return values, ids

    return search


def _sklearn_intel(workload: Workload, query: Rows, reference: Rows, _: int) -> Search:
    from sklearnex.neighbors import NearestNeighbors

    def search() -> Found:
        fitted = NearestNeighbors(n_neighbors=_asked(workload), algorithm="brute").fit(reference)
        return _cleaned(workload, *fitted.kneighbors(query))

    return search


def _usearch(workload: Workload, query: Rows, reference: Rows, threads: int) -> Search:
    import usearch.index

    metric = "ip" if workload.metric == "inner_product" else "l2sq"

    def search() -> Found:
        found = usearch.index.search(reference, query, _asked(workload), metric, exact=True, threads=threads)
        shape = (len(query), _asked(workload))
        return _cleaned(workload, found.distances.reshape(shape), found.keys.astype(np.int64).reshape(shape))

    return search


def _hnswlib(workload: Workload, query: Rows, reference: Rows, threads: int) -> Search:
    import hnswlib

    index = hnswlib.BFIndex(space="ip" if workload.metric == "inner_product" else "l2", dim=reference.shape[1])
    index.init_index(max_elements=len(reference))
    index.add_items(reference)
    index.set_num_threads(threads)

    def search() -> Found:
        ids, values = index.knn_query(query, k=_asked(workload))
        return _cleaned(workload, values, ids.astype(np.int64))

    return search


def _scann(workload: Workload, query: Rows, reference: Rows, threads: int) -> Search:
    """Brute force over 8-bit numbers, the best ten times k measured again."""
    import scann

    metric = "dot_product" if workload.metric == "inner_product" else "squared_l2"
    k = _asked(workload)
    builder = scann.scann_ops_pybind.builder(reference, k, metric).score_brute_force(quantize=True).reorder(10 * k)
    index = builder.set_n_training_threads(threads).build()

    def search() -> Found:
        ids, values = index.search_batched_parallel(query)
        return _cleaned(workload, values, ids.astype(np.int64))

    return search


def _svs(workload: Workload, query: Rows, reference: Rows, threads: int) -> Search:
    import svs

    kind = svs.DistanceType.MIP if workload.metric == "inner_product" else svs.DistanceType.L2
    index = svs.Flat(reference, kind, num_threads=threads)

    def search() -> Found:
        ids, values = index.search(query, _asked(workload))
        return _cleaned(workload, values, ids.astype(np.int64))

    return search
