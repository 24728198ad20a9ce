"""``exactknn evaluate``: embeddings and labels in, retrieval metrics, classes and a page out."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from exactknn._arrays.matrix import as_pair, first_row_not_finite
from exactknn._io.labels import read_labels
from exactknn._io.outputs import OutputFile
from exactknn._io.paths import check_output_suffix
from exactknn._io.vectors import VectorFile, open_vectors
from exactknn._retrieval.evaluate import Evaluation, evaluate
from exactknn._retrieval.metrics import BUILT_IN
from exactknn._retrieval.names import check_metrics
from exactknn._retrieval.task import Task
from exactknn.cli.console import CommandError, print_line, searching, warn
from exactknn.cli.files import check_dimensions, put_in_place, stage
from exactknn.cli.options import add_metric, add_running, check_exponent, neighbours_wanted, new_command
from exactknn.cli.page import page
from exactknn.cli.report import as_json, as_table, per_class_csv

_DESCRIPTION = """\
Score embeddings by retrieval: are the nearest references of a query of its class?

Vectors are read from the files that 'exactknn search' reads. Labels, one for each row, from
  .npy, .npz           NumPy: one 1-D array of integers, floats, booleans or text; file.npz:name chooses among several
  .txt, .csv           UTF-8 text, one label a line, no header; text that is all whole numbers is read as numbers
They are compared exactly.
"""

_EPILOG = """\
metrics (of one query; the value is the mean over queries that have a reference of their class):
  mean_average_precision         mean of the precisions at the ranks of all references of its class
  mean_average_precision_at_r    the same, only among the first R, R being how many references its class has
  mean_reciprocal_rank           1 / rank of the nearest reference of its class
  precision_at_1                 whether the nearest reference is of its class
  r_precision                    share of its class among the first R
  precision_at_<k>               share of its class among the first k
  recall_at_<k>, hit_rate_at_<k> whether any of the first k is of its class
  found_fraction_at_<k>          share of the references of its class that are among the first k
  ndcg_at_<k>                    discounted gain of the first k, 1 when the references of its class come first
  knn_accuracy_at_<k>            whether its class wins the vote of the first k
  knn_softmax_accuracy_at_<k>    the same, near ones counted more (temperature 0.07)

examples:
  # a validation set against itself, and a page to look at
  exactknn evaluate --embeddings val.npy --labels val_labels.npy --report report.html

  # queries against a gallery, by cosine distance
  exactknn evaluate --embeddings query.npy --labels query.csv --reference gallery.npy --reference-labels gallery.csv \\
      --distance cosine --metrics recall_at_1 recall_at_10 mean_average_precision_at_r --json
"""

_EVALUATED_FILES = ("embeddings", "labels", "reference", "reference_labels")


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to those of the command line."""
    command = new_command(
        commands, "evaluate", run, "score embeddings and their labels by retrieval", _DESCRIPTION, _EPILOG
    )
    command.add_argument("--embeddings", required=True, metavar="E", help="file of the vectors: the queries")
    command.add_argument("--labels", required=True, metavar="L", help="file of their labels")
    command.add_argument(
        "--reference", metavar="R", help="file of the vectors to search among; without it, all other queries"
    )
    command.add_argument("--reference-labels", metavar="RL", help="file of the labels of the reference")
    command.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help="what to compute, see below (default: the first five); the first orders the classes of the report",
    )
    command.add_argument(
        "-k",
        type=neighbours_wanted,
        default="all",
        metavar="K",
        help="neighbours that metrics without a number of their own look at: a number of at least 1, all (default) or "
        "max: as many as the largest class has references",
    )
    add_metric(command, "--distance")
    command.add_argument("--per-class", metavar="OUT", help="write the mean of each class here: .csv")
    command.add_argument("--report", metavar="OUT", help="write one page with figures and tables here: .html")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_running(command)


def run(arguments: argparse.Namespace) -> int:
    """Score the embeddings, print and write the result, and return the exit code."""
    check_exponent(arguments, "--distance", arguments.distance)
    if (arguments.reference is None) != (arguments.reference_labels is None):
        raise CommandError("--reference and --reference-labels go together, got only one of them")
    metrics = list(dict.fromkeys(arguments.metrics or BUILT_IN))
    try:
        check_metrics(metrics)
    except ValueError as error:
        raise CommandError(f"--metrics: {error}") from error
    with contextlib.ExitStack() as stack:
        per_class, report = _open_reports(arguments, stack)
        task = _task(arguments)
        with searching(arguments) as progress:
            scores = evaluate(
                task,
                metrics,
                arguments.k,
                details=report is not None,
                num_threads=arguments.threads,
                progress=progress,
            )
        if per_class is not None:
            per_class.stream.write(per_class_csv(task, scores).encode("utf-8", "backslashreplace"))
        if report is not None:
            names = {name: getattr(arguments, name) for name in _EVALUATED_FILES if getattr(arguments, name)}
            report.stream.write(page(task, scores, names).encode())
        outputs = [output for output in (per_class, report) if output is not None]
        put_in_place(outputs)
    _warn_of_gaps(arguments, scores)
    print(as_json(task, scores) if arguments.json else as_table(task, scores))
    if not arguments.json:
        for output in outputs:
            print_line(f"wrote {output.path}")
    return 0


def _open_reports(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[OutputFile | None, ...]:
    """Stage the file of the classes and the page, where they are wanted."""
    wanted = {"--per-class": (arguments.per_class, (".csv",)), "--report": (arguments.report, (".html", ".htm"))}
    paths = {option: path for option, (path, _) in wanted.items() if path is not None}
    for option, path in paths.items():
        check_output_suffix(path, wanted[option][1], option)
    inputs = [path for name in _EVALUATED_FILES if (path := getattr(arguments, name)) is not None]
    staged = dict(zip(paths, stage(paths, inputs, stack), strict=True))
    return tuple(staged.get(option) for option in wanted)


def _task(arguments: argparse.Namespace) -> Task:
    """Read the files, whose headers are checked before the values of any is touched."""
    query = open_vectors(arguments.embeddings)
    reference = None if arguments.reference is None else open_vectors(arguments.reference)
    if query.rows == 0:
        raise CommandError(f"--embeddings {query.path} has no rows; wanted at least one query")
    check_dimensions(query, reference or query, "--embeddings", "--reference")
    labels = _labels(arguments.labels, "--labels", query)
    reference_labels = None
    if reference is not None:
        reference_labels = _labels(arguments.reference_labels, "--reference-labels", reference)
    rows = as_pair(query.load(), None if reference is None else reference.load())
    for path, array in ((arguments.embeddings, rows.query), (arguments.reference, rows.reference)):
        row = None if array is None else first_row_not_finite(array)
        if row is not None:
            raise CommandError(f"{path}: row {row} holds a NaN or an infinity; wanted finite values")
    try:
        return Task.of(rows, labels, reference_labels, arguments.distance, arguments.p)
    except ValueError as error:
        files = [path for path in (arguments.labels, arguments.reference_labels) if path is not None]
        raise CommandError(f"{', '.join(files)}: {error}") from error


def _labels(path: str, option: str, vectors: VectorFile) -> Any:
    labels = read_labels(path)
    if len(labels) != vectors.rows:
        header = " (the first line must not be a header)" if len(labels) == vectors.rows + 1 else ""
        raise CommandError(
            f"{option} {path} has {len(labels)} labels, {vectors.path} has {vectors.rows} rows; "
            f"wanted one label for each row{header}"
        )
    return labels


def _warn_of_gaps(arguments: argparse.Namespace, scores: Evaluation) -> None:
    if not scores.counted.any():
        warn("warning: no query has a reference of its class: every metric is NaN")
    elif scores.cut_short:
        warn(
            f"warning: -k {arguments.k} is below the largest number of references of a class, "
            f"{scores.relevant_counts.max()}, and cuts {' and '.join(scores.cut_short)} short; "
            "-k max looks at as many as are needed"
        )
