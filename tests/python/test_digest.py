"""The digests of `benches.digest` are the recorded ones, at every level and number of threads.

Record them again (`python -m benches.digest --record`) only with a change that is meant to alter results, or one that
adds cases. If a group differs, `python -m benches.digest --cases` before and after the change names the cases.

Here every level of this CPU runs with one number of threads, and every number from 1 to 4 occurs;
`python -m benches.digest --all` runs every level with every number.
"""

import hashlib
import struct

import numpy as np
import pytest

import exactknn
from benches import digest

AVAILABLE = exactknn.available_simd_levels()
# The slowest level and the fastest of five run with four threads.
RUNS = [(AVAILABLE[i % len(AVAILABLE)], 1 + (i + 3) % 4) for i in range(max(len(AVAILABLE), 4))]


@pytest.mark.parametrize("group", digest.GROUPS)
@pytest.mark.parametrize(("level", "threads"), RUNS)
def test_results_are_the_recorded_ones(level, threads, group):
    with digest.running(level, threads):
        found = digest.group_digest(group)
    assert found == digest.recorded()[group]


@pytest.mark.parametrize("level", ["scalar", "avx2", "avxvnni", "avx512", "avx512vnni"])
def test_every_level_is_compared_or_reported_as_missing(level):
    if level not in AVAILABLE:
        pytest.skip(f"this CPU lacks {level}: its results are not compared")
    assert level in dict(RUNS)


def test_every_number_of_threads_is_compared():
    assert {threads for _, threads in RUNS} == set(digest.THREADS)


def test_the_record_names_the_groups_and_their_total():
    groups = digest.recorded()
    assert list(groups) == list(digest.GROUPS)
    assert f'"total": "{digest.digest_of(groups)}"' in digest.RECORD.read_text()


def test_a_digest_is_of_type_shape_and_bytes():
    array = np.array([[1.5, -2.0]], np.float32)
    assert b"".join(digest.content(array)) == b"<f4 (1, 2)\n" + struct.pack("<ff", 1.5, -2.0)
    assert b"".join(digest.content(array.astype(">f4"))) == b"".join(digest.content(array))
    assert b"".join(digest.content((1, 0.1, {"a": None}))) == b"3 items\n1\n0x1.999999999999ap-4\n1 names\n'a'\nNone\n"
    distinct = [array, array.T, array.astype(np.float64), array[0], [1.5, -2.0], (1, 2), (12,), "1", 1, True]
    digests = {hashlib.sha256(b"".join(digest.content(value))).hexdigest() for value in distinct}
    assert len(digests) == len(distinct)
    with pytest.raises(TypeError, match="set"):
        list(digest.content({1}))
