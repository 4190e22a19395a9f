"""Cuts a recorded run down to what tests need: ``python benchmarks/fidelity/keep.py RUN.trace INTO.trace``.

Kept are requests, stays, steps and who was in them; of the manifest the server, without paths, addresses and process numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hoptrace
from hoptrace.manifest import Manifest
from hoptrace.reader import Trace
from hoptrace.writer import TraceWriter

TABLES = ("requests", "stages", "steps", "residency")
_SETTINGS = (
    "max_num_batched_tokens", "max_num_seqs", "scheduling_policy", "chunked_prefill", "long_prefill_token_threshold",
    "async_scheduling", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "dtype", "device",
    "num_gpu_blocks_override", "step_source", "kv_role", "kv_connector",
)  # fmt: skip


def keep(run: Trace, path: Path) -> None:
    """Write what tests need of ``run`` at ``path``."""
    told = run.manifest
    servers = [
        s.model_copy(
            update={
                "url": None, "pid": None, "model_path": None, "host": None,
                "config": {k: v for k, v in s.config.items() if k in _SETTINGS},
            }
        )
        for s in told.servers
    ]  # fmt: skip
    manifest = Manifest(
        origin=told.origin, title=path.stem, created_utc=told.created_utc, utc_offset_ns=told.utc_offset_ns, servers=servers
    )
    with TraceWriter(path, manifest, background=False) as writer:
        for name in TABLES:
            writer.append_arrow(name, run.table(name).collect().to_arrow())


if __name__ == "__main__":
    keep(hoptrace.open(sys.argv[1]), Path(sys.argv[2]))
