"""SGLang's per-request export (``--export-metrics-to-file --export-metrics-to-file-dir DIR``), followed live, into `requests` and
`stages`.

One JSON object per finished request in ``sglang-request-metrics-YYYYMMDD_HH.log`` (srt/observability/request_metrics_exporter.py
of 0.5.23). The prompt stands in ``request_parameters``: of that only two numbers are taken.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.log_tail import LogTail

__all__ = ["SglangExport", "rows_of"]

FLAGS = "--export-metrics-to-file --export-metrics-to-file-dir DIR --enable-metrics"
_PATTERN = "sglang-request-metrics-*.log"
_TIERS = {"device": "cached_device_tokens", "host": "cached_host_tokens", "storage": "cached_disk_tokens"}
_SETTLED_READS = 50
_NEAR = 1 << 62


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _NEAR else None


def _ns(value: object) -> int | None:
    """Seconds since 1970 as ns; null for what is no time."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and 1e9 < value < 1e10
    return round(value * 1e9) if ok and isinstance(value, int | float) else None


def rows_of(line: str) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """(identifier, row of `requests`, row of `stages`) of a line, times in UTC ns; null if it is no record.

    ``queued_ns`` is null: SGLang tells how long a request was queued (over all its queues), not since when.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    number = data.get("id") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(number, str) or _whole(data.get("prompt_tokens")) is None:
        return None
    received, end = _ns(data.get("request_received_ts")), _ns(data.get("request_finished_ts"))
    latency, first = data.get("e2e_latency"), data.get("first_token_latency")
    if end is None and received is not None and isinstance(latency, int | float) and 0 < latency < 1e6:
        end = received + round(latency * 1e9)
    token = None
    if received is not None and isinstance(first, int | float) and not isinstance(first, bool) and 0 < first < 1e6:
        token = received + round(first * 1e9)
    reason = data.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    scheduled = _ns(data.get("forward_entry_time"))
    aborted = kind == "abort"
    request: dict[str, Any] = {
        "received_ns": received, "scheduled_ns": scheduled, "engine_first_token_ns": token, "finish_ns": end,
        "prompt_tokens": _whole(data.get("prompt_tokens")), "output_tokens": _whole(data.get("completion_tokens")),
        "finish_reason": kind if isinstance(kind, str) and not aborted else None,
        "error": "aborted by the server or its client" if aborted else None,
    }  # fmt: skip
    stage: dict[str, Any] = {
        "dp_rank": _whole(data.get("dp_rank")), "engine_request_id": number,
        "enqueued_ns": _ns(data.get("api_server_dispatch_finish_ts")), "scheduled_ns": scheduled, "end_ns": end,
        "end_reason": "cancelled" if aborted else "done" if end is not None else None,
        "cached_tokens": _whole(data.get("cached_tokens")),
    }  # fmt: skip
    details = data.get("cached_tokens_details")
    if isinstance(details, Mapping):
        stage |= {column: _whole(details.get(tier)) for tier, column in _TIERS.items()}
    try:
        asked = json.loads(data["request_parameters"]) if isinstance(data.get("request_parameters"), str) else None
    except (ValueError, RecursionError):
        asked = None
    if isinstance(asked, Mapping):
        sampling = asked.get("sampling_params")
        request["max_tokens"] = _whole(sampling.get("max_new_tokens")) if isinstance(sampling, Mapping) else None
        request["priority"] = asked.get("priority") if type(asked.get("priority")) is int else None
    return number, request, stage


class SglangExport:
    """Follows the newest files of the export's folder. ``folder``: as the server names it, null where it exports nothing."""

    name = "sglang-export"
    tables: tuple[str, ...] = ("requests", "stages")

    def __init__(self, ctx: Context, folder: Path | None) -> None:
        self._ctx = ctx
        self._told = folder
        self._folder: Path | None = None
        self._tails: dict[Path, LogTail] = {}
        self._idle: dict[Path, int] = {}
        self._done: set[str] = set()
        self._began = False

    async def probe(self) -> Finding:
        if self._told is None:
            return Finding(False, f"SGLang exports no requests: start it with {FLAGS}")
        self._folder = await asyncio.to_thread(self._place)
        if self._folder is None:
            return Finding(False, f"its folder {self._told} can't be read here: run hoptrace on its host, as its user")
        return Finding(True)

    async def start(self) -> None:
        if self._folder is None:
            self._folder = await asyncio.to_thread(self._place)
        await asyncio.to_thread(self._look)

    async def sample(self) -> int:
        lines = await asyncio.to_thread(self._look)
        return sum(self._line(line) for line in lines)

    def restarted(self) -> None:
        """Nothing to do: a new server goes on in the same folder."""

    async def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _place(self) -> Path | None:
        assert self._told is not None
        pid = self._ctx.find().pid if self._ctx.find is not None else None
        places = [self._told] if self._told.is_absolute() else []
        if pid is not None:
            inside = Path(f"/proc/{pid}/root{self._told}") if self._told.is_absolute() else Path(f"/proc/{pid}/cwd") / self._told
            places.insert(0, inside)
        for place in places:
            try:
                if place.is_dir() and list(place.iterdir()) is not None:
                    return place.resolve() if not str(place).startswith("/proc/") else place
            except OSError:
                continue
        return None

    def _look(self) -> list[str]:
        """Lines that are new. What stood in the files before the capture is left; files that come later are read whole."""
        if self._folder is None:
            return []
        try:
            files = sorted(self._folder.glob(_PATTERN))[-3:]
        except OSError:
            return []
        for file in files:
            if file not in self._tails and file.name not in self._done:
                self._tails[file] = LogTail(file, from_start=self._began)
                self._idle[file] = 0
        lines: list[str] = []
        for file, tail in list(self._tails.items()):
            new = tail.read()
            lines += new
            self._idle[file] = 0 if new else self._idle[file] + 1
            if file != files[-1] and self._idle[file] > _SETTLED_READS:
                tail.close()
                self._done.add(file.name)
                del self._tails[file], self._idle[file]
        self._began = True
        return lines

    def _line(self, line: str) -> int:
        ctx = self._ctx
        assert ctx.writer is not None and ctx.links is not None
        if not line.strip():
            return 0
        found = rows_of(line)
        if found is None:
            ctx.writer.drop(f"{self.name}: line that is no record of a request", 1)
            return 0
        number, request, stage = found
        # Its stamps are the wall clock's, which may have moved against the trace's since the start.
        moved = ctx.writer.clock.wall_step_ns()
        for row in (request, stage):
            row |= {k: v - moved for k, v in row.items() if k.endswith("_ns") and v is not None}
        if ctx.links.primary:
            # When it came is known better from outside.
            request = {k: v for k, v in request.items() if k not in ("received_ns", "finish_ns", "finish_reason", "error")}
        elif request["received_ns"] is None:
            ctx.writer.drop(f"{self.name}: request without times (start SGLang with --enable-metrics)", 1)
            return 0
        else:
            request |= {
                "request_id": number,
                "arrival_ns": request["received_ns"],
                "arrival_of": "received",
                "model": ctx.server.model,
            }
        now = ctx.writer.clock.now_ns()
        ctx.links.add(number, "requests", request | {"source": self.name}, now)
        ctx.links.add(number, "stages", stage | {"server": ctx.server.name, "source": self.name}, now, done=True)
        return 2
