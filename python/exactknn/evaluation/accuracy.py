"""Retrieval metrics of embeddings against labels.

    get_accuracy(query, labels, reference, labels)
        -> _inputs          tensors on one device, one dtype; exact labels; repeats removed; everything checked
        -> _relevance       which references are relevant, how many for each query
        -> engine.plan      how many neighbours the selected metrics need
             few, or a custom knn_func:              knn_func, once ──> neighbours ──relevance──> Hits, block by block
             more than relevant, built-in knn_func:  ranks of the relevant references ──────────> Hits, block by block
        -> engine.Scores    Hits -> one value per query and metric
        -> averages         over queries, over classes, or per class

The neighbour matrix of all queries and all references is formed only if a custom metric needs it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from exactknn._arrays.scalars import as_flag
from exactknn._environment import undisturbed
from exactknn._retrieval.hits import Hits
from exactknn._retrieval.metrics import BUILT_IN, class_means, mean_of
from exactknn._retrieval.names import NUMBERED_NAMES, is_name, metric_named, vote_named
from exactknn._retrieval.types import Floats
from exactknn.distances import LpDistance
from exactknn.distances.base import autocast_off
from exactknn.evaluation._checks import (
    as_device,
    checked_k,
    checked_values,
)
from exactknn.evaluation._inputs import checked_inputs
from exactknn.evaluation._labels import in_common_type
from exactknn.evaluation._relevance import codes_among
from exactknn.evaluation._run import Run
from exactknn.evaluation.knn import CustomKNN
from exactknn.evaluation.metrics import (
    RetrievalInputs,
    RetrievalMetric,
    vote_metric,
)

_LOGGER = logging.getLogger(__name__)

_PREFIX = "calculate_"
_CLUSTERING = ("AMI", "NMI")

Values = float | list[float]
KnnFunc = Callable[[Tensor, int, Tensor, bool], tuple[Any, Any]]


class AccuracyCalculator:
    """Retrieval metrics of embeddings: do a query's nearest neighbours share its label?

    Metrics, for a query with ``R`` relevant references (self excluded) and ``k`` neighbours, ``rel(j)`` 1 if neighbour
    ``j`` is relevant, ``P(j) = (rel(1) + .. + rel(j)) / j``:

    - ``precision_at_1``: ``rel(1)``.
    - ``r_precision``: ``(rel(1) + .. + rel(h)) / h`` with ``h = min(R, k)``.
    - ``mean_average_precision_at_r``: sum of ``rel(j) P(j)`` for ``j <= min(R, k)``, divided by ``R`` (Musgrave et al.,
      2020, "A Metric Learning Reality Check").
    - ``mean_average_precision``: sum of ``rel(j) P(j)`` for ``j <= k``, divided by ``R``, even if ``k < R``.
    - ``mean_reciprocal_rank``: 1 / rank of the first relevant neighbour, 0 if none of the ``k`` is relevant.
    - ``NMI``, ``AMI``: normalised and adjusted mutual information between labels and clusters, by scikit-learn. In the
      default set only with a ``kmeans_func``.

    Named in ``include`` with any cutoff ``<k>``, which is independent of the calculator's ``k``:

    - ``precision_at_<k>``: ``(rel(1) + .. + rel(k)) / k``.
    - ``recall_at_<k>``: 1 if any of the first ``k`` is relevant, the "Recall@K" of metric learning (Jegou et al., 2011;
      Oh Song et al., 2016). ``hit_rate_at_<k>``: the same, by its name in recommendation.
    - ``found_fraction_at_<k>``: ``(rel(1) + .. + rel(k)) / R``, the recall of information retrieval.
    - ``ndcg_at_<k>``: sum of ``rel(j) / log2(j + 1)`` for ``j <= k``, divided by the same sum with
      ``min(R, k)`` relevant references first (Järvelin and Kekäläinen, 2002).
    - ``knn_accuracy_at_<k>``: 1 if the class with the most votes among ``k`` neighbours is relevant;
      ``knn_softmax_accuracy_at_<k>``: votes weighted by ``exp(similarity / 0.07)``. See `knn_vote_metric`.

    All of these exclude lone queries (queries without positives, ``R = 0``). The backend orders ties in distance; the
    built-in ones put the lowest reference row first, so a metric of tied rows depends on their order in the reference.

    Args:
        include: names of metrics; empty: the default set.
        exclude: names of metrics to remove from these.
        avg_of_avgs: average over classes instead of queries.
        return_per_class: a list of class means, in the order of `per_class_labels`, instead of one average.
        k: number of neighbours for metrics without a cutoff in their name: an integer of at least 1, ``None`` (all) or
            ``"max_bin_count"`` (the largest ``R``).
        label_comparison_fn: ``fn(query_labels, reference_labels)`` decides relevance: it returns a bool tensor of the
            broadcast leading dimensions, reducing a last axis of several label columns. ``None``: equal labels.
        device: device of the computation; ``None``: the query's device.
        knn_func: called as ``knn_func(query, k, reference, ref_includes_query)``, once for all queries; returns
            distances and reference rows of the neighbours, both ``(n, k)``, nearest first, excluding a query's own row
            with ``ref_includes_query``. ``None``: exact search by squared Euclidean distance of the unnormalised
            embeddings.
        kmeans_func: called as ``kmeans_func(query, num_clusters)``, returns a cluster for each row; ``None``:
            scikit-learn's ``KMeans`` with a fixed seed, if ``NMI`` or ``AMI`` is selected.
        custom_metrics: `RetrievalMetric` objects by name; they join the default set.

    A subclass adds metrics as methods ``calculate_<name>(**kwargs)`` and lists them in `requires_knn` or
    `requires_clustering`. Unless it is only in the second list, a method gets the neighbours of all queries as one
    matrix; with ``k=None`` these are all references.

    Threads can share a calculator; `per_class_labels` and `get_curr_metrics` then refer to any of their calls.

    Raises:
        TypeError: ``include`` or ``exclude`` is neither a tuple nor a list, ``custom_metrics`` is not a mapping of
            metrics, a function is not callable, or a flag is not a bool.
        ValueError: a name is unknown or used twice, both averages are requested, or ``k`` or ``device`` is invalid.
        NotImplementedError: a ``label_comparison_fn`` is combined with a clustering metric.
        ModuleNotFoundError: ``NMI`` or ``AMI`` is selected, but scikit-learn is not installed.
    """

    def __init__(
        self,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        avg_of_avgs: bool = False,
        return_per_class: bool = False,
        k: int | str | None = None,
        label_comparison_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        device: torch.device | str | None = None,
        knn_func: KnnFunc | None = None,
        kmeans_func: Callable[[Tensor, int], Any] | None = None,
        *,
        custom_metrics: Mapping[str, RetrievalMetric] | None = None,
    ) -> None:
        self.avg_of_avgs = as_flag(avg_of_avgs, "avg_of_avgs")
        self.return_per_class = as_flag(return_per_class, "return_per_class")
        if self.avg_of_avgs and self.return_per_class:
            raise ValueError("avg_of_avgs and return_per_class exclude each other, got both")
        for function, argument in (
            (label_comparison_fn, "label_comparison_fn"),
            (knn_func, "knn_func"),
            (kmeans_func, "kmeans_func"),
        ):
            if not (function is None or callable(function)):
                raise TypeError(f"{argument} must be callable or None, got {type(function).__name__}")
        self.k = checked_k(k)
        self.label_comparison_fn: Callable[..., Any] = torch.eq if label_comparison_fn is None else label_comparison_fn
        self.device = as_device(device, "device")
        if knn_func is None:
            knn_func = CustomKNN(LpDistance(normalize_embeddings=False, power=2), batch_size=256)
        self.knn_func: Any = knn_func
        self.kmeans_func = kmeans_func
        self.custom_metrics = self._checked_custom_metrics(custom_metrics)
        self.per_class_labels: Tensor | npt.NDArray[Any] | None = None
        """Labels of the classes in the list of class means, in its order, after `get_accuracy`: an array if text.

        Classes with only lone queries are omitted, unless all classes are. A custom metric with
        ``exclude_lone_queries=False`` lists all classes of the queries, ascending.
        """
        self.check_primary_metrics(include, exclude)
        self._all_selected = len(include) == 0
        self._excluded = tuple(exclude)
        self._selected = sorted(set(include or self._default_names()).difference(exclude))
        self._current = self._selected
        self._check_clustering(self._selected)

    # --- selection of metrics --------------------------------------------------------------------------------------

    def get_function_dict(
        self, include: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> dict[str, Callable[..., Any]]:
        """Return functions by name, for metrics selected at construction and in ``include``, but not in ``exclude``.

        Each takes the keyword arguments of a ``calculate_`` method and returns the reported value.
        """
        return {name: self._function(name) for name in self._narrowed(include, exclude)}

    @property
    def original_function_dict(self) -> dict[str, Callable[..., Any]]:
        """Functions of the metrics selected at construction."""
        return self.get_function_dict()

    @property
    def curr_function_dict(self) -> dict[str, Callable[..., Any]]:
        """Functions of the metrics of the last selection."""
        return {name: self._function(name) for name in self._current}

    def get_curr_metrics(self) -> list[str]:
        """Return the names of the last selected metrics, by the constructor or the latest call."""
        return list(self._current)

    def requires_clustering(self) -> list[str]:
        """Return the names of the metrics that need clusters."""
        return list(_CLUSTERING)

    def requires_knn(self) -> list[str]:
        """Names of the metrics that need neighbours."""
        return list(BUILT_IN)

    def check_primary_metrics(self, include: Any = (), exclude: Any = ()) -> None:
        """Check a selection.

        Raises:
            TypeError: neither tuple nor list.
            ValueError: an unknown name.
        """
        for names, argument in ((include, "include"), (exclude, "exclude")):
            if not isinstance(names, (tuple, list)):
                raise TypeError(f"{argument} must be a tuple or list of metric names, got {type(names).__name__}")
            for name in names:
                if not self._is_known(name):
                    known = ", ".join((*sorted(self._fixed_names()), *NUMBERED_NAMES))
                    raise ValueError(f"{argument} must name metrics among {known}; got {name!r}")

    def description(self) -> str:
        """Return ``"avg_of_avgs"`` if averages are over classes, else ``""``."""
        return "avg_of_avgs" if self.avg_of_avgs else ""

    def _methods(self) -> set[str]:
        return {name.removeprefix(_PREFIX) for name in dir(self) if name.startswith(_PREFIX)}

    def _fixed_names(self) -> set[str]:
        return self._methods() | set(self.custom_metrics)

    def _is_known(self, name: Any) -> bool:
        if not isinstance(name, str):
            return False
        return name in self._fixed_names() or is_name(name)

    def _default_names(self) -> tuple[str, ...]:
        names = self._fixed_names()
        return tuple(names - set(_CLUSTERING) if self.kmeans_func is None else names)

    def _narrowed(self, include: Sequence[str], exclude: Sequence[str]) -> list[str]:
        """Return a call's selection, in alphabetical order. Metrics excluded by the constructor stay excluded."""
        # Without include, the constructor excluded nothing, not even metrics outside the default set.
        allowed = set(self._selected).union(include if self._all_selected else ())
        return sorted(allowed.intersection(include or self._selected).difference(exclude, self._excluded))

    def _checked_custom_metrics(self, custom_metrics: Any) -> dict[str, RetrievalMetric]:
        if custom_metrics is None:
            return {}
        if not isinstance(custom_metrics, Mapping):
            raise TypeError(
                f"custom_metrics must be a mapping of names to RetrievalMetric, got {type(custom_metrics).__name__}"
            )
        taken = self._methods()
        for name, metric in custom_metrics.items():
            if not isinstance(metric, RetrievalMetric):
                raise TypeError(f"custom_metrics[{name!r}] must be a RetrievalMetric, got {type(metric).__name__}")
            if not isinstance(name, str):
                raise TypeError(f"custom_metrics must have strings as names, got {type(name).__name__}")
            if name in taken or is_name(name):
                raise ValueError(f"custom_metrics must not reuse the name of a built-in metric, got {name!r}")
        return dict(custom_metrics)

    def _check_clustering(self, names: Sequence[str]) -> None:
        clustering = sorted(set(self.requires_clustering()).intersection(names))
        if clustering and self.label_comparison_fn is not torch.eq:
            raise NotImplementedError(
                f"{', '.join(clustering)} cannot be computed with a label_comparison_fn: clusters are compared "
                'by equal labels; exclude them with exclude=("NMI", "AMI")'
            )
        named = sorted(set(_CLUSTERING).intersection(names))
        if named:
            _check_sklearn(", ".join(named))

    def _is_ours(self, name: str) -> bool:
        """Return whether this metric is built in and not overridden by a subclass."""
        if name in BUILT_IN:
            own = getattr(type(self), _PREFIX + name, None) is getattr(AccuracyCalculator, _PREFIX + name)
            return own and _PREFIX + name not in vars(self)
        return name not in self._methods()

    def _function(self, name: str) -> Callable[..., Any]:
        if name in self._methods():
            method: Callable[..., Any] = getattr(self, _PREFIX + name)
            return method
        return functools.partial(self._from_kwargs, name)

    def _retrieval_metric(self, name: str) -> RetrievalMetric | None:
        vote = vote_named(name)
        return self.custom_metrics.get(name) if vote is None else vote_metric(vote)

    # --- metrics as methods: for subclasses and direct calls ---------------------------------------------------------

    def calculate_precision_at_1(self, **kwargs: Any) -> Values:
        """Return precision at 1 from the arguments of a ``calculate_`` method."""
        return self._from_kwargs("precision_at_1", **kwargs)

    def calculate_r_precision(self, **kwargs: Any) -> Values:
        """Return R-precision from the arguments of a ``calculate_`` method."""
        return self._from_kwargs("r_precision", **kwargs)

    def calculate_mean_average_precision(self, **kwargs: Any) -> Values:
        """Return mean average precision from the arguments of a ``calculate_`` method."""
        return self._from_kwargs("mean_average_precision", **kwargs)

    def calculate_mean_average_precision_at_r(self, **kwargs: Any) -> Values:
        """Return mean average precision at R from the arguments of a ``calculate_`` method."""
        return self._from_kwargs("mean_average_precision_at_r", **kwargs)

    def calculate_mean_reciprocal_rank(self, **kwargs: Any) -> Values:
        """Return mean reciprocal rank from the arguments of a ``calculate_`` method."""
        return self._from_kwargs("mean_reciprocal_rank", **kwargs)

    def calculate_NMI(self, query_labels: Any, cluster_labels: Any, **kwargs: Any) -> float:
        """Return normalised mutual information, with the arithmetic mean of the entropies, by scikit-learn."""
        from sklearn.metrics import normalized_mutual_info_score

        return float(normalized_mutual_info_score(*_partitions(query_labels, cluster_labels)))

    def calculate_AMI(self, query_labels: Any, cluster_labels: Any, **kwargs: Any) -> float:
        """Return adjusted mutual information, with the arithmetic mean of the entropies, by scikit-learn."""
        from sklearn.metrics import adjusted_mutual_info_score

        return float(adjusted_mutual_info_score(*_partitions(query_labels, cluster_labels)))

    def get_cluster_labels(self, query: Tensor, query_labels: Tensor, **kwargs: Any) -> Any:
        """Return the cluster of each query, with as many clusters as distinct values in the labels."""
        num_clusters = len(torch.unique(query_labels.flatten()))
        _LOGGER.info("k-means of %d rows into %d clusters", len(query), num_clusters)
        if self.kmeans_func is not None:
            return self.kmeans_func(query, num_clusters)
        _check_sklearn("k-means without a kmeans_func")
        from sklearn.cluster import KMeans

        kmeans = KMeans(num_clusters, n_init=1, max_iter=20, random_state=0)
        return torch.from_numpy(kmeans.fit_predict(query.cpu().numpy())).to(query.device)

    def determine_k(self, bin_counts: Tensor, num_reference_embeddings: int, ref_includes_query: bool) -> int:
        """Return the number of neighbours for metrics without a cutoff in their name.

        Args:
            bin_counts: references that match each distinct query label, the query's own row included.
            num_reference_embeddings: reference rows.
            ref_includes_query: whether the queries are the first reference rows.

        Returns:
            A number of at least 0; the caller caps it at the number of available references.
        """
        if self.k == "max_bin_count":
            return int(bin_counts.max()) - int(ref_includes_query)
        if self.k is None:
            return num_reference_embeddings - int(ref_includes_query)
        return int(self.k)

    def _get_accuracy(self, function_dict: Mapping[str, Callable[..., Any]], **kwargs: Any) -> dict[str, Any]:
        return {name: function(**kwargs) for name, function in function_dict.items()}

    def _from_kwargs(self, name: str, **kwargs: Any) -> Values:
        """Return one metric from neighbours' labels, with the arguments of a ``calculate_`` method."""
        query_labels = torch.as_tensor(kwargs["query_labels"])
        knn_labels = torch.as_tensor(kwargs["knn_labels"]).to(query_labels.device)
        labels, counts = (torch.as_tensor(part).to(query_labels.device) for part in kwargs["label_counts"])
        query_labels, knn_labels, labels = in_common_type(
            (query_labels, "query_labels"), (knn_labels, "knn_labels"), (labels, "label_counts")
        )
        included = bool(kwargs.get("ref_includes_query", False))
        comparison = kwargs.get("label_comparison_fn", self.label_comparison_fn)
        counted = torch.as_tensor(kwargs["not_lone_query_mask"]).cpu().numpy()
        relevance = comparison(query_labels.unsqueeze(1), knn_labels).cpu().numpy()
        own = comparison(labels, labels) if included else torch.zeros(len(labels))
        codes = codes_among(query_labels, labels)
        known = codes >= 0
        counted = counted & known
        relevant_counts = np.where(counted, (counts.cpu().long() - own.cpu().long()).numpy()[codes], 0)
        ranked = metric_named(name)
        if ranked is not None:
            values = ranked.values(Hits.from_relevance(relevance, relevant_counts))
            return self._average(values, codes, len(labels), counted)
        metric = self._retrieval_metric(name)
        if metric is None:
            raise ValueError(f"name must be a metric of this calculator, got {name!r}")
        inputs = RetrievalInputs(
            relevant_counts=torch.from_numpy(relevant_counts),
            reference_labels=kwargs["reference_labels"],
            ref_includes_query=included,
            query_labels=query_labels,
            knn_labels=knn_labels,
            knn_distances=kwargs.get("knn_distances"),
            relevance=torch.from_numpy(relevance),
        )
        values = checked_values(name, metric.function(inputs), len(query_labels))
        mask = counted if metric.exclude_lone_queries else known
        return self._average(values, codes, len(labels), mask)

    def _average(self, values: Floats, codes: Any, number: int, counted: Any) -> Values:
        """Return the reported average over the counted queries, from one value per query."""
        values = np.where(counted, values, math.nan)
        if not (self.avg_of_avgs or self.return_per_class):
            return mean_of(values)
        means = class_means(values, codes, number)
        if self.avg_of_avgs:
            return mean_of(means)
        listed = np.unique(codes[counted]) if counted.any() else slice(None)
        means_listed: list[float] = means[listed].tolist()
        return means_listed

    # --- one evaluation ----------------------------------------------------------------------------------------------

    @undisturbed
    def get_accuracy(
        self,
        query: Any,
        query_labels: Any,
        reference: Any = None,
        reference_labels: Any = None,
        ref_includes_query: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        *,
        ids: Any = None,
        reference_ids: Any = None,
    ) -> dict[str, Any]:
        """Return the metrics of embeddings, tensors or arrays, against a reference or against themselves.

        Args:
            query: ``(n, d)``, finite; ``n`` at least 1. Integers are searched in float32 or float64, exactly.
            query_labels: ``(n,)`` numbers or text, compared exactly. Numbers may be ``(n, columns)`` with a
                ``label_comparison_fn``, or if no metric uses relevance. Metrics and methods get text as int64 codes:
                positions among the distinct texts of both sides, ascending.
            reference: ``(m, d)``, finite; ``None``: the queries, each excluded from its own neighbours. The same
                embeddings as ``query`` without ``ref_includes_query``: a warning, as each query then finds itself.
            reference_labels: ``(m,)`` or ``(m, columns)``, required with ``reference`` and only then.
            ref_includes_query: the first ``n`` reference rows are the queries, each excluded from its own neighbours.
            include: metrics among those selected at construction; empty: all of them.
            exclude: metrics to remove.
            ids: ``(n,)`` numbers or text, the item of each query row: of rows with one id only the first counts, such
                as those repeated by a sampler that fills its last batch. ``None``: every row counts.
            reference_ids: ``(m,)``, the same for the references; with ``ref_includes_query`` they begin with ``ids``.

        Returns:
            Values by metric name, in alphabetical order: a float, or a list of floats with ``return_per_class``. NaN if
            every query is lone.

        Raises:
            TypeError: embeddings are not numbers or hold integers beyond 2**53, labels are neither numbers nor text, a
                ``label_comparison_fn`` would get text, or ``include``, ``exclude`` or ``ref_includes_query`` is of a
                wrong type.
            ValueError: a shape or length is wrong, labels are text on one side only, or floats on one side and integers
                beyond 2**53 on the other, rows of one id have two labels, a row holds a NaN or infinity (the message
                names argument and row), the reference does not begin with the queries despite ``ref_includes_query``,
                or a user function returns an invalid result.
            NotImplementedError: a clustering metric is selected, and there is a ``label_comparison_fn``.
            ModuleNotFoundError: clusters are needed, but scikit-learn is not installed.
        """
        self.check_primary_metrics(include, exclude)
        # A local copy: another thread may change the selection during this call.
        names = self._current = self._narrowed(include, exclude)
        self._check_clustering(names)
        with torch.no_grad():
            given = checked_inputs(
                query,
                query_labels,
                reference,
                reference_labels,
                as_flag(ref_includes_query, "ref_includes_query"),
                ids,
                reference_ids,
                self.device,
            )
            if given.labels.texts is not None and self.label_comparison_fn is not torch.eq:
                raise TypeError("query_labels must hold numbers, which label_comparison_fn gets as tensors, got text")
            with autocast_off(given.query.device.type):
                return Run(self, names, given).values()


def _check_sklearn(what: str) -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise ModuleNotFoundError(
            f"{what} needs scikit-learn, which is not installed: pip install 'exactknn[clustering]'", name="sklearn"
        )


def _partitions(query_labels: Any, cluster_labels: Any) -> tuple[Any, Any]:
    """Return labels and clusters of the queries as integer codes: only equality matters."""
    labels, clusters = (torch.as_tensor(part, device="cpu") for part in (query_labels, cluster_labels))
    if labels.numel() != len(labels):
        raise ValueError(f"query_labels must have one column to be compared with clusters, got {tuple(labels.shape)}")
    if clusters.numel() != len(labels):
        raise ValueError(
            f"kmeans_func must return one cluster for each of {len(labels)} rows, got shape {tuple(clusters.shape)}"
        )
    codes = [torch.unique(part.flatten(), return_inverse=True)[1].numpy() for part in (labels, clusters)]
    return codes[0], codes[1]
