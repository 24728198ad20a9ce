"""Exact neighbours of real data: scikit-learn's 1,797 handwritten digits, each searched among all the others.

Run from the project's root with ``python -m docs.recipes.digits`` (or ``make demo``). One leave-one-out search with
`RustKNN`, compared with two common alternatives, then an evaluation of the neighbours by class:

    digits (1797, 64) --+-- RustKNN ----------------------+
                        +-- CustomKNN, backend="torch" ---+-- compare with float64 brute force -- table, exit code
                        +-- faiss IndexFlatL2 ------------+
                        +-- RustKNN's neighbours ------------ build/demo/neighbours.png
                        +-- exactknn evaluate --------------- table, build/demo/report.html

Pixels are integers from 0 to 16, so ties are common, and the tie rule decides which row comes first.

The exit code is 1 if a neighbour or a distance of `RustKNN` differs from brute force, otherwise that of the evaluation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import matplotlib

matplotlib.use("Agg")  # before pyplot is imported, so that the demo runs without a display

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits

import exactknn
from exactknn import cli
from exactknn.distances import LpDistance
from exactknn.evaluation import CustomKNN, RustKNN

Distances = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Found = tuple[Distances, Indices]

NEIGHBOURS = 5
RUNS = 9
FOLDER = Path("build/demo")
PICTURE = FOLDER / "neighbours.png"
REPORT = FOLDER / "report.html"


def brute_force(rows: npt.NDArray[np.float32], k: int) -> Found:
    """Return the `k` nearest other rows of each row, computed in float64, ties to the lowest row number.

    Args:
        rows: `(n, d)`.
        k: neighbours per row, below `n`.

    Returns:
        Squared distances `(n, k)`, rounded once to float32, and row numbers `(n, k)`.
    """
    wide = rows.astype(np.float64)
    distances = np.empty((len(rows), k), np.float32)
    indices = np.empty((len(rows), k), np.int64)
    for i, row in enumerate(wide):
        to_all = ((wide - row) ** 2).sum(axis=1).astype(np.float32)
        to_all[i] = np.inf
        indices[i] = np.argsort(to_all, kind="stable")[:k]
        distances[i] = to_all[indices[i]]
    return distances, indices


def faiss_search(rows: npt.NDArray[np.float32], k: int) -> Found:
    """Return the same from faiss, which cannot exclude self: search for one more and drop each row's own number."""
    index = faiss.IndexFlatL2(rows.shape[1])
    index.add(rows)
    distances, indices = index.search(rows, k + 1)
    others = indices != np.arange(len(rows))[:, None]
    others[others.all(axis=1), k] = False  # more than k equal rows displaced self: drop the last instead
    return distances[others].reshape(-1, k), indices[others].reshape(-1, k)


def timed(search: Callable[[], Found]) -> tuple[Found, float]:
    """Return the result of `search`, and its median time in seconds after one warm-up run."""
    found = search()
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        search()
        seconds.append(time.perf_counter() - start)
    return found, statistics.median(seconds)


def choose_queries(labels: Indices, indices: Indices, distances: Distances) -> list[int]:
    """Choose up to eight rows of different classes: the three least plausible mistakes and five correct rows.

    The least plausible mistakes are those with the nearest wrong neighbours. A correct row is the one whose distance to
    its nearest neighbour is the median of its class.
    """
    wrong = labels[indices[:, 0]] != labels
    chosen: list[int] = []
    seen: set[int] = set()

    def take(candidates: npt.NDArray[np.intp], limit: int) -> None:
        for row in candidates:
            if len(chosen) < limit and int(labels[row]) not in seen:
                chosen.append(int(row))
                seen.add(int(labels[row]))

    mistakes = np.flatnonzero(wrong)
    take(mistakes[np.argsort(distances[mistakes, 0], kind="stable")], 3)
    typical = []
    for label in np.unique(labels):
        rows = np.flatnonzero((labels == label) & ~wrong)
        typical.append(rows[np.argsort(distances[rows, 0], kind="stable")[len(rows) // 2]])
    take(np.array(typical), 8)
    return sorted(chosen, key=lambda row: int(labels[row]))


def draw(path: Path, images: npt.NDArray[np.float64], labels: Indices, found: Found, queries: list[int]) -> None:
    """Draw each query at the left and its neighbours beside it: correct ones framed green, wrong ones red."""
    distances, indices = found
    right, wrong, ink = "#1a9850", "#d73027", "#222222"
    size, gap, left, top = 1.0, 0.42, 0.25, 1.05
    step, band = size + 0.22, size + 0.5
    columns = indices.shape[1]
    width = left + size + gap + columns * step
    height = top + len(queries) * band
    figure = plt.figure(figsize=(width, height), dpi=110, facecolor="white")

    def place(x: float, y: float, row: int, text: str, colour: str, line: float) -> None:
        axes = figure.add_axes((x / width, 1 - (y + size) / height, size / width, size / height))
        axes.imshow(images[row], cmap="gray_r", vmin=0, vmax=16, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(edgecolor=colour, linewidth=line)
        axes.set_xlabel(text, fontsize=9, color=ink, labelpad=3)

    def write(x: float, y: float, text: str, *, bold: bool = False, size: float = 9, colour: str = ink) -> None:
        weight = "bold" if bold else "normal"
        figure.text(x / width, 1 - y / height, text, fontsize=size, fontweight=weight, color=colour, va="baseline")

    write(left, 0.38, "Handwritten digits and their nearest others", bold=True, size=13)
    write(
        left,
        0.62,
        "below each: its label and squared distance; green: the query's label, red: another",
        colour="#666666",
    )
    write(left, top - 0.12, "query", bold=True)
    write(left + size + gap, top - 0.12, f"{columns} nearest of {len(labels) - 1:,}, nearest first", bold=True)
    for line, query in enumerate(queries):
        y = top + line * band
        place(left, y, query, f"{labels[query]}  (row {query})", ink, 1.2)
        for rank in range(columns):
            row = int(indices[query, rank])
            colour = right if labels[row] == labels[query] else wrong
            x = left + size + gap + rank * step
            place(x, y, row, f"{labels[row]}  ·  {distances[query, rank]:,.0f}", colour, 2.6)
    figure.savefig(path)
    plt.close(figure)


def evaluate(rows: npt.NDArray[np.float32], labels: Indices) -> int:
    """Evaluate the rows by their labels, from files, with the command line; return its exit code."""
    files = {"--embeddings": FOLDER / "digits.npy", "--labels": FOLDER / "labels.npy", "--report": REPORT}
    np.save(files["--embeddings"], rows)
    np.save(files["--labels"], labels)
    command = ["evaluate", *(str(part) for option in files.items() for part in option)]
    print("Do the neighbours have the same label? To ask that of your own embeddings:\n")
    print(f"    .venv/bin/exactknn {' '.join(command)}\n")
    return cli.main(command)


def main() -> int:
    """Search, compare, print, draw, evaluate; return 0 if `RustKNN` agrees with brute force everywhere, else 1."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    rows = np.ascontiguousarray(digits.data, dtype=np.float32)
    labels = digits.target.astype(np.int64)
    tensor = torch.from_numpy(rows)
    measure = LpDistance(normalize_embeddings=False, power=2)
    rust_knn = RustKNN(measure)
    torch_knn = CustomKNN(measure, backend="torch")

    def by_backend(backend: RustKNN | CustomKNN) -> Found:
        distances, indices = backend(tensor, NEIGHBOURS, tensor, True)
        return distances.numpy(), indices.numpy()

    searches: dict[str, Callable[[], Found]] = {
        "RustKNN": lambda: by_backend(rust_knn),
        'CustomKNN(backend="torch")': lambda: by_backend(torch_knn),
        "faiss IndexFlatL2": lambda: faiss_search(rows, NEIGHBOURS),
    }
    print(
        f"exactknn {exactknn.__version__} ({exactknn.simd_level()}, {exactknn.get_num_threads()} threads): "
        f"the {NEIGHBOURS} nearest others of each of\n"
        f"{len(rows):,} handwritten digits ({rows.shape[1]} pixels), squared Euclidean distance\n"
    )
    truth_distances, truth_indices = brute_force(rows, NEIGHBOURS)
    print(f"{'':28}{'median time':>12}{'precision at 1':>16}{'ids as brute force':>22}{'distances':>16}")
    exact = False
    for name, search in searches.items():
        (distances, indices), seconds = timed(search)
        same_ids = int((indices == truth_indices).sum())
        same_values = int((distances == truth_distances).sum())
        precision = float((labels[indices[:, 0]] == labels).mean())
        of = truth_indices.size
        print(
            f"{name:28}{seconds * 1e3:>9.1f} ms{precision:>16.4f}"
            f"{f'{same_ids:,} of {of:,}':>22}{f'{same_values:,}':>16}"
        )
        if name == "RustKNN":
            exact = same_ids == same_values == of
            found = distances, indices
    print()
    if exact:
        total = f"{truth_indices.size:,} of {truth_indices.size:,} neighbours"
        print(f"RustKNN agrees with float64 brute force: {total}, ties to the lowest row.")
    else:
        print("RustKNN DIFFERS from float64 brute force: please report this as a bug.")
    queries = choose_queries(labels, found[1], found[0])
    draw(PICTURE, digits.images, labels, found, queries)
    print(f"Picture of {len(queries)} queries beside their neighbours: {PICTURE}\n")
    failed = evaluate(rows, labels)
    return failed if exact else 1


if __name__ == "__main__":
    raise SystemExit(main())
