"""Names of metrics and votes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from exactknn._retrieval.hits import Hits
from exactknn._retrieval.metrics import (
    BUILT_IN,
    Metric,
    found_fraction_at,
    hit_rate_at,
    ndcg_at,
    precision_at,
)
from exactknn._retrieval.types import Floats
from exactknn._retrieval.votes import Vote

_AT_K: dict[str, Callable[[Hits, int], Floats]] = {
    "precision": precision_at,
    "recall": hit_rate_at,
    "hit_rate": hit_rate_at,
    "found_fraction": found_fraction_at,
    "ndcg": ndcg_at,
}
_NUMBERED = re.compile(r"([a-z_]+)_at_([1-9][0-9]{0,17})")  # any more digits would not fit 64 bits


def numbered(name: str) -> tuple[str, int] | None:
    """Return the parts of a name such as ``precision_at_10``; ``None`` if it has another form."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def metric_named(name: str) -> Metric | None:
    """Return the rank metric of this name, such as ``precision_at_10``; ``None`` if there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    parts = numbered(name)
    if parts is None or parts[0] not in _AT_K:
        return None
    function, k = _AT_K[parts[0]], parts[1]
    return Metric(name, lambda hits: function(hits, k), neighbours=k)


# Temperature of the neighbours' weights in the vote; None: equal weights.
_VOTES = {"knn_accuracy": None, "knn_softmax_accuracy": 0.07}
NUMBERED_NAMES = tuple(f"{name}_at_<k>" for name in (*_AT_K, *_VOTES))
"""Names in which ``<k>`` stands for a number of at least 1."""


def vote_named(name: str) -> Vote | None:
    """Return the vote of this name, such as ``knn_accuracy_at_20``; ``None`` if there is none."""
    parts = numbered(name)
    return None if parts is None or parts[0] not in _VOTES else Vote(parts[1], _VOTES[parts[0]])


def is_name(name: str) -> bool:
    """Return whether this is the name of a metric computed here."""
    return metric_named(name) is not None or vote_named(name) is not None


def known_metrics() -> tuple[str, ...]:
    """Return the names that `evaluate` accepts; ``<k>`` stands for a number of at least 1."""
    return (*BUILT_IN, *NUMBERED_NAMES)


def check_metrics(names: Sequence[str]) -> None:
    """Check that all names are known.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    for name in names:
        if not is_name(name):
            raise ValueError(f"unknown metric {name!r}; known: {', '.join(known_metrics())}")
