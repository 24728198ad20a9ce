"""Where outputs of commands may be written, with which permissions, and what becomes of a result without a place."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest

from exactknn import cli
from exactknn._io.errors import FileError
from exactknn._io.outputs import OutputFile, write_neighbours

ROWS = np.random.default_rng(1).normal(size=(30, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("q.npy", ROWS)
    return tmp_path


def search(output, query="q.npy"):
    return cli.main(["search", "--query", query, "-k", "2", "--output", str(output)])


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.skipif(os.name == "nt", reason="permissions of Unix")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755, 0o200])
def test_an_existing_file_keeps_its_mode_from_the_start(mode):
    Path("o.npz").write_bytes(b"old")
    os.chmod("o.npz", mode)
    with OutputFile("o.npz") as output:
        (temporary,) = Path().glob(".exactknn-*.tmp")
        assert mode_of(temporary) == mode
        output.stream.write(b"new")
        output.finish()
        output.commit()
    assert mode_of("o.npz") == mode
    assert sorted(os.listdir()) == ["o.npz", "q.npy"]


@pytest.mark.skipif(os.name == "nt", reason="permissions of Unix")
def test_a_new_file_gets_the_usual_mode():
    previous = os.umask(0o027)
    try:
        assert search("o.npz") == 0
    finally:
        os.umask(previous)
    assert mode_of("o.npz") == 0o640


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only the superuser may give files away")
def test_an_existing_file_keeps_its_owner():
    Path("o.npz").write_bytes(b"old")
    os.chown("o.npz", 65534, 65534)
    assert search("o.npz") == 0
    status = os.stat("o.npz")
    assert (status.st_uid, status.st_gid) == (65534, 65534)


def test_names_that_no_file_can_have_are_refused_before_the_search(capsys):
    long = f"{'x' * 300}.npz"
    assert search(long) == 2
    assert capsys.readouterr().err == f"exactknn: error: {long}: cannot be written: File name too long\n"
    with pytest.raises(FileError, match=r"^'a\\x00b': not a path: embedded null"):
        OutputFile("a\0b")
    assert os.listdir() == ["q.npy"]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="a system without links to open files")
def test_a_file_that_only_its_holder_can_reach_is_refused():
    with open("o", "wb") as held:
        os.remove("o")
        with pytest.raises(FileError, match=r"^o\.npz: leads to a deleted file$"):
            os.symlink(f"/proc/self/fd/{held.fileno()}", "o.npz")
            OutputFile("o.npz")


@pytest.fixture
def vanishing(monkeypatch, folder):
    """A folder that is removed when its result has been written."""
    os.mkdir("sub")

    def write(*arguments):
        write_neighbours(*arguments)
        shutil.rmtree(folder / "sub")

    monkeypatch.setattr("exactknn.cli.search.write_neighbours", write)


def assert_neighbours(path):
    with np.load(path) as found:
        assert found["indices"].shape == (30, 2)


@pytest.mark.skipif(os.name == "nt", reason="no folder with an open file can be removed")
def test_a_result_whose_folder_has_vanished_is_written_to_the_current_folder(capsys, folder, vanishing):
    assert search("sub/o.npz") == 1
    place = folder / "o.npz"
    assert capsys.readouterr().err == (
        f"exactknn: error: sub/o.npz: No such file or directory; it was written to {place} instead\n"
    )
    assert_neighbours(place)
    assert sorted(os.listdir()) == ["o.npz", "q.npy"]


@pytest.mark.skipif(os.name == "nt", reason="no folder with an open file can be removed")
def test_no_other_file_is_replaced_by_a_result_without_a_place(capsys, folder, vanishing):
    Path("o.npz").write_bytes(b"mine")
    assert search("sub/o.npz") == 1
    (other,) = Path().glob("*-o.npz")
    assert f"; it was written to {folder / other} instead\n" in capsys.readouterr().err
    assert_neighbours(other)
    assert Path("o.npz").read_bytes() == b"mine"


@pytest.mark.skipif(os.name == "nt", reason="no folder with an open file can be removed")
def test_the_temporary_folder_is_the_last_place(capsys, monkeypatch, folder, vanishing):
    (folder / "last").mkdir()
    for place, text in ((folder / "last", f"; it was written to {folder}/last/o.npz instead"), (folder / "none", "")):
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        (folder / "sub").mkdir(exist_ok=True)
        monkeypatch.chdir(folder / "sub")
        assert search(folder / "sub" / "o.npz", query="../q.npy") == 1
        shown = f"exactknn: error: {folder}/sub/o.npz: No such file or directory{text}\n"
        assert capsys.readouterr().err == shown
    assert_neighbours(folder / "last" / "o.npz")
