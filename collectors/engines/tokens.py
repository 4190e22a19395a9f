"""Rows of `tokens`, kept as columns: there may be thousands a second, and a mapping for each would cost more than its parsing."""

from __future__ import annotations

import pyarrow as pa

from hoptrace.collectors.engines.place import Place

__all__ = ["TokenRows"]


class TokenRows:
    """Emissions of all requests that one recorder sees, until they are handed over."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._clear()

    def _clear(self) -> None:
        self._request: list[int] = []
        self._sequence: list[int] = []
        self._index: list[int] = []
        self._time_ns: list[int] = []
        self._count: list[int] = []
        self._coalesced: list[bool] = []

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self._request)

    def add(self, request: int, sequence: int, index: int, time_ns: int, count: int, coalesced: bool) -> None:
        """One emission."""
        self._request.append(request)
        self._sequence.append(sequence)
        self._index.append(index)
        self._time_ns.append(time_ns)
        self._count.append(count)
        self._coalesced.append(coalesced)

    def take(self) -> pa.RecordBatch:
        """All of them; there are none afterwards."""
        n = self.rows
        integers = {
            "request": self._request, "sequence": self._sequence, "index": self._index, "time_ns": self._time_ns,
            "count": self._count,
        }  # fmt: skip
        columns = {name: pa.array(values, pa.int64()) for name, values in integers.items()}
        columns["coalesced"] = pa.array(self._coalesced, pa.bool_())
        for name, word in (("vantage", self._place.vantage), ("source", self._place.source)):
            columns[name] = pa.repeat(pa.scalar(word), n)
        self._clear()
        return pa.RecordBatch.from_pydict(columns)
