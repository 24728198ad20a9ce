"""From a DataLoader to retrieval metrics, with five ways to evaluate an embedding model.

Run from the project's root with ``python -m docs.recipes.evaluation``: synthetic data, no network. A split is a pair
``(embeddings, labels)``:

    loader --model--> extract_embeddings --> splits --+-- split_accuracy                among itself, or in a gallery
                                                      +-- nearest_centroid_accuracy     one mean per class as gallery
                                                      +-- two_stream_accuracy           row i of two streams is a pair
                                                      +-- parent_conditioned_accuracy   classes within their parents

Each of the four passes queries and references to `AccuracyCalculator`. They differ in the references, and in whether
these include the queries: only then is a query's own row excluded from its neighbours.

Copy what you need; nothing here is part of the installed package.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from exactknn.evaluation import AccuracyCalculator

Split = tuple[Tensor, Tensor]
"""Embeddings ``(n, d)`` and labels, ``(n,)`` or, with a hierarchy, ``(n, levels)``."""


def extract_embeddings(model: Callable[[Any], Tensor], loader: Iterable[tuple[Any, Tensor]]) -> Split:
    """Embed all batches of a loader and scale each row to Euclidean norm 1.

    The mode of the model is not changed: call ``model.eval()`` first, and let the loader yield batches on the model's
    device.

    Args:
        model: maps the data of a batch to ``(rows, d)`` floating-point embeddings.
        loader: batches ``(data, labels)``; do not shuffle if you rely on the order of the rows.

    Returns:
        The embeddings in the loader's order, in the model's dtype and on its device, and the labels unchanged. A row of
        zeros stays zero. Both are inference tensors without autograd history.

    Raises:
        ValueError: the loader yields no batch, or the embeddings are not floating point.
    """
    embeddings, labels = [], []
    with torch.inference_mode():
        for data, batch_labels in loader:
            embeddings.append(unit_rows(model(data)))
            labels.append(batch_labels)
        if not embeddings:
            raise ValueError("loader must give at least one batch, got none")
        return torch.cat(embeddings), torch.cat(labels)


def split_accuracy(
    calculator: AccuracyCalculator, query: Split, references: Iterable[Split], query_in_reference: bool
) -> dict[str, Any]:
    """Evaluate a split among itself, in a gallery, or in both together.

    Args:
        calculator: computes the metrics.
        query: the split to evaluate.
        references: the other splits to search, in this order.
        query_in_reference: search the query split as well, excluding each row from its own neighbours. If false, search
            only ``references`` and exclude nothing, even copies of a query.

    Returns:
        The calculator's metrics.

    Raises:
        ValueError: there is nothing to search.
    """
    splits = [query, *references] if query_in_reference else list(references)
    if not splits:
        raise ValueError("references must hold at least one split where query_in_reference is False, got none")
    embeddings, labels = (torch.cat(parts) for parts in zip(*splits, strict=True))
    if query_in_reference:
        # A view, not a copy: if the queries are the first references, half of the products suffice.
        query = embeddings[: len(query[0])], labels[: len(query[1])]
    return calculator.get_accuracy(*query, embeddings, labels, ref_includes_query=query_in_reference)


def nearest_centroid_accuracy(calculator: AccuracyCalculator, query: Split, reference: Split) -> dict[str, Any]:
    """Evaluate queries against one row per class: the mean of the class's reference rows.

    Args:
        calculator: computes the metrics.
        query: the split to evaluate; queries whose class has no references are not counted.
        reference: the rows to average.

    Returns:
        The calculator's metrics. ``precision_at_1`` is the accuracy of a nearest-centroid classifier.

    Raises:
        ValueError: the reference embeddings are not floating point.
    """
    embeddings, labels = reference
    classes, members = torch.unique(labels, dim=0, return_inverse=True)
    members = members.to(embeddings.device)
    rows = widened(embeddings)
    sums = rows.new_zeros(len(classes), rows.shape[1]).index_add_(0, members, rows)
    counts = torch.bincount(members, minlength=len(classes))
    centroids = (sums / counts.unsqueeze(1)).to(embeddings.dtype)
    return calculator.get_accuracy(*query, centroids, classes, ref_includes_query=False)


def two_stream_accuracy(
    calculator: AccuracyCalculator, anchors: Tensor, references: Tensor, labels: Tensor
) -> dict[str, Any]:
    """Evaluate the rows of one stream, such as sketches or captions, against those of another, such as photographs.

    Args:
        calculator: computes the metrics.
        anchors: embeddings of the first stream, ``(n, d)``: the queries.
        references: embeddings of the second stream, ``(n, d)``: the rows searched. No row is excluded.
        labels: ``(n,)``; ``labels[i]`` is the label of row ``i`` in both streams.

    Returns:
        The calculator's metrics.
    """
    return calculator.get_accuracy(anchors, labels, references, labels, ref_includes_query=False)


def parent_conditioned_accuracy(
    calculator: AccuracyCalculator, query: Split, references: Iterable[Split], query_in_reference: bool
) -> dict[str, float]:
    """Evaluate classes among those with the same parent class, level by level of a hierarchy.

    At each level but the coarsest, and for each parent class of the queries, `split_accuracy` evaluates the queries and
    references of that parent alone. The value of a level is the unweighted mean over its parents.

    Args:
        calculator: computes the metrics; each must be a single value.
        query: the split to evaluate, with labels ``(n, levels)``, the finest level first.
        references: the other splits to search, with labels of the same number of levels.
        query_in_reference: as for `split_accuracy`.

    Returns:
        ``<metric>_level<l>``, where level 0 is the finest, and with three or more levels of labels
        ``AVERAGE_<metric>``, the unweighted mean over the levels. NaN if no query of a parent can be counted.

    Raises:
        ValueError: there are fewer than two levels, no queries or nothing to search, the number of levels differs
            between splits, or the calculator returns values per class.
    """
    if calculator.return_per_class:
        raise ValueError("calculator must return single values here, got one with return_per_class=True")
    references = list(references)
    labels = query[1]
    levels = labels.shape[1] if labels.ndim == 2 else 0
    if levels < 2 or len(labels) == 0:
        raise ValueError(f"query labels must be (n, levels), n >= 1, levels >= 2, got shape {tuple(labels.shape)}")
    for split in references:
        if split[1].ndim != 2 or split[1].shape[1] != levels:
            shape = tuple(split[1].shape)
            raise ValueError(f"reference labels must be (m, {levels}) as those of the query, got shape {shape}")
    accuracies: dict[str, float] = {}
    over_levels = defaultdict(list)
    for level in range(levels - 1):
        over_parents = defaultdict(list)
        for parent in torch.unique(labels[:, level + 1]).tolist():
            family = [children(split, level, parent) for split in (query, *references)]
            found = split_accuracy(calculator, family[0], family[1:], query_in_reference)
            for metric, value in found.items():
                over_parents[metric].append(value)
        for metric, values in over_parents.items():
            accuracies[f"{metric}_level{level}"] = fmean(values)
            over_levels[metric].append(fmean(values))
    if levels > 2:
        accuracies |= {f"AVERAGE_{metric}": fmean(values) for metric, values in over_levels.items()}
    return accuracies


def children(split: Split, level: int, parent: float) -> Split:
    """Return the rows of one parent class, with their labels at the level below."""
    embeddings, labels = split
    chosen = labels[:, level + 1] == parent
    return embeddings[chosen.to(embeddings.device)], labels[chosen, level]


def unit_rows(embeddings: Tensor) -> Tensor:
    """Return the rows divided by their Euclidean norms; rows of zeros stay zero."""
    rows = widened(embeddings)
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return (rows / torch.where(lengths == 0, 1.0, lengths)).to(embeddings.dtype)


def widened(embeddings: Tensor) -> Tensor:
    """Return the rows in float64, so that sums neither overflow nor lose digits; in float32 on MPS."""
    if not embeddings.is_floating_point():
        raise ValueError(f"embeddings must be floating point, got {embeddings.dtype}")
    return embeddings.to(torch.float32 if embeddings.device.type == "mps" else torch.float64)


def synthetic_loader(centres: Tensor, rows: int, generator: torch.Generator) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of ``rows`` noisy copies of random centres, labelled by centre, as a synthetic data set."""
    labels = torch.randint(len(centres), (rows,), generator=generator)
    noise = torch.randn(rows, centres.shape[1], generator=generator)
    return DataLoader(TensorDataset(centres[labels] + noise, labels), batch_size=256)


def main() -> None:
    """Evaluate a test split among itself, then in a gallery of other data of the same classes."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(40, 32, generator=generator)
    test_loader = synthetic_loader(centres, 500, generator)
    gallery_loader = synthetic_loader(centres, 2_000, generator)

    torch.manual_seed(0)
    model = torch.nn.Linear(32, 24).eval()
    test = extract_embeddings(model, test_loader)
    gallery = extract_embeddings(model, gallery_loader)

    calculator = AccuracyCalculator(include=("precision_at_1", "r_precision"))
    for name, accuracies in (
        ("test split among itself", split_accuracy(calculator, test, [], query_in_reference=True)),
        ("test split in the gallery", split_accuracy(calculator, test, [gallery], query_in_reference=False)),
    ):
        print(f"{name:27}" + "   ".join(f"{metric} {value:.4f}" for metric, value in accuracies.items()))


if __name__ == "__main__":
    main()
