"""A benchmark's own figures (means, percentiles, rates) as samples in `counters`: what the tool said, beside hoptrace's own.

Names are the tool's, after `bench:`; the unit is the one that the tool's name or file states. They are never used in place of
what the requests say: tools define some of them otherwise (docs/benchmarks-import.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from hoptrace.collectors.files.base import Sink
from hoptrace.errors import InputError

__all__ = ["ONLY_FIGURES", "Figures"]

ONLY_FIGURES = "{file} has the benchmark's totals only, no requests: they are in `counters`, and nothing is computed from them."
_ENDINGS = (
    ("_ms", "ms"), ("_s", "s"), ("_tokens", "tokens"), ("_throughput", "1/s"), ("_per_sec", "1/s"), ("_per_s", "1/s"),
    ("_pct", "%"), ("_count", "1"), ("duration", "s"),
)  # fmt: skip
_MOST = 100_000


class Figures:
    """Collects figures of one file. ``run`` tells several runs in one file apart: `incarnation` is FILE or FILE:RUN."""

    def __init__(self, sink: Sink, tool: str) -> None:
        self._sink = sink
        self._entity = f"bench:{tool}"
        self._rows: list[dict[str, Any]] = []

    def add(self, name: str, value: object, *, unit: str | None = None, run: object = None) -> None:
        """Keep one figure; what is no finite number is left out."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e308 <= value <= 1e308:
            return
        if len(self._rows) >= _MOST:
            self._sink.lost("counters.value_float: more than 100,000 figures in one file")
            return
        file = self._sink.path.name
        self._rows.append(
            {
                "entity": self._entity, "incarnation": file if run is None else f"{file}:{run}", "name": f"bench:{name}",
                "value_float": float(value), "unit": unit or unit_of(name), "semantics": "gauge", "status": "ok",
            }
        )  # fmt: skip

    def tree(
        self, found: object, *, name: str = "", unit: str | None = None, run: object = None, leave: Iterable[str] = ()
    ) -> None:
        """Keep every number inside nested objects, named by its path: `latency.request_latency.p99`. Lists are left out."""
        if isinstance(found, Mapping):
            mine = found.get("unit") or found.get("units")
            unit = mine if isinstance(mine, str) else unit
            for key, value in found.items():
                if key not in leave:
                    self.tree(value, name=f"{name}.{key}" if name else str(key), unit=unit, run=run)
        else:
            self.add(name, found, unit=unit, run=run)

    def write(self, time_ns: int | None, *, requests: int) -> None:
        """Write them, all with one time (0 where the file has none).

        ``requests``: how many records of requests the file has; if none, the figures are its records.

        Raises:
            InputError: there are neither requests nor figures.
        """
        sink = self._sink
        if not requests:
            if not self._rows:
                raise InputError(f"{sink.path} has neither requests nor figures.", hint="Was the benchmark stopped at its start?")
            sink.main = "counters"
            sink.count(len(self._rows))
            sink.note(ONLY_FIGURES.replace("{file}", sink.path.name))
        if self._rows:
            schema = {"entity": pl.String, "incarnation": pl.String, "name": pl.String, "value_float": pl.Float64,
                      "unit": pl.String, "semantics": pl.String, "status": pl.String}  # fmt: skip
            frame = pl.DataFrame(self._rows, schema=schema)
            sink.write("counters", frame.with_columns(pl.lit(time_ns or 0, dtype=pl.Int64).alias("time_ns")))


def unit_of(name: str) -> str | None:
    """The unit that a figure's name states, or null."""
    return next((unit for ending, unit in _ENDINGS if name.endswith(ending)), None)
