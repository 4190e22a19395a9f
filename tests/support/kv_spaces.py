"""KV spaces as rows of a trace, and what is in them at each nanosecond, worked out one nanosecond after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from support.memory import MemoryTrace

from hoptrace.manifest import Manifest, Server

__all__ = ["END", "Now", "Space", "Step", "now", "spaces", "trace_of"]

END = 90
"""The traces are recorded from 0 to here, ns."""


@dataclass(frozen=True)
class Step:
    start: int
    end: int
    used: int | None
    running: int = 1
    waiting: int | None = 0
    queued: int | None = 0
    preempted: int = 0
    decoding: int = 0


@dataclass(frozen=True)
class Space:
    """``requests``: (first step, last step, tokens in each step, came so many ns before the first step, prompt)."""

    server: str
    dp_rank: int
    capacity: int | None
    steps: list[Step]
    requests: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    slots: int | None = None
    block: int = 1


def trace_of(spaces: list[Space], scale: int = 1, **manifest: Any) -> MemoryTrace:
    """Layers, heads and sizes of 1 in f16: a token's KV is 4 bytes. ``scale``: ns of one unit of time."""
    rows: dict[str, list[dict[str, Any]]] = {"steps": [], "residency": [], "stages": [], "requests": [], "coverage": []}
    number = 0
    for s in spaces:
        key = {"server": s.server, "dp_rank": s.dp_rank}
        for i, x in enumerate(s.steps):
            of_queue = {"waiting": x.waiting, "queued_prefill_tokens": x.queued, "preempted": x.preempted}
            kv = {"kv_used_tokens": x.used, "kv_capacity_tokens": s.capacity}
            at = {"step": i, "start_ns": x.start * scale, "end_ns": x.end * scale, "origin": "observed"}
            rows["steps"].append(key | at | kv | of_queue | {"running": x.running, "decode_requests": x.decoding})
        for first, last, each, before, prompt in s.requests:
            own = key | {"request": number, "sequence": 0}
            begin, end = s.steps[first].start, s.steps[last].end
            came = (begin - before) * scale
            run = {"first_step": first, "last_step": last, "phase": "decode", "tokens_per_step": each, "context_at_start": 2}
            stay = {"attempt": 0, "stage": 0, "role": "both", "prompt_tokens": prompt, "end_reason": "done"}
            rows["residency"].append(own | run)
            rows["stages"].append(own | stay | {"enqueued_ns": came, "scheduled_ns": begin * scale, "end_ns": end * scale})
            rows["requests"].append({"request": number, "arrival_ns": came})
            number += 1
    for name in sorted({s.server for s in spaces}):
        rows["coverage"].append({"table": "steps", "server": name, "from_ns": 0, "to_ns": END * scale})
    servers = {
        s.server: Server(
            name=s.server, layers=1, kv_heads=1, head_size=1, kv_dtype="f16", max_sequences=s.slots, block_size_tokens=s.block
        )
        for s in spaces
    }
    return MemoryTrace(rows, Manifest(origin="recorded", servers=list(servers.values()), closed=True, **manifest))


@dataclass(frozen=True)
class Now:
    """Tokens in use (null: not known), whether a request lacks KV and for how many tokens (null: not told), whether one waits."""

    used: int | None
    lacks: bool = False
    wanted: int | None = 0
    waits: bool = False


def now(s: Space, t: int) -> Now:
    """One space at one nanosecond, by the rules in words: see :mod:`hoptrace.analysis.memory.stranding_line`."""
    begun = [i for i, x in enumerate(s.steps) if x.start <= t]
    if not begun:
        if not s.steps[0].decoding and s.requests:
            return _wants(s, None, 0, 0)
        return Now(None)
    i = begun[-1]
    step, then = s.steps[i], s.steps[i + 1] if i + 1 < len(s.steps) else None
    used, after = (None if x is None or (x.used or 0) > (s.capacity or x.used or 0) else x.used for x in (step, then))
    if t < step.end:
        return Now(None) if used is None else _wants(s, step, used, step.start)
    if not s.requests:
        return Now(None)
    if not any(first <= i < last for first, last, *_ in s.requests):
        return _wants(s, None, 0, step.end)
    if used is None or after is None:
        return Now(None)
    return _wants(s, step, min(used, after), step.end)


def _wants(s: Space, step: Step | None, used: int, since: int) -> Now:
    stays = sorted((s.steps[f].start - before, s.steps[f].start, prompt) for f, _, _, before, prompt in s.requests)
    there = [x for x in stays if x[0] <= since < x[1]]
    waiting = step.waiting if step is not None and step.waiting is not None else len(there)
    running = step.running if step is not None else 0
    preempts = step is not None and step.preempted > 0
    if s.capacity is None:
        return Now(used, preempts, None, waiting > 0)
    head = next((x for x in stays if x[1] > since), None)
    need = max(head[2] if head is not None and head[0] <= since else 0, s.block)
    free = s.capacity - used
    full = s.slots is not None and running >= s.slots
    lacks = (waiting > 0 and not full and free < need) or preempts
    if not lacks:
        return Now(used, waits=waiting > 0)
    if step is None or step.queued is None:
        return Now(used, True, None, waiting > 0)
    places = max(s.slots - running, 1) if s.slots is not None else waiting
    share = -(-step.queued * min(max(places, 1), max(waiting, 1)) // max(waiting, 1))
    return Now(used, True, max(share - free, 0), waiting > 0)


@st.composite
def spaces(draw: st.DrawFn) -> list[Space]:
    out = []
    names = draw(st.lists(st.sampled_from([("a", 0), ("a", 1), ("b", 0), ("c", 0)]), min_size=1, max_size=3, unique=True))
    slots = {n: draw(st.sampled_from([None, 1, 3])) for n in ("a", "b", "c")}
    block = {n: draw(st.sampled_from([1, 4])) for n in ("a", "b", "c")}
    for name, rank in names:
        capacity = draw(st.sampled_from([None, 10, 20, 20, 20]))
        t, steps = 0, []
        for _ in range(draw(st.integers(1, 5))):
            t += draw(st.integers(0, 8))
            end = t + draw(st.integers(0, 8))
            used = draw(st.one_of(st.integers(0, 22), st.integers(15, 20), st.just(None)) if steps else st.integers(0, 20))
            waiting, queued = draw(st.sampled_from([None, 0, 1, 2])), draw(st.sampled_from([None, 0, 5, 30]))
            rare = st.sampled_from([0, 0, 0, 1])
            steps.append(Step(t, end, used, draw(st.integers(0, 3)), waiting, queued, draw(rare), draw(rare)))
            t = max(t + 1, end)
        last = len(steps) - 1
        request = st.tuples(st.integers(0, last), st.integers(0, 4), st.integers(0, 3), st.integers(0, 9), st.integers(0, 12))
        requests = [(f, min(f + n, last), each, before, p) for f, n, each, before, p in draw(st.lists(request, max_size=4))]
        out.append(Space(name, rank, capacity, steps, requests, slots[name], block[name]))
    return out
