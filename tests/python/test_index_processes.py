"""``exactknn.Index`` among threads, forks and interrupts, and what it tells of its progress."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import exactknn
from exactknn import Index

# Rows of a segment before the core packs it.
SEALED = 8192


def rows(n, d, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(dtype)


def test_progress_is_told():
    told = []
    index = Index()
    index.add(rows(20_000, 32), progress=told.append)
    index.search(rows(500, 32, seed=1), 5, progress=told.append)
    assert told.count(1.0) >= 2
    assert all(0 <= fraction <= 1 for fraction in told)


def test_what_progress_raises_stops_the_call_and_adds_no_row():
    class Stop(Exception):
        pass

    def stop(fraction):
        raise Stop

    index = Index()
    with pytest.raises(Stop):
        index.add(rows(60_000, 128), progress=stop)
    assert index.dim is None or len(index) in (0, 60_000)


def test_threads_search_while_others_change_the_index():
    steps = [rows(n, 3, seed) for seed, n in enumerate((500, SEALED + 10, 300, SEALED, 40))]
    query = rows(20, 3, seed=99)
    states, held = [], steps[0]
    for step in steps[1:]:
        states.append(held)
        held = np.concatenate([held, step])
    states.append(held)
    mask = np.arange(len(held)) % 3 == 0
    states.append(held[~mask])
    answers = {}
    for state in states:
        distances, indices = exactknn.knn(query, state, 6)
        answers[distances.tobytes(), indices.tobytes()] = len(state)
    index = Index()
    index.add(steps[0])
    started, done, wrong, seen = threading.Barrier(9), threading.Event(), [], set()

    def search():
        started.wait()
        last = False
        while not last:
            last = done.is_set()
            distances, indices = index.search(query, 6, num_threads=1)
            size = answers.get((distances.tobytes(), indices.tobytes()))
            if size is None:
                wrong.append((distances, indices))
                return
            seen.add(size)
            if len(index.search(query[:1], None)[0][0]) not in answers.values():
                wrong.append("a number of rows that never was")
                return

    searching = [threading.Thread(target=search) for _ in range(8)]
    for thread in searching:
        thread.start()
    started.wait()
    for step in steps[1:]:
        index.add(step)
    index.remove(mask)
    done.set()
    for thread in searching:
        thread.join()
    assert wrong == []
    assert len(states[-1]) in seen


def test_threads_that_add_the_first_rows():
    for _ in range(20):
        index = Index()
        barrier = threading.Barrier(4)

        def work(seed, index=index, barrier=barrier):
            barrier.wait()
            index.add(rows(25, 3, seed))

        adding = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in adding:
            thread.start()
        for thread in adding:
            thread.join()
        held = index.rows()
        blocks = {held[start : start + 25].tobytes() for start in range(0, 100, 25)}
        assert blocks == {rows(25, 3, seed).tobytes() for seed in range(4)}


def test_a_forked_child_searches_and_changes_its_copy(run_python):
    program = """
import os
import numpy as np
import exactknn

x = np.random.default_rng(0).standard_normal((12_000, 24)).astype(np.float32)
index = exactknn.Index()
index.add(x)
index.add(x[:50])
wanted = index.search(x[:2000], k=10, num_threads=2)

def agrees():
    found = index.search(x[:2000], k=10, num_threads=2)
    return all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted))

child = os.fork()
if child == 0:
    good = agrees()
    index.remove(np.arange(len(index)) >= 9000)
    index.add(x[9000:])
    index.add(x[:50])
    os._exit(0 if good and agrees() else 3)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), agrees())
"""
    assert run_python(program) == "0 True"


def test_a_child_forked_while_threads_change_an_index_uses_its_copy(run_python):
    program = """
import os, threading
import numpy as np
import exactknn

x = np.random.default_rng(0).standard_normal((9000, 16)).astype(np.float32)
index = exactknn.Index()
index.add(x[:100])
wanted = index.search(x[:50], k=3)
ended = threading.Event()

def change():
    while not ended.is_set():
        index.add(x[100:8600], num_threads=1)
        index.remove(np.arange(len(index)) >= 100)

changing = threading.Thread(target=change)
changing.start()
statuses = []
for _ in range(25):
    child = os.fork()
    if child == 0:
        index.remove(np.arange(len(index)) >= 100)
        index.add(x[100:200])
        index.remove(np.arange(200) >= 100)
        found = index.search(x[:50], k=3)
        os._exit(all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted)))
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
ended.set()
changing.join()
print(set(statuses))
"""
    assert run_python(program) == "{1}"


INTERRUPT = """
import signal
import numpy as np
import exactknn

x = np.random.default_rng(0).standard_normal((120_000, 128)).astype(np.float32)
index = exactknn.Index()
told = []

def progress(fraction):
    if not told:
        told.append(fraction)
        print("working", flush=True)

def waiting(fraction):
    progress(fraction)
    signal.pause()

index.add(x)
try:
    {call}
    print("finished")
except KeyboardInterrupt:
    print("interrupted")
print(len(index), index.search(x[:2], 1)[1].tolist())
"""


def interrupted(call):
    """What a program prints that is sent Ctrl-C as soon as ``call`` works."""
    program = INTERRUPT.format(call=call)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "working\n"
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=50)
        finally:
            process.kill()
    assert process.returncode == 0
    return printed.splitlines()


def test_ctrl_c_ends_a_search():
    printed = interrupted("index.search(x, 100, exclude_self=True, progress=progress)")
    assert printed == ["interrupted", "120000 [[0], [1]]"]


def test_ctrl_c_while_rows_are_added_adds_all_or_none():
    # A quick machine tells of its progress only when all is done.
    how, state = interrupted("index.add(x, progress=waiting)")
    assert how == "interrupted"
    assert state in ("120000 [[0], [1]]", "240000 [[0], [1]]")


def test_ctrl_c_while_a_file_is_written_leaves_the_old_or_the_new(tmp_path):
    old = Index()
    old.add(rows(30, 4))
    old.save(tmp_path / "index")
    how, state = interrupted(f"index.save({os.fspath(tmp_path / 'index')!r}, progress=waiting)")
    assert (how, state) == ("interrupted", "120000 [[0], [1]]")
    assert os.listdir(tmp_path) == ["index"]
    there = Index.load(tmp_path / "index")
    assert (len(there), there.dim) in {(30, 4), (120_000, 128)}
    there.search(there.rows(0, 1), 1)


@pytest.mark.parametrize("rows", [3, 9000])
def test_an_addition_whose_last_word_of_progress_raises_adds_nothing(rows):
    index = Index()
    index.add(np.zeros((2, 4), np.float32))

    def stop(fraction):
        if fraction == 1.0:
            raise LookupError("at the end")

    with pytest.raises(LookupError, match="at the end"):
        index.add(np.ones((rows, 4), np.float32), progress=stop)
    assert len(index) == 2
    index.add(np.ones((rows, 4), np.float32))
    assert index.search(np.ones((1, 4), np.float32), 1)[1].tolist() == [[2]]
