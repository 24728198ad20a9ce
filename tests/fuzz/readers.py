"""The command line with files of which some bytes are changed: one line of error, or the rows that NumPy reads.

Covers every kind of vector and label file, and the file of `--resume`.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import struct
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import numpy as np

from exactknn._io.errors import FileError
from exactknn._io.labels import read_labels
from exactknn._io.vectors import open_vectors
from exactknn._stream import checkpoint
from exactknn._stream.plan import Plan
from exactknn._stream.search import State
from exactknn.cli import main, search

TARGET = "readers"
VECTORS = (".npy", ".npz", ".fvecs", ".bvecs", ".ivecs", ".fbin", ".u8bin", ".i8bin")
LABELS = (".npy", ".npz", ".txt", ".csv")
BINARY = {".fvecs": "<f4", ".bvecs": "u1", ".ivecs": "<i4", ".fbin": "<f4", ".u8bin": "u1", ".i8bin": "i1"}
NUMBERS = (b"0", b"1", b"-1", b"9", b"18446744073709551615", b"9223372036854775808", b"4294967297")
WORDS = (b"<f4", b">f8", b"<f2", b"|O", b"<i8", b"|V4", b"<U3", b"True", b"False", b"(", b")", b",", b"'", b"\n", b"\0")


def write_vectors(path: Path, rows: np.ndarray, random: random.Random) -> None:
    suffix = path.suffix
    if suffix == ".npy":
        with path.open("wb") as stream:
            version = random.choice([(1, 0), (2, 0)])
            np.lib.format.write_array(stream, np.asarray(rows, order=random.choice("CF")), version)
    elif suffix == ".npz":
        (np.savez if random.random() < 0.5 else np.savez_compressed)(path, rows=rows)
    elif suffix.endswith("vecs"):
        head = struct.pack("<i", rows.shape[1])
        path.write_bytes(b"".join(head + row.astype(BINARY[suffix]).tobytes() for row in rows))
    else:
        path.write_bytes(struct.pack("<II", *rows.shape) + rows.astype(BINARY[suffix]).tobytes())


def write_labels(path: Path, random: random.Random) -> None:
    names = [random.choice(["a", "b", "3", 'c"d', "é", " x"]) for _ in range(random.randrange(1, 30))]
    if path.suffix == ".npy":
        np.save(path, np.array(names) if random.random() < 0.5 else np.arange(len(names)) % 3)
    elif path.suffix == ".npz":
        np.savez(path, labels=np.array(names))
    elif path.suffix == ".txt":
        path.write_text("\n".join(names) + "\n", encoding="utf-8")
    else:
        quoted = [f'"{name.replace(chr(34), chr(34) * 2)}"' for name in names]
        path.write_text("\r\n".join(quoted) + "\r\n", encoding="utf-8")


def mutate(good: bytes, random: random.Random) -> bytes:
    """Change bytes: flipped, set, removed, repeated, cut off, or another number or word in a header."""
    data = bytearray(good)
    for _ in range(random.randrange(1, 4)):
        if not data:
            break
        head = min(len(data), 130)
        at = random.randrange(head) if random.random() < 0.7 else random.randrange(len(data))
        end = min(len(data), at + random.randrange(1, 9))
        kind = random.randrange(7)
        if kind == 0:
            data[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            data[at] = random.choice([0, 1, 0x7F, 0x80, 0xFF, ord("'"), ord("{")])
        elif kind == 2:
            del data[at:end]
        elif kind == 3:
            data[at:at] = data[at:end]
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at:end] = random.choice(WORDS)
        else:
            digits = [i for i in range(head) if chr(data[i]).isdigit()]
            at = random.choice(digits) if digits else at
            data[at : at + 1] = random.choice(NUMBERS)
    return bytes(data)


def numpy_rows(path: Path) -> np.ndarray | None:
    """The rows by NumPy alone; `None` if it cannot say."""
    if path.suffix in (".npy", ".npz"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                loaded = np.load(path, allow_pickle=False)
                if path.suffix == ".npy":
                    return loaded
                with loaded:
                    return loaded[loaded.files[0]] if len(loaded.files) == 1 else None
            except Exception:
                return None
    data = path.read_bytes()
    dtype = np.dtype(BINARY[path.suffix])
    if path.suffix.endswith("bin"):
        rows, dimension = struct.unpack("<II", data[:8])
        return np.frombuffer(data, dtype, offset=8).reshape(rows, dimension)
    (dimension,) = struct.unpack("<i", data[:4])
    records = np.frombuffer(data, [("dimension", "<i4"), ("values", dtype, (dimension,))])
    assert (records["dimension"] == dimension).all()
    return records["values"]


def one_line(error: BaseException) -> None:
    text = str(error)
    assert text and "\n" not in text and len(text) < 2000, repr(text)


def check_vectors(path: Path) -> None:
    try:
        file = open_vectors(str(path), 1e6)
        found = file.load()
    except FileError as error:
        one_line(error)
        return
    wanted = numpy_rows(path)
    if wanted is not None:
        wanted = wanted.astype(file.dtype).astype(found.dtype)
        assert found.shape == wanted.shape
        assert np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(wanted).tobytes(), path.suffix


def check_labels(path: Path) -> None:
    try:
        found = read_labels(str(path))
    except FileError as error:
        one_line(error)
        return
    assert found.ndim == 1
    wanted = numpy_rows(path) if path.suffix in (".npy", ".npz") else None
    if wanted is not None:
        assert found.tolist() == wanted.tolist() or found.dtype.kind == "f"


def command(*words: object) -> tuple[int, str]:
    """The exit code and the errors of a command, run in this process."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = main([str(word) for word in words])
    return code, errors.getvalue()


def check_search(path: Path, folder: Path) -> None:
    code, errors = command("search", "--query", path, "-k", 1, "--output", folder / "out.npz", "--no-progress")
    assert code in (0, 1, 2), code
    assert code == 0 or (errors.count("\n") == 1 and errors.startswith("exactknn: error: ")), errors


def check_checkpoint(folder: Path, random: random.Random) -> int:
    """A search that is interrupted, and continued from a file with changed bytes: refused, or the same result."""
    rows = np.array([[random.randrange(-3, 4) for _ in range(3)] for _ in range(60)], np.float32)
    np.save(folder / "rows.npy", rows)
    state, out = folder / "state.npz", folder / "found.npz"
    words = ("search", "--query", folder / "rows.npy", "-k", 3, "--max-memory", "60MB", "--no-progress")
    words = (*words, "--output", out, "--resume", state)
    assert command(*words)[0] == 0
    with np.load(out) as found:
        truth = {name: found[name].tobytes() for name in found.files}

    # The state after each of several blocks, kept by a writer that is always due.
    states: list[bytes] = []
    write = checkpoint.Checkpoint.write

    def keep(self: checkpoint.Checkpoint, now: State) -> None:
        write(self, now)
        states.append(state.read_bytes())

    plan = Plan(random.choice([7, 60]), random.choice([11, 30, 60]))
    with mock.patch.object(search, "plan_blocks", lambda *_, **__: plan):
        with (
            mock.patch.object(checkpoint.Checkpoint, "write", keep),
            mock.patch.object(checkpoint.Checkpoint, "is_due", lambda _: True),
        ):
            assert command(*words)[0] == 0 and states
        return sum(check_state(choose_state(states, random), words, state, out, truth) for _ in range(20))


def choose_state(states: list[bytes], random: random.Random) -> bytes:
    """One of the states, most often with changed bytes."""
    good = random.choice(states)
    return mutate(good, random) if random.random() < 0.9 else good


def check_state(data: bytes, words: tuple[object, ...], state: Path, out: Path, truth: dict[str, bytes]) -> int:
    """Continue from this state."""
    state.write_bytes(data)
    code, errors = command(*words)
    if code == 0:
        with np.load(out) as found:
            assert {name: found[name].tobytes() for name in found.files} == truth, "another result"
    else:
        assert code in (1, 2) and errors.count("\n") == 1 and str(state) in errors, errors
    return 1


def case(seed: int) -> int:
    """Change the bytes of a file of each kind; return the number of files."""
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="exactknn-fuzz-") as name:
        folder = Path(name)
        checks = 0
        for suffix in VECTORS:
            path = folder / f"x{suffix}"
            dtype = choose.choice(["f2", "f4", "f8", ">f4", "i1", "u2"])
            rows = np.array([[choose.randrange(0, 100) for _ in range(4)] for _ in range(choose.randrange(2, 9))])
            write_vectors(path, rows.astype(dtype), choose)
            good = path.read_bytes()
            check_vectors(path)
            for _ in range(20):
                os.unlink(path)  # a mapped file is not changed in place
                path.write_bytes(mutate(good, choose))
                check_vectors(path)
                checks += 1
            check_search(path, folder)
        for suffix in LABELS:
            path = folder / f"labels{suffix}"
            write_labels(path, choose)
            good = path.read_bytes()
            check_labels(path)
            for _ in range(20):
                os.unlink(path)
                path.write_bytes(mutate(good, choose))
                check_labels(path)
                checks += 1
        return checks + check_checkpoint(folder, choose)


if __name__ == "__main__":
    from tests.fuzz.driver import fuzz

    fuzz(TARGET, case)
