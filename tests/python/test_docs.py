"""The pages render as they are written: no code is cut at the edge of a page, no backslash of a table is shown."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
LONGEST_CODE = 88
"""Columns of a code block that a page of the site shows without scrolling."""


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_fit_the_page(page):
    long, code = [], False
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif code and len(line) > LONGEST_CODE:
            long.append((number, len(line)))
    assert not long and not code


@pytest.mark.parametrize("page", PAGES)
def test_no_formula_needs_an_escaped_bar(page):
    """The site shows the backslash, other renderers need it."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.startswith("|") and "\\|" in line]
