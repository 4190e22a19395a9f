"""A server's ``/metrics`` in the Prometheus text format as counters: one collector for all engines.

What it costs the server is bounded by the size of the page (about 1 s between questions for a page of 50 KB), what it writes by
the number of series; a value is written when it has changed. Sample times are hoptrace's: the page has none.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any

from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.http import Reply
from hoptrace.collectors.engines.metrics_changes import Changes
from hoptrace.collectors.engines.names import COMMON
from hoptrace.collectors.engines.polled import Polled
from hoptrace.collectors.engines.prometheus import Kind, Page, Reading, Sample

__all__ = ["MAX_SERIES", "PAGE_BYTES", "MetricsSource"]

MAX_SERIES = 5000
"""Series that are kept, the first seen. A label explosion beyond it is counted, not stored."""

PAGE_BYTES = 8 << 20
"""A longer page is not read: no engine's is."""

_BYTES_PER_S = 50_000
_SMALL_BYTES = 10_000
_SLOWEST_S = 10.0
_FEW = 100
_INLINE_BYTES = 20_000
_AGAIN_NS = 60_000_000_000


class MetricsSource(Polled):
    """``known``: how the engine's metrics read. ``renamed``: what a vanished one is called now. ``off``: how it is turned on."""

    tables = ("counters",)

    def __init__(
        self,
        ctx: Context,
        name: str,
        known: Mapping[str, Kind],
        *,
        renamed: Mapping[str, str] | None = None,
        off: str = "is not there",
        path: str = "/metrics",
    ) -> None:
        super().__init__(ctx)
        self.name, self.path, self.off = name, path, off
        self._reading = Reading({**COMMON, **known}, MAX_SERIES)
        self._changes = Changes(renamed or {})
        self._due = 0.0
        self._last: dict[str, dict[str, Any]] = {}
        self._held: set[str] = set()
        self._stamp: dict[str, Any] = {}
        self._full_ns = 0
        self._cut = 0
        self._bad = 0
        self._there = True
        self._renew = False
        self._lock = threading.RLock()

    async def probe(self) -> Finding:
        reply = await self._ctx.api.get(self.path)
        if not reply.ok:
            return Finding(False, reply.why(self.path, self.off))
        if not Reading({}).page(reply.text[: 1 << 16]).samples and reply.text.strip():
            return Finding(False, f"{self.path} is not in the Prometheus text format")
        return Finding(True)

    async def sample(self) -> int:
        if self._renew:
            self._anew()
            # Names and what they are declared to be may be others.
            self._reading.forget()
            self._changes.renew()
            self._due = 0.0
            self._renew = False
        if time.monotonic() < self._due:
            return 0
        reply, stamp = await self._ask()
        self._due = time.monotonic() + min(max(0, len(reply.body) - _SMALL_BYTES) / _BYTES_PER_S, _SLOWEST_S)
        if not reply.ok:
            return self._gone(reply, stamp)
        self._there = True
        if len(reply.body) > PAGE_BYTES:
            self._drop("page of more than 8 MiB", 1)
            return 0
        if len(reply.body) < _INLINE_BYTES:
            return self._take(reply.text, stamp)
        return await asyncio.to_thread(self._take, reply.text, stamp)

    def restarted(self) -> None:
        self._renew = True  # at the next sample: a page may be in work

    async def close(self) -> None:
        self._settle()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Values that have not changed since they were written are written once more, as of the last sample."""
        with self._lock:
            if self._held and self._stamp:
                self._write(self._stamp, [self._last[name] for name in sorted(self._held) if name in self._last])
            self._held.clear()

    def _anew(self) -> None:
        """All totals begin anew."""
        self._settle()
        self._incarnation += 1
        self._full_ns = 0

    def _take(self, text: str, stamp: dict[str, Any]) -> int:
        with self._lock:  # a thread of a cancelled sample may still be at work
            return self._take_page(self._reading.page(text), text, stamp)

    def _take_page(self, page: Page, text: str, stamp: dict[str, Any]) -> int:
        if page.bad > self._bad:
            self._drop("lines that are not in the text format", page.bad - self._bad)
        self._bad = page.bad
        if self._reading.cut > self._cut:
            if not self._cut:
                self._event("gap", f"more than {MAX_SERIES} series: those seen first are kept, the others are counted as dropped")
            self._drop(f"series beyond the limit of {MAX_SERIES}", self._reading.cut - self._cut)
        self._cut = self._reading.cut
        if not page.names and text.strip():
            return 0  # no page at all (counted above): it says nothing about what was there
        found = self._changes.look(page)
        if found.restarted:
            # A total that fell: the server was restarted between two samples, and its port was never seen closed.
            self._anew()
        for kind, detail in found.events:
            self._event(kind, detail)
        whole = len(page.samples) <= _FEW or stamp["time_ns"] - self._full_ns >= _AGAIN_NS
        if whole:
            self._full_ns = stamp["time_ns"]
        rows = [row for s in page.samples if (row := self._told(s)) != self._last.get(s.name) or whole]
        # A value that stood still and now moves: where it stood until the last sample, so that no line between two rows lies.
        still = [self._stamp | self._last[r["name"]] for r in rows if r["name"] in self._held]
        written = {r["name"] for r in rows}
        self._last |= {r["name"]: r for r in rows}
        for s in found.vanished:
            rows.append(self._row(s.name, s.kind, None, "absent"))
            self._last.pop(s.name, None)
        self._held = {s.name for s in page.samples} - written
        self._stamp = stamp
        return self._write(stamp, still + rows)

    def _told(self, s: Sample) -> dict[str, Any]:
        row = self._row(s.name, s.kind, s.value, "ok" if s.value is not None else "absent")
        if s.name in self._changes.doubted:
            row["status"] = "error"
        if s.base in self._changes.gauges:
            row["semantics"] = "gauge"
        return row

    def _row(self, name: str, kind: Kind | None, value: float | None, status: str) -> dict[str, Any]:
        whole = kind is not None and kind.whole and value is not None and abs(value) < 1 << 62 and value == int(value)
        return {
            "entity": f"server:{self._ctx.server.name}",
            "name": name,
            "value_int": int(value) if whole and value is not None else None,
            "value_float": value if not whole else None,
            "unit": kind.unit if kind else None,
            "semantics": kind.semantics if kind else None,
            "status": status,
        }

    def _gone(self, reply: Reply, stamp: dict[str, Any]) -> int:
        """The page is there no more (a restart without the flag, a key that is wanted now): each series is unknown, said once."""
        if reply.status is None or not self._there:
            return 0  # slow: the next sample tells; or said before
        self._there = False
        self._settle()
        status = "denied" if reply.denied else "error" if reply.status >= 500 and reply.status != 501 else "absent"
        gone = {"value_int": None, "value_float": None, "status": status}
        rows = [row | gone for row in self._last.values() if row["status"] == "ok"]
        names = len({name.split("{")[0] for name in self._last})
        self._event("metrics vanished", f"{reply.why(self.path, self.off)}: {names} metrics are unknown from here on")
        self._last.clear()
        self._changes.renew()
        return self._write(stamp, rows)

    def _drop(self, why: str, n: int) -> None:
        assert self._ctx.writer is not None
        self._ctx.writer.drop(f"{self.name}: {why}", n)
