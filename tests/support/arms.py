"""Pairs of traces of the same requests, built from how long each phase of a request takes: for comparisons with a known truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from support.memory import MemoryTrace

from hoptrace.manifest import Manifest, Server

__all__ = ["MS", "Times", "arm"]

MS = 1_000_000


@dataclass(frozen=True)
class Times:
    """Of one request, in ms: how late the client sends it, how long it waits in the engine's queue, its prefill, each gap
    between its tokens (one decode step each), and how long its end takes to be delivered."""

    client: float = 0
    queue: float = 0
    prefill: float = 50
    gaps: Sequence[float] = (10, 10, 10)
    delivery: float = 1


def arm(
    n: int,
    times: Callable[[int], Times],
    *,
    name: str,
    prompt: Callable[[int], int] = lambda i: 20 + i,
    every_ms: float = 10_000,
    server: Server | None = None,
    manifest: Manifest | None = None,
    extra: dict[str, list[dict[str, Any]]] | None = None,
    stays: bool = True,
) -> MemoryTrace:
    """``n`` requests, one after the other (``every_ms`` apart, so that none disturbs another), each alone on a server of one
    slot.

    Everything is observed: stamps, stays, steps, residency, tokens. ``extra``: further rows by table.
    """
    rows: dict[str, list[dict[str, Any]]] = {t: [] for t in ("requests", "stages", "steps", "residency", "tokens")}
    step = 0
    for i in range(n):
        t = times(i)
        at = round(i * every_ms * MS)
        sent = at + round(t.client * MS)
        begin = sent + round(t.queue * MS)
        clock = begin + round(t.prefill * MS)
        seen, ends = [clock], [(begin, clock)]
        for gap in t.gaps:
            ends.append((clock, clock + round(gap * MS)))
            clock += round(gap * MS)
            seen.append(clock)
        finish = clock + round(t.delivery * MS)
        rows["requests"].append({
            "request": i, "request_id": f"{i}", "intended_ns": at, "sent_ns": sent, "received_ns": sent, "arrival_ns": at,
            "arrival_of": "intended", "first_token_ns": seen[0], "last_token_ns": seen[-1], "finish_ns": finish,
            "prompt_tokens": prompt(i), "output_tokens": len(seen),
        })  # fmt: skip
        if stays:
            rows["stages"].append({
                "request": i, "stage": 0, "server": "s", "role": "both", "enqueued_ns": sent, "scheduled_ns": begin,
                "end_ns": clock, "cached_tokens": 0, "recomputed_tokens": 0,
            })  # fmt: skip
        run = {"request": i, "server": "s"}
        rows["residency"].append(
            run | {"first_step": step, "last_step": step, "phase": "chunk", "tokens_per_step": prompt(i), "context_at_start": 0}
        )
        if t.gaps:
            last = step + len(t.gaps)
            later = {"first_step": step + 1, "last_step": last, "phase": "decode", "tokens_per_step": 1}
            rows["residency"].append(run | later | {"context_at_start": prompt(i)})
        for k, (start, end) in enumerate(ends):
            rows["steps"].append({
                "server": "s", "step": step, "start_ns": start, "end_ns": end, "origin": "observed", "preempted": 0,
                "prefill_requests": int(k == 0), "prefill_tokens": prompt(i) if k == 0 else 0, "prefill_context_tokens": 0,
                "decode_requests": int(k > 0), "decode_tokens": int(k > 0),
                "decode_context_tokens": prompt(i) + k if k else 0,
            })  # fmt: skip
            step += 1
        rows["tokens"] += [{"request": i, "index": k, "time_ns": v, "count": 1, "vantage": "proxy"} for k, v in enumerate(seen)]
    for table, more in (extra or {}).items():
        rows.setdefault(table, []).extend(more)
    manifest = manifest or Manifest(
        origin="recorded", servers=[server or Server(name="s", engine="toy", model="toy", max_sequences=1)], closed=True
    )
    return MemoryTrace(rows, manifest, name=name)
