"""How long the whole `hoptrace replay` takes, and how much memory: a request log read, replayed, and every table written.

The workload of ``replay_rate.py`` (its module says what it is), 1,000,000 requests unless fewer are asked for; once without rows
of `tokens`, once with all of them. Run: ``python benchmarks/replay_scale.py [REQUESTS] [--policy P] [--set KEY=VALUE ...]``.
Seconds are wall-clock, memory is the peak of the command's process; the kernel has been compiled before.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
from support.azure_requests import SERVER, requests

import hoptrace
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

_MIB = 1 << 20


def main(n: int, options: list[str]) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".replay_scale-") as folder:
        log, small = Path(folder) / "log.trace", Path(folder) / "small.trace"
        for path, count in ((small, 1000), (log, n)):
            with TraceWriter(path, Manifest(origin="imported", servers=[SERVER]), background=False) as w:
                w.append_arrow("requests", requests(count).to_arrow())
        _run(small, Path(folder) / "compiled.trace", options)
        for words, more in (("without token rows", ["--no-tokens"]), ("with all token rows", [])):
            out = Path(folder) / "out.trace"
            seconds, cpu, peak = _run(log, out, [*more, *options])
            size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
            print(f"replay of {n:,} requests, {words}: {seconds:.1f} s")
            print(f"replay of {n:,} requests, {words}, CPU: {cpu:.1f} s")
            print(f"replay of {n:,} requests, {words}, peak memory: {peak / _MIB:,.0f} MiB")
            print(f"replay of {n:,} requests, {words}, on disk: {size / _MIB:,.0f} MiB")
            for name in ("steps", "residency", "waits", "moves", "tokens"):
                rows = sum(pq.read_metadata(p).num_rows for p in hoptrace.open(out).files(name) or [])
                print(f"replay of {n:,} requests, {words}, rows of {name}: {rows:,} rows")
            shutil.rmtree(out)


def _run(log: Path, out: Path, options: list[str]) -> tuple[float, float, int]:
    """The command in a process of its own: (seconds, CPU seconds, peak bytes)."""
    command = [sys.executable, "-m", "hoptrace", "replay", str(log), "--cost", "fixed:50,12", "-q", "-o", str(out), *options]
    start = time.perf_counter()
    child = os.posix_spawn(sys.executable, command, os.environ)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    # Linux counts in KiB.
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


if __name__ == "__main__":
    arguments = sys.argv[1:]
    count = int(arguments.pop(0).replace(",", "").replace("_", "")) if arguments and arguments[0][0].isdigit() else 1_000_000
    main(count, arguments)
