"""The pages say what there is: signatures, options of commands, names of metrics, extras, messages."""

import argparse
import ast
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import exactknn
from exactknn import evaluation, plots
from exactknn._io.vectors import VECTOR_SUFFIXES
from exactknn.cli.main import _parser
from exactknn.evaluation import AccuracyCalculator, MatchFinder
from exactknn.sklearn import ExactNeighborsTransformer

ROOT = Path(__file__).resolve().parents[2]

# Options that a page explains once, for all functions of its kind.
EXPLAINED_ONCE = {"num_threads", "progress", "label", "ax"}
SIGNATURES = [
    *(("knn", name, value) for name, value in (("knn", exactknn.knn), ("RustKNN", evaluation.RustKNN))),
    ("knn", "CustomKNN", evaluation.CustomKNN),
    ("radius", "radius", exactknn.radius),
    ("indexes", "Index", exactknn.Index),
    *(("indexes", name, getattr(exactknn.Index, name)) for name in ("add", "train", "remove", "search", "radius")),
    *(("indexes", name, getattr(exactknn.Index, name)) for name in ("ranks", "rows", "save")),
    ("indexes", "Index.load", exactknn.Index.load),
    ("matching", "MatchFinder", MatchFinder),
    *(("matching", name, getattr(MatchFinder, name)) for name in ("get_match_matrix", "get_match_indices")),
    *(("matching", name, getattr(MatchFinder, name)) for name in ("is_match", "get_matching_pairs")),
    *(("thresholds", name, getattr(evaluation, name)) for name in ("select_threshold", "threshold_curve")),
    ("thresholds", "equal_error_rate", evaluation.equal_error_rate),
    *(("thresholds", name, getattr(plots, name)) for name in ("plot_threshold", "plot_roc", "plot_det")),
    *(("thresholds", name, getattr(plots, name)) for name in ("plot_precision_recall", "plot_score_histogram")),
    ("faiss", "FaissKNN", evaluation.FaissKNN),
    ("faiss", "FaissKMeans", evaluation.FaissKMeans),
    ("ecosystem", "ExactNeighborsTransformer", ExactNeighborsTransformer),
    ("ecosystem", "recall", exactknn.recall),
]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    return text.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]


def first_cells(text: str) -> list[str]:
    """The first cells of the rows of the tables, without heads."""
    cells = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    heads = {i - 1 for i, cell in enumerate(cells) if set(cell) == {"-"}}
    return [cell for i, cell in enumerate(cells) if i not in heads and set(cell) != {"-"}]


@pytest.mark.parametrize(("name", "function", "value"), SIGNATURES, ids=[item[1] for item in SIGNATURES])
def test_a_signature_is_written_as_it_is(name, function, value):
    written = re.search(rf"`{re.escape(function)}\(([^`]*)\)`", page(f"docs/{name}.md"))[1]
    (parsed,) = ast.parse(f"def f({written}): pass").body
    found = {}
    arguments = parsed.args
    for kind, names, defaults in (
        ("by position", arguments.args, [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults),
        ("by name", arguments.kwonlyargs, arguments.kw_defaults),
    ):
        for argument, default in zip(names, defaults, strict=True):
            found[argument.arg] = kind, "none" if default is None else repr(ast.literal_eval(default))
    if arguments.kwarg:
        found[arguments.kwarg.arg] = "any", "none"
    kinds = {inspect.Parameter.KEYWORD_ONLY: "by name", inspect.Parameter.VAR_KEYWORD: "any"}
    wanted = {
        each.name: (
            kinds.get(each.kind, "by position"),
            "none" if each.default is inspect.Parameter.empty else repr(each.default),
        )
        for each in inspect.signature(value).parameters.values()
        if each.name != "self" and (each.name in found or each.name not in EXPLAINED_ONCE)
    }
    if function == "radius" and name == "radius":
        wanted["r"] = ("by position", "Ellipsis")  # needed, though it follows an argument with a default
    assert list(found.items()) == list(wanted.items())


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return action.choices


@pytest.mark.parametrize("command", commands())
def test_every_option_of_a_command_is_on_its_page_and_no_other(command):
    text = section(page("docs/cli.md"), f"## `exactknn {command}`")
    options = {
        option
        for action in commands()[command]._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    }
    written = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*\b", " ".join(re.findall(r"`([^`]*)`", text))))
    assert {option.replace("--no-", "--") for option in options} <= written
    every = {option for parser in commands().values() for action in parser._actions for option in action.option_strings}
    assert written <= every


def test_the_metrics_of_both_pages_are_those_that_are_known():
    with pytest.raises(ValueError, match="include must name metrics among") as refused:
        AccuracyCalculator(include=("unknown",))
    known = str(refused.value).split("among ", 1)[1].split(";", 1)[0].split(", ")
    for name, text, others in (
        ("docs/accuracy.md", "## The metrics", {"NMI", "AMI"}),
        ("docs/cli.md", "### Metrics", set()),
    ):
        cells = first_cells(section(page(name), text).split("\n**", 1)[0].split("| metric | source", 1)[0])
        written = [metric for cell in cells for metric in re.findall(r"`([A-Za-z0-9_<>]+)`", cell)]
        if not others:
            written = written[written.index("precision_at_1") :]
            written = written[: written.index("knn_softmax_accuracy_at_<k>") + 1]
        assert sorted(written) == sorted(set(known) - ({"NMI", "AMI"} - others)), name
    AccuracyCalculator(include=[metric.replace("<k>", "7") for metric in known], kmeans_func=len)


def test_the_extras_of_the_page_are_those_of_the_package():
    extras = section(page("pyproject.toml"), "[project.optional-dependencies]").split("\n[project.scripts]", 1)[0]
    names = re.findall(r"^(\w+) = \[", extras, flags=re.MULTILINE)
    assert sorted(re.findall(r"^\| `(\w+)` \|", page("docs/install.md"), flags=re.MULTILINE)) == sorted(names)


def test_the_formats_of_the_first_page_are_those_that_are_read():
    (sentence,) = re.findall(r"It reads (.*?)\. All options", page("README.md"), flags=re.DOTALL)
    assert tuple(re.findall(r"`(\.\w+)`", sentence)) == VECTOR_SUFFIXES


def test_metrics_of_a_search_are_those_of_the_page():
    written = first_cells(section(page("docs/knn.md"), "## `exactknn.knn`"))
    with pytest.raises(ValueError, match="metric must be one of") as refused:
        exactknn.knn([[0.0]], [[1.0]], 1, metric="unknown")
    known = str(refused.value).split("one of ", 1)[1].split(", got ", 1)[0]
    assert sorted(cell.strip("`") for cell in written) == sorted(re.findall(r"[a-z_]+", known))


MESSAGES = {
    "must be finite": lambda: exactknn.knn(np.where(np.arange(18) == 17, np.nan, 0.0).reshape(18, 1), [[0.0]], 1),
    "k must be": lambda: exactknn.knn([[0.0]], [[1.0]], 2),
    "SIMD level": lambda: exactknn.set_simd_level("unknown"),
}


@pytest.mark.parametrize("part", MESSAGES)
def test_a_message_of_the_first_page_is_what_is_said(part):
    (written,) = (cell for cell in first_cells(section(page("README.md"), "## Troubleshooting")) if part in cell)
    wanted = ".*".join(re.escape(text.strip()) for text in written.strip("`").split("..."))
    with pytest.raises(ValueError, match=wanted):
        MESSAGES[part]()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_bytes_of_a_row_are_those_of_the_page(dtype):
    rows = np.random.default_rng(0).standard_normal((9000, 128)).astype(np.float16)
    table = section(page("docs/indexes.md"), "## Memory")
    (line,) = (line for line in table.splitlines() if dtype in re.findall(r"\w+", line.partition("|")[2].split("|")[0]))
    coded, widened = (int(cell.replace(",", "")) for cell in line.split("|")[2:4])
    for level in exactknn.available_simd_levels():
        exactknn.set_simd_level(level)
        try:
            for metric, bytes_of_a_row in (
                ("sqeuclidean", widened if level == "scalar" else coded),
                ("cityblock", widened),
            ):
                index = exactknn.Index(metric, dtype=dtype)
                index.add(rows)
                index.search(rows[:200], 5)
                assert index.nbytes // len(rows) == bytes_of_a_row
        finally:
            exactknn.set_simd_level(None)
