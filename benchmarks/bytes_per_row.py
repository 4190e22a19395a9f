"""Size of a token row on the disk, and how many rows a second the writer takes.

A million rows as a proxy sees them: replies of about 200 tokens, overlapping, 12 ms ± 1.5 ms between tokens, handed
over in the order of time to a live writer, then closed. Run: ``python benchmarks/bytes_per_row.py [ROWS]``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hoptrace
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

_BATCH = 2_000  # rows handed over at once: about what a busy proxy collects between two flushes
_WAIT_AT = 500_000  # the writer drops rows beyond a million in its buffer; a benchmark must not outrun it


def rows(n: int, seed: int = 1) -> list[dict[str, Any]]:
    """``n`` token rows in the order of time."""
    rng = np.random.default_rng(seed)
    requests = n // 200 + 1
    start_ns = 1_796_028_289_107_138_469 + np.sort(rng.integers(0, 600_000_000_000, requests))
    lengths = rng.poisson(200, requests)
    request = np.repeat(np.arange(requests), lengths)
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    index = np.arange(lengths.sum()) - first
    gaps = rng.normal(12e6, 1.5e6, lengths.sum()).astype(np.int64).clip(100_000)
    total = np.cumsum(gaps)
    time_ns = np.repeat(start_ns, lengths) + total - total[first]
    order = np.argsort(time_ns, kind="stable")[:n]
    return [
        {
            "request": r, "sequence": 0, "index": i, "time_ns": t, "count": 1, "coalesced": False, "vantage": "proxy",
            "source": "proxy",
        }
        for r, i, t in zip(request[order].tolist(), index[order].tolist(), time_ns[order].tolist(), strict=True)
    ]  # fmt: skip


def batches(all_rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for at in range(0, len(all_rows), _BATCH):
        yield all_rows[at : at + _BATCH]


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    tokens = rows(n)
    n = len(tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.trace"
        begin = time.perf_counter()
        writer = TraceWriter(path, Manifest(origin="recorded"))
        for i, batch in enumerate(batches(tokens)):
            writer.append("tokens", batch)
            if i * _BATCH % _WAIT_AT == 0:
                writer.flush()
        handed = time.perf_counter()
        writer.close()
        closed = time.perf_counter()
        size = sum(p.stat().st_size for p in (path / "tokens").iterdir())
        stored = hoptrace.open(path).rows("tokens")
        if stored != n:
            sys.exit(f"{n - stored} rows are missing")
    print(f"token rows: {size / n:.2f} bytes per row")
    print(f"writer: {n / (closed - begin):,.0f} rows/s")
    print(f"writer, handing over: {n / (handed - begin):,.0f} rows/s")


if __name__ == "__main__":
    main()
