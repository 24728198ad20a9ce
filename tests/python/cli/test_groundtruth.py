"""``exactknn groundtruth``, its files read as the benchmarks read them."""

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from exactknn import recall

COMMAND = [sys.executable, "-m", "exactknn"]
WITHOUT_H5PY = "import sys; sys.modules['h5py'] = None; from exactknn.cli import main; sys.exit(main())"


def run(folder: Path, *arguments: object, command: list[str] = COMMAND) -> subprocess.CompletedProcess[str]:
    words = [*command, "groundtruth", "--base", "b.fbin", "--query", "q.fbin", *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=50)


def refusal(folder: Path, *arguments: object, **options) -> str:
    before = sorted(os.listdir(folder))
    done = run(folder, *arguments, **options)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("exactknn: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert sorted(os.listdir(folder)) == before
    return done.stderr.removeprefix("exactknn: error: ").rstrip("\n")


@pytest.fixture
def vectors():
    # Whole numbers: ties, which go to the lowest row.
    return np.random.default_rng(0).integers(0, 3, (150, 5)).astype(np.float32)


@pytest.fixture
def folder(tmp_path, vectors):
    for name, rows in (("b", vectors[20:]), ("q", vectors[:20])):
        (tmp_path / f"{name}.fbin").write_bytes(struct.pack("<II", *rows.shape) + rows.tobytes())
    return tmp_path


def test_vecs_and_bins(folder, vectors, brute_force):
    distances, indices = brute_force(vectors[:20], vectors[20:], 7)
    for ids, values in (("ivecs", "fvecs"), ("ibin", "fbin")):
        done = run(folder, "-k", 7, "--output", f"gt.{ids}", "--distances", f"d.{values}")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "".join(
            f"wrote {name}: 20 queries, 7 neighbours each\n" for name in (f"gt.{ids}", f"d.{values}")
        )
    rows = np.fromfile(folder / "gt.ivecs", "<i4").reshape(20, 8)
    assert (rows[:, 0] == 7).all()
    np.testing.assert_array_equal(rows[:, 1:], indices)
    np.testing.assert_array_equal(np.fromfile(folder / "d.fvecs", "<f4").reshape(20, 8)[:, 1:], distances)
    for name, dtype, wanted in (("gt.ibin", "<i4", indices), ("d.fbin", "<f4", distances)):
        assert np.fromfile(folder / name, "<u4", 2).tolist() == [20, 7]
        np.testing.assert_array_equal(np.fromfile(folder / name, dtype, offset=8).reshape(20, 7), wanted)


@pytest.mark.parametrize("metric", ["sqeuclidean", "inner_product", "cosine", "cityblock"])
def test_bin_holds_ids_and_then_distances(folder, vectors, brute_force, metric):
    vectors += 1
    for name, rows in (("b", vectors[20:]), ("q", vectors[:20])):
        (folder / f"{name}.fbin").write_bytes(struct.pack("<II", *rows.shape) + rows.tobytes())
    options = [] if metric == "sqeuclidean" else ["--metric", metric]
    assert run(folder, "-k", 9, "--output", "gt.bin", *options).returncode == 0
    content = (folder / "gt.bin").read_bytes()
    assert len(content) == 8 + 20 * 9 * 8 and struct.unpack_from("<II", content) == (20, 9)
    distances, indices = brute_force(vectors[:20], vectors[20:], 9, metric=metric)
    found = np.frombuffer(content, "<i4", 180, 8).reshape(20, 9)
    values = np.frombuffer(content, "<f4", 180, 8 + 720).reshape(20, 9)
    np.testing.assert_allclose(values, distances, rtol=2e-7, atol=2e-7)
    assert recall(found, indices) == 1.0 if metric != "cosine" else recall(found, indices) > 0.9
    assert metric == "cosine" or (found == indices).all()


def test_bin_is_the_two_files_joined(folder):
    assert run(folder, "--output", "gt.bin", "--distances", "d.fbin").returncode == 0
    assert run(folder, "--output", "gt.ibin").returncode == 0
    joined = (folder / "gt.ibin").read_bytes() + (folder / "d.fbin").read_bytes()[8:]
    assert (folder / "gt.bin").read_bytes() == joined
    assert struct.unpack_from("<II", joined) == (20, 100)  # k is 100 unless it is given


@pytest.mark.parametrize(
    ("metric", "distance"), [(None, "euclidean"), ("euclidean", "euclidean"), ("cosine", "angular")]
)
def test_hdf5_is_a_data_set_of_ann_benchmarks(folder, vectors, brute_force, metric, distance):
    h5py = pytest.importorskip("h5py")
    np.save(folder / "q.npy", vectors[:20].astype(">f8") + 1)
    options = ["--query", "q.npy", "-k", 6, *(["--metric", metric] if metric else [])]
    assert run(folder, *options, "--output", "gt.hdf5").returncode == 0
    assert run(folder, *options, "--output", "gt.h5").returncode == 0
    assert (folder / "gt.hdf5").read_bytes() == (folder / "gt.h5").read_bytes()
    wanted, _ = brute_force(vectors[:20].astype("f8") + 1, vectors[20:], 6, metric=metric or "euclidean")
    with h5py.File(folder / "gt.hdf5") as file:
        attributes = {"type": "dense", "distance": distance, "dimension": 5, "point_type": "float"}
        assert dict(file.attrs) == attributes
        assert sorted(file) == ["distances", "neighbors", "test", "train"]
        assert (file["train"].dtype, file["test"].dtype, file["neighbors"].dtype) == ("<f4", "<f8", "<i4")
        np.testing.assert_array_equal(file["train"], vectors[20:])
        np.testing.assert_array_equal(file["test"], vectors[:20].astype("f8") + 1)
        np.testing.assert_allclose(file["distances"], wanted, rtol=1e-12, atol=1e-12)
        # Each distance is that of its row.
        row, near = np.asarray(file["test"])[:, None], np.asarray(file["train"], "f8")[file["neighbors"][:]]
        values = np.linalg.norm(row - near, axis=2)
        if distance == "angular":
            norms = np.linalg.norm(row, axis=2) * np.linalg.norm(near, axis=2)
            values = 1 - np.divide((row * near).sum(2), norms, out=np.zeros_like(norms), where=norms > 0)
        np.testing.assert_allclose(file["distances"], values, rtol=1e-12, atol=1e-12)


def test_npz_is_that_of_search(folder):
    assert run(folder, "-k", 5, "--metric", "minkowski", "--p", 3, "--output", "gt.npz", "--threads", 1).returncode == 0
    search = [*COMMAND, "search", "--reference", "b.fbin", "--query", "q.fbin", "-k", "5", "--metric", "minkowski"]
    subprocess.run(
        [*search, "--p", "3", "--output", "s.npz"], cwd=folder, check=True, timeout=50, stdout=subprocess.PIPE
    )
    assert (folder / "gt.npz").read_bytes() == (folder / "s.npz").read_bytes()


def test_base_is_also_reference(folder):
    assert run(folder, "--reference", "q.fbin", "-k", 1, "--output", "gt.ivecs").returncode == 0
    np.testing.assert_array_equal(np.fromfile(folder / "gt.ivecs", "<i4").reshape(20, 2)[:, 0], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--output", "gt.txt"],
            "unknown suffix '.txt' for --output; expected one of .ivecs, .ibin, .bin, .hdf5, .h5, .npz",
        ),
        (["--output", "gt.bin", "--distances", "d.npz"], "unknown suffix '.npz' for --distances"),
        (["--output", "gt.bin", "-k", "131"], "-k 131 is too large: b.fbin has 130 rows"),
        (["--output", "gt.bin", "-k", "0"], "-k: expected a whole number of at least 1, got '0'"),
        (["--output", "gt.bin", "--p", "3"], "--p is for --metric minkowski only, got --metric sqeuclidean"),
        (
            ["--output", "gt.hdf5", "--metric", "sqeuclidean"],
            ".hdf5 files hold euclidean or cosine ('angular') distances",
        ),
        (["--output", "gt.bin", "--query", "wide.npy"], "gt.bin: float64 vectors have float64 distances, which .bin"),
        (["--output", "gt.ibin", "--distances", "gt.fbin", "--query", "wide.npy"], "gt.fbin: float64 vectors have"),
        (["--output", "d.fbin", "--base", "d.fbin"], "unknown suffix '.fbin' for --output"),
        (["--output", "none/gt.bin"], "/none does not exist"),
        (
            ["--output", "gt.npz", "--query", "narrow.npy"],
            "--query narrow.npy has dimension 3, --base b.fbin has 5",
        ),
        (["--output", "gt.npz", "--distances", "b.fbin"], "--distances b.fbin would replace the input b.fbin"),
        ([], "the following arguments are required: --output"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_written_is_refused_before_the_search(folder, vectors, options, message):
    np.save(folder / "wide.npy", vectors.astype(np.float64))
    np.save(folder / "narrow.npy", vectors[:, :3])
    if "gt.hdf5" in options:
        pytest.importorskip("h5py")
    assert message in refusal(folder, *options)


def test_without_h5py_the_error_names_the_extra(folder):
    message = refusal(folder, "--output", "gt.hdf5", command=[sys.executable, "-c", WITHOUT_H5PY])
    assert message == "--output gt.hdf5 needs h5py, which is not installed: pip install 'exactknn[hdf5]'"
    assert run(folder, "--output", "gt.bin", command=[sys.executable, "-c", WITHOUT_H5PY]).returncode == 0


@pytest.mark.parametrize("more", [(), ("--max-memory", "1GB")])
def test_a_row_that_is_not_finite_is_named_with_its_file(folder, vectors, more):
    vectors[51, 2] = np.inf
    (folder / "b.fbin").write_bytes(struct.pack("<II", 130, 5) + vectors[20:].tobytes())
    text = refusal(folder, "-k", 3, "--output", "gt.bin", *more)
    assert text == "--base b.fbin must be finite, got inf in row 31, column 2"


@pytest.mark.parametrize("output", ["gt.bin", "gt.hdf5"])
def test_a_full_disk_leaves_what_was_there(folder, output):
    if output == "gt.hdf5":
        pytest.importorskip("h5py")
    (folder / output).write_bytes(b"before")
    limited = (
        "import resource, sys; from exactknn.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); sys.exit(main())"
    )
    done = run(folder, "--output", output, command=[sys.executable, "-c", limited])
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"exactknn: error: {output}: File too large\n")
    assert (folder / output).read_bytes() == b"before"
    assert sorted(os.listdir(folder)) == ["b.fbin", output, "q.fbin"]


def test_an_interrupt_leaves_the_old_file(tmp_path):
    rows = np.random.default_rng(0).standard_normal((40_000, 64)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    (tmp_path / "gt.bin").write_bytes(b"old")
    words = [*COMMAND, "groundtruth", "--base", "rows.npy", "--query", "rows.npy", "-k", "1000", "--output", "gt.bin"]
    with subprocess.Popen(
        [*words, "--progress"], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stderr.read(1)  # the search has begun to report
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=50)
    assert process.returncode == 130
    assert sorted(os.listdir(tmp_path)) == ["gt.bin", "rows.npy"] and (tmp_path / "gt.bin").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["gt.ivecs", "gt.bin", "gt.npz", "gt.hdf5"])
def test_a_base_in_blocks_gives_the_same_file(folder, name):
    if name.endswith("hdf5"):
        pytest.importorskip("h5py")
    run(folder, "-k", 9, "--output", name)
    whole = (folder / name).read_bytes()
    done = run(folder, "-k", 9, "--output", name, "--max-memory", "100MB", "--resume", "state")
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / name).read_bytes() == whole
    assert not (folder / "state").exists()
    assert "--max-memory must be at least" in refusal(folder, "-k", 9, "--output", name, "--max-memory", "1MB")
