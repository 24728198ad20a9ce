"""``exactknn search``: files of vectors in, files of neighbours out. ``exactknn groundtruth`` takes the same course.

::

    headers checked --> outputs staged --+--> all vectors loaded ------> _core.knn ---+--> written, renamed into place
                                         +--> --max-memory, --resume --> _stream -----+
                                                    now and then, and at Ctrl-C --> checkpoint

What the two commands do not share is handed to `find`: how outputs are checked, and how neighbours are written.
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
"""Checks where the results of query and reference go and stages the files there, that of the neighbours first."""
Write = Callable[[OutputFile, VectorFile, VectorFile | None, argparse.Namespace, Any, Any], None]
"""Writes distances and indices of the neighbours to a staged file."""

_DESCRIPTION = """\
Find the k nearest reference vectors of every query vector.

"""

_EPILOG = """\
examples:
  # ids and distances in two files; formats of benchmarks: exactknn groundtruth
  exactknn search --query query.fvecs --reference base.fvecs -k 100 --output truth.ivecs --distances truth.fbin

  # neighbours of each row among the other rows
  exactknn search --query embeddings.npy -k 10 --metric cosine --output neighbours.npz

  # a reference that does not fit into memory; after Ctrl-C the same command goes on
  exactknn search --query query.fbin --reference base.fbin -k 100 --max-memory 2GB --resume search.state \\
      --output truth.ivecs

  # read the result
  python -c "import numpy; print(numpy.load('neighbours.npz')['indices'])"
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to those of the command line."""
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
    command.add_argument("--distances", metavar="OUT2", help="write the distances here too: .fbin or .fvecs (float32)")
    add_memory(command)
    add_running(command)


def run(arguments: argparse.Namespace) -> int:
    """Search, write the result and return the exit code."""
    return find(arguments, _open_outputs, _write)


def find(arguments: argparse.Namespace, open_outputs: OpenOutputs, write: Write) -> int:
    """Search, write the result, also the distances alone where they are wanted, and return the exit code.

    Args:
        arguments: of ``search`` or ``groundtruth``.
        open_outputs: checks where the results go, before the search.
        write: writes the neighbours, after it.

    Raises:
        CommandError, FileError: an argument or a file that is refused.
        KeyboardInterrupt: at Ctrl-C; its text says how to go on, where the state was kept.
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
                os.remove(os.path.realpath(arguments.resume))  # a link to it stays, as when it is replaced
    except KeyboardInterrupt as interrupt:
        if arguments.resume is not None and os.path.exists(arguments.resume):
            raise KeyboardInterrupt(f"; the same command goes on from {arguments.resume}") from interrupt
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
    """Refuse a ``-k`` that is too large for the files."""
    source = reference or query
    excludes_self = _excludes_self(reference, arguments)
    if arguments.k > source.rows - excludes_self:
        without = ", of which a query may return all but itself" if excludes_self else ""
        raise CommandError(f"-k {arguments.k} is too large: {source.path} has {source.rows} rows{without}")


def _open_outputs(
    query: VectorFile, reference: VectorFile | None, arguments: argparse.Namespace, stack: contextlib.ExitStack
) -> list[OutputFile]:
    """Check where the results go and stage the files there, so that no search is made in vain."""
    suffix = check_output_suffix(arguments.output, RESULT_SUFFIXES, "--output")
    paths = {"--output": arguments.output}
    check_indices_fit((reference or query).rows, arguments.output, suffix)
    if arguments.distances is not None:
        kind = check_output_suffix(arguments.distances, DISTANCE_SUFFIXES, "--distances")
        check_distances_fit(query, reference, arguments.distances, kind, "an .npz")
        paths["--distances"] = arguments.distances
    return staged(paths, query, reference, arguments, stack)


def check_distances_fit(query: VectorFile, reference: VectorFile | None, path: str, suffix: str, instead: str) -> None:
    """Refuse float64 distances for a file that holds float32 alone; ``instead`` names the kinds that hold them."""
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
    """Stage the files at these paths, by option, none of them an input or the state of the search."""
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
    # What an archive holds had to be read already.
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
            warn(f"going on from {checkpoint.path}, {large.fraction:.0%} done")

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
    """The rows of a file, to be read in blocks."""
    if vectors.offset is None:
        return ArrayRows(vectors.raw, vectors.dtype, False)
    return FileRows(vectors, stack.enter_context(open(vectors.source, "rb", buffering=0)))


def _keep(checkpoint: Checkpoint, large: ResumableSearch) -> None:
    """Write the state; a search does not end because that fails."""
    try:
        checkpoint.write(large.state())
    except (FileError, OSError) as error:
        warn(f"warning: --resume {checkpoint.path}: the state could not be kept: {error}")


def _about(query: VectorFile, reference: VectorFile | None, arguments: argparse.Namespace) -> dict[str, object]:
    """What a state is of: it is of no use where any of this is different."""
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
