"""Rows of `tokens`, kept as columns: there may be thousands a second, and a mapping for each would cost more than its parsing."""

from __future__ import annotations

import pyarrow as pa

from hoptrace.collectors.engines.streams.place import Place
from hoptrace.parts import conform
from hoptrace.schema import TABLES

__all__ = ["TokenRows", "warm"]

_NAMES = ("request", "sequence", "index", "time_ns", "count", "coalesced")


class TokenRows:
    """Emissions of all requests that one recorder sees, until they are handed over."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._rows: list[tuple[int, int, int, int, int, bool]] = []

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self._rows)

    def add(self, request: int, sequence: int, index: int, time_ns: int, count: int, coalesced: bool) -> None:
        """One emission."""
        self._rows.append((request, sequence, index, time_ns, count, coalesced))

    def take(self) -> pa.RecordBatch:
        """All of them; there are none afterwards."""
        rows, self._rows = self._rows, []
        columns = {
            name: pa.array(values, pa.bool_() if name == "coalesced" else pa.int64())
            for name, values in zip(_NAMES, zip(*rows, strict=True), strict=True)
        }
        for name, word in (("vantage", self._place.vantage), ("source", self._place.source)):
            columns[name] = pa.repeat(pa.scalar(word), len(rows))
        return pa.RecordBatch.from_pydict(columns)


def warm(place: Place) -> None:
    """Do once what is slow the first time."""
    rows = TokenRows(place)
    rows.add(0, 0, 0, 0, 1, False)
    conform(pa.Table.from_batches([rows.take()]), TABLES["tokens"])
