"""Queries and references with the class of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exactknn._arrays.matrix import EXACT_INTEGER, Pair
from exactknn._retrieval.groups import Groups
from exactknn._retrieval.types import Ints

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Task:
    """Queries and references with the class of each row."""

    rows: Pair
    classes: Array
    """The distinct labels of both sides, ascending."""
    query_class: Ints
    """Class code of each query, its position in ``classes``, ``(n,)``."""
    reference_class: Ints
    """The same for the references, ``(m,)``."""
    distance: str = "sqeuclidean"
    p: float | None = None

    @classmethod
    def of(
        cls,
        rows: Pair,
        labels: Array,
        reference_labels: Array | None = None,
        distance: str = "sqeuclidean",
        p: float | None = None,
    ) -> Task:
        """Return a task with the classes encoded as numbers.

        Args:
            rows: from `as_pair`; without a reference, the queries are searched among themselves, self excluded.
            labels: ``(n,)``, integers, booleans, floats or text.
            reference_labels: ``(m,)``, with a reference only.
            distance: a metric of `exactknn.knn`.
            p: exponent of ``"minkowski"``.

        Raises:
            ValueError: the labels of both sides cannot be compared exactly.
        """
        sides = [labels] if reference_labels is None else [labels, reference_labels]
        both = np.concatenate(_comparable(sides))
        classes, codes = np.unique(both, return_inverse=True)
        codes = codes.astype(np.int64)
        query_class = codes[: len(labels)]
        return cls(rows, classes, query_class, codes[len(labels) :] if len(sides) > 1 else query_class, distance, p)

    @property
    def excludes_self(self) -> bool:
        """Whether query ``i`` is reference row ``i``, and not its own neighbour."""
        return self.rows.reference is None

    @property
    def reference(self) -> Array:
        """The reference rows, ``(m, d)``."""
        return self.rows.searched

    @property
    def candidates(self) -> int:
        """References of one query, self excluded."""
        return len(self.reference) - self.excludes_self

    def groups(self) -> Groups:
        """Return the references of each class."""
        return Groups.of_codes(self.query_class, self.reference_class, len(self.classes))


def _comparable(sides: Sequence[Array]) -> list[Array]:
    """Return the labels in one type that compares them exactly."""
    numbers = [_numbers_if_written_so(side) for side in sides]
    if any(side.dtype.kind == "U" for side in numbers):
        if all(side.dtype.kind == "U" for side in sides):
            return list(sides)
        raise ValueError("the labels of one side are text, those of the other are numbers; expected the same kind")
    kinds = {"f" if side.dtype.kind == "f" else "i" for side in numbers}
    for side in numbers:
        if side.dtype.kind not in "iu" or not side.size:
            continue
        low, high = int(side.min()), int(side.max())
        if kinds == {"f", "i"} and max(-low, high) > EXACT_INTEGER:
            raise ValueError("the labels of one side are floats, those of the other are integers beyond 2**53")
        if high > np.iinfo(np.int64).max:
            raise ValueError(f"the label {high} is beyond 2**63 - 1")
    dtype = np.result_type(*numbers) if kinds == {"f"} else np.float64 if "f" in kinds else np.int64
    return [side.astype(dtype) for side in numbers]


def _numbers_if_written_so(labels: Array) -> Array:
    """Return text labels as integers if all are integers in Python's notation, so that they sort numerically."""
    if labels.dtype.kind != "U":
        return labels
    try:
        numbers = labels.astype(np.int64)
    except (ValueError, OverflowError):
        return labels
    return numbers if bool((numbers.astype(np.str_) == labels).all()) else labels
