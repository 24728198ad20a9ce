"""Rounding between floating types."""

import ml_dtypes
import numpy as np
import pytest

from exactknn import Index
from exactknn._arrays.dtypes import converted, rounded
from exactknn._arrays.matrix import as_matrix

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
@pytest.mark.parametrize("target", TYPES)
@pytest.mark.parametrize("source", TYPES)
def test_each_type_is_rounded_to_each(source, target, columns):
    every = np.arange(-0x7C00, 0x7C00).astype(np.int16).view(np.float16)
    values = every[np.isfinite(every)]
    values = values[: len(values) // 12 * 12].reshape(-1, columns)
    if source == "bfloat16":
        values = values[np.abs(values.astype(np.float32)).max(axis=1) < 65280]  # float16 may not hold the next
    rows = values.astype(TYPES[source])
    found = rounded(as_matrix(rows, "rows"), target, "rows")
    assert found.dtype_name == target
    wanted = rows.astype(np.float32).astype(TYPES[target]).astype(np.float64)
    np.testing.assert_array_equal(converted(found, "float64"), wanted)


def test_an_index_of_bfloat16_holds_rows_of_float16():
    index = Index(dtype="bfloat16")
    index.add(np.array([[1, 2], [3, 4 + 2**-7]], np.float16))
    assert index.rows().tolist() == [[1, 2], [3, 4]]
