"""``exactknn evaluate``, run as a user runs it: files in and out, and refusals."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.python.cli.evaluate_helpers import CLASSES, FILES, MEANS, POINTS, evaluate


def refusal(capsys, *arguments: object) -> str:
    before = sorted(os.listdir())
    assert evaluate(*arguments) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.startswith("exactknn: error: ") and errors.count("\n") == 1, errors
    assert sorted(os.listdir()) == before
    return errors.removeprefix("exactknn: error: ").rstrip("\n")


def as_json(capsys, *arguments: object) -> dict:
    assert evaluate(*arguments, "--json") == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    return json.loads(output)


def test_the_table(example, capsys):
    assert evaluate(*FILES) == 0
    assert capsys.readouterr() == (
        """\
6 queries of 3 classes, each against 5 others; sqeuclidean, 5 neighbours

metric                         value    queries       lone
mean_average_precision        0.8833          5          1
mean_average_precision_at_r   0.8000          5          1
mean_reciprocal_rank          0.8667          5          1
precision_at_1                0.8000          5          1
r_precision                   0.8000          5          1

lone: queries without positives (no reference of their class), excluded from all metrics
""",
        "",
    )


def test_json(example, capsys):
    shown = as_json(capsys, *FILES)
    assert {name: pytest.approx(value, rel=1e-15) for name, value in shown.pop("metrics").items()} == MEANS
    assert shown == {
        "queries": 6,
        "queries_counted": 5,
        "queries_lone": 1,
        "classes": 3,
        "references": 6,
        "reference_is_query": True,
        "distance": "sqeuclidean",
        "p": None,
        "neighbours": 5,
    }


def test_metrics_are_computed_in_the_order_asked_for(example, capsys):
    shown = as_json(capsys, *FILES, "--metrics", "recall_at_3", "precision_at_2", "precision_at_1", "recall_at_3")
    assert list(shown["metrics"].items()) == [("recall_at_3", 1.0), ("precision_at_2", 0.6), ("precision_at_1", 0.8)]


def test_a_gallery(example, capsys):
    np.save("g.npy", POINTS[1:5] + np.float32(0.1))
    np.save("gl.npy", CLASSES[1:5])
    gallery = ("--reference", "g.npy", "--reference-labels", "gl.npy")
    shown = as_json(capsys, *FILES, *gallery, "--metrics", "precision_at_1", "--distance", "cityblock")
    assert shown["metrics"] == {"precision_at_1": 1.0}
    assert (shown["queries_lone"], shown["references"], shown["reference_is_query"]) == (1, 4, False)
    assert (shown["distance"], shown["neighbours"]) == ("cityblock", 4)


def test_one_line_a_class(example, capsys):
    assert evaluate(*FILES, "--per-class", "c.csv", "--metrics", "precision_at_1", "mean_reciprocal_rank") == 0
    assert capsys.readouterr().out.endswith("\nwrote c.csv\n")
    head, *rows = csv.reader(io.StringIO(Path("c.csv").read_text()))
    assert head == ["class", "queries", "precision_at_1", "mean_reciprocal_rank"]
    assert rows[0] == ["0", "2", "1.0", "1.0"]
    assert rows[1][:2] == ["1", "3"]
    assert [float(value) for value in rows[1][2:]] == pytest.approx([2 / 3, 7 / 9], rel=1e-15)
    assert rows[2] == ["2", "1", "", ""]
    assert len(rows) == 3


def test_classes_that_only_references_have_are_no_line(example):
    np.save("gl.npy", [0, 1, 5, 7, 7, 7])
    gallery = ("--reference", "e.npy", "--reference-labels", "gl.npy")
    assert evaluate(*FILES, *gallery, "--per-class", "c.csv", "--metrics", "precision_at_1") == 0
    assert Path("c.csv").read_text() == "class,queries,precision_at_1\n0,2,0.5\n1,3,0.0\n2,1,\n"


NAMES = ["grün", 'say "x"', "a,b"]


@pytest.mark.parametrize("kind", ["l.txt", "l.csv", "l.npy", "l.npz", "l.npz:labels", "l.txt with a mark and CRLF"])
def test_labels_of_every_kind_of_file(example, capsys, kind):
    name, _, mark = kind.partition(" ")
    labels = [NAMES[code] for code in CLASSES]
    if name == "l.txt":
        Path(name).write_bytes((b"\xef\xbb\xbf" if mark else b"") + "\r\n".join(labels).encode() + b"\r\n")
    elif name == "l.csv":
        with open(name, "w", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows([label] for label in labels)
    elif name == "l.npy":
        np.save(name, labels)
    else:
        np.savez("l.npz", labels=labels, **({"others": [1]} if ":" in name else {}))
    assert evaluate("--embeddings", "e.npy", "--labels", name, "--per-class", "c.csv", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["metrics"]["mean_reciprocal_rank"] == pytest.approx(13 / 15, rel=1e-15)
    rows = list(csv.reader(io.StringIO(Path("c.csv").read_text(encoding="utf-8"))))
    assert [row[0] for row in rows[1:]] == ["a,b", "grün", 'say "x"']


def test_names_of_classes_are_quoted_where_csv_needs_it(example, capsys):
    names = ["a\rb", "=1+1", ' "c" ', "d\r\ne", "f,g", "h"]
    np.save("l.npy", names)
    assert evaluate("--embeddings", "e.npy", "--labels", "l.npy", "--per-class", "c.csv") == 0
    with open("c.csv", encoding="utf-8", newline="") as stream:
        rows = list(csv.reader(stream, strict=True))
    assert [row[0] for row in rows[1:]] == sorted(names)
    assert '"a\rb",1,' in Path("c.csv").read_bytes().decode()


def test_whole_numbers_in_text_are_in_the_order_of_numbers(example, capsys):
    Path("l.txt").write_text("".join(f"{8 + code}\n" for code in CLASSES))
    assert evaluate("--embeddings", "e.npy", "--labels", "l.txt", "--per-class", "c.csv") == 0
    assert re.findall(r"^(\d+),", Path("c.csv").read_text(), re.MULTILINE) == ["8", "9", "10"]


def test_a_small_k_is_warned_of(example, capsys):
    assert evaluate(*FILES, "-k", 1) == 0
    assert capsys.readouterr().err == (
        "exactknn: warning: -k 1 is below the largest number of references of a class, 2, and truncates "
        "mean_average_precision_at_r and r_precision; -k max uses as many neighbours as they need\n"
    )
    assert evaluate(*FILES, "-k", 1, "--metrics", "precision_at_1") == 0
    assert evaluate(*FILES, "-k", "max") == 0
    assert evaluate(*FILES, "-k", 99) == 0
    assert capsys.readouterr().err == ""


def test_all_lone_is_a_warning_and_null(example, capsys):
    np.save("l.npy", np.arange(6))
    assert evaluate(*FILES, "--json", "--report", "r.html", "--per-class", "c.csv") == 0
    output, errors = capsys.readouterr()
    assert errors == "exactknn: warning: no query has a reference of its class, so every metric is NaN\n"
    shown = json.loads(output)
    assert (shown["queries_lone"], set(shown["metrics"].values())) == (6, {None})
    assert Path("c.csv").read_text().splitlines()[1:] == [f"{code},1,,,,," for code in range(6)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --embeddings, --labels (see: exactknn evaluate --help)"),
        ((*FILES, "-k", "0"), "argument -k: expected a whole number of at least 1, all or max, got '0'"),
        ((*FILES, "-k", "some"), "argument -k: expected a whole number of at least 1, all or max, got 'some'"),
        ((*FILES, "--distance", "manhattan"), "argument --distance: invalid choice: 'manhattan'"),
        ((*FILES, "--p", "3"), "--p is for --distance minkowski only, got --distance sqeuclidean"),
        ((*FILES, "--reference", "e.npy"), "--reference and --reference-labels must be given together, got only one"),
        ((*FILES, "--reference-labels", "l.npy"), "--reference and --reference-labels must be given together"),
        ((*FILES, "--metrics", "f1"), "--metrics: unknown metric 'f1'; known: mean_average_precision, "),
        ((*FILES, "--metrics", "precision_at_0"), "known: mean_average_precision, mean_average_precision_at_r"),
        ((*FILES, "--metrics", "precision_at_1" + "0" * 18), "unknown metric 'precision_at_1000000000000000000'"),
        ((*FILES, "--metrics", "x_at_3"), "precision_at_<k>, recall_at_<k>, hit_rate_at_<k>, found_fraction_at_<k>"),
        ((*FILES, "--metrics", "NMI"), "ndcg_at_<k>, knn_accuracy_at_<k>, knn_softmax_accuracy_at_<k>"),
        ((*FILES, "--report", "r.pdf"), "r.pdf: unknown suffix '.pdf' for --report; expected one of .html, .htm"),
        ((*FILES, "--per-class", "c.txt"), "c.txt: unknown suffix '.txt' for --per-class; expected one of .csv"),
        ((*FILES, "--report", "no/r.html"), "does not exist"),
        (("--embeddings", "x.npy", "--labels", "l.npy"), "x.npy: no such file"),
        (("--embeddings", "e.npy", "--labels", "x.csv"), "x.csv: no such file"),
        (("--embeddings", "l.npy", "--labels", "l.npy"), "l.npy: holds int64 values, which look like ids or labels"),
        (("--embeddings", "e.npy", "--labels", "e.npy"), "e.npy: a 2-D array of shape (6, 1); expected 1-D, one label"),
        (("--embeddings", "e.npy", "--labels", "e.fbin"), "e.fbin: unknown suffix '.fbin' for labels; expected one of"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(example, capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


BAD_LABELS = {
    "too few": ("b.txt", "1\n2\n", "--labels b.txt has 2 labels, e.npy has 6 rows; expected one label per row"),
    "one too many": ("b.csv", "kind\n" + "a\n" * 6, "has 7 labels, e.npy has 6 rows; expected one label per row (the"),
    "a header": ("b.csv", "class\n" + "1\n" * 6, "b.csv: line 1, 'class', looks like a header; expected one label per"),
    "a header instead of a label": ("b.csv", "kind\n" + "1\n" * 5, "b.csv: line 1, 'kind', looks like a header"),
    "several fields": ("b.csv", "1,2\n" * 6, "b.csv: line 1 has 2 fields; expected one label per line"),
    "an empty line": ("b.txt", "1\n\n1\n1\n1\n1\n", "b.txt: label 2 is empty; expected one label per line"),
    "an empty line in CSV": ("b.csv", "1\n\n1\n1\n1\n1\n", "b.csv: label 2 is empty; expected one label per line"),
    "an open quote": ("b.csv", '"1\n2\n', "b.csv: line 2: unexpected end of data"),
    "a null": ("b.txt", "a\0\nb\n", "b.txt: label 1 holds a null character"),
    "not UTF-8": ("b.txt", b"\xff\xfe", "b.txt: is not UTF-8 text: byte 0xff"),
    "empty": ("b.txt", "", "b.txt: the file is empty"),
    "NaN": ("b.npy", np.array([1, 2, np.nan, 3, np.nan, 4]), "b.npy: the label of row 2 is NaN"),
    "objects": (
        "b.npy",
        np.array([1, "a", None], object),
        "b.npy: holds pickled Python objects, which are never loaded",
    ),
    "complex": ("b.npy", np.ones(6, complex), "b.npy: holds complex128 values; expected labels: integers, booleans"),
    "bytes": ("b.npy", np.array([b"a"] * 6), "b.npy: holds bytes8 values; expected labels"),
    "0-D": ("b.npy", np.array(3), "b.npy: a 0-D array of shape (); expected 1-D, one label per row"),
}


@pytest.mark.parametrize("kind", BAD_LABELS)
def test_bad_labels_are_refused_in_one_line(example, capsys, kind):
    name, content, message = BAD_LABELS[kind]
    if isinstance(content, np.ndarray):
        np.save(name, content, allow_pickle=True)
    else:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refusal(capsys, "--embeddings", "e.npy", "--labels", name, "--report", "r.html")


def test_embeddings_that_cannot_be_used(example, capsys):
    bad = POINTS.copy()
    bad[3] = np.nan
    bad[4] = np.inf
    np.save("bad.npy", bad)
    np.save("wide.npy", np.ones((6, 2), np.float32))
    np.save("none.npy", POINTS[:0])
    np.save("no-labels.npy", CLASSES[:0])
    Path("names.txt").write_text("a\n" * 6)
    text = "bad.npy: row 3 holds a NaN or an infinity; expected finite values"
    assert refusal(capsys, "--embeddings", "bad.npy", "--labels", "l.npy") == text
    assert refusal(capsys, *FILES, "--reference", "bad.npy", "--reference-labels", "l.npy") == text
    assert refusal(capsys, *FILES, "--reference", "wide.npy", "--reference-labels", "l.npy") == (
        "--embeddings e.npy has dimension 1, --reference wide.npy has 2; they must be equal"
    )
    assert refusal(capsys, *FILES, "--reference", "e.npy", "--reference-labels", "names.txt") == (
        "l.npy, names.txt: the labels of one side are text, those of the other are numbers; expected the same kind"
    )
    assert refusal(capsys, "--embeddings", "none.npy", "--labels", "no-labels.npy") == (
        "--embeddings none.npy has no rows; expected at least one query"
    )
    assert refusal(capsys, *FILES, "--reference", "e.npy", "--reference-labels", "no-labels.npy").startswith(
        "--reference-labels no-labels.npy has 0 labels, e.npy has 6 rows"
    )


def test_an_output_replaces_neither_an_input_nor_another(example, capsys):
    Path("l.csv").write_text("a\n" * 6)
    files = ("--embeddings", "e.npy", "--labels", "l.csv")
    assert refusal(capsys, *files, "--per-class", "./l.csv") == "--per-class ./l.csv would replace the input l.csv"
    Path("r.html").symlink_to("c.csv")
    assert refusal(capsys, *files, "--per-class", "c.csv", "--report", "r.html") == (
        "--per-class and --report are the same file: r.html"
    )
    assert Path("l.csv").read_text() == "a\n" * 6


def test_a_full_disk_leaves_what_was_there(example):
    Path("r.html").write_text("before")
    limited = (
        "import resource, sys; from exactknn.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); sys.exit(main())"
    )
    command = [sys.executable, "-c", limited, "evaluate", *FILES, "--report", "r.html", "--per-class", "c.csv"]
    done = subprocess.run(command, cwd=example, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "exactknn: error: r.html: File too large\n")
    assert Path("r.html").read_text() == "before"
    assert sorted(os.listdir()) == ["e.npy", "l.npy", "r.html"]


def test_an_interrupt_ends_in_one_line_and_leaves_no_file(example):
    np.save("many.npy", np.random.default_rng(3).normal(size=(60_000, 256)).astype(np.float32))
    np.save("classes.npy", np.arange(60_000) % 500)
    Path("r.html").write_text("before")
    program = "import sys; sys.modules['tqdm'] = None; from exactknn.cli import main; sys.exit(main())"
    arguments = ["--embeddings", "many.npy", "--labels", "classes.npy", "--report", "r.html", "--progress"]
    command = [sys.executable, "-c", program, "evaluate", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stderr.read(len("\rexactknn:   0%")) == b"\rexactknn:   0%"  # written when the search starts
        assert [name for name in os.listdir() if name.startswith(".exactknn-")]
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=40)
    assert (process.returncode, output) == (130, b"")
    assert errors.decode().splitlines()[-1] == "exactknn: interrupted"
    assert Path("r.html").read_text() == "before"
    assert sorted(os.listdir()) == ["classes.npy", "e.npy", "l.npy", "many.npy", "r.html"]


@pytest.mark.parametrize("metrics", [(), ("--metrics", "precision_at_1")])
def test_progress_when_asked_for(example, capsys, metrics):
    assert evaluate(*FILES, "--progress", *metrics) == 0
    assert "exactknn:   0%" in capsys.readouterr().err


def test_the_command_loads_nothing_heavy(example, run_python):
    program = f"""
import sys
from exactknn.cli import main
assert main(["evaluate", *{FILES!r}, "--report", "r.html", "--json"]) == 0
print(sorted({{"torch", "faiss", "sklearn", "scipy", "matplotlib"}} & set(sys.modules)))
"""
    assert run_python(program).splitlines()[-1] == "[]"
