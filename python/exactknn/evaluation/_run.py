"""One evaluation of the calculator: its searches, and the metrics computed from them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exactknn._arrays.scalars import as_count
from exactknn._retrieval import engine
from exactknn._retrieval.hits import Hits
from exactknn._retrieval.metrics import UP_TO_RELEVANT, Metric
from exactknn._retrieval.names import metric_named
from exactknn._retrieval.types import Floats, Ints
from exactknn.evaluation._checks import (
    checked_distances,
    checked_indices,
    checked_values,
)
from exactknn.evaluation._inputs import Inputs
from exactknn.evaluation._relevance import Classes, Codes, Compared, Relevance, hit_blocks, row_blocks
from exactknn.evaluation.knn import CustomKNN, RustKNN, native_references, torch_blocks
from exactknn.evaluation.metrics import (
    NO_COMPARISON,
    UNDEFINED,
    RetrievalInputs,
    RetrievalMetric,
)

if TYPE_CHECKING:
    from exactknn.evaluation.accuracy import AccuracyCalculator

_LOGGER = logging.getLogger("exactknn.evaluation.accuracy")


class Run:
    """One evaluation, with its tensors."""

    def __init__(self, calculator: AccuracyCalculator, names: Sequence[str], given: Inputs) -> None:
        self.calculator, self.names = calculator, names
        self.query, self.query_labels = given.query, given.query_labels
        self.reference, self.reference_labels = given.reference, given.reference_labels
        self.own_included, self.labels = given.ref_includes_query, given.labels
        self.n, self.available = len(given.query), len(given.reference) - given.ref_includes_query
        self.ranked: dict[str, Metric] = {}
        self.custom: dict[str, RetrievalMetric] = {}
        self.methods: list[str] = []
        for name in names:
            ranked, custom = metric_named(name), calculator._retrieval_metric(name)
            if not calculator._is_ours(name):
                self.methods.append(name)
            elif ranked is not None:
                self.ranked[name] = ranked
            elif custom is not None:
                self.custom[name] = custom
        need_neighbours, need_clusters = set(calculator.requires_knn()), set(calculator.requires_clustering())
        self.methods_search = bool(need_neighbours.intersection(self.methods))
        # A method in neither list may use neighbours; one listed for clusters only, such as NMI or AMI, does not.
        self.methods_look = self.methods_search or not need_clusters.issuperset(self.methods)

    def values(self) -> dict[str, Any]:
        """Return the reported values by name."""
        calculator = self.calculator
        calculator.per_class_labels = None
        reported: dict[str, Any] = {}
        kwargs: dict[str, Any] = {
            "query": self.query,
            "reference": self.reference,
            "query_labels": self.query_labels,
            "reference_labels": self.reference_labels,
            "ref_includes_query": self.own_included,
            "label_comparison_fn": calculator.label_comparison_fn,
        }
        if self.ranked or self.custom or self.methods_search:
            reported.update(self._neighbour_metrics(kwargs))
        if set(self.methods).intersection(calculator.requires_clustering()):
            kwargs["cluster_labels"] = calculator.get_cluster_labels(**kwargs)
        functions = {name: calculator._function(name) for name in self.methods}
        reported.update(calculator._get_accuracy(functions, **kwargs))
        return dict(sorted(reported.items()))

    def _neighbour_metrics(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the neighbour metrics, and add the results of the search to the arguments of methods."""
        classes = Classes(self.query_labels)
        relevance = self._relevance(classes)
        relevant_counts = np.zeros(self.n, np.int64) if relevance is None else relevance.relevant_counts
        counted = relevant_counts > 0
        if relevance is not None and not counted.any():
            _LOGGER.warning("no query has a relevant reference, so every neighbour metric is NaN")
        plan = self._plan(classes, relevant_counts)
        distances, indices = self._search(plan.columns)
        reported: dict[str, Any] = {}
        if self.ranked:
            assert relevance is not None, "labels without a defined relevance were rejected"
            for name, values in self._ranked_values(relevance, plan, indices).items():
                reported[name] = self.calculator._average(values, classes.codes, len(classes), counted)
        for name, metric in self.custom.items():
            if metric.exclude_lone_queries and relevance is None:
                raise ValueError(NO_COMPARISON)
            width = self._limit(metric.neighbors, plan.resolved)
            inputs = self._inputs(relevance, distances[:, :width], indices[:, :width])
            values = checked_values(name, metric.function(inputs), self.n)
            mask = counted if metric.exclude_lone_queries else np.ones(self.n, dtype=bool)
            reported[name] = self.calculator._average(values, classes.codes, len(classes), mask)

        lone = np.ones(len(classes), dtype=bool)
        lone[classes.codes[counted]] = False
        self.calculator.per_class_labels = self.labels.named(classes.chosen(~lone if counted.any() else lone))
        kwargs["label_counts"] = (classes.labels, None if relevance is None else relevance.match_counts)
        kwargs["lone_query_labels"] = classes.chosen(lone)
        kwargs["not_lone_query_mask"] = torch.from_numpy(counted).to(self.query.device)
        if self.methods_look:
            width = min(plan.columns, plan.resolved)
            kwargs["knn_labels"] = self.reference_labels[indices[:, :width]]
            kwargs["knn_distances"] = distances[:, :width]
        return reported

    def _plan(self, classes: Classes, relevant_counts: Ints) -> engine.Plan:
        resolved = self._resolved(classes, relevant_counts)
        self._warn_of_small_k(int(relevant_counts.max()))
        for_ranks = engine.depth_of(self.ranked.values(), resolved, relevant_counts, self.available)
        given = [self._limit(metric.neighbors, resolved) for metric in self.custom.values()]
        if self.methods_look:
            # A method that needs neighbours may use all k; another gets what was found for the other metrics.
            given.append(resolved if self.methods_search else for_ranks)
        can_count = _searches_reference_alone(self.calculator.knn_func)
        return engine.plan(resolved, for_ranks, max(given, default=0), relevant_counts, can_count=can_count)

    def _ranked_values(self, relevance: Relevance, plan: engine.Plan, indices: Tensor) -> dict[str, Floats]:
        """Return one value per query for each rank metric, computed in blocks of queries."""
        scores = engine.Scores(self.ranked, self.n, plan.resolved)
        if plan.by_rank:
            blocks = self._counted(relevance, plan.for_ranks)
        elif plan.for_ranks:
            blocks = hit_blocks(relevance, indices[:, : plan.for_ranks])
        else:
            blocks = iter(())
        for block in blocks:
            scores.take(*block)
        return scores.values

    def _relevance(self, classes: Classes) -> Relevance | None:
        comparison = self.calculator.label_comparison_fn
        if comparison is not torch.eq:
            return Compared(classes, self.query_labels, self.reference_labels, self.own_included, comparison)
        if self.query_labels.ndim == 1:
            return Codes(classes, self.query_labels, self.reference_labels, self.own_included)
        if self.ranked or self.methods_search:
            raise ValueError(NO_COMPARISON)
        return None

    def _resolved(self, classes: Classes, relevant_counts: Ints) -> int:
        """Return the neighbours for metrics without a cutoff of their own, capped at those available."""
        per_class = np.zeros(len(classes), np.int64)
        per_class[classes.codes] = relevant_counts
        # Own rows included, even if the comparison does not match a label with itself.
        bin_counts = torch.from_numpy(per_class + int(self.own_included))
        k = self.calculator.determine_k(bin_counts, len(self.reference), self.own_included)
        resolved: int = min(as_count(k, "the result of determine_k", minimum=0), self.available)
        return resolved

    def _warn_of_small_k(self, most: int) -> None:
        k = self.calculator.k
        affected = [name for name in UP_TO_RELEVANT if name in self.names]
        if isinstance(k, int) and k < most and affected:
            _LOGGER.warning(
                "k=%d is below the largest number of relevant references, %d: %s uses only %d neighbours. "
                "k='max_bin_count' uses as many as needed.",
                k,
                most,
                " and ".join(affected),
                k,
            )

    def _limit(self, neighbours: int | None, resolved: int) -> int:
        return resolved if neighbours is None else min(neighbours, self.available)

    def _search(self, columns: int) -> tuple[Tensor, Tensor]:
        """Return ``columns`` neighbours of each query from the calculator's ``knn_func``."""
        if columns == 0:
            return self.query.new_empty((self.n, 0)), self.query.new_empty((self.n, 0), dtype=torch.long)
        _LOGGER.info("evaluating %d queries with k=%d, dimension %d", self.n, columns, self.query.shape[1])
        distances, indices = self.calculator.knn_func(self.query, columns, self.reference, self.own_included)
        shape, device = (self.n, columns), self.query.device
        indices = checked_indices(torch.as_tensor(indices, device=device), shape, len(self.reference))
        return checked_distances(distances, shape, device), indices

    def _counted(self, relevance: Relevance, columns: int) -> Iterator[engine.Block]:
        """Yield the hits of all queries from a built-in backend, without a matrix of neighbours."""
        _LOGGER.info("evaluating %d queries with k=%d, dimension %d", self.n, columns, self.query.shape[1])
        knn_func, counts = self.calculator.knn_func, relevance.relevant_counts
        references = native_references(knn_func, self.query, self.reference, self.own_included)
        if references is not None:
            yield from engine.counted(references, relevance.groups(), counts, self.available)
            return
        for start, stop, indices in torch_blocks(knn_func, self.query, columns, self.reference, self.own_included):
            yield start, stop, Hits.from_relevance(relevance.of_neighbours(start, stop, indices), counts[start:stop])

    def _inputs(self, relevance: Relevance | None, distances: Tensor, indices: Tensor) -> RetrievalInputs:
        mask = counts = UNDEFINED
        if relevance is not None:
            parts = [relevance.of_neighbours(start, stop, part) for start, stop, part in row_blocks(indices)]
            mask = torch.from_numpy(np.concatenate(parts)).to(self.query.device)
            counts = torch.from_numpy(relevance.relevant_counts).to(self.query.device)
        return RetrievalInputs(
            relevant_counts=counts,
            reference_labels=self.reference_labels,
            ref_includes_query=self.own_included,
            query_labels=self.query_labels,
            knn_labels=self.reference_labels[indices],
            knn_distances=distances,
            knn_indices=indices,
            relevance=mask,
        )


def _searches_reference_alone(knn_func: Any) -> bool:
    """Return whether this is a built-in backend that searches only the reference of the call."""
    return type(knn_func) is CustomKNN or (type(knn_func) is RustKNN and not knn_func.keeps_index)
