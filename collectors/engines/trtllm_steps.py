"""TensorRT-LLM's ``/metrics`` (JSON: the statistics of each iteration since it was asked last) into `steps`.

The server forgets what it has told: two readers share the iterations between them. Numbers that are missing are counted. Fields:
tensorrt_llm/executor (IterationStats) of 2025 and 2026; needs ``enable_iter_perf_stats: true``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from hoptrace.collectors.base import Finding, ServerAway
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.http import Reply
from hoptrace.collectors.engines.published.step_times import StepTimes

__all__ = ["OFF", "TrtllmSteps", "step_of"]

OFF = "start trtllm-serve with --extra_llm_api_options FILE, in it `enable_iter_perf_stats: true`"

_BATCH = {
    "numContextRequests": "prefill_requests", "numCtxTokens": "prefill_tokens", "numCtxKvTokens": "prefill_context_tokens",
    "numGenRequests": "decode_requests", "numGenKvTokens": "decode_context_tokens",
    "numQueuedContextRequests": "queued_prefill_requests", "numQueuedCtxTokens": "queued_prefill_tokens",
    "numQueuedGenRequests": "queued_decode_requests", "numQueuedGenKvTokens": "queued_decode_context_tokens",
    "numPausedRequests": "preempted",
}  # fmt: skip
_TOP = {"numActiveRequests": "running", "numQueuedRequests": "waiting"}
_ANSWER_S = 60.0
_NEAR_NS = 600_000_000_000
_MOST = 100_000


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def step_of(stat: Mapping[str, Any]) -> tuple[int, int, int, dict[str, int]] | None:
    """(rank, number, length in ns, columns of `steps`) of an iteration's statistics; null if they are none.

    ``decode_tokens`` is not among the columns: the server does not tell it.
    """
    number, length = _whole(stat.get("iter")), stat.get("iterLatencyMS")
    if number is None or isinstance(length, bool) or not isinstance(length, int | float) or not 0 < length < 1e9:
        return None
    columns: dict[str, int] = {}

    def take(source: object, names: Mapping[str, str]) -> None:
        for name, column in names.items():
            value = _whole(source.get(name)) if isinstance(source, Mapping) else None
            if value is not None:
                columns[column] = value

    take(stat, _TOP)
    take(stat.get("inflightBatchingStats"), _BATCH)
    take(stat.get("specDecodingStats"), {"numDraftTokens": "draft_proposed", "numAcceptedTokens": "draft_accepted"})
    kv = stat.get("kvCacheStats")
    if isinstance(kv, Mapping) and (size := _whole(kv.get("tokensPerBlock"))):
        for name, column in (("usedNumBlocks", "kv_used_tokens"), ("maxNumBlocks", "kv_capacity_tokens")):
            if (blocks := _whole(kv.get(name))) is not None:
                columns[column] = blocks * size
    device = stat.get("gpuForwardTimeMS")
    if isinstance(device, int | float) and not isinstance(device, bool) and 0 < device < 1e9:
        columns["device_ns"] = round(device * 1e6)
    return _whole(stat.get("attentionDpRank")) or 0, number, max(1, round(length * 1e6)), columns


def _bound_ns(stat: Mapping[str, Any], length: int, now: int) -> int:
    """No later than this did the iteration end. The stamp is of its beginning or its end, by version, in the server's zone."""
    text = stat.get("timestamp")
    if not isinstance(text, str):
        return now
    for form in ("%m-%d-%Y %H:%M:%S.%f", "%Y-%m-%d %H:%M:%S.%f"):
        try:
            at = datetime.strptime(text, form)  # noqa: DTZ007 - local time, as the server writes it
        except ValueError:
            continue
        end = int(time.mktime(at.timetuple())) * 10**9 + at.microsecond * 1000 + length
        return end if 0 <= now - end <= _NEAR_NS else now
    return now


class TrtllmSteps:
    """Asks ``/metrics`` on each beat."""

    name = "trtllm-steps"

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._times: dict[int, StepTimes[tuple[int, dict[str, int]]]] = {}
        self._next: dict[int, int] = {}
        self._base: dict[int, int] = {}
        self._heard_ns = 0
        self._noted = False

    @property
    def tables(self) -> tuple[str, ...]:
        """`steps` only once there was one: a server whose statistics are off answers with none."""
        return ("steps",) if self._noted else ()

    async def probe(self) -> Finding:
        # Not asked here: what it tells once, it never tells again, and another reader may want it.
        reply = await self._ctx.api.get("/version")
        if not reply.ok:
            return Finding(False, reply.why("/version"))
        return Finding(
            True, f"another reader of /metrics takes iterations away (the server tells each once); if none come: {OFF}"
        )

    async def start(self) -> None:
        return None

    async def sample(self) -> int:
        writer = self._ctx.writer
        assert writer is not None
        reply = await self._ctx.api.get("/metrics", timeout_s=_ANSWER_S)
        if reply.status is None and reply.problem != "timeout":
            raise ServerAway(reply.problem)
        now = writer.clock.now_ns()
        self._take(reply, now)
        return self._hand_over(now)

    def restarted(self) -> None:
        """Numbers begin anew."""
        for rank, expected in self._next.items():
            self._base[rank] = self._base.get(rank, 0) + expected
        self._next.clear()

    async def close(self) -> None:
        self._hand_over(None)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _take(self, reply: Reply, now: int) -> None:
        assert self._ctx.writer is not None
        stats = reply.json() if reply.ok else None
        if not isinstance(stats, list):
            if reply.ok:
                self._ctx.writer.drop(f"{self.name}: answer that is no list of iterations", 1)
            return
        for stat in stats[:_MOST]:
            step = step_of(stat) if isinstance(stat, Mapping) else None
            if step is None:
                self._ctx.writer.drop(f"{self.name}: record that is no iteration", 1)
                continue
            rank, number, length, columns = step
            heard = self._heard_ns = max(self._heard_ns, _bound_ns(stat, length, now))
            expected = self._next.get(rank)
            if expected is not None and number < expected:
                self._base[rank] = self._base.get(rank, 0) + expected
            elif expected is not None and number > expected:
                self._gap(number - expected, rank, number)
            self._next[rank] = number + 1
            self._times.setdefault(rank, StepTimes()).add((self._base.get(rank, 0) + number, columns), heard, length)

    def _gap(self, missing: int, rank: int, number: int) -> None:
        assert self._ctx.writer is not None
        why = "another reader of /metrics took them, or the queue ran over"
        detail = f"{missing} iterations of rank {rank} before {number} are missing: {why}"
        row = {"time_ns": self._ctx.writer.clock.now_ns(), "host": self._ctx.host, "server": self._ctx.server.name}
        self._ctx.writer.append("events", [row | {"kind": "gap", "detail": detail, "source": self.name}])
        self._ctx.writer.drop(f"{self.name}: iterations that somebody else read", missing)

    def _hand_over(self, now: int | None) -> int:
        rows: list[dict[str, Any]] = []
        for rank, times in self._times.items():
            before = times.unplaced
            rows += [
                {"server": self._ctx.server.name, "dp_rank": rank, "pp_rank": 0, "step": p.what[0], "start_ns": p.start_ns,
                 "end_ns": p.end_ns, "origin": "observed", "source": self.name} | p.what[1]
                for p in times.take(now)
            ]  # fmt: skip
            if times.unplaced > before and self._ctx.writer is not None:
                self._ctx.writer.drop(f"{self.name}: steps that overlap the one ahead wholly", times.unplaced - before)
        if rows and self._ctx.writer is not None:
            self._ctx.writer.append("steps", rows)
            if not self._noted:
                self._noted = True
                note = (
                    f"{self._ctx.server.name}: steps are from /metrics: composition and length are the server's, ends are placed "
                    "by when they were told; under the overlap scheduler the length is that of the host's loop, not the device's."
                )
                self._ctx.writer.update(lambda m: m.notes.append(note))
        return len(rows)
