"""The command line, run as a user runs it: a process, its files, its exit code, its output."""

import fcntl
import importlib.metadata
import json
import os
import platform
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

import exactknn
from tests.python.cli.search_helpers import COMMAND, assert_result, refusal, run, save_bin

WITHOUT_TQDM = "import sys; sys.modules['tqdm'] = None; from exactknn.cli import main; sys.exit(main())"


def save_vecs(path: Path, matrix: np.ndarray, dtype: str = "<f4") -> None:
    path.write_bytes(b"".join(struct.pack("<i", len(row)) + row.astype(dtype).tobytes() for row in matrix))


def brute_force(query, reference, k, metric="sqeuclidean", exclude_self=False):
    """Values in float64, rounded to the output type, ordered by (value, row)."""
    output = np.float64 if np.float64 in (query.dtype, reference.dtype) else np.float32
    query, reference = query.astype(np.float64), reference.astype(np.float64)
    if metric == "inner_product":
        keys = -(query @ reference.T)
    elif metric == "cityblock":
        keys = np.abs(query[:, None] - reference).sum(-1)
    elif metric == "chebyshev":
        keys = np.abs(query[:, None] - reference).max(-1)
    elif metric == "cosine":
        norms = np.linalg.norm(query, axis=1)[:, None] * np.linalg.norm(reference, axis=1)
        keys = 1 - (query @ reference.T) / norms
    else:
        keys = ((query[:, None, :] - reference[None, :, :]) ** 2).sum(axis=2)
        keys = np.sqrt(keys) if metric == "euclidean" else keys
    keys = keys.astype(output)
    if exclude_self:
        keys[np.arange(len(query)), np.arange(len(query))] = np.inf
    indices = np.argsort(keys, axis=1, kind="stable")[:, :k]
    values = np.take_along_axis(keys, indices, axis=1)
    return (-values if metric == "inner_product" else values), indices


@pytest.fixture
def short() -> np.ndarray:
    # Few values: many ties, which go to the lowest row.
    return np.random.default_rng(2).integers(0, 4, size=(90, 6)).astype(np.uint8) * 63


@pytest.mark.parametrize("suffix", ["npy", "npz", "fvecs", "fbin"])
def test_each_float_format_gives_the_neighbours_of_brute_force(tmp_path, floats, suffix):
    for name, matrix in (("q", floats[:20]), ("r", floats[20:])):
        path = tmp_path / f"{name}.{suffix}"
        {"npy": np.save, "npz": np.savez, "fvecs": save_vecs, "fbin": save_bin}[suffix](path, matrix)
    done = run(tmp_path, "search", "--query", f"q.{suffix}", "--reference", f"r.{suffix}", "-k", 7, "--output", "o.npz")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "wrote o.npz: 20 queries, 7 neighbours each\n"
    assert_result(tmp_path / "o.npz", brute_force(floats[:20], floats[20:], 7))


@pytest.mark.parametrize(("suffix", "dtype"), [("bvecs", "u1"), ("u8bin", "u1"), ("i8bin", "i1"), ("npy", "u1")])
def test_bytes_are_searched_exactly_with_their_ties(tmp_path, short, suffix, dtype):
    matrix = short.view(dtype)
    path = tmp_path / f"q.{suffix}"
    if suffix == "npy":
        np.save(path, matrix)
    else:
        (save_vecs if suffix == "bvecs" else save_bin)(path, matrix, dtype)
    assert run(tmp_path, "search", "--query", path, "-k", 30, "--output", "o.npz").returncode == 0
    distances, indices = brute_force(matrix.astype(np.float32), matrix.astype(np.float32), 30, exclude_self=True)
    with np.load(tmp_path / "o.npz") as result:
        np.testing.assert_array_equal(result["indices"], indices)
        np.testing.assert_array_equal(result["distances"], distances)


@pytest.mark.parametrize("dtype", ["<f2", "<f8", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_types_and_orders(tmp_path, floats, dtype, order):
    matrix = np.asarray(floats, dtype=dtype, order=order)
    np.save(tmp_path / "q.npy", matrix)
    assert run(tmp_path, "search", "--query", "q.npy", "-k", 5, "--output", "o.npz").returncode == 0
    native = matrix.astype(matrix.dtype.newbyteorder("="))
    assert_result(tmp_path / "o.npz", brute_force(native, native, 5, exclude_self=True))


def test_files_of_two_types_are_searched_in_the_wider_one(tmp_path, floats):
    wide = floats[20:].astype(np.float64) + 1e-9
    save_bin(tmp_path / "q.fbin", floats[:20])
    np.savez(tmp_path / "r.npz", train=wide, other=floats)
    arguments = ("--query", "q.fbin", "--reference", "r.npz:train", "-k", 5, "--output", "o.npz")
    assert run(tmp_path, "search", *arguments).returncode == 0
    assert_result(tmp_path / "o.npz", brute_force(floats[:20], wide, 5))


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev"])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_each_metric_with_and_without_self(tmp_path, floats, metric, exclude_self):
    np.save(tmp_path / "q.npy", floats[:30])
    np.save(tmp_path / "r.npy", floats)
    flag = ["--exclude-self"] if exclude_self else []
    arguments = ("--query", "q.npy", "--reference", "r.npy", "-k", 9, "--metric", metric, *flag, "--output", "o.npz")
    assert run(tmp_path, "search", *arguments).returncode == 0
    assert_result(tmp_path / "o.npz", brute_force(floats[:30], floats, 9, metric, exclude_self))
    with np.load(tmp_path / "o.npz") as result:
        assert (result["indices"] == np.arange(30)[:, None]).any() == (not exclude_self)


def test_the_bytes_written_do_not_depend_on_the_threads(tmp_path, floats):
    np.save(tmp_path / "q.npy", floats)
    for threads in (1, 2, 3):
        arguments = ("--query", "q.npy", "-k", 10, "--threads", threads, "--output", f"o{threads}.npz")
        assert run(tmp_path, "search", *arguments).returncode == 0
    assert len({(tmp_path / f"o{threads}.npz").read_bytes() for threads in (1, 2, 3)}) == 1


def test_ids_and_distances_in_benchmark_formats(tmp_path, floats):
    np.save(tmp_path / "q.npy", floats)
    distances, indices = brute_force(floats, floats, 4, exclude_self=True)
    search = ("search", "--query", "q.npy", "-k", 4)
    assert run(tmp_path, *search, "--output", "o.ivecs", "--distances", "d.fvecs").returncode == 0
    done = run(tmp_path, *search, "--output", "o.ibin", "--distances", "d.fbin")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"wrote {name}: 120 queries, 4 neighbours each" for name in ("o.ibin", "d.fbin")
    ]

    rows = np.fromfile(tmp_path / "o.ivecs", "<i4").reshape(120, 5)
    assert (rows[:, 0] == 4).all()
    np.testing.assert_array_equal(rows[:, 1:], indices)
    rows = np.fromfile(tmp_path / "d.fvecs", "<f4").reshape(120, 5)
    assert (rows[:, 0].view("<i4") == 4).all()
    np.testing.assert_allclose(rows[:, 1:], distances, rtol=2e-7)
    assert np.fromfile(tmp_path / "o.ibin", "<u4", count=2).tolist() == [120, 4]
    np.testing.assert_array_equal(np.fromfile(tmp_path / "o.ibin", "<i4", offset=8).reshape(120, 4), indices)
    assert np.fromfile(tmp_path / "d.fbin", "<u4", count=2).tolist() == [120, 4]
    np.testing.assert_allclose(np.fromfile(tmp_path / "d.fbin", "<f4", offset=8).reshape(120, 4), distances, rtol=2e-7)


def test_an_existing_output_is_replaced(tmp_path, floats):
    np.save(tmp_path / "q.npy", floats)
    (tmp_path / "o.npz").write_bytes(b"before")
    assert run(tmp_path, "search", "--query", "q.npy", "-k", 2, "--output", "o.npz").returncode == 0
    assert_result(tmp_path / "o.npz", brute_force(floats, floats, 2, exclude_self=True))
    assert sorted(os.listdir(tmp_path)) == ["o.npz", "q.npy"]


def test_no_queries_give_no_neighbours(tmp_path, floats):
    np.save(tmp_path / "q.npy", floats[:0])
    np.save(tmp_path / "r.npy", floats)
    arguments = ("--query", "q.npy", "--reference", "r.npy", "-k", 3, "--output", "o.npz")
    assert run(tmp_path, "search", *arguments).returncode == 0
    with np.load(tmp_path / "o.npz") as result:
        assert result["indices"].shape == result["distances"].shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected a command: search, groundtruth, evaluate, match or info (see: exactknn --help)"),
        (("find",), "unknown command 'find'"),
        (("search",), "the following arguments are required: --query, -k, --output (see: exactknn search --help)"),
        (("search", "-k", "0"), "argument -k: expected a whole number of at least 1, got '0'"),
        (("search", "-k", "ten"), "argument -k: expected a whole number of at least 1, got 'ten'"),
        (("search", "-k", "2.5"), "argument -k: expected a whole number of at least 1, got '2.5'"),
        (("search", "--threads", "-1"), "argument --threads: expected a whole number of at least 1, got '-1'"),
        (("search", "--metric", "manhattan"), "argument --metric: invalid choice: 'manhattan'"),
        (("search", "--p", "0"), "argument --p: expected a number above 0, or inf, got '0'"),
        (("search", "--p", "-1"), "argument --p: expected a number above 0, or inf, got '-1'"),
        (("search", "--p", "nan"), "argument --p: expected a number above 0, or inf, got 'nan'"),
        (("search", "--p", "two"), "argument --p: expected a number above 0, or inf, got 'two'"),
        (
            ("search", "-k", "1", "--query", "q", "--output", "o", "--p", "1", "--metric", "cosine"),
            "--p is for --metric minkowski only, got --metric cosine",
        ),
        (("search", "-k", "1", "--query", "q", "--output", "o", "--quiet"), "unknown option --quiet"),
        (("search", "--out", "o"), "unknown option --out; did you mean --output?"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(tmp_path, arguments, message):
    assert message in refusal(tmp_path, *arguments)


def test_help_shows_an_example_of_each_command(tmp_path):
    for command, example in (
        ((), "exactknn search --query queries.fbin --reference base.fbin -k 100 --output neighbours.npz"),
        (("search",), "exactknn search --query embeddings.npy -k 10 --metric cosine --output neighbours.npz"),
        (("evaluate",), "exactknn evaluate --embeddings val.npy --labels val_labels.npy --report report.html"),
        (("info",), "EXACTKNN_SIMD=avx2 exactknn info --json"),
    ):
        done = run(tmp_path, *command, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("usage: exactknn") and example in done.stdout


def test_help_loads_no_optional_package(tmp_path):
    done = run(tmp_path, "--help", command=[sys.executable, "-X", "importtime", "-m", "exactknn"])
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "exactknn" in loaded and not loaded & {"torch", "faiss", "sklearn", "matplotlib", "tqdm"}


def test_version(tmp_path):
    done = run(tmp_path, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"exactknn {exactknn.__version__}\n", "")


def test_info_as_json(tmp_path):
    done = run(tmp_path, "info", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "version": exactknn.__version__,
        "simd_level": exactknn.simd_level(),
        "available_simd_levels": exactknn.available_simd_levels(),
        "threads": exactknn.get_num_threads(),
        "build": exactknn.build_info(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


def test_info_as_text(tmp_path):
    done = run(tmp_path, "info", env={**os.environ, "EXACTKNN_SIMD": "scalar", "EXACTKNN_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    facts = {line[:12].strip(): line[12:] for line in done.stdout.splitlines()}
    assert facts["exactknn"] == exactknn.__version__
    assert facts["SIMD level"] == f"scalar (available: {', '.join(exactknn.available_simd_levels())})"
    assert facts["threads"] == "1"
    assert facts["python"] == platform.python_version()
    assert facts["numpy"] == np.__version__
    assert list(facts) == ["exactknn", "SIMD level", "threads", "python", "numpy", "platform", "build"]


@pytest.mark.parametrize("variable", ["EXACTKNN_SIMD", "EXACTKNN_NUM_THREADS"])
@pytest.mark.parametrize("command", ["info", "search"])
def test_an_environment_without_meaning_is_refused(tmp_path, floats, variable, command):
    np.save(tmp_path / "q.npy", floats)
    arguments = ("search", "--query", "q.npy", "-k", 1, "--output", "o.npz") if command == "search" else ("info",)
    text = refusal(tmp_path, *arguments, env={**os.environ, variable: "nonsense"})
    assert variable in text and "nonsense" in text


def test_the_console_script_is_this_command():
    scripts = importlib.metadata.entry_points(group="console_scripts", name="exactknn")
    assert [script.value for script in scripts] == ["exactknn.cli:main"]


@pytest.fixture
def long_search(tmp_path) -> list[str]:
    """A search of several seconds, with its queries in `tmp_path`."""
    np.save(tmp_path / "q.npy", np.random.default_rng(3).normal(size=(60_000, 256)).astype(np.float32))
    return ["search", "--query", "q.npy", "-k", "200", "--progress", "--output", "o.npz"]


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        pytest.param(
            *(signal.SIGHUP, 129, "terminated"),
            marks=pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="ignored, as by nohup"),
        ),
    ],
)
def test_an_interrupt_ends_in_one_line_and_leaves_no_file(tmp_path, long_search, number, code, word):
    (tmp_path / "o.npz").write_bytes(b"before")
    command = [sys.executable, "-c", WITHOUT_TQDM, *long_search]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        head = process.stderr.read(len("\rexactknn:   0%"))  # written when the search starts
        assert head == b"\rexactknn:   0%"
        assert sorted(os.listdir(tmp_path))[0].startswith(".exactknn-")
        process.send_signal(number)
        output, errors = process.communicate(timeout=40)
    assert process.returncode == code
    assert output == b""
    assert errors.decode().splitlines()[-1] == f"exactknn: {word}"
    assert b"Traceback" not in errors
    assert (tmp_path / "o.npz").read_bytes() == b"before"
    assert sorted(os.listdir(tmp_path)) == ["o.npz", "q.npy"]


@pytest.mark.parametrize("command", [COMMAND, [sys.executable, "-c", WITHOUT_TQDM]], ids=["tqdm", "plain"])
def test_progress_when_asked_for(tmp_path, floats, command):
    np.save(tmp_path / "q.npy", floats)
    done = run(tmp_path, "search", "--query", "q.npy", "-k", 3, "--progress", "--output", "o.npz", command=command)
    assert done.returncode == 0
    assert done.stdout == "wrote o.npz: 120 queries, 3 neighbours each\n"
    assert "exactknn:   0%" in done.stderr
    assert ("|" in done.stderr) == (command is COMMAND)
    assert done.stderr.endswith("\n")


@pytest.mark.parametrize("flags", [[], ["--no-progress"]])
def test_progress_on_a_terminal_unless_unwanted(tmp_path, floats, flags):
    np.save(tmp_path / "q.npy", floats)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        command = [*COMMAND, "search", "--query", "q.npy", "-k", "3", "--output", "o.npz", *flags]
        done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, timeout=50)
        os.write(theirs, b"end")
        shown = b""
        while not shown.endswith(b"end"):
            shown += os.read(ours, 10_000)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    assert (b"exactknn:   0%" in shown) == (not flags)


@pytest.mark.parametrize("arguments", [("info",), ("info", "--json"), ("--version",), ("search", "--help")])
def test_a_closed_pipe_is_no_traceback(tmp_path, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [*COMMAND, *arguments]
        # Unbuffered, argparse itself passes over the error.
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, timeout=50, env=buffered)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_closed_standard_streams(tmp_path, floats):
    np.save(tmp_path / "q.npy", floats)
    script = f'"{sys.executable}" -m exactknn search --query q.npy -k 3 --progress --output o.npz >&- 2>&-'
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert_result(tmp_path / "o.npz", brute_force(floats, floats, 3, exclude_self=True))


def test_main_returns_the_exit_code_and_restores_the_handlers(capsys):
    from exactknn.cli import main

    before = signal.getsignal(signal.SIGTERM)
    assert main(["--version"]) == 0
    assert main(["search", "--help"]) == 0
    assert main(["search"]) == 2
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err.count("\n") == 1


def test_a_lost_connection_ends_nothing_under_nohup(tmp_path, floats):
    np.save(tmp_path / "q.npy", floats)
    script = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGHUP); "
        "from exactknn.cli import main, search; old = search.run; "
        "search.run = lambda arguments: (os.kill(os.getpid(), signal.SIGHUP), old(arguments))[1]; "
        "sys.exit(main())"
    )
    words = ["search", "--query", "q.npy", "-k", "3", "--output", "o.npz"]
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=tmp_path, capture_output=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, b"")
