"""Whoever reads the output may go, and the disk that takes it may be full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from support.workloads import MS, server, store

from hoptrace.replay.run import replay
from hoptrace.stepcost import fixed

# Every way out of the program: click.echo, rich, the csv module; more than a pipe's buffer of 64 KiB, and less than Python's own.
_VERBS = {
    "report": (),
    "report --json": (),
    "sql --csv": ("FROM tokens",),
    "sql --json": ("FROM tokens",),
    "sql": ("SELECT request FROM requests",),
    "validate": (),
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("p")
    row = {"arrival_of": "received", "prompt_tokens": 9, "output_tokens": 200, "source": "t"}
    rows = [{"request": i, "arrival_ns": i * MS, "received_ns": i * MS} | row for i in range(30)]
    log = store(folder / "log.trace", {"requests": pl.DataFrame(rows)}, server())
    return replay(log, "as-recorded", cost=fixed(step_ns=MS), out=folder / "t.trace").path


def arguments(verb: str, trace: Path) -> list[str]:
    name, *options = verb.split()
    return [sys.executable, "-m", "hoptrace", name, str(trace), *_VERBS.get(verb, ()), *options]


@pytest.mark.parametrize("verb", _VERBS)
def test_a_reader_that_goes_is_no_error(verb: str, trace: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as closed:
        p = subprocess.run(arguments(verb, trace), stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (p.returncode, p.stderr) == (0, "")


def test_a_replay_whose_reader_goes_is_written(trace: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    out = tmp_path / "again.trace"
    with os.fdopen(write) as closed:
        p = subprocess.run(
            [*arguments("replay", trace), "-o", str(out)], stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert p.returncode == 0, p.stderr
    assert "Broken pipe" not in p.stderr and "Traceback" not in p.stderr
    assert (out / "manifest.json").exists()


def test_help_into_a_closed_pipe() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as closed:
        command = [sys.executable, "-m", "hoptrace", "replay", "--help"]
        p = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (p.returncode, p.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("verb", ["report", "sql --csv", "validate"])
def test_a_full_disk_is_a_sentence(verb: str, trace: Path) -> None:
    with Path("/dev/full").open("w") as full:
        p = subprocess.run(arguments(verb, trace), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert p.returncode == 4
    assert p.stderr == "hoptrace: No space left where the output goes. Make room, or write it elsewhere.\n"
