"""TensorRT-LLM's ``/perf_metrics`` (each request's times, told once) into `requests`, `stages` and `waits`.

The number that it gives a request is in no answer to a client, so that its rows can't be joined with those of a proxy or a
sniffer: beside one, this source keeps still. Times are seconds of the server's steady clock (std::chrono::steady_clock, on Linux
CLOCK_MONOTONIC), which ``/steady_clock_offset`` compares.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hoptrace.collectors.base import Finding, ServerAway
from hoptrace.collectors.context import Context

__all__ = ["TrtllmRequests", "times_of"]

_NEEDS = (
    "start trtllm-serve with --extra_llm_api_options FILE, in it `return_perf_metrics: true` and "
    "`perf_metrics_max_requests: 10000`"
)
_EVERY_S = 1.0
_SYNC_S = 60.0
_CLOCK = "steady"


def times_of(record: object) -> tuple[str, dict[str, int]] | None:
    """(identifier, event → ns of the server's steady clock) of a record; null if it is none."""
    metrics = record.get("perf_metrics") if isinstance(record, Mapping) else None
    timing = metrics.get("timing_metrics") if isinstance(metrics, Mapping) else None
    number = record.get("request_id") if isinstance(record, Mapping) else None
    if not isinstance(timing, Mapping) or isinstance(number, bool) or not isinstance(number, int | str):
        return None
    found: dict[str, int] = {}
    for name, value in timing.items():
        # 0 is "never": the clock counts from the host's start.
        if isinstance(name, str) and isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e10:
            found[name] = round(value * 1e9)
    return (str(number), found) if "arrival_time" in found or "server_arrival_time" in found else None


class TrtllmRequests:
    """Asks ``/perf_metrics`` once a second."""

    name = "trtllm-requests"

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._due = 0.0
        self._sync_due = 0.0
        self._offset: int | None = None
        self._seen = False

    @property
    def tables(self) -> tuple[str, ...]:
        """Only once there was a record: a server that measures none answers with none."""
        return ("requests", "stages", "waits") if self._seen else ()

    async def probe(self) -> Finding:
        if self._ctx.links is not None and self._ctx.links.primary:
            return Finding(
                False, "a proxy or a sniffer records the requests, and TensorRT-LLM's numbers can't be joined with them"
            )
        if await self._compare() is None:
            return Finding(False, "its clock can't be compared: another host, and no /steady_clock_offset")
        return Finding(True, f"another reader of /perf_metrics takes requests away (each is told once); if none come: {_NEEDS}")

    async def start(self) -> None:
        return None

    def restarted(self) -> None:
        self._sync_due = 0.0

    async def close(self) -> None:
        return None

    async def sample(self) -> int:
        ctx = self._ctx
        assert ctx.writer is not None and ctx.links is not None
        if ctx.links.primary or time.monotonic() < self._due:
            return 0
        self._due = time.monotonic() + _EVERY_S
        if time.monotonic() >= self._sync_due:
            self._sync_due = time.monotonic() + _SYNC_S
            await self._sync()
        reply = await ctx.api.get("/perf_metrics", timeout_s=60.0)
        if reply.status is None and reply.problem != "timeout":
            raise ServerAway(reply.problem)
        records = reply.json() if reply.ok else None
        if not isinstance(records, list) or self._offset is None:
            return 0
        return sum(self._record(r) for r in records)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _compare(self) -> tuple[int, int] | None:
        """(server's steady clock less this host's monotonic one, half the width of what it may be), in ns."""
        before = time.monotonic_ns()
        reply = await self._ctx.api.get("/steady_clock_offset")
        after = time.monotonic_ns()
        told = reply.json() if reply.ok else None
        got, sent = (told.get("receive_ts"), told.get("transmit_ts")) if isinstance(told, Mapping) else (None, None)
        if isinstance(got, int | float) and isinstance(sent, int | float):
            first, last = round(got * 1e9) - before, round(sent * 1e9) - after
            return (first + last) // 2, (first - last + 1) // 2
        pid = self._ctx.find().pid if self._ctx.find is not None else None
        return (0, 0) if pid is not None else None

    async def _sync(self) -> None:
        assert self._ctx.writer is not None
        found = await self._compare()
        if found is None:
            return
        # Foreign less trace: the trace's clock is this host's monotonic one and a fixed offset.
        self._offset = found[0] - self._ctx.writer.clock.utc_offset_ns
        row = {"time_ns": self._ctx.writer.clock.now_ns(), "host": self._ctx.host, "clock": _CLOCK, "source": self.name}
        self._ctx.writer.append("clock_sync", [row | {"offset_ns": self._offset, "uncertainty_ns": found[1]}])

    def _record(self, record: object) -> int:
        ctx = self._ctx
        assert ctx.writer is not None and ctx.links is not None and self._offset is not None
        found = times_of(record)
        if found is None:
            ctx.writer.drop(f"{self.name}: record that is no request of one server", 1)
            return 0
        number, raw = found
        self._seen = True
        at = {name: ns - self._offset for name, ns in raw.items()}
        now = ctx.writer.clock.now_ns()
        received = at.get("server_arrival_time", at.get("arrival_time"))
        end = at.get("last_token_time")
        request: dict[str, Any] = {
            "arrival_ns": received, "received_ns": received, "arrival_of": "received", "queued_ns": at.get("arrival_time"),
            "scheduled_ns": at.get("first_scheduled_time"), "engine_first_token_ns": at.get("first_token_time"),
            "last_token_ns": end, "finish_ns": end, "model": ctx.server.model, "source": self.name,
        }  # fmt: skip
        stage: dict[str, Any] = {
            "server": ctx.server.name, "engine_request_id": number, "enqueued_ns": at.get("arrival_time"),
            "scheduled_ns": at.get("first_scheduled_time"), "end_ns": end, "end_reason": "done" if end else None,
            "source": self.name,
        }  # fmt: skip
        # Numbers begin anew with the server: never the same request as one before.
        own = f"trtllm:{ctx.server.name}:{number}:{received}"
        ctx.links.add(own, "requests", request, now)
        ctx.links.add(own, "stages", stage, now, done=True)
        begin, done = at.get("kv_cache_transfer_start"), at.get("kv_cache_transfer_end")
        if begin is None or done is None or done < begin:
            return 2
        wait = {"start_ns": begin, "end_ns": done, "server": ctx.server.name, "kind": "transfer", "on": "kv", "count": 1}
        ctx.links.add(own, "waits", wait | {"basis": "counted", "source": self.name}, now)
        return 3
