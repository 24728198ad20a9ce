"""``exactknn search``: files of vectors in, files of neighbours out. ``exactknn groundtruth`` shares its code.

::

    headers checked --> outputs staged --+--> all vectors loaded ------> _core.knn ---+--> written, renamed into place
                                         +--> --max-memory, --resume --> _stream -----+
                                                    periodically, and at Ctrl-C --> checkpoint

The two commands differ in how they check the outputs and write the neighbours: they pass both functions to `find`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from exactknn import _core
from exactknn._arrays.matrix import as_pair
from exactknn._io.errors import FileError
from exactknn._io.outputs import (
    DISTANCE_SUFFIXES,
    RESULT_SUFFIXES,
    OutputFile,
    check_indices_fit,
    write_matrix,
    write_neighbours,
)
from exactknn._io.paths import check_output_suffix, suffix_of
from exactknn._io.vectors import VectorFile
from exactknn._stream.checkpoint import Checkpoint
from exactknn._stream.plan import Search, plan_blocks
from exactknn._stream.rows import ArrayRows, FileRows, Rows
from exactknn._stream.search import ResumableSearch
from exactknn.cli.console import CommandError, print_line, searching, warn
from exactknn.cli.files import check_apart, common_dtype, input_paths, open_inputs, put_in_place, stage
from exactknn.cli.options import FORMATS, add_inputs, add_memory, add_running, new_command, positive

OpenOutputs = Callable[[VectorFile, VectorFile | None, argparse.Namespace, contextlib.ExitStack], list[OutputFile]]
"""Checks the output options for query and reference and stages the output files, the neighbours first."""
Write = Callable[[OutputFile, VectorFile, VectorFile | None, argparse.Namespace, Any, Any], None]
"""Writes the distances and indices of the neighbours to a staged file."""

_DESCRIPTION = """\
Find the k nearest reference vectors of every query vector.

"""

_EPILOG = """\
examples:
  # ids and distances in two files; formats of benchmarks: exactknn groundtruth
  exactknn search --query query.fvecs --reference base.fvecs -k 100 --output truth.ivecs --distances truth.fbin

  # neighbours of each row among the other rows
  exactknn search --query embeddings.npy -k 10 --metric cosine --output neighbours.npz

  # a reference that does not fit in memory; after Ctrl-C, rerun the command to continue
  exactknn search --query query.fbin --reference base.fbin -k 100 --max-memory 2GB --resume search.state \\
      --output truth.ivecs

  # read the result
  python -c "import numpy; print(numpy.load('neighbours.npz')['indices'])"
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    command = new_command(
        commands, "search", run, "find the nearest neighbours of the vectors in a file", _DESCRIPTION + FORMATS, _EPILOG
    )
    add_inputs(command)
    command.add_argument("-k", required=True, type=positive, metavar="K", help="neighbours of each query, at least 1")
    command.add_argument(
        "--output",
        required=True,
        metavar="OUT",
        help=".npz (arrays distances and indices), or .ivecs or .ibin (indices alone, int32)",
    )
    command.add_argument("--distances", metavar="OUT2", help="also write the distances here: .fbin or .fvecs (float32)")
    add_memory(command)
    add_running(command)


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code after searching and writing the result."""
    return find(arguments, _open_outputs, _write)


def find(arguments: argparse.Namespace, open_outputs: OpenOutputs, write: Write) -> int:
    """Return the exit code after searching and writing the neighbours and, with ``--distances``, the distances.

    Args:
        arguments: of ``search`` or ``groundtruth``.
        open_outputs: checks and stages the outputs before the search.
        write: writes the neighbours after the search.

    Raises:
        CommandError, FileError: an argument or a file is invalid.
        KeyboardInterrupt: at Ctrl-C; if the state was saved, its text says how to continue.
    """
    most_bytes = math.inf if arguments.max_memory is None else arguments.max_memory
    try:
        query, reference = open_inputs(arguments, most_bytes)
        _check_count(query, reference, arguments)
        with contextlib.ExitStack() as stack:
            outputs = open_outputs(query, reference, arguments, stack)
            if arguments.max_memory is None and arguments.resume is None:
                distances, indices = _neighbours(query, reference, arguments)
            else:
                distances, indices = _neighbours_in_blocks(query, reference, arguments, stack)
            neighbours, *others = outputs
            write(neighbours, query, reference, arguments, distances, indices)
            for output in others:
                write_matrix(output.stream, suffix_of(output.path), distances)
            put_in_place(outputs)
        if arguments.resume is not None:
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.realpath(arguments.resume))  # keep a symbolic link to it, as replacing it does
    except KeyboardInterrupt as interrupt:
        if arguments.resume is not None and os.path.exists(arguments.resume):
            raise KeyboardInterrupt(f"; rerun the command to continue from {arguments.resume}") from interrupt
        raise
    rows, columns = indices.shape
    for output in outputs:
        print_line(f"wrote {output.path}: {rows} queries, {columns} neighbours each")
    return 0


def _write(
    output: OutputFile,
    query: VectorFile,
    reference: VectorFile | None,
    arguments: argparse.Namespace,
    distances: Any,
    indices: Any,
) -> None:
    write_neighbours(output.stream, suffix_of(output.path), distances, indices)


def _check_count(query: VectorFile, reference: VectorFile | None, arguments: argparse.Namespace) -> None:
    """Reject a ``-k`` that is too large for the files."""
    source = reference or query
    excludes_self = _excludes_self(reference, arguments)
    if arguments.k > source.rows - excludes_self:
        without = ", and a query may return all but itself" if excludes_self else ""
        raise CommandError(f"-k {arguments.k} is too large: {source.path} has {source.rows} rows{without}")


def _open_outputs(
    query: VectorFile, reference: VectorFile | None, arguments: argparse.Namespace, stack: contextlib.ExitStack
) -> list[OutputFile]:
    """Return the staged output files; checked before the search, so that no search is wasted."""
    suffix = check_output_suffix(arguments.output, RESULT_SUFFIXES, "--output")
    paths = {"--output": arguments.output}
    check_indices_fit((reference or query).rows, arguments.output, suffix)
    if arguments.distances is not None:
        kind = check_output_suffix(arguments.distances, DISTANCE_SUFFIXES, "--distances")
        check_distances_fit(query, reference, arguments.distances, kind, "an .npz")
        paths["--distances"] = arguments.distances
    return staged(paths, query, reference, arguments, stack)


def check_distances_fit(query: VectorFile, reference: VectorFile | None, path: str, suffix: str, instead: str) -> None:
    """Reject float64 distances for a float32 file format; ``instead`` names the formats that hold float64."""
    if common_dtype(query, reference) == np.float64:
        raise CommandError(
            f"{path}: float64 vectors have float64 distances, which {suffix} cannot hold; "
            f"write them to {instead} with --output"
        )


def staged(
    paths: dict[str, str],
    query: VectorFile,
    reference: VectorFile | None,
    arguments: argparse.Namespace,
    stack: contextlib.ExitStack,
) -> list[OutputFile]:
    """Return staged files for these paths by option; none may be an input or the state of the search."""
    inputs = input_paths(query, reference)
    if arguments.resume is not None:
        check_apart({**paths, "--resume": arguments.resume}, inputs)
    return stage(paths, inputs, stack)


def _neighbours(query: VectorFile, reference: VectorFile | None, arguments: argparse.Namespace) -> tuple[Any, Any]:
    pair = as_pair(query.load(), None if reference is None else reference.load())
    with searching(arguments) as progress:
        return _core.knn(
            pair.query,
            pair.reference,
            arguments.k,
            arguments.metric,
            exclude_self=_excludes_self(reference, arguments),
            num_threads=arguments.threads,
            progress=progress,
            p=arguments.p,
        )


def _excludes_self(reference: VectorFile | None, arguments: argparse.Namespace) -> bool:
    return reference is None or arguments.exclude_self


def _neighbours_in_blocks(
    query: VectorFile, reference: VectorFile | None, arguments: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[Any, Any]:
    queries = rows_of(query, stack)
    references = queries if reference is None else rows_of(reference, stack)
    exclude_self = _excludes_self(reference, arguments)
    search = Search(arguments.k, arguments.metric, arguments.p, exclude_self, arguments.threads)
    # Arrays of an archive are in memory already.
    held = sum(vectors.raw.nbytes for vectors in (query, reference) if vectors is not None and not vectors.is_mapped)
    keeps_state = arguments.resume is not None
    try:
        plan = plan_blocks(queries, references, search, arguments.max_memory, held=held, keeps_state=keeps_state)
    except ValueError as error:
        raise CommandError(str(error).replace("max_memory", "--max-memory", 1)) from error
    with searching(arguments) as progress:
        large = ResumableSearch(queries, references, search, plan)
        if not keeps_state:
            return large.run(progress)
        checkpoint = Checkpoint(arguments.resume, _about(query, reference, arguments))
        if checkpoint.restore(large):
            warn(f"continuing from {checkpoint.path}, {large.fraction:.0%} done")

        def keep() -> None:
            if checkpoint.is_due():
                _keep(checkpoint, large)

        try:
            return large.run(progress, keep)
        except KeyboardInterrupt:
            if large.fraction > 0:
                _keep(checkpoint, large)
            raise


def rows_of(vectors: VectorFile, stack: contextlib.ExitStack) -> Rows:
    """Return the rows of a file, to be read in blocks."""
    if vectors.offset is None:
        return ArrayRows(vectors.raw, vectors.dtype, False)
    return FileRows(vectors, stack.enter_context(open(vectors.source, "rb", buffering=0)))


def _keep(checkpoint: Checkpoint, large: ResumableSearch) -> None:
    """Write the state; if that fails, warn and let the search continue."""
    try:
        checkpoint.write(large.state())
    except (FileError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        warn(f"warning: --resume {checkpoint.path}: the state could not be saved: {reason or error}")


def _about(query: VectorFile, reference: VectorFile | None, arguments: argparse.Namespace) -> dict[str, object]:
    """Return what identifies the search; a state is rejected if any of it differs."""
    about: dict[str, object] = {
        "the version of exactknn": _core.__version__,
        "-k": arguments.k,
        "--metric": arguments.metric,
        "--p": arguments.p,
        "--exclude-self": _excludes_self(reference, arguments),
        "--max-memory": arguments.max_memory,
    }
    for option, vectors in (("--query", query), (arguments.reference_option, reference)):
        if vectors is None:
            about[option] = None
            continue
        status = vectors.source.stat()
        about |= {
            option: os.path.realpath(vectors.path),
            f"the size of {option}": status.st_size,
            f"the time of the last change of {option} (ns)": status.st_mtime_ns,
            f"what {option} holds": f"{vectors.rows} x {vectors.dimension} {vectors.dtype.name}",
        }
    return about
