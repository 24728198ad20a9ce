"""``exactknn.recall`` against sets in plain Python."""

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exactknn
from exactknn import recall


def by_sets(found, true, found_distances=None, true_distances=None, tolerance=0.0):
    shares = []
    for row, wanted in enumerate(true.tolist()):
        hits = set(found[row].tolist()) & set(wanted)
        if found_distances is not None:
            bound = max(true_distances[row].tolist()) + tolerance
            pairs = zip(found[row].tolist(), found_distances[row].tolist(), strict=True)
            hits |= {i for i, distance in pairs if i >= 0 and distance <= bound}
        shares.append(min(len(hits), len(wanted)) / len(wanted))
    return shares


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 11), st.integers(1, 7), st.sampled_from([0.0, 1.0]))
def test_it_is_what_sets_give(seed, queries, columns, k, tolerance):
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 5, (queries, 12))
    true = np.lexsort((rng.random((queries, 12)), table))[:, :k]  # ties in any order
    found = rng.integers(-2, 12, (queries, columns))
    near = np.where(found < 0, 9, np.take_along_axis(table, np.maximum(found, 0), axis=1))
    distances = near.astype(np.float32), np.take_along_axis(table, true, axis=1).astype("f8")
    assert recall(found, true, per_query=True).tolist() == by_sets(found, true)
    shares = recall(found, true, *distances, tolerance=tolerance, per_query=True)
    assert shares.tolist() == by_sets(found, true, *distances, tolerance)
    assert recall(found, true, *distances, tolerance=tolerance) == pytest.approx(shares.mean(), rel=1e-15)


@pytest.mark.parametrize("found_type", ["i1", "i4", "i8", ">i4", "u1", "u4", "u8"])
@pytest.mark.parametrize("true_type", ["i2", "i8", "u4", "u8"])
def test_every_integer_type_means_the_same(found_type, true_type):
    found = np.array([[3, 5, -1, 9], [-1, -1, 0, 1]]).astype(found_type)  # of an unsigned type: its largest number
    true = np.array([[9, 3, 4], [1, 2, 0]], true_type)
    assert recall(found, true, per_query=True).tolist() == [2 / 3, 2 / 3]
    distances = np.array([[1, 2, 0, 1], [0, 0, 1, 1]], "f4"), np.array([[1, 1, 2], [1, 1, 1]], "f4")
    assert recall(found, true, *distances, per_query=True).tolist() == [1.0, 2 / 3]


def test_fewer_and_more_found_columns_than_true_ones():
    true = [[0, 1, 2, 3]]
    assert recall([[0]], true) == 0.25
    assert recall(np.empty((1, 0), np.int64), true) == 0.0
    assert recall([[9, 8, 7, 6, 5, 3, 2, 1, 0]], true) == 1.0
    # More tie than are wanted: no more than all of them count.
    assert recall([[4, 5, 6, 7, 8]], true, [[1.0] * 5], [[1.0] * 4]) == 1.0


def test_a_repeated_id_and_an_empty_place_count_once_and_never():
    assert recall([[0, 0, 0]], [[0, 1, 2]]) == 1 / 3
    assert recall([[7, 7, -1]], [[0, 1, 2]], [[1.0, 1.0, 0.0]], [[1.0, 1.0, 1.0]]) == 1 / 3
    assert recall([[-5, np.iinfo(np.int64).min]], [[0, 1]]) == 0.0


def test_the_tolerance_is_added_to_the_largest_true_distance():
    arguments = [[5, 6]], [[0, 1]], [[1.0, 1.25]], [[0.5, 0.25]]  # ids that differ
    assert recall(*arguments) == 0.0
    assert recall(*arguments, tolerance=0.5) == 0.5
    assert recall(*arguments, tolerance=0.75) == 1.0
    assert recall([[5]], [[0]], [[np.nan]], [[1.0]]) == 0.0
    # Similarities with the opposite sign.
    assert recall([[5, 6]], [[0, 1]], [[-2.0, -1.0]], [[-3.0, -2.0]]) == 0.5


def test_the_distances_are_compared_as_float64():
    third = 1 / 3  # float32 rounds it up
    assert recall([[5]], [[0]], np.array([[third]], "f4"), np.array([[third]])) == 0.0
    assert recall([[5]], [[0]], np.array([[third]], "f4"), np.array([[third]]), tolerance=1e-8) == 1.0
    with pytest.raises(ValueError, match=r"got 0\.3333333333333333 in row 0 for id 5, which is not in true_ids"):
        recall([[5]], [[0]], np.array([[third]]), np.array([[third]], "f4"))


def test_blocks_of_queries_do_not_show(monkeypatch):
    rng = np.random.default_rng(0)
    table = rng.integers(0, 4, (50, 9)).astype("f8")
    true = np.argsort(table, axis=1)[:, :4]
    found = rng.integers(0, 9, (50, 5))
    distances = np.take_along_axis(table, found, axis=1), np.take_along_axis(table, true, axis=1)
    whole = recall(found, true, *distances, per_query=True)
    monkeypatch.setattr("exactknn._recall._BLOCK", 27)
    assert (
        recall(found, true, *distances, per_query=True).tolist() == whole.tolist() == by_sets(found, true, *distances)
    )
    true[40, 1] = true[40, 3]
    with pytest.raises(ValueError, match=rf"got {true[40, 1]} twice in row 40"):
        recall(found, true)
    with pytest.raises(ValueError, match=r"true_ids .* got -1 in row 49"):
        recall(found, np.vstack([found[:49, :1], [[-1]]]))


def test_distances_of_codes_are_refused_and_vectors_are_measured():
    rows, query = np.array([[0.0], [1.0], [3.0]]), np.array([[0.2]])
    distances, true = exactknn.knn(query, rows, 2)  # rows 0 and 1
    assert recall([[0, 2]], true) == recall([[0, 2]], true, query=query, reference=rows) == 0.5
    with pytest.raises(
        ValueError, match=r"found_distances must be .* got 0\.0 in row 0 for id 0, whose true distance is"
    ):
        recall([[0, 2]], true, [[0.0, 0.5]], distances)  # the codes are 0 and 1
    with pytest.raises(
        ValueError, match=r"got 0\.5 in row 0 for id 2, which is not in true_ids; the largest there is 0"
    ):
        recall([[0, 2]], true, [[distances[0, 0], 0.5]], distances)


@pytest.mark.parametrize(("metric", "p"), [("sqeuclidean", None), ("inner_product", None), ("minkowski", 3.0)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_vectors_give_what_their_distances_give(metric, p, dtype):
    rng = np.random.default_rng(1)
    rows, query = rng.integers(-1, 2, (40, 2)).astype(dtype), rng.integers(-1, 2, (9, 2)).astype(dtype)
    distances, true = exactknn.knn(query, rows, 5, metric=metric, p=p)
    every, ids = exactknn.knn(query, rows, None, metric=metric, p=p)
    table = np.take_along_axis(every, np.argsort(ids, axis=1), axis=1)
    found = np.concatenate([true[:, :2], rng.integers(0, 40, (9, 4)), np.full((9, 1), -1)], axis=1)
    near = np.where(found < 0, np.nan, np.take_along_axis(table, np.maximum(found, 0), axis=1))
    sign = -1 if metric == "inner_product" else 1
    wanted = recall(found, true, sign * near, sign * distances, per_query=True)
    measured = recall(found, true, query=query, reference=rows, metric=metric, p=p, per_query=True)
    assert measured.tolist() == wanted.tolist() and (wanted > recall(found, true, per_query=True)).any()


def test_vectors_are_checked():
    rows = torch.tensor([[0.0], [np.inf], [2.0]])
    with pytest.raises(TypeError, match="query and reference must be given together, got no reference"):
        recall([[0]], [[1]], query=rows)
    with pytest.raises(TypeError, match="must not be given with query and reference"):
        recall([[0]], [[1]], [[0.0]], [[0.0]], query=rows, reference=rows)
    with pytest.raises(ValueError, match="query must have a row for each of the 1 rows of true_ids, got 3"):
        recall([[0]], [[1]], query=rows[[0, 0, 2]], reference=rows[[0, 2]])
    for odd in (rows, rows.bfloat16()):
        with pytest.raises(ValueError, match="reference must be finite, got NaN or infinity in row 1"):
            recall([[0]], [[1]], query=odd[:1], reference=odd)
    with pytest.raises(ValueError, match="found_ids must be below the 2 rows of reference, got 7 in row 0"):
        recall([[0, 7]], [[1]], query=rows[:1], reference=rows[::2])
    with pytest.raises(ValueError, match="metric must be one of"):
        recall([[0]], [[1]], query=rows, reference=rows, metric="dot")


def test_tensors_and_a_real_approximate_index():
    rows = torch.randn(3000, 16, generator=torch.Generator().manual_seed(0))
    distances, indices = exactknn.knn(rows[:200], rows, 10)
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(16), 16, 30)
    index.train(rows.numpy())
    index.add(rows.numpy())
    recalls = []
    for index.nprobe in (1, 5, 30):
        near, found = (torch.from_numpy(array) for array in index.search(rows[:200].numpy(), 10))
        recalls.append(recall(found, indices))
        with torch.inference_mode():
            assert recall(found, torch.from_numpy(indices), near, distances, tolerance=1e-3) >= recalls[-1]
            assert recall(found, indices, query=rows[:200], reference=rows) == recalls[-1]
    assert recalls == sorted(recalls) and recalls[0] < 0.9 and recalls[-1] == 1.0
    half = torch.tensor([[1.0]], dtype=torch.bfloat16, requires_grad=True)
    assert recall(torch.tensor([[5]]), torch.tensor([[0]]), half, half) == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2], [[1, 2]]), ValueError, r"found_ids must be 2-D \(queries, ids\), got shape \(2,\)"),
        (([[1.0]], [[1]]), TypeError, "found_ids must hold integers, got float64"),
        (([[1]], [[True]]), TypeError, "true_ids must hold integers, got bool"),
        (([[1], [2]], [[1]]), ValueError, "found_ids must have a row for each of the 1 rows of true_ids, got 2"),
        (([[1], [2, 3]], [[1]]), ValueError, "found_ids must have rows of equal length"),
        (
            (np.empty((0, 3), int), np.empty((0, 3), int)),
            ValueError,
            r"at least one row and one column, got shape \(0, 3",
        ),
        (([[1]], np.empty((1, 0), int)), ValueError, r"at least one row and one column, got shape \(1, 0"),
        (
            ([[1, 2]], [[4, 4]]),
            ValueError,
            "true_ids must be different numbers of at least 0 in each row, got 4 twice in",
        ),
        (([[1, 2]], [[4, -1]]), ValueError, "true_ids .* got -1 in row 0"),
        (([[1]], np.array([[2**64 - 1]], np.uint64)), ValueError, "true_ids .* got -1 in row 0"),
        (
            (np.array([[2**63]], np.uint64), [[1]]),
            ValueError,
            "found_ids must be below 2[*]{2}63, got 9223372036854775808",
        ),
        (([[1]], [[1]], [[1.0]]), TypeError, "given together, got no true_distances"),
        (([[1]], [[1]], None, [[1.0]]), TypeError, "given together, got no found_distances"),
        (
            ([[1]], [[1]], [[1.0, 2.0]], [[1.0]]),
            ValueError,
            r"found_distances must have the shape \(1, 1\) of found_ids",
        ),
        (([[1]], [[1]], [[1.0]], [[np.inf]]), ValueError, "true_distances must be finite, got inf in row 0"),
        (([[1]], [[1]], [[1.0]], [["x"]]), TypeError, "true_distances must hold float32"),
        ((np.ma.array([[1]]), [[1]]), TypeError, "found_ids must not be a masked array"),
        ((torch.ones(1, 1).bfloat16(), [[1]]), TypeError, "found_ids must be a dense tensor .* got torch.bfloat16"),
        (
            (torch.ones(1, 1, device="meta", dtype=int), [[1]]),
            ValueError,
            "found_ids must be in CPU memory, got .* meta",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        recall(*arguments)


def test_options_are_checked():
    with pytest.raises(ValueError, match="tolerance must be at least 0, got -1"):
        recall([[1]], [[1]], tolerance=-1)
    with pytest.raises(ValueError, match="tolerance must be a finite number"):
        recall([[1]], [[1]], tolerance=np.inf)
    with pytest.raises(TypeError, match="per_query must be True or False"):
        recall([[1]], [[1]], per_query=1)
