"""How many rows a second an import reads, and how much memory it takes.

Each kind is written as a synthetic file and imported in a process of its own, whole: parsed, checked, counted, stored as Parquet.
Run: ``python benchmarks/import_rate.py [ROWS] [KIND ...]`` (2,000,000 rows and all kinds unless told; a tenth as many of those
with block hashes).
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hoptrace.collectors.files.base import Options
from hoptrace.collectors.files.run import import_files

_CHUNK = 100_000


def _azure(rng: np.random.Generator, first: int, n: int) -> list[str]:
    prompt, output = rng.integers(1, 8_000, n), rng.integers(1, 1_000, n)
    times = (first + np.arange(n)) * 1_234
    return [
        f"2024-05-{10 + t // 86_400_000_000:02d} {t // 3_600_000_000 % 24:02d}:{t // 60_000_000 % 60:02d}:"
        f"{t // 1_000_000 % 60:02d}.{t % 1_000_000:06d}+00:00,{p},{o}\n"
        for t, p, o in zip(times.tolist(), prompt.tolist(), output.tolist(), strict=True)
    ]


def _lines(rng: np.random.Generator, first: int, n: int) -> list[str]:
    prompt, output = rng.integers(1, 8_000, n), rng.integers(1, 1_000, n)
    return [
        f'{{"timestamp": {first + i}, "input_length": {p}, "output_length": {o}}}\n'
        for i, (p, o) in enumerate(zip(prompt.tolist(), output.tolist(), strict=True))
    ]


def _hashes(rng: np.random.Generator, first: int, n: int) -> list[str]:
    """24 blocks a prompt, as in Mooncake's conversation trace; the first third of them seen before."""
    prompt, output = rng.integers(11_800, 12_289, n), rng.integers(1, 1_000, n)
    shared = rng.integers(0, 1_000, n)
    return [
        f'{{"timestamp": {first + i}, "input_length": {p}, "output_length": {o}, "hash_ids": '
        f"{[*range(8 * s, 8 * s + 8), *range(10_000 + 16 * (first + i), 10_016 + 16 * (first + i))]}}}\n"
        for i, (p, o, s) in enumerate(zip(prompt.tolist(), output.tolist(), shared.tolist(), strict=True))
    ]


def _log(rng: np.random.Generator, first: int, n: int) -> list[str]:
    prompt, output, ms = rng.integers(1, 8_000, n), rng.integers(1, 1_000, n), rng.integers(10, 90_000, n)
    return [
        f'{{"ts": "2026-05-10T12:{(first + i) // 60 % 60:02d}:{(first + i) % 60:02d}.5Z", "duration": {d}, '
        f'"usage": {{"in": {p}, "out": {o}}}, "status": 200}}\n'
        for i, (p, o, d) in enumerate(zip(prompt.tolist(), output.tolist(), ms.tolist(), strict=True))
    ]


_MAP = "arrival=ts:iso8601,duration_ms=duration,prompt_tokens=usage.in,output_tokens=usage.out,status=status"
# name -> (what makes its lines, header, share of the rows, --map)
KINDS: dict[str, tuple[Callable[[np.random.Generator, int, int], list[str]], str, float, str | None]] = {
    "azure csv": (_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n", 1.0, None),
    "jsonl": (_lines, "", 1.0, None),
    "jsonl, 24 block hashes a row": (_hashes, "", 0.1, None),
    "mapped jsonl": (_log, "", 1.0, _MAP),
}


def _write(path: Path, kind: str, rows: int) -> None:
    make, header, _, _ = KINDS[kind]
    rng = np.random.default_rng(1)
    with path.open("w", encoding="ascii") as f:
        f.write(header)
        for first in range(0, rows, _CHUNK):
            f.writelines(make(rng, first, min(_CHUNK, rows - first)))


def _measure(path: Path, kind: str) -> None:
    """In a process of its own: print the import's figures."""
    options = Options(mapping=KINDS[kind][3])
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin, cpu = time.perf_counter(), time.process_time()
        done = import_files([path], Path(folder) / "x.trace", options=options)
        seconds, used = time.perf_counter() - begin, time.process_time() - cpu
    if done.rejected or done.written != done.read:
        sys.exit(f"{kind}: {done.reasons}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"import, {kind}: {done.read / seconds:,.0f} rows/s")
    print(f"import, {kind}: {path.stat().st_size / seconds / 1e6:,.0f} MB/s")
    print(f"import, {kind}: {used / done.read * 1e6:.2f} CPU-µs/row")
    print(f"import, {kind}, peak memory: {peak / 1024:,.0f} MiB")
    print(f"import, {kind}, peak memory over an idle import: {(peak - before) / 1024:,.0f} MiB")


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        _measure(Path(sys.argv[2]), sys.argv[3])
        return
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000
    with tempfile.TemporaryDirectory() as folder:
        for kind in sys.argv[2:] or KINDS:
            path = Path(folder) / "file"
            _write(path, kind, int(rows * KINDS[kind][2]))
            # Twice: the first run compiles and fills the page cache.
            small = Path(folder) / "small"
            _write(small, kind, 1_000)
            subprocess.run([sys.executable, __file__, "--measure", str(small), kind], check=True, stdout=subprocess.DEVNULL)
            subprocess.run([sys.executable, __file__, "--measure", str(path), kind], check=True)


if __name__ == "__main__":
    main()
