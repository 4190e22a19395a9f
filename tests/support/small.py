"""A small trace with everything in it, the same each time: for snapshots of what people read."""

from __future__ import annotations

from typing import Any

from support.memory import MemoryTrace

from hoptrace.manifest import CollectorInfo, Manifest, Server

__all__ = ["small_trace"]

_MS = 1_000_000
_SERVER = Server(
    name="s", engine="llama.cpp", model="toy", max_sequences=2, weight_bytes=96_000_000, layers=2, kv_heads=1, heads=1,
    head_size=64, kv_dtype="f16",
)  # fmt: skip


def small_trace(*, slower_ms: int = 0, name: str = "small", counters: bool = True) -> MemoryTrace:
    """Twelve requests on two slots, one failed and one unfinished. ``slower_ms`` is added to each step.

    A step takes 2 ms, 1 ms per decoding request and 0.5 ms per prompt token; 0.3 ms pass between steps.
    """
    rows: dict[str, list[dict[str, Any]]] = {
        t: [] for t in ("requests", "stages", "steps", "residency", "tokens", "moves", "waits", "counters")
    }
    waiting = [(i, i * 25 * _MS, 8 + 4 * (i % 3), 6 + 3 * (i % 4)) for i in range(12)]
    running: list[dict[str, Any]] = []
    clock, step = 0, 0
    while waiting or running:
        clock = max(clock, waiting[0][1] + 2 * _MS) if not running else clock
        fresh = []
        while waiting and len(running) + len(fresh) < 2 and waiting[0][1] + 2 * _MS <= clock:
            number, arrival, prompt, output = waiting.pop(0)
            fresh.append(
                {"n": number, "arrival": arrival, "prompt": prompt, "output": output, "at": clock, "step": step, "seen": []}
            )
        prefill = sum(r["prompt"] for r in fresh)
        length = (2 + slower_ms) * _MS + len(running) * _MS + prefill * _MS // 2
        rows["steps"].append({
            "server": "s", "step": step, "start_ns": clock, "end_ns": clock + length, "origin": "observed", "preempted": 0,
            "prefill_requests": len(fresh), "prefill_tokens": prefill, "prefill_context_tokens": 0,
            "decode_requests": len(running), "decode_tokens": len(running),
            "decode_context_tokens": sum(r["prompt"] + len(r["seen"]) for r in running),
        })  # fmt: skip
        clock += length
        for r in (*running, *fresh):
            r["seen"].append(clock)
        running += fresh
        for r in [r for r in running if len(r["seen"]) == r["output"]]:
            running.remove(r)
            _finish(rows, r, step)
        step += 1
        clock += 3 * _MS // 10
    rows["requests"][3] |= {"error": "The stream broke."}
    rows["requests"].append({"request": 99, "arrival_ns": 200 * _MS, "received_ns": 200 * _MS})
    if counters:
        for name_, first, last in (("on_cpu_ns", 0, 300 * _MS), ("run_delay_ns", 0, 12 * _MS)):
            for t, v in ((0, first), (400 * _MS, last)):
                rows["counters"].append({
                    "time_ns": t, "host": "h", "entity": "process:7", "name": name_, "value_int": v, "semantics": "cumulative",
                    "width_bits": 64, "unit": "ns",
                })  # fmt: skip
        for entity, name_, last in (("hoptrace:9", "on_cpu_ns", 5 * _MS), ("cpu", "user_ns", 310 * _MS)):
            for t, v in ((0, 0), (400 * _MS, last)):
                rows["counters"].append({
                    "time_ns": t, "host": "h", "entity": entity, "name": name_, "value_int": v, "semantics": "cumulative",
                    "width_bits": 64, "unit": "ns",
                })  # fmt: skip
    manifest = Manifest(
        origin="recorded", created_utc="2026-01-01T00:00:00+00:00", servers=[_SERVER], closed=True,
        rows_dropped={"buffer full": 2},
        collectors=[CollectorInfo(name="proxy", available=True), CollectorInfo(name="gpu", available=False, reason="no GPU")],
    )  # fmt: skip
    return MemoryTrace(rows, manifest, name=name)


def _finish(rows: dict[str, list[dict[str, Any]]], r: dict[str, Any], step: int) -> None:
    n, arrival, seen = r["n"], r["arrival"], r["seen"]
    rows["requests"].append({
        "request": n, "intended_ns": arrival, "sent_ns": arrival + _MS // 2, "received_ns": arrival + _MS, "arrival_ns": arrival,
        "arrival_of": "intended", "first_token_ns": seen[0], "first_visible_ns": seen[0], "last_token_ns": seen[-1],
        "finish_ns": seen[-1] + _MS, "prompt_tokens": r["prompt"], "prompt_chars": 4 * r["prompt"], "output_tokens": r["output"],
    })  # fmt: skip
    rows["stages"].append({
        "request": n, "stage": 0, "server": "s", "role": "both", "enqueued_ns": arrival + 2 * _MS, "scheduled_ns": r["at"],
        "end_ns": seen[-1], "cached_tokens": 0,
    })  # fmt: skip
    run = {"request": n, "server": "s", "tokens_per_step": r["prompt"], "context_at_start": 0}
    rows["residency"].append(run | {"first_step": r["step"], "last_step": r["step"], "phase": "chunk"})
    if r["output"] > 1:
        later = {
            "first_step": r["step"] + 1,
            "last_step": step,
            "phase": "decode",
            "tokens_per_step": 1,
            "context_at_start": r["prompt"],
        }
        rows["residency"].append(run | later)
    rows["tokens"] += [{"request": n, "index": i, "time_ns": t, "count": 1, "vantage": "proxy"} for i, t in enumerate(seen)]
    way = {"request": n, "server": "s", "mechanism": "message", "payload_hops": 2, "basis": "counted"}
    rows["moves"].append(
        way | {"object": "prompt", "src": "client", "dst": "server:s", "start_ns": arrival + _MS, "end_ns": arrival + 2 * _MS,
               "bytes": 4 * r["prompt"] + 200, "transfers": 1, "control_ops": 3, "path": ["client-proxy", "proxy-server:s"]}
    )  # fmt: skip
    rows["moves"].append(
        way | {"object": "tokens", "src": "server:s", "dst": "client", "start_ns": seen[0], "end_ns": seen[-1],
               "bytes": 290 * len(seen), "transfers": len(seen), "control_ops": 2, "path": ["proxy-server:s", "client-proxy"]}
    )  # fmt: skip
    rows["waits"].append({
        "start_ns": arrival + _MS, "end_ns": arrival + 2 * _MS, "request": n, "server": "s", "kind": "message", "on": "proxy",
        "count": 1, "basis": "counted",
    })  # fmt: skip
