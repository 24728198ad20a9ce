"""Index files that another program writes while they are loaded."""

import os
import shutil

import numpy as np
import pytest

from exactknn import Index

pytest.importorskip("resource", reason="a mapped file can be written to, as on Unix")

SEALED = 8192  # rows of a segment before the core packs it


def saved(path, seed, count=SEALED + 100):
    """Save an index of a packed and a growing segment, with an old time of modification."""
    index = Index()
    numbers = np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32)
    index.add(numbers[:-50])
    index.add(numbers[-50:])
    index.save(path)
    os.utime(path, (1, 1))
    return index


QUERY = np.zeros((40, 4), np.float32)
USES = {
    "search": lambda index, folder: index.search(QUERY, 3),
    "search of one": lambda index, folder: index.search(QUERY[:1], 3),
    "radius": lambda index, folder: index.radius(QUERY, 0.5),
    "ranks": lambda index, folder: index.ranks(QUERY, [[0, 9000 % len(index)]] * len(QUERY)),
    "rows": lambda index, folder: (index.rows(1, 9),),
    "remove": lambda index, folder: index.remove(np.arange(len(index)) % 2 == 0),
    "save": lambda index, folder: index.save(folder / "copy"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("count", [SEALED + 100, 200])
def test_a_file_that_is_written_in_place_is_refused(tmp_path, use, count):
    # The same size gives wrong rows that were verified before; a smaller size ends the process.
    path = tmp_path / "index"
    saved(path, 0)
    saved(tmp_path / "other", 1, count)
    index = Index.load(path)
    index.search(QUERY, 3)
    shutil.copyfile(tmp_path / "other", path)
    wanted = rf"{path}.* \d+ bytes that were there when the index was loaded, found \d+ bytes .* written .* since"
    with pytest.raises(ValueError, match=wanted):
        USES[use](index, tmp_path)
    assert not (tmp_path / "copy").exists()
    assert len(index) == SEALED + 100


def test_a_file_that_is_replaced_leaves_the_index_as_it_was(tmp_path):
    path = tmp_path / "index"
    original = saved(path, 0)
    index = Index.load(path)
    saved(tmp_path / "other", 1, 200)
    os.replace(tmp_path / "other", path)
    np.testing.assert_array_equal(index.search(QUERY, 3)[0], original.search(QUERY, 3)[0])
    path.unlink()
    np.testing.assert_array_equal(index.rows(), original.rows())


@pytest.mark.parametrize("use", USES)
def test_an_index_that_is_not_mapped_does_not_depend_on_its_file(tmp_path, use):
    path = tmp_path / "index"
    original = saved(path, 0)
    index = Index.load(path, mmap=False)
    path.write_bytes(b"")
    found, wanted = (USES[use](loaded, tmp_path) for loaded in (index, original))
    for got, want in zip((*(found or ()), index.rows()), (*(wanted or ()), original.rows()), strict=True):
        assert got.tobytes() == want.tobytes()


def test_bytes_in_memory_count(tmp_path):
    path = tmp_path / "index"
    original = saved(path, 0)
    assert Index.load(path).nbytes == 0
    assert 4 * 4 * len(original) < Index.load(path, mmap=False).nbytes <= path.stat().st_size


def test_a_damaged_file_is_refused_without_a_map(tmp_path):
    path = tmp_path / "index"
    saved(path, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="truncated"):
        Index.load(path, mmap=False)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="checksum"):
        Index.load(path, mmap=False).rows()
    with pytest.raises(TypeError, match="mmap must be True or False, got 1"):
        Index.load(path, mmap=1)
