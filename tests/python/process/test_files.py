"""Files that are written whole or not at all: kills, full disks, odd places and two writers, for each kind of file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("limits and filters of Linux", allow_module_level=True)

from tests.python.process.writers import CALLS, COMMANDS, MODE, WRITERS

ROOT = Path(__file__).resolve().parents[3]
OWN_ERRORS = ("checkpoint", "Index.save")
"""Writers that raise, where commands print a line."""


def rows(driver: str) -> list[dict]:
    command = [sys.executable, "-m", "tests.python.process.drivers", driver]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_names_output(row: dict) -> None:
    """The message is one line that names the first output."""
    printed, output = row["printed"], WRITERS[row["writer"]].outputs[0]
    assert printed.count("\n") == 1, row
    if row["writer"] in OWN_ERRORS:
        assert f"'{output}'" in printed or f"Error: {output}: " in printed, row
    else:
        assert printed.startswith(f"exactknn: error: {output}: "), row


def test_a_kill_leaves_the_old_file_and_the_next_write_works():
    found = rows("kills")
    assert len(found) == len(WRITERS) * (3 + len(CALLS))
    for row in found:
        assert row["code"] == -(signal.SIGSYS if row["place"] in CALLS else signal.SIGXFSZ), row
        assert set(row["states"].values()) == {"old"}, row
        # The temporary files have the mode of the old ones from the start.
        assert row["left"] and all(name.startswith(".exactknn-") and name.endswith(".tmp") for name in row["left"]), row
        assert row["modes"] == [MODE], row
        assert row["again"] == 0 and set(row["states again"].values()) == {"new"}, row
        assert row["left again"] == row["left"] and row["left unchanged"], row


def test_a_kill_between_two_outputs_leaves_each_whole():
    assert rows("kills_between_outputs") == [{"code": -signal.SIGKILL, "states": ["new", "old"]}] * 2


def test_a_killed_search_continues_from_its_last_state():
    for row in rows("kills_of_resumed_searches"):
        assert row["code"] == -signal.SIGKILL and row["again"] == 0, row
        assert row["kept"] == ([] if row["count"] == 1 else ["state"]), row
        assert ("continuing from state, " in row["printed"]) == (row["count"] > 1), row
        assert row["whole"] and not row["state"], row


def test_an_error_of_the_system_leaves_the_old_file_and_names_it():
    found = rows("failures")
    assert len(found) == len(WRITERS) * (3 + len(CALLS))
    for row in found:
        assert row["code"] == 1 and set(row["states"].values()) == {"old"} and row["temporary"] == [], row
        reason = "Input/output error" if row["place"] in CALLS else "File too large"
        assert reason in row["printed"], row
        if row["place"] == "byte 0":
            assert_names_output(row)
        if row["place"] == "rename" and row["writer"] in COMMANDS:
            # The results are kept under other names, all of them named.
            assert len(row["others"]) == len(row["states"]), row
            for name, whole in row["others"].items():
                assert whole and f"; it was written to {row['folder']}/{name} instead" in row["printed"], row
        else:
            assert row["others"] == {}, row


def test_a_full_disk_leaves_the_old_file_and_names_it():
    found = rows("full_disk")
    if not found:
        pytest.skip("this user cannot mount a small disk")
    for row in found:
        assert row["code"] == 1 and set(row["states"].values()) == {"old"} and row["others"] == [], row
        assert "No space left on device" in row["printed"], row
        assert_names_output(row)


def test_what_is_no_plain_file_is_refused_before_the_search():
    for row in rows("odd_targets"):
        assert row["code"] == (1 if row["writer"] in OWN_ERRORS else 2), row
        assert not row["changed"] and "finite" not in row["printed"], row
        assert_names_output(row)


def test_links_stay_and_their_targets_are_written():
    for row in rows("links"):
        assert row["code"] == 0 and row["links"] and row["others"] == [], row
        assert set(row["states"].values()) == {"new"}, row


def test_a_read_only_folder_is_refused_before_the_search():
    for row in rows("read_only_folders"):
        assert row["code"] == (1 if row["writer"] in OWN_ERRORS else 2), row
        assert set(row["states"].values()) == {"old"} and row["others"] == [], row
        assert "Permission denied" in row["printed"] and "finite" not in row["printed"], row
        assert_names_output(row)


def test_two_writers_leave_whole_files():
    for row in rows("two_writers"):
        assert row["codes"] == [0, 0] and row["others"] == [], row
        assert set(row["seen"]) <= {"old", "new"} and set(row["states"].values()) == {"new"}, row


@pytest.mark.parametrize("words", [["info"], ["info", "--json"], ["--version"], ["search", "--help"]])
def test_a_full_device_as_stdout_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "exactknn", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=50
        )
    assert (done.returncode, done.stderr) == (1, f"exactknn: error: stdout: {os.strerror(28)}\n")
