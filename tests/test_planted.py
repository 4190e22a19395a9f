"""Law 1, the half that can fail: a delay that was planted comes out in its own part, and in no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import polars as pl
import pytest
from support.memory import MemoryTrace
from support.small import small_trace
from support.toy_server import Toy, event, serve, token

import hoptrace
from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.latency.parts import PARTS
from hoptrace.collectors.engines.streams.proxy import Proxy, listen
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.collectors.engines.streams.relay import Server as ServerEnd
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace
from hoptrace.schema import TABLES
from hoptrace.writer import TraceWriter

MS = 1_000_000
DELAY = 40 * MS


def rows_of(trace: MemoryTrace) -> dict[str, list[dict[str, Any]]]:
    return {name: frame.to_dicts() for name, frame in trace._frames.items()}


def stretched(trace: MemoryTrace, at_ns: int) -> MemoryTrace:
    """The trace with all that happens after ``at_ns`` put off by DELAY."""
    rows = rows_of(trace)
    for name, table in rows.items():
        times = [c.name for c in TABLES[name].columns if c.unit == "ns"]
        for row in table:
            for c in times:
                if row.get(c) is not None and row[c] > at_ns:
                    row[c] += DELAY
    return MemoryTrace(rows, trace.manifest)


def grown(before: Accounting, after: Accounting) -> dict[str, int]:
    """What each part grew by, over all requests, in ns; parts that did not change are left out."""
    found = {}
    for p in PARTS:
        change = (after.parts[p.column].sum() or 0) - (before.parts[p.column].sum() or 0)
        if change:
            found[p.name] = change
    return found


def spaced() -> MemoryTrace:
    """Three requests two seconds apart: each is alone, so that a delay strikes one."""
    out: dict[str, list[dict[str, Any]]] = {n: [] for n in ("requests", "stages", "steps", "residency", "waits")}
    for n in range(3):
        shift = n * 2000 * MS
        start = shift + 10 * MS
        out["requests"].append({
            "request": n, "intended_ns": shift, "sent_ns": shift + MS, "received_ns": shift + 2 * MS, "arrival_ns": shift,
            "first_token_ns": start + 30 * MS, "last_token_ns": start + 73 * MS, "finish_ns": start + 75 * MS, "output_tokens": 3,
        })  # fmt: skip
        out["stages"].append({
            "request": n, "stage": 0, "server": "s", "enqueued_ns": shift + 3 * MS, "scheduled_ns": start,
            "end_ns": start + 73 * MS,
        })  # fmt: skip
        for i, (a, b) in enumerate(((1, 30), (31, 50), (52, 73))):
            out["steps"].append({
                "server": "s", "step": 3 * n + i, "start_ns": start + a * MS, "end_ns": start + b * MS, "origin": "observed",
                "prefill_requests": int(i == 0), "prefill_tokens": 10 * (i == 0), "prefill_context_tokens": 0,
                "decode_requests": int(i > 0), "decode_tokens": int(i > 0), "decode_context_tokens": 10 * (i > 0),
            })  # fmt: skip
        run = {"request": n, "server": "s", "tokens_per_step": 10, "context_at_start": 0}
        out["residency"].append(run | {"first_step": 3 * n, "last_step": 3 * n, "phase": "chunk"})
        later = {"first_step": 3 * n + 1, "last_step": 3 * n + 2, "phase": "decode", "tokens_per_step": 1, "context_at_start": 10}
        out["residency"].append(run | later)
    return MemoryTrace(out, Manifest(origin="recorded", servers=[Server(name="s", max_sequences=1)]))


SPACED = spaced()
START = 2000 * MS + 10 * MS  # request 1 is scheduled


@pytest.mark.parametrize(
    ("where", "at_ns", "part"),
    [
        ("the client sends late", 2000 * MS, "client"),
        ("the network is slow", 2001 * MS, "network_in"),
        ("the proxy sleeps", 2002 * MS, "proxy"),
        ("the queue is not looked at", 2005 * MS, "queue_room"),
        ("the scheduler sleeps before the first step", START + MS // 2, "host_gap"),
        ("the scheduler sleeps between steps", START + 51 * MS, "host_gap"),
        ("the prompt takes longer", START + 20 * MS, "prefill"),
        ("a token takes longer", START + 60 * MS, "decode"),
        ("the end is delivered late", START + 74 * MS, "delivery"),
    ],
)
def test_a_planted_delay_is_its_own_part(where: str, at_ns: int, part: str) -> None:
    found = grown(account(SPACED), account(stretched(SPACED, at_ns)))
    assert found == {part: DELAY}, where


def test_a_sleeping_scheduler_delays_all_that_hold_a_place() -> None:
    """Two requests on the server, others in its queue: the places' holders wait for the host, the queue for a full server."""
    trace = small_trace()
    steps = trace.table("steps").sort("start_ns").collect()
    busy = steps.filter(pl.col("decode_requests") == 2).row(3, named=True)
    before, after = account(trace), account(stretched(trace, busy["end_ns"]))
    found = grown(before, after)
    assert found.pop("host_gap") == 2 * DELAY
    assert set(found) <= {"queue_slots"} and found.get("queue_slots", 0) % DELAY == 0


def test_a_transfer_that_is_waited_for() -> None:
    rows = rows_of(SPACED)
    rows["waits"] = [{"request": 1, "kind": "transfer", "start_ns": 2004 * MS, "end_ns": 2006 * MS}]
    trace = MemoryTrace(rows, SPACED.manifest)
    assert grown(account(trace), account(stretched(trace, 2005 * MS))) == {"transfer": DELAY}


def test_a_full_server_is_capacity() -> None:
    rows = rows_of(SPACED)
    rows["requests"].append({"request": 50, "arrival_ns": 2000 * MS, "received_ns": 2000 * MS})
    rows["stages"].append({"request": 50, "stage": 0, "server": "s", "scheduled_ns": 2003 * MS, "end_ns": 2009 * MS})
    trace = MemoryTrace(rows, SPACED.manifest)
    assert grown(account(trace), account(stretched(trace, 2005 * MS))) == {"queue_slots": DELAY}


# -- a real proxy before a real server, with real sleeps ---------------------------------------------------------------


class SleepyProxy(Proxy):
    """Sleeps between receiving a request and forwarding it: it comes late to the server."""

    async def connect(self, make: Callable[[], ServerEnd]) -> tuple[ServerEnd | None, str]:
        await asyncio.sleep(0.7)
        return await super().connect(make)


TIMINGS = ',"timings":{"cache_n":0,"prompt_n":7,"prompt_ms":500.0,"predicted_n":4,"predicted_ms":600.0}'
# Queue for 0.8 s, compute the prompt for 0.5 s (as the server then tells), three more tokens at 0.2 s, and say nothing for 0.9 s.
SCRIPT = [1.3, token("a"), 0.2, token("b"), 0.2, token("c"), 0.2, token("d"), 0.9, token("", "length", TIMINGS), event("[DONE]")]


async def _one_request(folder: Path) -> Trace:
    manifest = Manifest(origin="recorded", servers=[Server(name="toy", max_sequences=1)])
    with TraceWriter(folder / "planted.trace", manifest) as writer:
        recorder = Recorder(writer, "toy", None)
        async with serve(Toy(SCRIPT)) as toy:
            proxy = SleepyProxy(toy.url, recorder, writer.clock.now_ns)
            await proxy.start(listen("127.0.0.1", 0))
            async with aiohttp.ClientSession() as client:
                intended = writer.clock.now_ns()
                await asyncio.sleep(0.6)
                sent = writer.clock.now_ns()
                headers = {"x-hoptrace-intended-ns": str(intended), "x-hoptrace-sent-ns": str(sent)}
                await asyncio.sleep(0.4)  # on the way
                ask = {"model": "m", "prompt": "x" * 28, "max_tokens": 4, "stream": True}
                async with client.post(proxy.url + "/v1/completions", json=ask, headers=headers) as answer:
                    await answer.read()
            await proxy.close()
    return hoptrace.open(folder / "planted.trace")


PLANTED = {"client": 0.6, "network_in": 0.4, "proxy": 0.7, "queue_room": 0.8, "prefill": 0.5, "decode": 0.6, "delivery": 0.9}


async def test_sleeps_of_real_processes_come_out_in_their_parts(tmp_path: Path) -> None:
    """Within 5 % each. A busy machine lengthens sleeps, so the best of three runs counts: an error of method is in each."""
    worst: dict[str, float] = {}
    for attempt in range(3):
        a = account(await _one_request(tmp_path / str(attempt)))
        row = a.parts.row(0, named=True)
        assert sum(row[p.column] or 0 for p in PARTS) == row["e2e_ns"]
        worst = {p: abs((row[p + "_ns"] or 0) / (s * 1e9) - 1) for p, s in PLANTED.items()}
        rest = row["e2e_ns"] - sum(row[p + "_ns"] or 0 for p in PLANTED)
        if max(worst.values()) <= 0.05 and rest <= 0.01 * row["e2e_ns"]:
            return
    raise AssertionError(worst)
