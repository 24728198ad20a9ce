"""`knn(..., progress=...)`: the fractions passed to a function, the output of a bar, and how both end."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

import exactknn
from exactknn import _core, _progress


def rows(count: int, dimension: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)


@pytest.fixture
def slow_level():
    """The level at which a search of few rows is a long one, on every machine."""
    exactknn.set_simd_level("scalar")
    yield
    exactknn.set_simd_level(None)


def reports_of(*fractions: float, error: BaseException | None = None):
    """A core that reports these fractions and then fails, or finds nothing."""

    def knn(*arguments, progress, **options):
        for fraction in fractions:
            if progress is not None:
                progress(fraction)
        if error is not None:
            raise error
        return np.empty((0, 0), np.float32), np.empty((0, 0), np.int64)

    return knn


def test_a_function_is_told_how_far_a_long_search_is(slow_level):
    x, told = rows(8000, 96), []
    found = exactknn.knn(x, k=5, num_threads=1, progress=told.append)
    assert told == sorted(told)
    assert told[0] >= 0 and told[-1] == 1.0
    assert len({fraction for fraction in told if 0 < fraction < 1}) >= 3
    for with_it, without in zip(found, exactknn.knn(x, k=5), strict=True):
        np.testing.assert_array_equal(with_it, without)


@pytest.mark.parametrize(("count", "k"), [(2, 1), (300, 5), (300, 299), (3000, 10), (7, 0)])
def test_a_search_of_any_length_ends_at_one(count, k):
    x, told = rows(count, 8), []
    exactknn.knn(x, k=k, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0 and all(0 <= fraction <= 1 for fraction in told)


def test_a_search_that_starts_over_does_not_go_back(monkeypatch):
    monkeypatch.setattr(_core, "knn", reports_of(0.0, 0.3, 0.1, 0.29, 0.7, 1.5, 1.0))
    told: list[float] = []
    exactknn.knn(rows(3, 2), k=1, progress=told.append)
    assert told == [0.0, 0.3, 0.3, 0.3, 0.7, 1.0, 1.0]


def test_what_the_function_raises_stops_the_search(slow_level):
    class EnoughError(Exception):
        pass

    told = []

    def stop(fraction):
        told.append(fraction)
        raise EnoughError

    with pytest.raises(EnoughError):
        exactknn.knn(rows(8000, 96), k=5, num_threads=1, progress=stop)
    assert len(told) == 1
    assert told[0] < 1  # the search was not over
    assert exactknn.knn([[0.0]], [[1.0]], k=1)[1].tolist() == [[0]]


def test_what_the_function_raises_at_the_end_is_raised_too():
    def stop(fraction):
        raise LookupError(fraction)

    with pytest.raises(LookupError, match=r"1\.0"):
        exactknn.knn([[0.0]], [[1.0]], k=1, progress=stop)


@pytest.mark.parametrize("tqdm", [True, False], ids=["tqdm", "plain"])
@pytest.mark.parametrize("progress", [True, np.True_])
def test_the_bar_ends_at_the_end(monkeypatch, capsys, tqdm, progress):
    if not tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(_core, "knn", reports_of(0.0, 0.254, 0.5, 1.0))
    exactknn.knn(rows(3, 2), k=1, progress=progress)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith("\n")
    shown = [part for part in printed.err.rstrip("\n").split("\r") if part.strip()]
    assert shown[0].startswith("exactknn:   0%")
    assert shown[-1].startswith("exactknn: 100%")
    if not tqdm:
        assert [part.split()[-1] for part in shown] == ["0%", "25%", "50%", "100%"]


@pytest.mark.parametrize("tqdm", [True, False], ids=["tqdm", "plain"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_the_bar_is_closed_when_a_search_ends_early(monkeypatch, capsys, tqdm, error):
    if not tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(_core, "knn", reports_of(0.0, 0.5, error=error()))
    with pytest.raises(error):
        exactknn.knn(rows(3, 2), k=1, progress=True)
    assert capsys.readouterr().err.endswith("\n")


def test_a_refused_search_shows_no_bar(capsys):
    with pytest.raises(ValueError, match="k must be at most"):
        exactknn.knn(rows(3, 2), k=3, progress=True)
    assert capsys.readouterr().err == ""


def test_no_bar_without_stderr(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert exactknn.knn([[0.0]], [[1.0]], k=1, progress=True)[1].tolist() == [[0]]


@pytest.mark.parametrize("progress", [None, False, np.False_])
def test_nothing_is_shown_unless_asked_for(capsys, progress):
    exactknn.knn(rows(300, 8), k=3, progress=progress)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
    with _progress.reporting(progress) as report:
        assert report is None


@pytest.mark.parametrize("progress", [1, 0.5, "bar", [print]])
def test_another_kind_of_progress_is_refused(progress):
    with pytest.raises(TypeError, match="progress must be True, False, None or a function") as caught:
        exactknn.knn([[0.0]], [[1.0]], k=1, progress=progress)
    assert repr(progress) in str(caught.value)


def test_a_function_is_called_on_the_thread_of_the_caller():
    x, threads = rows(3000, 32), set()

    def tell(_):
        threads.add(threading.get_ident())

    exactknn.knn(x, k=5, num_threads=2, progress=tell)
    exactknn.knn(x[:9], iter([x]), 5, progress=tell)
    exactknn.radius(x, r=1.0, num_threads=2, progress=tell)
    index = exactknn.Index()
    index.add(x, num_threads=2, progress=tell)
    index.search(x, 5, num_threads=2, progress=tell)
    assert threads == {threading.get_ident()}
