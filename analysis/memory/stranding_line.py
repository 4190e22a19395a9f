"""The KV spaces of a trace over time, as step functions, in chunks of bounded size whatever the trace's length.

A step says at its start what is in use during it. Between two steps it is what both leave room for: the lesser of their values
(who ended with the first gave back what he had, the second took what its newcomers need), or nothing where no request was there.
Nobody speaks for a gap in which it is not known whether somebody was there, nor for a time in which the server was away or nobody
recorded its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import polars as pl

from hoptrace.analysis.latency.serverstate import ServerState, server_state
from hoptrace.analysis.memory.stranding_exact import MOST_NS, MOST_TOKENS, Ints
from hoptrace.analysis.memory.stranding_pieces import Next, Pieces, columns, pieces_of
from hoptrace.analysis.memory.stranding_rank import Rank, occupied
from hoptrace.kv import geometry
from hoptrace.manifest import Server
from hoptrace.reader import Trace
from hoptrace.step_source import StepSource

__all__ = ["ROWS", "Lines", "lines"]

ROWS = 200_000
"""Steps that are held at once."""

_BINS = 4096
_MOST_BYTES = 1 << 24  # KV bytes of one token: GPT-3's 4.7 MB is the most that was built
_KEYS = ("server", "dp_rank", "pp_rank")


@dataclass(frozen=True)
class Lines:
    """``ranks``: the KV spaces that have steps. ``cuts``: the ends of the chunks. ``first``: (rank, chunk) → its first step
    there."""

    ranks: list[Rank]
    steps: pl.LazyFrame
    cuts: list[int] = field(default_factory=list)
    first: Mapping[tuple[int, int], Next] = field(default_factory=dict)

    def chunks(self) -> Iterator[tuple[int, int, list[Pieces]]]:
        """(from_ns, to_ns, pieces by rank) over all that was recorded, ascending, without a hole."""
        last: list[pl.DataFrame | None] = [None] * len(self.ranks)
        for k, (low, high) in enumerate(pairwise(self.cuts)):
            rows = self.steps.filter((pl.col("start_ns") >= low) & (pl.col("start_ns") < high)).collect()
            out = []
            for i, rank in enumerate(self.ranks):
                mine = rows.filter((pl.col("server") == rank.server) & (pl.col("dp_rank") == rank.dp_rank))
                mine = mine.sort("start_ns", "step")
                before = last[i]
                if before is not None:
                    mine = pl.concat([before, mine])
                last[i] = mine.tail(1) if mine.height else None
                out.append(pieces_of(rank, mine, before is not None, low, high, self._next(i, k)))
            yield low, high, out

    def _next(self, rank: int, chunk: int) -> Next | None:
        return next((self.first[rank, k] for k in range(chunk + 1, len(self.cuts)) if (rank, k) in self.first), None)


def lines(trace: Trace, source: StepSource, stays: pl.DataFrame, rows: int | None = None, *, sampled: bool = True) -> Lines:
    """The KV spaces that the trace's steps tell of. ``stays``: of :func:`stranding_stays.stays`. ``rows``:
    steps held at once (null: :data:`ROWS`, fewer where there are many ranks)."""
    steps = columns(source.steps)
    spans = (
        steps.group_by("server", "dp_rank")
        .agg(
            pl.len(),
            pl.col("start_ns").min(),
            pl.max_horizontal("start_ns", "end_ns").max().alias("end_ns"),
            pl.col("pp_rank").min(),
            pl.col("pp_rank").max().alias("pp_last"),
            pl.col("used").count().alias("counted"),
            pl.col("context").count().alias("derived"),
        )
        .sort("server", "dp_rank")
        .collect(engine="streaming")
    )
    if (spans["pp_last"] > spans["pp_rank"]).any():
        # The stages of a pipeline hold their layers of the same tokens: one of them says it all.
        steps = steps.join(spans.lazy().select(_KEYS), on=_KEYS, how="semi")
    ranks = _ranks(trace, source, spans, stays)
    if sampled:
        ranks = _with_samples(trace, ranks)
    if not ranks:
        return Lines([], steps)
    cuts = _cuts(steps, ranks, max(25_000, ROWS // len(ranks)) if rows is None else max(1, rows))
    return Lines(ranks, steps, cuts, _firsts(steps, ranks, cuts))


def _ranks(trace: Trace, source: StepSource, spans: pl.DataFrame, stays: pl.DataFrame) -> list[Rank]:
    several = {s for s, n in spans.group_by("server").len().rows() if n > 1}
    there = occupied(source.residency)
    cover = trace.table("coverage").filter(pl.col("table").is_in(["steps", "residency"])).collect()
    ranks = []
    for r in spans.iter_rows(named=True):
        server, dp = r["server"], r["dp_rank"]
        own = cover.filter(pl.col("server").is_null() | (pl.col("server") == server))
        told = own.filter(
            (pl.col("table") == "steps")
            & pl.col("from_ns").is_between(-MOST_NS, MOST_NS)
            & pl.col("to_ns").is_between(pl.col("from_ns"), MOST_NS)
        )
        # Who is in only some of the steps says nothing of gaps.
        partly = own.filter((pl.col("table") == "residency") & (pl.col("fraction") < 1)).height > 0
        state = server_state(trace, server)
        ranks.append(
            replace(
                _rank(trace.manifest.server(server), server, _unseen(state, told)),
                dp_rank=dp,
                name=f"{server}/{dp}" if server in several else server,
                from_ns=min([r["start_ns"], *told["from_ns"].to_list()]),
                to_ns=max([r["end_ns"], *told["to_ns"].to_list()]),
                basis="counted" if r["counted"] else "derived" if r["derived"] else None,
                occupied=None if partly else there.get((server, dp)),
                stays=_present(stays, server, dp, server in several),
                pp_rank=r["pp_rank"],
                steps=r["len"],
            )
        )
    return ranks


def _unseen(state: ServerState, told: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """When the server was away, and the holes between the stretches in which somebody recorded its steps."""
    spans = told.select("from_ns", "to_ns").sort("from_ns")
    begin, reach = spans["from_ns"].to_numpy(), spans["to_ns"].cum_max().to_numpy()
    hole = begin[1:] > reach[:-1]
    return (
        np.concatenate([state.away_start, reach[:-1][hole]]).astype(np.int64),
        np.concatenate([state.away_end, begin[1:][hole]]).astype(np.int64),
    )


def _with_samples(trace: Trace, ranks: list[Rank]) -> list[Rank]:
    """Servers without steps, or whose steps say nothing of contexts, take what the server told from time to time."""
    out = []
    for server in trace.manifest.servers:
        mine = [r for r in ranks if r.server == server.name]
        state = server_state(trace, server.name) if len(mine) < 2 and (not mine or mine[0].basis is None) else None
        used = None if state is None else state.kv_used
        capacity = _tokens(server.kv_capacity_tokens)
        if state is None or used is None or not len(used.time) or capacity is None:
            out += mine
            continue
        away = (state.away_start, state.away_end)
        one = mine[0] if mine else _rank(server, server.name, away)
        out.append(replace(one, from_ns=int(used.start[0]), to_ns=int(used.end[-1]), basis="derived", samples=used))
    out += [r for r in ranks if trace.manifest.server(r.server) is None]
    return sorted(out, key=lambda r: (r.server, r.dp_rank))


def _rank(server: Server | None, name: str, away: tuple[Ints, Ints]) -> Rank:
    """What the manifest says of a server's first rank."""
    shape = None if server is None else geometry(server)
    return Rank(
        server=name,
        dp_rank=0,
        name=name,
        from_ns=0,
        to_ns=0,
        basis=None,
        capacity_tokens=None if server is None else _tokens(server.kv_capacity_tokens),
        bytes_per_token=shape.bytes_per_token if shape is not None and shape.bytes_per_token <= _MOST_BYTES else None,
        block_tokens=max(1, (server.block_size_tokens if server is not None else None) or 1),
        slots=(server.max_sequences if server is not None else None) or None,
        budget_tokens=(server.max_batched_tokens if server is not None else None) or None,
        occupied=None,
        stays=None,
        away=away,
    )


def _tokens(n: int | None) -> int | None:
    return n if n is not None and 0 < n <= MOST_TOKENS else None


def _present(stays: pl.DataFrame, server: str, dp: int, several: bool) -> tuple[np.ndarray, np.ndarray] | None:
    mine = stays.filter(pl.col("server") == server)
    if several:
        mine = mine.filter(pl.col("dp_rank").is_null() | (pl.col("dp_rank") == dp))
    if mine.is_empty():
        return None
    return mine.select(pl.coalesce("scheduled_ns", "enqueued_ns").sort()).to_series().to_numpy(), mine["end_ns"].sort().to_numpy()


def _cuts(steps: pl.LazyFrame, ranks: list[Rank], rows: int) -> list[int]:
    """Instants between which some ``rows`` steps begin at most (more only where they crowd), over all that was recorded."""
    low, high = min(r.from_ns for r in ranks), max(r.to_ns for r in ranks)
    if sum(r.steps for r in ranks) <= rows or high <= low:
        return [low, max(high, low) + 1]
    width = -(-(high - low) // _BINS)
    bins = (pl.col("start_ns") - low) // width
    cuts, held = [low], 0
    for b, n in steps.group_by(bins.alias("bin")).len().sort("bin").collect(engine="streaming").rows():
        if held and held + n > rows:
            cuts.append(low + b * width)
            held = 0
        held += n
    return [*cuts, high + 1]


def _firsts(steps: pl.LazyFrame, ranks: list[Rank], cuts: list[int]) -> dict[tuple[int, int], Next]:
    if len(cuts) <= 2:
        return {}
    chunk = pl.sum_horizontal([(pl.col("start_ns") >= c).cast(pl.Int64) for c in cuts[1:-1]]).alias("chunk")
    low = steps.group_by("server", "dp_rank", chunk).agg(pl.col("start_ns").min()).collect(engine="streaming")
    rows = steps.filter(pl.col("start_ns").is_in(low["start_ns"].unique().implode())).collect()
    index = {(r.server, r.dp_rank): (i, "used" if r.basis == "counted" else "context") for i, r in enumerate(ranks)}
    out = {}
    for r in low.join(rows, on=["server", "dp_rank", "start_ns"]).sort("step", descending=True).iter_rows(named=True):
        i, value = index[r["server"], r["dp_rank"]]
        out[i, r["chunk"]] = (r["start_ns"], r[value], r["decode_requests"] or 0, r["capacity"])
    return out
