"""Threads that read ahead: those that do not start, that fail, and those of a forked parent."""

import _thread
import os

import numpy as np
import pytest

import exactknn
from exactknn._stream import thread
from exactknn._stream.thread import Call

REFERENCE = np.random.default_rng(0).standard_normal((9000, 24))
QUERY = REFERENCE[:50]


@pytest.fixture(params=["blocks", "max_memory"])
def search(request):
    """A search whose references are read, or searched, by another thread."""

    def from_blocks(progress=None):
        blocks = (REFERENCE[start : start + 1000] for start in range(0, 9000, 1000))
        return exactknn.knn(QUERY, blocks, k=5, max_memory="1MB", progress=progress)

    def from_copies(progress=None):
        # Not zero-copy: columns of another order.
        return exactknn.knn(QUERY, np.asfortranarray(REFERENCE), k=5, max_memory="1MB", progress=progress)

    return from_blocks if request.param == "blocks" else from_copies


def test_a_thread_that_cannot_start_is_a_memory_error(search, monkeypatch):
    wanted = exactknn.knn(QUERY, REFERENCE, k=5)

    def refuses(function, arguments):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuses)
        with pytest.raises(MemoryError, match="could not start a thread for a block of rows: can't start new thread"):
            search()
    found = search()
    assert found[0].tobytes() == wanted[0].tobytes()
    assert found[1].tobytes() == wanted[1].tobytes()


def test_a_thread_that_ends_before_its_first_line_is_a_memory_error(search, monkeypatch):
    monkeypatch.setattr(thread, "_START_SECONDS", 0.01)
    monkeypatch.setattr(_thread, "start_new_thread", lambda function, arguments: 0)
    with pytest.raises(MemoryError, match="could not start a thread for a block of rows: it ended at once"):
        search()


def test_the_error_of_a_call_is_raised_where_its_result_is_needed():
    def fails():
        raise KeyError("a")

    call = Call(fails)
    call.join()
    assert call.wait(0)
    with pytest.raises(KeyError, match="a"):
        call.result()
    assert Call(divmod, 7, 2).result() == (3, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_does_not_wait_for_the_thread_of_its_parent(monkeypatch):
    held = _thread.allocate_lock()
    held.acquire()
    call = Call(held.acquire)
    # As in a child: another process than that of the call.
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="a forked child cannot continue a call of its parent"):
            call.result()
        call.join()
    held.release()
    assert call.result() is True
