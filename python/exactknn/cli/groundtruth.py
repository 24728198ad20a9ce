"""``exactknn groundtruth``: true neighbours in the file formats of benchmarks of approximate indexes.

::

    B (base), Q (queries) --> true neighbours --> .ivecs, .ibin    ids alone; --distances .fvecs, .fbin beside them
                              as by search        .bin             ids, then distances  (big-ann-benchmarks)
                                                  .hdf5, .h5       train, test, neighbors, distances (ann-benchmarks)
                                                  .npz             distances, indices

Files are read, staged and renamed as in ``exactknn search``.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from exactknn._arrays.blocks import rows_in
from exactknn._arrays.scalars import METRICS
from exactknn._io.outputs import DISTANCE_SUFFIXES, OutputFile, check_indices_fit, write_neighbours, write_truth
from exactknn._io.paths import check_output_suffix, suffix_of
from exactknn._io.vectors import VectorFile
from exactknn.cli.console import CommandError
from exactknn.cli.options import FORMATS, add_memory, add_running, exponent, new_command, positive
from exactknn.cli.search import check_distances_fit, find, rows_of, staged

TRUTH_SUFFIXES = (".ivecs", ".ibin", ".bin", ".hdf5", ".h5", ".npz")
"""Suffixes of the formats that `groundtruth` writes."""

_HDF5 = (".hdf5", ".h5")
# Bytes of vectors copied at a time.
_COPIED_BYTES = 1 << 24
# Names in ann-benchmarks, where "angular" is 1 - cosine similarity.
_HDF5_DISTANCES = {"euclidean": "euclidean", "cosine": "angular"}


_DESCRIPTION = """\
Write the true neighbours of every query in the format of a benchmark of approximate indexes.

Formats of the ground truth:
  .ivecs, .ibin        ids alone, int32 (TEXMEX; cuVS)
  .bin                 uint32 queries, uint32 k, then all ids, int32, then all distances, float32 (big-ann-benchmarks,
                       whose own files hold squared Euclidean distances or inner products)
  .hdf5, .h5           train (the base), test (the queries), neighbors and distances, attribute distance: euclidean, or
                       angular for --metric cosine (ann-benchmarks; not squared, 1 - similarity). Needs h5py
  .npz                 distances and indices

"""

_EPILOG = """\
examples:
  # ids and squared distances for big-ann-benchmarks
  exactknn groundtruth --base base.u8bin --query query.u8bin -k 100 --output truth.bin

  # ids in the TEXMEX format, and their distances
  exactknn groundtruth --base base.fvecs --query query.fvecs --output truth.ivecs --distances truth.fvecs

  # a base that does not fit in memory; after an interrupt, rerun the command to continue
  exactknn groundtruth --base base.fbin --query query.fbin --output truth.bin --max-memory 8GB --resume truth.state

  # a data set for ann-benchmarks
  exactknn groundtruth --base base.npy --query query.npy --metric cosine --output mine-angular.hdf5
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    command = new_command(
        commands,
        "groundtruth",
        run,
        "write the true neighbours in benchmark formats",
        _DESCRIPTION + FORMATS,
        _EPILOG,
    )
    command.set_defaults(exclude_self=False, reference_option="--base")
    command.add_argument(
        "--base",
        "--reference",
        dest="reference",
        required=True,
        metavar="B",
        help="file of the reference vectors",
    )
    command.add_argument("--query", required=True, metavar="Q", help="file of the query vectors")
    command.add_argument(
        "-k",
        type=positive,
        default=100,
        metavar="K",
        help="neighbours of each query, at least 1 (default: 100)",
    )
    command.add_argument(
        "--metric",
        choices=METRICS,
        help="metric to rank by and to write, as for 'exactknn search' (default: euclidean for .hdf5 and .h5, which "
        "allow only euclidean and cosine, else sqeuclidean)",
    )
    command.add_argument("--p", type=exponent, metavar="P", help="exponent of minkowski, above 0 (default: 2)")
    command.add_argument("--output", required=True, metavar="GT", help="file of the ground truth, see above")
    command.add_argument("--distances", metavar="OUT2", help="also write the distances here: .fvecs or .fbin (float32)")
    add_memory(command)
    add_running(command)


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code after finding the neighbours and writing the files."""
    _choose_metric(arguments, check_output_suffix(arguments.output, TRUTH_SUFFIXES, "--output"))
    return find(arguments, _open_outputs, _write)


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
    """Return the staged output files; checked before the search, so that no search is wasted."""
    suffix = suffix_of(arguments.output)
    check_indices_fit((base or query).rows, arguments.output, suffix)
    paths = {"--output": arguments.output}
    singles = {arguments.output: suffix} if suffix == ".bin" else {}
    if arguments.distances is not None:
        paths["--distances"] = arguments.distances
        singles[arguments.distances] = check_output_suffix(arguments.distances, DISTANCE_SUFFIXES, "--distances")
    for path, kind in singles.items():
        check_distances_fit(query, base, path, kind, "an .npz or .hdf5")
    return staged(paths, query, base, arguments, stack)


def _write(
    output: OutputFile,
    query: VectorFile,
    base: VectorFile | None,
    arguments: argparse.Namespace,
    distances: npt.NDArray[Any],
    indices: npt.NDArray[np.int64],
) -> None:
    """Write the neighbours in the format of the output's suffix."""
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
    """Write a data set for ann-benchmarks: the vectors in the types in which they were searched, ids as int32."""
    import h5py

    ids = np.int32 if base.rows <= 2**31 else np.int64
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(h5py.File(stream, "w"))
        file.attrs["type"] = "dense"
        file.attrs["distance"] = _HDF5_DISTANCES[metric]
        file.attrs["dimension"] = base.dimension
        file.attrs["point_type"] = "float"
        for name, vectors in (("train", base), ("test", query)):
            rows = file.create_dataset(name, (vectors.rows, vectors.dimension), vectors.dtype.newbyteorder("="))
            step = rows_in(_COPIED_BYTES, vectors.dimension * vectors.dtype.itemsize)
            start = 0
            # In blocks: the base may be larger than memory.
            for block in rows_of(vectors, stack).blocks(0, step, vectors.dtype.name):
                rows[start : start + len(block)] = block
                start += len(block)
        file.create_dataset("neighbors", data=indices.astype(ids))
        file.create_dataset("distances", data=distances)
