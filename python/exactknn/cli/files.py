"""Files that the commands read and write; errors name the option.

::

    paths --open_inputs--> VectorFile --> the command --> stage: OutputFile --put_in_place--> complete files
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exactknn._io.outputs import OutputFile
from exactknn._io.paths import same_file, source_of
from exactknn._io.vectors import VectorFile, open_vectors
from exactknn.cli.console import EXIT_FAILURE, CommandError
from exactknn.cli.options import check_exponent


def open_inputs(arguments: argparse.Namespace, most_bytes: float = math.inf) -> tuple[VectorFile, VectorFile | None]:
    """Return the opened query and reference files, after checking their headers and the options.

    Args:
        arguments: of ``search``, ``groundtruth`` or ``match``.
        most_bytes: size limit of an array of an ``.npz``, which has to be read whole.
    """
    check_exponent(arguments, "--metric", arguments.metric)
    query = open_vectors(arguments.query, most_bytes)
    reference = None if arguments.reference is None else open_vectors(arguments.reference, most_bytes)
    source = reference or query
    check_dimensions(query, source, "--query", arguments.reference_option)
    if arguments.exclude_self and query.rows > source.rows:
        raise CommandError(
            f"--exclude-self: the queries must be the first rows of the reference, but --query {query.path} has "
            f"{query.rows} rows and --reference {source.path} has {source.rows}"
        )
    return query, reference


def check_dimensions(query: VectorFile, reference: VectorFile, option: str, reference_option: str) -> None:
    """Reject files of different dimensions; the error names their options."""
    if query.dimension != reference.dimension:
        raise CommandError(
            f"{option} {query.path} has dimension {query.dimension}, {reference_option} {reference.path} has "
            f"{reference.dimension}; they must be equal"
        )


def input_paths(query: VectorFile, reference: VectorFile | None) -> list[str]:
    """Return the paths of the files as given, without a missing reference."""
    return [vectors.path for vectors in (query, reference) if vectors is not None]


def stage(paths: Mapping[str, str], inputs: Sequence[str], stack: contextlib.ExitStack) -> list[OutputFile]:
    """Return staged files for these options; none may replace an input or another output."""
    check_apart(paths, inputs)
    return [stack.enter_context(OutputFile(path)) for path in paths.values()]


def check_apart(paths: Mapping[str, str], inputs: Sequence[str]) -> None:
    """Reject output paths, given by option, that would replace an input or each other."""
    for (first, path), (second, other) in itertools.combinations(paths.items(), 2):
        if same_file(path, other):
            raise CommandError(f"{first} and {second} are the same file: {other}")
    for option, path in paths.items():
        for source in inputs:
            if same_file(path, source_of(source)):
                raise CommandError(f"{option} {path} would replace the input {source}")


def put_in_place(outputs: Sequence[OutputFile]) -> None:
    """Rename the files into place; all are complete before the first is renamed.

    Raises:
        CommandError: a file could not be put in its place. The others were, and it was written to a second place.
    """
    for output in outputs:
        output.finish()
    failures = []
    for output in outputs:
        try:
            output.commit()
        except OSError as error:
            place = output.rescue()
            saved = "" if place is None else f"; it was written to {place} instead"
            failures.append(f"{output.path}: {error.strerror}{saved}")
    if failures:
        raise CommandError("; ".join(failures), EXIT_FAILURE)


def common_dtype(query: VectorFile, reference: VectorFile | None) -> Any:
    """Return the type that represents the values of both files exactly, as `as_pair` does."""
    return query.dtype if reference is None else np.promote_types(query.dtype, reference.dtype)
