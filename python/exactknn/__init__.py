"""Exact k-nearest-neighbour search.

    knn(query, reference, k), radius(query, reference, r)             (references in blocks: _stream)
        -> _arrays: row-major views in CPU memory, zero-copy if the layout allows
        -> _core:   the Rust core (GIL released, interruptible by Ctrl-C), which reports to _progress
        -> (distances, indices), or (indptr, indices, distances), as NumPy arrays
    Index: the same searches over rows that are prepared once

Importing this package loads only NumPy and the native core. The PyTorch modules are ``exactknn.evaluation``,
``exactknn.distances``, ``exactknn.losses`` and ``exactknn.reducers``.
"""

from __future__ import annotations

import logging

from exactknn import _startup  # noqa: F401  # first: Ctrl-C during the other imports

try:
    from exactknn._core import (
        __version__,
        available_simd_levels,
        build_info,
        get_num_threads,
        set_num_threads,
        set_simd_level,
        simd_level,
    )
except ImportError as error:
    # From Python, NumPy or PyO3, in words that differ between their versions.
    if "interpreter" not in str(error) and "once per process" not in str(error):
        raise
    raise ImportError(
        "exactknn works in one interpreter of a process, as NumPy does, and cannot be imported in a subinterpreter: "
        "use threads or processes"
    ) from error
from exactknn._index import Index
from exactknn._recall import recall
from exactknn._search import knn, radius

__all__ = [
    "Index",
    "__version__",
    "available_simd_levels",
    "build_info",
    "get_num_threads",
    "knn",
    "radius",
    "recall",
    "set_num_threads",
    "set_simd_level",
    "simd_level",
]

# Without a handler, warnings would reach stderr through logging's last-resort handler.
logging.getLogger(__name__).addHandler(logging.NullHandler())
