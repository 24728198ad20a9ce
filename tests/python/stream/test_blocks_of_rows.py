"""References that come as blocks from an iterable, and what a search in blocks refuses."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
import torch

import exactknn
from exactknn._arrays.scalars import as_bytes
from tests.python.stream.stream_helpers import assert_same, blocks_of, mapped, own_threads, rows


def test_empty_blocks_are_passed_over_whatever_they_hold():
    x = rows(40, 4)
    blocks = [np.empty((0, 9)), x[:7], x[:0], np.empty((0, 4), np.float16), x[7:]]
    assert_same(exactknn.knn(x, iter(blocks), 3), exactknn.knn(x, x, 3))


def test_a_list_of_matrices_is_blocks_and_nested_lists_are_a_matrix():
    x = rows(40, 4)
    assert_same(exactknn.knn(x, [x[:30], x[30:]], 3), exactknn.knn(x, x, 3))
    assert_same(exactknn.knn(x, (x,), k=None), exactknn.knn(x, x, k=None))
    assert_same(exactknn.knn(x, list(x), 3), exactknn.knn(x, x, 3))
    assert exactknn.knn([[0.0]], [[1.0], [3.0]], k=1)[1].tolist() == [[0]]
    with pytest.raises(ValueError, match=r"reference must be 2-D .* got shape \(1, 2, 2\)"):
        exactknn.knn([[0.0, 0.0]], [[[1.0, 2.0], [3.0, 4.0]]], k=1)


@pytest.mark.parametrize(
    ("blocks", "error", "text"),
    [
        (
            [rows(3, 4), rows(3, 4, "f8")],
            TypeError,
            "reference block 1 must hold float32 values like the first, got float64",
        ),
        (
            [rows(3, 4), rows(3, 5)],
            ValueError,
            r"reference block 1 must have 4 columns like the first, got shape \(3, 5\)",
        ),
        ([rows(3, 4), rows(3, 4)[0]], ValueError, r"reference block 1 must be 2-D .* got shape \(4,\)"),
        (
            [rows(3, 4), (rows(3, 4), np.zeros(3))],
            TypeError,
            "reference block 1 must be one matrix, got a tuple of 2 arrays: pass only the rows",
        ),
        ([rows(3, 4), rows(3, 4).astype(int)], TypeError, "reference block 1 must hold float32, .* got int64"),
        ([rows(3, 5)], ValueError, "query and reference must have the same number of columns, got 4 and 5"),
        ([], ValueError, "k must be at most the number of references, got k=2 with 0 references"),
        ([rows(1, 4)], ValueError, "k must be at most the number of references, got k=2 with 1 references"),
    ],
)
def test_blocks_that_do_not_fit_are_named(blocks, error, text):
    with pytest.raises(error, match=text):
        exactknn.knn(rows(2, 4), iter(blocks), 2)


def test_a_block_may_be_a_list_of_rows():
    x = rows(7, 4)
    found = exactknn.knn(x[:2], iter([list(x[:3]), x[3:]]), 7)
    assert found[1].tolist() == exactknn.knn(x[:2], x, 7)[1].tolist()


def test_self_needs_the_queries_among_the_blocks():
    x = rows(30, 4)
    assert_same(exactknn.knn(x[:9], iter([x]), 29, exclude_self=True), exactknn.knn(x[:9], x, 29, exclude_self=True))
    with pytest.raises(ValueError, match="wanted at least 31 references, got 30"):
        exactknn.knn(rows(31, 4), iter([x]), 2, exclude_self=True)
    with pytest.raises(ValueError, match="without the query itself, got k=30 with 30 references"):
        exactknn.knn(x, iter([x]), 30, exclude_self=True)


def test_no_rows_and_no_neighbours():
    distances, indices = exactknn.knn(rows(3, 4), iter([]), 0)
    assert distances.shape == indices.shape == (3, 0) and distances.dtype == np.float32
    assert exactknn.knn(rows(0, 4), iter([rows(3, 4)]), 2)[1].shape == (0, 2)
    assert exactknn.knn(rows(0, 4), rows(3, 4), 2, max_memory="1MB")[1].shape == (0, 2)
    assert exactknn.knn(rows(1, 4), k=0, max_memory="1MB")[1].shape == (1, 0)
    with pytest.raises(ValueError, match="query must have at least one column"):
        exactknn.knn(rows(2, 0), rows(3, 0), 1, max_memory="1MB")


def test_all_neighbours_of_an_iterable_are_refused_before_it_is_read_to_the_end():
    taken = []

    def blocks():
        for number in range(5):
            taken.append(number)
            yield rows(3, 4)

    with pytest.raises(ValueError, match="k must be a number if the reference is an iterable of unknown length"):
        exactknn.knn(rows(2, 4), blocks(), k=None)
    assert taken == [0]


@pytest.mark.parametrize("at", [0, 1, 5])
def test_the_error_of_a_generator_comes_unchanged(at):
    class OddError(Exception):
        pass

    error = OddError("odd")
    ends = []

    def blocks():
        try:
            for number in range(9):
                if number == at:
                    raise error
                yield rows(30, 4)
        finally:
            ends.append(threading.current_thread())

    with pytest.raises(OddError) as raised:
        exactknn.knn(rows(2, 4), blocks(), 2)
    assert raised.value is error
    assert ends == [threading.main_thread()]


def test_a_generator_is_closed_when_the_search_is_refused():
    ends = []

    def blocks():
        try:
            while True:
                yield np.full((30, 4), np.nan, np.float32) if len(ends) else rows(30, 4, seed=1)
                yield np.full((30, 4), np.inf, np.float32)
        finally:
            ends.append(True)

    with pytest.raises(ValueError, match="reference must be finite, got inf in row 30, column 0"):
        exactknn.knn(rows(2, 4), blocks(), 2)
    assert ends == [True]


def test_a_block_is_not_held_while_the_next_one_is_made():
    alive = []

    def blocks():
        for number in range(4):
            alive.append([made() is not None for made in references])
            yield make(number)

    def make(number):
        block = rows(500, 4, seed=number)
        references.append(weakref.ref(block))
        return block

    references: list[weakref.ref[np.ndarray]] = []
    exactknn.knn(rows(2, 4), blocks(), 3)
    assert alive == [[], [False], [False] * 2, [False] * 3]


def test_a_generator_runs_in_the_gradient_mode_of_the_caller():
    modes = []

    def blocks():
        for part in torch.ones(60, 2).split(20):
            modes.append(torch.is_inference_mode_enabled())
            yield part

    with torch.inference_mode():
        exactknn.knn(torch.zeros(1, 2), blocks(), 1)
    assert modes == [True, True, True]


@pytest.mark.parametrize("row", [0, 57, 299])
def test_a_row_that_is_not_finite_is_named_by_its_number_among_all(tmp_path, row):
    x = rows(300, 16)
    x[row, 3] = np.nan
    for reference in (x, mapped(tmp_path, x), blocks_of(x, (50, 90))):
        with pytest.raises(ValueError, match=f"reference must be finite, got NaN in row {row}, column 3"):
            exactknn.knn(rows(9, 16), reference, 2, max_memory="1MB")
    for most in (30_000, "1MB"):  # in blocks of queries, and at once
        with pytest.raises(ValueError, match=f"query must be finite, got NaN in row {row}, column 3"):
            exactknn.knn(x, k=2, max_memory=most)
    x[row, 3] = -np.inf
    with pytest.raises(ValueError, match=f"query must be finite, got -inf in row {row}, column 3"):
        exactknn.knn(torch.tensor(x).bfloat16(), rows(300, 16), k=2, max_memory=25_000)
    assert not own_threads()


def test_sizes_are_refused_in_the_words_of_the_core():
    x = rows(30, 4)
    for reference, k, options in (
        (x, 31, {}),
        (x, 30, {"exclude_self": True}),
        (x[:9], 2, {"exclude_self": True}),
        (x[:, :3], 2, {}),
    ):
        with pytest.raises(ValueError) as whole:
            exactknn.knn(x, reference, k, **options)
        with pytest.raises(ValueError) as in_blocks:
            exactknn.knn(x, reference, k, max_memory="1MB", **options)
        assert str(in_blocks.value) == str(whole.value)


def test_too_little_memory_says_how_much_is_needed():
    x = rows(500, 16)
    for reference in (x, [x[:100], x[100:]], iter([x])):
        with pytest.raises(
            ValueError,
            match="got 50000; its result alone, 500 queries with k=9, takes 54000",
        ) as raised:
            exactknn.knn(x, reference, 9, max_memory=50_000)
        least = int(str(raised.value).split()[5])
        assert 54_000 < least < 300_000
        if not hasattr(reference, "__next__"):
            assert_same(exactknn.knn(x, reference, 9, max_memory=least), exactknn.knn(x, x, 9))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        (" 1500 ", 1500),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5 GB", 1_500_000_000),
        ("1.1GB", 1_100_000_000),
        ("0.5KiB", 512),
        ("3TB", 3 * 10**12),
        ("7B", 7),
        ("1tib", 1 << 40),
        (np.int32(5), 5),
        (6, 6),
    ],
)
def test_sizes_in_bytes(text, count):
    assert as_bytes(text, "max_memory") == count


@pytest.mark.parametrize(
    "text", ["", "GB", "2G", "2 G B", "-1GB", "1e9", "2 iB", "2,5GB", "0", "0.1B", "0GB", "²GB", "nan"]
)
def test_texts_that_are_no_size(text):
    with pytest.raises(ValueError, match="max_memory must be "):
        exactknn.knn(rows(2, 4), k=1, max_memory=text)


@pytest.mark.parametrize("value", [1e9, True, [1], np.float32(1)])
def test_types_that_are_no_size(value):
    with pytest.raises(TypeError, match="max_memory must be a"):
        exactknn.knn(rows(2, 4), k=1, max_memory=value)
    with pytest.raises(ValueError, match="max_memory must be at least 1, got 0"):
        exactknn.knn(rows(2, 4), k=1, max_memory=0)


class Items:
    """An object with item access."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        return self.items[row]


def test_an_object_with_item_access_is_a_matrix_unless_it_is_iterated():
    x = rows(40, 4)
    assert_same(exactknn.knn(x, Items(x), 3), exactknn.knn(x, x, 3))
    blocks = Items([x[:20], x[20:]])
    with pytest.raises(ValueError, match=r"reference must be 2-D .* got shape \(2, 20, 4\)"):
        exactknn.knn(x, blocks, 3)
    assert_same(exactknn.knn(x, iter(blocks), 3), exactknn.knn(x, x, 3))
