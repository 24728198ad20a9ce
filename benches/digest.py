"""One digest of results, to compare states of the code and machines.

    python -m benches.digest                      the active level and number of threads, compared with the record
    python -m benches.digest --level scalar --threads 3
    python -m benches.digest --all                every level of this CPU by 1 to 4 threads; do all agree?
    python -m benches.digest --record             the same, then written to tests/python/digest.json
    python -m benches.digest --cases > before     one line per case, for `diff`

    rows (digest_rows) ──calls of the package (digest_searches, digest_uses)──> cases: a name, a result
        ──bytes in one form──> SHA-256 of a case ──> of a group ──> of all

The contract (docs/contract.md) makes the digests independent of the level, the number of threads and the machine, and
the cases are chosen to be independent of the versions of NumPy and torch. Record them again only with a change that is
meant to alter results, or one that adds cases; `tests/python/test_digest.py` asserts the record.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import exactknn
from benches import digest_searches, digest_uses

RECORD = Path(__file__).resolve().parent.parent / "tests" / "python" / "digest.json"
THREADS = (1, 2, 3, 4)

GROUPS = {group.__name__: group for group in (*digest_searches.GROUPS, *digest_uses.GROUPS)}


def content(result: Any) -> Iterator[bytes]:
    """The bytes of a result: type, shape and little-endian values of arrays, all digits of numbers."""
    if isinstance(result, np.ndarray):
        little = result.astype(result.dtype.newbyteorder("<"), copy=False)
        yield f"{little.dtype.str} {little.shape}\n".encode()
        yield little.tobytes()
    elif isinstance(result, (tuple, list)):
        yield f"{len(result)} items\n".encode()
        for item in result:
            yield from content(item)
    elif isinstance(result, Mapping):
        yield f"{len(result)} names\n".encode()
        for name in sorted(result):
            yield from content(name)
            yield from content(result[name])
    elif isinstance(result, float):
        yield f"{result.hex()}\n".encode()
    elif isinstance(result, bytes):
        yield f"{len(result)} bytes\n".encode()
        yield result
    elif result is None or isinstance(result, (str, int)):
        yield f"{result!r}\n".encode()
    else:
        raise TypeError(f"a result must be made of arrays, numbers and text, got {type(result).__name__}")


def cases_of(group: str) -> Iterator[tuple[str, str]]:
    """Name and digest of each case of a group."""
    names = set()
    for name, result in GROUPS[group]():
        if name in names:
            raise ValueError(f"{group}: two cases are named {name!r}")
        names.add(name)
        digest = hashlib.sha256()
        for part in content(result):
            digest.update(part)
        yield name, digest.hexdigest()


def digest_of(digests: Mapping[str, str]) -> str:
    """The digest of several, by name."""
    lines = "".join(f"{digest} {name}\n" for name, digest in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def group_digest(group: str) -> str:
    """The digest of a group at the active level and number of threads."""
    return digest_of(dict(cases_of(group)))


def recorded() -> dict[str, str]:
    """The recorded digest of each group; empty before there is a record."""
    if not RECORD.exists():
        return {}
    groups: dict[str, str] = json.loads(RECORD.read_text(encoding="utf-8"))["groups"]
    return groups


@contextlib.contextmanager
def running(level: str | None, threads: int | None) -> Iterator[None]:
    """Set level and number of threads, and both to their defaults at the end; `None` is the default."""
    exactknn.set_simd_level(level)
    exactknn.set_num_threads(threads)
    try:
        yield
    finally:
        exactknn.set_simd_level(None)
        exactknn.set_num_threads(None)


def show_cases() -> int:
    """Print one line per case."""
    for group in GROUPS:
        for name, digest in cases_of(group):
            print(f"{digest}  {group}: {name}")
    return 0


def show_one() -> int:
    """Print the digests at the active level; 1 where they differ from the record."""
    record, found = recorded(), {}
    print(f"{exactknn.simd_level()}, {exactknn.get_num_threads()} threads")
    start = time.perf_counter()
    for group in GROUPS:
        found[group] = group_digest(group)
        print(f"{group:<12} {found[group]}  {_verdict(found[group], record.get(group))}", flush=True)
    print(f"{'total':<12} {digest_of(found)}  {_verdict(found, record)}")
    print(f"{time.perf_counter() - start:.1f} s")
    return int(found != record)


def _verdict(found: Any, record: Any) -> str:
    return "as recorded" if found == record else "differs" if record else "not recorded"


def show_all(*, record: bool) -> int:
    """Print whether all levels and numbers of threads agree; 1 where they do not, or differ from the record.

    Args:
        record: whether to write the digests that they agree on instead of comparing them with the record.
    """
    first: dict[str, str] = {}
    agree = True
    for level in exactknn.available_simd_levels():
        for threads in THREADS:
            with running(level, threads):
                start = time.perf_counter()
                found = {group: group_digest(group) for group in GROUPS}
                seconds = time.perf_counter() - start
            first = first or found
            others = [group for group in GROUPS if found[group] != first[group]]
            agree = agree and not others
            note = f"  differs from the first in {', '.join(others)}" if others else ""
            print(f"{level:<12}{threads} threads  {digest_of(found)}  {seconds:5.1f} s{note}", flush=True)
    print("all agree" if agree else "they do not agree")
    if not agree:
        return 1
    if record:
        text = json.dumps({"total": digest_of(first), "groups": first}, indent=2)
        RECORD.write_text(text + "\n", encoding="utf-8")
        print(f"written to {RECORD.name}")
        return 0
    kept = recorded()
    others = [group for group in GROUPS if first[group] != kept.get(group)]
    print(f"differs from the record in {', '.join(others)}" if others else "as recorded")
    return int(bool(others))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the digests; 1 where they differ from each other or from the record."""
    parser = argparse.ArgumentParser(prog="python -m benches.digest", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--level", choices=exactknn.available_simd_levels(), help="default: the active one")
    parser.add_argument("--threads", type=int, metavar="N", help="default: as every search")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--all", action="store_true", help="every level of this CPU by 1 to 4 threads")
    what.add_argument("--record", action="store_true", help="the same, and write the record when all agree")
    what.add_argument("--cases", action="store_true", help="one line per case")
    options = parser.parse_args(arguments)
    if (options.all or options.record) and (options.level or options.threads):
        parser.error("--all and --record choose level and threads themselves")
    if options.all or options.record:
        return show_all(record=options.record)
    with running(options.level, options.threads):
        return show_cases() if options.cases else show_one()


if __name__ == "__main__":
    sys.exit(main())
