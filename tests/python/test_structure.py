"""The code has the structure that CONTRIBUTING.md describes: who uses whom, and how long a file may be."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "rust" / "core" / "src"
#: Outside the order: the crate's root names all modules, the oracle and the property tests may use them.
OUTSIDE = {"lib", "oracle"}
LONGEST_FILE = 500


def module_order() -> list[str]:
    """The modules of the core in the order of CONTRIBUTING.md, a folder's own file before what uses it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Order of the core's modules", 1)[1].split("\n## ", 1)[0]
    items = re.findall(r"^\d+\. (.*(?:\n   .*)*)", section, flags=re.MULTILINE)
    return [name for item in items for name in re.findall(r"`([a-z0-9_/]+)`", item.split(":", 1)[0])]


def module_of(path: Path) -> str:
    """The name of a source file as the order spells it: `search/scan`, and `search` for `search/mod.rs`."""
    name = path.relative_to(CORE).with_suffix("").as_posix()
    return name.removesuffix("/mod")


def used_paths(path: Path) -> set[str]:
    """The modules and names that a file uses outside its tests, as `search/scan/Pass`."""
    text = path.read_text(encoding="utf-8").split("#[cfg(test)]\nmod tests", 1)[0]
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^pub(\(crate\))? use [^;]*;", "", text, flags=re.MULTILINE)  # a name for outside is not a use
    here = module_of(path)
    parent = here.rpartition("/")[0]
    base = {"crate": "", "super": parent, "self": here}
    paths = set()
    for root, middle, last in re.findall(r"\b(crate|super|self)::((?:[a-z0-9_]+::)*)(\{[^;]*?\}|\w+)", text):
        names = re.findall(r"[A-Za-z0-9_]+(?:::[A-Za-z0-9_]+)*", last) if last.startswith("{") else [last]
        for name in names:
            parts = [*base[root].split("/"), *middle.split("::"), *name.split("::")]
            paths.add("/".join(part for part in parts if part))
    if path.name == "mod.rs":
        # A folder's own file may name its modules without a root.
        children = {child.stem for child in path.parent.iterdir()} - {"mod"}
        paths.update(f"{here}/{child}" for child in children if re.search(rf"(?<!:)\b{child}::", text))
    return paths


def uses() -> dict[str, set[str]]:
    """The modules that each module uses."""
    sources = [path for path in CORE.rglob("*.rs") if "bound_properties" not in path.parts]
    modules = {module_of(path) for path in sources}
    found: dict[str, set[str]] = {}
    for path in sources:
        here = module_of(path)
        if here in OUTSIDE:
            continue
        found[here] = set()
        for used in used_paths(path):
            parts = used.split("/")
            owners = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
            owner = next((name for name in owners if name in modules), None)
            if owner is not None and owner != here:
                found[here].add(owner)
    return found


def test_the_order_names_every_module_once() -> None:
    order = module_order()
    assert len(order) == len(set(order))
    modules = {module_of(path) for path in CORE.rglob("*.rs") if "bound_properties" not in path.parts} - OUTSIDE
    folders = {name for name in order if any(module.startswith(f"{name}/") for module in modules)}
    named = {module for module in modules if module in order or any(module.startswith(f"{name}/") for name in folders)}
    assert modules == named


def place(order: list[str], module: str) -> int:
    """Where a module stands: at its own name, else at that of its folder."""
    while module not in order:
        module = module.rpartition("/")[0]
        assert module, "every module stands in the order"
    return order.index(module)


def test_a_module_uses_only_what_stands_before_it() -> None:
    order = module_order()
    wrong = [
        f"{module} uses {used}"
        for module, all_used in uses().items()
        for used in sorted(all_used)
        if place(order, used) > place(order, module)
    ]
    assert not wrong


def test_no_modules_use_each_other() -> None:
    graph = uses()
    done: set[str] = set()
    circles: list[str] = []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            circles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for used in sorted(graph.get(module, ())):
                visit(used, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    assert not circles


@pytest.mark.parametrize("what", ["fn walk(", "fn exclude(&mut self, lane"])
def test_the_panel_loop_and_the_exclusion_of_self_stand_in_one_place(what: str) -> None:
    places = [path.name for path in CORE.rglob("*.rs") if what in path.read_text(encoding="utf-8")]
    assert places == ["scan.rs"]


def test_no_source_file_is_longer_than_500_lines() -> None:
    files = [path for folder in ("rust", "python", "benches", "tests", "docs") for path in (ROOT / folder).rglob("*")]
    long = {
        path.relative_to(ROOT).as_posix(): count
        for path in files
        if path.suffix in {".rs", ".py"} and "target" not in path.parts
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE
    }
    assert not long
