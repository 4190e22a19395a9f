"""Steps, residency and moves, block by block as the simulation gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from hoptrace.kv import step_bytes
from hoptrace.manifest import Server
from hoptrace.replay.outcome import MOVE, RUN, STEP
from hoptrace.replay.plan import Plan, Way
from hoptrace.replay.setting import Ints, as_table
from hoptrace.schema import PHASES

__all__ = ["move_table", "residency_table", "step_table", "way_of"]

_S, _R, _M = ({name: i for i, name in enumerate(columns)} for columns in (STEP, RUN, MOVE))
_BYTES = ("weight_bytes", "kv_read_bytes", "kv_write_bytes")


def step_table(rows: Ints, plan: Plan, servers: Sequence[Server]) -> pa.Table:
    """A block of steps as rows of the table, ordered by server, rank and step."""
    names = [e.name for e in plan.engines]
    if len(plan.engines) > 1:
        rank = np.empty(len(names), dtype=np.int64)
        rank[sorted(range(len(names)), key=lambda i: (names[i], plan.engines[i].dp_rank))] = np.arange(len(names))
        rows = rows[np.argsort(rank[rows[:, 0]], kind="stable")]
    columns: dict[str, Any] = {c: np.ascontiguousarray(rows[:, i]) for c, i in _S.items() if c not in ("engine", "blocked_by")}
    if plan.speculation is None:
        columns["draft_proposed"] = columns["draft_accepted"] = None
    engine = rows[:, _S["engine"]]
    columns |= {
        "server": _names(names, engine),
        "dp_rank": _each([e.dp_rank for e in plan.engines], engine),
        "pp_rank": 0,
        "kv_capacity_tokens": _each([e.capacity_tokens for e in plan.engines], engine),
        "origin": "replayed",
        **_bytes(columns, engine, plan, servers),
    }
    return as_table("steps", columns, len(rows))


def _bytes(columns: dict[str, Any], engine: Ints, plan: Plan, servers: Sequence[Server]) -> dict[str, Any]:
    """Weights and KV that the steps read and wrote, by each server's own geometry."""
    of = {s.name: i for i, s in enumerate(servers)}
    which = np.array([of.get(e.name, -1) for e in plan.engines], dtype=np.int64)[engine]
    needed = ("prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_tokens",
              "decode_context_tokens")  # fmt: skip
    frame = pl.DataFrame({c: columns[c] for c in needed}).with_columns(pl.lit(None, dtype=pl.Int64).alias(c) for c in _BYTES)
    used = np.unique(which)
    alike = {s.model_copy(update={"name": ""}).model_dump_json(exclude={"config", "url", "pid"}) for s in servers}
    if len(used) == 1 or len(alike) == 1:
        told = step_bytes(frame, servers[max(0, int(used[0]))]) if len(used) and servers else frame
        return {c: told[c] for c in _BYTES}
    frame = frame.with_columns(pl.Series("_at", np.arange(frame.height)), pl.Series("_server", which))
    told = pl.concat([step_bytes(frame.filter(pl.col("_server") == i), servers[i]) for i in used if i >= 0]).sort("_at")
    whole = frame.select("_at").join(told.select("_at", *_BYTES), on="_at", how="left", maintain_order="left")
    return {c: whole[c] for c in _BYTES}


def residency_table(rows: Ints, plan: Plan, requests: Ints) -> pa.Table:
    """A block of runs as rows of the table. ``requests``: numbers by position in the work."""
    number = requests[rows[:, _R["request"]]]
    sort = np.lexsort((rows[:, _R["first_step"]], number))
    rows, number = rows[sort], number[sort]
    engine = rows[:, _R["engine"]]
    columns = {
        "request": number,
        "sequence": 0,
        "server": _names([e.name for e in plan.engines], engine),
        "dp_rank": _each([e.dp_rank for e in plan.engines], engine),
        "phase": _names(list(PHASES), rows[:, _R["phase"]]),
        **{c: rows[:, _R[c]] for c in ("first_step", "last_step", "tokens_per_step", "context_at_start")},
    }
    return as_table("residency", columns, len(rows))


def move_table(rows: Ints, plan: Plan, requests: Ints) -> pa.Table:
    """A block of moves of KV as rows of the table, by start.

    ``transfers`` are the descriptors where a block's hops divide among them, else the blocks; hops and control operations are of
    one transfer, as the schema has them, where they follow from an access path: of a link of the policy nobody said them, and the
    ledger assumes the mechanism's. All else is *derived*, from tokens and block sizes.
    """
    rows = rows[np.argsort(rows[:, _M["start_ns"]], kind="stable")]
    way = rows[:, _M["way"]]
    request = rows[:, _M["request"]]
    units = [_unit(w) for w in plan.ways]
    per_block = np.array([u[0] for u in units], dtype=np.int64)[way]
    paths = pl.Series([list(way_of(plan, w)) for w in plan.ways], dtype=pl.List(pl.String))
    columns = {
        "start_ns": rows[:, _M["start_ns"]],
        "end_ns": rows[:, _M["end_ns"]],
        "request": pl.Series(requests[np.maximum(request, 0)]).set(pl.Series(request < 0), None),
        "server": _names([e.name for e in plan.engines], rows[:, _M["engine"]]),
        "step": rows[:, _M["step"]],
        "object": "kv",
        "bytes": rows[:, _M["bytes"]],
        # The rest of a layer that follows its blocks is one transfer more.
        "transfers": np.maximum(1, rows[:, _M["blocks"]] * per_block),
        "src": _names([w.src for w in plan.ways], way),
        "dst": _names([w.dst for w in plan.ways], way),
        "mechanism": _names([w.mechanism for w in plan.ways], way),
        "path": paths.gather(way),
        "payload_hops": _each([u[1] if w.derived else None for u, w in zip(units, plan.ways, strict=True)], way),
        "control_ops": _each([u[2] if w.derived else None for u, w in zip(units, plan.ways, strict=True)], way),
        "basis": "derived",
    }
    return as_table("moves", columns, len(rows))


def _unit(w: Way) -> tuple[int, int, int]:
    """(transfers in a block, payload hops of one, control operations of one)."""
    n = max(1, w.transfers_per_block)
    if w.payload_hops % n == 0 and w.control_ops % n == 0:
        return n, w.payload_hops // n, w.control_ops // n
    return 1, w.payload_hops, w.control_ops


def way_of(plan: Plan, way: Way) -> tuple[str, ...]:
    """The links that a move over the way names."""
    return way.path or tuple(plan.links[i].name for i in way.links)


def _names(names: Sequence[str], at: Ints) -> Any:
    """A name per row; the one there is, where there is one."""
    if len(names) == 1:
        return names[0]
    codes = pa.array(np.ascontiguousarray(at).astype(np.int32))
    return pa.DictionaryArray.from_arrays(codes, pa.array(list(names), type=pa.string()))


def _each(values: Sequence[int | None], at: Ints) -> Any:
    """A number per row; the one there is, where all are the same."""
    if len(set(values)) == 1:
        return values[0]
    return pl.Series(values, dtype=pl.Int64).gather(at)
