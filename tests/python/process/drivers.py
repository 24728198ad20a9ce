"""The attempts of each test, in a process of their own; they print their outcomes as JSON."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from exactknn._stream import checkpoint, search
from tests.python.process import writers
from tests.python.process.writers import CALLS, COMMANDS, KILL, MODE, WRITERS, Folders, in_child, put_old

Rows = Iterator[dict[str, Any]]


def attempts(
    folders: Folders, name: str, action: signal.Handlers, call_action: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Places at which the writer is stopped: a description, and what its child calls first."""
    size = max(map(len, folders.whole(name).values()))
    for most_bytes in writers.places(size):
        yield f"byte {most_bytes}", lambda most=most_bytes: writers.limit_files(most, action)
    for call in CALLS:
        yield call, lambda call=call: writers.filter_calls(call, call_action)


def kills(folders: Folders) -> Rows:
    """A kill at each place, then an undisturbed write beside what was left."""
    for name, writer in WRITERS.items():
        for place, before in attempts(folders, name, signal.SIG_DFL, KILL):
            folder = folders.with_old(writer)
            outcome = in_child(writer, folder, before)
            left = folders.others(name, folder)
            row = {
                "writer": name,
                "place": place,
                "code": outcome.code,
                "states": folders.states(name, folder),
                "left": left,
                "modes": sorted({stat.S_IMODE((folder / other).stat().st_mode) for other in left}),
            }
            contents = [(folder / other).read_bytes() for other in left]
            again = in_child(writer, folder)
            yield row | {
                "again": again.code,
                "states again": folders.states(name, folder),
                "left again": folders.others(name, folder),
                "left unchanged": contents == [(folder / other).read_bytes() for other in left],
            }


def kills_between_outputs(folders: Folders) -> Rows:
    """A kill when the first of two files is in its place."""
    for name, writer in WRITERS.items():
        if len(writer.outputs) == 2:
            folder = folders.with_old(writer)
            outcome = in_child(writer, folder, lambda: writers.kill_at_rename(2))
            yield {"code": outcome.code, "states": list(folders.states(name, folder).values())}


def kills_of_resumed_searches(folders: Folders) -> Rows:
    """A kill at each writing of a state, after which the same command continues."""
    name = "search in blocks"
    whole = folders.whole(name)["o.ibin"]
    writer = WRITERS[name]._replace(
        write=writers.command(f"search {writers.SEARCH} --output o.ibin --max-memory 1GB --resume state --threads 1")
    )

    def start(count: int) -> None:
        checkpoint.SECONDS, checkpoint.SHARE = 0.0, 0
        search.FIRST_WORK, search._PIECE_SECONDS = 600 * 4 * 150, 0.0
        writers.kill_at_rename(count)

    for count in (1, 2, 3):
        folder = folders.empty()
        outcome = in_child(writer, folder, lambda count=count: start(count))
        kept = [other for other in os.listdir(folder) if not other.startswith(".exactknn-")]
        again = in_child(writer, folder)
        yield {
            "count": count,
            "code": outcome.code,
            "kept": kept,
            "again": again.code,
            "printed": again.printed,
            "whole": (folder / "o.ibin").read_bytes() == whole,
            "state": (folder / "state").exists(),
        }


def failures(folders: Folders) -> Rows:
    """An error of the system at each place."""
    for name, writer in WRITERS.items():
        for place, before in attempts(folders, name, signal.SIG_IGN, writers.refuse(errno.EIO)):
            folder, temporary = folders.with_old(writer), folders.empty()

            def start(before: Callable[[], None] = before, temporary: Path = temporary) -> None:
                tempfile.tempdir = str(temporary)
                before()

            outcome = in_child(writer, folder, start)
            yield {
                "writer": name,
                "place": place,
                "code": outcome.code,
                "printed": outcome.printed,
                "folder": str(folder),
                "states": folders.states(name, folder),
                "others": {
                    other: (folder / other).read_bytes() in folders.whole(name).values()
                    for other in folders.others(name, folder)
                },
                "temporary": os.listdir(temporary),
            }


def full_disk(folders: Folders) -> Rows:
    """A real file system without space, where this user may mount one."""
    disk = folders.empty()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=755", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        return
    try:
        for name, writer in WRITERS.items():
            folder = disk / "full"
            folder.mkdir()
            put_old(writer, folder)
            outcome = in_child(writer, folder, prefix="../")
            yield {
                "writer": name,
                "code": outcome.code,
                "printed": outcome.printed,
                "states": folders.states(name, folder),
                "others": folders.others(name, folder),
            }
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def odd_targets(folders: Folders) -> Rows:
    """Outputs that are no plain files, or may not be written. The rows are bad: reading them would be refused later."""
    for name, writer in WRITERS.items():
        for kind, place in TARGETS.items():
            if len(writer.outputs) > 1 and kind.startswith("a link to"):
                continue  # one target for both is another error
            folder, aside = folders.empty(), folders.empty()
            for output in writer.outputs:
                place(folder / output, aside)
            before = listing(folder), listing(aside)
            outcome = in_child(writer, folder, prefix="bad-")
            yield {
                "writer": name,
                "kind": kind,
                "code": outcome.code,
                "printed": outcome.printed,
                "changed": (listing(folder), listing(aside)) != before,
            }


def links(folders: Folders) -> Rows:
    """Outputs that are links to files, which exist or not."""
    for name, writer in WRITERS.items():
        for kind in ("to a file", "to nothing"):
            folder, aside = folders.empty(), folders.empty()
            if kind == "to a file":
                put_old(writer, aside)
            for output in writer.outputs:
                (folder / output).symlink_to(aside / output)
            outcome = in_child(writer, folder, lambda: os.umask(0o777 & ~MODE))
            yield {
                "writer": name,
                "kind": kind,
                "code": outcome.code,
                "links": all((folder / output).is_symlink() for output in writer.outputs),
                "states": folders.states(name, aside),
                "others": folders.others(name, folder) + folders.others(name, aside),
            }


def read_only_folders(folders: Folders) -> Rows:
    """A folder in which nothing can be created, for a user who is not the superuser."""
    for name, writer in WRITERS.items():
        folder = folders.with_old(writer)
        folder.chmod(0o555)
        for output in writer.outputs:
            (folder / output).chmod(0o666)
        outcome = in_child(writer, folder, become_nobody, prefix="" if name not in COMMANDS else "bad-")
        folder.chmod(0o755)
        for output in writer.outputs:
            (folder / output).chmod(MODE)
        yield {
            "writer": name,
            "code": outcome.code,
            "printed": outcome.printed,
            "states": folders.states(name, folder),
            "others": folders.others(name, folder),
        }


def two_writers(folders: Folders) -> Rows:
    """Two processes that replace the same files again and again, while a third reads them."""
    for name in ("search .npz", "checkpoint", "Index.save"):
        writer = WRITERS[name]
        folder = folders.with_old(writer)
        folders.whole(name)
        children = [fork_rounds(writer, folder) for _ in range(2)]
        seen: set[str] = set()
        codes = []
        while children:
            seen.update(folders.states(name, folder).values())
            child = children[0]
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                children.remove(child)
                codes.append(os.waitstatus_to_exitcode(status))
        yield {
            "writer": name,
            "codes": codes,
            "seen": sorted(seen),
            "states": folders.states(name, folder),
            "others": folders.others(name, folder),
        }


def fork_rounds(writer: writers.Writer, folder: Path) -> int:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = max(in_child(writer, folder).code for _ in range(4))
        finally:
            os._exit(code)
    return child


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def make_pipe(path: Path, aside: Path) -> None:
    os.mkfifo(path)


def link_to(target: str) -> Callable[[Path, Path], None]:
    return lambda path, aside: path.symlink_to(target)


def link_to_pipe(path: Path, aside: Path) -> None:
    if not (aside / "pipe").exists():
        os.mkfifo(aside / "pipe")
    path.symlink_to(aside / "pipe")


def make_read_only(path: Path, aside: Path) -> None:
    path.write_bytes(writers.OLD)
    path.chmod(0o444)


TARGETS: dict[str, Callable[[Path, Path], None]] = {
    "a pipe": make_pipe,
    "a link to a pipe": link_to_pipe,
    "a link to a full device": link_to("/dev/full"),
    "a link to stdout": link_to("/dev/stdout"),
    "a link to itself": lambda path, aside: path.symlink_to(path.name),
    "a link to a name too long": link_to("x" * 300),
    "a folder": lambda path, aside: path.mkdir(),
    "a read-only file": make_read_only,
}


def listing(folder: Path) -> list[tuple[str, int, bytes]]:
    """Names, types and contents of the files of a folder."""
    found = []
    for path in sorted(folder.iterdir()):
        mode = path.lstat().st_mode
        found.append((path.name, mode, path.read_bytes() if stat.S_ISREG(mode) else b""))
    return found


def main() -> None:
    """Print the rows of the driver that the first argument names."""
    driver = globals()[sys.argv[1]]
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)  # for users other than this one
        os.chdir(place)
        print(json.dumps(list(driver(Folders()))))
        os.chdir("/")


if __name__ == "__main__":
    main()
