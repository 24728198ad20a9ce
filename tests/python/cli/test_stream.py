"""``exactknn search --max-memory`` and ``--resume``: the bytes of a search of the whole, what an interrupt leaves."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from exactknn import _core, cli
from exactknn._io.outputs import write_neighbours
from exactknn._stream.checkpoint import Checkpoint
from exactknn._stream.search import ResumableSearch


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path):
    """Blocks and pieces of a few rows, a bound that counts rows only, a state after each block."""
    monkeypatch.setattr("exactknn._stream.plan.BLOCK_BYTES", 3000)
    monkeypatch.setattr("exactknn._stream.plan.LEAST_ROWS", 5)
    monkeypatch.setattr("exactknn._stream.plan.FIXED_BYTES", 0)
    monkeypatch.setattr("exactknn._stream.rows.PIECE_BYTES", 700)
    monkeypatch.setattr("exactknn._stream.search.PIECE_BYTES", 700)
    monkeypatch.setattr("exactknn._stream.checkpoint.SECONDS", 0.0)
    monkeypatch.setattr("exactknn._stream.checkpoint.SHARE", 0)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def short() -> np.ndarray:
    # Few values: many ties, which go to the lowest row.
    return np.random.default_rng(2).integers(0, 4, size=(300, 6)).astype(np.uint8) * 20


@pytest.fixture
def floats() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(300, 16)).astype(np.float32)


def save(path: str, matrix: np.ndarray) -> None:
    suffix = Path(path).suffix
    if suffix == ".npy":
        np.save(path, matrix)
    elif suffix == ".npz":
        np.savez(path, matrix)
    elif suffix in (".fvecs", ".bvecs", ".ivecs"):
        dtype = {".fvecs": "<f4", ".bvecs": "u1", ".ivecs": "<i4"}[suffix]
        Path(path).write_bytes(b"".join(struct.pack("<i", len(row)) + row.astype(dtype).tobytes() for row in matrix))
    else:
        dtype = {".fbin": "<f4", ".u8bin": "u1", ".i8bin": "i1"}[suffix]
        Path(path).write_bytes(struct.pack("<II", *matrix.shape) + matrix.astype(dtype).tobytes())


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("exactknn")]


def search(*arguments: object) -> int:
    return cli.main(["search", *map(str, arguments)])


def assert_same_bytes(*arguments: object, bound: object = "1MB") -> None:
    assert search(*arguments, "--output", "whole.npz") == 0
    assert search(*arguments, "--output", "blocks.npz", "--max-memory", bound) == 0
    assert Path("whole.npz").read_bytes() == Path("blocks.npz").read_bytes()
    assert not own_threads()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    before = sorted(os.listdir())
    capsys.readouterr()
    assert search(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("exactknn: error: ") and captured.err.count("\n") == 1
    assert sorted(os.listdir()) == before
    return captured.err.removeprefix("exactknn: error: ").rstrip("\n")


# --- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["npy", "npz", "fvecs", "bvecs", "ivecs", "fbin", "u8bin", "i8bin"])
def test_every_format_is_read_in_blocks(short, suffix):
    save(f"r.{suffix}", short)
    np.save("q.npy", short[::7].astype(np.float32))
    assert_same_bytes("--query", "q.npy", "--reference", f"r.{suffix}", "-k", 9)
    assert_same_bytes("--query", f"r.{suffix}", "-k", 9, "--metric", "cosine")


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8", ">f8", "u1", ">i2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_types_and_orders(short, dtype, order):
    np.save("r.npy", np.asarray(short, dtype, order=order))
    np.save("q.npy", short[:20].astype(np.float16))
    assert_same_bytes("--query", "q.npy", "--reference", "r.npy", "-k", 9)
    assert_same_bytes("--query", "r.npy", "-k", 9, "--metric", "cityblock", bound=60_000)


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev"])
@pytest.mark.parametrize("bound", [35_000, "1MB"])
def test_metrics_and_self_with_queries_in_blocks(floats, metric, bound):
    save("r.fbin", floats)
    np.save("q.npy", floats[:120])
    assert_same_bytes("--query", "r.fbin", "-k", 5, "--metric", metric, bound=bound)
    arguments = ("--query", "q.npy", "--reference", "r.fbin", "-k", 5, "--metric", metric)
    assert_same_bytes(*arguments, bound=bound)
    assert_same_bytes(*arguments, "--exclude-self", bound=bound)


def test_no_queries(floats):
    np.save("q.npy", floats[:0])
    np.save("r.npy", floats)
    assert_same_bytes("--query", "q.npy", "--reference", "r.npy", "-k", 3)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_bad_rows_are_named_by_their_number_in_the_file(capsys, floats):
    save("r.fvecs", floats)
    content = bytearray(Path("r.fvecs").read_bytes())
    content[250 * 68 : 250 * 68 + 4] = struct.pack("<i", 7)
    Path("bad.fvecs").write_bytes(content)
    bounded = ("-k", 2, "--output", "o.npz", "--max-memory", "1MB")
    assert refusal(capsys, "--query", "r.fvecs", "--reference", "bad.fvecs", *bounded) == (
        "bad.fvecs: row 250 has dimension 7, row 0 has 16; all rows must have the same dimension"
    )
    ids = np.ones((300, 16), np.int32)
    ids[280, 3] = 2**24 + 1
    save("bad.ivecs", ids)
    assert "bad.ivecs: row 280 holds 16777217, which float32 may not hold" in refusal(
        capsys, "--query", "r.fvecs", "--reference", "bad.ivecs", *bounded
    )
    floats[271, 5] = np.nan
    save("bad.fbin", floats)
    assert refusal(capsys, "--query", "r.fvecs", "--reference", "bad.fbin", *bounded) == (
        "--reference bad.fbin must be finite, got NaN in row 271, column 5"
    )


def test_a_bound_that_is_too_small_says_what_is_needed(capsys, floats):
    save("r.fbin", floats)
    text = refusal(capsys, "--query", "r.fbin", "-k", 2, "--output", "o.npz", "--max-memory", "5kB")
    assert text.startswith("--max-memory must be at least ") and "300 queries with k=2, takes 7200" in text
    least = text.split()[5]
    assert search("--query", "r.fbin", "-k", 2, "--output", "o.npz", "--max-memory", least) == 0
    text = refusal(capsys, "--query", "r.fbin", "-k", 2, "--output", "o.npz", "--max-memory", "2G")
    assert (
        "argument --max-memory: expected a size of at least one byte such as 2GB, 512MiB or 1500000000, got '2G'"
        in text
    )


def test_an_archive_is_read_whole_where_it_fits_only(capsys, floats):
    np.savez("r.npz", floats)
    assert refusal(capsys, "--query", "r.npz", "-k", 2, "--output", "o.npz", "--max-memory", "19kB") == (
        "r.npz: an array of an .npz file is read whole, and this one takes 19200 bytes, more than allowed; "
        "a .npy file is read in blocks"
    )
    assert "must be at least" in refusal(
        capsys, "--query", "r.npz", "-k", 2, "--output", "o.npz", "--max-memory", 19_200
    )


def test_a_file_that_becomes_shorter_is_an_error_not_a_crash(capsys, monkeypatch, floats):
    save("r.fbin", floats)
    np.save("q.npy", floats[:9])
    begin = ResumableSearch.run

    def cut(*arguments):
        os.truncate("r.fbin", 2000)
        return begin(*arguments)

    monkeypatch.setattr(ResumableSearch, "run", cut)
    arguments = ("--query", "q.npy", "--reference", "r.fbin", "-k", 2, "--output", "o.npz", "--max-memory", "1MB")
    assert refusal(capsys, *arguments) == "r.fbin: was truncated while it was read"
    assert not own_threads()


# --- resuming ------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupt_after(monkeypatch):
    """Raise Ctrl-C after this many blocks."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    is_due = Checkpoint.is_due

    def after(count: int) -> None:
        seen = []

        def due(checkpoint):
            seen.append(None)
            if len(seen) == count:
                signal.raise_signal(signal.SIGINT)
            return is_due(checkpoint)

        monkeypatch.setattr(Checkpoint, "is_due", due)

    yield after
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("bound", [40_000, "1MB"])
@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize(
    "inputs", [("--query", "r.fbin"), ("--query", "q.npy", "--reference", "r.fbin", "--exclude-self")]
)
def test_an_interrupted_search_goes_on_to_the_same_bytes(
    capsys, monkeypatch, floats, interrupt_after, bound, periodic, inputs
):
    monkeypatch.setattr("exactknn._stream.checkpoint.SECONDS", 0.0 if periodic else 1e9)
    save("r.fbin", floats)
    np.save("q.npy", floats[:200])
    arguments = (*inputs, "-k", 5, "--metric", "cosine")
    assert search(*arguments, "--output", "whole.npz") == 0
    arguments = (*arguments, "--output", "o.npz", "--max-memory", bound, "--resume", "state")
    before = sorted(os.listdir())
    capsys.readouterr()
    for count in (1, 2, 3, 1):
        interrupt_after(count)
        assert search(*arguments) == 130
        assert sorted(os.listdir()) == sorted([*before, "state"])
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1] == "exactknn: interrupted; rerun the command to continue from state"
    share = int(lines[0].removeprefix("exactknn: continuing from state, ").removesuffix("% done"))
    assert 0 < share < 100
    interrupt_after(0)
    assert search(*arguments) == 0
    assert capsys.readouterr().out == f"wrote o.npz: {200 if len(inputs) > 2 else 300} queries, 5 neighbours each\n"
    assert Path("o.npz").read_bytes() == Path("whole.npz").read_bytes()
    assert sorted(os.listdir()) == sorted([*before, "o.npz"])


def test_an_interrupt_while_the_result_is_written_loses_nothing(capsys, monkeypatch, floats, interrupt_after):
    save("r.fbin", floats)
    arguments = ("--query", "r.fbin", "-k", 5, "--output", "o.npz", "--max-memory", 40_000, "--resume", "state")
    write = write_neighbours
    monkeypatch.setattr("exactknn.cli.search.write_neighbours", lambda *_: signal.raise_signal(signal.SIGINT))
    assert search(*arguments) == 130
    assert sorted(os.listdir()) == ["r.fbin", "state"]
    monkeypatch.setattr("exactknn.cli.search.write_neighbours", write)
    assert search(*arguments) == 0
    assert search("--query", "r.fbin", "-k", 5, "--output", "whole.npz") == 0
    assert Path("o.npz").read_bytes() == Path("whole.npz").read_bytes()


def test_an_interrupt_before_the_first_block_leaves_nothing(capsys, monkeypatch, floats):
    save("r.fbin", floats)
    monkeypatch.setattr(ResumableSearch, "_check_queries", lambda _: signal.raise_signal(signal.SIGINT))
    assert search("--query", "r.fbin", "-k", 5, "--output", "o.npz", "--max-memory", 40_000, "--resume", "state") == 130
    assert capsys.readouterr().err == "exactknn: interrupted\n"
    assert os.listdir() == ["r.fbin"]


@pytest.mark.parametrize("bound", [(), ("--max-memory", "1GB")])
def test_an_interrupt_in_the_middle_of_a_block_keeps_what_was_searched(
    capsys, monkeypatch, floats, interrupt_after, bound
):
    monkeypatch.setattr("exactknn._stream.plan.BLOCK_BYTES", 1 << 27)  # all references, as it is outside of these tests
    monkeypatch.setattr("exactknn._stream.search.FIRST_WORK", 300 * 16 * 50)  # multiply-adds of 50 references
    monkeypatch.setattr("exactknn._stream.search._PIECE_SECONDS", 0.0)  # each piece half of the one before
    save("r.fbin", floats)
    arguments = ("--query", "r.fbin", "-k", 5, *bound, "--output", "o.npz", "--resume", "state")
    rows = []
    for count in (1, 2, 3):
        interrupt_after(count)
        assert search(*arguments) == 130
        assert capsys.readouterr().err.endswith("exactknn: interrupted; rerun the command to continue from state\n")
        with np.load("state") as found:
            rows.append(found["place"].tolist())
    assert rows == [[0, 50], [0, 50 + 50 + 25], [0, 125 + 50 + 25 + 12]]
    interrupt_after(0)
    assert search(*arguments) == 0
    assert search("--query", "r.fbin", "-k", 5, "--output", "whole.npz") == 0
    assert Path("o.npz").read_bytes() == Path("whole.npz").read_bytes()


def test_without_a_bound_resume_reads_blocks_of_a_usual_size(floats, interrupt_after):
    save("r.fbin", floats)
    interrupt_after(2)
    assert search("--query", "r.fbin", "-k", 5, "--output", "o.npz", "--resume", "state") == 130
    interrupt_after(0)
    assert search("--query", "r.fbin", "-k", 5, "--output", "o.npz", "--resume", "state") == 0
    assert search("--query", "r.fbin", "-k", 5, "--output", "whole.npz") == 0
    assert Path("o.npz").read_bytes() == Path("whole.npz").read_bytes()


@pytest.fixture
def state(floats, interrupt_after, capsys) -> tuple[object, ...]:
    """The arguments of a search that was interrupted."""
    save("r.fbin", floats)
    np.save("q.npy", floats[:100])
    arguments = ("--query", "q.npy", "--reference", "r.fbin", "-k", 5, "--output", "o.npz", "--resume", "state")
    interrupt_after(2)
    assert search(*arguments) == 130
    interrupt_after(0)
    capsys.readouterr()
    return arguments


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (("-k", 6), "-k was 5, now it is 6"),
        (("--metric", "cosine"), "--metric was sqeuclidean, now it is cosine"),
        (("--metric", "minkowski", "--p", "inf"), "--metric was sqeuclidean, now it is minkowski"),
        (("--exclude-self",), "--exclude-self was False, now it is True"),
        (("--max-memory", "1MB"), "--max-memory was None, now it is 1000000"),
        (("--query", "other.npy"), "--query was {folder}/q.npy, now it is {folder}/other.npy"),
    ],
)
def test_a_state_of_another_search_is_refused(capsys, tmp_path, floats, state, changed, text):
    np.save("other.npy", floats[:100])
    text = text.format(folder=os.path.realpath(tmp_path))
    assert refusal(capsys, *state, *changed) == (
        f"state: belongs to another search: {text}; name another file, or remove it to start over"
    )


def test_a_state_of_files_that_have_changed_is_refused(capsys, floats, state):
    status = os.stat("r.fbin")
    save("r.fbin", floats + 1)
    os.utime("r.fbin", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    text = refusal(capsys, *state)
    assert f"the time of the last change of --reference (ns) was {status.st_mtime_ns}, now it is" in text
    np.save("q.npy", floats[:101])
    assert "the size of --query was " in refusal(capsys, *state)


def test_a_state_of_another_version_is_refused(capsys, monkeypatch, state):
    monkeypatch.setattr(_core, "__version__", "99")
    assert "the version of exactknn was 0.1.0, now it is 99" in refusal(capsys, *state)


def test_threads_output_and_progress_may_be_others(state):
    assert search(*state, "--threads", 1, "--output", "other.ivecs", "--distances", "d.fbin", "--no-progress") == 0
    assert search("--query", "q.npy", "--reference", "r.fbin", "-k", 5, "--output", "whole.ivecs") == 0
    assert Path("other.ivecs").read_bytes() == Path("whole.ivecs").read_bytes()
    assert not os.path.exists("state")


def changed_state(**changes: object) -> None:
    with np.load("state") as found:
        arrays = dict(found)
    for name, value in changes.items():
        arrays[name] = np.asarray(value)
    with open("state", "wb") as stream:
        np.savez(stream, **arrays)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"not a state",
        lambda content: content[: len(content) // 2],
        lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
        lambda content: content[:-400] + bytes(400),
    ],
)
def test_a_damaged_state_is_refused(capsys, state, damage):
    Path("state").write_bytes(damage(Path("state").read_bytes()))
    assert "state: is not a checkpoint, or is damaged (" in refusal(capsys, *state)


@pytest.mark.parametrize(
    "changes",
    [
        {"about": np.frombuffer(b"{}", np.uint8)},
        {"about": np.frombuffer(b"\xff{", np.uint8)},
        {"about": np.zeros((1 << 20) + 1, np.uint8)},
        {"place": [0, 301]},
        {"place": [7, 10]},
        {"place": [-1, 0]},
        {"place": [0.0, 0.0]},
        {"place": [0, 4]},
        {"ranks": np.zeros((100, 6))},
        {"ranks": np.full((100, 5), np.nan)},
        {"candidates": np.full((100, 5), 299)},
        {"candidates": np.zeros((100, 5), np.int32)},
        {"distances": np.zeros((1, 5), np.float32)},
        {"indices": np.array([[None]], object)},
    ],
)
def test_a_state_that_no_search_can_have_written_is_refused(capsys, state, changes):
    changed_state(**changes)
    assert "state: is not a checkpoint, or is damaged (" in refusal(capsys, *state)


def test_the_state_must_be_a_file_of_its_own(capsys, floats):
    save("r.fbin", floats)
    os.mkdir("folder")
    arguments = ("--query", "r.fbin", "-k", 5, "--output", "o.npz", "--resume")
    assert refusal(capsys, *arguments, "o.npz") == "--output and --resume are the same file: o.npz"
    assert refusal(capsys, *arguments, "r.fbin") == "--resume r.fbin would replace the input r.fbin"
    assert refusal(capsys, *arguments, "folder") == "folder: is a folder, not a file"
    assert "no/state: the folder " in refusal(capsys, *arguments, "no/state")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
def test_a_pipe_is_not_waited_for_as_a_state(capsys, floats):
    save("r.fbin", floats)
    os.mkfifo("state")
    arguments = ("--query", "r.fbin", "-k", 5, "--output", "o.npz", "--resume", "state")
    assert refusal(capsys, *arguments) == "state: is a device or pipe, not a file"


def test_a_link_to_a_state_stays_and_the_state_goes(floats, interrupt_after):
    save("r.fbin", floats)
    os.symlink("target", "state")
    arguments = ("--query", "r.fbin", "-k", 5, "--output", "o.npz", "--resume", "state")
    interrupt_after(2)
    assert search(*arguments) == 130
    assert os.path.islink("state") and os.path.isfile("target")
    interrupt_after(0)
    assert search(*arguments) == 0
    assert os.path.islink("state") and not os.path.exists("target")


def test_a_state_that_cannot_be_written_does_not_end_the_search(capsys, monkeypatch, floats):
    save("r.fbin", floats)

    def full(*arguments, **arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert search("--query", "r.fbin", "-k", 5, "--output", "o.ivecs", "--resume", "state") == 0
    lines = set(capsys.readouterr().err.splitlines())
    assert lines == {"exactknn: warning: --resume state: the state could not be saved: No space left on device"}
    assert sorted(os.listdir()) == ["o.ivecs", "r.fbin"]


def test_the_state_says_what_it_is_of(state):
    with np.load("state") as found:
        about = json.loads(found["about"].tobytes())
        assert (found["place"][0], 0 < found["place"][1] < 300) == (0, True)
    assert about["what --reference holds"] == "300 x 16 float32" and about["-k"] == 5


SLOW = """
import sys
from exactknn import cli
from exactknn._stream import plan
plan.BLOCK_BYTES = 1 << 18
sys.modules["tqdm"] = None
sys.exit(cli.main(sys.argv[1:]))
"""


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
def test_a_signal_to_the_process_and_a_second_run(tmp_path, number, code, word):
    x = np.random.default_rng(0).standard_normal((30_000, 64)).astype(np.float32)
    save("r.fbin", x)
    np.save("q.npy", x[:3000])
    inputs = ("--query", "q.npy", "--reference", "r.fbin", "-k", "5")
    command = [sys.executable, "-W", "error", "-c", SLOW, "search", *inputs, "--output", "o.npz"]
    command += ["--max-memory", "1GB", "--resume", "state", "--threads", "1", "--progress"]
    slow = os.environ | {"EXACTKNN_SIMD": "scalar"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=slow)
    assert process.stderr is not None
    shown = ""
    while " 10%" not in shown:
        shown += process.stderr.read(1)
    process.send_signal(number)
    printed, shown = process.communicate(timeout=50)
    assert (process.returncode, printed) == (code, "")
    assert shown.splitlines()[-1] == f"exactknn: {word}; rerun the command to continue from state"
    assert sorted(os.listdir()) == ["q.npy", "r.fbin", "state"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0 and done.stderr.startswith("exactknn: continuing from state, ")
    assert search(*inputs, "--output", "whole.npz") == 0
    assert Path("o.npz").read_bytes() == Path("whole.npz").read_bytes()
