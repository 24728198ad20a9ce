"""What the extension of a wheel needs from the system: libraries, and versions of symbols such as GLIBC_2.17."""

from __future__ import annotations

import re
import struct
import zipfile
from pathlib import Path

_VERSIONS_NEEDED = 0x6FFFFFFE


def of_wheel(wheel: Path) -> dict[str, set[str]]:
    """Return the versions of symbols by library, of the one extension in a wheel for Linux."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        return of_library(archive.read(name))


def of_library(content: bytes) -> dict[str, set[str]]:
    """Return the versions of symbols by library that a 64-bit little-endian ELF file needs."""
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"expected a 64-bit little-endian ELF file, got one that begins with {content[:6]!r}")
    (start,) = struct.unpack_from("<Q", content, 0x28)
    size, count = struct.unpack_from("<HH", content, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, start + size * place) for place in range(count)]
    needed: dict[str, set[str]] = {}
    for _, kind, _, _, offset, _, texts, entries, _, _ in sections:
        if kind != _VERSIONS_NEEDED:
            continue
        names = sections[texts][4]
        for _ in range(entries):
            _, versions, library, first, following = struct.unpack_from("<HHIII", content, offset)
            found = needed.setdefault(_text(content, names + library), set())
            version = offset + first
            for _ in range(versions):
                _, _, _, name, distance = struct.unpack_from("<IHHII", content, version)
                found.add(_text(content, names + name))
                version += distance
            offset += following
    return needed


def newest_glibc(needed: dict[str, set[str]]) -> tuple[int, ...]:
    """Return the version of glibc that all symbols are in, such as (2, 17)."""
    names = [name for versions in needed.values() for name in versions if re.fullmatch(r"GLIBC_[0-9.]+", name)]
    return max(tuple(map(int, name.removeprefix("GLIBC_").split("."))) for name in names)


def _text(content: bytes, start: int) -> str:
    return content[start : content.index(b"\0", start)].decode("ascii")
