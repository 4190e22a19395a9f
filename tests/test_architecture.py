"""The shape of the code: who may import whom, what is packaged, how long a file may be, what must be documented."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hoptrace.schema import TABLES, Column

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS = {name: ROOT / folder for name, folder in PYPROJECT["package-dir"].items()}

# What each part may import besides itself. `core` means the modules directly in core/; `samples` is data.
ARROWS: dict[str, set[str]] = {
    "core": set(),
    "collectors": {"core"},
    "replay": {"core"},
    "analysis": {"core"},
    "app": {"core", "analysis", "replay", "samples"},
    "samples": {"core"},
    "cli": {"core", "collectors", "replay", "analysis", "app", "samples"},
}
# `python -m hoptrace` is the command line.
EXCEPTIONS = {("core/__main__.py", "cli")}


def part_of(module: str) -> str:
    """Which part of the system a module name belongs to."""
    second = module.split(".")[1] if "." in module else ""
    return second if second in ARROWS else "core"


def files() -> Iterator[tuple[str, Path]]:
    """Every Python file of the package with its part."""
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            own = part_of(package)
            yield "cli" if path.is_relative_to(ROOT / "core" / "cli") else own, path


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Full names of the modules that a file imports, anywhere in it, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            # `from hoptrace import replay` names a part too.
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


FILES = [pytest.param(part, path, id=str(path.relative_to(ROOT))) for part, path in files()]


@pytest.mark.parametrize(("part", "path"), FILES)
def test_imports_follow_the_arrows(part: str, path: Path) -> None:
    bare = {folder.name for folder in FOLDERS.values()}
    name = str(path.relative_to(ROOT))
    for module, line in imports(path):
        top = module.split(".")[0]
        assert top not in bare, f"{name}:{line}: imports {top}, which exists only in a checkout: import hoptrace.{top}"
        if top != "hoptrace":
            continue
        target = part_of(module)
        allowed = target == part or target in ARROWS[part] or (name, target) in EXCEPTIONS
        assert allowed, f"{name}:{line}: {part} may not import {target}"


def test_arrows_would_be_seen(tmp_path: Path) -> None:
    """The test above can fail: imports inside functions and of a part by name are found."""
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from hoptrace import replay\n    import hoptrace.analysis.report as r\n    import app.x\n")
    assert [part_of(m) for m, _ in imports(path)] == ["replay", "analysis", "core"]
    assert [m.split(".")[0] for m, _ in imports(path)] == ["hoptrace", "hoptrace", "app"]


def test_every_folder_with_code_is_a_package() -> None:
    """A wheel holds only the packages that are listed; an editable install hides an omission."""
    found: set[str] = set()
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*"):
            inside = path.relative_to(folder)
            if path.suffix in (".py", ".sql") or (path.suffix == ".toml" and package != "hoptrace.samples"):
                found.add(".".join([package, *inside.parent.parts]))
    assert found == set(PYPROJECT["packages"])


def test_every_package_has_an_init() -> None:
    for package in PYPROJECT["packages"]:
        front = max((p for p in FOLDERS if package == p or package.startswith(p + ".")), key=len)
        folder = FOLDERS[front].joinpath(*package.removeprefix(front).strip(".").split("."))
        assert (folder / "__init__.py").is_file(), package


# Tests are not held to it: a table of literal cases is long and simple.
@pytest.mark.parametrize("path", [*(p for _, p in files()), *(ROOT / "benchmarks").rglob("*.py")], ids=str)
def test_no_file_is_longer_than_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize(("part", "path"), FILES)
def test_every_file_says_what_it_is_for(part: str, path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or not tree.body, f"{path}: no docstring"


COLUMNS = [pytest.param(column, id=f"{table.name}.{column.name}") for table in TABLES.values() for column in table.columns]


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_is_documented_with_its_unit(column: Column) -> None:
    assert column.doc.endswith((".", "…")), "a sentence"
    for suffix, unit in (("_ns", "ns"), ("_bytes", "bytes"), ("_tokens", "tokens")):
        if column.name.endswith(suffix):
            assert column.unit == unit
    assert column.values == tuple(dict.fromkeys(column.values))


def test_keys_and_sorting_name_columns() -> None:
    for table in TABLES.values():
        assert table.sort
        assert set(table.key) | set(table.sort) <= set(table.names)
        assert bool(table.key) or not table.merge
        assert len(set(table.names)) == len(table.names)
        assert table.column("source").required
