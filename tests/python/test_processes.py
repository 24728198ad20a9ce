"""Threads, forks, signals and processor limits, each with real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import exactknn
from exactknn.evaluation import RustKNN


def rows(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


FORK = """
import multiprocessing, os, sys
import numpy as np
import exactknn

x = np.random.default_rng(0).standard_normal((3000, 48)).astype(np.float32)
wanted = exactknn.knn(x, k=10, num_threads=2)

def agrees(_=None):
    found = exactknn.knn(x, k=10, num_threads=2)
    return all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted))
"""


def test_a_forked_child_answers_a_batch(run_python):
    program = (
        FORK
        + """
child = os.fork()
if child == 0:
    os._exit(0 if agrees() else 3)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), agrees())
"""
    )
    assert run_python(program) == "0 True"


@pytest.mark.parametrize("queries", [1, 9])
def test_a_forked_child_answers_a_small_search(run_python, queries):
    # Small searches run on the calling thread: they must not use threads that a child does not have.
    program = (
        FORK
        + f"""
small = lambda: exactknn.knn(x[:{queries}], x[:2500], k=5)
wanted = small()
child = os.fork()
if child == 0:
    os._exit(0 if all(a.tobytes() == b.tobytes() for a, b in zip(small(), wanted)) else 3)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    )
    assert run_python(program) == "0"


def test_a_forked_child_evaluates_after_torch_has_used_its_threads(run_python):
    script = """
import os
import torch
from exactknn.evaluation import AccuracyCalculator
torch.set_num_threads(2)
rows, labels = torch.randn(40_000, 4, generator=torch.manual_seed(0)), torch.arange(40_000) % 4_000
given = rows[:4000], labels[:4000], rows, labels
calculators = [AccuracyCalculator(k=k, include=("mean_average_precision",)) for k in ("max_bin_count", 200)]
wanted = [calculator.get_accuracy(*given) for calculator in calculators]
(rows * 2).exp().sum()
child = os.fork()
if child == 0:
    found = [calculator.get_accuracy(*given) for calculator in calculators]
    os._exit(0 if found == wanted else 7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(script) == "0"


def test_a_child_forked_by_a_progress_callback_is_refused_and_goes_on(run_python):
    # The child has none of the threads that run its parent's search: it may search, but not continue that one.
    program = (
        FORK
        + """
child = None

def progress(fraction):
    global child
    if child is None:
        child = os.fork()
        assert child or agrees()

many = np.tile(x, (10, 1))
try:
    found = exactknn.knn(many, x, k=300, num_threads=2, progress=progress)
except RuntimeError as error:
    assert child == 0, error
    print(error, agrees(), flush=True)
    os._exit(7)
_, status = os.waitpid(child, 0)
assert found[1][:3000].tobytes() == exactknn.knn(x, x, k=300)[1].tobytes()
print(os.waitstatus_to_exitcode(status))
"""
    )
    message = "a forked child cannot continue a call of its parent that was running when it was forked"
    assert run_python(program).splitlines() == [f"{message} True", "7"]


def test_multiprocessing_by_fork_answers(run_python):
    program = (
        FORK
        + """
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(agrees, range(4)), agrees())
"""
    )
    assert run_python(program) == "[True, True, True, True] True"


def test_a_child_of_a_child_answers(run_python):
    program = (
        FORK
        + """
child = os.fork()
if child == 0:
    good = agrees()
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(0 if agrees() else 3)
    _, status = os.waitpid(grandchild, 0)
    os._exit(os.waitstatus_to_exitcode(status) if good else 4)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    )
    assert run_python(program) == "0"


def test_data_loader_workers_answer(run_python):
    program = """
import torch
from exactknn.evaluation import RustKNN

reference = torch.randn(3000, 32, generator=torch.manual_seed(0))
knn = RustKNN()
wanted = knn(reference[:400], 5, reference)[1]

class Neighbours(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return knn(reference[i * 100 : (i + 1) * 100], 5, reference)[1]

found = torch.cat(list(torch.utils.data.DataLoader(Neighbours(), batch_size=None, num_workers=2)))
print(found.equal(wanted))
"""
    assert run_python(program) == "True"


INTERRUPT = """
import numpy as np
from exactknn import _core

x = np.random.default_rng(0).standard_normal((120_000, 128)).astype(np.float32)
told = []

def progress(fraction):
    if not told:
        told.append(fraction)
        print("searching", flush=True)

try:
    _core.knn(x, None, 100, "sqeuclidean", exclude_self=True, progress=progress)
    print("finished")
except KeyboardInterrupt:
    print("interrupted")
print(_core.knn(x[:2], x[:3], 1, "sqeuclidean")[1].tolist())
"""


def test_ctrl_c_ends_a_long_search():
    with subprocess.Popen([sys.executable, "-c", INTERRUPT], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "searching\n"
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=50)
        finally:
            process.kill()
    assert printed.splitlines() == ["interrupted", "[[0], [1]]"]
    assert process.returncode == 0


def test_threads_searching_at_once_agree():
    reference = rows(4000, 32)
    queries = [rows(300, 32, seed) for seed in range(1, 5)]
    wanted = [exactknn.knn(query, reference, 10) for query in queries]
    found = [None] * len(queries)
    # No call returns before all have told of their progress: they run at the same time, however quick one is.
    all_inside = threading.Barrier(len(queries), timeout=30)

    def work(i):
        told = []

        def progress(fraction):
            if not told:
                told.append(fraction)
                all_inside.wait()

        found[i] = exactknn.knn(queries[i], reference, 10, progress=progress)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(queries))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(found, wanted, strict=True):
        assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


@pytest.mark.parametrize("path", ["knn", "RustKNN"])
def test_python_runs_while_a_search_does(path):
    x = rows(8000, 128)
    window = []

    def work():
        tensor = torch.from_numpy(x)
        window.append(time.perf_counter())
        if path == "knn":
            exactknn.knn(x, k=10, num_threads=1)
        else:
            RustKNN(num_threads=1)(tensor, 10, tensor, True)
        window.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    seen = []
    while thread.is_alive():
        seen.append(time.perf_counter())
        thread.join(0.001)
    start, end = window
    third = (end - start) / 3
    # Held, the lock would let this thread run only at the very beginning and after the end.
    assert any(start + third < moment < end - third for moment in seen)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no processor affinity on this system")
def test_affinity_is_respected(run_python):
    program = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import exactknn
print(exactknn.get_num_threads(), exactknn.knn([[0.0], [1.0], [3.0]], k=1)[1].tolist())
"""
    assert run_python(program) == "1 [[1], [0], [1]]"


def test_no_more_threads_than_processors_by_default():
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= exactknn.get_num_threads() <= available


def test_the_environment_sets_threads_and_level(run_python):
    program = "import exactknn; print(exactknn.get_num_threads(), exactknn.simd_level())"
    assert run_python(program, EXACTKNN_NUM_THREADS="3", EXACTKNN_SIMD="scalar") == "3 scalar"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("EXACTKNN_NUM_THREADS", "0"), ("EXACTKNN_NUM_THREADS", "many"), ("EXACTKNN_SIMD", "mmx")],
)
def test_a_bad_environment_is_refused_by_name(run_python, variable, value):
    program = """
import exactknn
try:
    exactknn.knn([[0.0], [1.0]], k=1)
except ValueError as error:
    print(error)
"""
    printed = run_python(program, **{variable: value})
    assert variable in printed
    assert value in printed


def test_a_caller_that_flushes_subnormals_gets_the_same_answer(run_python):
    program = """
import numpy as np, torch
import exactknn

single = np.array([[0.0, 1e-40], [0.0, -2e-40]], np.float32)
double = np.array([[0.0, 0.0], [0.0, float(single[0, 1])], [0.0, float(single[1, 1])]])
calls = [(single, double), (double, single), (single, single), (double * 1e-270, double * 1e-270)]

def answers():
    found = [exactknn.knn(q, r, 2, metric=metric) for q, r in calls for metric in ("sqeuclidean", "cosine")]
    return [a.tobytes() for pair in found for a in pair]

before = answers()
assert torch.set_flush_denormal(True)
print(answers() == before, exactknn.knn(single, double, 1)[1].tolist())
"""
    assert run_python(program) == "True [[1], [2]]"


def test_more_threads_than_any_plan_expects(run_python):
    program = """
import numpy as np
import exactknn

x = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
print(all((exactknn.knn(x, x, 3, num_threads=n)[1] == exactknn.knn(x, x, 3)[1]).all() for n in (30_000, 2**62)))
"""
    assert run_python(program) == "True"


def test_a_huge_number_of_threads_is_capped(run_python):
    # Thousands of threads took minutes to start, or all of the memory. A search that is not small starts them.
    program = """
import os
import numpy as np
import exactknn

most = max(256, 4 * len(os.sched_getaffinity(0)))
x = np.random.default_rng(0).standard_normal((3000, 32)).astype(np.float32)
wanted = exactknn.knn(x, k=5, num_threads=2)
for threads in (30_000, 10**6):
    found = exactknn.knn(x, k=5, num_threads=threads)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted))
    # One more is the thread of this program.
    assert len(os.listdir("/proc/self/task")) <= most + 8, len(os.listdir("/proc/self/task"))
exactknn.set_num_threads(10**6)
print(exactknn.get_num_threads() <= most, exactknn.knn(x, k=5)[1].tobytes() == wanted[1].tobytes())
"""
    assert run_python(program) == "True True"


def test_an_interrupt_in_the_first_call_is_no_panic(run_python):
    # The first use of NumPy's C API runs Python code and aborts on any exception raised there: importing the package
    # must have used it already.
    program = """
import numpy as np
import numpy.lib._version as version
import exactknn

def interrupted(*arguments):
    raise KeyboardInterrupt

version.NumpyVersion.__init__ = interrupted
x = np.eye(3, dtype=np.float32)
print(exactknn.knn(x, k=1)[1].ravel())
"""
    assert run_python(program) == "[1 0 0]"


def test_a_quota_of_the_control_group_is_respected(run_python):
    # Both versions of control groups: the file of the quota, and what gives one processor.
    choices = [("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "100000"), ("/sys/fs/cgroup", "cpu.max", "100000 100000")]
    parent, name, one = choices[0] if os.path.exists(choices[0][0]) else choices[1]
    group = Path(parent, f"exactknn-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no right to make a control group")
    try:
        if not (group / name).exists():
            pytest.skip("the control group has no quota of processors")
        (group / name).write_text(one, encoding="utf-8")
        program = f"""
import os
open({str(group / "cgroup.procs")!r}, "w").write(str(os.getpid()))
import exactknn
print(exactknn.get_num_threads(), exactknn.knn([[0.0], [1.0], [3.0]], k=1)[1].tolist())
"""
        assert run_python(program) == "1 [[1], [0], [1]]"
    finally:
        group.rmdir()
