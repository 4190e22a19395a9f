"""What vLLM's own schedulers decided (tests/data/reference/vllm_*), and what an engine of ours makes of the same requests."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hoptrace.replay import compiled, outcome, plain
from hoptrace.replay.outcome import Kept, Outcome
from hoptrace.replay.plan import EngineSpec, Order, Plan, Speculation
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost

REFERENCE = Path(__file__).parent.parent / "data" / "reference"

Simulate = Callable[..., Outcome]

ENGINES: dict[str, Simulate] = {"plain": plain.simulate, "compiled": compiled.simulate}
"""Both engines: what one meets the other has to meet."""


def names(folder: str) -> list[str]:
    """The scenarios in a folder of tests/data/reference."""
    return sorted(p.name.split(".")[0] for p in (REFERENCE / folder).glob("*.json.xz"))


def scenario(folder: str, name: str) -> dict[str, Any]:
    """One recorded scenario; the folder's README says what it holds."""
    found: dict[str, Any] = json.loads(lzma.decompress((REFERENCE / folder / f"{name}.json.xz").read_bytes()))
    return found


def work_of(requests: list[dict[str, Any]], block: int) -> Workload:
    """Requests as a workload; ``block``: tokens of each of the prompts' ids."""
    ids = [q.get("blocks", []) for q in requests]
    ptr = np.concatenate([[0], np.cumsum([len(b) for b in ids])]).astype(np.int64)
    flat = np.array([i for b in ids for i in b], dtype=np.int64)
    end = np.array([(j + 1) * block for b in ids for j in range(len(b))], dtype=np.int64)
    columns = (np.array([q[k] for q in requests], dtype=np.int64) for k in ("arrival_ns", "prompt", "output"))
    return Workload(
        np.arange(len(requests), dtype=np.int64), *columns, block_ptr=ptr, block_id=flat, block_end=end,
        block_tokens=np.full(int(flat.max()) + 1 if flat.size else 0, block, dtype=np.int64),
    )  # fmt: skip


def engine_of(s: dict[str, Any], name: str = "engine", **more: Any) -> EngineSpec:
    """The engine that means these settings of vLLM's."""
    return EngineSpec(
        name, max_sequences=s["max_sequences"], max_batched_tokens=s["budget"], chunked_prefill=s["chunked"],
        capacity_tokens=s["blocks"] * s["block"], block_size_tokens=s["block"], context_tokens=s["context"],
        # vLLM takes the fraction of all its blocks, the one that it keeps for itself included.
        watermark_tokens=int(s["watermark"] * (s["blocks"] + 1)) * s["block"], cache="pool" if s["prefix_caching"] else None,
        **more,
    )  # fmt: skip


def plan_of(said: dict[str, Any], **changes: Any) -> Plan:
    """The plan that means the scenario's settings."""
    s, cost = said["settings"], said["cost_ns"]
    priced = {"step": cost["step"], "prefill_tokens": cost["prefill_token"], "decode_requests": cost["decoder"]}
    order = Order()
    if s["policy"] == "priority":
        keys = np.array([q.get("priority", 0) for q in said["requests"]], dtype=np.int64)
        order = Order(key=keys, from_arrival=False, requeue=True)
    speculation = Speculation(s["spec_tokens"], said["accept_ppm"]) if s["spec_tokens"] else None
    known: dict[str, Any] = {"engines": (engine_of(s),), "order": order, "speculation": speculation, **changes}
    return Plan(costs=(StepCost({k: 1000 * v for k, v in priced.items()}, "fixed"),), **known)


def ours(
    simulate: Simulate, work: Workload, plan: Plan
) -> tuple[list[list[dict[str, Any]]], dict[str, list[int]], list[dict[str, int]]]:
    """Our steps in the scenario's form, by engine; the columns of the requests; the moves."""
    sink = Kept()
    found = simulate(work, plan, sink)
    at = {c: i for i, c in enumerate(outcome.STEP)}
    steps: list[list[dict[str, Any]]] = [[] for _ in plan.engines]
    for row in sink.rows("step").tolist():
        steps[row[at["engine"]]].append(
            {
                "start_ns": row[at["start_ns"]], "parts": {}, "preempted": [], "held": row[at["kv_used_tokens"]],
                "running": row[at["running"]], "waiting": row[at["waiting"]],
            }
        )  # fmt: skip
    for request, engine, first, last, phase, tokens, context, emitted in sink.rows("run").tolist():
        if phase == outcome.PREEMPTED:
            steps[engine][first]["preempted"].append(request)
        if phase in (outcome.CHUNK, outcome.DECODE):
            for step in range(first, last + 1):
                parts = steps[engine][step]["parts"]
                assert request not in parts
                parts[request] = (tokens, context)
                context += tokens if phase == outcome.CHUNK else emitted
    columns = {c: found.requests[:, i].tolist() for i, c in enumerate(outcome.REQUEST)}
    moves = [dict(zip(outcome.MOVE, row, strict=True)) for row in sink.rows("move").tolist()]
    return steps, columns, moves


def theirs(said: dict[str, Any], which: str = "") -> list[dict[str, Any]]:
    """Their steps in the same form. A pass that schedules nothing but drives somebody out is no step of ours: see the next."""
    steps, gone = [], []
    for s in said[which + "steps"]:
        gone += s["preempted"]
        if not s["parts"]:
            continue
        steps.append(
            {
                "start_ns": s["start_ns"], "parts": {r: (n, c) for r, n, c in s["parts"]}, "preempted": sorted(gone),
                "held": s["held"] * said[which + "settings"]["block"], "running": s["running"], "waiting": s["waiting"],
            }
        )  # fmt: skip
        gone = []
    return steps


def first_difference(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> str:
    """Where two lists of steps part, in a sentence; empty if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        for k in x:
            left, right = (sorted(x[k]), sorted(y[k])) if k == "preempted" else (x[k], y[k])
            if left != right:
                if k == "parts":
                    left = {r: p for r, p in left.items() if right.get(r) != p}
                    right = {r: p for r, p in y[k].items() if x[k].get(r) != p}
                return f"step {i}, {k}: ours {left}, vLLM's {right}"
    return "" if len(a) == len(b) else f"{len(a)} steps of ours, {len(b)} of vLLM's"
