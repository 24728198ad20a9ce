"""Labels: exact comparison of numbers of two types, and text."""

import numpy as np
import pytest
import torch

from exactknn.compat import accuracy_calculator as compat
from exactknn.evaluation import AccuracyCalculator, RetrievalMetric, knn_vote_metric
from tests.python.evaluation.accuracy_helpers import LINE, LINE_LABELS, LINE_MEANS, check, column

ROW = column(0.0)
LETTERS = ["b", "b", "aa", "aa", "aa", "c"]


class Series:
    """What a column of a data frame is to NumPy."""

    def __init__(self, values):
        self.values = np.empty(len(values), object)
        self.values[:] = values
        self.dtype = self.values.dtype

    def __len__(self):
        return len(self.values)

    def __array__(self, dtype=None, copy=None):
        return self.values


def right_at_1(query_labels, reference_labels):
    calculator = AccuracyCalculator(include=("knn_accuracy_at_1", "precision_at_1"))
    rows = torch.arange(float(len(reference_labels))).unsqueeze(1)
    found = calculator.get_accuracy(rows[: len(query_labels)].clone(), query_labels, rows, reference_labels)
    np.testing.assert_equal(found["knn_accuracy_at_1"], found["precision_at_1"])
    return found["precision_at_1"]


@pytest.mark.parametrize("integers", [np.int64, np.uint64, torch.int64, list, Series])
@pytest.mark.parametrize("floats", [np.float64, np.float32, torch.float64, torch.float32, list, Series])
def test_integers_beyond_2_53_are_not_compared_with_floats(integers, floats):
    def side(values, kind):
        if kind in (list, Series):
            return kind(values)
        return torch.tensor(values, dtype=kind) if isinstance(kind, torch.dtype) else np.array(values, kind)

    whole, real = side([1, 2**53 + 1], integers), side([1.0, 2.0**53], floats)
    for arguments, name, other in (
        ((whole, real), "query_labels", "reference_labels"),
        ((real, whole), "reference_labels", "query_labels"),
    ):
        wanted = (
            rf"{name} must be within 2\*\*53 to be compared with the floats of {other}, got 9007199254740993 in row 1"
        )
        with pytest.raises(ValueError, match=wanted):
            right_at_1(*arguments)
    assert right_at_1(side([1, 2**53], integers), real) == 1.0
    assert np.isnan(right_at_1(side([3, 2**53 - 1], integers), real))


def test_integers_beyond_2_53_are_compared_exactly_with_integers():
    assert right_at_1([2**53 + 1, 5], np.array([2**53 + 1, 2**53], np.uint64)) == 1.0
    assert right_at_1(Series([2**53, 2**53 + 1]), [2**53, 2**53 + 1]) == 1.0
    assert right_at_1(Series([2**53 + 1, 2**53]), [2**53, 2**53 + 1]) == 0.0


def test_a_float32_label_is_not_the_float64_label_of_its_digits():
    assert np.isnan(right_at_1(np.array([0.1], np.float32), [0.1]))
    assert right_at_1(np.array([0.1], np.float32), [float(np.float32(0.1))]) == 1.0


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (
            [0.5, 2**53 + 1],
            ValueError,
            r"query_labels must be within 2\*\*53 beside floats, got 9007199254740993 in row 1",
        ),
        ([np.int64(2**53 + 1), np.uint64(0)], None, ""),
        ([0, 2**63], ValueError, "query_labels must fit into signed 64-bit integers, got 9223372036854775808"),
        (
            [-1, 2**63],
            ValueError,
            "query_labels must fit into signed 64-bit integers, got 9223372036854775808 in row 1",
        ),
        ([0, 2**70], ValueError, f"query_labels must fit into signed 64-bit integers, got {2**70} in row 1"),
        ([0, None], TypeError, "query_labels must hold numbers or text, got NoneType in row 1"),
        (["a", None], TypeError, "query_labels must hold numbers or text, got NoneType in row 1"),
        (["a", 1], TypeError, "query_labels must hold numbers or text, not both, got 'a' in row 0 and 1 in row 1"),
        (
            Series([1, "a"]),
            TypeError,
            "query_labels must hold numbers or text, not both, got 1 in row 0 and 'a' in row 1",
        ),
        (np.array([b"a", b"b"]), TypeError, "query_labels must hold numbers"),
        ([["a"], ["b"]], ValueError, r"query_labels must be 1-D if it holds text, got shape \(2, 1\)"),
    ],
)
def test_lists_are_read_element_by_element(labels, error, message):
    if error is None:
        assert AccuracyCalculator(include=("precision_at_1",)).get_accuracy(column(0, 1, 2), [*labels, labels[0]]) == {
            "precision_at_1": 0.0
        }
        return
    with pytest.raises(error, match=message):
        AccuracyCalculator().get_accuracy(column(0, 1), labels)


@pytest.mark.parametrize("kind", [list, tuple, np.array, Series, lambda labels: np.array(labels, object)])
def test_text_is_compared_as_it_is(kind):
    check(AccuracyCalculator().get_accuracy(LINE, kind(LETTERS)), LINE_MEANS)
    check(AccuracyCalculator().get_accuracy(LINE, kind(LETTERS), LINE, LETTERS, True), LINE_MEANS)
    assert right_at_1(kind(["1", "a", "é"]), ["01", "a ", "é"]) == 1.0  # the other two are lone
    assert right_at_1(["a\0", "b"], ["a", "b"]) == 1.0


def test_class_means_of_text_are_listed_with_the_text():
    calculator = AccuracyCalculator(include=("precision_at_1",), return_per_class=True)
    assert calculator.get_accuracy(LINE, LETTERS) == {"precision_at_1": [2 / 3, 1.0]}
    assert calculator.per_class_labels.tolist() == ["aa", "b"]
    calculator.get_accuracy(LINE, LINE_LABELS)
    assert calculator.per_class_labels.tolist() == [0, 1]


def test_metrics_get_text_as_codes_in_its_order():
    def keep(inputs):
        given.append((inputs.query_labels.tolist(), inputs.reference_labels.tolist(), inputs.knn_labels.tolist()))
        return inputs.relevance[:, 0].double()

    given = []
    metrics = {"kept": RetrievalMetric(keep, neighbors=1), "vote": knn_vote_metric(1, weights="softmax")}
    calculator = AccuracyCalculator(include=("kept", "vote"), custom_metrics=metrics)
    found = calculator.get_accuracy(column(0, 1), ["x", "b"], column(0, 1, 2), ["x", "a", "b"])
    assert found == {"kept": 0.5, "vote": 0.5}
    assert given == [([2, 1], [2, 0, 1], [[2], [0]])]


def test_text_on_one_side_or_for_a_comparison_is_refused():
    with pytest.raises(ValueError, match="of one kind, got text in query_labels and numbers in reference_labels"):
        AccuracyCalculator().get_accuracy(ROW.clone(), ["1"], ROW, [1])
    with pytest.raises(ValueError, match="of one kind, got text in reference_labels and numbers in query_labels"):
        AccuracyCalculator().get_accuracy(ROW.clone(), [1], ROW, ["1"])
    with pytest.raises(TypeError, match="query_labels must hold numbers, which label_comparison_fn gets as tensors"):
        AccuracyCalculator(label_comparison_fn=lambda x, y: x == y).get_accuracy(LINE, LETTERS)


def test_methods_compare_labels_of_two_types_exactly():
    arguments = {
        "query_labels": torch.tensor([2**24 + 1]),
        "knn_labels": torch.tensor([[2.0**24]]),
        "label_counts": (torch.tensor([2**24, 2**24 + 1]), torch.tensor([1, 1])),
        "not_lone_query_mask": torch.tensor([True]),
        "reference_labels": torch.tensor([2.0**24]),
    }
    assert AccuracyCalculator().calculate_precision_at_1(**arguments) == 0.0
    arguments["query_labels"] = torch.tensor([2**53 + 1])
    with pytest.raises(
        ValueError, match=r"query_labels must be within 2\*\*53 to be compared with the floats of knn_labels"
    ):
        AccuracyCalculator().calculate_precision_at_1(**arguments)


def test_known_labels_are_not_cut_to_integers():
    counts = (torch.tensor([0.5, 1.0]), torch.tensor([1, 3]))
    mask, relevant = compat.get_relevance_mask((2, 3), torch.tensor([[0], [1]]), False, counts)
    assert relevant.tolist() == [0, 3]
    assert mask.tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize("floats", [torch.float32, torch.float64])
def test_functions_of_the_other_library_compare_two_types_exactly(floats):
    own, near = torch.tensor([[2**24 + 1]]), torch.tensor([[2**24]]).to(floats)
    counts = (own[0], torch.tensor([1]))
    assert compat.precision_at_k(near, own, 1) == 0.0
    assert compat.r_precision(near, own, False, counts, False, False, compat.EQUALITY) == 0.0
    assert compat.mean_average_precision(near, own, False, counts, False, False, compat.EQUALITY) == 0.0
    assert compat.mean_reciprocal_rank(near, own, False, False, compat.EQUALITY) == 0.0
    labels, found = compat.get_label_match_counts(own[0], near[0], compat.EQUALITY)
    assert (labels.tolist(), found.tolist()) == ([2**24 + 1], [0])
    with pytest.raises(ValueError, match=r"labels of the queries must be within 2\*\*53"):
        compat.precision_at_k(near, torch.tensor([[2**53 + 1]]), 1)
