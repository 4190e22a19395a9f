"""All that the rows of one replay are made of: who asked, what ran, and the time outside the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from hoptrace.manifest import Server
from hoptrace.replay.outcome import REQUEST, Outcome
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.parent import Parent
from hoptrace.replay.plan import Plan
from hoptrace.replay.rows.steplog import StepLog
from hoptrace.replay.workload import Workload
from hoptrace.schema import TABLES

__all__ = ["Ints", "Setting", "as_table", "fitted", "known", "repeated"]

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Setting:
    """``servers``: the manifest's, by name among those of ``plan.engines``. ``steps``: sealed. ``work``: as it was simulated."""

    parent: Parent
    work: Workload
    plan: Plan
    servers: Sequence[Server]
    overheads: Overheads
    outcome: Outcome
    steps: StepLog

    @cached_property
    def order(self) -> Ints:
        """Positions of the work in the order of the requests' numbers."""
        found: Ints = np.argsort(self.work.request, kind="stable")
        return found

    @cached_property
    def client_slot(self) -> Ints:
        """The client of each request of a closed loop; see :func:`hoptrace.replay.clients.client_slots`."""
        from hoptrace.replay.clients import client_slots

        return client_slots(self)

    @cached_property
    def engine_names(self) -> pl.Series:
        """The server of each engine."""
        return pl.Series([e.name for e in self.plan.engines], dtype=pl.String)

    @cached_property
    def ranks(self) -> Ints:
        """The data-parallel rank of each engine."""
        return np.array([e.dp_rank for e in self.plan.engines], dtype=np.int64)

    def column(self, name: str, at: Ints) -> Ints:
        """A column of ``outcome.REQUEST`` at these positions of the work; -1 where it did not happen."""
        found: Ints = self.outcome.requests[at, REQUEST.index(name)]
        return found

    def servers_of(self, engine: Ints) -> pl.Series:
        """Names of the servers of these engines; null for -1."""
        at = pl.Series(engine, dtype=pl.Int64)
        return self.engine_names.gather(at.clip(0)).zip_with(at >= 0, pl.Series([None], dtype=pl.String)).alias("server")


def known(values: Ints) -> pl.Series:
    """-1 as null."""
    s = pl.Series(values, dtype=pl.Int64)
    return s.set(s < 0, None)


def fitted(frame: pl.DataFrame, table: str) -> pa.Table:
    """The frame with exactly the columns of the schema, source `replay`, sorted."""
    spec = TABLES[table]
    want = pl.from_arrow(spec.arrow.empty_table())
    assert isinstance(want, pl.DataFrame)
    frame = frame.with_columns(pl.lit("replay").alias("source"))
    whole = frame.select(
        pl.col(c).cast(t) if c in frame.columns else pl.lit(None, dtype=t).alias(c) for c, t in want.schema.items()
    ).sort(*(spec.sort or spec.names), nulls_last=True, maintain_order=True)
    return whole.to_arrow().cast(spec.arrow)


def as_table(table: str, columns: dict[str, Any], rows: int) -> pa.Table:
    """Arrow rows of the schema from arrays (int64) or single values; what is missing is null. For long tables: no copies."""
    spec = TABLES[table]
    arrays = []
    for c in spec.columns:
        value = columns.get(c.name)
        if c.name == "source":
            value = "replay"
        if value is None:
            arrays.append(pa.nulls(rows, c.type))
        elif isinstance(value, np.ndarray):
            arrays.append(pa.array(np.ascontiguousarray(value), type=c.type))
        elif isinstance(value, pl.Series):
            arrays.append(value.to_arrow().cast(c.type))
        elif isinstance(value, pa.Array | pa.ChunkedArray):
            arrays.append(value.cast(c.type))
        else:
            arrays.append(repeated(value, rows, c.type))
    return pa.table(arrays, schema=spec.arrow)


def repeated(value: Any, rows: int, kind: pa.DataType) -> pa.Array:
    """One value in every row."""
    return pa.repeat(pa.scalar(value, kind), rows)
