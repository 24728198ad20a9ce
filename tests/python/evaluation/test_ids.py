"""Rows that are the same item: repeats of an id, and queries searched among their own embeddings."""

import re
import warnings

import numpy as np
import pytest
import torch

from exactknn.evaluation import AccuracyCalculator
from tests.python.evaluation.accuracy_helpers import LINE, LINE_LABELS, LINE_MEANS, check, column

PRECISION = AccuracyCalculator(include=("precision_at_1",))

# Nine items on a line whose neighbours are of another class; a sampler repeats the first three.
ROWS = torch.cat([torch.arange(9.0), torch.arange(3.0)]).unsqueeze(1)
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
ITEMS = [*range(9), 0, 1, 2]


@pytest.mark.parametrize(
    "ids",
    [ITEMS, np.array(ITEMS, np.uint8), torch.tensor(ITEMS), [f"{i}.jpg" for i in ITEMS], [i / 2 for i in ITEMS]],
)
def test_each_id_counts_once(ids):
    assert PRECISION.get_accuracy(ROWS, CLASSES) == {"precision_at_1": 0.5}
    assert PRECISION.get_accuracy(ROWS, CLASSES, ids=ids) == {"precision_at_1": 0.0}
    every = AccuracyCalculator()
    assert every.get_accuracy(ROWS, CLASSES, ids=ids) == every.get_accuracy(ROWS[:9], CLASSES[:9])


def test_the_first_row_of_an_id_is_kept_in_its_place():
    rows = column(99, 0, 1, 2.5, 10, 11, 30)[[1, 2, 1, 3, 4, 5, 0, 6]]
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    check(AccuracyCalculator().get_accuracy(rows, labels, ids=[7, 3, 7, 5, 9, 1, 1, 0]), LINE_MEANS)


def test_ids_of_the_references():
    query, labels = column(0), [1]
    reference, others = column(0.1, 0.1, 0.2), [0, 0, 1]
    calculator = AccuracyCalculator(include=("mean_reciprocal_rank",))
    assert calculator.get_accuracy(query, labels, reference, others) == {"mean_reciprocal_rank": 1 / 3}
    found = calculator.get_accuracy(query, labels, reference, others, reference_ids=["a", "a", "b"])
    assert found == {"mean_reciprocal_rank": 1 / 2}
    two = calculator.get_accuracy(column(0, 0, 0.2), [1, 1, 0], reference, others, ids=[4, 4, 2])
    assert two == {"mean_reciprocal_rank": (1 / 3 + 1 / 2) / 2}


def test_ids_of_references_that_begin_with_the_queries():
    reference, labels = torch.cat([ROWS, column(20, 21, 21)]), torch.cat([CLASSES, torch.tensor([5, 5, 5])])
    found = AccuracyCalculator().get_accuracy(
        ROWS, CLASSES, reference, labels, True, ids=ITEMS, reference_ids=[*ITEMS, 50, 51, 51]
    )
    kept = [*range(9), 12, 13]
    assert found == AccuracyCalculator().get_accuracy(ROWS[:9], CLASSES[:9], reference[kept], labels[kept], True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": [0, 1]}, "ids must hold one id for each query row, (6,), got shape (2,)"),
        ({"ids": [[0]] * 6}, "ids must hold one id for each query row, (6,), got shape (6, 1)"),
        ({"ids": [0, 1, 2, 3, 4, np.nan]}, "ids must not be NaN, which names no item, got NaN in row 5"),
        ({"ids": [0, 1, 2, 0, 4, 5]}, "ids must name rows of one label, but rows 0 and 3 have two"),
        ({"reference_ids": range(6)}, "reference_ids must be given with a reference only, got them without"),
    ],
)
def test_ids_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PRECISION.get_accuracy(LINE, LINE_LABELS, **arguments)


@pytest.mark.parametrize(
    ("ids", "reference_ids", "message"),
    [
        (range(6), None, "reference_ids must be given, because ref_includes_query is set"),
        (None, range(6), "ids must be given, because ref_includes_query is set"),
        (range(6), [0, 1, 2, 9, 4, 5], "reference_ids must begin with the ids .* row 3 has 9 for 3"),
        (list("abcdef"), list("abxdef"), "reference_ids must begin with the ids .* row 2 has 'x' for 'c'"),
        (range(6), range(5), r"reference_ids must hold one id for each reference row, \(6,\), got shape \(5,\)"),
        (
            range(6),
            ["a"] * 6,
            "ids and reference_ids must be of one kind, got text in reference_ids and",
        ),
    ],
)
def test_ids_of_both_sides_that_are_refused(ids, reference_ids, message):
    with pytest.raises(ValueError, match=message):
        PRECISION.get_accuracy(LINE, LINE_LABELS, LINE, LINE_LABELS, True, ids=ids, reference_ids=reference_ids)


@pytest.mark.parametrize("kind", [lambda rows: rows, torch.Tensor.numpy, torch.Tensor.half, torch.Tensor.tolist])
def test_the_same_embeddings_on_both_sides_are_warned_of_once(kind):
    rows = kind(LINE)
    with pytest.warns(UserWarning, match="each query finds itself first; leave out the reference, or pass") as caught:
        found = PRECISION.get_accuracy(rows, LINE_LABELS, rows, LINE_LABELS)
    assert found == {"precision_at_1": 1.0}
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_no_warning_without_the_same_embeddings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PRECISION.get_accuracy(LINE, LINE_LABELS)
        PRECISION.get_accuracy(LINE, LINE_LABELS, LINE, LINE_LABELS, ref_includes_query=True)
        PRECISION.get_accuracy(LINE, LINE_LABELS, LINE.clone(), LINE_LABELS)
        PRECISION.get_accuracy(LINE[:3], LINE_LABELS[:3], LINE, LINE_LABELS)
