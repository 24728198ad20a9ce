"""Groups of `benches.digest`: prepared, saved and streamed references, and features built on searches.

Results that may differ between machines or library versions are excluded: `ndcg_at_<k>` (`log2`), votes weighted by
`exp`, NMI and AMI (k-means, `log`), distances measured by torch, and the codes in the file of an index. The remaining
metrics use only additions in a fixed order, divisions, and sums that are rounded once.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import exactknn
from benches.digest_rows import (
    DTYPES,
    Rows,
    below,
    bits,
    class_of_rows,
    clustered_rows,
    grid_rows,
    is_bfloat16,
    spread_rows,
)
from benches.digest_searches import CORE, PUBLIC, WITHIN, Cases, Metric, named
from exactknn import _core, cli
from exactknn.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from exactknn.evaluation import (
    AccuracyCalculator,
    CustomKNN,
    MatchFinder,
    RustKNN,
    equal_error_rate,
    match_accuracy,
    match_balanced_accuracy,
    match_f1,
    match_recall_at_fmr,
    select_threshold,
    threshold_curve,
)

# --- references that are prepared, saved, or come in blocks --------------------------------------------------------

SEALED = 8300
"""Rows of one call of `add` that an index packs: 8,192 and more."""


def _results(index: exactknn.Index, queries: Rows, r: float) -> Cases:
    """Results of an index at one moment."""
    for n, k in ((1, 1), (20, 10), (250, 3), (250, 40)):
        yield f"{n} queries, k {k}", index.search(queries[:n], k)
    yield "first rows", index.search(index.rows(0, 70), 5, exclude_self=True)
    yield "radius", index.radius(queries, r)
    yield "radius by row", index.radius(queries, r, return_distances=False)
    yield "radius of first rows", index.radius(index.rows(0, 70), r, exclude_self=True)


def _grown(metric: Metric, dtype: str) -> Iterator[tuple[str, exactknn.Index]]:
    """An index that gains and loses rows, after each step."""
    index = exactknn.Index(metric[0], dtype, p=metric[1])
    index.add(clustered_rows(100, 12, 1, dtype))
    index.add(clustered_rows(150, 12, 2, dtype))
    yield "two small pieces", index
    index.add(clustered_rows(SEALED, 12, 3, dtype))
    yield "a segment", index
    index.add(clustered_rows(60, 12, 4, dtype))
    mask = below(5, len(index), 6) == 0
    index.remove(mask)
    yield "a fifth removed", index
    index.add(clustered_rows(SEALED, 12, 5, dtype))
    mask = np.zeros(len(index), bool)
    mask[-SEALED // 2 :] = True
    mask[:300] = True
    index.remove(mask)
    yield "both ends removed", index


def index() -> Cases:
    """Indexes in memory that gain and lose rows between searches."""
    queries = clustered_rows(250, 12, 9)
    works = [(metric, "float32") for metric in (PUBLIC[0], PUBLIC[4])]
    works += [(PUBLIC[2], "float16"), (PUBLIC[3], "bfloat16"), (PUBLIC[1], "float64")]
    for metric, dtype in works:
        query = queries.astype(np.float64) if dtype == "float64" else queries
        for step, grown in _grown(metric, dtype):
            yield f"{named(metric)}, {dtype}, {step}, rows", grown.rows()
            for name, result in _results(grown, query, WITHIN[metric[0]]):
                yield f"{named(metric)}, {dtype}, {step}, {name}", result
    for metric in (*PUBLIC, *CORE):
        one = exactknn.Index(metric[0], p=metric[1])
        one.add(clustered_rows(SEALED, 12, 3))
        for n in (1, 40, 200):
            yield f"{named(metric)}, {n} queries", one.search(queries[:n], 4)
        yield f"{named(metric)}, radius", one.radius(queries[:40], WITHIN[metric[0]])
    for dtype in ("float16", "bfloat16"):
        rounding = exactknn.Index(dtype=dtype)
        rounding.add(clustered_rows(400, 12, 1, "float64"))
        rounding.add(clustered_rows(400, 12, 2, "float32"))
        yield f"rounded to {dtype}", (rounding.rows(), rounding.search(queries, 5))
    everything = exactknn.Index()
    everything.add(clustered_rows(500, 12, 1))
    yield "all rows", everything.search(queries[:9], None)
    everything.train(clustered_rows(300, 5, 1))
    yield "trained again", everything.search(clustered_rows(20, 5, 2), 4)


def saved_index() -> Cases:
    """Indexes that are saved, mapped from their files, searched, changed, and saved again."""
    queries = clustered_rows(250, 12, 9)
    works = [(PUBLIC[1], "float32"), (CORE[0], "float16"), (PUBLIC[0], "bfloat16"), (PUBLIC[4], "float64")]
    with tempfile.TemporaryDirectory() as folder:
        for metric, dtype in works:
            query, r = queries.astype(np.float64) if dtype == "float64" else queries, WITHIN[metric[0]]
            for step, (_, grown) in enumerate(_grown(metric, dtype)):
                if step in (0, 2):
                    path, name = Path(folder) / f"{step}.index", f"{named(metric)}, {dtype}, step {step}"
                    grown.save(path)
                    loaded = exactknn.Index.load(path)
                    yield f"{name}, attributes", (loaded.metric, loaded.p, loaded.dtype, loaded.dim, len(loaded))
                    for case, result in _results(loaded, query, r):
                        yield f"{name}, {case}", result
                    loaded.remove(below(7, len(loaded), 8) == 0)
                    loaded.add(clustered_rows(90, 12, 10, dtype))
                    loaded.save(path)
                    again = exactknn.Index.load(path)
                    for case, result in _results(again, query, r):
                        yield f"{name}, saved again, {case}", result


def blocks() -> Cases:
    """References that come block by block, and searches that are stopped and continued."""
    cuts = (0, 1, 700, 700, 2000, 2600)
    for dtype in DTYPES:
        reference, queries = clustered_rows(2600, 12, 1, dtype), clustered_rows(300, 12, 2, dtype)
        parts = [reference[start:stop] for start, stop in itertools.pairwise(cuts)]
        for name, p in PUBLIC if dtype == "float32" else PUBLIC[:1]:
            yield f"{dtype}, {name}, list", exactknn.knn(queries[:20], parts, 10, metric=name, p=p)
            yield f"{dtype}, {name}, generator", exactknn.knn(queries, iter(parts), 50, metric=name, p=p)
        yield f"{dtype}, first rows", exactknn.knn(reference[:90], parts, 5, exclude_self=True)
        stopped = _searched(_blockwise(queries, 10, PUBLIC[0]), parts[:3])
        continued = _blockwise(queries, 10, PUBLIC[0])
        continued.restore(*stopped.state(), stopped.rows)
        yield f"{dtype}, continued", (stopped.rows, _searched(continued, parts[3:]).result())
    parts = [spread_rows(700, 12, seed) for seed in (3, 4, 5)]
    for metric in (*PUBLIC, *CORE):
        for n in (2, 20, 300):
            found = _searched(_blockwise(parts[0][:n], 9, metric, exclude_self=True), parts).result()
            yield f"{named(metric)}, {n} queries, without themselves", found
    # These bounds are too small for all references at once, or for all queries at once.
    reference, queries = spread_rows(9000, 30, 3), spread_rows(4000, 30, 4)
    yield "bounded memory, few queries", exactknn.knn(queries[:50], reference, 10, max_memory="49MiB")
    yield "bounded memory, many queries", exactknn.knn(queries, reference, 20, max_memory="51MiB")
    yield "bounded memory, self", exactknn.knn(reference[:5000], None, 20, max_memory="52MiB")


def _blockwise(queries: Rows, k: int, metric: Metric, **options: Any) -> _core.BlockSearch:
    return _core.BlockSearch(bits(queries), k, metric[0], p=metric[1], bfloat16=is_bfloat16(queries), **options)


def _searched(search: _core.BlockSearch, parts: list[Rows]) -> _core.BlockSearch:
    for part in parts:
        search.add(bits(part))
    return search


# --- features built on searches ------------------------------------------------------------------------------------


def _tensor(rows: Rows) -> torch.Tensor:
    if is_bfloat16(rows):
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


def _array(tensor: torch.Tensor) -> Rows:
    array: Rows = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _arrays(tensors: tuple[torch.Tensor, ...]) -> tuple[Rows, ...]:
    return tuple(map(_array, tensors))


DISTANCES: dict[str, Any] = {
    "lp": LpDistance(),
    "lp, squared": LpDistance(power=2),
    "lp, unnormalised": LpDistance(normalize_embeddings=False),
    "lp, unnormalised, squared": LpDistance(normalize_embeddings=False, power=2),
    "lp, p=1": LpDistance(normalize_embeddings=False, p=1),
    "lp, p=3": LpDistance(normalize_embeddings=False, p=3),
    "cosine": CosineSimilarity(),
    "dot": DotProductSimilarity(normalize_embeddings=False),
}
"""Distance objects that the core computes."""


def recall() -> Cases:
    """Shares of the true neighbours that a search of rows in half precision finds."""
    reference, queries = clustered_rows(900, 12, 1), clustered_rows(80, 12, 2)
    true_distances, true = exactknn.knn(queries, reference, 10)
    for dtype, k in (("float16", 10), ("bfloat16", 10), ("bfloat16", 25)):
        _, found = exactknn.knn(clustered_rows(80, 12, 2, dtype), clustered_rows(900, 12, 1, dtype), k)
        yield f"{dtype}, k {k}", exactknn.recall(found, true)
        yield f"{dtype}, k {k}, each", exactknn.recall(found, true, per_query=True)
        distances, near = exactknn.knn(queries, reference, None)
        own = np.take_along_axis(np.take_along_axis(distances, np.argsort(near, axis=1), axis=1), found, axis=1)
        yield f"{dtype}, k {k}, ties", exactknn.recall(found, true, own, true_distances)
        yield f"{dtype}, k {k}, tolerance", exactknn.recall(found, true, own, true_distances, tolerance=0.01)
        yield f"{dtype}, k {k}, vectors", exactknn.recall(found, true, query=queries, reference=reference)


def knn_func() -> Cases:
    """`CustomKNN`, and `RustKNN` with and without an index that is kept."""
    for dtype in DTYPES:
        reference = _tensor(clustered_rows(600, 12, 1, dtype))
        queries = _tensor(clustered_rows(120, 12, 2, dtype))
        for name, distance in DISTANCES.items():
            yield f"{dtype}, {name}", _arrays(CustomKNN(distance)(queries, 8, reference))
            yield f"{dtype}, {name}, rust", _arrays(RustKNN(distance)(queries[:5], 8, reference))
            yield f"{dtype}, {name}, self", _arrays(CustomKNN(distance)(reference, 8, reference, True))
    reference, queries = _tensor(clustered_rows(600, 12, 1)), _tensor(clustered_rows(120, 12, 2))
    kept = RustKNN(reset_before=False, reset_after=False)
    kept.train(reference)
    kept.add(queries)
    yield "kept", _arrays(kept(queries, 8))
    yield "kept and grown", _arrays(kept(reference[:90], 8, _tensor(clustered_rows(70, 12, 3)), True))


NAMED = (
    "mean_average_precision",
    "mean_average_precision_at_r",
    "mean_reciprocal_rank",
    "precision_at_1",
    "r_precision",
    "precision_at_10",
    "recall_at_4",
    "hit_rate_at_9",
    "found_fraction_at_20",
    "knn_accuracy_at_7",
)
"""Metrics whose values take only additions in one order, divisions, and sums that are rounded once."""


def accuracy() -> Cases:
    """Retrieval metrics: from neighbours and from ranks, over queries, over classes, and for each class."""
    labels, reference_labels = torch.from_numpy(class_of_rows(400, 1)), torch.from_numpy(class_of_rows(700, 2))
    averages: dict[str, dict[str, Any]] = {
        "": {},
        ", over classes": {"avg_of_avgs": True},
        ", each class": {"return_per_class": True},
    }
    for dtype in ("float64", "bfloat16", "float32"):
        query, reference = clustered_rows(400, 12, 1, dtype), clustered_rows(700, 12, 2, dtype)
        rows, others = _tensor(query), _tensor(reference)
        for k in (None, "max_bin_count", 5):
            for average, options in averages.items() if dtype == "float32" else [("", {})]:
                calculator = AccuracyCalculator(include=NAMED, k=k, **options)
                name = f"{dtype}, k {k}{average}"
                yield name, calculator.get_accuracy(rows, labels)
                yield f"{name}, reference", calculator.get_accuracy(rows, labels, others, reference_labels)
    both, both_labels = torch.cat([rows, others]), torch.cat([labels, reference_labels])
    for name, distance in DISTANCES.items():
        calculator = AccuracyCalculator(include=NAMED, knn_func=RustKNN(distance))
        yield f"{name}, first rows", calculator.get_accuracy(rows, labels, both, both_labels, True)
    near = AccuracyCalculator(include=NAMED[:9], label_comparison_fn=lambda left, right: (left - right).abs() <= 1)
    yield "near labels", near.get_accuracy(rows, labels, others, reference_labels)
    tied = _tensor(grid_rows(400, 5, 3))
    yield "ties", AccuracyCalculator(include=NAMED).get_accuracy(tied, labels)
    yield "ties, few", AccuracyCalculator(include=NAMED, k=5).get_accuracy(tied, labels)


def matching() -> Cases:
    """Pairs of embeddings that match at a threshold, and values of pairs."""
    thresholds = {"cosine": 0.98, "dot": 4.5, "lp, p=1": 0.85}
    for dtype in DTYPES:
        left, right = _tensor(clustered_rows(300, 12, 1, dtype)), _tensor(clustered_rows(300, 12, 2, dtype))
        for name, distance in DISTANCES.items():
            finder = MatchFinder(distance, thresholds.get(name, 0.2))
            values = finder.pairwise(left, right)
            yield f"{dtype}, {name}, values", _array(values)
            yield f"{dtype}, {name}, pairs", _array(finder.get_match_indices(left, right))
            yield f"{dtype}, {name}, pairs among themselves", _array(finder.get_match_indices(left))
            yield f"{dtype}, {name}, matrix", _array(finder.get_match_matrix(left[:90], right))
            yield f"{dtype}, {name}, by position", _array(finder.is_match(left, right))
            edge = float(values[3])
            yield f"{dtype}, {name}, edge", _array(finder.get_match_indices(left[:9], right, edge))
            yield f"{dtype}, {name}, edge by position", _array(finder.is_match(left, right, edge))


def thresholds() -> Cases:
    """Thresholds that maximise a metric among labelled pairs."""
    choices: dict[str, Any] = {
        "accuracy": match_accuracy,
        "balanced accuracy": match_balanced_accuracy,
        "f1": match_f1,
        "recall at 0.05": match_recall_at_fmr(0.05),
    }
    labels = torch.from_numpy(below(3, 500, 1) == 0)
    for dtype in DTYPES:
        scores = _tensor(spread_rows(500, 1, 2, dtype)[:, 0].copy())
        for is_inverted in (False, True):
            name = f"{dtype}, {'similarities' if is_inverted else 'distances'}"
            for choice, metric in choices.items():
                yield f"{name}, {choice}", tuple(select_threshold(scores, labels, metric, is_inverted=is_inverted))
            cuts, decisions = threshold_curve(scores, labels, is_inverted=is_inverted)
            yield f"{name}, curve", (_array(cuts), _arrays(decisions))
            yield f"{name}, equal error rate", equal_error_rate(scores, labels, is_inverted=is_inverted)


def commands() -> Cases:
    """Output of the commands `search`, `groundtruth`, `match` and `evaluate`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        np.save(path / "q.npy", clustered_rows(200, 12, 1))
        np.save(path / "r.npy", clustered_rows(900, 12, 2, "float16"))
        np.save(path / "ql.npy", class_of_rows(200, 1))
        np.save(path / "rl.npy", class_of_rows(900, 2))

        def run(*words: str) -> str:
            arguments = [
                str(path / word) if word.endswith((".npy", ".npz", ".bin", ".csv")) else word for word in words
            ]
            printed, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
                code = cli.main(arguments)
            if code:
                raise RuntimeError(f"exactknn {' '.join(words)}: exit code {code}: {errors.getvalue()}")
            return printed.getvalue()

        both = ("--query", "q.npy", "--reference", "r.npy")
        for name, words in {
            "search": ("search", *both, "-k", "12", "--output", "out.npz"),
            "search among themselves": ("search", "--query", "q.npy", "-k", "5", "--output", "out.npz"),
            "search in blocks": ("search", *both, "-k", "12", "--max-memory", "64MiB", "--output", "out.npz"),
            "match": ("match", *both, "--threshold", "0.1", "--output", "out.npz"),
            "match among themselves": ("match", "--query", "q.npy", "--threshold", "0.1", "--output", "out.npz"),
        }.items():
            run(*words)
            with np.load(path / "out.npz") as arrays:
                yield name, dict(arrays)
        run("groundtruth", "--base", "r.npy", "--query", "q.npy", "-k", "20", "--output", "out.bin")
        yield "groundtruth", (path / "out.bin").read_bytes()
        run("match", "--query", "q.npy", "--metric", "cosine", "--threshold", "0.01", "--output", "out.csv")
        yield "match as text", (path / "out.csv").read_text()
        references = ("--reference", "r.npy", "--reference-labels", "rl.npy")
        evaluate = ("evaluate", "--embeddings", "q.npy", "--labels", "ql.npy", "--json", "--per-class", "out.csv")
        for options in (("-k", "all"), ("-k", "max"), ("-k", "9"), ("--distance", "cosine")):
            for name, more in (("among themselves", ()), ("reference", references)):
                found = json.loads(run(*evaluate, *options, *more, "--metrics", *NAMED))
                yield f"evaluate {' '.join(options)}, {name}", (found["metrics"], (path / "out.csv").read_text())


GROUPS: tuple[Callable[[], Cases], ...] = (
    index,
    saved_index,
    blocks,
    recall,
    knn_func,
    accuracy,
    matching,
    thresholds,
    commands,
)
