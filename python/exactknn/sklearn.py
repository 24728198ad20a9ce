"""Nearest neighbours as a scikit-learn transformer. Needs the extra ``sklearn`` (scikit-learn 1.6 or later).

    fit(X) ............ the rows unchanged, float32 stays float32
    fit_transform(X) .. each row itself first, then its nearest others: ``knn`` with ``exclude_self`` -+
    transform(X) ...... the nearest fitted rows of other rows: ``knn`` --------------------------------+-> CSR graph
    kneighbors(X) ..... the same two as arrays

The graph is the input of estimators with ``metric="precomputed"``: t-SNE, Isomap, DBSCAN, UMAP, neighbour classifiers.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import joblib
    import sklearn
    from scipy import sparse
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    if (error.name or "").partition(".")[0] not in ("sklearn", "scipy", "joblib"):
        raise
    raise ModuleNotFoundError(
        "exactknn.sklearn needs scikit-learn 1.6 or later, which is not installed: pip install 'exactknn[sklearn]'",
        name="sklearn",
    ) from error

from exactknn import knn
from exactknn._arrays.matrix import check_listed, whole_dtype
from exactknn._arrays.scalars import as_count, as_exponent

__all__ = ["ExactNeighborsTransformer"]

_MODES = ("distance", "connectivity")
_METRICS = ("euclidean", "sqeuclidean", "cosine", "cityblock", "chebyshev", "minkowski")
# scikit-learn's aliases.
_ALIASES = {"l2": "euclidean", "l1": "cityblock", "manhattan": "cityblock", "infinity": "chebyshev", "p": "minkowski"}
# Searched without conversion; other types are converted to the first.
_DTYPES = (np.float64, np.float32, np.float16)


class ExactNeighborsTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Transforms rows into a sparse graph of their exact nearest neighbours.

    A drop-in replacement for ``sklearn.neighbors.KNeighborsTransformer``, with the same counts: with
    ``mode="distance"`` the graph has ``n_neighbors + 1`` entries per row, since a fitted row is its own neighbour and
    downstream estimators skip it; with ``mode="connectivity"`` it has ``n_neighbors``, including the row itself.

    In the graph of ``fit_transform`` the first entry of each row is the row itself, at distance 0, even if it has more
    than ``n_neighbors`` duplicates. ``transform`` cannot tell whether its rows were fitted: it returns the nearest
    fitted rows, ties by row number. For fitted rows without duplicates both are the same.

    Args:
        n_neighbors: neighbours of each row, at least 1.
        mode: ``"distance"``: entries are distances, zeros stored. ``"connectivity"``: entries are 1.
        metric: ``"euclidean"`` (also ``"l2"``), ``"sqeuclidean"``, ``"cosine"`` (1 - cosine similarity),
            ``"cityblock"`` (``"manhattan"``, ``"l1"``), ``"chebyshev"`` (``"infinity"``) or ``"minkowski"`` (``"p"``).
        p: exponent of ``"minkowski"``, above 0; ``None``: 2. Invalid for other metrics.
        n_jobs: ``None``: the number of threads set by ``exactknn.set_num_threads`` or ``EXACTKNN_NUM_THREADS``, by
            default all cores available to the process. Numbers follow joblib: -1 is all cores, -2 all but one.

    Attributes:
        n_features_in_: number of features of the fitted rows.
        feature_names_in_: their names, if the fitted rows have string names.
        n_samples_fit_: number of fitted rows.
        effective_metric_: exactknn's name of the metric.
        effective_metric_params_: ``{"p": p}`` for ``"minkowski"``, else empty.

    Rows are float32, float64 or float16 arrays; other numbers are searched as float64; integers beyond 2**53 are an
    error. Distances are float64 for float64 rows, else float32. Sparse rows, NaN and infinities raise scikit-learn's
    errors. The fitted rows are stored zero-copy if their layout allows it, and must not be modified afterwards.

    Examples:
        >>> from sklearn.pipeline import make_pipeline
        >>> from sklearn.neighbors import KNeighborsClassifier
        >>> graph = ExactNeighborsTransformer(n_neighbors=1).fit_transform([[0.0], [1.0], [3.0]])
        >>> graph.toarray()
        array([[0., 1., 0.],
               [1., 0., 0.],
               [0., 2., 0.]])
        >>> classifier = make_pipeline(
        ...     ExactNeighborsTransformer(n_neighbors=1), KNeighborsClassifier(n_neighbors=1, metric="precomputed")
        ... )
        >>> classifier.fit([[0.0], [1.0], [3.0]], ["low", "low", "high"]).predict([[2.5]]).tolist()
        ['high']
    """

    def __init__(
        self,
        n_neighbors: int = 5,
        *,
        mode: str = "distance",
        metric: str = "euclidean",
        p: float | None = None,
        n_jobs: int | None = None,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.mode = mode
        self.metric = metric
        self.p = p
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: Any = None) -> ExactNeighborsTransformer:
        """Return the transformer itself, after checking the parameters and storing the rows.

        Args:
            X: ``(n_samples, n_features)`` rows.
            y: ignored.

        Raises:
            TypeError: a parameter is of a wrong type, or ``X`` is sparse or holds integers beyond 2**53.
            ValueError: a parameter is out of its range, or ``X`` is not a matrix of finite numbers.
        """
        as_count(self.n_neighbors, "n_neighbors", minimum=1)
        _check_mode(self.mode)
        metric, parameters = _checked_metric(self.metric, self.p)
        self._num_threads()
        _check_integers(X)
        self._fit_X = validate_data(self, X, dtype=_DTYPES, order="C")
        self.effective_metric_ = metric
        self.effective_metric_params_ = parameters
        self.n_samples_fit_ = len(self._fit_X)
        return self

    def transform(self, X: Any) -> Any:
        """Return the graph from the rows of ``X`` to the fitted rows.

        Args:
            X: ``(n_queries, n_features)`` rows.

        Returns:
            ``(n_queries, n_samples_fit_)`` matrix in compressed rows, the entries of each row nearest first.

        Raises:
            TypeError: ``X`` is sparse, or ``n_neighbors`` is no longer an integer.
            ValueError: ``X`` is not a matrix of finite numbers with the fitted features, there are too few fitted rows,
                or ``n_neighbors`` or ``mode`` is no longer valid.
        """
        check_is_fitted(self)
        # Checked again: both may have changed since fit.
        count = as_count(self.n_neighbors, "n_neighbors", minimum=1)
        _check_mode(self.mode)
        return self.kneighbors_graph(X, count + (self.mode == "distance"), self.mode)

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Return the graph of the fitted rows, in which each row is its own first neighbour.

        Args:
            X: ``(n_samples, n_features)`` rows.
            y: ignored.

        Returns:
            ``(n_samples, n_samples)`` matrix in compressed rows.

        Raises:
            TypeError: as ``fit``.
            ValueError: as ``fit``, or there are too few rows.
        """
        self.fit(X)
        distances, indices = self._search(None, self.n_neighbors - (self.mode == "connectivity"))
        itself = np.arange(self.n_samples_fit_)[:, np.newaxis]
        distances = np.hstack([np.zeros_like(distances, shape=itself.shape), distances])
        return self._graph(distances, np.hstack([itself, indices]), self.mode)

    def kneighbors(self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True) -> Any:
        """Return the nearest fitted rows.

        Args:
            X: ``(n_queries, n_features)`` rows. ``None``: the fitted rows, each excluded from its own neighbours.
            n_neighbors: number of neighbours; ``None``: that of the transformer.
            return_distance: ``False`` omits the distances.

        Returns:
            ``(distances, indices)``, both ``(n_queries, n_neighbors)``, nearest first, ties by row number. Only
            ``indices`` (int64) with ``return_distance=False``.

        Raises:
            TypeError: as ``transform``, or ``n_neighbors`` is not an integer.
            ValueError: as ``transform``, or ``n_neighbors`` is below 1.
        """
        check_is_fitted(self)
        if n_neighbors is None:
            n_neighbors = self.n_neighbors
        count = as_count(n_neighbors, "n_neighbors", minimum=1)
        distances, indices = self._search(X, count)
        return (distances, indices) if return_distance else indices

    def kneighbors_graph(self, X: Any = None, n_neighbors: int | None = None, mode: str = "connectivity") -> Any:
        """Return the graph of the neighbours from ``kneighbors``: ``n_neighbors`` entries per row in either ``mode``.

        Args:
            X: as for ``kneighbors``.
            n_neighbors: as for ``kneighbors``.
            mode: ``"connectivity"`` or ``"distance"``, as for the transformer.

        Returns:
            ``(n_queries, n_samples_fit_)`` matrix in compressed rows, the entries of each row nearest first.

        Raises:
            TypeError: as ``kneighbors``.
            ValueError: as ``kneighbors``, or ``mode`` is unknown.
        """
        _check_mode(mode)
        distances, indices = self.kneighbors(X, n_neighbors)
        return self._graph(distances, indices, mode)

    def _search(self, X: Any, count: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        most = self.n_samples_fit_ - (X is None)
        if count > most:
            others = "other rows" if X is None else "fitted rows"
            raise ValueError(
                f"n_neighbors is too large: each row needs {count} neighbours, but with "
                f"n_samples = {self.n_samples_fit_} there are {most} {others}"
            )
        if X is not None:
            _check_integers(X)
            X = validate_data(self, X, dtype=_DTYPES, order="C", reset=False)
        return knn(
            self._fit_X if X is None else X,
            None if X is None else self._fit_X,
            count,
            metric=self.effective_metric_,
            num_threads=self._num_threads(),
            p=self.effective_metric_params_.get("p"),
        )

    def _graph(self, distances: npt.NDArray[Any], indices: npt.NDArray[np.int64], mode: str) -> Any:
        rows, count = indices.shape
        values = distances if mode == "distance" else np.ones_like(distances)
        starts = np.arange(0, rows * count + 1, count)
        # scikit-learn 1.9 has a setting for SciPy's sparse arrays instead of matrices.
        arrays = sklearn.get_config().get("sparse_interface") == "sparray"
        kind = sparse.csr_array if arrays else sparse.csr_matrix
        return kind((values.ravel(), indices.ravel(), starts), shape=(rows, self.n_samples_fit_))

    def _num_threads(self) -> int | None:
        if self.n_jobs is None:
            return None
        try:
            wanted = operator.index(self.n_jobs)
        except TypeError:
            raise TypeError(f"n_jobs must be an integer or None, got {self.n_jobs!r}") from None
        if wanted == 0:
            raise ValueError("n_jobs must be a number of threads, a negative number or None, got 0")
        return int(joblib.effective_n_jobs(wanted))

    @property
    def _n_features_out(self) -> int:
        """Number of columns of the graph, for ``get_feature_names_out``."""
        return self.n_samples_fit_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _check_integers(X: Any) -> None:
    """Raise ``TypeError`` for integers that scikit-learn's conversion to float64 would round."""
    if sparse.issparse(X) or getattr(getattr(X, "dtype", None), "kind", "") == "f":
        return
    try:
        array = np.asarray(X)
    except ValueError:
        return  # validate_data has the message
    check_listed(X, array, "X")
    if array.dtype.kind in "iu":
        whole_dtype(array, "X")


def _check_mode(mode: Any) -> None:
    if not isinstance(mode, str) or mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")


def _checked_metric(metric: Any, p: Any) -> tuple[str, dict[str, float]]:
    """Return exactknn's name of a metric and its parameters."""
    name = _ALIASES.get(metric, metric) if isinstance(metric, str) else None
    if name == "inner_product":
        raise ValueError("metric must be a distance, got 'inner_product', for which larger is nearer")
    if name not in _METRICS:
        raise ValueError(f"metric must be one of {', '.join((*_METRICS, *_ALIASES))}, got {metric!r}")
    if name == "minkowski":
        return name, {"p": 2.0 if p is None else as_exponent(p, "p")}
    if p is not None:
        raise ValueError(f"p is for metric='minkowski' only, got p={p!r} with metric={metric!r}")
    return name, {}
