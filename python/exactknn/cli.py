"""The command line: ``exactknn search``, ``groundtruth``, ``evaluate``, ``match`` and ``info``.

::

    argv --> arguments ------> headers of the files --> outputs staged --> search, scores, pairs --> outputs renamed
             (_cli_options,    (_command)               (_command)         (_cli_search, _evaluate,  into place
              _texts)              |                        |               _match)
                 +-----------------+------------------------+---- one line on stderr, exit code --+

Whatever can be refused is refused before the search starts. The modules of a command are imported where it runs,
so that ``--help`` and the other commands do not wait for them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from exactknn import _cli_options, _groundtruth, _texts
from exactknn._arrays.matrix import as_pair, first_row_not_finite
from exactknn._command import (
    EXIT_BROKEN_PIPE,
    EXIT_FAILURE,
    CommandError,
    check_dimensions,
    check_exponent,
    common_dtype,
    complain,
    input_paths,
    open_inputs,
    put_in_place,
    say,
    searching,
    stage,
)
from exactknn._io.errors import FileError
from exactknn._io.outputs import PAIR_SUFFIXES, write_pairs
from exactknn._io.paths import check_output_suffix
from exactknn._io.vectors import open_vectors
from exactknn._retrieval.metrics import BUILT_IN
from exactknn._retrieval.task import Task

if TYPE_CHECKING:
    from exactknn._io.outputs import OutputFile
    from exactknn._io.vectors import VectorFile
    from exactknn._retrieval.evaluate import Evaluation


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing is raised and the process is not ended.

    Args:
        argv: the arguments after the program's name; None takes those of the process.
    """
    stop = _Stop()
    try:
        with stop.on_terminate():
            code = _run(argv)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
    except CommandError as error:
        complain(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        complain(f"{'terminated' if stop.terminated else 'interrupted'}{interrupt}")
        return 128 + (stop.terminated or signal.SIGINT)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; let that go nowhere rather than complain.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except MemoryError as error:
        complain(f"error: not enough memory: {error}" if str(error) else "error: not enough memory")
        return EXIT_FAILURE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        complain(f"error: {where}{error.strerror or error}")
        return EXIT_FAILURE


# What batch systems send, and what a lost connection does.
_TERMINATING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _Stop:
    """Turns signals that end a process into the interrupt that removes temporary files on its way out."""

    def __init__(self) -> None:
        self.terminated = 0

    def _interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        self.terminated = number
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def on_terminate(self) -> Iterator[None]:
        previous = {}
        try:
            for number in _TERMINATING:
                handler = signal.getsignal(number)
                if handler is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                    signal.signal(number, self._interrupt)
                    previous[number] = handler
        except ValueError:  # not the main thread: signals are someone else's
            yield
            return
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    try:
        arguments = parser.parse_args(_with_attached_thresholds(sys.argv[1:] if argv is None else argv))
    except SystemExit as stop:  # --help has been printed
        return int(stop.code or 0)
    if arguments.version:
        from exactknn import __version__

        print(f"exactknn {__version__}")
        return 0
    if arguments.command is None:
        parser.error("a command is wanted: search, groundtruth, evaluate, match or info")
    command: Callable[[argparse.Namespace], int] = arguments.run
    return command(arguments)


def _with_attached_thresholds(argv: Sequence[str]) -> list[str]:
    """`--threshold -1e-3` as `--threshold=-1e-3`: argparse takes a word like the second for an option."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] == "--threshold" and word.startswith("-") and _is_number(word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- arguments -----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line, as all others here."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see: {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        "exactknn", description=_texts.DESCRIPTION, epilog=_texts.EPILOG, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    search = commands.add_parser(
        "search",
        help="find the nearest neighbours of the vectors in a file",
        description=_texts.SEARCH_DESCRIPTION + _texts.FORMATS,
        epilog=_texts.SEARCH_EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    search.set_defaults(run=_search)
    _cli_options.add_inputs(search)
    search.add_argument(
        "-k", required=True, type=_cli_options.positive, metavar="K", help="neighbours of each query, at least 1"
    )
    search.add_argument(
        "--output",
        required=True,
        metavar="OUT",
        help=".npz (arrays distances and indices), or .ivecs or .ibin (indices alone, int32)",
    )
    search.add_argument("--distances", metavar="OUT2", help="write the distances here too: .fbin or .fvecs (float32)")
    _cli_options.add_memory(search)
    _cli_options.add_running(search)

    _groundtruth.add_command(commands)

    evaluate = commands.add_parser(
        "evaluate",
        help="score embeddings and their labels by retrieval",
        description=_texts.EVALUATE_DESCRIPTION,
        epilog=_texts.EVALUATE_EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    evaluate.set_defaults(run=_evaluate)
    evaluate.add_argument("--embeddings", required=True, metavar="E", help="file of the vectors: the queries")
    evaluate.add_argument("--labels", required=True, metavar="L", help="file of their labels")
    evaluate.add_argument(
        "--reference", metavar="R", help="file of the vectors to search among; without it, all other queries"
    )
    evaluate.add_argument("--reference-labels", metavar="RL", help="file of the labels of the reference")
    evaluate.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help="what to compute, see below (default: the first five); the first orders the classes of the report",
    )
    evaluate.add_argument(
        "-k",
        type=_cli_options.neighbours_wanted,
        default="all",
        metavar="K",
        help="neighbours that metrics without a number of their own look at: a number of at least 1, all (default) or "
        "max: as many as the largest class has references",
    )
    _cli_options.add_metric(evaluate, "--distance")
    evaluate.add_argument("--per-class", metavar="OUT", help="write the mean of each class here: .csv")
    evaluate.add_argument("--report", metavar="OUT", help="write one page with figures and tables here: .html")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    _cli_options.add_running(evaluate)

    match = commands.add_parser(
        "match",
        help="find all pairs of vectors within a distance, such as near-duplicates",
        description=_texts.MATCH_DESCRIPTION + _texts.FORMATS,
        epilog=_texts.MATCH_EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    match.set_defaults(run=_match_command)
    _cli_options.add_inputs(match)
    match.add_argument(
        "--threshold",
        required=True,
        type=_cli_options.real,
        metavar="T",
        help="the largest distance of a pair, in the units of the metric (sqeuclidean: squared); "
        "for inner_product the least product",
    )
    match.add_argument(
        "--output",
        required=True,
        metavar="OUT",
        help=".csv (lines query,reference,distance below a header), or .npz (arrays of these names)",
    )
    _cli_options.add_running(match)

    info = commands.add_parser(
        "info",
        help="show the version, the SIMD level, the threads and the build",
        description="Show the version, the SIMD level in use and those available, the threads and the build.",
        epilog=_texts.INFO_EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    info.set_defaults(run=_info)
    info.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _search(arguments: argparse.Namespace) -> int:
    from exactknn import _cli_search

    return _cli_search.run(arguments)


# --- evaluate ------------------------------------------------------------------------------------------------------


def _evaluate(arguments: argparse.Namespace) -> int:
    from exactknn import _report
    from exactknn._retrieval.evaluate import evaluate
    from exactknn._retrieval.names import check_metrics

    check_exponent(arguments, "--distance", arguments.distance)
    if (arguments.reference is None) != (arguments.reference_labels is None):
        raise CommandError("--reference and --reference-labels go together, got only one of them")
    metrics = list(dict.fromkeys(arguments.metrics or BUILT_IN))
    try:
        check_metrics(metrics)
    except ValueError as error:
        raise CommandError(f"--metrics: {error}") from error
    try:
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
                per_class.stream.write(_report.per_class_csv(task, scores).encode("utf-8", "backslashreplace"))
            if report is not None:
                names = {name: getattr(arguments, name) for name in _EVALUATED_FILES if getattr(arguments, name)}
                report.stream.write(_report.page(task, scores, names).encode())
            outputs = [output for output in (per_class, report) if output is not None]
            put_in_place(outputs)
    except FileError as error:
        raise CommandError(str(error)) from error
    _warn_of_gaps(arguments, scores)
    print(_report.as_json(task, scores) if arguments.json else _report.as_table(task, scores))
    if not arguments.json:
        for output in outputs:
            say(f"wrote {output.path}")
    return 0


_EVALUATED_FILES = ("embeddings", "labels", "reference", "reference_labels")


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
    from exactknn._io.labels import read_labels

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
        complain("warning: no query has a reference of its class: every metric is NaN")
    elif scores.cut_short:
        complain(
            f"warning: -k {arguments.k} is below the largest number of references of a class, "
            f"{scores.relevant_counts.max()}, and cuts {' and '.join(scores.cut_short)} short; "
            "-k max looks at as many as are needed"
        )


# --- match ---------------------------------------------------------------------------------------------------------


def _match_command(arguments: argparse.Namespace) -> int:
    from exactknn import _match

    try:
        query, reference = open_inputs(arguments)
        suffix = check_output_suffix(arguments.output, PAIR_SUFFIXES, "--output")
        dtype = np.dtype(np.float64 if common_dtype(query, reference) == np.float64 else np.float32)
        threshold = _rounded(arguments.threshold, dtype)
        with contextlib.ExitStack() as stack:
            (output,) = stage({"--output": arguments.output}, input_paths(query, reference), stack)
            pair = as_pair(query.load(), None if reference is None else reference.load())
            with searching(arguments) as progress:
                blocks = _match.matches(
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
    except FileError as error:
        raise CommandError(str(error)) from error
    among = "among themselves" if reference is None else f"with {reference.rows} references"
    say(f"wrote {output.path}: {count} pairs of {query.rows} queries {among}")
    return 0


def _rounded(threshold: float, dtype: np.dtype[Any]) -> float:
    """The threshold in the type of the distances, in which one that was written is the number that was compared."""
    with np.errstate(over="ignore"):
        rounded = float(dtype.type(threshold))
    if math.isinf(rounded):
        raise CommandError(f"--threshold {threshold:g} is beyond {dtype.name}, the type of the distances")
    return rounded


# --- info ----------------------------------------------------------------------------------------------------------


def _info(arguments: argparse.Namespace) -> int:
    import platform

    from exactknn import _core

    try:
        facts: dict[str, Any] = {
            "version": _core.__version__,
            "simd_level": _core.simd_level(),
            "available_simd_levels": list(_core.available_simd_levels()),
            "threads": _core.get_num_threads(),
            "build": dict(_core.build_info()),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "platform": platform.platform(),
        }
    except ValueError as error:  # EXACTKNN_SIMD or EXACTKNN_NUM_THREADS has no meaning
        raise CommandError(str(error)) from error
    if arguments.json:
        import json

        print(json.dumps(facts, indent=2))
        return 0
    lines = {
        "exactknn": facts["version"],
        "SIMD level": f"{facts['simd_level']} (available: {', '.join(facts['available_simd_levels'])})",
        "threads": facts["threads"],
        "python": facts["python"],
        "numpy": facts["numpy"],
        "platform": facts["platform"],
        "build": ", ".join(f"{name} {value}" for name, value in facts["build"].items()),
    }
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
    return 0
