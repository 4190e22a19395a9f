"""What stamps of another host's clock say against the trace clock, when each message goes one way only."""

from __future__ import annotations

from hoptrace.writer import TraceWriter

__all__ = ["OneWay"]

_EVERY_NS = 10_000_000_000


class OneWay:
    """Keeps ``clock_sync`` up for one foreign clock.

    A message stamped s over there and received at r here says: offset ≤ s − r + delay, with a delay ≥ 0 that nobody knows. The
    largest s − r of ten seconds is written as the offset: the true one is at least that. Its uncertainty is null (unknown), and
    no time is changed by it: stamps stay as they were made, signed, however odd they look.
    """

    def __init__(self, writer: TraceWriter, host: str, source: str) -> None:
        self._writer, self._host, self._source = writer, host, source
        self._best: int | None = None
        self._since = 0

    def saw(self, stamped_ns: int, received_ns: int) -> None:
        """A stamp of the foreign clock in what was received at ``received_ns`` (trace clock)."""
        offset = stamped_ns - received_ns
        if self._best is None:
            self._since = received_ns
        self._best = offset if self._best is None else max(self._best, offset)
        if received_ns - self._since >= _EVERY_NS:
            self.flush(received_ns)

    def flush(self, now_ns: int) -> None:
        """Write what was seen since the last row."""
        if self._best is None:
            return
        row = {"time_ns": now_ns, "host": self._host, "clock": "utc", "offset_ns": self._best, "source": self._source}
        self._writer.append("clock_sync", [row])
        self._best = None
