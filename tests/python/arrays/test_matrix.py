"""What a caller hands in becomes a row-major view, without a copy where the layout allows."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import exactknn
from exactknn._arrays.matrix import as_matrix, as_pair
from exactknn._arrays.scalars import as_count

VALUES = [[1.0, 2.5, -3.0], [0.0, 4.0, 0.5]]


class ArrayInterface:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class DLPack:
    def __init__(self, tensor, device=None):
        self.tensor = tensor
        self.device = device or tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.device


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_row_major_array_is_not_copied(dtype):
    array = np.array(VALUES, dtype)
    matrix = as_matrix(array, "query")
    assert matrix.array.ctypes.data == array.ctypes.data
    assert matrix.array.dtype == dtype
    assert not matrix.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_row_major_tensor_is_not_copied(dtype):
    tensor = torch.tensor(VALUES, dtype=dtype)
    matrix = as_matrix(tensor, "query")
    assert matrix.array.ctypes.data == tensor.data_ptr()
    assert matrix.bfloat16 == (dtype == torch.bfloat16)
    assert matrix.dtype_name == str(dtype).removeprefix("torch.")


def test_bfloat16_travels_as_its_bits():
    bits = np.array([[0x3F80, 0xC000, 0x7F00]], np.uint16)  # 1, -2, 2**127
    for values in (bits.view(ml_dtypes.bfloat16), torch.tensor([[1.0, -2.0, 2.0**127]], dtype=torch.bfloat16)):
        matrix = as_matrix(values, "query")
        assert matrix.array.dtype == np.uint16
        assert matrix.array.tolist() == bits.tolist()


def misaligned(array):
    memory = np.empty(array.nbytes + 1, np.uint8)
    view = memory[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.parametrize(
    "layout",
    [
        np.asfortranarray,
        lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        lambda a: a[::-1].copy()[::-1],
        lambda a: a.astype(a.dtype.newbyteorder()),
        misaligned,
    ],
    ids=["fortran", "step", "reversed", "swapped bytes", "misaligned"],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_other_layouts_are_copied_with_their_values(layout, dtype):
    matrix = as_matrix(layout(np.array(VALUES, dtype)), "query")
    assert matrix.array.tolist() == VALUES
    assert matrix.array.flags.c_contiguous
    assert matrix.array.flags.aligned
    assert matrix.array.dtype == dtype
    assert matrix.array.dtype.isnative


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensor_views_keep_their_values(dtype):
    tensor = torch.tensor(VALUES, dtype=dtype)
    want = as_matrix(tensor, "query").array
    for view in (
        tensor.t().contiguous().t(),
        torch.stack([tensor, tensor], 2)[:, :, 0],
        tensor.clone().requires_grad_(),
    ):
        assert as_matrix(view, "query").array.tolist() == want.tolist()
    expanded = tensor[:1].expand(3, 3)
    assert as_matrix(expanded, "query").array.tolist() == [want[0].tolist()] * 3


def test_negated_views_and_inference_tensors_are_read_rightly():
    negated = torch.complex(torch.zeros(2, 3), torch.tensor(VALUES)).conj().imag
    assert negated.is_neg()
    assert as_matrix(negated, "query").array.tolist() == (-np.array(VALUES)).tolist()
    with torch.inference_mode():
        tensor = torch.tensor(VALUES)
    assert as_matrix(tensor, "query").array.tolist() == VALUES


def test_array_interface_and_dlpack_are_not_copied():
    array = np.array(VALUES, np.float32)
    assert as_matrix(ArrayInterface(array), "query").array.ctypes.data == array.ctypes.data
    tensor = torch.tensor(VALUES)
    assert as_matrix(DLPack(tensor), "query").array.ctypes.data == tensor.data_ptr()


def test_dlpack_on_another_device_is_refused():
    with pytest.raises(ValueError, match=r"reference must be in CPU memory.*device type 2"):
        as_matrix(DLPack(torch.tensor(VALUES), (2, 0)), "reference")


def test_a_tensor_on_another_device_is_refused():
    with pytest.raises(ValueError, match=r"query must be in CPU memory, got a tensor on meta"):
        as_matrix(torch.empty(2, 3, device="meta"), "query")


def test_lists_of_numbers_are_float64():
    for values in ([[1, 2], [3, 4]], [[1.0, 2], [3, 4]], ((1, 2), (3, 4))):
        matrix = as_matrix(values, "query")
        assert matrix.array.dtype == np.float64
        assert matrix.array.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("rows", [[[0], [2**53 + 1]], [[0], [-(2**53) - 1]], [[0.5], [2**53 + 1]], [[-1], [2**63 + 1]]])
def test_lists_of_integers_that_float64_would_round_are_refused(rows):
    with pytest.raises(TypeError, match=r"query must hold .* got the integer -?\d+ beyond 2\*\*53 in row 1"):
        as_matrix(rows, "query")
    assert as_matrix([[2.0**60, 2**60]], "query").array.tolist() == [[2.0**60, 2.0**60]]


@pytest.mark.parametrize(
    ("values", "given"),
    [
        (np.array([[1, 2]]), "int64"),
        (np.array([[1, 2]], np.uint8), "uint8"),
        (np.array([[True]]), "bool"),
        ([[True]], "bool"),
        (np.array([[1j]]), "complex128"),
        (np.array([["a"]]), "str"),
        (np.array([[None]], dtype=object), "object"),
        (np.array([[1.0]], np.longdouble), np.dtype(np.longdouble).name),
        (torch.tensor([[1, 2]]), "torch.int64"),
        (torch.tensor([[True]]), "torch.bool"),
        (torch.zeros(1, 1, dtype=torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    ],
)
def test_other_types_are_refused_by_name(values, given):
    with pytest.raises(
        TypeError, match=f"reference must hold float32, float64, float16 or bfloat16 values, got {given}"
    ):
        as_matrix(values, "reference")


def test_masked_and_sparse_values_are_refused():
    with pytest.raises(TypeError, match="query must not be a masked array"):
        as_matrix(np.ma.masked_array([[1.0]], [[True]]), "query")
    with pytest.raises(TypeError, match="query must be a dense tensor"):
        as_matrix(torch.eye(2).to_sparse(), "query")


@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 3)])
def test_only_two_dimensions_are_taken(shape):
    for values in (np.zeros(shape, np.float32), torch.zeros(shape)):
        with pytest.raises(ValueError, match=r"query must be 2-D \(rows, dimensions\), got shape \("):
            as_matrix(values, "query")


@pytest.mark.parametrize("values", [None, 1.0, "rows.npy", Path("rows.npy"), {"a": [1.0]}, (row for row in [[1.0]])])
def test_what_is_no_array_is_named_by_its_type(values):
    message = f"query must be an array, a tensor or nested lists, got {type(values).__name__}"
    with pytest.raises(TypeError, match=f"^{message}$"):
        as_matrix(values, "query")


def test_ragged_lists_are_refused():
    with pytest.raises(ValueError, match=r"reference must be 2-D .* equal length"):
        as_matrix([[1.0], [1.0, 2.0]], "reference")


TYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


@pytest.mark.parametrize("left", TYPES)
@pytest.mark.parametrize("right", TYPES)
def test_two_types_are_promoted_without_loss(left, right):
    query, reference = np.array(VALUES).astype(TYPES[left]), np.array(VALUES).astype(TYPES[right])
    pair = as_pair(query, reference)
    if left == right:
        assert pair.query.ctypes.data == query.ctypes.data
        assert pair.bfloat16 == (left == "bfloat16")
        return
    wanted = np.float64 if "float64" in (left, right) else np.float32
    assert pair.query.dtype == pair.reference.dtype == wanted
    assert pair.query.tolist() == pair.reference.tolist() == VALUES
    assert not pair.bfloat16


def test_counts():
    assert as_count(np.int32(3), "k", minimum=0) == 3
    assert as_count(torch.tensor(3), "k", minimum=0) == 3
    for value in (True, np.True_, 2.0, np.float32(2), "2", None):
        with pytest.raises(TypeError, match="k must be an integer, got"):
            as_count(value, "k", minimum=0)
    with pytest.raises(ValueError, match="k must be at least 0, got -1"):
        as_count(-1, "k", minimum=0)


@pytest.mark.parametrize("options", [{}, {"max_memory": "1GB"}])
def test_too_many_rows_are_refused_before_they_are_read(options):
    # One number, seen as a matrix of 2**32 rows.
    many = np.broadcast_to(np.float32(0), (2**32 - 64, 1))
    few = np.zeros((2, 1), np.float32)
    message = r"must have fewer than 2\*\*32 - 64 rows, got 4294967232"
    with pytest.raises(ValueError, match=f"reference {message}"):
        exactknn.knn(few, many, k=1, **options)
    with pytest.raises(ValueError, match=f"query {message}"):
        exactknn.knn(many, few, k=1, **options)


def test_more_columns_than_sixteen_bits_number():
    x = np.random.default_rng(0).integers(-3, 4, (60, 2**16 + 5)).astype(np.float32)
    # Integers: float64 holds each sum exactly.
    wide = x.astype(np.float64)
    squares = (wide**2).sum(axis=1)
    wanted = squares[:40, None] + squares - 2 * wide[:40] @ wide.T
    order = np.lexsort((np.broadcast_to(np.arange(60), wanted.shape), wanted))[:, :3]
    for queries in (1, 40):
        distances, indices = exactknn.knn(x[:queries], x, k=3)
        np.testing.assert_array_equal(indices, order[:queries])
        np.testing.assert_array_equal(distances, np.take_along_axis(wanted, order, 1)[:queries])
