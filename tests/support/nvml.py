"""Captures of a stub of NVIDIA's library: compiled once per session, each in a process of its own."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hoptrace
from hoptrace.reader import Trace

__all__ = ["BDFS", "GPUS", "LINKS", "PCIE", "UUIDS", "Captured", "capture", "compiled", "environment", "two_gpus"]

_HERE = Path(__file__).parent
UUIDS = tuple(f"GPU-{n:08d}-0000-0000-0000-000000000000" for n in range(2))
BDFS = ("0000:17:00.0", "0000:27:00.0")
GPUS = tuple(f"gpu:{u}" for u in UUIDS)
LINKS = tuple(tuple(f"nvlink:{u}/{link}" for link in range(2)) for u in UUIDS)
PCIE = tuple(f"pcie:{b}" for b in BDFS)


@cache
def compiled(*flags: str) -> Path:
    """The folder with the stub's libnvidia-ml.so.1; the test is skipped without a C compiler or nvidia-ml-py."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py (the extra `nvidia`)")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler (cc) for the stub of NVIDIA's library")
    folder = Path(tempfile.mkdtemp(prefix="hoptrace-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", *flags]
    subprocess.run([*command, "-o", folder / "libnvidia-ml.so.1", _HERE / "nvml_stub.c"], check=True)
    return folder


def two_gpus() -> dict[str, str]:
    """Two GPUs with two NVLinks between them (KiB counters 100, 101 sent and 200, 201 received), PCIe 4.0 x8, driver 580.82."""
    lines = {"driver": "580.82.07", "count": "2"}
    for n in range(2):
        lines |= {
            f"mem.total.{n}": "150754820096", f"mem.reserved.{n}": "643825664", f"mem.used.{n}": "33933459456",
            f"mem.free.{n}": "116177534976", f"clock.{n}.1": "1980", f"clock.{n}.2": "3201", f"reasons.{n}": "4",
            f"gen.{n}": "4", f"width.{n}": "8", f"f.{n}.91.0": "1:2", f"f.{n}.197.0": "1:1000", f"f.{n}.198.0": "1:2000",
            f"level.{n}.{1 - n}": "40", f"p2p.{n}.0": "0", f"p2p.{n}.2": "0", f"nodes.{n}": "1",
        }  # fmt: skip
        for link in range(2):
            lines |= {f"up.{n}.{link}": "1", f"to.{n}.{link}": "0", f"f.{n}.164.{link}": "1:26562", f"f.{n}.165.{link}": "1:1"}
            lines |= {f"f.{n}.138.{link}": f"3:{100 + link}", f"f.{n}.139.{link}": f"3:{200 + link}"}
    return lines


@dataclass(frozen=True)
class Captured:
    """What came of it: the trace, its rows by table in order of time; what the probes found at first, and after the end."""

    trace: Trace
    counters: list[dict[str, Any]]
    events: list[dict[str, Any]]
    found: dict[str, dict[str, Any]]
    found_later: dict[str, dict[str, Any]]
    graph: dict[str, Any]
    joined: list[dict[str, Any]]
    dropped: dict[str, int]
    close_s: float
    faults: dict[str, str]

    def rows(self, entity: str, name: str, direction: str | None = None) -> list[dict[str, Any]]:
        """Of one counter."""
        return [r for r in self.counters if (r["entity"], r["name"], r["direction"]) == (entity, name, direction)]

    def of(self, entity: str, name: str, direction: str | None = None) -> list[int | float | str]:
        """Values, or statuses where there is none, in order of time, without repeats."""
        told: list[int | float | str] = []
        for r in self.rows(entity, name, direction):
            value = r["value_int"] if r["value_int"] is not None else r["value_float"]
            assert (value is None) == (r["status"] != "ok"), r
            told += [v] if (v := r["status"] if value is None else value) not in told[-1:] else []
        return told

    def column(self, column: str, entity: str, name: str, direction: str | None = None) -> list[Any]:
        """Another column of these rows, without repeats."""
        told = [r[column] for r in self.rows(entity, name, direction)]
        return [v for i, v in enumerate(told) if not i or v != told[i - 1]]

    def said(self, kind: str) -> list[str]:
        """Details of the events of a kind."""
        return [e["detail"] for e in self.events if e["kind"] == kind]


def environment(folder: Path, control: Path) -> dict[str, str]:
    """Of a process that finds the stub as its driver's library."""
    return os.environ | {"LD_LIBRARY_PATH": str(folder), "HOPTRACE_NVML_STUB": str(control)}


def capture(tmp: Path, lines: dict[str, str], *steps: dict[str, Any], folder: Path | None = None, **order: Any) -> Captured:
    """Capture these steps, in a process of its own; ``order`` goes to :mod:`support.nvml_capture`."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py (the extra `nvidia`)")
    out, asked = tmp / "t.trace", tmp / "order.json"
    asked.write_text(json.dumps({"out": str(out), "lines": lines, "steps": list(steps) or [{}], **order}))
    env = environment(folder or compiled(), tmp / "gpus")
    done = subprocess.run(
        [sys.executable, _HERE / "nvml_capture.py", asked], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    trace = hoptrace.open(out)
    counters = sorted(trace.table("counters").collect().to_dicts(), key=lambda r: r["time_ns"])
    events = sorted(trace.table("events").collect().to_dicts(), key=lambda r: r["time_ns"])
    return Captured(trace, counters, events, dropped=trace.manifest.rows_dropped, **told)
