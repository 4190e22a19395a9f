"""`hoptrace platforms`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hoptrace.cli.platforms import command
from hoptrace.errors import InputError, UsageError
from hoptrace.platform import catalogue, component, load_platform, platforms
from hoptrace.platform_file import CONSTANTS, LINKS


def run(*args: str) -> Result:
    return CliRunner().invoke(command, args, catch_exceptions=False)


def test_list() -> None:
    text = run().output
    assert all(name in text for name in catalogue())
    assert (
        "989 TFLOP/s, 3,350 GB/s, PCIe 55, to peers 450" in text and "78 ns load" in text and "46.2 read, 33 GB/s write" in text
    )
    assert json.loads(run("--json").output) == list(catalogue().values())
    devices = run("--kind", "device").output
    assert all(name in devices for name in platforms()) and "nic-ndr400" not in devices
    assert json.loads(run("--kind", "device", "--json").output) == list(platforms().values())


def test_sources() -> None:
    text = run("--sources").output
    for name, data in catalogue().items():
        for constant in data.get("constants", {}):
            assert f"{name}  {constant} = " in text
        for link in data.get("links", {}):
            assert f"{name}  links.{link} (" in text
    assert "Beluga (SIGMOD'26)" in text and "allreduce of 8 ranks, 23 sizes" in text


def test_keys() -> None:
    text = run("--keys").output
    assert all(c in text for c in CONSTANTS) and all(f"[links.{k}]" in text for k in LINKS)
    assert json.loads(run("--keys", "--json").output)["constants"] == dict(CONSTANTS)


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_what_is_shown_can_be_used_as_a_file(name: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(run("--show", name).output, encoding="utf-8")
    assert component(str(mine)) == component(name) == tomllib.loads(mine.read_text(encoding="utf-8"))
    assert run("--show", str(mine)).output == mine.read_text(encoding="utf-8")
    assert json.loads(run("--show", name, "--json").output) == component(name)


def test_unknown_names() -> None:
    with pytest.raises(UsageError) as e:
        run("--show", "h100")
    assert "Did you mean 'h100-sxm-80gb'?" in (e.value.hint or "")


def test_a_file_that_is_no_platform(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("flops_per_s = 1e12\n", encoding="utf-8")
    with pytest.raises(InputError, match="memory_bytes_per_s"):
        load_platform(str(bad))
    bad.write_text("tflops = 1\n", encoding="utf-8")
    with pytest.raises(InputError, match="there is no key tflops"):
        run("--show", str(bad))
