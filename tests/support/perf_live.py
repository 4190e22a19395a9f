"""Run by tests/test_hw_perf.py in a mount namespace of its own: a program makes a known number of calls, the sources count them.

Prints the last value of each counter of the program as JSON: {entity: {name: value}}.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import hoptrace
from hoptrace.collectors.hardware.listener import Found
from hoptrace.collectors.hardware.perf import sources
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Asked, Server
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

PROGRAM = """
import array, ctypes, fcntl, os, select, sys, termios, threading
libc = ctypes.CDLL(None)
r, w = os.pipe()
def work():
    for _ in range(700):
        libc.sched_yield()
    for _ in range(300):
        libc.poll(0, 0, 0)
    buffer = array.array("i", [0])
    for _ in range(200):
        fcntl.ioctl(r, termios.FIONREAD, buffer)
def moves():
    cpus = sorted(os.sched_getaffinity(0))
    for i in range(100):
        os.sched_setaffinity(0, {cpus[i % len(cpus)]})
sys.stdin.readline()
worker, mover = threading.Thread(target=work), threading.Thread(target=moves)
for t in (worker, mover):
    t.start()
for t in (worker, mover):
    t.join()
print("done", flush=True)
sys.stdin.readline()
"""


def main() -> None:
    if ctypes.CDLL(None, use_errno=True).mount(b"nodev", b"/sys/kernel/tracing", b"tracefs", 0, None):
        print(json.dumps({"cannot mount": os.strerror(ctypes.get_errno())}))
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdin is not None and program.stdout is not None
    mode = sys.argv[1]
    asked = Asked(servers=[Server("s", partial(Found, program.pid))], tracepoints=mode)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        with TraceWriter(Path(folder) / "t.trace", Manifest(origin="recorded"), background=False) as writer:
            time.sleep(0.3)  # until it waits for its line
            running = []
            for source in sources(asked):
                found = source.probe()
                if not found.available:
                    continue
                sink = Sink(writer, "h", source.name)
                source.open(sink)
                source.sample(sink)
                running.append((source, sink))
            program.stdin.write(b"go\n")
            program.stdin.flush()
            # Its threads are born within 0.1 s or so and are to be seen: as often as it takes.
            os.set_blocking(program.stdout.fileno(), False)
            while not program.stdout.read():
                for source, sink in running:
                    source.sample(sink)
            for source, sink in running:
                source.sample(sink)
            program.stdin.close()
            program.wait()
            for source, sink in running:
                source.sample(sink)
                source.close()
                sink.settle()
                sink.flush()
        rows = hoptrace.open(Path(folder) / "t.trace").table("counters").collect().sort("time_ns").to_dicts()
    told: dict[str, dict[str, int]] = {}
    for r in rows:
        if r["value_int"] is not None:
            told.setdefault(r["entity"], {})[r["name"]] = r["value_int"]
    lost = sorted({r["name"] for r in rows if r["status"] == "lost"})
    print(json.dumps({"program": program.pid, "counters": told, "lost": lost}))


if __name__ == "__main__":
    main()
