"""A library in a process of its own, with its own environment: the matrix kernel is chosen when a library is loaded.

    Process.open(library, workload) ──json──> python -m benches.remote: makes the rows, prepares the library
    RemoteSearch.seconds()          ──run──>  one search, timed there
    RemoteSearch()                  ──run──>  the same, and its answer through a file

Times are taken in the process that searches, so that the pipe does not count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent


class Process:
    """A Python process that searches for us; started at the first use."""

    def __init__(self, environment: Mapping[str, str], threads: int) -> None:
        self._environment = {**environment, "PYTHONPATH": str(ROOT)}
        self._threads = threads
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="exactknn-")

    def open(self, library: str, workload: str) -> RemoteSearch:
        """Prepare `library` for a workload by its name. Searches of another workload end.

        Raises:
            RuntimeError: the library cannot do this; the message says why.
        """
        told = self.ask({"library": library, "workload": workload, "threads": self._threads})
        return RemoteSearch(self, library, str(told["note"]))

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send a question and wait for its answer."""
        if self._process is None:
            command = [sys.executable, "-m", "benches.remote"]
            self._process = subprocess.Popen(
                command, env=self._environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the process has no pipes")
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait()}")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise RuntimeError(told["error"])
        return told

    def answer_file(self) -> Path:
        """Where the process writes an answer."""
        return Path(self._folder.name) / "answer.npz"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None
        self._folder.cleanup()


class RemoteSearch:
    """A search of one workload in another process."""

    def __init__(self, process: Process, library: str, note: str) -> None:
        self._process, self._library = process, library
        self.note = note

    def seconds(self) -> float:
        """How long one search takes."""
        return self._run(None)

    def __call__(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Search, and return the values and row numbers."""
        path = self._process.answer_file()
        self._run(path)
        with np.load(path) as found:
            return found["values"], found["ids"]

    def _run(self, answer: Path | None) -> float:
        question = {"run": self._library, "answer": None if answer is None else str(answer)}
        return float(self._process.ask(question)["seconds"])


def serve() -> None:
    """Answer questions from standard input until it ends."""
    from benches import competitors, workloads

    known = {w.name: w for quick in (True, False) for w in (*workloads.workloads(quick), *workloads.curve(quick))}
    searches: dict[str, competitors.Search] = {}
    opened = ""
    out, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    for line in sys.stdin:
        question = json.loads(line)
        told: dict[str, Any]
        try:
            if "library" in question:
                if question["workload"] != opened:
                    searches.clear()
                    opened = question["workload"]
                name = question["library"]
                searches[name], note = competitors.prepare(name, known[opened], question["threads"])
                told = {"note": note}
            else:
                search = searches[question["run"]]
                start = time.perf_counter()
                values, ids = search()
                told = {"seconds": time.perf_counter() - start}
                if question["answer"]:
                    np.savez(question["answer"], values=values, ids=ids)
                del values, ids
        except Exception as error:  # whatever a library raises is its answer
            told = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        out.write(json.dumps(told) + "\n")
        out.flush()


if __name__ == "__main__":
    serve()
