"""What NVIDIA's Dynamo mocker replay (ai-dynamo-runtime on PyPI, Apache-2.0) makes of the reference traces: references for tests.

Run with the Python of an environment that has it (written with 1.6.1):
``python benchmarks/support/ref_dynamo_mocker.py tests/data/reference``. It reads r5_200.csv and mooncake_slice.jsonl there and
writes dynamo_mocker/NAME.csv, times in ms. Its step costs 50 ms if it holds any prompt token plus 12 ms if it holds any decoder.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("DYN_LOG", "error")

from dynamo import _core

FIXED = {"type": "fixed", "prefill_ms": 50.0, "decode_ms": 12.0}
ENGINE: dict[str, Any] = {
    "num_gpu_blocks": 7000, "block_size": 64, "max_num_seqs": 128, "max_num_batched_tokens": 2048, "enable_prefix_caching": False,
    "timing_model": FIXED,
}  # fmt: skip
LINK = {"kv_transfer_bytes_per_token": 131_072, "kv_transfer_bandwidth": 10.0}
COLUMNS = (
    "request", "arrival_time_ms", "input_length", "output_length", "first_token_ms", "last_token_ms", "reused_input_tokens",
    "prefill_worker_idx", "decode_worker_idx", "source_held_ms", "destination_reserved_ms", "destination_activated_ms",
)  # fmt: skip


def replay(trace: Path, trace_block: int, **arguments: Any) -> list[dict[str, Any]]:
    """One row a request, in the order of the trace (found again by timestamp and lengths: the report has no numbers)."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        _core.run_mocker_trace_replay([str(trace)], trace_block_size=trace_block, report_jsonl_path=str(report), **arguments)
        rows: list[dict[str, Any]] = [json.loads(line) for line in report.read_text().splitlines()]
    speed = arguments.get("arrival_speedup_ratio", 1.0)
    asked = [json.loads(line) for line in trace.read_text().splitlines()]
    keys = [(round(q["timestamp"] / speed, 3), q["input_length"], q["output_length"]) for q in asked]
    assert len(set(keys)) == len(keys), "two requests alike"
    place = {k: i for i, k in enumerate(keys)}
    for r in rows:
        r["request"] = place[(round(r["arrival_time_ms"], 3), r["input_length"], r["requested_output_length"])]
    return sorted(rows, key=lambda r: int(r["request"]))


def main(folder: Path) -> None:
    """Write all scenarios."""
    out = folder / "dynamo_mocker"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        plain = Path(made) / "r5_200.jsonl"
        lines, used = [], 0
        for row in csv.DictReader((folder / "r5_200.csv").open()):
            prompt = int(row["num_prefill_tokens"])
            blocks = -(-prompt // 512)
            ids = list(range(used, used + blocks))
            used += blocks
            at = float(row["arrived_at"]) * 1000
            output = int(row["num_decode_tokens"])
            lines.append({"timestamp": at, "input_length": prompt, "output_length": output, "hash_ids": ids})
        plain.write_text("".join(json.dumps(x) + "\n" for x in lines))

        def pair(prefills: int, decodes: int, speed: float) -> list[dict[str, Any]]:
            sides = ({"engine": {**ENGINE, **LINK, "worker_type": t}} for t in ("prefill", "decode"))
            return replay(
                plain, 512, **dict(zip(("prefill_engine_args", "decode_engine_args"), sides, strict=True)),
                num_prefill_workers=prefills, num_decode_workers=decodes, arrival_speedup_ratio=speed,
            )  # fmt: skip

        def prefix(blocks: int, workers: int = 1, **router: Any) -> list[dict[str, Any]]:
            more = {"enable_prefix_caching": True, "num_gpu_blocks": blocks, "block_size": 512, "max_num_batched_tokens": 8192}
            engine = {"engine": {**ENGINE, **more}}
            return replay(folder / "mooncake_slice.jsonl", 512, extra_engine_args=engine, num_workers=workers, **router)

        def prompts_first(chunk: int) -> list[dict[str, Any]]:
            rules = {
                "schedule_policy": "fifo",
                "max_prefill_tokens": 16384,
                "chunked_prefill_size": chunk,
                "clip_max_new_tokens": 4096,
            }
            sglang = {**rules, "schedule_conservativeness": 1.0}
            more = {
                "backend": "sglang",
                "sglang": sglang,
                "num_gpu_blocks": 448_000,
                "block_size": 1,
                "max_num_batched_tokens": 8192,
            }
            return replay(plain, 512, extra_engine_args={"engine": {**ENGINE, **more}})

        found = {
            "one_worker": replay(plain, 512, extra_engine_args={"engine": ENGINE}),
            "three_workers": replay(plain, 512, extra_engine_args={"engine": ENGINE}, num_workers=3, arrival_speedup_ratio=3.0),
            "pair": pair(1, 1, 1.0),
            "two_to_one": pair(2, 1, 2.0),
            "prompts_first": prompts_first(8192),
            "prompts_first_in_chunks": prompts_first(1024),
            "prefix": prefix(200_000),
            "prefix_evictions": prefix(3000),
            "prefix_four_workers": prefix(2000, 4),
            "prefix_kv_router": prefix(2000, 4, router_mode="kv_router", router_config=_core.KvRouterConfig()),
        }
    for name, rows in found.items():
        columns = [c for c in COLUMNS if any(r[c] is not None for r in rows)]
        with (out / f"{name}.csv").open("w", newline="") as f:
            writer = csv.writer(f, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([[round(r[c], 6) if isinstance(r[c], float) else r[c] for c in columns] for r in rows])
        print(name, len(rows), (out / f"{name}.csv").stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
