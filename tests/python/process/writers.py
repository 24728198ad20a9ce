"""Every file that the package writes, written by forked children in which the system ends or refuses a write.

One process prepares inputs and forks a child for each attempt, so an attempt costs milliseconds. Where a child dies
is counted in bytes or given as a system call, never as a time.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import platform
import resource
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exactknn import Index, cli
from exactknn._stream.checkpoint import Checkpoint
from exactknn._stream.search import State

OLD = b"what was there before"
MODE = 0o640
"""Of the old files: one that no usual umask gives."""


class Writer(NamedTuple):
    """One way to write files: their names, and a function of the inputs' prefix that returns an exit code."""

    outputs: tuple[str, ...]
    write: Callable[[str], int]


class Outcome(NamedTuple):
    """How a child ended."""

    code: int
    """Exit code; a negative number is that of a signal."""
    printed: str
    """Its stderr."""


def command(words: str) -> Callable[[str], int]:
    """A command whose inputs are in the folder above: `../{in}q.npy`."""
    return lambda prefix: cli.main([*words.replace("@", f"../{prefix}").split(), "--no-progress"])


def save_checkpoint(prefix: str) -> int:
    rng = np.random.default_rng(8)
    state = State(0, 300, rng.random((500, 20)), rng.integers(0, 9, (500, 20)), np.empty((0, 5)), np.empty((0, 5)))
    Checkpoint("state", {"-k": 5}).write(state)
    return 0


def save_index(prefix: str) -> int:
    index = Index()
    index.add(np.random.default_rng(9).standard_normal((20_000, 16)).astype(np.float32))
    index.save("x.index")
    return 0


SEARCH = "--query @q.npy -k 20"
EVALUATE = "evaluate --embeddings @q.npy --labels @labels.npy"
WRITERS = {
    "search .npz": Writer(("o.npz",), command(f"search {SEARCH} --output o.npz")),
    "search .ivecs, .fbin": Writer(
        ("o.ivecs", "d.fbin"), command(f"search {SEARCH} --output o.ivecs --distances d.fbin")
    ),
    "search in blocks": Writer(("o.ibin",), command(f"search {SEARCH} --output o.ibin --max-memory 1GB")),
    "groundtruth .bin": Writer(("gt.bin",), command(f"groundtruth --base @q.npy {SEARCH} --output gt.bin")),
    "groundtruth .hdf5": Writer(("gt.hdf5",), command(f"groundtruth --base @q.npy {SEARCH} --output gt.hdf5")),
    "match .csv": Writer(("m.csv",), command("match --query @q.npy --threshold 0.7 --output m.csv")),
    "match .npz": Writer(("m.npz",), command("match --query @q.npy --threshold 0.7 --output m.npz")),
    "evaluate": Writer(("c.csv", "r.html"), command(f"{EVALUATE} --per-class c.csv --report r.html")),
    "checkpoint": Writer(("state",), save_checkpoint),
    "Index.save": Writer(("x.index",), save_index),
}
try:
    importlib.import_module("h5py")  # here rather than in each child
except ModuleNotFoundError:
    del WRITERS["groundtruth .hdf5"]
COMMANDS = [name for name in WRITERS if name not in ("checkpoint", "Index.save")]


def prepare() -> None:
    """Write the inputs to the current folder."""
    rows = np.random.default_rng(0).standard_normal((600, 4)).astype(np.float32)
    bad = rows.copy()
    bad[7, 1] = np.nan
    for prefix, vectors in (("", rows), ("bad-", bad)):
        np.save(f"{prefix}q.npy", vectors)
        np.save(f"{prefix}labels.npy", np.arange(600) // 2)


# --- children --------------------------------------------------------------------------------------------------------


def in_child(writer: Writer, folder: Path, before: Callable[[], object] = lambda: None, *, prefix: str = "") -> Outcome:
    """Write in a child whose current folder is this one, after `before` was called in it."""
    reader, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(end, 2)
        code = 99
        try:
            os.chdir(folder)
            before()
            code = writer.write(prefix)
        except (OSError, ValueError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = 1
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(end)
    with open(reader, encoding="utf-8") as stream:
        printed = stream.read()
    return Outcome(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed)


def limit_files(most_bytes: int, action: signal.Handlers) -> None:
    """Let the write of the byte after so many end the process (`SIG_DFL`) or fail (`SIG_IGN`)."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, action)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


CALLS = {
    ("Linux", "x86_64"): {"fsync": (74, 75), "rename": (82, 264, 316)},
    ("Linux", "aarch64"): {"fsync": (82, 83), "rename": (38, 276)},
}.get((platform.system(), platform.machine()), {})
"""Numbers of system calls that one name may stand for."""

KILL = 0x80000000


def refuse(number: int) -> int:
    """The action of a filter that lets a call fail with this error number."""
    return 0x00050000 | number


def filter_calls(call: str, action: int) -> None:
    """From now on, one system call ends the process (`KILL`), or fails (`refuse`)."""

    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction))]

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    numbers = CALLS[call]
    load, equal, answer = 0x20, 0x15, 0x06
    lines = [(load, 0, 0, 0)]
    lines += [(equal, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    lines += [(answer, 0, 0, 0x7FFF0000), (answer, 0, 0, action)]
    instructions = (Instruction * len(lines))(*(Instruction(*line) for line in lines))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, mode_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(
        seccomp, mode_filter, ctypes.byref(Program(len(lines), instructions)), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "no system calls can be filtered")


# --- folders ---------------------------------------------------------------------------------------------------------


class Folders:
    """Folders below the current one, and what a writer gives when nothing disturbs it."""

    def __init__(self) -> None:
        prepare()
        self._count = 0
        self._whole: dict[str, dict[str, bytes]] = {}

    def empty(self) -> Path:
        self._count += 1
        folder = Path(f"folder{self._count}").absolute()
        folder.mkdir()
        return folder

    def with_old(self, writer: Writer) -> Path:
        """A folder with an old file at each output."""
        folder = self.empty()
        put_old(writer, folder)
        return folder

    def whole(self, name: str) -> dict[str, bytes]:
        """The outputs of an undisturbed writer."""
        if name not in self._whole:
            folder = self.empty()
            outcome = in_child(WRITERS[name], folder)
            if outcome.code:
                raise RuntimeError(f"{name}: {outcome}")
            self._whole[name] = {output: (folder / output).read_bytes() for output in WRITERS[name].outputs}
            if sorted(os.listdir(folder)) != sorted(WRITERS[name].outputs):
                raise RuntimeError(f"{name} left {os.listdir(folder)}")
        return self._whole[name]

    def states(self, name: str, folder: Path) -> dict[str, str]:
        """What each output is: old, new, missing or torn."""
        return {output: self._state(folder / output, content) for output, content in self.whole(name).items()}

    def _state(self, path: Path, whole: bytes) -> str:
        if not path.exists():
            return "missing"
        content = path.read_bytes()
        kind = {OLD: "old", whole: "new"}.get(content, "torn")
        mode = stat.S_IMODE(path.stat().st_mode)
        return kind if mode == MODE else f"{kind}, mode {mode:o}"

    def others(self, name: str, folder: Path) -> list[str]:
        """The files that are no outputs."""
        return sorted(set(os.listdir(folder)) - set(WRITERS[name].outputs))


def kill_at_rename(count: int) -> None:
    """Let the renaming of Python code that has this number kill the process."""
    rename, calls = os.replace, itertools.count(1)

    def replace(*names: Any) -> None:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*names)

    os.replace = replace  # type: ignore[assignment]


def put_old(writer: Writer, folder: Path) -> None:
    for output in writer.outputs:
        (folder / output).write_bytes(OLD)
        (folder / output).chmod(MODE)


def places(size: int) -> Iterator[int]:
    """Numbers of bytes after which a write is stopped, in a file of this size."""
    yield from (0, size // 2, size - 1)
