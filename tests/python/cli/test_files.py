"""Files that ``exactknn search`` cannot read or write: one line on stderr, exit code 2, nothing left behind."""

import io
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

import exactknn
from tests.python.cli.search_helpers import assert_result, refusal, run, save_bin

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
        "q: unknown suffix ''; expected one of .npy, .npz, .fvecs, .bvecs, .ivecs, .fbin, .u8bin, .i8bin",
    ),
    "unknown suffix": ("q.hdf5", b"x", "q.hdf5: unknown suffix '.hdf5'; expected one of .npy"),
    "ids as ivecs": (
        "q.ivecs",
        struct.pack("<iiiiii", 2, 5, 0, 2, 1, -(2**24) - 1),
        "q.ivecs: row 1 holds -16777217, which float32 may not hold exactly; expected integers within 2**24",
    ),
    "ids as ibin": ("q.ibin", FOUR_ROWS, "q.ibin: holds integer ids, not vectors"),
    **{
        f"empty {suffix}": (f"q.{suffix}", b"", f"q.{suffix}: the file is empty")
        for suffix in ("npy", "npz", "fvecs", "bvecs", "fbin", "u8bin")
    },
    "npy magic": ("q.npy", b"hello, this is text", "q.npy: not a .npy array: it begins with b'hello,'"),
    "npy magic alone": ("q.npy", b"\x93NUMPY", "q.npy: the .npy header cannot be read: EOF: reading magic string"),
    "npy version": ("q.npy", b"\x93NUMPY\x09\x00", "q.npy: .npy format 9.0; expected 1.0, 2.0 or 3.0"),
    "npy header cut": ("q.npy", npy(np.ones((2, 3)))[:60], "q.npy: the .npy header cannot be read: EOF: reading array"),
    "npy header text": (
        "q.npy",
        NPY_HEADER + struct.pack("<H", 9) + b"{'a': 1}\n",
        "q.npy: the .npy header cannot be read: Header does not contain the correct keys",
    ),
    "npy cut": (
        "q.npy",
        npy(np.ones((4, 3), np.float32))[:-1],
        "q.npy: the file is cut short: the header announces an array (4, 3) of float32 (48 bytes), found 47 bytes",
    ),
    "npy tail": ("q.npy", npy(np.ones((4, 3), np.float32)) + b"xy", "50 bytes follow it: 2 too many"),
    "npy huge": ("q.npy", handmade_npy(f"({2**40}, {2**20})"), "q.npy: the file is cut short: the header announces"),
    "npy negative": ("q.npy", handmade_npy("(-1, 3)"), "gives the impossible shape (-1, 3)"),
    "npy overflow": ("q.npy", handmade_npy(f"({2**62}, {2**62})"), "q.npy: the header gives the impossible shape (46"),
    "npy overflow beside 0": ("q.npy", handmade_npy(f"(0, {2**62})"), "gives the impossible shape (0,"),
    "npy size beyond int64": ("q.npy", handmade_npy(f"(0, {2**64})"), "gives the impossible shape (0,"),
    "npy objects": (
        "q.npy",
        npy(np.array([[1, None], [2, "a"]], dtype=object)),
        "q.npy: holds pickled Python objects, which are never loaded",
    ),
    "npy 0-D": ("q.npy", npy(np.float32(3)), "q.npy: a 0-D array of shape (); expected 2-D, one row per vector"),
    "npy 1-D": ("q.npy", npy(np.ones(5)), "q.npy: a 1-D array of shape (5,); expected 2-D, one row per vector"),
    "npy 3-D": ("q.npy", npy(np.ones((2, 3, 4))), "q.npy: a 3-D array of shape (2, 3, 4); expected 2-D"),
    "npy d = 0": ("q.npy", npy(np.ones((5, 0))), "q.npy: the vectors have dimension 0 (shape (5, 0))"),
    "npy ids": ("q.npy", npy(np.ones((5, 2), np.int64)), "q.npy: holds int64 values, which look like ids or labels"),
    "npy complex": ("q.npy", npy(np.ones((5, 2), complex)), "q.npy: holds complex128 values; expected float16"),
    "npy bool": ("q.npy", npy(np.ones((5, 2), bool)), "q.npy: holds bool values; expected float16"),
    "npy text": ("q.npy", npy(np.array([["a", "b"]])), "q.npy: holds str32 values; expected float16"),
    "npy fields": ("q.npy", npy(np.zeros((2, 2), [("a", "f4")])), "q.npy: holds void32 values; expected float16"),
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
    "npz 1-D": ("q.npz", npz(a=np.ones(3)), "q.npz: a 1-D array of shape (3,); expected 2-D"),
    "npz ids": ("q.npz:a", npz(a=np.ones((3, 2), np.int32), b=np.ones(1)), "q.npz:a: holds int32 values, which look"),
    "fvecs header": ("q.fvecs", b"\x03\x00", "q.fvecs: is 2 bytes long; each row begins with a 4-byte dimension"),
    "fvecs d = 0": ("q.fvecs", bytes(32), "q.fvecs: the header gives dimension 0, expected 1 to 1048576; is it really"),
    "fvecs d < 0": ("q.fvecs", b"\xff" * 32, "q.fvecs: the header gives dimension -1, expected 1 to 1048576"),
    "fvecs absurd d": ("q.fvecs", b"text" * 8, "q.fvecs: the header gives dimension 1954047348, expected 1 to 1048576"),
    "fvecs cut": (
        "q.fvecs",
        FOUR_ROWS[:-3],
        "q.fvecs: row 3 is cut short: it has 13 bytes, a row of 3 values has 16",
    ),
    "fvecs first row cut": ("q.fvecs", FOUR_ROWS[:9], "q.fvecs: row 0 is cut short: it has 9 bytes"),
    "fvecs rows differ": (
        "q.fvecs",
        FOUR_ROWS[:32] + struct.pack("<i", 5) + FOUR_ROWS[36:],
        "q.fvecs: row 2 has dimension 5, row 0 has 3; all rows must have the same dimension",
    ),
    "fvecs rows and length differ": (
        "q.fvecs",
        FOUR_ROWS[:16] + struct.pack("<i2f", 2, 1, 2) + FOUR_ROWS,
        "q.fvecs: row 1 has dimension 2, row 0 has 3",
    ),
    "bvecs cut": ("q.bvecs", struct.pack("<i4B", 4, 1, 2, 3, 4) + b"\4", "q.bvecs: row 1 is cut short: it has 1 byte"),
    "fbin header": ("q.fbin", bytes(7), "q.fbin: is 7 bytes long; the header alone (rows, dimension) has 8"),
    "fbin d = 0": ("q.fbin", struct.pack("<II", 4, 0), "q.fbin: the header gives dimension 0, expected 1 to 1048576"),
    "fbin absurd d": ("q.fbin", b"text" * 9, "q.fbin: the header gives dimension 1954047348, expected 1 to 1048576"),
    "fbin cut": (
        "q.fbin",
        struct.pack("<II", 4, 3) + bytes(47),
        "q.fbin: the file is cut short: the header announces 4 rows of 3 float32 values (48 bytes), found 47 bytes",
    ),
    "fbin tail": ("q.fbin", struct.pack("<II", 4, 3) + bytes(49), "(48 bytes), but 49 bytes follow it: 1 too many"),
    "fbin of bytes": ("q.fbin", struct.pack("<II", 4, 3) + bytes(12), "found 12 bytes; the size would fit .u8bin"),
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


def test_paths_with_escape_sequences_are_escaped(tmp_path):
    text = refusal(tmp_path, "search", "--query", "q\x1b[2J.npy", "-k", 1, "--output", "o.npz")
    assert text == "q\\x1b[2J.npy: no such file"
    np.save(tmp_path / "q.npy", np.eye(3, dtype=np.float32))
    done = run(tmp_path, "search", "--query", "q.npy", "-k", 1, "--output", "\x1b]0;.npz")
    assert (done.returncode, done.stdout) == (0, "wrote \\x1b]0;.npz: 3 queries, 1 neighbours each\n")


def test_pickles_are_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    matrix = np.empty((1, 1), dtype=object)
    matrix[0, 0] = Payload()
    (tmp_path / "a.npy").write_bytes(npy(matrix))
    (tmp_path / "b.npz").write_bytes(npz(a=matrix))
    for name in ("a.npy", "b.npz"):
        assert "never loaded" in refusal(tmp_path, "search", "--query", name, "-k", 1, "--output", "o.npz")
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
    shown = "NaN" if np.isnan(value) else str(value)
    assert text == f"--{side} {side}.npy must be finite, got {shown} in row 17, column 3"


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
        "-k 120 is too large: q.npy has 120 rows, and a query may return all but itself"
    )
    assert refusal(tmp_path, *search, "--reference", "few.npy", "-k", 1, "--exclude-self") == (
        "--exclude-self: the queries must be the first rows of the reference, "
        "but --query q.npy has 120 rows and --reference few.npy has 50"
    )


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
        "o.txt: unknown suffix '.txt' for --output; expected one of .npz, .ivecs, .ibin"
    )
    assert refused("--output", "o.npz", "--distances", "d.npy") == (
        "d.npy: unknown suffix '.npy' for --distances; expected one of .fbin, .fvecs"
    )
    assert refused("--output", "no/such/o.npz") == f"no/such/o.npz: the folder {tmp_path}/no/such does not exist"
    assert refused("--output", "folder.npz") == "folder.npz: is a folder, not a file"
    # Not even root can create a file there.
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
    assert done.stderr == "exactknn: error: o.ibin: File too large\n"
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
