"""``exactknn match``: all pairs of rows within a distance, found in blocks of queries.

    rows ──References.pairs, a block of queries at a time──> pairs ──self-search: each once──> Pairs of a block
                 the matches of a block set the size of the next

Without a reference each pair is found once: the lower row is the query.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from exactknn import _core
from exactknn._arrays.matrix import Pair, as_pair
from exactknn._io.outputs import PAIR_SUFFIXES, Pairs, write_pairs
from exactknn._io.paths import check_output_suffix
from exactknn._progress import Report, part_of
from exactknn._references import References
from exactknn.cli.console import CommandError, print_line, searching
from exactknn.cli.files import common_dtype, input_paths, open_inputs, put_in_place, stage
from exactknn.cli.options import FORMATS, add_inputs, add_running, new_command, real

_FIRST_CELLS = 1 << 24
"""Candidate pairs in the first block, before the share of matches is known."""
_BLOCK_PAIRS = 1 << 21
"""Target number of matches of a block of queries, estimated from the block before it."""
_BLOCK_QUERIES = 1 << 14
"""Maximum queries of a block."""


_DESCRIPTION = """\
Find all pairs of vectors whose distance is at most a threshold, such as near-duplicates.

Without --reference the vectors are compared with each other: every pair is written once, the lower row number first,
and no vector is paired with itself. The threshold is rounded to the type of the distances (float32, or float64 for
float64 vectors), so a pair matches if the threshold is its written distance.

"""

_EPILOG = """\
examples:
  # near-duplicates in a file of embeddings
  exactknn match --query embeddings.npy --metric cosine --threshold 0.05 --output pairs.csv

  # rows of the test set that occur in the training set
  exactknn match --query test.npy --reference train.npy --threshold 0 --output leaks.csv

  # read the result
  python -c "import numpy; print(numpy.load('pairs.npz')['query'])"
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    command = new_command(
        commands,
        "match",
        run,
        "find all pairs of vectors within a distance, such as near-duplicates",
        _DESCRIPTION + FORMATS,
        _EPILOG,
    )
    add_inputs(command)
    command.add_argument(
        "--threshold",
        required=True,
        type=real,
        metavar="T",
        help="the largest distance of a pair, in the units of the metric (sqeuclidean: squared); "
        "for inner_product the smallest product",
    )
    command.add_argument(
        "--output",
        required=True,
        metavar="OUT",
        help=".csv (lines query,reference,distance after a header), or .npz (arrays with these names)",
    )
    add_running(command)


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code after finding and writing the pairs."""
    query, reference = open_inputs(arguments)
    suffix = check_output_suffix(arguments.output, PAIR_SUFFIXES, "--output")
    dtype = np.dtype(np.float64 if common_dtype(query, reference) == np.float64 else np.float32)
    threshold = _rounded(arguments.threshold, dtype)
    with contextlib.ExitStack() as stack:
        (output,) = stage({"--output": arguments.output}, input_paths(query, reference), stack)
        pair = as_pair(query.load(), None if reference is None else reference.load())
        with searching(arguments) as progress:
            blocks = matches(
                pair,
                threshold,
                arguments.metric,
                p=arguments.p,
                exclude_self=arguments.exclude_self,
                num_threads=arguments.threads,
                progress=progress,
            )
            count = write_pairs(output.stream, suffix, blocks, dtype)
        put_in_place([output])
    among = "among themselves" if reference is None else f"with {reference.rows} references"
    print_line(f"wrote {output.path}: {count} pairs of {query.rows} queries {among}")
    return 0


def _rounded(threshold: float, dtype: np.dtype[Any]) -> float:
    """Return the threshold rounded to the type of the distances, so that written distances compare equal."""
    with np.errstate(all="ignore"):
        rounded = float(dtype.type(threshold))
    if math.isinf(rounded):
        raise CommandError(f"--threshold {threshold:g} is beyond {dtype.name}, the type of the distances")
    return rounded


def matches(
    pair: Pair,
    threshold: float,
    metric: str,
    *,
    p: float | None,
    exclude_self: bool,
    num_threads: int | None,
    progress: Report | None,
) -> Iterator[Pairs]:
    """Yield the pairs within the threshold, ordered by query row, then by reference row.

    Args:
        pair: the rows; without a reference each pair is found once, the lower row as the query.
        threshold: largest distance of a pair, smallest product for ``"inner_product"``.
        metric: of `exactknn.knn`.
        p: exponent of ``"minkowski"``.
        exclude_self: whether query ``i`` is not paired with reference ``i``.
        num_threads: threads, at least 1. ``None``: see `exactknn.set_num_threads`.
        progress: called with the finished fraction.

    Raises:
        ValueError: a row holds a NaN or infinity (the message names it), or the core rejects the arguments.
    """
    among_themselves, searched, n = pair.reference is None, pair.searched, len(pair.query)
    start, rows = 0, min(_FIRST_CELLS // max(1, len(searched)) + 1, _BLOCK_QUERIES)
    # No distance is negative: this call only checks for non-finite rows, reported by their number in the file.
    _core.radius(pair.query, pair.reference, -1.0, "sqeuclidean", num_threads=num_threads)
    references = References(pair, metric, p=p, exclude_self=exclude_self, num_threads=num_threads)
    while start < n:
        stop = min(start + rows, n)
        # In a self-search the lower row is the query: earlier blocks have already met the rows before this one.
        first = start if among_themselves else 0
        part = part_of(progress, _share(start, n, among_themselves), _share(stop, n, among_themselves))
        query, reference, distances = references.pairs(start, stop, threshold, since=first, progress=part)
        assert distances is not None, "return_distances is True"
        found = len(query)
        if among_themselves:
            upper = reference > query
            query, reference, distances = query[upper], reference[upper], distances[upper]
        yield Pairs(query, reference, distances)
        start, rows = stop, min(rows * _BLOCK_PAIRS // max(1, found), 2 * rows, _BLOCK_QUERIES)
        rows = max(1, rows)


def _share(row: int, n: int, among_themselves: bool) -> float:
    """Return the finished fraction when all queries before `row` are finished."""
    return 1 - (1 - row / n) ** 2 if among_themselves else row / n
