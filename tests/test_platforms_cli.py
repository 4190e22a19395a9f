"""`hoptrace platforms`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hoptrace.cli.platforms import command
from hoptrace.errors import InputError, UsageError
from hoptrace.platform import load_platform, platforms


def run(*args: str) -> Result:
    return CliRunner().invoke(command, args, catch_exceptions=False)


def test_list() -> None:
    text = run().output
    assert all(name in text for name in platforms())
    assert "989 TFLOP/s, 3,350 GB/s" in text
    assert json.loads(run("--json").output) == list(platforms().values())


@pytest.mark.parametrize("name", sorted(platforms()))
def test_what_is_shown_can_be_used_as_a_file(name: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(run("--show", name).output, encoding="utf-8")
    assert load_platform(str(mine)) == load_platform(name) == tomllib.loads(mine.read_text(encoding="utf-8"))
    assert run("--show", str(mine)).output == mine.read_text(encoding="utf-8")
    assert json.loads(run("--show", name, "--json").output) == load_platform(name)


def test_unknown_names() -> None:
    with pytest.raises(UsageError) as e:
        run("--show", "h100")
    assert "Did you mean 'h100-sxm-80gb'?" in (e.value.hint or "")


def test_a_file_that_is_no_platform(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("flops_per_s = 1e12\n", encoding="utf-8")
    with pytest.raises(InputError, match="memory_bytes_per_s"):
        run("--show", str(bad))
