"""How long the report takes on long traces, and how much memory: seconds and peak resident bytes by token rows.

The trace is that of a continuous-batching engine, simulated step by step: 64 places, 2,048 tokens a step, chunked prefill beside
decoders, first come first served, Poisson arrivals with bursts at nine tenths of what it can serve, about 200 tokens of output a
request; a proxy's stamps, moves and waits around it, and gauges once a second. Nothing in it is shared between scales but the
seed. Run: ``python benchmarks/report_scale.py [TOKEN_ROWS|TRACE ...] [--folder F]`` (by default 1 and 10 million;
200 million is 1,000,000 requests and takes some 1 GB of disk). Each figure is of a fresh process of ``hoptrace report T -q``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit

import hoptrace
from hoptrace.manifest import Manifest, Server
from hoptrace.writer import TraceWriter

_START_NS = 1_700_000_000_000_000_000
_OUTPUT = 200
_SLOTS, _BUDGET = 64, 2048
_KV_TOKENS = 400_000
_SERVER = Server(
    name="engine", engine="vllm", model="synthetic", max_sequences=_SLOTS, max_batched_tokens=_BUDGET, parameters=8_030_261_248,
    weight_bytes=16_060_522_496, layers=32, kv_heads=8, heads=32, head_size=128, hidden_size=4096, kv_dtype="bfloat16",
    kv_capacity_tokens=_KV_TOKENS, block_size_tokens=16, context_tokens=8192,
)  # fmt: skip
_CHUNK = 1 << 20

Ints = np.ndarray[Any, np.dtype[np.int64]]


@njit(cache=True)
def _serve(arrival, prompt, output, noise, steps, chunks):  # type: ignore[no-untyped-def]
    """Run the engine. ``steps`` int64[·, 10] and ``chunks`` int64[·, 5] are filled; returns rows used of both."""
    n = len(arrival)
    # By step, modulo the longest output: how many end then, and the context that leaves with them.
    ring = 1 << 13
    ends, leaves = np.zeros(ring, np.int64), np.zeros(ring, np.int64)
    t = arrival[0]
    head, tail, done = 0, 0, 0  # requests head … tail are in prefill
    computed = np.zeros(n, np.int64)
    decoding, context, held = 0, 0, 0
    i, c, arrived = 0, 0, 0
    while done < n:
        while arrived < n and arrival[arrived] <= t:
            arrived += 1
        if decoding == 0 and head == tail and tail == arrived:
            t = arrival[arrived]
            continue
        left = 2048 - decoding
        tokens, before, requests = 0, 0, 0
        started = head
        at = head
        while left > 0:
            if at == tail:
                if tail == arrived or decoding + tail - head >= 64 or held + prompt[tail] + output[tail] > 400_000:
                    break
                held += prompt[tail] + output[tail]
                tail += 1
            share = min(left, prompt[at] - computed[at])
            chunks[c, 0], chunks[c, 1], chunks[c, 2], chunks[c, 3] = at, i, share, computed[at]
            c += 1
            before += computed[at]
            computed[at] += share
            tokens += share
            left -= share
            requests += 1
            if computed[at] == prompt[at]:
                at += 1
        us = 6000 + 45 * decoding + context / 180 + tokens * 22 + before / 400
        end = t + np.int64(us * 1000 * noise[i & 0xFFFFF])
        steps[i, 0], steps[i, 1], steps[i, 2], steps[i, 3], steps[i, 4] = t, end, requests, tokens, before
        steps[i, 5], steps[i, 6], steps[i, 7], steps[i, 8] = decoding, context, decoding + tail - head, arrived - tail
        steps[i, 9] = held
        context += decoding
        # Those whose last token this was.
        decoding -= ends[i % ring]
        context -= leaves[i % ring]
        held -= leaves[i % ring]
        done += ends[i % ring]
        ends[i % ring] = leaves[i % ring] = 0
        for r in range(started, at):
            if output[r] == 1:
                done += 1
                held -= prompt[r] + 1
            else:
                decoding += 1
                context += prompt[r] + 1
                last = (i + output[r] - 1) % ring
                ends[last] += 1
                leaves[last] += prompt[r] + output[r]
        head = at
        i += 1
        t = end + 250_000 + np.int64(150_000 * noise[(i * 7) & 0xFFFFF])
    return i, c


def write_trace(path: Path, token_rows: int) -> int:
    """Write the trace; returns its token rows, which are about those asked for."""
    rng = np.random.default_rng(4)
    n = max(1, token_rows // _OUTPUT)
    prompt = np.clip(rng.lognormal(6.3, 0.8, n), 8, 6000).astype(np.int64)
    output = np.clip(rng.gamma(2.2, _OUTPUT / 2.2, n), 1, 1900).astype(np.int64)
    rate = np.where((np.arange(n) // 400) % 5 == 0, 25.0, 17.5)
    arrival = _START_NS + np.cumsum(rng.exponential(1e9 / rate)).astype(np.int64)
    noise = rng.lognormal(0, 0.03, 1 << 20)
    steps = np.zeros((40 * n + 10_000, 10), np.int64)
    chunks = np.zeros((8 * n + 10_000, 5), np.int64)
    used, pieces = _serve(arrival, prompt, output, noise, steps, chunks)
    steps, chunks = steps[:used], chunks[:pieces]
    start, end = steps[:, 0].copy(), steps[:, 1].copy()
    last_chunk = np.flatnonzero(chunks[:, 3] + chunks[:, 2] == prompt[chunks[:, 0]])
    last_chunk = last_chunk[np.argsort(chunks[last_chunk, 0])]
    first_step = chunks[last_chunk, 1]
    _, begin = np.unique(chunks[:, 0], return_index=True)
    scheduled = start[chunks[begin, 1]]
    manifest = Manifest(origin="recorded", servers=[_SERVER], created_utc="2026-01-01T00:00:00+00:00")
    with TraceWriter(path, manifest, background=False) as w:
        _steps(w, steps, start, end)
        _residency(w, chunks, first_step, prompt, output)
        rows = _requests(w, rng, arrival, scheduled, end, first_step, prompt, output)
        _counters(w, steps, start)
        span = {"from_ns": int(arrival[0]), "to_ns": int(end[-1]) + 1_000_000_000, "source": "proxy", "server": "engine"}
        w.append("coverage", [{"table": t, **span} for t in ("requests", "stages", "tokens", "steps", "residency", "moves",
                                                             "waits", "counters")])  # fmt: skip
    return rows


def _append(w: TraceWriter, name: str, columns: dict[str, Any], rows: int) -> None:
    for a in range(0, rows, _CHUNK):
        m = min(_CHUNK, rows - a)
        data = {k: pa.repeat(v, m) if isinstance(v, str | int | bool) else pa.array(v[a : a + m]) for k, v in columns.items()}
        w.append_arrow(name, pa.table(data))


def _steps(w: TraceWriter, steps: Ints, start: Ints, end: Ints) -> None:
    names = ("prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens",
             "running", "waiting", "kv_used_tokens")  # fmt: skip
    columns = {n: steps[:, 2 + i] for i, n in enumerate(names)}
    numbers = np.arange(len(steps))
    _append(w, "steps", {
        "server": "engine", "dp_rank": 0, "pp_rank": 0, "step": numbers, "start_ns": start, "end_ns": end, **columns,
        "schedule_ns": (end - start) // 50, "update_ns": (end - start) // 80, "decode_tokens": columns["decode_requests"],
        "queued_prefill_requests": columns["waiting"], "queued_decode_requests": 0, "kv_capacity_tokens": _KV_TOKENS,
        "preempted": 0, "origin": "observed", "source": "vllm-plugin",
    }, len(steps))  # fmt: skip


def _residency(w: TraceWriter, chunks: Ints, first_step: Ints, prompt: Ints, output: Ints) -> None:
    several = np.flatnonzero(output > 1)
    request = np.concatenate([chunks[:, 0], several])
    first = np.concatenate([chunks[:, 1], first_step[several] + 1])
    last = np.concatenate([chunks[:, 1], first_step[several] + output[several] - 1])
    tokens = np.concatenate([chunks[:, 2], np.ones(len(several), np.int64)])
    context = np.concatenate([chunks[:, 3], prompt[several]])
    phase = np.concatenate([np.zeros(len(chunks), np.int8), np.ones(len(several), np.int8)])
    order = np.lexsort((first, request))
    for a in range(0, len(order), _CHUNK):
        o = order[a : a + _CHUNK]
        _append(w, "residency", {
            "request": request[o], "sequence": 0, "server": "engine", "dp_rank": 0, "first_step": first[o], "last_step": last[o],
            "phase": np.array(["chunk", "decode"])[phase[o]], "tokens_per_step": tokens[o], "context_at_start": context[o],
            "source": "vllm-plugin",
        }, len(o))  # fmt: skip


def _requests(w: TraceWriter, rng: np.random.Generator, arrival: Ints, scheduled: Ints, end: Ints, first_step: Ints,
              prompt: Ints, output: Ints) -> int:  # fmt: skip
    rows = 0
    n = len(arrival)
    block = 4096
    for a in range(0, n, block):
        r = np.arange(a, min(n, a + block))
        m = len(r)
        length = output[r]
        base = np.concatenate([[0], np.cumsum(length)])
        total = int(base[-1])
        index = np.arange(total) - np.repeat(base[:-1], length)
        seen = end[np.repeat(first_step[r], length) + index] + 200_000 + rng.integers(0, 400_000, total)
        # Now and then two leave together.
        joined = (rng.random(total) < 0.001) & (index > 0)
        seen[joined] = seen[np.flatnonzero(joined) - 1] + 15_000
        last, first = seen[base[1:] - 1], seen[base[:-1]]
        received = arrival[r]
        enqueued = np.minimum(received + rng.integers(200_000, 900_000, m), scheduled[r])
        finish = last + rng.integers(20_000, 90_000, m)
        _append(w, "tokens", {
            "request": np.repeat(r, length), "sequence": 0, "index": index, "time_ns": seen, "count": 1, "coalesced": joined,
            "vantage": "proxy", "source": "proxy",
        }, total)  # fmt: skip
        _append(w, "requests", {
            "request": r, "request_id": np.array([f"cmpl-{x:032x}" for x in r]), "model": "synthetic", "received_ns": received,
            "queued_ns": enqueued, "scheduled_ns": scheduled[r], "engine_first_token_ns": end[first_step[r]],
            "first_token_ns": first, "first_visible_ns": first, "last_token_ns": last, "finish_ns": finish,
            "arrival_ns": received, "arrival_of": "received", "prompt_tokens": prompt[r], "output_tokens": length,
            "max_tokens": 2048, "prompt_chars": prompt[r] * 4, "finish_reason": "stop", "hash_space": "benchmark",
            "prefix_blocks": list(rng.integers(-(1 << 62), 1 << 62, (m, 8))), "block_size": 16, "block_unit": "tokens",
            "source": "proxy",
        }, m)  # fmt: skip
        _append(w, "stages", {
            "request": r, "sequence": 0, "attempt": 0, "stage": 0, "server": "engine", "dp_rank": 0, "role": "both",
            "enqueued_ns": enqueued, "scheduled_ns": scheduled[r], "end_ns": end[first_step[r] + length - 1],
            "end_reason": "done", "cached_tokens": 0, "cached_device_tokens": 0, "source": "vllm-plugin",
        }, m)  # fmt: skip
        common = {"request": r, "server": "engine", "mechanism": "message", "payload_hops": 2, "basis": "counted",
                  "source": "proxy"}  # fmt: skip
        path_in = [["client-proxy", "proxy-server:engine"]] * m
        _append(w, "moves", {"start_ns": received, "end_ns": enqueued, "object": "prompt", "src": "client",
                             "dst": "server:engine", "path": path_in, "bytes": prompt[r] * 4 + 300, "transfers": 1,
                             **common}, m)  # fmt: skip
        _append(w, "moves", {"start_ns": first, "end_ns": last, "object": "tokens", "src": "server:engine", "dst": "client",
                             "path": [x[::-1] for x in path_in], "bytes": length * 240, "transfers": length,
                             **common}, m)  # fmt: skip
        _append(w, "waits", {"start_ns": received, "end_ns": received + 120_000, "request": r, "server": "engine",
                             "kind": "message", "on": "proxy", "count": 1, "basis": "counted", "source": "proxy"},
                m)  # fmt: skip
        rows += total
    return rows


def _counters(w: TraceWriter, steps: Ints, start: Ints) -> None:
    at = np.arange(int(start[0]), int(start[-1]), 1_000_000_000)
    i = np.searchsorted(start, at, side="right") - 1
    for name, column in (("vllm:num_requests_running", 7), ("vllm:num_requests_waiting", 8)):
        _append(w, "counters", {
            "time_ns": at, "uncertainty_ns": 1_000_000, "host": "h", "entity": "server:engine", "name": name,
            "value_float": steps[i, column].astype(np.float64), "semantics": "gauge", "status": "ok", "source": "metrics",
        }, len(at))  # fmt: skip


def measure(trace: Path) -> tuple[float, int]:
    """(seconds, peak resident bytes) of ``hoptrace report TRACE -q`` in a process of its own."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "hoptrace", "report", str(trace), "-q"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"hoptrace report {trace} gave exit code {process.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def main() -> None:
    """Make the traces (once, if a folder is given) and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what", nargs="*", default=["1000000", "10000000"], metavar="TOKEN_ROWS|TRACE", help="sizes to make, or traces there are"
    )
    parser.add_argument("--folder", type=Path, help="where the traces are kept; by default they are deleted when measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hoptrace-scale-") as scratch:
        folder = args.folder or Path(scratch)
        for what in args.what:
            if what.isdecimal():
                trace, name = folder / f"scale-{what}.trace", f"{int(what):,} token rows"
                if not trace.exists():
                    write_trace(trace, int(what))
            else:
                trace, name = Path(what), f"{Path(what).name}, {hoptrace.open(what).rows('tokens'):,} token rows"
            measure(trace)  # compiled code and files are in the caches from here on
            found = [measure(trace) for _ in range(2)]
            seconds, peak = min(s for s, _ in found), max(p for _, p in found)
            print(f"report -q, {name}: {seconds:.2f} s", flush=True)
            print(f"report -q, {name}, peak memory: {peak / 2**20:.0f} MiB", flush=True)
            if not args.folder and what.isdecimal():
                shutil.rmtree(trace)


if __name__ == "__main__":
    main()
