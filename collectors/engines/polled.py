"""A source that asks the server one question per sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hoptrace.collectors.base import Finding, ServerAway
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.http import Reply

__all__ = ["Polled"]

_ANSWER_S = 60.0


class Polled:
    """Asks ``path`` and turns the answer into rows of `counters`, stamped with the middle of the question.

    ``off``: what it means that the path is not there, and what turns it on.
    """

    name = ""
    path = ""
    off = "is not there"
    tables: tuple[str, ...] = ("counters",)

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._incarnation = 1

    async def probe(self) -> Finding:
        reply = await self._ctx.api.get(self.path)
        return Finding(True) if reply.ok else Finding(False, reply.why(self.path, self.off))

    async def start(self) -> None:
        return None

    def restarted(self) -> None:
        self._incarnation += 1

    async def close(self) -> None:
        return None

    async def sample(self) -> int:
        reply, stamp = await self._ask()
        return self._write(stamp, list(self._rows(reply)) if reply.ok else [])

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _ask(self) -> tuple[Reply, dict[str, Any]]:
        """The answer, and when it was true. Raises ServerAway."""
        assert self._ctx.writer is not None
        clock = self._ctx.writer.clock
        before = clock.now_ns()
        # llama.cpp's answer waits for the iteration in progress, and a long prompt's may take many seconds: slow is not dead.
        reply = await self._ctx.api.get(self.path, timeout_s=_ANSWER_S)
        after = clock.now_ns()
        if reply.status is None and reply.problem != "timeout":
            raise ServerAway(reply.problem)
        return reply, {"time_ns": (before + after) // 2, "uncertainty_ns": (after - before) // 2}

    def _write(self, stamp: dict[str, Any], rows: list[dict[str, Any]]) -> int:
        """Hand over ``rows``; one that has its own stamp keeps it. Gives their number."""
        assert self._ctx.writer is not None
        common = stamp | {"host": self._ctx.host, "source": self.name}
        common["incarnation"] = f"{self._ctx.server.name}#{self._incarnation}"
        self._ctx.writer.append("counters", [common | row for row in rows])
        return len(rows)

    def _event(self, kind: str, detail: str) -> None:
        assert self._ctx.writer is not None
        row = {"time_ns": self._ctx.writer.clock.now_ns(), "host": self._ctx.host, "server": self._ctx.server.name}
        self._ctx.writer.append("events", [row | {"kind": kind, "detail": detail[:500], "source": self.name}])

    def _rows(self, reply: Reply) -> Iterator[dict[str, Any]]:
        raise NotImplementedError
