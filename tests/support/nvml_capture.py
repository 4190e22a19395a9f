"""Run by tests in a process of its own, with the stub on LD_LIBRARY_PATH: a capture of what the stub's file tells, step by step.

The file given as argument says where to write, what the stub's lines are in each step, and whom not to wait for. Everything
between is what a capture uses: nvidia-ml-py, the sources, the station, the writer; only their beats are shortened.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hoptrace.collectors.hardware import nvidia
from hoptrace.collectors.hardware.listener import Found as Process
from hoptrace.collectors.hardware.nvidia import events, gpus, per_gpu, seat
from hoptrace.collectors.hardware.nvidia.gpm import GpmSource
from hoptrace.collectors.hardware.nvidia.state import StateSource
from hoptrace.collectors.hardware.nvidia.topology import joined
from hoptrace.collectors.hardware.nvidia.window import WindowSource
from hoptrace.collectors.hardware.source import Asked, Roots, Server
from hoptrace.collectors.hardware.station import Running, Station
from hoptrace.collectors.hardware.topology.discover import discover
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

_PATIENCE_S = 15.0


def main(order: dict[str, Any]) -> dict[str, Any]:
    """Capture; gives what the probes found, first and after the end, and how long the end took."""
    StateSource.every_s = WindowSource.every_s = 0.05
    GpmSource.every_s = 0.12
    seat._FIRST_REST_S, seat._LONGEST_REST_S = 0.05, 0.2
    events._WAIT_MS, events._FIRST_REST_S, events._LONGEST_REST_S = 60, 0.05, 0.1
    events._HANGS_S = gpus._HANGS_S = per_gpu._HANGS_S = order.get("hangs_s", 5.0)
    lines: dict[str, str] = order["lines"]
    _write(lines)
    servers = [Server("s", lambda: Process(os.getpid()))] if order.get("own_server") else []
    roots = Roots(sys=Path(order.get("sys", "/sys")), nvml=order.get("library"))
    graph = discover(roots) if order.get("graph") else {}
    manifest = Manifest(origin="recorded", platform=order.get("platform", graph))
    with TraceWriter(Path(order["out"]), manifest, background=False) as writer:
        sources = list(nvidia.sources(Asked(roots, servers)))
        station = Station(writer, "h", sources, order.get("every_s", 0.02), None)
        found = {n: asdict(f) for n, f in station.probe().items()}
        station.start()
        for step in order["steps"]:
            lines = {k: v for k, v in (lines | step.get("lines", {})).items() if v is not None}
            _write(lines)
            but = step.get("but", [])
            if step.get("alive"):
                _wait(lambda: all(s._seat.status == "ok" for s in sources if isinstance(s, per_gpu.PerGpu)), "GPUs that are back")
            _sampled([r for r in station.running if r.found and r.found.available and not any(b in r.source.name for b in but)])
            time.sleep(step.get("sleep_s", 0.0))
        begun = time.monotonic()
        station.close()
        took_s = time.monotonic() - begun
    return {
        "found": found,
        "found_later": {s.name: asdict(s.probe()) for s in sources if found[s.name]["status"] != "ok"},
        "graph": graph,
        "joined": [asdict(g) for g in joined(roots)] if order.get("graph") else [],
        "close_s": took_s,
        "faults": {r.source.name: r.last_error for r in station.running if r.faults},
    }


def _write(lines: dict[str, str]) -> None:
    path = Path(os.environ["HOPTRACE_NVML_STUB"])
    new = path.with_suffix(".new")
    new.write_text("".join(f"{k}={v}\n" for k, v in lines.items()).replace("{pid}", str(os.getpid())))
    new.replace(path)


def _sampled(running: list[Running]) -> None:
    """Wait until each has begun and ended a sample since."""
    before = [(r, r.samples) for r in running]
    _wait(lambda: all(r.samples >= n + 2 for r, n in before), lambda: [r.source.name for r, n in before if r.samples < n + 2])


def _wait(done: Callable[[], bool], what: object) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not done():
        if time.monotonic() > until:
            raise SystemExit(f"waited in vain for {what() if callable(what) else what}")
        time.sleep(0.005)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))), flush=True)
    os._exit(0)  # a call that hangs keeps no process
