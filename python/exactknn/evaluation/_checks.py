"""Checks and conversion of the calculator's inputs, and of the results of user functions.

    embeddings, labels (tensors, arrays, sequences) ──as_embeddings, as_labels──> tensors ──check_inputs──> calculator
    results of knn_func and metrics ──checked_distances, checked_indices, checked_values──────────────────> calculator

Errors are ``TypeError`` or ``ValueError`` and name the argument, what was expected, what was given, and the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from exactknn._arrays.blocks import rows_in, small_blocks
from exactknn._arrays.matrix import array_of, whole_dtype
from exactknn._arrays.scalars import as_count
from exactknn._arrays.sizes import check_sizes
from exactknn._arrays.tensors import oddity, resolved
from exactknn._retrieval.types import Bools, Floats
from exactknn.distances.base import is_default_check
from exactknn.evaluation._dispatch import Names, same_memory

OWN_INCLUDED = "ref_includes_query is set"
"""Why self is excluded, for error messages."""

# Largest difference between a query and its own reference row, relative to the row's largest magnitude.
_SAME_ROW = 1e-5

# Elements checked at a time for NaN and infinity (16 MiB in float32).
_CHECK_ELEMENTS = 1 << 22


def checked_k(k: Any) -> int | str | None:
    """Return the calculator's ``k``: an integer of at least 1, ``None`` or ``"max_bin_count"``."""
    if k is None:
        return None
    if isinstance(k, str) and k == "max_bin_count":
        return k
    try:
        return as_count(k, "k", minimum=1)
    except (TypeError, ValueError):
        raise ValueError(f"k must be an integer of at least 1, None or 'max_bin_count', got {k!r}") from None


def as_tensor(values: Any, name: str) -> Tensor:
    """Return real numbers as a dense tensor, zero-copy if possible."""
    if isinstance(values, Tensor):
        odd = oddity(values)
        if odd is not None:
            raise TypeError(f"{name} must be a dense tensor, got {odd}")
        if values.is_complex():
            raise TypeError(f"{name} must hold real numbers, got {values.dtype}")
        check_not_meta(values, name)
        tensor: Tensor = resolved(values, name).detach()
        return tensor
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: masked entries have no value")
    array = array_of(values, name, "have rows of equal length")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        if array.dtype.kind == "V" and array.dtype.name == "bfloat16":
            return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
        raise TypeError(f"{name} must hold numbers, got {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"{name} must fit into signed 64-bit integers, got {int(array.max())}")
        array = array.astype(np.int64)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if not array.flags.writeable or any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()  # torch cannot share their memory
    return torch.from_numpy(array)


def as_embeddings(values: Any, name: str, device: torch.device | None) -> Tensor:
    """Return rows as float32 or float64, exactly, on ``device`` if it is given.

    Raises:
        TypeError: the rows are not numbers, or are integers that float64 does not represent.
    """
    rows = as_tensor(values, name)
    if not rows.is_floating_point():
        whole = rows.cpu().numpy()
        single = torch.from_numpy(whole.astype(whole_dtype(whole, name)))
        return single.to(rows.device if device is None else device)
    rows = rows if device is None else rows.to(device)
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def as_labels(values: Any, name: str, device: torch.device) -> Tensor:
    """Return labels as int64, float32 or float64, converted exactly."""
    labels = as_tensor(values, name).to(device)
    if labels.is_floating_point():
        # float32 represents every narrower type exactly; NumPy lacks some of them.
        return labels if labels.dtype in (torch.float32, torch.float64) else labels.float()
    whole = labels.long()
    if labels.dtype == torch.uint64 and bool((whole < 0).any()):
        row = int((whole < 0).nonzero()[0, 0])
        raise ValueError(f"{name} must fit into signed 64-bit integers, got {labels[row].tolist()} in row {row}")
    return whole


def check_inputs(
    query: Tensor, query_labels: Tensor, reference: Tensor, reference_labels: Tensor, own_included: bool
) -> None:
    """Raise ``ValueError`` for wrong shapes or lengths, NaN, infinity, and own rows that differ from the queries."""
    sides = [(query, query_labels, "query")]
    if reference is not query:
        sides.append((reference, reference_labels, "reference"))
    for rows, labels, name in sides:
        if rows.ndim != 2:
            raise ValueError(f"{name} must be 2-D (rows, dimensions), got shape {tuple(rows.shape)}")
        if labels.ndim not in (1, 2):
            raise ValueError(f"{name}_labels must be 1-D, or 2-D with several columns, got shape {tuple(labels.shape)}")
        if labels.ndim == 2 and labels.shape[1] == 0:
            raise ValueError(f"{name}_labels must have at least one column, got shape {tuple(labels.shape)}")
        if len(rows) != len(labels):
            raise ValueError(f"{name} and {name}_labels must have the same length, got {len(rows)} and {len(labels)}")
        check_finite(rows, name)
    if len(query) == 0:
        raise ValueError("query must have at least one row, got none")
    if query.shape[1] != reference.shape[1]:
        raise ValueError(
            f"query and reference must have the same dimension, got {query.shape[1]} and {reference.shape[1]}"
        )
    if query_labels.shape[1:] != reference_labels.shape[1:]:
        raise ValueError(
            "query_labels and reference_labels must have the same columns, "
            f"got shapes {tuple(query_labels.shape)} and {tuple(reference_labels.shape)}"
        )
    if own_included and reference is not query:
        _check_own_rows(query, query_labels, reference, reference_labels)


def _check_own_rows(query: Tensor, query_labels: Tensor, reference: Tensor, reference_labels: Tensor) -> None:
    n = len(query)
    check_sizes(n, len(reference), 0, True, when=OWN_INCLUDED)
    for start, stop in small_blocks(n, query.shape[1]):
        rows, own = query[start:stop], reference[start:stop]
        if rows.shape[1] == 0 or same_memory(rows, own):
            continue
        wrong = (rows - own).abs().amax(dim=1) > _SAME_ROW * rows.abs().amax(dim=1)
        if bool(wrong.any()):
            row = start + int(wrong.nonzero()[0])
            raise ValueError(
                f"reference must begin with the query rows when ref_includes_query is set, row {row} differs"
            )
    wrong = (query_labels != reference_labels[:n]).reshape(n, -1).any(dim=1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            "reference_labels must begin with the query_labels when ref_includes_query is set, "
            f"row {row} has {reference_labels[row].tolist()} for {query_labels[row].tolist()}"
        )


def checked_distances(distances: Any, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return the values from ``knn_func``, ``(n, k)``, on the query's device."""
    try:
        values = torch.as_tensor(distances, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"knn_func must return a tensor or array of distances, got {type(distances).__name__}"
        ) from error
    if tuple(values.shape) != shape:
        raise ValueError(f"knn_func must return distances of shape {shape}, got {tuple(values.shape)}")
    return values


def checked_indices(rows: Tensor, shape: tuple[int, int], m: int) -> Tensor:
    """Return the reference rows from ``knn_func``, int64 ``(n, k)``, each from 0 to ``m - 1``."""
    if tuple(rows.shape) != shape:
        raise ValueError(f"knn_func must return indices of shape {shape}, got {tuple(rows.shape)}")
    if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise ValueError(f"knn_func must return integer indices, got {rows.dtype}")
    rows = rows.long()
    # NumPy on the CPU: torch's thread pool does not survive a fork, and a child would hang here.
    found = rows.numpy() if rows.device.type == "cpu" else rows
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= m:
        wrong = low if low < 0 else high
        kept = "; an index kept between calls numbers earlier rows too: reset it first" if high >= m else ""
        raise ValueError(f"knn_func must return indices from 0 to {m - 1}, got {wrong}{kept}")
    return rows


def checked_values(name: str, values: Any, n: int) -> Floats:
    """Return the float64 values of a metric, one per query, ``(n,)``."""
    if not isinstance(values, Tensor):
        raise ValueError(f"metric {name} must return a tensor of one value per query, got {type(values).__name__}")
    if values.shape != (n,) or values.is_complex():
        raise ValueError(
            f"metric {name} must return one real value per query, shape {(n,)}, "
            f"got {values.dtype} of shape {tuple(values.shape)}"
        )
    wide: Floats = values.detach().cpu().double().numpy()
    return wide


def check_not_meta(tensor: Tensor, name: str) -> None:
    """Raise ``ValueError`` for a tensor on the device meta."""
    if tensor.is_meta:
        raise ValueError(f"{name} must hold numbers, got a tensor on meta, which has none")


def check_finite(embeddings: Tensor, name: str) -> None:
    """Raise ``ValueError`` for a NaN or infinity, naming the first such row."""
    check_not_meta(embeddings, name)
    if not embeddings.is_floating_point() or embeddings.ndim == 0 or embeddings.numel() == 0:
        return
    rows = embeddings.detach().reshape(len(embeddings), -1)
    blocks = torch.split(rows, rows_in(_CHECK_ELEMENTS, rows.shape[1]))
    if rows.device.type == "cpu":
        finite = np.concatenate([_finite_rows(block) for block in blocks])
    else:  # a single transfer, after the last block
        finite = torch.cat([torch.isfinite(block).all(dim=1) for block in blocks]).cpu().numpy()
    if not finite.all():
        raise ValueError(f"{name} must be finite, got NaN or infinity in row {int(finite.argmin())}")


def _finite_rows(rows: Tensor) -> Bools:
    finite: Bools
    if rows.layout == torch.strided and rows.dtype in (torch.float32, torch.float64):
        # NumPy: torch's thread pool does not survive a fork, and a child would hang here.
        finite = np.isfinite(rows.resolve_neg().numpy()).all(axis=1)
    else:
        finite = torch.isfinite(rows).all(dim=1).numpy()
    return finite


def checked_pair_rows(pairs: Any, left_rows: int, right_rows: int) -> tuple[Tensor, Tensor]:
    """Return the row numbers of both sides of ``pairs``, ``(n, 2)``, each a row of its side."""
    numbers = as_tensor(pairs, "pairs")
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise TypeError(f"pairs must hold integers, got {numbers.dtype}")
    if numbers.ndim != 2 or numbers.shape[1] != 2:
        raise ValueError(f"pairs must have shape (n, 2), got {tuple(numbers.shape)}")
    left, right = numbers.long().unbind(1)
    for side, rows, name in ((left, left_rows, "x"), (right, right_rows, "y")):
        wrong = (side < 0) | (side >= rows)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise ValueError(f"pairs must name rows of {name} from 0 to below {rows}, got {int(side[at])} in pair {at}")
    return left, right


def as_device(value: Any, name: str) -> torch.device | None:
    """Return a torch device, or ``None`` unchanged.

    Raises:
        TypeError: ``value`` is of another type.
        ValueError: torch has no device of this name.
    """
    if value is None:
        return None
    if not isinstance(value, (str, int, torch.device)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a device of torch or its name, got {value!r} of type {type(value).__name__}")
    try:
        return torch.device(value)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name} must be a device of torch or its name, got {value!r}") from error


def check_distance(distance: Any) -> None:
    """Raise ``TypeError`` unless the object can be used as a distance."""
    if not callable(distance):
        raise TypeError(f"distance must be callable, got {type(distance).__name__}")
    if not hasattr(distance, "is_inverted"):
        raise TypeError(f"distance must have an attribute is_inverted, {type(distance).__name__} has none")


def check_embeddings(distance: Any, query: Any, reference: Any, names: Names, *, arrays_go_to: str) -> None:
    """Check that both are dense tensors on one device, of shapes that the distance accepts.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: a tensor is not dense, the devices or dimensions differ, or a shape is wrong.
    """
    for value, name in zip((query, reference), names, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(value).__name__}; arrays go to {arrays_go_to}")
        odd = oddity(value)
        if odd is not None:
            raise ValueError(f"{name} must be a dense tensor, got {odd}")
    both = " and ".join(names)
    if query.device != reference.device:
        raise ValueError(f"{both} must be on one device, got {query.device} and {reference.device}")
    own_check = getattr(distance, "check_shapes", None)
    if own_check is not None and not is_default_check(own_check):
        own_check(query, reference)
        return  # an override may accept other shapes
    for embeddings, name in zip((query, reference), names, strict=True):
        if embeddings.ndim != 2:
            raise ValueError(f"{name} must be 2-D (rows, dimensions), got shape {tuple(embeddings.shape)}")
    if query.shape[1] != reference.shape[1]:
        raise ValueError(
            f"{both} must have the same dimension, got {query.shape[1]} and {reference.shape[1]} dimensions"
        )
