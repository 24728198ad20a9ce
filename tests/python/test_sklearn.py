"""The transformer of scikit-learn, in scikit-learn's own checks and pipelines."""

import pickle
from collections import Counter

import joblib
import numpy as np
import pytest
import sklearn
from scipy import sparse
from sklearn.base import clone
from sklearn.cluster import DBSCAN
from sklearn.datasets import load_digits
from sklearn.manifold import TSNE, Isomap, SpectralEmbedding, trustworthiness
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier, KNeighborsTransformer
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator
from threadpoolctl import threadpool_limits

import exactknn
from exactknn.sklearn import ExactNeighborsTransformer


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).standard_normal((300, 8))


@pytest.fixture(scope="module")
def digits():
    data, labels = load_digits(return_X_y=True)
    # Without the ties of whole numbers, so that there is one right answer.
    noise = np.random.default_rng(0).random(data.shape)
    return (data + 0.01 * noise)[:500], labels[:500]


def entries(graph):
    """Columns and values of each row, in the order in which they are stored."""
    count = len(graph.indices) // graph.shape[0]
    assert graph.indptr.tolist() == list(range(0, len(graph.indices) + 1, count))
    return graph.indices.reshape(-1, count), graph.data.reshape(-1, count)


@pytest.mark.parametrize(
    "parameters", [{}, {"mode": "connectivity"}, {"metric": "minkowski", "p": 3}, {"metric": "cosine"}], ids=str
)
def test_scikit_learn_finds_nothing_wrong(parameters):
    checks = check_estimator(ExactNeighborsTransformer(**parameters), on_skip=None, on_fail=None)
    wrong = {
        check["check_name"]: check["exception"] for check in checks if check["status"] not in ("passed", "skipped")
    }
    assert wrong == {}
    skipped = {check["check_name"] for check in checks if check["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}  # wants an environment variable before SciPy is imported
    assert Counter(check["status"] for check in checks)["passed"] >= 45


@pytest.mark.parametrize("mode", ["distance", "connectivity"])
@pytest.mark.parametrize(
    "metric",
    [
        *(
            ("euclidean",),
            ("l2",),
            ("sqeuclidean",),
            ("cosine",),
            ("manhattan",),
            ("l1",),
            ("cityblock",),
            ("chebyshev",),
        ),
        *(("minkowski",), ("minkowski", 1), ("minkowski", 2.5), ("minkowski", np.inf)),
    ],
    ids=str,
)
def test_the_graph_is_that_of_scikit_learn(rows, mode, metric):
    names = dict(zip(("metric", "p"), metric, strict=False))
    ours = ExactNeighborsTransformer(4, mode=mode, **names)
    theirs = KNeighborsTransformer(n_neighbors=4, mode=mode, algorithm="brute", **names)
    for one, other in (
        (ours.fit_transform(rows), theirs.fit_transform(rows)),
        (ours.transform(rows[:50] + 1), theirs.transform(rows[:50] + 1)),
        (ours.kneighbors_graph(), theirs.kneighbors_graph()),
        (ours.kneighbors_graph(rows[:9], 7, "distance"), theirs.kneighbors_graph(rows[:9], 7, "distance")),
    ):
        assert type(one) is type(other) and one.shape == other.shape and one.dtype == other.dtype == np.float64
        (our_columns, our_values), (their_columns, their_values) = entries(one), entries(other)
        np.testing.assert_array_equal(our_columns, their_columns)
        # Their distance of a row to itself may be a rounding error, of which the root is larger.
        np.testing.assert_allclose(our_values, their_values, rtol=1e-12, atol=1e-6)
    for one, other in (
        (ours.kneighbors(), theirs.kneighbors()),
        (ours.kneighbors(rows[:20] + 1, n_neighbors=2), theirs.kneighbors(rows[:20] + 1, n_neighbors=2)),
    ):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(one[1], other[1])
    np.testing.assert_array_equal(ours.kneighbors(return_distance=False), ours.kneighbors()[1])


def test_a_row_comes_first_among_its_own_neighbours_also_among_its_copies(rows):
    copies = np.vstack([rows[:5], np.repeat(rows[:1], 20, axis=0)])
    transformer = ExactNeighborsTransformer(3)
    columns, values = entries(transformer.fit_transform(copies))
    assert columns[:, 0].tolist() == list(range(25))
    assert (values[:, 0] == 0).all() and (values[5:] == 0).all()
    np.testing.assert_array_equal(columns[:, 1:], exactknn.knn(copies, k=3)[1])
    assert columns[24].tolist() == [24, 0, 5, 6]
    # Other rows: the lowest numbers of those at equal distance.
    assert entries(transformer.transform(copies))[0][24].tolist() == [0, 5, 6, 7]
    ones, alone = ExactNeighborsTransformer(3, mode="connectivity"), ExactNeighborsTransformer(1, mode="connectivity")
    assert entries(ones.fit_transform(copies))[0][24].tolist() == [24, 0, 5]
    assert alone.fit_transform(copies[:1]).toarray().tolist() == [[1.0]]
    np.testing.assert_array_equal(alone.fit_transform(copies).toarray(), np.eye(25))


def test_a_row_of_zeros_is_its_own_neighbour_under_the_cosine():
    graph = ExactNeighborsTransformer(1, metric="cosine").fit_transform([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    columns, values = entries(graph)
    assert columns.tolist() == [[0, 1], [1, 2], [2, 1]] and values.tolist() == [[0, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize(("given", "result"), [("f4", "f4"), ("f8", "f8"), ("f2", "f4"), ("i4", "f8"), (">f4", "f8")])
@pytest.mark.parametrize("mode", ["distance", "connectivity"])
def test_types(given, result, mode):
    data = (np.arange(12).reshape(6, 2) ** 2).astype(given)
    graph = ExactNeighborsTransformer(2, mode=mode).fit_transform(data)
    assert graph.dtype == np.dtype(result)
    assert graph.indices.dtype == np.int32
    distances, indices = exactknn.knn(data.astype(result), k=1, metric="euclidean")
    assert entries(graph)[0][:, 1].tolist() == indices[:, 0].tolist()
    assert mode == "connectivity" or entries(graph)[1][:, 1].tolist() == distances[:, 0].tolist()


def test_fitted_rows_are_kept_without_a_copy(rows):
    single = rows.astype(np.float32)
    assert np.shares_memory(ExactNeighborsTransformer().fit(single)._fit_X, single)


def test_attributes_names_and_state(rows):
    transformer = ExactNeighborsTransformer(2, metric="p", p=3).fit(rows)
    assert (transformer.n_features_in_, transformer.n_samples_fit_) == (8, 300)
    assert (transformer.effective_metric_, transformer.effective_metric_params_) == ("minkowski", {"p": 3.0})
    assert not hasattr(transformer, "feature_names_in_")
    names = transformer.get_feature_names_out()
    assert len(names) == 300 and names[299] == "exactneighborstransformer299"
    again = pickle.loads(pickle.dumps(transformer))
    np.testing.assert_array_equal(again.transform(rows[:9]).toarray(), transformer.transform(rows[:9]).toarray())
    assert clone(transformer).get_params() == {
        "n_neighbors": 2,
        "mode": "distance",
        "metric": "p",
        "p": 3,
        "n_jobs": None,
    }
    # What was fitted stays until the next fit, apart from n_neighbors and mode.
    transformer.set_params(metric="cosine", p=None)
    np.testing.assert_array_equal(again.kneighbors()[0], transformer.kneighbors()[0])


def test_the_other_kind_of_sparse_matrix(rows):
    if "sparse_interface" not in sklearn.get_config():
        pytest.skip("this scikit-learn has one kind")
    transformer = ExactNeighborsTransformer().fit(rows)
    assert isinstance(transformer.transform(rows), sparse.csr_matrix)
    with sklearn.config_context(sparse_interface="sparray"):
        assert isinstance(transformer.transform(rows), sparse.csr_array)


def test_n_jobs_are_threads(rows, monkeypatch):
    seen = []

    def knn(*arguments, num_threads, **options):
        seen.append(num_threads)
        return exactknn.knn(*arguments, num_threads=num_threads, **options)

    monkeypatch.setattr("exactknn.sklearn.knn", knn)
    graphs = [
        ExactNeighborsTransformer(n_jobs=jobs).fit_transform(rows).toarray() for jobs in (None, 1, 3, -1, np.int8(2))
    ]
    assert seen == [None, 1, 3, joblib.cpu_count(), 2]
    assert all((graph == graphs[0]).all() for graph in graphs)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"n_neighbors": 0}, ValueError, "n_neighbors must be at least 1, got 0"),
        ({"n_neighbors": 2.0}, TypeError, "n_neighbors must be an integer, got 2.0"),
        ({"mode": "distances"}, ValueError, "mode must be one of distance, connectivity, got 'distances'"),
        ({"metric": "hamming"}, ValueError, "metric must be one of euclidean, sqeuclidean, .*, p, got 'hamming'"),
        ({"metric": len}, ValueError, "metric must be one of .* got <built-in function len>"),
        ({"metric": ["l2"]}, ValueError, r"metric must be one of .* got \['l2'\]"),
        ({"metric": "inner_product"}, ValueError, "metric must be a distance, got 'inner_product'"),
        ({"p": 2}, ValueError, "p is for metric='minkowski' only, got p=2 with metric='euclidean'"),
        ({"metric": "minkowski", "p": 0}, ValueError, "p must be a number above 0"),
        ({"n_jobs": 0}, ValueError, "n_jobs must be .* got 0"),
        ({"n_jobs": 1.5}, TypeError, "n_jobs must be an integer or None, got 1.5"),
    ],
)
def test_parameters_are_checked_in_fit(rows, parameters, error, message):
    with pytest.raises(error, match=message):
        ExactNeighborsTransformer(**parameters).fit(rows)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"n_neighbors": 0}, ValueError, "n_neighbors must be at least 1, got 0"),
        ({"n_neighbors": True}, TypeError, "n_neighbors must be an integer, got True"),
        ({"n_neighbors": "3"}, TypeError, "n_neighbors must be an integer, got '3'"),
        ({"n_neighbors": 2.5}, TypeError, "n_neighbors must be an integer, got 2.5"),
        ({"mode": np.array(["distance", "x"])}, ValueError, "mode must be one of distance, connectivity"),
    ],
)
def test_parameters_that_were_set_later_are_checked_in_transform(rows, changed, error, message):
    transformer = ExactNeighborsTransformer(3).fit(rows).set_params(**changed)
    with pytest.raises(error, match=message):
        transformer.transform(rows)


def test_too_few_rows_are_named(rows):
    transformer = ExactNeighborsTransformer(5).fit(rows[:5])
    with pytest.raises(ValueError, match="each row needs 6 neighbours, but with n_samples = 5 there are 5 fitted"):
        transformer.transform(rows)
    with pytest.raises(ValueError, match="each row needs 5 neighbours, but with n_samples = 5 there are 4 other"):
        transformer.fit_transform(rows[:5])
    with pytest.raises(ValueError, match="n_neighbors is too large: each row needs 9 neighbours"):
        transformer.kneighbors(n_neighbors=9)
    with pytest.raises(ValueError, match="n_neighbors must be at least 1, got 0"):
        transformer.kneighbors(n_neighbors=0)
    with pytest.raises(ValueError, match="mode must be one of"):
        transformer.kneighbors_graph(mode="both")


def test_data_is_refused_in_the_words_of_scikit_learn(rows):
    transformer = ExactNeighborsTransformer()
    with pytest.raises(TypeError, match="Sparse data was passed"):
        transformer.fit(sparse.csr_matrix(rows))
    with pytest.raises(ValueError, match="Input X contains NaN"):
        transformer.fit(np.where(rows == rows[7, 3], np.nan, rows))
    with pytest.raises(ValueError, match="X has 3 features, but ExactNeighborsTransformer is expecting 8 features"):
        transformer.fit(rows).transform(rows[:, :3])
    with pytest.raises(sklearn.exceptions.NotFittedError):
        ExactNeighborsTransformer().transform(rows)


@pytest.mark.parametrize(
    "step",
    [
        Isomap(n_neighbors=10, metric="precomputed"),
        SpectralEmbedding(n_neighbors=10, affinity="precomputed_nearest_neighbors", random_state=0),
        TSNE(metric="precomputed", init="random", perplexity=5, max_iter=300, random_state=0),
    ],
    ids=lambda step: type(step).__name__,
)
def test_manifolds_see_the_neighbours(digits, step):
    data, _ = digits
    wanted = 16 if isinstance(step, TSNE) else 10
    searches = ExactNeighborsTransformer(wanted), KNeighborsTransformer(n_neighbors=wanted, algorithm="brute")
    with threadpool_limits(1):  # t-SNE's many short parallel loops crawl where other processes use the cores
        embedded, plain = (make_pipeline(search, clone(step)).fit_transform(data) for search in searches)
    assert trustworthiness(data, embedded) == pytest.approx(trustworthiness(data, plain), abs=0.01)
    assert trustworthiness(data, embedded) > 0.85


def test_dbscan_finds_the_clusters_of_dbscan(digits):
    data, _ = digits
    clusters = make_pipeline(ExactNeighborsTransformer(100), DBSCAN(eps=24, metric="precomputed")).fit_predict(data)
    np.testing.assert_array_equal(clusters, DBSCAN(eps=24).fit_predict(data))
    assert len(set(clusters)) > 5


def test_a_classifier_on_the_graph_is_the_classifier_on_the_rows(digits):
    data, labels = digits
    pipeline = make_pipeline(ExactNeighborsTransformer(10), KNeighborsClassifier(5, metric="precomputed"))
    plain = KNeighborsClassifier(5, algorithm="brute").fit(data[:400], labels[:400])
    np.testing.assert_array_equal(
        pipeline.fit(data[:400], labels[:400]).predict_proba(data[400:]), plain.predict_proba(data[400:])
    )
    grid = {"kneighborsclassifier__n_neighbors": [1, 5, 9], "exactneighborstransformer__metric": ["l2", "chebyshev"]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(data, labels)
    assert search.best_params_["exactneighborstransformer__metric"] == "l2"
    assert search.best_score_ > 0.9


@pytest.mark.parametrize("kind", [np.array, list, tuple])
def test_integers_that_float64_would_round_are_refused(kind):
    rows = kind([[0], [2**53 + 1]])
    with pytest.raises(TypeError, match=r"X must hold .* got the integer 9007199254740993 beyond 2\*\*53 in row 1"):
        ExactNeighborsTransformer(1).fit(rows)
    with pytest.raises(TypeError, match=r"X must hold .* in row 1"):
        ExactNeighborsTransformer(1).fit([[0], [2**53]]).transform(rows)
