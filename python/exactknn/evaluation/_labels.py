"""Labels of both sides as tensors of one type that compares them exactly.

    numbers (tensor, array, list) ──> int64, float32 or float64
    text (array, list, Series)    ──> int64 codes: positions among the distinct texts of both sides, ascending

No label passes through a type that cannot represent it: there is a conversion without loss, or an error.
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from exactknn._arrays.matrix import EXACT_INTEGER
from exactknn.evaluation._checks import as_labels, as_tensor
from exactknn.evaluation._dispatch import Names

Array = npt.NDArray[Any]


class Labels(NamedTuple):
    """Labels of queries and references in one type, or codes of their texts."""

    query: Tensor
    reference: Tensor | None
    texts: Array | None
    """Text of each code, an object array; ``None``: the labels are numbers."""

    def named(self, labels: Tensor) -> Tensor | Array:
        """Return these labels, or the texts of these codes."""
        return labels if self.texts is None else self.texts[labels.cpu().numpy()]

    def text_of(self, label: Any) -> str:
        """Return one label, a number or a code, for an error message."""
        return repr(label.item() if self.texts is None else self.texts[label])


def label_tensors(
    query_labels: Any,
    reference_labels: Any,
    device: torch.device,
    names: Names = ("query_labels", "reference_labels"),
) -> Labels:
    """Return the labels on a device, in one type that compares them exactly.

    Args:
        query_labels: numbers, ``(n,)`` or ``(n, columns)``, or text, ``(n,)``.
        reference_labels: the same for the references; ``None``: there are none.
        device: device of the tensors.
        names: the arguments' names, for error messages.

    Raises:
        TypeError: labels are neither numbers nor text, or both in one argument.
        ValueError: the labels of both sides cannot be compared exactly, or exceed int64.
    """
    query = _values_of(query_labels, names[0])
    if reference_labels is None:
        if isinstance(query, list):
            return _encoded(query, None, device)
        return Labels(as_labels(query, names[0], device), None, None)
    reference = _values_of(reference_labels, names[1])
    if isinstance(query, list) and isinstance(reference, list):
        return _encoded(query, reference, device)
    for side, (text, number) in ((query, names), (reference, names[::-1])):
        if isinstance(side, list):
            raise ValueError(
                f"{names[0]} and {names[1]} must be of one kind, got text in {text} and numbers in {number}"
            )
    left, right = as_labels(query, names[0], device), as_labels(reference, names[1], device)
    left, right = in_common_type((left, names[0]), (right, names[1]))
    return Labels(left, right, None)


def in_common_type(*labels: tuple[Tensor, str]) -> tuple[Tensor, ...]:
    """Return labels in the type that represents all of them, for pairs of a tensor and its name.

    Raises:
        ValueError: some are floats, and others are integers beyond 2**53, which float64 does not represent.
    """
    floats = [name for part, name in labels if part.is_floating_point()]
    if not floats:
        dtype = torch.int64
    elif len(floats) < len(labels):
        dtype = torch.float64
        for part, name in labels:
            _check_float64(part, name, floats[0])
    else:
        dtype = labels[0][0].dtype
        for part, _ in labels:
            dtype = torch.promote_types(dtype, part.dtype)
    return tuple(part.to(dtype) for part, _ in labels)


def _check_float64(labels: Tensor, name: str, other: str) -> None:
    if labels.is_floating_point():
        return
    whole = labels.cpu().numpy()
    wrong = np.argwhere((whole > EXACT_INTEGER) | (whole < -EXACT_INTEGER))
    if wrong.size:
        place = tuple(wrong[0])
        raise ValueError(
            f"{name} must be within 2**53 to be compared with the floats of {other}, "
            f"got {whole[place]} in row {place[0]}"
        )


def _encoded(query: list[str], reference: list[str] | None, device: torch.device) -> Labels:
    """Return texts as codes in their order."""
    distinct = sorted(set(query).union(reference or ()))
    code = {text: i for i, text in enumerate(distinct)}
    texts = np.empty(len(distinct), object)
    texts[:] = distinct
    sides = [
        None if side is None else torch.from_numpy(np.array([code[text] for text in side], np.int64)).to(device)
        for side in (query, reference)
    ]
    assert sides[0] is not None, "the queries have labels"
    return Labels(sides[0], sides[1], texts)


def _values_of(labels: Any, name: str) -> Any:
    """Return labels as a list of text, or as they are if they are a tensor or an array of numbers.

    NumPy rounds integers of a list that are beside floats, and makes text of numbers beside text; such lists, and
    arrays of objects, are read element by element.
    """
    if isinstance(labels, (Tensor, np.ma.MaskedArray)):
        return labels
    try:
        array = np.asarray(labels)
        if array.dtype.kind in "OUT" or (array.dtype.kind == "f" and not hasattr(labels, "dtype")):
            array = np.asarray(labels, dtype=object)
    except ValueError as error:
        raise ValueError(f"{name} must have rows of equal length: {error}") from error
    except TypeError:  # tensors of a type that NumPy lacks, or with gradients
        return as_tensor(labels, name)
    if array.ndim == 0:
        raise ValueError(f"{name} must be 1-D or 2-D, got {_plain(array[()])!r}")
    if array.dtype != object or not array.size:
        return array if isinstance(labels, list) else labels
    elements = [_plain(element) for element in array.reshape(-1)]
    kinds = [_kind_of(element) for element in elements]
    for position, kind in enumerate(kinds):
        row = int(np.unravel_index(position, array.shape)[0])
        if kind is None:
            given = type(elements[position]).__name__
            raise TypeError(f"{name} must hold numbers or text, got {given} in row {row}")
        if (kind == "text") != (kinds[0] == "text"):
            raise TypeError(
                f"{name} must hold numbers or text, not both, "
                f"got {elements[0]!r} in row 0 and {elements[position]!r} in row {row}"
            )
    if kinds[0] == "text":
        if array.ndim != 1:
            raise ValueError(f"{name} must be 1-D if it holds text, got shape {array.shape}")
        return elements
    limit, wanted = (EXACT_INTEGER, "floats") if "float" in kinds else (np.iinfo(np.int64).max, "")
    for position, (element, kind) in enumerate(zip(elements, kinds, strict=True)):
        if kind == "integer" and not -limit <= element <= limit:
            row = int(np.unravel_index(position, array.shape)[0])
            form = "be within 2**53 beside floats" if wanted else "fit into signed 64-bit integers"
            raise ValueError(f"{name} must {form}, got {element} in row {row}")
    return np.array(elements, np.float64 if wanted else np.int64).reshape(array.shape)


def _plain(element: Any) -> Any:
    """Return a NumPy number, or a tensor of one number, as a Python number."""
    single = isinstance(element, (np.generic, Tensor)) and element.ndim == 0
    return element.item() if single else element


def _kind_of(element: Any) -> str | None:
    if isinstance(element, str):
        return "text"
    if isinstance(element, numbers.Integral):
        return "integer"
    return "float" if isinstance(element, float) else None
