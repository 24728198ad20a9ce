"""Saved indexes: what is left by a kill, a full disk, or a bit that flipped."""

import copy
import json
import os
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest

import exactknn
from exactknn import Index

SEALED = 8192  # rows of a segment before the core packs it
BLOCK = 1 << 20  # bytes of a file that share a checksum

pytest.importorskip("resource", reason="limits, signals and links as on Unix")


def rows(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


def made(*parts, metric="sqeuclidean", dtype=None):
    index = Index(metric, dtype)
    for part in parts:
        index.add(part)
    return index


def saved(path, *parts, **options):
    made(*parts, **options).save(path)
    return path


def assert_same(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes()


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["sqeuclidean", "cosine", "inner_product", "chebyshev", "minkowski"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_loaded_index_answers_alike(tmp_path, metric, dtype):
    p = 0.7 if metric == "minkowski" else None
    index = Index(metric, dtype, p=p)
    index.add(rows(SEALED + 1, 5))
    index.add(rows(100, 5, 1))
    index.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index", num_threads=1)
    assert repr(loaded) == repr(index)
    assert (loaded.metric, loaded.p, loaded.dtype) == (metric, p, dtype)
    query = rows(50, 5, 2)
    assert_same(loaded.search(query, 7), index.search(query, 7))
    assert_same(loaded.radius(query[:5], 1), index.radius(query[:5], 1))
    assert loaded.rows().tobytes() == index.rows().tobytes()


def test_an_index_without_rows_keeps_what_it_is(tmp_path):
    saved(tmp_path / "index", np.zeros((0, 7)), metric="cosine")
    loaded = Index.load(tmp_path / "index")
    assert repr(loaded) == "Index(metric='cosine', dtype='float64', rows=0, dim=7)"
    loaded.add(np.eye(7))
    assert len(loaded) == 7


def test_the_same_rows_give_the_same_file(tmp_path):
    for name in "ab":
        saved(tmp_path / name, rows(SEALED, 8), rows(30, 8, 1))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_loading_reads_no_rows(tmp_path):
    stored = rows(40_000, 32)
    path = saved(tmp_path / "index", stored)
    contents = path.read_bytes()
    # A byte in every block is another: reading any of them would be refused.
    for position in range(contents.index(stored[0].tobytes()) + 100, len(contents), BLOCK):
        contents = flipped(contents, position, 0)
    path.write_bytes(contents)
    loaded = Index.load(path)
    assert (len(loaded), loaded.dim) == stored.shape
    assert loaded.nbytes < 4096
    with pytest.raises(ValueError, match="index: wanted"):
        loaded.search(stored[:1], 1)


def test_a_file_replaced_while_it_is_mapped(tmp_path):
    path = saved(tmp_path / "index", rows(SEALED + 300, 6), rows(20, 6, 1))
    index = Index.load(path)
    query = rows(9, 6, 3)
    other = Index.load(path)
    for seed in (4, 5):
        index.add(rows(15, 6, seed))
        mask = np.arange(len(index)) % 11 == 3
        held = index.rows()[~mask]
        index.remove(mask)
        index.save(path)
        assert_same(index.search(query, 5), exactknn.knn(query, held, 5))
        index = Index.load(path)
        assert_same(index.search(query, 5), exactknn.knn(query, held, 5))
    before = np.concatenate([rows(SEALED + 300, 6), rows(20, 6, 1)])
    assert_same(other.search(query, 5), exactknn.knn(query, before, 5))


def test_an_index_saved_over_its_own_file_unchanged(tmp_path):
    path = saved(tmp_path / "index", rows(SEALED, 4))
    before = path.read_bytes()
    Index.load(path).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["index"]


def test_paths_of_all_kinds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    index = made(rows(3, 2))
    for path in ("plain", tmp_path / "with space é", "./relative"):
        index.save(path)
        assert len(Index.load(path)) == 3
    (tmp_path / "link").symlink_to("plain")
    made(rows(5, 2)).save("link")
    assert os.path.islink("link")
    assert len(Index.load("plain")) == 5
    for path in (3, None):
        with pytest.raises(TypeError):
            index.save(path)
        with pytest.raises(TypeError):
            Index.load(path)


def test_the_safetensors_package_reads_it(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    stored = rows(SEALED, 4)
    path = saved(tmp_path / "index", stored, rows(10, 4, 1), metric="cosine")
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata()["format"] == "exactknn-index"
        assert file.metadata()["metric"] == "cosine"
        assert file.get_tensor("0.rows").tobytes() == stored.tobytes()
        assert file.get_tensor("1.rows").tobytes() == rows(10, 4, 1).tobytes()


# --- interruptions ----------------------------------------------------------------------------------------------------


SAVE = """
import sys
import numpy as np
import exactknn

index = exactknn.Index()
index.add(np.random.default_rng(7).standard_normal((150_000, 64)).astype(np.float32))

def progress(fraction):
    print(fraction, flush=True)

for line in sys.stdin:
    index.save(line.rstrip("\\n"), progress=progress)
"""


@pytest.mark.parametrize("lines", [1, 2, 3, 5, 8])
def test_a_killed_save_leaves_the_old_file_or_the_new(tmp_path, lines):
    path = saved(tmp_path / "index", rows(100, 3))
    query = rows(4, 3, 1)
    old = made(rows(100, 3)).search(query, 5)
    with subprocess.Popen(
        [sys.executable, "-c", SAVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            # Saved again and again, it is killed in the middle of one, at the end, or between two.
            process.stdin.write(f"{path}\n" * 50)
            process.stdin.flush()
            for _ in range(lines):
                assert process.stdout.readline()
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    index = Index.load(path)
    if index.dim == 3:
        assert_same(index.search(query, 5), old)
    else:
        stored = np.random.default_rng(7).standard_normal((150_000, 64)).astype(np.float32)
        assert_same(index.search(stored[:3], 4), exactknn.knn(stored[:3], stored, 4))
    # What a kill leaves behind is of a name that says whose it was.
    for name in os.listdir(tmp_path):
        assert name == "index" or name.startswith(f".exactknn-{process.pid}-"), name


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, run_python):
    path = saved(tmp_path / "index", rows(100, 3))
    before = path.read_bytes()
    program = f"""
import resource, signal
import numpy as np
import exactknn

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
index = exactknn.Index()
index.add(np.zeros((20_000, 64), np.float32))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    index.save({str(path)!r})
except OSError as error:
    print(error.errno, error.filename)
print(len(index), exactknn.Index.load({str(path)!r}).dim)
"""
    assert run_python(program).splitlines() == [f"27 {path}", "20000 3"]
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["index"]


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no device that is always full")
def test_a_device_is_no_place_for_an_index():
    with pytest.raises(ValueError, match="/dev/full: wanted a regular file or a free name, found a device or pipe"):
        made(rows(3, 2)).save("/dev/full")


def test_a_small_file_system_that_is_full(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    try:
        path = saved(folder / "index", rows(50, 3))
        before = path.read_bytes()
        with pytest.raises(OSError, match="index") as raised:
            made(rows(20_000, 64)).save(path)
        assert (raised.value.errno, raised.value.filename) == (28, str(path))
        assert path.read_bytes() == before
        assert os.listdir(folder) == ["index"]
    finally:
        subprocess.run(["umount", folder], check=True)


def test_what_the_system_refuses_is_an_os_error_of_its_path(tmp_path):
    index = made(rows(3, 2))
    with pytest.raises(FileNotFoundError) as raised:
        index.save(tmp_path / "none" / "index")
    assert raised.value.filename == str(tmp_path / "none" / "index")
    with pytest.raises(FileNotFoundError) as raised:
        Index.load(tmp_path / "none")
    assert raised.value.filename == str(tmp_path / "none")
    for call in (index.save, Index.load):
        with pytest.raises(IsADirectoryError) as raised:
            call(tmp_path)
        assert raised.value.filename == str(tmp_path)


# --- damage -----------------------------------------------------------------------------------------------------------


def outcome(path, query, wanted):
    """Load and search a file that may be damaged: refused by its path, or the right bytes."""
    try:
        index = Index.load(path)
        found = (index.search(query, 5), index.search(query, 3, exclude_self=False))
        everything = index.rows()
    except ValueError as error:
        assert str(path) in str(error)
        return "refused"
    for got, want in zip(found, wanted[:2], strict=True):
        assert_same(got, want)
    assert everything.tobytes() == wanted[2].tobytes()
    return "right"


def answers(index, query):
    return index.search(query, 5), index.search(query, 3), index.rows()


def flipped(contents, position, bit):
    damaged = bytearray(contents)
    damaged[position] ^= 1 << bit
    return bytes(damaged)


def test_a_flipped_bit_is_found_or_harmless(tmp_path):
    path = saved(tmp_path / "index", rows(SEALED + 200, 12), rows(70, 12, 1))
    contents = path.read_bytes()
    query = rows(300, 12, 2)
    wanted = answers(Index.load(path), query)
    rng = np.random.default_rng(5)
    # Checksums cover all bytes of the tensors, and the search reads all rows.
    for position in rng.integers(0, len(contents), 20):
        path.write_bytes(flipped(contents, position, rng.integers(8)))
        outcome(path, query, wanted)
    path.write_bytes(contents)
    assert outcome(path, query, wanted) == "right"


def test_a_flipped_bit_in_any_row_is_found(tmp_path):
    path = saved(tmp_path / "index", rows(300, 12))
    contents = path.read_bytes()
    query = rows(30, 12, 2)
    wanted = answers(Index.load(path), query)
    start = contents.index(rows(1, 12).tobytes())
    for position in (start, start + 300 * 48 - 1, start + 5000):
        path.write_bytes(flipped(contents, position, 7))
        assert outcome(path, query, wanted) == "refused"


def test_damage_is_found_by_all_that_read_rows(tmp_path):
    path = saved(tmp_path / "index", rows(300, 12))
    contents = path.read_bytes()
    path.write_bytes(flipped(contents, contents.index(rows(1, 12).tobytes()), 3))
    index = Index.load(path)
    for call in (
        lambda: index.search(rows(1, 12), 1),
        lambda: index.radius(rows(1, 12), 1),
        lambda: index.rows(),
        lambda: index.remove(np.arange(300) == 299),
        lambda: index.add(rows(1, 12)),
        lambda: index.save(tmp_path / "other"),
        lambda: copy.copy(index),
    ):
        with pytest.raises(ValueError, match=f"{path}: wanted"):
            call()
    assert len(index) == 300
    assert os.listdir(tmp_path) == ["index"]


def test_a_flipped_bit_in_any_byte_of_the_header_is_found(tmp_path):
    path = saved(tmp_path / "index", rows(12, 2))
    contents = path.read_bytes()
    query = rows(3, 2, 2)
    wanted = answers(Index.load(path), query)
    rng = np.random.default_rng(6)
    header = 8 + struct.unpack("<Q", contents[:8])[0]
    for position in range(header + 64):
        path.write_bytes(flipped(contents, position, rng.integers(8)))
        assert outcome(path, query, wanted) == "refused", position


def test_a_truncated_file_is_refused(tmp_path):
    path = saved(tmp_path / "index", rows(SEALED, 4))
    contents = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 64, 300, 1000, len(contents) // 2, len(contents) - 1):
        path.write_bytes(contents[:length])
        with pytest.raises(ValueError, match="index"):
            Index.load(path)
    path.write_bytes(contents + b"\0")
    with pytest.raises(ValueError, match="something was appended"):
        Index.load(path)


def test_files_of_something_else_are_refused(tmp_path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    np.save(tmp_path / "rows.npy", rows(3, 2))
    (tmp_path / "foreign").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    (tmp_path / "text").write_text("not an index\n" * 9)
    (tmp_path / "empty").touch()
    for name in ("rows.npy", "foreign", "text", "empty"):
        with pytest.raises(ValueError, match=f"{name}: wanted a saved exactknn index, found"):
            Index.load(tmp_path / name)


def test_a_newer_version_is_refused_by_its_number(tmp_path):
    path = saved(tmp_path / "index", rows(3, 2))
    contents = path.read_bytes()
    path.write_bytes(contents.replace(b'"format_version":"1"', b'"format_version":"2"'))
    with pytest.raises(
        ValueError, match="index: wanted format version 1 or older, found version 2, written by exactknn"
    ):
        Index.load(path)


def test_the_permissions_of_a_replaced_file_stay(tmp_path):
    path = tmp_path / "index"
    index = Index()
    index.add(np.ones((3, 2), np.float32))
    index.save(path)
    path.chmod(0o640)
    index.save(path)
    assert path.stat().st_mode & 0o777 == 0o640
