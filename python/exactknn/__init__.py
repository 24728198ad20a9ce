"""Exact k-nearest-neighbour search.

    knn(query, reference, k), radius(query, reference, r)             (references in blocks: _stream)
        -> _arrays: row-major views in CPU memory, no copy where the layout allows
        -> _core:   the Rust core (GIL released, Ctrl-C answered), which tells _progress how far it is
        -> (distances, indices), or (indptr, indices, distances), as NumPy arrays
    Index: the same searches of rows that are prepared once

Importing this package loads NumPy and the native core only. The parts for PyTorch live in
``exactknn.evaluation`` and ``exactknn.distances``.
"""

from __future__ import annotations

import logging

from exactknn._core import (
    __version__,
    available_simd_levels,
    build_info,
    get_num_threads,
    set_num_threads,
    set_simd_level,
    simd_level,
)
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

# Without a handler of its own a library's warnings would reach stderr through logging's last resort.
logging.getLogger(__name__).addHandler(logging.NullHandler())
