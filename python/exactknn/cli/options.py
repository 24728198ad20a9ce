"""Options shared by several commands, and the types of their values.

A type raises ``argparse.ArgumentTypeError`` with what was expected and what was given; argparse prepends the option.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from exactknn._arrays.scalars import METRICS, as_bytes
from exactknn.cli.console import CommandError

FORMATS = """\
Vectors are read from
  .npy, .npz           NumPy: one 2-D array of float16, float32, float64 or 8- or 16-bit integers, never pickled;
                       file.npz:name selects one of several arrays
  .fvecs, .bvecs, .ivecs
                       per row: int32 dimension, then float32, uint8 or int32 values
  .fbin, .u8bin, .i8bin
                       uint32 rows, uint32 dimension, then float32, uint8 or int8 values
Integers are searched as float32, which represents them exactly.
"""


def new_command(
    commands: argparse._SubParsersAction[Any],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """Return the parser of a new command, which calls ``run``."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    return command


def add_inputs(command: argparse.ArgumentParser) -> None:
    """Add the inputs of `search` and `match`."""
    command.set_defaults(reference_option="--reference")
    command.add_argument("--query", required=True, metavar="Q", help="file of the query vectors")
    command.add_argument(
        "--reference",
        metavar="R",
        help="file of the reference vectors; default: the queries, each excluded from its own neighbours",
    )
    add_metric(command, "--metric")
    command.add_argument(
        "--exclude-self",
        action="store_true",
        help="the queries are the first rows of the reference: query i never returns row i",
    )


def add_metric(command: argparse.ArgumentParser, name: str) -> None:
    """Add the option of this name for the metric, and ``--p``."""
    command.add_argument(
        name,
        choices=METRICS,
        default="sqeuclidean",
        help="metric: sqeuclidean (default), euclidean, cosine (1 - similarity), cityblock, chebyshev, minkowski "
        "(see --p), smallest first; inner_product, largest first",
    )
    command.add_argument(
        "--p",
        type=exponent,
        metavar="P",
        help="exponent of minkowski, above 0: 1 is cityblock, 2 (default) euclidean, inf chebyshev",
    )


def add_memory(command: argparse.ArgumentParser) -> None:
    """Add the options for references that do not fit in memory."""
    command.add_argument(
        "--max-memory",
        type=size,
        metavar="SIZE",
        help="memory limit of the search, such as 2GB or 512MiB; the reference is read in blocks",
    )
    command.add_argument(
        "--resume",
        metavar="FILE",
        help="save the state of the search here, periodically and when interrupted; continue from it if it exists; "
        "remove it at the end",
    )


def add_running(command: argparse.ArgumentParser) -> None:
    """Add threads and progress."""
    command.add_argument("--threads", type=positive, metavar="N", help="number of threads (default: available cores)")
    command.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show progress on stderr (default: if stderr is a terminal)",
    )


def neighbours_wanted(text: str) -> int | str:
    """Return a number of neighbours, ``"all"`` or ``"max"``."""
    if text in ("all", "max"):
        return text
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, all or max, got {text!r}") from None


def real(text: str) -> float:
    """Return a finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return number


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def size(text: str) -> int:
    """Return a number of bytes, parsed by `as_bytes`."""
    try:
        return as_bytes(text, "it")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a size of at least one byte such as 2GB, 512MiB or 1500000000, got {text!r}"
        ) from None


def exponent(text: str) -> float:
    """Return a number above 0, possibly infinity."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, or inf, got {text!r}")
    return number


def check_exponent(arguments: argparse.Namespace, option: str, metric: str) -> None:
    """Reject ``--p`` unless the metric is ``minkowski``."""
    if arguments.p is not None and metric != "minkowski":
        raise CommandError(f"--p is for {option} minkowski only, got {option} {metric}")
