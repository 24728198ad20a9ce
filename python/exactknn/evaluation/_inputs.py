"""Arguments of one evaluation, checked and converted; repeated rows of one id removed.

embeddings ──as_embeddings──> rows of one type ─┐
labels     ──label_tensors──> labels of one type ├─ first row of each id ──check_inputs──> Inputs
ids        ──label_tensors──> numbers           ─┘
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exactknn._retrieval.types import Ints
from exactknn.evaluation._checks import as_embeddings, check_inputs
from exactknn.evaluation._dispatch import same_memory
from exactknn.evaluation._labels import Labels, label_tensors

_IDS = ("ids", "reference_ids")


class Inputs(NamedTuple):
    """Tensors on one device; ``reference`` is ``query`` if the queries are searched among themselves."""

    query: Tensor
    query_labels: Tensor
    reference: Tensor
    reference_labels: Tensor
    ref_includes_query: bool
    labels: Labels
    """All labels, with the texts of their codes."""


def checked_inputs(
    query: Any,
    query_labels: Any,
    reference: Any,
    reference_labels: Any,
    ref_includes_query: bool,
    ids: Any,
    reference_ids: Any,
    device: torch.device | None,
) -> Inputs:
    """Return the arguments of `AccuracyCalculator.get_accuracy` as tensors. Raises as documented there."""
    if (reference is None) != (reference_labels is None):
        given, missing = (
            ("reference", "reference_labels") if reference_labels is None else ("reference_labels", "reference")
        )
        raise ValueError(f"{missing} must be given together with {given}")
    rows = as_embeddings(query, "query", device)
    own_rows = False
    labels = label_tensors(query_labels, reference_labels, rows.device)
    if reference is None or labels.reference is None:
        result = Inputs(rows, labels.query, rows, labels.query, True, labels)
    else:
        others = as_embeddings(reference, "reference", rows.device)
        own_rows = not ref_includes_query and (query is reference or same_memory(rows, others))
        dtype = torch.promote_types(rows.dtype, others.dtype)
        rows, others = rows.to(dtype), others.to(dtype)
        result = Inputs(rows, labels.query, others, labels.reference, bool(ref_includes_query), labels)
    check_inputs(*result[:5])
    if own_rows:
        _warn_of_own_rows()
    return result if ids is None and reference_ids is None else _without_repeats(result, ids, reference_ids)


def _warn_of_own_rows() -> None:
    warnings.warn(
        "query and reference are the same embeddings, so each query finds itself first; "
        "leave out the reference, or pass ref_includes_query=True, to exclude each from its own neighbours",
        stacklevel=5,  # the caller of get_accuracy, which `undisturbed` wraps
    )


def _without_repeats(given: Inputs, ids: Any, reference_ids: Any) -> Inputs:
    """Return the inputs with the first row of each id only."""
    among_themselves = given.reference is given.query
    if among_themselves and reference_ids is not None:
        raise ValueError("reference_ids must be given with a reference only, got them without")
    if given.ref_includes_query and not among_themselves:
        if ids is None or reference_ids is None:
            missing = "ids" if ids is None else "reference_ids"
            raise ValueError(f"{missing} must be given, because ref_includes_query is set and the other ids are given")
        both = label_tensors(ids, reference_ids, torch.device("cpu"), _IDS)
        assert both.reference is not None, "both were given"
        own, begin = both.query.numpy(), both.reference.numpy()[: len(given.query)]
        if own.shape == begin.shape == (len(given.query),):  # other shapes are errors below
            wrong = np.flatnonzero(own != begin)
            if wrong.size:
                row = int(wrong[0])
                raise ValueError(
                    "reference_ids must begin with the ids when ref_includes_query is set, "
                    f"row {row} has {both.text_of(begin[row])} for {both.text_of(own[row])}"
                )
    query, query_labels = given.query, given.query_labels
    if ids is not None:
        kept = _first_rows(ids, "ids", query_labels, "query")
        query, query_labels = query[kept], query_labels[kept]
    if among_themselves:
        return Inputs(query, query_labels, query, query_labels, True, given.labels)
    reference, reference_labels = given.reference, given.reference_labels
    if reference_ids is not None:
        kept = _first_rows(reference_ids, "reference_ids", reference_labels, "reference")
        reference, reference_labels = reference[kept], reference_labels[kept]
    return Inputs(query, query_labels, reference, reference_labels, given.ref_includes_query, given.labels)


def _first_rows(ids: Any, name: str, labels: Tensor, side: str) -> Tensor:
    """Return the first row of each id, ascending, int64 on the labels' device."""
    numbers = label_tensors(ids, None, torch.device("cpu"), (name, name)).query.numpy()
    if numbers.shape != (len(labels),):
        raise ValueError(f"{name} must hold one id for each {side} row, ({len(labels)},), got shape {numbers.shape}")
    if np.isnan(numbers).any():
        raise ValueError(
            f"{name} must not be NaN, which names no item, got NaN in row {int(np.isnan(numbers).argmax())}"
        )
    first: Ints
    _, first, place = np.unique(numbers, return_index=True, return_inverse=True)
    values = labels.cpu().numpy().reshape(len(labels), -1)
    wrong = np.flatnonzero((values != values[first[place]]).any(axis=1))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(f"{name} must name rows of one label, but rows {first[place[row]]} and {row} have two")
    return torch.from_numpy(np.sort(first)).to(labels.device)
