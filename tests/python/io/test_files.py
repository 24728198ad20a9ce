"""Vector files read and result files written, against bytes laid out by hand."""

import io
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactknn._io.errors import FileError
from exactknn._io.npy import read_npz_array
from exactknn._io.outputs import OutputFile, check_indices_fit, write_matrix, write_neighbours
from exactknn._io.paths import same_file
from exactknn._io.vectors import VectorFile, open_vectors

VALUES = np.arange(12, dtype=np.float32).reshape(4, 3) - 5.5
BYTES = np.array([[0, 255, 7], [1, 2, 3], [128, 127, 9], [4, 5, 6]], dtype=np.uint8)


def vecs(matrix: np.ndarray, dtype: str) -> bytes:
    return b"".join(struct.pack("<i", len(row)) + row.astype(dtype).tobytes() for row in matrix)


def plain(matrix: np.ndarray, dtype: str) -> bytes:
    return struct.pack("<II", *matrix.shape) + matrix.astype(dtype).tobytes()


def opened(path: Path, name: str = "") -> VectorFile:
    return open_vectors(f"{path}{name}")


@pytest.mark.parametrize(
    ("suffix", "content", "expected"),
    [
        (".fvecs", vecs(VALUES, "<f4"), VALUES),
        (".bvecs", vecs(BYTES, "u1"), BYTES),
        (".fbin", plain(VALUES, "<f4"), VALUES),
        (".u8bin", plain(BYTES, "u1"), BYTES),
        (".i8bin", plain(BYTES.view(np.int8), "i1"), BYTES.view(np.int8)),
        (".FBIN", plain(VALUES, "<f4"), VALUES),
    ],
)
def test_benchmark_formats_are_read_value_for_value(tmp_path, suffix, content, expected):
    path = tmp_path / f"v{suffix}"
    path.write_bytes(content)
    vectors = opened(path)
    loaded = vectors.load()
    assert (vectors.rows, vectors.dimension, vectors.dtype) == (4, 3, np.float32)
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f2", ">f4", ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_of_each_floating_type_order_and_version(tmp_path, dtype, order, version):
    path = tmp_path / "v.npy"
    with path.open("wb") as stream:
        np.lib.format.write_array(stream, np.asarray(VALUES, dtype=dtype, order=order), version=version)
    vectors = opened(path)
    assert vectors.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(vectors.load(), VALUES)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
def test_npy_of_short_integers_becomes_float32_exactly(tmp_path, dtype):
    limits = np.iinfo(dtype)
    np.save(tmp_path / "v.npy", np.array([[limits.min, limits.max, 1]], dtype=dtype))
    loaded = opened(tmp_path / "v.npy").load()
    assert loaded.dtype == np.float32
    assert loaded.tolist() == [[float(limits.min), float(limits.max), 1.0]]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_arrays_are_chosen_by_name(tmp_path, save):
    path = tmp_path / "v.npz"
    save(path, first=VALUES, second=np.asfortranarray(VALUES * 2))
    np.testing.assert_array_equal(opened(path, ":first").load(), VALUES)
    np.testing.assert_array_equal(opened(path, ":second").load(), VALUES * 2)


def test_npz_with_one_array_needs_no_name(tmp_path):
    np.savez(tmp_path / "v.npz", VALUES)
    np.testing.assert_array_equal(opened(tmp_path / "v.npz").load(), VALUES)


def test_a_file_that_has_a_colon_in_its_name_is_found(tmp_path):
    path = tmp_path / "a.npz:b.npy"
    with path.open("wb") as stream:
        np.save(stream, VALUES)
    np.testing.assert_array_equal(opened(path).load(), VALUES)


@pytest.mark.parametrize(("suffix", "header"), [(".npy", 128), (".fbin", 8)])
def test_float_files_are_mapped_and_not_copied(tmp_path, suffix, header):
    path = tmp_path / f"v{suffix}"
    if suffix == ".npy":
        np.save(path, VALUES)
    else:
        path.write_bytes(plain(VALUES, "<f4"))
    loaded = opened(path).load()
    # What is written into the file afterwards shows in the array: it is the file.
    with path.open("r+b") as stream:
        stream.seek(header)
        stream.write(struct.pack("<f", 99.0))
    assert loaded[0, 0] == 99.0
    assert not loaded.flags.writeable


def test_blocks_of_rows_join_without_gaps(tmp_path, monkeypatch):
    monkeypatch.setattr("exactknn._io.vectors.BLOCK_BYTES", 30)
    monkeypatch.setattr("exactknn._io.outputs.BLOCK_BYTES", 30)
    matrix = np.arange(77, dtype=np.float32).reshape(11, 7)
    path = tmp_path / "v.fvecs"
    path.write_bytes(vecs(matrix, "<f4"))
    np.testing.assert_array_equal(opened(path).load(), matrix)
    for suffix in (".fvecs", ".fbin"):
        with (tmp_path / f"w{suffix}").open("wb") as stream:
            write_matrix(stream, suffix, matrix)
    assert (tmp_path / "w.fvecs").read_bytes() == path.read_bytes()
    assert (tmp_path / "w.fbin").read_bytes() == plain(matrix, "<f4")


def test_zero_rows_are_a_matrix_of_zero_rows(tmp_path):
    np.save(tmp_path / "v.npy", np.empty((0, 3), np.float32))
    (tmp_path / "v.fbin").write_bytes(struct.pack("<II", 0, 3))
    for name in ("v.npy", "v.fbin"):
        assert opened(tmp_path / name).load().shape == (0, 3)


def test_a_row_of_another_dimension_is_named_wherever_it_stands(tmp_path, monkeypatch):
    monkeypatch.setattr("exactknn._io.vectors.BLOCK_BYTES", 24)
    rows = [struct.pack("<i3f", 3, 1, 2, 3) for _ in range(9)]
    rows[7] = struct.pack("<i3f", 2, 1, 2, 3)
    path = tmp_path / "v.fvecs"
    path.write_bytes(b"".join(rows))
    vectors = opened(path)
    with pytest.raises(FileError, match=r"v\.fvecs: row 7 has dimension 2, row 0 has 3"):
        vectors.load()
    # The same row when the length of the file gives it away already.
    path.write_bytes(b"".join(rows)[:-2])
    with pytest.raises(FileError, match=r"v\.fvecs: row 7 has dimension 2, row 0 has 3"):
        opened(path)


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        (".ivecs", struct.pack("<iiiiii", 2, 5, 0, 2, 1, 2**31 - 1)),
        (".ibin", struct.pack("<IIiiii", 2, 2, 5, 0, 1, 2**31 - 1)),
    ],
)
def test_indices_are_written_byte_for_byte(tmp_path, suffix, expected):
    indices = np.array([[5, 0], [1, 2**31 - 1]], dtype=np.int64)
    with (tmp_path / "out").open("wb") as stream:
        write_neighbours(stream, suffix, np.zeros((2, 2), np.float32), indices)
    assert (tmp_path / "out").read_bytes() == expected


@pytest.mark.parametrize("suffix", [".ivecs", ".ibin"])
def test_an_index_beyond_int32_is_refused_and_not_wrapped(tmp_path, suffix):
    with (tmp_path / "out").open("wb") as stream, pytest.raises(ValueError, match="2147483648 does not fit the int32"):
        write_matrix(stream, suffix, np.array([[1, 2**31]], dtype=np.int64))
    assert (tmp_path / "out").read_bytes() == b""
    check_indices_fit(2**31, "out", suffix)
    with pytest.raises(FileError, match="do not fit the int32"):
        check_indices_fit(2**31 + 1, "out", suffix)
    check_indices_fit(2**31 + 1, "out", ".npz")


def test_float64_distances_are_not_narrowed(tmp_path):
    with (tmp_path / "out").open("wb") as stream, pytest.raises(ValueError, match="float64 values do not fit"):
        write_matrix(stream, ".fbin", np.ones((1, 1)))


def test_npz_results_keep_both_arrays_and_the_same_bytes(tmp_path):
    distances, indices = np.array([[0.5, 2.0]]), np.array([[3, 2**40]], dtype=np.int64)
    for name in ("a", "b"):
        with (tmp_path / name).open("wb") as stream:
            write_neighbours(stream, ".npz", distances, indices)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with np.load(tmp_path / "a") as result:
        assert result["distances"].dtype == np.float64 and result["distances"].tolist() == [[0.5, 2.0]]
        assert result["indices"].dtype == np.int64 and result["indices"].tolist() == [[3, 2**40]]


def test_an_output_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.ibin"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt), OutputFile(str(path)) as output:
        output.stream.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before"
    with OutputFile(str(path)) as output:
        output.stream.write(b"after")
        assert path.read_bytes() == b"before"
        output.finish()
        output.commit()
    assert path.read_bytes() == b"after"
    assert os.listdir(tmp_path) == ["out.ibin"]


def test_an_output_has_ordinary_permissions_and_keeps_a_symbolic_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "out.ibin").symlink_to(tmp_path / "there" / "real.ibin")
    before = os.umask(0o027)
    try:
        with OutputFile(str(tmp_path / "out.ibin")) as output:
            output.finish()
            output.commit()
    finally:
        os.umask(before)
    assert (tmp_path / "out.ibin").is_symlink()
    assert (tmp_path / "there" / "real.ibin").stat().st_mode & 0o777 == 0o640


def test_one_file_under_two_names_is_one_file(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    os.link(tmp_path / "a", tmp_path / "c")
    assert same_file(tmp_path / "a", tmp_path / "b")
    assert same_file(tmp_path / "a", tmp_path / "c")
    assert same_file(f"{tmp_path}/x/../new", tmp_path / "new")
    assert not same_file(tmp_path / "a", tmp_path / "new")


def original(kind: str, folder: Path) -> bytes:
    path = folder / f"o{kind}"
    if kind == ".npy":
        np.save(path, VALUES)
    elif kind == ".npz":
        np.savez_compressed(path, VALUES)
    elif kind == ".fvecs":
        path.write_bytes(vecs(VALUES, "<f4"))
    else:
        path.write_bytes(plain(VALUES, "<f4"))
    return path.read_bytes()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from([".npy", ".npz", ".fvecs", ".fbin"]),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 400),
    tail=st.binary(max_size=9),
)
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path, kind, changes, cut, tail):
    content = bytearray(original(kind, tmp_path))
    for position, value in changes:
        content[position % len(content)] = value
    path = tmp_path / f"damaged{kind}"
    path.write_bytes(bytes(content[: len(content) - min(cut, 400) // 8]) + tail)
    try:
        loaded = opened(path).load()
    except FileError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
    else:
        assert loaded.ndim == 2 and loaded.dtype.kind == "f"


def test_a_compressed_member_with_a_wrong_checksum_is_refused(tmp_path):
    path = tmp_path / "v.npz"
    np.savez(path, VALUES)
    content = bytearray(path.read_bytes())
    at = bytes(content).index(VALUES.tobytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(FileError, match=r"the archive cannot be read: Bad CRC-32"):
        opened(path)


def test_every_flipped_bit_at_the_end_of_an_archive_is_read_or_refused_in_one_line(tmp_path):
    path = tmp_path / "v.npz"
    np.savez(path, VALUES)
    content = path.read_bytes()
    for at in range(content.rindex(b"PK\x01\x02"), len(content)):
        for bit in range(8):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            try:
                array = read_npz_array(path, str(path), "arr_0", lambda *_: None)
            except FileError as error:
                assert str(error).startswith(str(path)) and "\n" not in str(error)
            else:
                np.testing.assert_array_equal(array, VALUES)


def test_an_array_of_format_3_in_an_archive_is_read(tmp_path):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, VALUES, version=(3, 0))
    with zipfile.ZipFile(tmp_path / "v.npz", "w") as archive:
        archive.writestr("v.npy", stream.getvalue())
    np.testing.assert_array_equal(opened(tmp_path / "v.npz").load(), VALUES)


def test_names_of_arrays_are_escaped_in_messages(tmp_path):
    with zipfile.ZipFile(tmp_path / "v.npz", "w") as archive:
        for name in ("\x1b[2J.npy", "two\nlines.npy", "caf\u00e9.npy"):
            archive.writestr(name, b"")
    with pytest.raises(FileError) as refused:
        opened(tmp_path / "v.npz")
    names = "\\x1b[2J, two\\nlines, caf\u00e9"
    assert str(refused.value) == (
        f"{tmp_path}/v.npz: holds 3 arrays ({names}); choose one, for instance {tmp_path}/v.npz:\\x1b[2J"
    )
    assert str(refused.value).isprintable()


def test_a_member_that_is_not_an_array_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "v.npz", "w") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(FileError, match=r"not a \.npy array: it begins with b'hello'"):
        opened(tmp_path / "v.npz")


def test_an_undecodable_name_in_an_archive_is_refused(tmp_path):
    path = tmp_path / "v.npz"
    np.savez(path, **{"\u00e9": VALUES})
    path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xff\xff"))
    with pytest.raises(FileError, match=r"the archive cannot be read: 'utf-8' codec can't decode"):
        opened(path)


def test_integer_vectors_are_float32_exactly(tmp_path: Path) -> None:
    path = tmp_path / "x.ivecs"
    path.write_bytes(struct.pack("<iiiiii", 2, 5, -3, 2, 2**24, -(2**24)))
    vectors = open_vectors(str(path)).load()
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [[5.0, -3.0], [2.0**24, -(2.0**24)]]
