"""The wheel holds everything that runs: an editable install would hide what is missing."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]

IN_VLLM = {"hoptrace.collectors.inside.vllm_stats", "hoptrace.collectors.inside.vllm_scheduler"}
"""Modules that only vLLM imports, and that need it."""


def run(*args: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(args, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    for top in SETUPTOOLS["package-dir"].values():
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), ".", cwd=source)
    (built,) = folder.glob("*.whl")
    return built


def expected() -> set[str]:
    """The files that a wheel must hold: every module, and the data that pyproject names."""
    files: set[str] = {"hoptrace/py.typed"}
    for package, top in SETUPTOOLS["package-dir"].items():
        for path in (ROOT / top).rglob("*"):
            inside = path.relative_to(ROOT / top)
            inner = ".".join([package, *inside.parent.parts])
            data = SETUPTOOLS["package-data"].get(package, [])
            own = SETUPTOOLS["package-data"].get(inner, [])
            wanted = path.suffix == ".py" or any(fnmatch.fnmatch(path.name, g) for g in own if "/" not in g)
            wanted |= any("/" in g and inside.match(g) for g in data)
            if path.is_file() and wanted and "__pycache__" not in inside.parts:
                files.add("/".join([*package.split("."), *inside.parts]))
    return files


def test_wheel_holds_every_module_and_all_data(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert expected() - names == set()


def test_wheel_holds_nothing_else(wheel: Path) -> None:
    """One import package, no tests, no top-level `app` in a user's environment."""
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names - expected() == set()
    assert {n.split("/")[0] for n in names} == {"hoptrace"}


def test_every_kind_of_data_is_there() -> None:
    """The patterns of pyproject match something: a renamed folder would leave them empty."""
    files = expected()
    for package, patterns in SETUPTOOLS["package-data"].items():
        for pattern in patterns:
            path = f"{package.replace('.', '/')}/{pattern}"
            assert any(fnmatch.fnmatch(f, path) for f in files), path


def test_installed_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    where = run(sys.executable, "-c", "import hoptrace; print(hoptrace.__file__)", cwd=tmp_path, PYTHONPATH=str(site))
    assert Path(where.strip()).is_relative_to(site)
    text = run(sys.executable, str(site / "bin" / "hoptrace"), "--help", cwd=tmp_path, PYTHONPATH=str(site))
    assert "Commands:" in text
    version = run(sys.executable, "-m", "hoptrace", "--version", cwd=tmp_path, PYTHONPATH=str(site))
    assert PYPROJECT["project"]["version"] in version
    modules = [n.removesuffix(".py").replace("/", ".") for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".py")]
    parts = ("hoptrace.cli.", "hoptrace.analysis.", "hoptrace.collectors.")
    importable = sorted(m for m in modules if m.startswith(parts) and m not in IN_VLLM)
    assert set(modules) > IN_VLLM
    script = f"import importlib\nfor m in {importable!r}:\n    importlib.import_module(m)\n"
    run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(site))
