"""Files of labels: which first lines are headers."""

import numpy as np
import pytest

from exactknn._io.errors import FileError
from exactknn._io.labels import read_labels


@pytest.mark.parametrize("suffix", [".txt", ".csv"])
@pytest.mark.parametrize(
    "lines",
    ["label 0 1", "kind 7 8 9", "id 0.5 1e3", "Class cat dog", "labels cat", "TARGET -1 +2", "class class_ class"],
)
def test_a_header_is_refused_not_a_class(tmp_path, lines, suffix):
    labels = lines.split(" ")
    path = tmp_path / f"labels{suffix}"
    path.write_text("\n".join(labels))
    if labels.count(labels[0]) > 1:
        assert read_labels(str(path)).tolist() == labels
        return
    with pytest.raises(FileError, match=f"line 1, '{labels[0]}', looks like a header; expected one label per line"):
        read_labels(str(path))


@pytest.mark.parametrize("lines", ["0 1 2", "cat dog", "cat 1 dog", "0 label", "label", "kind", "-1 0.5 cat", "nan 1"])
def test_labels_without_a_header_are_read_to_the_first(tmp_path, lines):
    path = tmp_path / "labels.csv"
    path.write_text("\n".join(lines.split(" ")))
    assert read_labels(str(path)).tolist() == lines.split(" ")


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long double is float64 here")
def test_floats_wider_than_float64_are_refused(tmp_path):
    # Beside integers on the other side they would be compared as float64.
    np.save(tmp_path / "labels.npy", np.ones(2, np.longdouble))
    with pytest.raises(FileError, match="expected labels: integers, booleans, floats or text"):
        read_labels(str(tmp_path / "labels.npy"))
