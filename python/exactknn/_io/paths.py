"""Paths of files: suffixes, sizes, and the array that ``file.npz:name`` selects."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from exactknn._io.errors import FileError


def split_array_name(path: str) -> tuple[str, str | None]:
    """Return the file and the array name of ``file.npz:name``; an existing file with that name takes precedence."""
    at = path.lower().rfind(".npz:")
    if at < 0 or os.path.exists(path):
        return path, None
    return path[: at + 4], path[at + 5 :]


def source_of(path: str) -> Path:
    """Return the file of ``path``, which may be ``file.npz:name``."""
    return Path(split_array_name(path)[0])


def size_of(source: Path, path: str) -> int:
    try:
        status = source.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileError(f"{path}: no such file") from error
    except ValueError as error:  # an embedded null byte
        raise FileError(f"{path!r}: not a path: {error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise FileError(f"{path}: is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise FileError(f"{path}: is not a regular file, so it cannot be mapped into memory")
    if status.st_size == 0:
        raise FileError(f"{path}: the file is empty")
    return status.st_size


def suffix_of(path: str) -> str:
    """Return the suffix of a path in lower case, with its dot; empty if there is none."""
    return Path(path).suffix.lower()


def check_output_suffix(path: str, wanted: Sequence[str], option: str) -> str:
    """Return the suffix of an output path in lower case.

    Raises:
        FileError: the suffix is not one of `wanted`.
    """
    suffix = suffix_of(path)
    if suffix not in wanted:
        raise FileError(f"{path}: unknown suffix {suffix!r} for {option}; expected one of {', '.join(wanted)}")
    return suffix


def same_file(first: str | Path, second: str | Path) -> bool:
    """Return whether two paths lead to the same file, which need not exist."""
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    try:
        return os.path.samefile(first, second)
    except (OSError, ValueError):
        return False
