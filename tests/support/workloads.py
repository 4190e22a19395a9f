"""Workloads and policies for tests of the replay, and a capture whose every step is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace, open_trace
from hoptrace.replay.plan import EngineSpec
from hoptrace.replay.workload import Workload
from hoptrace.writer import TraceWriter

MS = 1_000_000


def make(*requests: tuple[int, int, int] | tuple[int, int, int, list[int]], block: int = 4, **more: Any) -> Workload:
    """A workload from (arrival ns, prompt, output[, block ids]); blocks are of ``block`` tokens, the last one may be partial."""
    blocks = [list(r[3]) if len(r) > 3 else [] for r in requests]
    ids = [b for bs in blocks for b in bs]
    ends = [min((j + 1) * block, r[1]) for r, bs in zip(requests, blocks, strict=True) for j in range(len(bs))]
    least = np.full(max(ids, default=-1) + 1, block, dtype=np.int64)
    for r, bs in zip(requests, blocks, strict=True):
        for j, b in enumerate(bs):
            least[b] = min(least[b], min((j + 1) * block, r[1]) - j * block)
    return Workload(
        request=np.arange(len(requests), dtype=np.int64),
        arrival_ns=np.array([r[0] for r in requests], dtype=np.int64),
        prompt_tokens=np.array([r[1] for r in requests], dtype=np.int64),
        output_tokens=np.array([r[2] for r in requests], dtype=np.int64),
        block_ptr=np.cumsum([0, *(len(b) for b in blocks)]).astype(np.int64),
        block_id=np.array(ids, dtype=np.int64),
        block_end=np.array(ends, dtype=np.int64),
        block_tokens=least,
        **more,
    )


def policy(**changes: Any) -> EngineSpec:
    """An engine: unlimited, chunked, without cache, but for ``changes``."""
    return EngineSpec("engine", **changes)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Up to twelve small requests, some of which begin alike."""
    arrival, rows = 0, []
    for _ in range(draw(st.integers(1, 12))):
        arrival += draw(st.integers(0, 40)) * MS
        prompt = draw(st.integers(1, 30))
        # Blocks as a tree: the id of a block depends on the way to it, as chained hashes do.
        node, blocks = 0, []
        for _ in range(prompt // 4):
            node = (3 * node + draw(st.integers(1, 2))) % 997
            blocks.append(node)
        rows.append((arrival, prompt, draw(st.integers(1, 15)), blocks))
    return make(*rows)


@st.composite
def policies(draw: st.DrawFn) -> EngineSpec:
    """Any policy that can serve some of those requests."""
    cache = draw(st.sampled_from([None, "pool", "slot"]))
    slots = draw(st.integers(1, 5))
    return policy(
        max_sequences=slots if cache == "slot" else draw(st.sampled_from([None, slots])),
        max_batched_tokens=draw(st.sampled_from([None, 1, 3, 8, 40])),
        mode=draw(st.sampled_from(["mixed", "prefill_first"])),
        chunked_prefill=draw(st.booleans()),
        capacity_tokens=None if cache == "slot" else draw(st.sampled_from([None, 24, 40, 64, 100])),
        block_size_tokens=draw(st.sampled_from([1, 2, 4, 5])),
        cache=cache,
        cache_capacity_tokens=draw(st.sampled_from([None, 8, 20])) if cache == "pool" else None,
    )


def server(**changes: Any) -> Server:
    """A small server whose geometry is known."""
    base: dict[str, Any] = {
        "name": "toy", "engine": "vllm", "parameters": 1000, "weight_bytes": 2000, "layers": 2, "heads": 4, "kv_heads": 2,
        "head_size": 8, "kv_dtype": "f16", "max_sequences": 4, "max_batched_tokens": 64, "context_tokens": 4096,
        "kv_capacity_tokens": 16384, "block_size_tokens": 16, "prefix_caching": False,
    }  # fmt: skip
    return Server(**(base | changes))


def store(path: Path, tables: dict[str, Any], on: Server | None = None, *, origin: str = "recorded") -> Trace:
    """Write polars frames as a trace."""
    manifest = Manifest(origin=origin, servers=[on] if on else [])  # type: ignore[arg-type]
    with TraceWriter(path, manifest, background=False) as w:
        for name, frame in tables.items():
            if frame.height:
                w.append_arrow(name, frame.to_arrow())
    return open_trace(path)
