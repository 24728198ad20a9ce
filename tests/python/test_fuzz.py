"""The fuzz targets in Python with their first seed, and with seeds that failed once; for longer: `make fuzz`."""

import pytest

from tests.fuzz import index_machine, readers

#: Seeds that failed once.
OF_THE_INDEX: tuple[int, ...] = ()
OF_THE_READERS: tuple[int, ...] = ()


@pytest.mark.parametrize("seed", [*OF_THE_INDEX, 0])
def test_histories_of_an_index_equal_the_model(seed):
    index_machine.run(seed, examples=15, steps=15)


@pytest.mark.parametrize("seed", [*OF_THE_READERS, 0])
def test_files_with_changed_bytes_are_refused_or_read_right(seed):
    assert readers.case(seed) > 200
