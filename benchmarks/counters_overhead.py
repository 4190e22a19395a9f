"""What counting costs: CPU per 1,000 samples of each source that this machine has, and all of them at 10 Hz beside a server.

The server is a process of its own with ``--threads`` threads that wake and sleep (what the per-thread sources cost goes by their
number). Sources run as in a capture, in the threads that they have there; what is told is the CPU time of those, and beside it
the whole process's (that includes writing the trace).

Prints ``NAME: VALUE UNIT`` lines. Run it on a quiet machine: ``python benchmarks/counters_overhead.py``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hoptrace.collectors.hardware import catalog
from hoptrace.collectors.hardware.listener import Found
from hoptrace.collectors.hardware.source import Asked, Server
from hoptrace.collectors.hardware.station import Station
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

_SERVER = """
import threading, time
def work():
    while True:
        time.sleep(0.01)
for _ in range({threads}):
    threading.Thread(target=work, daemon=True).start()
print("up", flush=True)
time.sleep(1e6)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=24, help="threads of the server that is looked at")
    parser.add_argument("--every", type=float, default=0.1, help="seconds between two samples")
    parser.add_argument("--tracepoints", choices=["thread", "cpu"])
    a = parser.parse_args()
    server = subprocess.Popen([sys.executable, "-c", _SERVER.format(threads=a.threads)], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    asked = Asked(servers=[Server("server", partial(Found, server.pid))], tracepoints=a.tracepoints)
    with ExitStack() as stack:
        stack.callback(server.kill)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        writer = stack.enter_context(TraceWriter(Path(folder) / "t.trace", Manifest(origin="recorded")))
        station = Station(writer, "benchmark", list(catalog.sources(asked)), a.every, None)
        station.probe()
        station.start()
        time.sleep(1)  # imports and the first look at everything are the start's cost
        before, handed, began = time.process_time(), station.hand_over_cpu_ns, time.monotonic()
        time.sleep(a.seconds)
        cpu_s, wall_s = time.process_time() - before, time.monotonic() - began
        handed = station.hand_over_cpu_ns - handed
        station.close()
    total = 0.0
    for run in station.running:
        if run.opened and run.samples:
            total += run.cpu_ns / 1e9
            ms = run.cpu_ns / 1e6 / run.samples * 1e3
            print(f"{run.source.name}, every {run.every_s:g} s: {ms:,.0f} ms of CPU per 1,000 samples")
    print(f"all sources, at {1 / a.every:g} Hz: {total / (wall_s + 1) * 100:.2f} % of one core")
    print(f"handing rows over to the writer: {handed / 1e9 / wall_s * 100:.2f} % of one core")
    print(f"the whole process, trace written: {cpu_s / wall_s * 100:.2f} % of one core")
    print(f"rows: {sum(r.sink.rows for r in station.running) / wall_s:,.0f} rows/s")


if __name__ == "__main__":
    main()
