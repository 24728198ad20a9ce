"""Searches in blocks: the same bytes as of the whole, within a bound of memory, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import exactknn
from exactknn import _core
from tests.python.stream.stream_helpers import assert_same, blocks_of, mapped, own_threads, rows

METRICS = ("sqeuclidean", "euclidean", "cosine", "inner_product", "cityblock", "chebyshev", "minkowski")


@pytest.fixture
def slow_level():
    """The level at which a search of few rows is a long one, on every machine."""
    exactknn.set_simd_level("scalar")
    yield
    exactknn.set_simd_level(None)


def hard_values(random: np.random.Generator, shape: tuple[int, int], kind: str, dtype: str) -> np.ndarray:
    if kind == "ties":
        return random.integers(-1, 2, shape).astype(dtype)
    values = random.standard_normal(shape)
    if kind == "extreme":  # sums that overflow and underflow the type of the distances
        largest = {"f2": 4, "f4": 37, "f8": 153}[dtype]
        values *= 10.0 ** random.integers(-largest, largest + 1, (shape[0], 1))
    if kind == "offset":
        values = 100 + values / 100
    return values.astype(dtype)


@given(data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_of_any_size_give_the_bytes_of_the_whole(data):
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dtypes = st.sampled_from(("f2", "f4", "f8"))
    kinds = st.sampled_from(("plain", "ties", "extreme", "offset"))
    n, m, d = (data.draw(st.integers(1, most)) for most in (60, 400, 20))
    exclude_self = data.draw(st.booleans())
    n = min(n, m) if exclude_self else n
    k = data.draw(st.one_of(st.integers(0, min(m - exclude_self, 12)), st.just(m - exclude_self)))
    metric = data.draw(st.sampled_from(METRICS))
    options = {"metric": metric, "exclude_self": exclude_self}
    options |= {"p": data.draw(st.sampled_from((0.5, 1.0, 3.0, np.inf)))} if metric == "minkowski" else {}
    reference = hard_values(random, (m, d), data.draw(kinds), data.draw(dtypes))
    query = reference[:n] if exclude_self else hard_values(random, (n, d), data.draw(kinds), data.draw(dtypes))
    whole = exactknn.knn(query, reference, k, **options)

    sizes = data.draw(st.lists(st.integers(0, m), max_size=6))
    assert_same(exactknn.knn(query, blocks_of(reference, sizes), k, **options), whole)
    assert_same(exactknn.knn(query, list(blocks_of(reference, sizes)), k, **options), whole)
    result = whole[0].nbytes + whole[1].nbytes
    for most in (result + 50_000, result + data.draw(st.integers(3_000, 20_000))):
        try:
            found = exactknn.knn(query, reference, k, max_memory=most, **options)
        except ValueError as error:
            least = int(str(error).split()[5])
            assert most < least
            found = exactknn.knn(query, reference, k, max_memory=least, **options)
        assert_same(found, whole)


def test_no_queries_take_no_memory():
    x = np.ones((300, 1), np.float32)
    with pytest.raises(ValueError, match=r"max_memory must be at least \d+ bytes") as refused:
        exactknn.knn(x[:0], x, 100, max_memory=1)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    distances, indices = exactknn.knn(x[:0], x, 100, max_memory=least)
    assert distances.shape == indices.shape == (0, 100)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("bound", [26_000, 40_000, 10**9])
def test_a_search_among_themselves_goes_through_the_queries_in_blocks(tmp_path, metric, bound):
    x = rows(300, 16)
    x[200:] = x[:100]
    np.save(tmp_path / "x.npy", x)
    whole = exactknn.knn(x, k=4, metric=metric)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert_same(exactknn.knn(mapped, k=4, metric=metric, max_memory=bound), whole)
    assert_same(
        exactknn.knn(mapped[:200], mapped, 4, metric=metric, exclude_self=True, max_memory=bound),
        exactknn.knn(x[:200], x, 4, metric=metric, exclude_self=True),
    )


@pytest.mark.parametrize("bound", [3_000, 4_000, 10_000])
def test_the_query_itself_is_left_out_of_each_block_of_queries(bound):
    x = np.zeros((40, 3), np.float32)  # all are equal: of k + 1 neighbours the query itself is often none
    assert_same(exactknn.knn(x, k=2, max_memory=bound), exactknn.knn(x, k=2))
    assert_same(
        exactknn.knn(-x, k=2, metric="inner_product", max_memory=bound), exactknn.knn(x, k=2, metric="inner_product")
    )


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", ">f8"])
def test_mapped_arrays_of_any_layout(tmp_path, mode, order, dtype):
    x = np.asarray(rows(300, 16), dtype, order=order)
    whole = exactknn.knn(x[:7], x, 5)
    array = mapped(tmp_path, x, mode)
    assert_same(exactknn.knn(x[:7], array, 5, max_memory="1MB"), whole)
    assert_same(exactknn.knn(x[:7], np.asarray(array)[10:], 5, max_memory="1MB"), exactknn.knn(x[:7], x[10:], 5))
    assert_same(
        exactknn.knn(x[:7, ::3], array[::2, ::3], 5, max_memory="1MB"), exactknn.knn(x[:7, ::3], x[::2, ::3], 5)
    )
    np.testing.assert_array_equal(array, x)


@pytest.mark.parametrize("copied", [np.memmap.copy, lambda x: x.astype(np.float64), lambda x: x.copy().T[1:].T])
def test_copies_of_a_mapped_array_which_have_its_class_but_no_map(tmp_path, copied):
    array = copied(mapped(tmp_path, rows(300, 16)))
    assert_same(exactknn.knn(array[:7], array, 5, max_memory="1MB"), exactknn.knn(array[:7], array, 5))
    assert_same(exactknn.knn(array, k=5, max_memory=60_000), exactknn.knn(array, k=5))


def test_what_was_written_to_a_copy_on_write_map_is_searched_and_kept(tmp_path):
    array = mapped(tmp_path, rows(300, 16), "c")
    array[123] = 9
    assert exactknn.knn(np.full((1, 16), 9, np.float32), array, 1, max_memory="1MB")[1].tolist() == [[123]]
    assert (array[123] == 9).all()


def test_what_was_written_to_a_shared_map_is_searched(tmp_path):
    array = mapped(tmp_path, rows(300, 16), "r+")
    array[123] = 9
    assert exactknn.knn(np.full((1, 16), 9, np.float32), array, 1, max_memory="1MB")[1].tolist() == [[123]]
    assert (array[123] == 9).all()


@pytest.mark.parametrize(
    "view", [lambda x: x[::2], lambda x: x[:, ::-1], lambda x: np.asfortranarray(x), lambda x: x.astype(">f4")]
)
def test_arrays_in_memory_that_have_to_be_copied(view):
    x = view(rows(300, 16))
    assert_same(exactknn.knn(x[:9], x, 5, max_memory="1MB"), exactknn.knn(x[:9], x, 5))
    assert_same(exactknn.knn(x, k=5, max_memory=60_000), exactknn.knn(x, k=5))


def test_tensors_and_bfloat16():
    x = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        y = x.to(dtype)
        whole = exactknn.knn(y[:20], y, 6)
        assert_same(exactknn.knn(y[:20], y, 6, max_memory="1MB"), whole)
        assert_same(exactknn.knn(y[:20], y.split(33), 6), whole)
        assert_same(exactknn.knn(y[:20], (part for part in y.split(33)), 6, max_memory="1MB"), whole)
        assert_same(exactknn.knn(x[:20], iter(y.split(70)), 6), exactknn.knn(x[:20], y, 6))


def test_a_dataloader_gives_blocks():
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(x, batch_size=16)
    assert_same(exactknn.knn(x[:5], loader, 3), exactknn.knn(x[:5], x, 3))


def test_subnormal_numbers_survive_the_widening():
    x = np.full((50, 3), 1e-45, np.float32)
    torch.set_flush_denormal(True)
    try:
        found = exactknn.knn(np.zeros((2, 3)), iter([x]), 2, metric="cityblock")
        of_array = exactknn.knn(np.zeros((2, 3)), x, 2, metric="cityblock", max_memory="1MB")
    finally:
        torch.set_flush_denormal(False)
    assert_same(found, of_array)
    assert found[0][0, 0] == 3 * np.float64(np.float32(1e-45))


@pytest.mark.parametrize("most", [20_000, "1MB"])
def test_progress_is_of_the_whole(tmp_path, most):
    array, told = mapped(tmp_path, rows(400, 16)), []
    exactknn.knn(array, k=3, max_memory=most, progress=told.append)
    assert told == sorted(told) and told[-1] == 1.0
    assert len({fraction for fraction in told if 0 < fraction < 1}) >= 6


def test_progress_of_an_iterable_is_known_for_a_list_only(slow_level, monkeypatch):
    monkeypatch.setattr("exactknn._stream.plan.BLOCK_BYTES", 1 << 19)
    x, told, threads = rows(3000, 96), [], set()

    def tell(fraction):
        told.append(fraction)
        threads.add(threading.current_thread())

    exactknn.knn(x, [x[:90], x[90:]], 3, num_threads=1, progress=tell)
    assert told == sorted(told) and told[-1] == 1.0
    # After each of three blocks; how often in between is up to the machine.
    assert len({fraction for fraction in told if 0 < fraction < 1}) >= 2
    told.clear()
    exactknn.knn(x, iter([x[:90], x[90:]]), 3, num_threads=1, progress=tell)
    assert set(told[:-1]) == {0.0} and told[-1] == 1.0
    assert threads == {threading.main_thread()}


def test_what_progress_raises_stops_the_search_behind_an_iterable(slow_level, monkeypatch):
    monkeypatch.setattr("exactknn._stream.plan.BLOCK_BYTES", 1 << 23)
    x = rows(8000, 96)

    def stop(fraction):
        raise LookupError(fraction)

    with pytest.raises(LookupError, match=r"0\.0"):
        exactknn.knn(x, iter([x]), 3, num_threads=1, progress=stop)
    assert not own_threads()


def test_the_next_block_is_made_while_the_one_before_is_searched(monkeypatch):
    begun, made, real = threading.Event(), threading.Event(), _core.BlockSearch

    class Search:
        def __init__(self, *arguments, **options):
            self.real = real(*arguments, **options)

        def __getattr__(self, name):
            return getattr(self.real, name)

        def add(self, reference, *, progress=None):
            if self.rows == 0:
                begun.set()
                assert made.wait(20)
            self.real.add(reference, progress=progress)

    def blocks():
        yield x[:187]  # 3000 bytes of 4 columns
        yield x[187:190]
        assert begun.wait(20)
        made.set()
        yield x[190:]

    monkeypatch.setattr(_core, "BlockSearch", Search)
    x = rows(200, 4)
    assert_same(exactknn.knn(x, blocks(), 3), exactknn.knn(x, x, 3))


def test_what_progress_raises_stops_reader_and_search(tmp_path):
    array = mapped(tmp_path, rows(400, 16))

    def stop(fraction):
        if fraction > 0.3:
            raise LookupError(fraction)

    with pytest.raises(LookupError):
        exactknn.knn(rows(3, 16), array, 3, max_memory="1MB", progress=stop)
    assert not own_threads()


INTERRUPTED = """
import sys, threading
import numpy as np
import exactknn
from exactknn._stream import plan
plan.BLOCK_BYTES = 1 << 18
exactknn.set_simd_level("scalar")
x = np.random.default_rng(0).standard_normal((40_000, 64)).astype("f4")
np.save(sys.argv[1], x)
mapped = np.load(sys.argv[1], mmap_mode="r")
ended = []
def forever():
    try:
        while True:
            yield mapped[:999]
    finally:
        ended.append(True)
def tell(fraction):
    print("running", flush=True)
try:
    reference = mapped if sys.argv[2] == "map" else forever()
    exactknn.knn(x[:4000], reference, 5, num_threads=1, max_memory="1GB", progress=tell)
except KeyboardInterrupt:
    print("stopped", threading.active_count(), ended)
"""


@pytest.mark.parametrize(("kind", "ended"), [("map", "[]"), ("generator", "[True]")])
def test_ctrl_c_ends_reader_and_search(tmp_path, kind, ended):
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", INTERRUPTED, tmp_path / "x.npy", kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    printed, complaint = process.communicate(timeout=50)
    assert (process.returncode, complaint) == (0, "")
    assert printed.splitlines()[-1] == f"stopped 1 {ended}"


PEAK = """
import re, sys
import numpy as np
import exactknn
mapped = np.load(sys.argv[1], mmap_mode="r")
queries = np.load(sys.argv[2])
exactknn.knn(queries, np.tile(queries, (9, 1)), k=3)
def peak():  # ru_maxrss would begin with that of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
before = peak()
distances, indices = exactknn.knn(queries, mapped, k=10, max_memory="150MB")
nearest = indices[:, 0] == 9000 * np.arange(len(queries))
print(len(queries), nearest.all(), (distances[:, 0] == 0).all(), peak() - before)
"""


def test_peak_memory_stays_within_the_bound(tmp_path, run_python):
    file = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (600_000, 128))
    for start in range(0, len(file), 50_000):
        file[start : start + 50_000] = np.random.default_rng(start).standard_normal((50_000, 128), np.float32)
    file.flush()
    assert os.path.getsize(tmp_path / "x.npy") > 300_000_000
    np.save(tmp_path / "q.npy", file[::9000])
    del file
    program = f"import sys; sys.argv = ['', {str(tmp_path / 'x.npy')!r}, {str(tmp_path / 'q.npy')!r}]\n" + PEAK
    queries, nearest, zero, grown = run_python(program).split()
    assert (queries, nearest, zero) == ("67", "True", "True")
    assert 0 <= int(grown) < 150_000_000
