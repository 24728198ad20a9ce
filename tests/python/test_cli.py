"""The command line, run as a user runs it: a process, its files, its exit code, its output."""

import fcntl
import importlib.metadata
import io
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

WITHOUT_TQDM = "import sys; sys.modules['tqdm'] = None; from exactknn.cli import main; sys.exit(main())"
COMMAND = [sys.executable, "-m", "exactknn"]


def run(folder: Path, *arguments: object, command: list[str] = COMMAND, **options) -> subprocess.CompletedProcess[str]:
    words = [*command, *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=50, **options)


def refusal(folder: Path, *arguments: object, **options) -> str:
    """The text of the one line with which a command is refused."""
    before = sorted(os.listdir(folder))
    done = run(folder, *arguments, **options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("exactknn: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert sorted(os.listdir(folder)) == before
    return done.stderr.removeprefix("exactknn: error: ").rstrip("\n")


def save_vecs(path: Path, matrix: np.ndarray, dtype: str = "<f4") -> None:
    path.write_bytes(b"".join(struct.pack("<i", len(row)) + row.astype(dtype).tobytes() for row in matrix))


def save_bin(path: Path, matrix: np.ndarray, dtype: str = "<f4") -> None:
    path.write_bytes(struct.pack("<II", *matrix.shape) + matrix.astype(dtype).tobytes())


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


def assert_result(path: Path, expected) -> None:
    distances, indices = expected
    with np.load(path) as result:
        assert sorted(result.files) == ["distances", "indices"]
        assert result["indices"].dtype == np.int64 and result["distances"].dtype == distances.dtype
        np.testing.assert_array_equal(result["indices"], indices)
        tolerance = 1e-12 if distances.dtype == np.float64 else 2e-7
        np.testing.assert_allclose(result["distances"], distances, rtol=tolerance, atol=tolerance)


@pytest.fixture
def floats() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(120, 24)).astype(np.float32)


@pytest.fixture
def short() -> np.ndarray:
    # Few values: many ties, which go to the lowest row.
    return np.random.default_rng(2).integers(0, 4, size=(90, 6)).astype(np.uint8) * 63


# --- search --------------------------------------------------------------------------------------------------------


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


# --- files that cannot be used -------------------------------------------------------------------------------------

FOUR_ROWS = b"".join(struct.pack("<i3f", 3, row, 2, 3) for row in range(4))
NPY_HEADER = b"\x93NUMPY\x01\x00"


def npy(matrix) -> bytes:
    stream = io.BytesIO()
    np.save(stream, matrix, allow_pickle=True)
    return stream.getvalue()


def npz(**arrays) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def handmade_npy(shape: str, descr: str = "<f4", values: bytes = b"") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}".encode()
    return NPY_HEADER + struct.pack("<H", len(header)) + header + values


BAD_FILES = {
    "missing": ("q.npy", None, "q.npy: no such file"),
    "missing npz": ("q.npz:a", None, "q.npz:a: no such file"),
    "file as folder": ("there/q.npy", None, "there/q.npy: no such file"),
    "no suffix": (
        "q",
        b"x",
        "q: unknown suffix ''; wanted one of .npy, .npz, .fvecs, .bvecs, .ivecs, .fbin, .u8bin, .i8bin",
    ),
    "unknown suffix": ("q.hdf5", b"x", "q.hdf5: unknown suffix '.hdf5'; wanted one of .npy"),
    "ids as ivecs": (
        "q.ivecs",
        struct.pack("<iiiiii", 2, 5, 0, 2, 1, -(2**24) - 1),
        "q.ivecs: row 1 holds -16777217, which float32 may not hold exactly; wanted integers within 2**24",
    ),
    "ids as ibin": ("q.ibin", FOUR_ROWS, "q.ibin: holds integer ids, not vectors"),
    **{
        f"empty {suffix}": (f"q.{suffix}", b"", f"q.{suffix}: the file is empty")
        for suffix in ("npy", "npz", "fvecs", "bvecs", "fbin", "u8bin")
    },
    "npy magic": ("q.npy", b"hello, this is text", "q.npy: not a .npy array: it begins with b'hello,'"),
    "npy magic alone": ("q.npy", b"\x93NUMPY", "q.npy: the .npy header cannot be read: EOF: reading magic string"),
    "npy version": ("q.npy", b"\x93NUMPY\x09\x00", "q.npy: .npy format 9.0; plain arrays have 1.0 or 2.0"),
    "npy header cut": ("q.npy", npy(np.ones((2, 3)))[:60], "q.npy: the .npy header cannot be read: EOF: reading array"),
    "npy header text": (
        "q.npy",
        NPY_HEADER + struct.pack("<H", 9) + b"{'a': 1}\n",
        "q.npy: the .npy header cannot be read: Header does not contain the correct keys",
    ),
    "npy cut": (
        "q.npy",
        npy(np.ones((4, 3), np.float32))[:-1],
        "q.npy: the file is cut short: the header announces an array (4, 3) of float32 (48 bytes), 47 are there",
    ),
    "npy tail": ("q.npy", npy(np.ones((4, 3), np.float32)) + b"xy", "50 bytes follow it: 2 too many"),
    "npy huge": ("q.npy", handmade_npy(f"({2**40}, {2**20})"), "q.npy: the file is cut short: the header announces"),
    "npy negative": ("q.npy", handmade_npy("(-1, 3)"), "gives the shape (-1, 3), which is not possible"),
    "npy objects": (
        "q.npy",
        npy(np.array([[1, None], [2, "a"]], dtype=object)),
        "q.npy: an array of Python objects, which is never unpickled",
    ),
    "npy 0-D": ("q.npy", npy(np.float32(3)), "q.npy: a 0-D array of shape (); wanted 2-D, one row per vector"),
    "npy 1-D": ("q.npy", npy(np.ones(5)), "q.npy: a 1-D array of shape (5,); wanted 2-D, one row per vector"),
    "npy 3-D": ("q.npy", npy(np.ones((2, 3, 4))), "q.npy: a 3-D array of shape (2, 3, 4); wanted 2-D"),
    "npy d = 0": ("q.npy", npy(np.ones((5, 0))), "q.npy: the vectors have dimension 0 (shape (5, 0))"),
    "npy ids": ("q.npy", npy(np.ones((5, 2), np.int64)), "q.npy: holds int64 values, which look like ids or labels"),
    "npy complex": ("q.npy", npy(np.ones((5, 2), complex)), "q.npy: holds complex128 values; wanted float16"),
    "npy bool": ("q.npy", npy(np.ones((5, 2), bool)), "q.npy: holds bool values; wanted float16"),
    "npy text": ("q.npy", npy(np.array([["a", "b"]])), "q.npy: holds str32 values; wanted float16"),
    "npy fields": ("q.npy", npy(np.zeros((2, 2), [("a", "f4")])), "q.npy: holds void32 values; wanted float16"),
    "npz text": ("q.npz", b"hello, this is text", "q.npz: not a zip archive, so not an .npz file"),
    "npz cut": ("q.npz", npz(a=np.ones((2, 3)))[:-30], "q.npz: not a zip archive, so not an .npz file"),
    "npz empty": ("q.npz", npz(), "q.npz: the archive holds no array"),
    "npz several": (
        "q.npz",
        npz(train=np.ones((2, 3)), test=np.ones((2, 3))),
        "q.npz: holds 2 arrays (train, test); choose one, for instance q.npz:train",
    ),
    "npz unknown": (
        "q.npz:valid",
        npz(train=np.ones((2, 3)), test=np.ones((2, 3))),
        "q.npz:valid: no array named 'valid'; the archive holds: train, test",
    ),
    "npz 1-D": ("q.npz", npz(a=np.ones(3)), "q.npz: a 1-D array of shape (3,); wanted 2-D"),
    "npz ids": ("q.npz:a", npz(a=np.ones((3, 2), np.int32), b=np.ones(1)), "q.npz:a: holds int32 values, which look"),
    "fvecs header": ("q.fvecs", b"\x03\x00", "q.fvecs: is 2 bytes long; each row begins with a 4-byte dimension"),
    "fvecs d = 0": ("q.fvecs", bytes(32), "q.fvecs: the header gives dimension 0, wanted 1 to 1048576; is it really"),
    "fvecs d < 0": ("q.fvecs", b"\xff" * 32, "q.fvecs: the header gives dimension -1, wanted 1 to 1048576"),
    "fvecs absurd d": ("q.fvecs", b"text" * 8, "q.fvecs: the header gives dimension 1954047348, wanted 1 to 1048576"),
    "fvecs cut": (
        "q.fvecs",
        FOUR_ROWS[:-3],
        "q.fvecs: row 3 is cut short: it has 13 bytes, a row of 3 values has 16",
    ),
    "fvecs first row cut": ("q.fvecs", FOUR_ROWS[:9], "q.fvecs: row 0 is cut short: it has 9 bytes"),
    "fvecs rows differ": (
        "q.fvecs",
        FOUR_ROWS[:32] + struct.pack("<i", 5) + FOUR_ROWS[36:],
        "q.fvecs: row 2 says it has 5 values, row 0 says 3; all rows must have the same dimension",
    ),
    "fvecs rows and length differ": (
        "q.fvecs",
        FOUR_ROWS[:16] + struct.pack("<i2f", 2, 1, 2) + FOUR_ROWS,
        "q.fvecs: row 1 says it has 2 values, row 0 says 3",
    ),
    "bvecs cut": ("q.bvecs", struct.pack("<i4B", 4, 1, 2, 3, 4) + b"\4", "q.bvecs: row 1 is cut short: it has 1 byte"),
    "fbin header": ("q.fbin", bytes(7), "q.fbin: is 7 bytes long; the header alone (rows, dimension) has 8"),
    "fbin d = 0": ("q.fbin", struct.pack("<II", 4, 0), "q.fbin: the header gives dimension 0, wanted 1 to 1048576"),
    "fbin absurd d": ("q.fbin", b"text" * 9, "q.fbin: the header gives dimension 1954047348, wanted 1 to 1048576"),
    "fbin cut": (
        "q.fbin",
        struct.pack("<II", 4, 3) + bytes(47),
        "q.fbin: the file is cut short: the header announces 4 rows of 3 float32 values (48 bytes), 47 are there",
    ),
    "fbin tail": ("q.fbin", struct.pack("<II", 4, 3) + bytes(49), "(48 bytes), but 49 bytes follow it: 1 too many"),
    "fbin of bytes": ("q.fbin", struct.pack("<II", 4, 3) + bytes(12), "12 are there; the size would fit .u8bin"),
    "u8bin of floats": ("q.u8bin", struct.pack("<II", 4, 3) + bytes(48), "36 too many; the size would fit .fbin"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line(tmp_path, kind):
    name, content, message = BAD_FILES[kind]
    if content is not None:
        (tmp_path / name.split(":")[0]).write_bytes(content)
    if kind == "file as folder":
        (tmp_path / "there").write_bytes(b"")
    assert message in refusal(tmp_path, "search", "--query", name, "-k", 1, "--output", "o.npz")


def test_pickles_are_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    matrix = np.empty((1, 1), dtype=object)
    matrix[0, 0] = Payload()
    (tmp_path / "a.npy").write_bytes(npy(matrix))
    (tmp_path / "b.npz").write_bytes(npz(a=matrix))
    for name in ("a.npy", "b.npz"):
        assert "never unpickled" in refusal(tmp_path, "search", "--query", name, "-k", 1, "--output", "o.npz")
    assert not (tmp_path / "owned").exists()


def test_a_folder_and_a_pipe_are_not_vector_files(tmp_path):
    (tmp_path / "q.npy").mkdir()
    os.mkfifo(tmp_path / "q.fbin")
    search = ("-k", 1, "--output", "o.npz")
    assert refusal(tmp_path, "search", "--query", "q.npy", *search) == "q.npy: is a folder, not a file"
    assert "q.fbin: is not a regular file" in refusal(tmp_path, "search", "--query", "q.fbin", *search)


def test_the_bad_file_may_be_the_reference(tmp_path, floats):
    np.save(tmp_path / "q.npy", floats)
    (tmp_path / "r.fbin").write_bytes(bytes(3))
    arguments = ("--query", "q.npy", "--reference", "r.fbin", "-k", 1, "--output", "o.npz")
    assert "r.fbin: is 3 bytes long" in refusal(tmp_path, "search", *arguments)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["query", "reference"])
def test_a_row_that_is_not_finite_is_named(tmp_path, floats, value, side):
    bad = floats.copy()
    bad[17, 3] = bad[40, 0] = value
    np.save(tmp_path / "query.npy", bad if side == "query" else floats)
    np.save(tmp_path / "reference.npy", bad if side == "reference" else floats)
    arguments = ("--query", "query.npy", "--reference", "reference.npy", "-k", 1, "--output", "o.npz")
    text = refusal(tmp_path, "search", *arguments)
    assert side in text and "17" in text and "40" not in text


def test_sizes_that_do_not_fit_each_other(tmp_path, floats):
    np.save(tmp_path / "q.npy", floats)
    np.save(tmp_path / "narrow.npy", floats[:, :20])
    np.save(tmp_path / "few.npy", floats[:50])
    search = ("search", "--output", "o.npz", "--query", "q.npy")
    assert refusal(tmp_path, *search, "--reference", "narrow.npy", "-k", 1) == (
        "--query q.npy has dimension 24, --reference narrow.npy has 20; they must be equal"
    )
    assert refusal(tmp_path, *search, "--reference", "few.npy", "-k", 51) == "-k 51 is too large: few.npy has 50 rows"
    assert refusal(tmp_path, *search, "-k", 120) == (
        "-k 120 is too large: q.npy has 120 rows, of which a query may return all but itself"
    )
    assert refusal(tmp_path, *search, "--reference", "few.npy", "-k", 1, "--exclude-self") == (
        "--exclude-self: the queries must be the first rows of the reference, "
        "but --query q.npy has 120 rows and --reference few.npy has 50"
    )


# --- outputs that cannot be written --------------------------------------------------------------------------------


def test_outputs_that_cannot_be_written_are_refused_before_the_search(tmp_path, floats):
    np.save(tmp_path / "q.npy", floats)
    save_bin(tmp_path / "q.fbin", floats)
    np.savez(tmp_path / "q.npz", floats)
    np.save(tmp_path / "wide.npy", floats.astype(np.float64))
    (tmp_path / "link.npz").symlink_to("q.npz")
    (tmp_path / "folder.npz").mkdir()

    def refused(*arguments: object, query: str = "q.npy") -> str:
        return refusal(tmp_path, "search", "--query", query, "-k", 2, *arguments)

    assert refused("--output", "o.txt") == (
        "o.txt: unknown suffix '.txt' for --output; wanted one of .npz, .ivecs, .ibin"
    )
    assert refused("--output", "o.npz", "--distances", "d.npy") == (
        "d.npy: unknown suffix '.npy' for --distances; wanted one of .fbin, .fvecs"
    )
    assert refused("--output", "no/such/o.npz") == f"no/such/o.npz: the folder {tmp_path}/no/such does not exist"
    assert refused("--output", "folder.npz") == "folder.npz: is a folder, not a file"
    # Nobody, not even root, can make a file there.
    assert "/proc/o.npz: cannot write in the folder /proc: " in refused("--output", "/proc/o.npz")
    for output in ("q.npz", "./q.npz", tmp_path / "q.npz", "link.npz"):
        assert refused("--output", output, query="q.npz") == f"--output {output} would replace the input q.npz"
    assert refused("--output", "o.npz", "--distances", "q.fbin", query="q.fbin") == (
        "--distances q.fbin would replace the input q.fbin"
    )
    assert "float64 distances, which .fbin cannot hold" in refused(
        "--output", "o.npz", "--distances", "d.fbin", query="wide.npy"
    )


def test_row_numbers_beyond_int32_are_refused_for_int32_formats(tmp_path, floats):
    save_bin(tmp_path / "q.u8bin", np.ones((1, 1)), "u1")
    with (tmp_path / "r.u8bin").open("wb") as stream:  # sparse: two thousand million rows of one byte, none on disk
        stream.write(struct.pack("<II", 2**31 + 1, 1))
        stream.truncate(8 + 2**31 + 1)
    for output in ("o.ivecs", "o.ibin"):
        arguments = ("--query", "q.u8bin", "--reference", "r.u8bin", "-k", 1, "--output", output)
        assert "row numbers up to 2147483648 do not fit the int32" in refusal(tmp_path, "search", *arguments)


def test_a_full_disk_leaves_what_was_there(tmp_path, floats):
    np.save(tmp_path / "q.npy", floats)
    (tmp_path / "o.ibin").write_bytes(b"before")
    limited = (
        "import resource, sys; from exactknn.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); sys.exit(main())"
    )
    arguments = ("search", "--query", "q.npy", "-k", 50, "--output", "o.ibin", "--distances", "d.fbin")
    done = run(tmp_path, *arguments, command=[sys.executable, "-c", limited])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "exactknn: error: File too large\n"
    assert (tmp_path / "o.ibin").read_bytes() == b"before"
    assert sorted(os.listdir(tmp_path)) == ["o.ibin", "q.npy"]


@pytest.mark.parametrize(
    ("p", "exponent"), [((), 2), (("--p", "1"), 1), (("--p", "2.5"), 2.5), (("--p", "inf"), np.inf)]
)
def test_minkowski_takes_an_exponent(tmp_path, floats, p, exponent):
    np.save(tmp_path / "q.npy", floats)
    done = run(tmp_path, "search", "--query", "q.npy", "-k", 3, "--metric", "minkowski", *p, "--output", "o.npz")
    assert done.returncode == 0
    assert_result(tmp_path / "o.npz", exactknn.knn(floats, k=3, metric="minkowski", p=exponent))


# --- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a command is wanted: search, groundtruth, evaluate, match or info (see: exactknn --help)"),
        (("find",), "invalid choice: 'find'"),
        (("search",), "the following arguments are required: --query, -k, --output (see: exactknn search --help)"),
        (("search", "-k", "0"), "argument -k: wanted a whole number of at least 1, got '0'"),
        (("search", "-k", "ten"), "argument -k: wanted a whole number of at least 1, got 'ten'"),
        (("search", "-k", "2.5"), "argument -k: wanted a whole number of at least 1, got '2.5'"),
        (("search", "--threads", "-1"), "argument --threads: wanted a whole number of at least 1, got '-1'"),
        (("search", "--metric", "manhattan"), "argument --metric: invalid choice: 'manhattan'"),
        (("search", "--p", "0"), "argument --p: wanted a number above 0, or inf, got '0'"),
        (("search", "--p", "-1"), "argument --p: wanted a number above 0, or inf, got '-1'"),
        (("search", "--p", "nan"), "argument --p: wanted a number above 0, or inf, got 'nan'"),
        (("search", "--p", "two"), "argument --p: wanted a number above 0, or inf, got 'two'"),
        (
            ("search", "-k", "1", "--query", "q", "--output", "o", "--p", "1", "--metric", "cosine"),
            "--p is for --metric minkowski only, got --metric cosine",
        ),
        (("search", "-k", "1", "--query", "q", "--output", "o", "--quiet"), "unrecognized arguments: --quiet"),
        (("search", "--out", "o"), "required"),
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


# --- info ----------------------------------------------------------------------------------------------------------


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


# --- progress, signals, closed streams -----------------------------------------------------------------------------


@pytest.fixture
def long_search(tmp_path) -> list[str]:
    """A search of several seconds, whose queries lie in `tmp_path`."""
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
