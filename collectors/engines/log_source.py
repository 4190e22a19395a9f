"""What sources that follow a log share."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.log_tail import LogTail, log_of

__all__ = ["LogSource"]


class LogSource:
    """Follows the server's log from where it ends now. A subclass says in :meth:`_line` what a line is worth.

    ``order``: which of the server's outputs to look at first, 1 or 2.
    """

    name = ""
    order: tuple[int, ...] = (1, 2)

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._tail: LogTail | None = None
        self._told = (0, 0, 0)
        self._lock = threading.Lock()

    @property
    def tables(self) -> tuple[str, ...]:
        return ("counters",)

    async def probe(self) -> Finding:
        log = await asyncio.to_thread(log_of, self._ctx, self.order)
        return Finding(log.path is not None, log.reason)

    async def start(self) -> None:
        log = await asyncio.to_thread(log_of, self._ctx, self.order)
        if log.path is not None:
            self._tail = LogTail(log.path)
            await asyncio.to_thread(self._tail.read)

    async def sample(self) -> int:
        assert self._ctx.writer is not None
        if self._tail is None:
            return 0
        return await asyncio.to_thread(self._follow, self._tail)

    def restarted(self) -> None:
        """Nothing to do: what begins anew is seen in the log."""

    async def close(self) -> None:
        with self._lock:
            if self._tail is not None:
                self._tail.close()
                self._tail = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _follow(self, tail: LogTail) -> int:
        """Read and take what is new. In a thread: a backlog takes a while."""
        assert self._ctx.writer is not None
        with self._lock:  # a thread of a cancelled sample may still be at work
            if self._tail is None:
                return 0
            before = self._ctx.writer.clock.now_ns()
            lines = tail.read()
            now = self._ctx.writer.clock.now_ns()
            self._changes(tail)
            rows = sum(self._line(line, now) for line in lines)
            return rows + self._beat(before, now)

    def _line(self, line: str, now: int) -> int:
        """Take what ``line`` says; gives the rows that were handed over."""
        raise NotImplementedError

    def _beat(self, before: int, now: int) -> int:
        """After the lines of a look at the file, which began at ``before``."""
        return 0

    def _counters(self, figures: list[tuple[str, float, str]], now: int, part: str = "", window_ns: int | None = None) -> int:
        """``figures`` (name, value, unit) of now as rows; those per second as rates over ``window_ns``, if it is known."""
        assert self._ctx.writer is not None
        common: dict[str, Any] = {
            "time_ns": now, "host": self._ctx.host, "entity": f"server:{self._ctx.server.name}{part}", "status": "ok",
            "source": self.name,
        }  # fmt: skip
        rows = []
        for name, value, unit in figures:
            how: dict[str, Any] = {"semantics": "gauge"}
            if unit.endswith("/s"):
                how = {"semantics": "rate", "window_ns": window_ns}
            rows.append(common | {"name": name, "value_float": value, "unit": unit} | how)
        self._ctx.writer.append("counters", rows)
        return len(rows)

    def _event(self, kind: str, detail: str) -> None:
        assert self._ctx.writer is not None
        row = {"time_ns": self._ctx.writer.clock.now_ns(), "host": self._ctx.host, "server": self._ctx.server.name}
        self._ctx.writer.append("events", [row | {"kind": kind, "detail": detail, "source": self.name}])

    def _changes(self, tail: LogTail) -> None:
        assert self._ctx.writer is not None
        now = tail.rotations, tail.truncations, tail.dropped
        if now[1] > self._told[1]:
            self._event("gap", f"the log {tail.path.name} was cut: lines that were not read yet are lost")
        if now[2] > self._told[2]:
            self._ctx.writer.drop(f"{self.name}: lines of more than 1 MiB", now[2] - self._told[2])
        self._told = now
