"""``exactknn evaluate``: embeddings and labels in; retrieval metrics, means per class and an HTML report out."""

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
from exactknn.cli.console import CommandError, print_line, print_text, searching, warn
from exactknn.cli.files import check_dimensions, put_in_place, stage
from exactknn.cli.options import add_metric, add_running, check_exponent, neighbours_wanted, new_command
from exactknn.cli.page import page
from exactknn.cli.report import as_json, as_table, per_class_csv

_DESCRIPTION = """\
Score embeddings by retrieval: do a query's nearest references share its class?

Vectors are read from the same formats as for 'exactknn search'. Labels, one per row, are read from
  .npy, .npz           NumPy: one 1-D array of integers, floats, booleans or text; file.npz:name selects one of several
  .txt, .csv           UTF-8 text, one label per line; if all labels are integers, they are read as numbers; a header
                       is refused
Labels are compared exactly.
"""

_EPILOG = """\
metrics (per query; its positives are the R references of its class; reported: the mean over queries with positives):
  mean_average_precision         mean of the precisions at the ranks of all positives
  mean_average_precision_at_r    the same, counting ranks up to R only
  mean_reciprocal_rank           1 / rank of the nearest positive
  precision_at_1                 whether the nearest reference is a positive
  r_precision                    share of positives among the first R
  precision_at_<k>               share of positives among the first k
  recall_at_<k>, hit_rate_at_<k> whether any of the first k is a positive
  found_fraction_at_<k>          share of the positives that are among the first k
  ndcg_at_<k>                    normalised discounted gain of the first k, 1 when all positives come first
  knn_accuracy_at_<k>            whether the query's class wins the vote of the first k
  knn_softmax_accuracy_at_<k>    the same, with votes weighted by similarity (temperature 0.07)

examples:
  # a validation set against itself, with an HTML report
  exactknn evaluate --embeddings val.npy --labels val_labels.npy --report report.html

  # queries against a gallery, by cosine distance
  exactknn evaluate --embeddings query.npy --labels query.csv --reference gallery.npy --reference-labels gallery.csv \\
      --distance cosine --metrics recall_at_1 recall_at_10 mean_average_precision_at_r --json
"""

_EVALUATED_FILES = ("embeddings", "labels", "reference", "reference_labels")


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    command = new_command(
        commands, "evaluate", run, "score embeddings and their labels by retrieval", _DESCRIPTION, _EPILOG
    )
    command.add_argument("--embeddings", required=True, metavar="E", help="file of the vectors: the queries")
    command.add_argument("--labels", required=True, metavar="L", help="file of their labels")
    command.add_argument("--reference", metavar="R", help="file of the reference vectors; default: all other queries")
    command.add_argument("--reference-labels", metavar="RL", help="file of the labels of the reference")
    command.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help="metrics to compute, see below (default: the first five); the first orders the classes in the report",
    )
    command.add_argument(
        "-k",
        type=neighbours_wanted,
        default="all",
        metavar="K",
        help="number of neighbours for metrics without a number in their name: at least 1, all (default), or max: the "
        "number of references of the largest class",
    )
    add_metric(command, "--distance")
    command.add_argument("--per-class", metavar="OUT", help="write the means per class here: .csv")
    command.add_argument("--report", metavar="OUT", help="write a report with figures and tables here: .html")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_running(command)


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code after scoring the embeddings and printing and writing the result."""
    check_exponent(arguments, "--distance", arguments.distance)
    if (arguments.reference is None) != (arguments.reference_labels is None):
        raise CommandError("--reference and --reference-labels must be given together, got only one")
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
    print_text(as_json(task, scores) if arguments.json else as_table(task, scores))
    if not arguments.json:
        for output in outputs:
            print_line(f"wrote {output.path}")
    return 0


def _open_reports(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[OutputFile | None, ...]:
    """Return the staged per-class file and report, None where not requested."""
    wanted = {"--per-class": (arguments.per_class, (".csv",)), "--report": (arguments.report, (".html", ".htm"))}
    paths = {option: path for option, (path, _) in wanted.items() if path is not None}
    for option, path in paths.items():
        check_output_suffix(path, wanted[option][1], option)
    inputs = [path for name in _EVALUATED_FILES if (path := getattr(arguments, name)) is not None]
    staged = dict(zip(paths, stage(paths, inputs, stack), strict=True))
    return tuple(staged.get(option) for option in wanted)


def _task(arguments: argparse.Namespace) -> Task:
    """Return the evaluation task; all headers are checked before any values are read."""
    query = open_vectors(arguments.embeddings)
    reference = None if arguments.reference is None else open_vectors(arguments.reference)
    if query.rows == 0:
        raise CommandError(f"--embeddings {query.path} has no rows; expected at least one query")
    check_dimensions(query, reference or query, "--embeddings", "--reference")
    labels = _labels(arguments.labels, "--labels", query)
    reference_labels = None
    if reference is not None:
        reference_labels = _labels(arguments.reference_labels, "--reference-labels", reference)
    rows = as_pair(query.load(), None if reference is None else reference.load())
    for path, array in ((arguments.embeddings, rows.query), (arguments.reference, rows.reference)):
        row = None if array is None else first_row_not_finite(array)
        if row is not None:
            raise CommandError(f"{path}: row {row} holds a NaN or an infinity; expected finite values")
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
            f"expected one label per row{header}"
        )
    return labels


def _warn_of_gaps(arguments: argparse.Namespace, scores: Evaluation) -> None:
    if not scores.counted.any():
        warn("warning: no query has a reference of its class, so every metric is NaN")
    elif scores.cut_short:
        warn(
            f"warning: -k {arguments.k} is below the largest number of references of a class, "
            f"{scores.relevant_counts.max()}, and truncates {' and '.join(scores.cut_short)}; "
            "-k max uses as many neighbours as they need"
        )
