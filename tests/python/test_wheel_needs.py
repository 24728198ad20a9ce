"""The reader of what an extension needs, against another reader."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exactknn import _core
from tests.wheel import needed


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("objdump"), reason="needs Linux and objdump")
def test_the_versions_of_symbols_are_those_of_objdump():
    found = needed.of_library(Path(_core.__file__).read_bytes())
    printed = subprocess.run(["objdump", "-p", _core.__file__], capture_output=True, text=True, check=True).stdout
    section = printed.split("Version References:\n", 1)[1]
    expected: dict[str, set[str]] = {}
    for line in section.splitlines():
        if library := re.match(r"  required from (.*):$", line):
            versions = expected.setdefault(library[1], set())
        elif version := re.match(r"    0x\S+ 0x\S+ \d+ (\S+)$", line):
            versions.add(version[1])
    assert found == expected
    glibc = needed.newest_glibc(found)
    assert f"GLIBC_{'.'.join(map(str, glibc))}" in set().union(*expected.values())
    assert glibc >= (2, 17)


def test_the_newest_version_is_compared_by_numbers():
    versions = {"libc.so.6": {"GLIBC_2.9", "GLIBC_2.17", "GLIBC_2.2.5"}, "libgcc_s.so.1": {"GCC_4.2.0"}}
    assert needed.newest_glibc(versions) == (2, 17)


def test_other_files_are_refused():
    with pytest.raises(ValueError, match="expected a 64-bit little-endian ELF file, got one that begins with b'MZ'"):
        needed.of_library(b"MZ")
