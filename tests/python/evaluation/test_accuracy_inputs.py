"""What the calculator takes and refuses, and the selection of its metrics."""

import inspect
import math

import numpy as np
import pytest
import torch
from torch import tensor

from exactknn.distances import DotProductSimilarity, LpDistance
from exactknn.evaluation import (
    AccuracyCalculator,
    CustomKNN,
    RetrievalMetric,
    knn_vote_metric,
    ndcg_metric,
)
from tests.python.evaluation.accuracy_helpers import LINE, LINE_LABELS, LINE_MEANS, NAMES, NAN, check, column, squared


def test_arguments_by_position():
    assert " ".join(inspect.signature(AccuracyCalculator).parameters) == (
        "include exclude avg_of_avgs return_per_class k label_comparison_fn device knn_func kmeans_func custom_metrics"
    )
    assert " ".join(inspect.signature(AccuracyCalculator().get_accuracy).parameters) == (
        "query query_labels reference reference_labels ref_includes_query include exclude ids reference_ids"
    )


@pytest.mark.parametrize(
    ("query", "reference", "wanted"),
    [
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.int64, torch.bool, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float16, torch.float64),
        (torch.float64, torch.float64, torch.float64),
    ],
)
def test_embeddings_are_searched_in_a_common_type(query, reference, wanted):
    def knn_func(*arguments):
        given.extend((arguments[0].dtype, arguments[2].dtype))
        return squared()(*arguments)

    given = []
    calculator = AccuracyCalculator(include=("precision_at_1",), knn_func=knn_func)
    calculator.get_accuracy(LINE.to(query), LINE_LABELS, LINE.to(reference), LINE_LABELS)
    assert given == [wanted, wanted]


@pytest.mark.parametrize(
    ("query", "reference", "wanted"),
    [
        (torch.int32, torch.bool, torch.int64),
        (torch.uint8, torch.int64, torch.int64),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.int16, torch.float64),
    ],
)
def test_labels_are_compared_in_a_common_type(query, reference, wanted):
    def comparison(x, y):
        given.update((x.dtype, y.dtype))
        return x == y

    given = set()
    calculator = AccuracyCalculator(include=("precision_at_1",), label_comparison_fn=comparison)
    calculator.get_accuracy(LINE, LINE_LABELS.to(query), LINE.clone(), LINE_LABELS.to(reference))
    assert given == {wanted}


def test_neighbours_in_float64():
    far = 1e8 + torch.tensor([0, 1, 3, 10, 11, 13], dtype=torch.float64).unsqueeze(1)
    result = AccuracyCalculator(include=("precision_at_1",)).get_accuracy(far, [0, 0, 1, 2, 2, 1])
    assert result == {"precision_at_1": 4 / 6}


def test_layouts_of_memory_do_not_matter(make):
    generator = torch.manual_seed(8)
    embeddings, labels = torch.randn(40, 6, generator=generator), torch.arange(40) % 7
    wanted = make().get_accuracy(embeddings, labels)
    wide = torch.stack([embeddings, embeddings], dim=2)[:, :, 1]
    assert make().get_accuracy(embeddings.T.contiguous().T, labels) == wanted
    assert make().get_accuracy(wide, torch.stack([labels, labels], dim=1)[:, 0]) == wanted
    assert make().get_accuracy(wide[:20], labels[:20], wide, labels, ref_includes_query=True) == make().get_accuracy(
        embeddings[:20], labels[:20], embeddings, labels, ref_includes_query=True
    )
    one = torch.ones(1, 3).expand(6, 3)
    assert make(include=("precision_at_1",)).get_accuracy(one, tensor([1]).expand(6)) == {"precision_at_1": 1.0}
    assert torch.equal(one, torch.ones(6, 3))


def test_arrays_tensors_and_lists_mix():
    wanted = AccuracyCalculator().get_accuracy(LINE, LINE_LABELS)
    for embeddings in (LINE.numpy(), LINE.double(), LINE.tolist(), LINE.half(), LINE.bfloat16(), LINE[:, 0:1].flip(1)):
        for labels in (
            LINE_LABELS.numpy(),
            LINE_LABELS.tolist(),
            LINE_LABELS.double(),
            LINE_LABELS.bfloat16(),
            LINE_LABELS.to(torch.uint8),
            LINE_LABELS.to(torch.uint64),
            torch.view_as_complex(torch.stack([LINE_LABELS, -LINE_LABELS], dim=1).double()).conj().imag,
        ):
            assert AccuracyCalculator().get_accuracy(embeddings, labels) == wanted
    frozen = LINE.numpy().copy()
    frozen.flags.writeable = False
    assert AccuracyCalculator().get_accuracy(frozen[::-1][::-1], LINE_LABELS.numpy()[::-1][::-1]) == wanted
    assert AccuracyCalculator().get_accuracy(LINE.numpy().astype(">f4"), LINE_LABELS.numpy().astype(">i8")) == wanted
    with torch.inference_mode():
        rows, labels = LINE.clone(), LINE_LABELS.clone()
    assert AccuracyCalculator().get_accuracy(rows, labels) == wanted
    assert AccuracyCalculator().get_accuracy(LINE.clone().requires_grad_(), LINE_LABELS) == wanted
    assert AccuracyCalculator(device="cpu").get_accuracy(LINE, LINE_LABELS) == wanted


def test_whole_numbers_are_searched_as_numbers():
    result = AccuracyCalculator(include=("precision_at_1",)).get_accuracy(
        np.array([[0], [1], [10], [11]], dtype=np.uint16), [True, True, False, False]
    )
    assert result == {"precision_at_1": 1.0}


def test_labels_of_two_types_are_compared_as_values():
    result = AccuracyCalculator(include=("precision_at_1",)).get_accuracy(
        column(0, 1), tensor([3, 4]), column(0.1, 1.1), tensor([3.0, 4.5])
    )
    assert result == {"precision_at_1": 1.0}
    result = AccuracyCalculator(include=("precision_at_1",), return_per_class=True)
    assert result.get_accuracy(column(0, 1), tensor([3, 4]), column(0.1, 1.1), tensor([3.0, 4.0])) == {
        "precision_at_1": [1.0, 1.0]
    }


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((LINE, LINE_LABELS[:5]), ValueError, "query and query_labels must have the same length, got 6 and 5"),
        ((LINE, LINE_LABELS, LINE, LINE_LABELS[:5]), ValueError, "reference and reference_labels .* got 6 and 5"),
        ((LINE, LINE_LABELS, LINE), ValueError, "reference_labels must be given together with reference"),
        ((LINE, LINE_LABELS, None, LINE_LABELS), ValueError, "reference must be given together with reference_labels"),
        ((LINE[:, 0], LINE_LABELS), ValueError, r"query must be 2-D \(rows, dimensions\), got shape \(6,\)"),
        ((LINE, LINE_LABELS, torch.zeros(2, 3), tensor([0, 1])), ValueError, "same dimension, got 1 and 3"),
        ((torch.empty(0, 3), tensor([])), ValueError, "query must have at least one row"),
        ((LINE, LINE_LABELS.unsqueeze(1)), ValueError, "label_comparison_fn"),
        ((LINE, LINE_LABELS.view(6, 1, 1)), ValueError, "query_labels must be 1-D"),
        ((column(0, NAN, 1), tensor([0, 0, 0])), ValueError, "query must be finite, got NaN or infinity in row 1"),
        (
            (LINE, LINE_LABELS, column(0, 1, math.inf), tensor([0, 0, 0])),
            ValueError,
            "reference must be finite, got NaN or infinity in row 2",
        ),
        ((column(0, 1), tensor([0.5, NAN])), ValueError, "query_labels must not be NaN.* row 1"),
        ((np.array([["a"]]), [0]), TypeError, "query must hold numbers"),
        ((LINE, np.array([b"a"] * 6)), TypeError, "query_labels must hold numbers"),
        ((LINE, np.full(6, 2**63, np.uint64)), ValueError, "64-bit"),
        ((LINE.to(torch.complex64), LINE_LABELS), TypeError, "query must hold real numbers"),
        ((LINE, LINE_LABELS.to(torch.complex64)), TypeError, "query_labels must hold real numbers"),
        (([[0.0], [1.0, 2.0]], [0, 0]), ValueError, "query must have rows of equal length"),
        ((column(0, 1), [0, [0, 1]]), ValueError, "query_labels must have rows of equal length"),
    ],
)
def test_what_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        AccuracyCalculator().get_accuracy(*arguments)


@pytest.mark.parametrize(
    ("reference", "labels", "message"),
    [
        (
            LINE[:3],
            LINE_LABELS[:3],
            "must begin with the queries when ref_includes_query is set: .* 6 references, got 3",
        ),
        (LINE.flip(0), LINE_LABELS, "row 0 differs"),
        (LINE + column(0, 0, 0, 1e-3, 0, 0), LINE_LABELS, "row 3 differs"),
        (LINE + column(1e-9, 0, 0, 0, 0, 0), LINE_LABELS, "row 0 differs"),
        (LINE, LINE_LABELS + tensor([0, 0, 0, 0, 1, 0]), "row 4 has 2 for 1"),
    ],
)
def test_a_reference_that_does_not_begin_with_the_queries(reference, labels, message):
    with pytest.raises(ValueError, match=message):
        AccuracyCalculator().get_accuracy(LINE, LINE_LABELS, reference, labels, ref_includes_query=True)


def test_own_rows_may_differ_by_rounding():
    rounded = LINE * (1 + 5e-6)
    result = AccuracyCalculator(include=("precision_at_1",)).get_accuracy(LINE, LINE_LABELS, rounded, LINE_LABELS, True)
    assert result == {"precision_at_1": 0.8}


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.zeros(6, 2, dtype=torch.long), r"shape \(6, 1\), got \(6, 2\)"),
        (torch.full((6, 1), -1), "from 0 to 5, got -1"),
        (torch.full((6, 1), 6), "from 0 to 5, got 6"),
        (torch.zeros(6, 1), "integer indices, got torch.float32"),
    ],
)
def test_impossible_answers_of_a_search_are_refused(indices, message):
    calculator = AccuracyCalculator(
        include=("precision_at_1",), knn_func=lambda *_: (torch.zeros(indices.shape), indices)
    )
    with pytest.raises(ValueError, match=message):
        calculator.get_accuracy(LINE, LINE_LABELS)
    calculator.knn_func = squared()
    assert calculator.get_accuracy(LINE, LINE_LABELS) == {"precision_at_1": 0.8}


@pytest.mark.parametrize(
    ("distances", "message"),
    [(torch.zeros(6), r"distances of shape \(6, 1\), got \(6,\)"), (None, "distances, got NoneType")],
)
def test_impossible_distances_of_a_search_are_refused(distances, message):
    calculator = AccuracyCalculator(
        include=("precision_at_1",), knn_func=lambda *_: (distances, torch.zeros(6, 1, dtype=torch.long))
    )
    with pytest.raises(ValueError, match=message):
        calculator.get_accuracy(LINE, LINE_LABELS)


def test_indices_of_another_integer_type_are_taken():
    def knn_func(*arguments):
        distances, indices = squared()(*arguments)
        return distances.numpy(), indices.int().numpy()

    check(AccuracyCalculator(knn_func=knn_func).get_accuracy(LINE, LINE_LABELS), LINE_MEANS)


def test_the_default_search_and_metrics():
    calculator = AccuracyCalculator()
    assert calculator.get_curr_metrics() == list(NAMES)
    assert type(calculator.knn_func) is CustomKNN
    assert calculator.knn_func.batch_size == 256
    distance = calculator.knn_func.distance
    assert (type(distance), distance.p, distance.power, distance.normalize_embeddings) == (LpDistance, 2, 2, False)
    assert calculator.description() == ""
    assert AccuracyCalculator(avg_of_avgs=True).description() == "avg_of_avgs"
    assert calculator.device is None


def test_include_and_exclude_at_construction_and_in_a_call():
    calculator = AccuracyCalculator(include=("precision_at_1", "r_precision", "ndcg_at_3"), exclude=["r_precision"])
    assert calculator.get_curr_metrics() == ["ndcg_at_3", "precision_at_1"]
    assert list(calculator.get_accuracy(LINE, LINE_LABELS, exclude=("ndcg_at_3",))) == ["precision_at_1"]
    assert calculator.get_curr_metrics() == ["precision_at_1"]
    # Known, but excluded at construction.
    assert calculator.get_accuracy(LINE, LINE_LABELS, include=("r_precision", "precision_at_10")) == {}
    assert list(calculator.get_accuracy(LINE, LINE_LABELS)) == ["ndcg_at_3", "precision_at_1"]
    assert list(AccuracyCalculator().get_accuracy(LINE, LINE_LABELS, include=("recall_at_2",))) == ["recall_at_2"]
    assert AccuracyCalculator(exclude=NAMES).get_accuracy(LINE, LINE_LABELS) == {}
    assert list(calculator.original_function_dict) == list(calculator.curr_function_dict)


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("precision_at_1", TypeError),
        ({"precision_at_1"}, TypeError),
        (("precision_at_x",), ValueError),
        (("precision_at_0",), ValueError),
        (("mean_average_precision_at_5",), ValueError),
        ((3,), ValueError),
    ],
)
def test_wrong_selections(argument, given, error):
    with pytest.raises(error, match=argument):
        AccuracyCalculator(**{argument: given})
    with pytest.raises(error, match=argument):
        AccuracyCalculator().get_accuracy(LINE, LINE_LABELS, **{argument: given})


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"r_precision.*recall_at_<k>.*knn_accuracy_at_<k>.*got 'recall'"):
        AccuracyCalculator(include=("recall",))


@pytest.mark.parametrize("k", [-1, 0, 1.5, "max", [1], True, 2.0])
def test_wrong_numbers_of_neighbours(k):
    with pytest.raises(ValueError, match="k must be"):
        AccuracyCalculator(k=k)


def test_two_averages_at_once():
    with pytest.raises(ValueError, match="avg_of_avgs and return_per_class"):
        AccuracyCalculator(avg_of_avgs=True, return_per_class=True)


@pytest.mark.parametrize("argument", ["label_comparison_fn", "knn_func", "kmeans_func"])
def test_what_cannot_be_called(argument):
    with pytest.raises(TypeError, match=f"{argument} must be callable or None, got str"):
        AccuracyCalculator(**{argument: "faiss"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_labels_of_narrow_floats(dtype):
    check(AccuracyCalculator().get_accuracy(LINE, LINE_LABELS.float().to(dtype)), LINE_MEANS)


def test_views_that_are_not_plain_memory():
    packed = np.zeros(6, dtype=[("flag", "i1"), ("row", "f4", (1,)), ("label", "i4")])
    packed["row"], packed["label"] = LINE, LINE_LABELS
    check(AccuracyCalculator().get_accuracy(packed["row"], packed["label"]), LINE_MEANS)
    rows, labels = (torch.complex(part, -part).conj().imag for part in (LINE, LINE_LABELS.float()))
    assert rows.is_neg() and labels.is_neg()
    check(AccuracyCalculator().get_accuracy(rows, labels, rows, labels, True), LINE_MEANS)


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_dense_array_is_refused(place):
    for wrong, word in ((lambda part: part.to_sparse(), "dense"), (lambda part: np.ma.array(part.numpy()), "masked")):
        arguments = [LINE, LINE_LABELS]
        arguments[place] = wrong(arguments[place])
        with pytest.raises(TypeError, match=f"{('query', 'query_labels')[place]} must .* {word}"):
            AccuracyCalculator().get_accuracy(*arguments)


def test_unsigned_labels_beyond_int64_are_refused():
    labels = tensor([0, 0, 1, 1, -1, 2]).view(torch.uint64)
    with pytest.raises(ValueError, match=r"query_labels must fit .* got 18446744073709551615 in row 4"):
        AccuracyCalculator().get_accuracy(LINE, labels)


def test_views_of_one_memory_may_hold_other_rows():
    rows = torch.arange(9.0).view(3, 3)
    for query in (rows.t(), rows[:1].expand(3, 3)):
        with pytest.raises(ValueError, match=r"begin with the query rows .* row [01] differs"):
            AccuracyCalculator().get_accuracy(query, [0, 0, 0], rows, [0, 0, 0], True)


def test_a_number_far_beyond_the_references():
    names = [f"{name}_at_100000000000" for name in ("found_fraction", "knn_accuracy", "ndcg", "precision", "recall")]
    found = AccuracyCalculator(include=names).get_accuracy(LINE, LINE_LABELS)
    assert found.pop("precision_at_100000000000") == pytest.approx(8 / 5 / 1e11)
    near = AccuracyCalculator(include=[name.replace("00000000000", "0") for name in names])
    wanted = near.get_accuracy(LINE, LINE_LABELS)
    del wanted["precision_at_10"]
    assert list(found.values()) == list(wanted.values())
    with pytest.raises(ValueError, match="include must name metrics among"):
        AccuracyCalculator(include=("ndcg_at_1" + "0" * 18,))


@pytest.mark.parametrize("knn_func", [None, CustomKNN(DotProductSimilarity())])
def test_votes_at_infinite_distance_weigh_the_same(knn_func):
    # Squares and products beyond float32; the class of two wins, although one of the other comes first.
    query, reference = column(1e30), column(-1e30, -1.1e30, -1.2e30)
    calculator = AccuracyCalculator(include=("knn_softmax_accuracy_at_3",), knn_func=knn_func)
    assert calculator.get_accuracy(query, [1], reference, [0, 1, 1]) == {"knn_softmax_accuracy_at_3": 1.0}


@pytest.mark.parametrize("at_once", [1, 40, 1000])
def test_votes_counted_in_parts(monkeypatch, at_once):
    monkeypatch.setattr("exactknn._retrieval.votes.VOTES_AT_ONCE", at_once)
    embeddings, labels = column(*range(12)), tensor([7, 7, 5, 5, 5, 7, 3, 3, 7, 3, 9, 3])
    found = AccuracyCalculator(include=("knn_accuracy_at_4",)).get_accuracy(embeddings, labels)
    # Rows 3, 4, 7, 9 and 11 of the eleven that are not lone; row 2 loses to the nearer of two classes with two votes.
    assert found["knn_accuracy_at_4"] == 5 / 11


@pytest.mark.parametrize(("values", "mean"), [((1e308, 1e308), math.inf), ((-math.inf, math.inf), NAN)])
def test_a_metric_whose_mean_is_no_number(values, mean):
    metric = RetrievalMetric(lambda inputs: tensor(values, dtype=torch.float64).repeat(3), neighbors=1)
    calculator = AccuracyCalculator(include=("wide",), custom_metrics={"wide": metric})
    assert calculator.get_accuracy(LINE, LINE_LABELS)["wide"] == pytest.approx(mean, nan_ok=True)


@pytest.mark.parametrize("options", [{}, {"label_comparison_fn": lambda x, y: x == y}])
def test_a_default_device_moves_nothing(make, options):
    # A device that holds no data: what went there could not come back.
    custom = {"graded": ndcg_metric(lambda x, y: (x == y).double()), "vote": knn_vote_metric(1)}
    clustered = {} if options else {"kmeans_func": lambda rows, number: LINE_LABELS.numpy()}
    calculator = make(custom_metrics=custom, **clustered, **options)
    wanted = calculator.get_accuracy(LINE, LINE_LABELS)
    with torch.device("meta"):
        found = calculator.get_accuracy(LINE, LINE_LABELS)
    assert found == wanted


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_whole_numbers_beyond_float32_are_searched_exactly(dtype):
    # In float32 the first row would be 2**24 and the second 2**24 + 4, so the third would be the nearest of the first.
    rows = np.array([[2**24 + 1], [2**24 + 3], [2**24 - 2], [2**24 - 3]], dtype)
    labels = [0, 0, 1, 1]
    for given in (rows, torch.from_numpy(rows), rows.astype(np.int64).tolist()):
        assert AccuracyCalculator(include=("precision_at_1",)).get_accuracy(given, labels) == {"precision_at_1": 1.0}


@pytest.mark.parametrize(
    "rows",
    [
        np.array([[0], [2**53 + 1]]),
        np.array([[0], [-(2**53) - 1]]),
        torch.tensor([[0], [2**53 + 1]]),
        [[0], [2**53 + 1]],
        [[0.5], [2**53 + 1]],
        [[-1], [2**63 + 1]],
    ],
)
def test_whole_numbers_beyond_float64_are_refused(rows):
    with pytest.raises(TypeError, match=r"query must hold .* got the integer -?\d+ beyond 2\*\*53 in row 1"):
        AccuracyCalculator().get_accuracy(rows, [0, 0])
