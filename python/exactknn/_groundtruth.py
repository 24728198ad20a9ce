"""The command ``exactknn groundtruth``: true neighbours in the files that benchmarks of approximate indexes read.

::

    B (base), Q (queries) --> true neighbours --> .ivecs, .ibin    ids alone; --distances .fvecs, .fbin beside them
                              as search finds     .bin             ids, then distances  (big-ann-benchmarks)
                                                  .hdf5, .h5       train, test, neighbors, distances (ann-benchmarks)
                                                  .npz             distances, indices

Files are read, staged and put in place as those of ``exactknn search``.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from exactknn import _cli_options, _texts
from exactknn._arrays.scalars import METRICS
from exactknn._command import CommandError
from exactknn._io.errors import FileError
from exactknn._io.outputs import DISTANCE_SUFFIXES, check_indices_fit, write_neighbours, write_truth
from exactknn._io.paths import check_output_suffix, suffix_of

if TYPE_CHECKING:
    from exactknn._io.outputs import OutputFile
    from exactknn._io.vectors import VectorFile

TRUTH_SUFFIXES = (".ivecs", ".ibin", ".bin", ".hdf5", ".h5", ".npz")
"""What a ground truth can be written to."""

_HDF5 = (".hdf5", ".h5")
# Vectors that are copied at once.
_COPIED_BYTES = 1 << 24
# What ann-benchmarks calls them, whose "angular" is 1 - cosine similarity.
_HDF5_DISTANCES = {"euclidean": "euclidean", "cosine": "angular"}


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to those of the command line."""
    command = commands.add_parser(
        "groundtruth",
        help="write the true neighbours in the formats of benchmarks",
        description=_texts.GROUNDTRUTH_DESCRIPTION + _texts.FORMATS,
        epilog=_texts.GROUNDTRUTH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run, exclude_self=False, reference_option="--base")
    command.add_argument(
        "--base",
        "--reference",
        dest="reference",
        required=True,
        metavar="B",
        help="file of the vectors to search among",
    )
    command.add_argument("--query", required=True, metavar="Q", help="file of the query vectors")
    command.add_argument(
        "-k",
        type=_cli_options.positive,
        default=100,
        metavar="K",
        help="neighbours of each query, at least 1 (default: 100)",
    )
    command.add_argument(
        "--metric",
        choices=METRICS,
        help="what to rank by and which values to write, as for 'exactknn search' (default: euclidean for .hdf5 and "
        ".h5, which take that and cosine only, else sqeuclidean)",
    )
    command.add_argument(
        "--p", type=_cli_options.exponent, metavar="P", help="exponent of minkowski, above 0 (default: 2)"
    )
    command.add_argument("--output", required=True, metavar="GT", help="where the ground truth goes, see above")
    command.add_argument("--distances", metavar="OUT2", help="write the distances here too: .fvecs or .fbin (float32)")
    _cli_options.add_memory(command)
    _cli_options.add_running(command)


def run(arguments: argparse.Namespace) -> int:
    """Find the neighbours, write the files and return the exit code."""
    from exactknn import _cli_search

    try:
        _choose_metric(arguments, check_output_suffix(arguments.output, TRUTH_SUFFIXES, "--output"))
    except FileError as error:
        raise CommandError(str(error)) from error
    return _cli_search.find(arguments, _open_outputs, _write)


def _choose_metric(arguments: argparse.Namespace, suffix: str) -> None:
    if suffix not in _HDF5:
        arguments.metric = arguments.metric or "sqeuclidean"
        return
    arguments.metric = arguments.metric or "euclidean"
    if arguments.metric not in _HDF5_DISTANCES:
        raise CommandError(
            f"--output {arguments.output}: {suffix} files hold euclidean or cosine ('angular') distances, "
            f"got --metric {arguments.metric}"
        )
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        raise CommandError(
            f"--output {arguments.output} needs h5py, which is not installed: pip install 'exactknn[hdf5]'"
        ) from error


def _open_outputs(
    query: VectorFile, base: VectorFile | None, arguments: argparse.Namespace, stack: contextlib.ExitStack
) -> list[OutputFile]:
    """Check where the results go and stage the files there, so that no search is made in vain."""
    from exactknn import _cli_search

    suffix = suffix_of(arguments.output)
    check_indices_fit((base or query).rows, arguments.output, suffix)
    paths = {"--output": arguments.output}
    singles = {arguments.output: suffix} if suffix == ".bin" else {}
    if arguments.distances is not None:
        paths["--distances"] = arguments.distances
        singles[arguments.distances] = check_output_suffix(arguments.distances, DISTANCE_SUFFIXES, "--distances")
    for path, kind in singles.items():
        _cli_search.check_distances_fit(query, base, path, kind, "an .npz or .hdf5")
    return _cli_search.staged(paths, query, base, arguments, stack)


def _write(
    output: OutputFile,
    query: VectorFile,
    base: VectorFile | None,
    arguments: argparse.Namespace,
    distances: npt.NDArray[Any],
    indices: npt.NDArray[np.int64],
) -> None:
    """Write the neighbours as the suffix of the output says."""
    suffix = suffix_of(output.path)
    if suffix in _HDF5:
        _write_hdf5(output.stream, query, base or query, arguments.metric, distances, indices)
    elif suffix == ".bin":
        write_truth(output.stream, distances, indices)
    else:
        write_neighbours(output.stream, suffix, distances, indices)


def _write_hdf5(
    stream: IO[bytes],
    query: VectorFile,
    base: VectorFile,
    metric: str,
    distances: npt.NDArray[Any],
    indices: npt.NDArray[np.int64],
) -> None:
    """Write what ann-benchmarks reads: the vectors in the types in which they were searched, ids as int32."""
    import h5py

    from exactknn import _cli_search

    ids = np.int32 if base.rows <= 2**31 else np.int64
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(h5py.File(stream, "w"))
        file.attrs["type"] = "dense"
        file.attrs["distance"] = _HDF5_DISTANCES[metric]
        file.attrs["dimension"] = base.dimension
        file.attrs["point_type"] = "float"
        for name, vectors in (("train", base), ("test", query)):
            rows = file.create_dataset(name, (vectors.rows, vectors.dimension), vectors.dtype.newbyteorder("="))
            step = max(1, _COPIED_BYTES // (vectors.dimension * vectors.dtype.itemsize))
            start = 0
            # In blocks: the base may be larger than memory.
            for block in _cli_search.rows_of(vectors, stack).blocks(0, step, vectors.dtype.name):
                rows[start : start + len(block)] = block
                start += len(block)
        file.create_dataset("neighbors", data=indices.astype(ids))
        file.create_dataset("distances", data=distances)
