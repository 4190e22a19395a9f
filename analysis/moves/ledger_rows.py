"""The rows of the ledger: recorded moves by way, with hops and control operations of those that do not say theirs assumed from
the mechanism's access path, and what the steps read and write of their servers' own memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import polars as pl

from hoptrace.access import access, is_loopback
from hoptrace.analysis.query import query
from hoptrace.kv import step_bytes
from hoptrace.manifest import Manifest, Server
from hoptrace.platform import Graph, graph_of
from hoptrace.reader import Trace

__all__ = ["SCHEMA", "SUMS", "known_sum", "local_links", "memory_rows", "moved_rows"]

SUMS = (
    "moves", "bytes", "bytes_unknown", "link_bytes", "transfers", "transfers_unknown", "payload_hops", "payload_hops_unknown",
    "control_ops", "control_ops_unknown", "payload_hops_assumed", "control_ops_assumed",
)  # fmt: skip
_HELD = ("assumed_payload_bytes", "assumed_payload_ops")
SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    **dict.fromkeys(("object", "src", "dst"), pl.String),
    "path": pl.List(pl.String),
    **dict.fromkeys(("mechanism", "basis"), pl.String),
    **dict.fromkeys(SUMS, pl.Int64),
    **dict.fromkeys(_HELD, pl.Int64),
    "partly": pl.Boolean,
}  # fmt: skip


def known_sum(column: str) -> pl.Expr:
    """The sum of a column's known values; null where there are none."""
    return pl.when(pl.col(column).is_not_null().any()).then(pl.col(column).sum()).alias(column)


def moved_rows(trace: Trace, blind: Collection[str] = ()) -> pl.DataFrame:
    """Recorded moves by object, src, dst, path, mechanism and basis, with :data:`SUMS`, and for semantic density
    ``assumed_payload_bytes`` and ``assumed_payload_ops``: bytes and assumed operations of the moves that know only their
    bytes. ``partly``: one of the sources ``blind`` tells of them, which did not see all of them."""
    found = query(trace, "ledger_moves")
    found = found.with_columns(pl.col("sources").list.eval(pl.element().is_in(list(blind))).list.any().alias("partly"))
    local = local_links(trace.manifest)
    extra = [_assumed(r, local) for r in found.iter_rows(named=True)]
    names = ("payload_hops_assumed", "control_ops_assumed", *_HELD)
    columns = [pl.Series(n, [e[i] for e in extra], dtype=pl.Int64) for i, n in enumerate(names)]
    return found.with_columns(columns).select(*SCHEMA).cast(dict(SCHEMA))  # type: ignore[arg-type]


def _assumed(row: Mapping[str, Any], local: frozenset[str]) -> tuple[int | None, int | None, int | None, int | None]:
    path: Sequence[str] = row["path"] or []
    near = access(row["mechanism"], local=True)
    far = access(row["mechanism"])
    if near is None or far is None:
        return None, None, None, None
    if far.hops or near is far:
        hops, ops = far.payload_hops(len(path)), far.control_ops(len(path))
    else:  # every link is a transfer of its own: those that stay within one host are shorter
        mine = [near if link in local else far for link in path] or [far]
        hops, ops = sum(a.payload_hops() for a in mine), sum(a.control_ops() for a in mine)
    untold_hops, untold_ops, sized, size = (row[n] for n in ("hops_untold", "ops_untold", "sized_ops_untold", "bytes_untold"))
    told = size is not None and sized
    return (
        _times(untold_hops, hops),
        _times(untold_ops, ops),
        size if told else None,
        _times(sized, ops) if told else None,
    )


def _times(n: int | None, each: int) -> int | None:
    total = None if n is None else n * each
    return None if total is None or total >= 1 << 63 else total


def local_links(manifest: Manifest) -> frozenset[str]:
    """Links of the platform graph that stay within one host: of kind loopback, or to a server whose URL names this very host."""
    graph: Graph = graph_of(manifest)
    here = {f"server:{s.name}" for s in manifest.servers if is_loopback(s.url)}
    return frozenset(k.name for k in graph.links.values() if k.kind == "loopback" or (k.kind is None and here & {k.a, k.b}))


def memory_rows(trace: Trace, steps: pl.LazyFrame) -> tuple[pl.DataFrame, list[str]]:
    """Memory → compute from the steps: weights and KV read, KV written (derived from the composition of the steps)."""
    empty = pl.DataFrame(schema=SCHEMA)
    names = steps.select(pl.col("server").unique()).collect(engine="streaming")["server"].to_list()
    if not names:
        return empty, ["No steps are known: what compute read and wrote of its own memory is unknown."]
    rows: list[dict[str, Any]] = []
    unseen: list[str] = []
    for name in sorted(names, key=str):
        server = trace.manifest.server(str(name))
        mine = steps.filter(pl.col("server").eq_missing(name))
        filled = _filled(mine, server) if server is not None else mine
        ways = (("weights", "weight_bytes", True), ("kv", "kv_read_bytes", True), ("kv", "kv_write_bytes", False))
        wanted = [pl.len().alias("n")]
        for _, column, _ in ways:
            wanted += [pl.col(column).count().alias(f"{column}_known"), pl.col(column).sum().alias(column)]
        sums = filled.select(wanted).collect(engine="streaming").row(0, named=True)
        for what, column, read in ways:
            if not (known := sums[f"{column}_known"]):
                unseen.append(f"{name}: {column} is unknown (the manifest lacks the model's geometry).")
                continue
            rows.append({
                "object": what,
                "src": f"memory:{name}" if read else f"compute:{name}",
                "dst": f"compute:{name}" if read else f"memory:{name}",
                "mechanism": "load_store",
                "basis": "derived",
                "moves": known,
                "bytes": int(sums[column]),
                "bytes_unknown": sums["n"] - known,
                "link_bytes": int(sums[column]),
                "partly": False,
            })  # fmt: skip
    return pl.DataFrame(rows, schema=SCHEMA) if rows else empty, unseen


def _filled(steps: pl.LazyFrame, server: Server) -> pl.LazyFrame:
    """``steps`` of one server with the bytes that they do not say. The stages of a pipeline share the model's layers: what the
    whole model reads and writes stands once for a step, in the row of its first rank; the other ranks have what they recorded."""
    rank = pl.col("pp_rank").fill_null(0)
    first = rank == rank.min()
    told = pl.any_horizontal(pl.col(c).is_not_null() for c in ("weight_bytes", "kv_read_bytes", "kv_write_bytes"))
    return pl.concat([step_bytes(steps.filter(first), server), steps.filter(~first & told)], how="vertical_relaxed")
