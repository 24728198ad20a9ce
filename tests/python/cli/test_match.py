"""``exactknn match``, run as a user runs it, against all pairs by brute force."""

import csv
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import exactknn
from exactknn import _progress, cli
from exactknn._io.outputs import Pairs, write_pairs
from exactknn.cli import match

WITHOUT_TQDM = "import sys; sys.modules['tqdm'] = None; from exactknn.cli import main; sys.exit(main())"
COMMAND = [sys.executable, "-m", "exactknn"]
METRICS = ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev", "minkowski")


def run(folder: Path, *arguments: object, command: list[str] = COMMAND, **options) -> subprocess.CompletedProcess[str]:
    words = [*command, "match", *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=50, **options)


def refusal(folder: Path, *arguments: object, **options) -> str:
    """The text of the one line with which the command is refused."""
    before = sorted(os.listdir(folder))
    done = run(folder, *arguments, **options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("exactknn: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert sorted(os.listdir(folder)) == before
    return done.stderr.removeprefix("exactknn: error: ").rstrip("\n")


def read(path: Path) -> list[tuple[int, int, str]]:
    with path.open(newline="") as stream:
        header, *lines = csv.reader(stream)
    assert header == ["query", "reference", "distance"]
    return [(int(query), int(reference), distance) for query, reference, distance in lines]


def all_pairs(query, reference, threshold, metric="sqeuclidean", p=None, wanted=lambda i, j: True):
    """Pairs within the threshold by the values of ``knn``, compared in the type of these values."""
    values, indices = exactknn.knn(query, reference, len(reference), metric=metric, p=p, exclude_self=False)
    bound = values.dtype.type(threshold)
    inside = values >= bound if metric == "inner_product" else values <= bound
    pairs = [
        (i, int(j), str(value))
        for i in range(len(query))
        for j, value in sorted(zip(indices[i][inside[i]], values[i][inside[i]], strict=True))
        if wanted(i, j)
    ]
    assert pairs, "a threshold that finds nothing tests nothing"
    return pairs


@pytest.fixture
def rows() -> np.ndarray:
    rows = np.random.default_rng(1).normal(size=(150, 12)).astype(np.float32)
    rows[70], rows[140] = rows[3], rows[70]
    return rows


THRESHOLDS = {
    "sqeuclidean": 8,
    "euclidean": 2.9,
    "cosine": 0.4,
    "inner_product": 9,
    "cityblock": 8,
    "chebyshev": 1.4,
    "minkowski": 2.2,
}


@pytest.mark.parametrize("metric", METRICS)
def test_each_pair_among_themselves_is_written_once(tmp_path, rows, metric):
    np.save(tmp_path / "q.npy", rows)
    p = ("--p", "3") if metric == "minkowski" else ()
    threshold = THRESHOLDS[metric]
    options = ("--query", "q.npy", "--threshold", threshold, "--metric", metric, *p, "--output", "o.csv")
    done = run(tmp_path, *options)
    wanted = all_pairs(rows, rows, threshold, metric, 3 if p else None, wanted=lambda i, j: i < j)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote o.csv: {len(wanted)} pairs of 150 queries among themselves\n"
    assert read(tmp_path / "o.csv") == wanted
    if metric not in ("cosine", "inner_product"):
        assert [pair[:2] for pair in wanted if pair[2] == "0.0"] == [(3, 70), (3, 140), (70, 140)]


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("metric", METRICS)
def test_pairs_with_a_reference(tmp_path, rows, metric, exclude_self):
    np.save(tmp_path / "q.npy", rows[:60])
    np.save(tmp_path / "r.npy", rows)
    flag = ["--exclude-self"] if exclude_self else []
    files = ("--query", "q.npy", "--reference", "r.npy", *flag)
    done = run(tmp_path, *files, "--threshold", THRESHOLDS[metric], "--metric", metric, "--output", "o.npz")
    wanted = all_pairs(rows[:60], rows, THRESHOLDS[metric], metric, wanted=lambda i, j: not (exclude_self and i == j))
    assert done.returncode == 0
    assert done.stdout == f"wrote o.npz: {len(wanted)} pairs of 60 queries with 150 references\n"
    with np.load(tmp_path / "o.npz") as result:
        assert sorted(result.files) == ["distance", "query", "reference"]
        assert (result["query"].dtype, result["reference"].dtype) == (np.int64, np.int64)
        assert result["distance"].dtype == np.float32
        found = zip(
            *(result[name].tolist() for name in ("query", "reference")), map(str, result["distance"]), strict=True
        )
        assert list(found) == wanted


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_distance_that_was_written_matches_at_that_number(tmp_path, rows, dtype):
    np.save(tmp_path / "q.npy", rows.astype(dtype))
    assert run(tmp_path, "--query", "q.npy", "--threshold", 9, "--output", "all.csv").returncode == 0
    pairs = read(tmp_path / "all.csv")
    values = [np.float64(text) if dtype == np.float64 else np.float32(text) for _, _, text in pairs]
    assert [str(value) for value in values] == [text for _, _, text in pairs]
    for threshold in sorted(text for _, _, text in pairs)[5:25:5]:
        assert run(tmp_path, "--query", "q.npy", "--threshold", threshold, "--output", "o.csv").returncode == 0
        bound = np.float64(threshold) if dtype == np.float64 else np.float32(threshold)
        assert read(tmp_path / "o.csv") == [pair for pair, value in zip(pairs, values, strict=True) if value <= bound]


@pytest.mark.parametrize("among_themselves", [True, False])
def test_blocks_and_threads_do_not_show(tmp_path, rows, monkeypatch, among_themselves):
    np.save(tmp_path / "q.npy", rows)
    files = ["--query", str(tmp_path / "q.npy")]
    if not among_themselves:
        np.save(tmp_path / "r.npy", rows[::-1])
        files += ["--reference", str(tmp_path / "r.npy")]

    def written(threads: int, suffix: str) -> bytes:
        output = tmp_path / f"o{suffix}"
        arguments = [*files, "--threshold", "12", "--threads", str(threads), "--output", str(output)]
        assert cli.main(["match", *arguments]) == 0
        return output.read_bytes()

    whole = [written(1, suffix) for suffix in (".csv", ".npz")]
    for cells, pairs, queries, lines in ((1, 1, 1, 1), (700, 20, 16, 7), (2000, 10**9, 50, 10**6)):
        monkeypatch.setattr("exactknn.cli.match._FIRST_CELLS", cells)
        monkeypatch.setattr("exactknn.cli.match._BLOCK_PAIRS", pairs)
        monkeypatch.setattr("exactknn.cli.match._BLOCK_QUERIES", queries)
        monkeypatch.setattr("exactknn._io.outputs._LINES", lines)
        assert [written(2, suffix) for suffix in (".csv", ".npz")] == whole


def test_progress_goes_up_over_all_blocks(tmp_path, rows, monkeypatch):
    np.save(tmp_path / "q.npy", rows)
    monkeypatch.setattr("exactknn.cli.match._BLOCK_QUERIES", 30)
    seen: list[float] = []
    for among_themselves in (True, False):
        seen.clear()
        for block in range(5):
            part = _progress.part_of(
                seen.append, *(match._share(row, 150, among_themselves) for row in (30 * block, 30 * block + 30))
            )
            assert part is not None
            part(0.5)
            part(1.0)
        assert seen == sorted(seen) and seen[-1] == 1.0
        assert seen[1] == pytest.approx(0.36 if among_themselves else 0.2)
    done = run(tmp_path, "--query", "q.npy", "--threshold", 1, "--progress", "--output", "o.csv")
    assert done.returncode == 0
    assert "exactknn:   0%" in done.stderr and "100%" in done.stderr and done.stderr.endswith("\n")


def test_no_rows_and_no_matches_are_empty_files(tmp_path, rows):
    np.save(tmp_path / "q.npy", rows[:0])
    np.save(tmp_path / "r.npy", rows.astype(np.float64))
    for files in (["--query", "q.npy"], ["--query", "q.npy", "--reference", "r.npy"], ["--query", "r.npy"]):
        for output in ("o.csv", "o.npz"):
            assert run(tmp_path, *files, "--threshold", -1, "--output", output).returncode == 0
        assert (tmp_path / "o.csv").read_bytes() == b"query,reference,distance\n"
        with np.load(tmp_path / "o.npz") as result:
            assert {name: result[name].shape for name in result.files} == {
                "query": (0,), "reference": (0,), "distance": (0,)
            }  # fmt: skip
            assert result["distance"].dtype == (np.float32 if files == ["--query", "q.npy"] else np.float64)


@pytest.mark.parametrize("side", ["query", "reference"])
@pytest.mark.parametrize("row", [17, 149])
def test_a_row_that_is_not_finite_is_named_by_its_number_in_the_file(tmp_path, rows, side, row):
    bad = rows.copy()
    bad[row, 3] = np.nan
    np.save(tmp_path / "query.npy", bad if side == "query" else rows)
    np.save(tmp_path / "reference.npy", bad if side == "reference" else rows)
    options = ("--threshold", 1, "--output", "o.csv")
    wanted = f"--{side} {side}.npy must be finite, got NaN in row {row}, column 3"
    assert refusal(tmp_path, "--query", "query.npy", "--reference", "reference.npy", *options) == wanted
    if side == "query":
        assert refusal(tmp_path, "--query", "query.npy", *options) == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --query, --threshold, --output (see: exactknn match --help)"),
        (("--threshold", "nan"), "argument --threshold: expected a finite number, got 'nan'"),
        (("--threshold", "inf"), "argument --threshold: expected a finite number, got 'inf'"),
        (("--threshold", "near"), "argument --threshold: expected a finite number, got 'near'"),
        (("--threshold", "-inf"), "argument --threshold: expected a finite number, got '-inf'"),
        (("--threshold", "--output", "o.csv"), "argument --threshold: expected one argument"),
        (("--threshold", "1", "-k", "3", "--query", "q.npy", "--output", "o.csv"), "unknown option -k"),
        (("--threshold", "1", "--query", "no.npy", "--output", "o.csv"), "no.npy: no such file"),
        (
            ("--threshold", "1", "--query", "q.npy", "--output", "o.txt"),
            "o.txt: unknown suffix '.txt' for --output; expected one of .csv, .npz",
        ),
        (("--threshold", "1", "--query", "q.npz", "--output", "q.npz"), "--output q.npz would replace the input q.npz"),
        (
            ("--threshold", "1e39", "--query", "q.npy", "--output", "o.csv"),
            "--threshold 1e+39 is beyond float32, the type of the distances",
        ),
        (
            ("--threshold", "1", "--query", "q.npy", "--output", "o.csv", "--p", "1"),
            "--p is for --metric minkowski only, got --metric sqeuclidean",
        ),
        (
            ("--threshold", "1", "--query", "q.npy", "--reference", "narrow.npy", "--output", "o.csv"),
            "--query q.npy has dimension 12, --reference narrow.npy has 5; they must be equal",
        ),
        (
            ("--threshold", "1", "--query", "q.npy", "--reference", "few.npy", "--exclude-self", "--output", "o.csv"),
            "--exclude-self: the queries must be the first rows of the reference",
        ),
        (("--threshold", "1", "--query", "q.npy", "--output", "no/o.csv"), "the folder"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(tmp_path, rows, arguments, message):
    np.save(tmp_path / "q.npy", rows)
    np.savez(tmp_path / "q.npz", rows)
    np.save(tmp_path / "narrow.npy", rows[:, :5])
    np.save(tmp_path / "few.npy", rows[:5])
    assert message in refusal(tmp_path, *arguments)


def test_a_negative_product_that_was_written_is_taken_as_a_threshold(tmp_path):
    np.save(tmp_path / "q.npy", np.array([[1, 0], [-(2.0**-20), 0], [0, 1]], np.float32))
    options = ("--query", "q.npy", "--metric", "inner_product", "--output", "o.csv")
    assert run(tmp_path, *options, "--threshold", -1).returncode == 0
    written = read(tmp_path / "o.csv")
    assert written[0][2] == "-9.536743e-07"
    done = run(tmp_path, *options, "--threshold", "-9.536743e-07")
    assert (done.returncode, done.stderr) == (0, "")
    assert read(tmp_path / "o.csv") == written
    assert run(tmp_path, *options, "--threshold", "-9.5e-07").returncode == 0
    assert read(tmp_path / "o.csv") == written[1:]


def test_a_large_threshold_is_taken_for_float64(tmp_path, rows):
    np.save(tmp_path / "q.npy", rows[:4].astype(np.float64))
    assert run(tmp_path, "--query", "q.npy", "--threshold", "1e300", "--output", "o.csv").returncode == 0
    assert [pair[:2] for pair in read(tmp_path / "o.csv")] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def test_an_output_is_replaced_whole_or_not_at_all(tmp_path, rows):
    np.save(tmp_path / "q.npy", rows)
    (tmp_path / "o.csv").write_bytes(b"before")
    limited = (
        "import resource, sys; from exactknn.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); sys.exit(main())"
    )
    options = ("--query", "q.npy", "--threshold", 30, "--output", "o.csv")
    done = run(tmp_path, *options, command=[sys.executable, "-c", limited])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "exactknn: error: o.csv: File too large\n"
    assert (tmp_path / "o.csv").read_bytes() == b"before"
    assert run(tmp_path, *options).returncode == 0
    assert len(read(tmp_path / "o.csv")) > 1000
    assert sorted(os.listdir(tmp_path)) == ["o.csv", "q.npy"]


def test_an_interrupt_ends_in_one_line_and_leaves_no_file(tmp_path):
    np.save(tmp_path / "q.npy", np.random.default_rng(3).normal(size=(120_000, 256)).astype(np.float32))
    options = ["--query", "q.npy", "--threshold", "1", "--progress", "--output", "o.csv"]
    command = [sys.executable, "-c", WITHOUT_TQDM, "match", *options]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stderr.read(len("\rexactknn:   0%")) == b"\rexactknn:   0%"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=40)
    assert (process.returncode, output) == (130, b"")
    assert errors.decode().splitlines()[-1] == "exactknn: interrupted"
    assert b"Traceback" not in errors
    assert os.listdir(tmp_path) == ["q.npy"]


def test_help_shows_examples(tmp_path):
    done = run(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "exactknn match --query embeddings.npy --metric cosine --threshold 0.05 --output pairs.csv" in done.stdout
    assert "Vectors are read from" in done.stdout


def test_pairs_are_written_as_they_come():
    stream = io.BytesIO()

    def blocks():
        for block in range(3):
            yield Pairs(np.array([block]), np.array([7]), np.array([block / 10], np.float32))
            lengths.append(len(stream.getvalue()))

    lengths: list[int] = []
    assert write_pairs(stream, ".csv", blocks(), np.dtype(np.float32)) == 3
    assert stream.getvalue() == b"query,reference,distance\n0,7,0.0\n1,7,0.1\n2,7,0.2\n"
    assert lengths == [33, 41, 49]
