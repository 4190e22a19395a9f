"""Run by tests/test_hw_perf.py in a mount namespace of its own: threads do a known number of things, the sources count.

Prints, as JSON, the counters of each entity before the threads worked (`first`) and when the program had ended (`last`), and the
names of those that were lost then.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import hoptrace
from hoptrace.collectors.hardware import perf, processes
from hoptrace.collectors.hardware.listener import Found
from hoptrace.collectors.hardware.processes.process import ProcessSource
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Asked, Server
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

# The two threads work one after the other, so that neither waits for the interpreter's lock (whose waits are futex calls too).
PROGRAM = """
import array, ctypes, fcntl, mmap, os, platform, sys, termios, threading, time
libc = ctypes.CDLL(None)
FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
def works(r):
    word, buffer = ctypes.c_int(0), array.array("i", [0])
    for _ in range(400):
        libc.syscall(FUTEX, ctypes.byref(word), 1, 1, None, None, 0)  # FUTEX_WAKE of nobody
    for _ in range(700):
        libc.sched_yield()
    for _ in range(300):
        libc.poll(0, 0, 0)
    for _ in range(200):
        fcntl.ioctl(r, termios.FIONREAD, buffer)
    for _ in range(50):
        time.sleep(0.0001)
    pages = mmap.mmap(-1, 500 * mmap.PAGESIZE)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, len(pages), mmap.PAGESIZE):
        pages[at] = 1
def moves(r):
    cpus = sorted(os.sched_getaffinity(0))
    for i in range(100):
        os.sched_setaffinity(0, {cpus[i % len(cpus)]})
def thread(work):
    begin, done, end = os.pipe(), os.pipe(), os.pipe()
    def run():
        os.write(done[1], b"%d" % threading.get_native_id())
        os.read(begin[0], 1)
        work(begin[0])
        os.write(done[1], b"d")
        os.read(end[0], 1)
    t = threading.Thread(target=run)
    t.start()
    return t, begin[1], done[0], end[1], int(os.read(done[0], 20))
threads = [thread(works), thread(moves)]
print(*(t[4] for t in threads), flush=True)
sys.stdin.readline()
for _, begin, done, _, _ in threads:
    os.write(begin, b"x")
    os.read(done, 1)
print("done", flush=True)
sys.stdin.readline()
for t, _, _, end, _ in threads:
    os.write(end, b"x")
    t.join()
print("ended", flush=True)
sys.stdin.readline()
"""


class Watch:
    """The sources that are here, sampled by hand."""

    def __init__(self, asked: Asked, writer: TraceWriter) -> None:
        self._running: list[tuple[Any, Sink]] = []
        for source in (*processes.sources(asked), *perf.sources(asked)):
            if source.probe().available:
                sink = Sink(writer, "h", source.name)
                source.open(sink)
                self._running.append((source, sink))

    def sample(self) -> None:
        for source, sink in self._running:
            if isinstance(source, ProcessSource):
                source._threads_due_ns = 0  # as if a second had passed
            source.sample(sink)
            sink.settle()

    def close(self) -> None:
        for source, sink in self._running:
            source.close()
            sink.flush()


def main(mode: str) -> dict[str, Any]:
    if ctypes.CDLL(None, use_errno=True).mount(b"nodev", b"/sys/kernel/tracing", b"tracefs", 0, None):
        return {"cannot": f"mount tracefs: {os.strerror(ctypes.get_errno())}"}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdin is not None and program.stdout is not None
    asked = Asked(servers=[Server("s", partial(Found, program.pid))], tracepoints=mode)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        with TraceWriter(Path(folder) / "t.trace", Manifest(origin="recorded"), background=False) as writer:
            worker, mover = map(int, program.stdout.readline().split())
            watch = Watch(asked, writer)
            watch.sample()
            for _ in ("done", "ended"):
                program.stdin.write("\n")
                program.stdin.flush()
                program.stdout.readline()
                watch.sample()
            program.stdin.close()
            program.wait()
            watch.sample()
            watch.close()
        rows = hoptrace.open(Path(folder) / "t.trace").table("counters").collect().sort("time_ns").to_dicts()
    first: dict[str, dict[str, int]] = {}
    last: dict[str, dict[str, int]] = {}
    for r in rows:
        if r["value_int"] is not None:
            first.setdefault(r["entity"], {}).setdefault(r["name"], r["value_int"])
            last.setdefault(r["entity"], {})[r["name"]] = r["value_int"]
    lost = sorted({r["name"] for r in rows if r["status"] == "lost"})
    return {"program": program.pid, "worker": worker, "mover": mover, "first": first, "last": last, "lost": lost}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
