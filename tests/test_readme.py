"""What the README and the docs show is what a user gets: commands exist, sessions are run again, the Python example runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hoptrace.cli import _VERBS, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^\$ (.+?)\n(.*?)(?=^\$ |\Z)", re.DOTALL | re.MULTILINE)
SESSIONS = [
    (path.name, command, output.strip("\n"))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for block in re.findall(r"```console\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
    for command, output in COMMAND.findall(block)
]


def _run(command: str, cwd: Path) -> str:
    words = shlex.split(command)
    assert words[0] == "hoptrace"
    env = {**os.environ, "COLUMNS": "110", "TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def test_there_are_sessions() -> None:
    assert len(SESSIONS) >= 3


@pytest.mark.parametrize(("where", "command", "output"), SESSIONS, ids=[f"{w}: {c}" for w, c, _ in SESSIONS])
def test_session(where: str, command: str, output: str, tmp_path: Path) -> None:
    (tmp_path / "sample_traces").symlink_to(ROOT / "sample_traces")
    assert _plain(_run(command, tmp_path)) == _plain(output), f"{where}: run it again and paste what it prints"


def test_python_example_runs() -> None:
    for code in re.findall(r"```python\n(.*?)```", README, re.S):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", _VERBS)
def test_every_verb_has_help_with_examples(verb: str) -> None:
    result = CliRunner().invoke(cli, [verb, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert f"hoptrace {verb}" in result.output


@pytest.mark.parametrize("verb", ["report", "replay", "diff", "import", "attach", "drive", "demo", "sql", "validate", "policies"])
def test_verbs_that_print_figures_have_json(verb: str) -> None:
    assert "--json" in CliRunner().invoke(cli, [verb, "--help"]).output


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_a_misspelt_verb_is_told() -> None:
    done = subprocess.run([sys.executable, "-m", "hoptrace", "repport"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "report" in done.stderr and "Traceback" not in done.stderr
