"""``RustKNN`` with references that it keeps in an index."""

import copy
import logging
import pickle

import numpy as np
import pytest
import torch

import exactknn
from exactknn.distances import CosineSimilarity, LpDistance, SNRDistance
from exactknn.evaluation import AccuracyCalculator, RustKNN


def rows(n, d=8, seed=0, dtype=torch.float32):
    return torch.randn(n, d, generator=torch.manual_seed(seed), dtype=torch.float64).to(dtype)


def kept(*arguments, **options):
    return RustKNN(*arguments, reset_before=False, reset_after=False, **options)


def assert_same(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        assert (got.dtype, got.device) == (want.dtype, want.device)
        assert got.equal(want)


def test_the_defaults_keep_nothing():
    knn = RustKNN()
    assert (knn.reset_before, knn.reset_after, knn.index, knn.keeps_index) == (True, True, None, False)
    reference = rows(20)
    knn(rows(3, seed=1), 2, reference)
    assert knn.index is None
    with pytest.raises(ValueError, match="reference must be given with reset_before=True"):
        knn(rows(3), 2)
    assert "reset" not in repr(knn)
    assert repr(kept()).endswith("reset_before=False, reset_after=False)")


def test_train_add_save_and_load(tmp_path):
    embeddings, query = rows(70), rows(10, seed=1)
    knn = kept()
    knn.train(embeddings[:50])
    knn.add(embeddings[50:])
    found = knn(query, 10)
    assert_same(found, RustKNN()(query, 10, embeddings))
    knn.save(tmp_path / "rows.index")
    other = kept()
    other.load(tmp_path / "rows.index")
    assert_same(other(query, 10), found)
    assert isinstance(other.index, exactknn.Index)
    assert len(other.index) == 70


@pytest.mark.parametrize(
    "distance",
    [
        None,
        LpDistance(),
        LpDistance(power=2),
        CosineSimilarity(),
        LpDistance(p=1, normalize_embeddings=False),
        LpDistance(p=3, normalize_embeddings=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_answers_are_those_without_an_index(distance, dtype):
    reference, query = rows(90, dtype=dtype), rows(7, seed=1, dtype=dtype)
    wanted = RustKNN(distance)(query, 5, reference)
    once = RustKNN(distance, reset_after=False)
    assert_same(once(query, 5, reference), wanted)
    assert len(once.index) == 90
    knn = kept(distance)
    knn.train(reference[:60].numpy() if dtype != torch.bfloat16 else reference[:60])
    assert_same(knn(query, 5, reference[60:]), wanted)
    assert_same(knn(query, 5), wanted)
    own = RustKNN(distance)(reference[:20], 4, reference, True)
    assert_same(knn(reference[:20], 4, ref_includes_query=True), own)
    assert all(row not in found for row, found in enumerate(own[1].tolist()))


def test_rows_accumulate_and_are_numbered_on():
    reference, query = rows(12), rows(4, seed=1)
    knn = kept()
    knn.train(reference)
    _, indices = knn(query, 4, reference)
    assert len(knn.index) == 24
    # Each row is there twice, and the earlier comes first.
    assert (indices[:, 1::2] - indices[:, ::2] == 12).all()
    assert indices[:, ::2].equal(RustKNN()(query, 2, reference)[1])
    knn.train(reference[:3])
    assert len(knn.index) == 3
    knn.reset()
    assert knn.index is None


@pytest.mark.parametrize("k", [3, 50])
def test_the_index_is_dropped_after_a_call_failed_or_not(k):
    knn = RustKNN(reset_before=False)
    knn.train(rows(10))
    if k == 3:
        assert_same(knn(rows(2, seed=1), k), RustKNN()(rows(2, seed=1), k, rows(10)))
    else:
        with pytest.raises(ValueError, match="k must be at most the number of references, got k=50 with 10 references"):
            knn(rows(2, seed=1), k)
    assert knn.index is None


def test_each_call_has_an_index_of_its_own():
    knn = RustKNN(reset_after=False)
    for seed in (1, 2):
        query, reference = rows(4), rows(12, seed=seed)
        assert_same(knn(query, 3, reference), RustKNN()(query, 3, reference))
        assert len(knn.index) == 12
    last = knn.index
    with pytest.raises(ValueError, match="reference must be given with reset_before=True"):
        knn(rows(4), 3)
    with pytest.raises(ValueError, match="reference must be finite, got NaN in row 0, column 0"):
        knn(rows(4), 3, rows(5) * torch.nan)
    assert knn.index is last


@pytest.mark.parametrize(
    ("query", "k", "own", "error", "message"),
    [
        (rows(2).numpy(), 1, False, TypeError, "query must be a torch tensor, got ndarray"),
        (rows(2)[0], 1, False, ValueError, "query must be 2-D"),
        (rows(2, 4), 1, False, ValueError, "same number of columns, got 4 and 8"),
        (rows(2).double(), 1, False, TypeError, "query must be float32 or half precision for an index of float32 rows"),
        (rows(2).long(), 1, False, TypeError, "query must hold float32"),
        (rows(2) * torch.nan, 1, False, ValueError, "query must be finite, got NaN in row 0"),
        (rows(2), 1.0, False, TypeError, "k must be an integer"),
        (rows(2), -1, False, ValueError, "k must be at least 0"),
        (rows(2), 9, False, ValueError, "k must be at most the number of references, got k=9 with 8 references"),
        (rows(2), 8, True, ValueError, "without the query itself, got k=8 with 8 references"),
        (rows(9), 1, True, ValueError, "the index must begin with the queries when ref_includes_query is set"),
    ],
)
def test_a_call_that_is_refused_adds_no_row(query, k, own, error, message):
    knn = kept()
    knn.train(rows(5))
    with pytest.raises(error, match=message):
        knn(query, k, rows(3, seed=1), own)
    assert len(knn.index) == 5


@pytest.mark.parametrize("query", [rows(2, 4), rows(2).double(), rows(2) * torch.nan, rows(2).long()])
def test_a_call_that_is_refused_leaves_the_index_of_the_call_before(query):
    knn = RustKNN(reset_after=False)
    knn(rows(2), 1, rows(5))
    before = knn.index
    with pytest.raises((TypeError, ValueError), match=r"query|columns"):
        knn(query, 1, rows(3, seed=1))
    assert knn.index is before


def test_references_that_are_refused():
    knn = kept()
    knn.train(rows(5))
    for reference, error, message in (
        (rows(3, 4), ValueError, "reference must have 8 columns like the rows of the index, got 4"),
        (
            rows(3).double(),
            TypeError,
            "reference must be of a type that float32, the type of the first rows, represents exactly",
        ),
        (rows(3) * torch.inf, ValueError, "reference must be finite"),
        (rows(3)[0], ValueError, "reference must be 2-D"),
    ):
        with pytest.raises(error, match=message):
            knn(rows(2), 1, reference)
    assert len(knn.index) == 5


def test_no_index(tmp_path):
    knn = kept()
    for call, purpose in (
        (lambda: knn(rows(2), 1), "search"),
        (lambda: knn(rows(2), 1, rows(5)), "search"),
        (lambda: knn.add(rows(2)), "add to"),
        (lambda: knn.save(tmp_path / "none"), "save"),
    ):
        with pytest.raises(ValueError, match=f"there is no index to {purpose}: call train"):
            call()
    with pytest.raises(FileNotFoundError):
        knn.load(tmp_path / "none")


@pytest.mark.parametrize("options", [{"reset_before": False}, {"reset_after": False}])
def test_a_distance_that_no_index_has(options):
    with pytest.raises(ValueError, match="distance must be supported by the Rust core to be used with an index: SNR"):
        RustKNN(SNRDistance(), **options)
    with pytest.raises(TypeError, match="must be True or False"):
        RustKNN(**dict.fromkeys(options, 0))
    with pytest.raises(ValueError, match="to be used with an index"):
        RustKNN(SNRDistance()).train(rows(3))


def test_an_index_of_another_metric(tmp_path):
    cosine = kept(CosineSimilarity())
    cosine.train(rows(5))
    cosine.save(tmp_path / "cosine")
    knn = kept()
    with pytest.raises(ValueError, match=r"the index must have the metric of .*sqeuclidean.* got .*cosine_similarity"):
        knn.load(tmp_path / "cosine")
    assert knn.index is None
    knn.index = cosine.index
    with pytest.raises(ValueError, match="the index must have the metric"):
        knn(rows(2), 1)
    # One of the same measure by another name.
    manhattan = kept(LpDistance(p=1, normalize_embeddings=False))
    manhattan.index = exactknn.Index("cityblock")
    manhattan.add(rows(5))
    assert manhattan(rows(5), 1)[1].ravel().tolist() == [0, 1, 2, 3, 4]


def test_copies_and_pickles():
    knn = kept(CosineSimilarity(), num_threads=1)
    knn.train(rows(30))
    wanted = knn(rows(3, seed=1), 4)
    for other in (copy.deepcopy(knn), pickle.loads(pickle.dumps(knn))):
        assert_same(other(rows(3, seed=1), 4, rows(2, seed=2)), kept_answer(rows(3, seed=1), 4))
        assert len(other.index) == 32
    assert len(knn.index) == 30
    assert_same(knn(rows(3, seed=1), 4), wanted)


def kept_answer(query, k):
    return RustKNN(CosineSimilarity())(query, k, torch.cat([rows(30), rows(2, seed=2)]))


def test_layouts_and_modes():
    reference = rows(20, 16)[:, ::2]
    with torch.inference_mode():
        query = rows(5, seed=1) * 1
    knn = kept()
    knn.train(reference.requires_grad_())
    wanted = RustKNN()(query, 3, reference)
    assert_same(knn(query, 3), wanted)
    distances, _ = knn(query.clone().requires_grad_(), 3)
    assert not distances.requires_grad


def test_a_search_is_logged(caplog):
    knn = kept()
    knn.train(rows(20))
    with caplog.at_level(logging.INFO, logger="exactknn"):
        knn(rows(3), 2, rows(4))
    assert "k-nn search with k=2: 3 queries among 24 references" in caplog.text


# --- in the calculator ------------------------------------------------------------------------------------------------


def labelled(n, seed=0):
    return rows(n, seed=seed), torch.arange(n) % 5


@pytest.mark.parametrize("k", [None, 1, "max_bin_count"])
def test_the_calculator_refuses_rows_of_earlier_calls(k):
    embeddings, labels = labelled(40)
    include = ("mean_average_precision", "precision_at_1", "mean_average_precision_at_r")
    knn = kept()
    knn.train(rows(200, seed=3) * 0.1)
    calculator = AccuracyCalculator(include=include, k=k, knn_func=knn)
    with pytest.raises(ValueError, match="knn_func"):
        calculator.get_accuracy(embeddings, labels)
    # Asked once, with the rows of this call behind those of earlier ones.
    assert len(knn.index) == 240


@pytest.mark.parametrize("k", [None, 3, "max_bin_count"])
def test_the_calculator_searches_the_index_of_its_call(k):
    embeddings, labels = labelled(40)
    wanted = AccuracyCalculator(k=k, knn_func=RustKNN()).get_accuracy(embeddings, labels)
    knn = RustKNN(reset_after=False)
    assert AccuracyCalculator(k=k, knn_func=knn).get_accuracy(embeddings, labels) == wanted
    assert len(knn.index) == 40
    assert np.array_equal(knn.index.rows(), embeddings.numpy())
