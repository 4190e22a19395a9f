"""Who recorded what from when to when, kept up while it runs: after a kill the last second at most is not covered."""

from __future__ import annotations

import threading

from hoptrace.writer import TraceWriter

__all__ = ["Coverage"]


class Coverage:
    """Open stretches of recording. A stretch is one row; its end moves on with each :meth:`extend`."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._open: dict[tuple[str, str, str | None], int] = {}
        self._lock = threading.Lock()  # sources of counters tell from threads of theirs

    def begin(self, table: str, source: str, server: str | None) -> None:
        """``source`` records ``table`` from now on (nothing if it does already)."""
        with self._lock:
            self._open.setdefault((table, source, server), self._writer.clock.now_ns())

    def end(self, source: str, server: str | None) -> None:
        """``source`` has stopped recording ``server``, or can see nothing of it for now."""
        with self._lock:
            theirs = [key for key in self._open if key[1:] == (source, server)]
            self._write(theirs)
            for key in theirs:
                del self._open[key]

    def extend(self) -> None:
        """All that is open lasts until now."""
        with self._lock:
            self._write(list(self._open))

    def _write(self, keys: list[tuple[str, str, str | None]]) -> None:
        now = self._writer.clock.now_ns()
        self._writer.append(
            "coverage",
            [
                {"table": table, "source": source, "server": server, "from_ns": self._open[table, source, server], "to_ns": now}
                for table, source, server in keys
            ],
        )
