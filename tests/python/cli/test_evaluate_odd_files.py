"""``exactknn evaluate`` with odd files: it succeeds, or fails with a one-line error."""

import os
import subprocess
import sys

import numpy as np
import pytest

LABELS = np.array([0, 0, 0, 1, 1, 1])


@pytest.fixture
def evaluate(tmp_path):
    def run(rows, labels, *arguments, **environment):
        np.save(tmp_path / "rows.npy", rows)
        np.save(tmp_path / "labels.npy", labels)
        words = ["evaluate", "--embeddings", "rows.npy", "--labels", "labels.npy", *arguments]
        return subprocess.run(
            [sys.executable, "-m", "exactknn", *words],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=50,
        )

    return run


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (1e10, [f"{tick:g}" for tick in np.arange(1e20, 3.1e20, 5e19)]),  # 2e20 between all rows
        (1.0, ["1", "1.5", "2", "2.5", "3"]),
        (1e-162, ["-0.4", "-0.2", "0", "0.2", "0.4"]),  # distances of which float64 has no fifth
    ],
)
def test_one_distance_between_all_rows_has_an_axis(evaluate, tmp_path, scale, ticks):
    done = evaluate(np.eye(6) * scale, LABELS, "--report", "page.html")
    assert (done.returncode, done.stderr) == (0, "")
    figure = (tmp_path / "page.html").read_text(encoding="utf-8").split("within and between classes</title>")[1]
    texts = [part.split("<")[0] for part in figure.split('text-anchor="middle">')[1:]]
    assert texts[: len(ticks)] == ticks


@pytest.mark.parametrize("code", [0xD800, 0x110000])
@pytest.mark.parametrize("order", ["<", ">"])
def test_text_that_is_not_unicode_is_refused(evaluate, code, order):
    labels = np.array(["ab", "ab", "ab", "cd", "cd", "cd"])
    labels.view(np.uint32)[9] = code
    done = evaluate(np.eye(6), labels.astype(f"{order}U2"), "--per-class", "classes.csv")
    message = f"exactknn: error: labels.npy: the label of row 4 holds {code:#x}, which is not a Unicode character\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_a_refusal_of_labels_names_the_files_there_are(evaluate):
    done = evaluate(np.eye(6), np.full(6, 2**64 - 1, dtype=np.uint64))
    message = f"exactknn: error: labels.npy: the label {2**64 - 1} is beyond 2**63 - 1\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_a_path_that_stdout_cannot_encode(evaluate, tmp_path):
    done = evaluate(np.eye(6), LABELS, "--per-class", "caf\xe9.csv", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nwrote caf\\xe9.csv\n")
    assert (tmp_path / "caf\xe9.csv").exists()
