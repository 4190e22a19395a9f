"""Where a source puts its readings: series are declared once, readings are a number and a value, rows are made once a second.

Raw values are kept, with what they mean; nothing is derived here. A reading that equals the last one of its series is not written
again until it changes; then the last equal one is written too, so that no line between two rows is a lie. A series that stands
still is written once in ten seconds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

import pyarrow as pa

from hoptrace.writer import TraceWriter

__all__ = ["AGAIN_NS", "ALL_ONES", "Direction", "Semantics", "Sink", "Status", "hand_over"]

Status = Literal["ok", "absent", "unsupported", "denied", "lost", "stale", "error"]
Semantics = Literal["cumulative", "gauge", "delta", "rate"]
Direction = Literal["tx", "rx", "read", "write"]

AGAIN_NS = 10_000_000_000
ALL_ONES = (1 << 64) - 1
"""What many drivers write for a 64-bit field that they do not have: never a value."""

_MAX_ROWS = 200_000
_COLUMNS = ("entity", "incarnation", "name", "direction", "unit", "semantics", "window_ns", "width_bits")
_TYPES = (*(pa.string(),) * 6, pa.int64(), pa.int64())
_Key = tuple[str, str | None, str, str | None, str | None, str, int | None, int | None]
_Told = tuple[Any, ...]
_Row = tuple[int, int, int, int | float | None, str]
_Last = tuple[int | float | None, str, int, int, int, bool]


class Sink:
    """The readings of one source. Only that source's thread puts; any thread may :meth:`flush`."""

    def __init__(self, writer: TraceWriter, host: str, source: str) -> None:
        self._writer, self._host, self._source = writer, host, source
        self._series: dict[_Key, int] = {}
        self._keys: list[_Key] = []
        self._rows: deque[_Row] = deque()  # put and flush are in two threads: its ends are safe
        self._last: list[_Last | None] = []
        self._steady: list[bool] = []
        self._time_ns = self._uncertainty_ns = 0
        self._lock = threading.Lock()
        self._dropped: dict[str, int] = {}
        self.rows = 0

    @property
    def series_count(self) -> int:
        """Series that have been declared."""
        return len(self._keys)

    def now_ns(self) -> int:
        """Now, on the trace clock."""
        return self._writer.clock.now_ns()

    def from_monotonic_ns(self, stamp_ns: int) -> int:
        """A CLOCK_MONOTONIC stamp of this host on the trace clock."""
        return self._writer.clock.from_monotonic_ns(stamp_ns)

    def at(self, before_ns: int, after_ns: int) -> None:
        """Readings from here on were made between these two instants: the middle, uncertain by half the width."""
        self._time_ns, self._uncertainty_ns = (before_ns + after_ns) // 2, (after_ns - before_ns) // 2

    def series(
        self,
        entity: str,
        name: str,
        unit: str | None,
        semantics: Semantics,
        *,
        direction: Direction | None = None,
        incarnation: str | None = None,
        width_bits: int | None = None,
        window_ns: int | None = None,
    ) -> int:
        """The number of a series, for :meth:`put`. The same arguments give the same number.

        incarnation: what must be the same for a difference of two readings to mean anything (boot, start of a process, of a
        driver): a series of another one is another series. width_bits: at which the counter wraps; null where nobody tells.
        """
        key = (entity, incarnation, name, direction, unit, semantics, window_ns, width_bits)
        number = self._series.get(key)
        if number is None:
            with self._lock:
                number = self._series[key] = len(self._keys)
                self._keys.append(key)
                self._last.append(None)
                # A value that is a difference, or covers a window, says something new each time, also when it is equal.
                self._steady.append(semantics in ("cumulative", "gauge"))
        return number

    def put(self, series: int, value: int | float | None, status: Status = "ok") -> None:
        """One reading, at the time told by :meth:`at`. Without a value the status says why; it is no zero."""
        if value is not None and value >= ALL_ONES:  # more: all ones in another unit (sectors, KiB), which no counter reaches
            self.drop("all ones (no value)")
            value, status = None, "unsupported"
        last = self._last[series]
        now = self._time_ns
        if last is not None and self._steady[series] and value == last[0] and status == last[1] and now - last[2] < AGAIN_NS:
            self._last[series] = (value, status, last[2], now, self._uncertainty_ns, True)
            return
        if len(self._rows) >= _MAX_ROWS:
            self.drop("readings beyond what is held between two flushes")
            return
        if last is not None and last[5]:
            self._rows.append((series, last[3], last[4], last[0], last[1]))
        self._last[series] = (value, status, now, now, self._uncertainty_ns, False)
        self._rows.append((series, now, self._uncertainty_ns, value, status))

    def put_all(self, series: Iterable[int], values: Iterable[int | float]) -> None:
        """One reading of each of these series."""
        for number, value in zip(series, values, strict=True):
            self.put(number, value)

    def fail(self, series: Iterable[int], status: Status) -> None:
        """None of these series could be read, for this reason."""
        for number in series:
            self.put(number, None, status)

    def event(self, kind: str, detail: str, server: str | None = None) -> None:
        """A thing that happened, now."""
        row = {"time_ns": self.now_ns(), "host": self._host, "server": server, "kind": kind, "detail": detail[:500]}
        self._writer.append("events", [row | {"source": self._source}])

    def clock(self, clock: str, offset_ns: int, uncertainty_ns: int, time_ns: int | None = None) -> None:
        """What a foreign clock said: its time less the trace's, when it was read."""
        row = {"time_ns": self.now_ns() if time_ns is None else time_ns, "host": self._host, "clock": clock}
        row |= {"offset_ns": offset_ns, "uncertainty_ns": uncertainty_ns, "source": self._source}
        self._writer.append("clock_sync", [row])

    def drop(self, reason: str, n: int = 1) -> None:
        """Count what could not be kept, by reason."""
        self._dropped[reason] = self._dropped.get(reason, 0) + n

    def settle(self) -> None:
        """At the end: series that stood still are written as of their last reading."""
        for number, last in enumerate(self._last):
            if last is not None and last[5]:
                self._rows.append((number, last[3], last[4], last[0], last[1]))
                self._last[number] = (*last[:5], False)

    def take(self) -> list[_Told]:
        """What has been put since the last time, with what its series are; what was dropped goes to the manifest."""
        with self._lock:
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            dropped, self._dropped = self._dropped, {}
        for reason, n in dropped.items():
            self._writer.drop(f"{self._source}: {reason}", n)
        self.rows += len(rows)
        keys, source = self._keys, self._source
        return [(*keys[number], time_ns, half_ns, value, status, source) for number, time_ns, half_ns, value, status in rows]

    def flush(self) -> int:
        """Hand it over; gives the number of rows."""
        rows = self.take()
        hand_over(self._writer, self._host, rows)
        return len(rows)


def hand_over(writer: TraceWriter, host: str, rows: list[_Told]) -> None:
    """Rows of any number of sinks at once: a table costs the same for ten rows and for a thousand."""
    if not rows:
        return
    *told, times, uncertain, values, statuses, sources = zip(*rows, strict=True)
    whole = [v if type(v) is int else None for v in values]
    try:
        ints = pa.array(whole, pa.int64())
    except OverflowError:  # a 64-bit counter in its upper half: it is kept to 53 bits
        big = {i for i, v in enumerate(whole) if v is not None and not -(1 << 63) <= v < 1 << 63}
        ints = pa.array([None if i in big else v for i, v in enumerate(whole)], pa.int64())
        values = tuple(float(v) if i in big and v is not None else v for i, v in enumerate(values))
    columns = {name: pa.array(column, kind) for name, column, kind in zip(_COLUMNS, told, _TYPES, strict=True)} | {
        "time_ns": pa.array(times, pa.int64()),
        "uncertainty_ns": pa.array(uncertain, pa.int64()),
        "host": pa.array([host] * len(rows), pa.string()),
        "value_int": ints,
        "value_float": pa.array([v if isinstance(v, float) else None for v in values], pa.float64(), from_pandas=True),
        "status": pa.array(statuses, pa.string()),
        "source": pa.array(sources, pa.string()),
    }
    writer.append_arrow("counters", pa.table(columns))
