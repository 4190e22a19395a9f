"""Reversibility: how much of a resource could be handed to another task within T seconds, and what has to move for it.

At evenly spaced moments, for each KV space: what is free at once (cached blocks that no request holds are dropped: nothing moves,
and they are computed again or fetched when they are wanted), what requests give back by ending within T (the trace tells when),
and what could be moved out within T over the fastest link that leaves the server. Slots likewise. No new work is taken in;
requests that stay take more as they decode, which is given apart as growth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from hoptrace.analysis.memory.reversibility_drain import Drain, drains
from hoptrace.analysis.memory.reversibility_holders import Holding, Moments, holdings
from hoptrace.analysis.memory.reversibility_terms import TERMS
from hoptrace.analysis.memory.stranding_beside import Levels, cached_levels
from hoptrace.analysis.memory.stranding_exact import Ints
from hoptrace.analysis.memory.stranding_line import Lines, lines
from hoptrace.analysis.memory.stranding_rank import Rank
from hoptrace.analysis.memory.stranding_stays import NEVER, stays
from hoptrace.platform import Link, graph_of
from hoptrace.reader import Trace
from hoptrace.step_source import StepSource, step_source

__all__ = ["HORIZONS_S", "MOMENTS", "TERMS", "Reclaim", "Reversibility", "Within", "reversibility"]

HORIZONS_S = (0.1, 1.0, 10.0, 100.0)
MOMENTS = 500


@dataclass(frozen=True)
class Within:
    """Shares over the moments: mean, 5th percentile, worst. ``moved``: with what the link moves out within the time;
    ``moved_bytes``: the mean of what moves for it. Null: not told."""

    horizon_s: float
    mean: float
    p5: float
    worst: float
    moved_mean: float | None = None
    moved_p5: float | None = None
    moved_worst: float | None = None
    moved_bytes: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        keys = ("horizon_s", "mean", "p5", "worst", "moved_mean", "moved_p5", "moved_worst", "moved_bytes")
        return {k: getattr(self, k) for k in keys}


@dataclass(frozen=True)
class Reclaim:
    """What of one resource could be handed over. ``what``: kv (of one KV space) or slots (of one server). ``free_mean``: share
    that is free at once; ``growth_mean``: share that those there still take before they leave (null for slots); ``link``,
    ``bytes_per_s``: the fastest way out. ``moments``: those at which it is known."""

    what: str
    name: str
    moments: int
    free_mean: float
    growth_mean: float | None
    within: list[Within]
    dropped_bytes: float | None = None
    link: str | None = None
    bytes_per_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        keys = ("what", "name", "moments", "free_mean", "growth_mean", "dropped_bytes", "link", "bytes_per_s")
        return {k: getattr(self, k) for k in keys} | {"within": [w.as_dict() for w in self.within]}


@dataclass(frozen=True)
class Reversibility:
    """``moments``: what, name, time_ns, horizon_s, share (without moving), moved_share (null: no link known), and for drains
    what = drain, horizon_s null, drain_ns."""

    reclaim: list[Reclaim]
    drains: list[Drain]
    moments: pl.DataFrame
    notes: list[str]
    unseen: list[str]

    @property
    def fastest(self) -> Drain | None:
        """The server that drains fastest at the mean, of those that ever had to."""
        known = [d for d in self.drains if d.kind == "server" and d.mean_ns]
        return min(known, key=lambda d: d.mean_ns or 0.0) if known else None

    def as_dict(self) -> dict[str, Any]:
        """JSON, without the moments."""
        return {
            "reclaim": [r.as_dict() for r in self.reclaim],
            "drains": [d.as_dict() for d in self.drains],
            "fastest": None if self.fastest is None else self.fastest.name,
            "notes": self.notes,
            "unseen": self.unseen,
        }


def reversibility(
    trace: Trace, *, steps: StepSource | None = None, moments: list[int] | None = None, rows: int | None = None
) -> Reversibility:
    """The figures of a trace. ``moments``: ns on the trace clock (null: :data:`MOMENTS` evenly spaced ones). ``rows``: steps
    held at once (null: as memory allows)."""
    source = steps if steps is not None else step_source(trace)
    who = stays(trace)
    found = lines(trace, source, who, rows, sampled=False)
    t = _moments(found, who) if moments is None else np.array(sorted(moments), dtype=np.int64)
    at = _at(found, t)
    horizons = [round(s * 1e9) for s in HORIZONS_S]
    cached = cached_levels(trace)
    held = holdings(found.ranks, at, source.residency, who, horizons)
    out: list[Reclaim] = []
    frames: list[pl.DataFrame] = []
    unseen: list[str] = []
    resident: dict[str, tuple[float, int]] = {}
    for rank, m, h in zip(found.ranks, at, held, strict=True):
        one, frame, why = _kv(rank, m, h, _way_out(trace, rank.server), cached.get((rank.server, rank.dp_rank)))
        unseen += why
        if one is not None and frame is not None:
            out.append(one)
            frames.append(frame)
        if rank.bytes_per_token is not None and (m.used >= 0).any():
            total, n = resident.get(rank.server, (0.0, 0))
            resident[rank.server] = (total + float(m.used[m.used >= 0].mean()) * rank.bytes_per_token, n + 1)
    windows = _windows(found, who)
    for server in trace.manifest.servers:
        ranks = sum(r.server == server.name for r in found.ranks)
        begin, end = windows.get(server.name, (0, 0))
        slots = _slots(server.name, server.max_sequences, max(1, ranks), who, t[(t >= begin) & (t < end)], horizons)
        if slots is not None:
            out.append(slots[0])
            frames.append(slots[1])
        elif len(t):
            unseen.append(f"{server.name} does not say how many requests it runs at once, or who ran: its slots are left out.")
    drained = []
    for d, inside, values in drains(who, t, windows):
        known = resident.get(d.name) if d.kind == "server" else None
        whole = known is not None and known[1] == sum(r.server == d.name for r in found.ranks)
        drained.append(replace(d, resident_bytes=known[0]) if known is not None and whole else d)
        frames.append(_frame("drain", d.name, inside, drain=values, kind=d.kind))
        if d.open and d.kind == "server":
            unseen.append(
                f"At {d.open} of {d.moments} moments a request was on {d.name} whose end nobody saw: "
                "its drain time is not known then."
            )
    if not found.ranks and not len(who):
        unseen.append(
            "Neither steps nor the times of requests on their servers are known, so nothing can be said of handing over."
        )
    return Reversibility(
        out,
        drained,
        pl.concat(frames) if frames else _frame("", "", t[:0]),
        _notes(out, found.ranks),
        list(dict.fromkeys(unseen)),
    )


def _moments(found: Lines, who: pl.DataFrame) -> Ints:
    """The middles of equal parts of the recorded time."""
    low, high = [r.from_ns for r in found.ranks], [r.to_ns for r in found.ranks]
    if not low and who.height:
        times = who.select("enqueued_ns", pl.when("ended").then("end_ns").otherwise("enqueued_ns").alias("end_ns"))
        low, high = times["enqueued_ns"].to_list(), times["end_ns"].to_list()
    if not low:
        return np.zeros(0, dtype=np.int64)
    begin, span = min(low), max(high) - min(low)
    n = min(MOMENTS, max(span, 1))
    return np.array([begin + span * (2 * k + 1) // (2 * n) for k in range(n)], dtype=np.int64)


def _windows(found: Lines, who: pl.DataFrame) -> dict[str, tuple[int, int]]:
    """By server: what was recorded of it, or from its first stay to the end of its last."""
    seen = pl.col("end_ns").filter("ended")
    spans = who.group_by("server").agg(pl.col("enqueued_ns").min(), pl.max_horizontal(seen.max(), pl.col("enqueued_ns").max()))
    out = {str(server): (begin, end + 1) for server, begin, end in spans.rows()}
    for server in {r.server for r in found.ranks}:
        mine = [r for r in found.ranks if r.server == server]
        out[server] = (min(r.from_ns for r in mine), max(r.to_ns for r in mine))
    return out


def _at(found: Lines, t: Ints) -> list[Moments]:
    values = [[*(np.full(len(t), -1, dtype=np.int64) for _ in range(4)), np.full(len(t), NEVER)] for _ in found.ranks]
    for low, high, pieces in found.chunks():
        mine = np.flatnonzero((t >= low) & (t < high))
        for p, (step, inside, used, capacity, empty) in zip(pieces, values, strict=True):
            i = p.at(t[mine])
            to, j = mine[i >= 0], i[i >= 0]
            step[to], inside[to], used[to], capacity[to] = p.step[j], p.inside[j], p.used[j], p.capacity[j]
            nothing = p.start[p.used == 0]
            waits = np.flatnonzero((t < high) & (empty == NEVER))
            k = np.searchsorted(nothing, t[waits], side="left")
            empty[waits[k < len(nothing)]] = nothing[k[k < len(nothing)]]
    return [Moments(t, *v) for v in values]


def _way_out(trace: Trace, server: str) -> Link | None:
    """The fastest link of known rate between a node of the server and one that is not."""
    graph = graph_of(trace.manifest)
    own = {n.name for n in graph.nodes.values() if n.server == server} | {f"server:{server}", server}
    ways = [k for k in graph.links.values() if k.bytes_per_s and k.a and k.b and (k.a in own) != (k.b in own)]
    return max(ways, key=lambda k: (k.bytes_per_s or 0.0, k.name), default=None)


def _kv(
    rank: Rank, m: Moments, h: Holding, link: Link | None, cached: Levels | None
) -> tuple[Reclaim | None, pl.DataFrame | None, list[str]]:
    sized = (m.used >= 0) & (m.capacity > 0)
    # Where nobody tells who holds the space, only an empty one tells who will give it back.
    known = sized & ~h.unsure & ((m.used == 0) | (rank.occupied is not None))
    if known.sum() < 0.95 * sized.sum():
        known[:] = False  # those that are left would be the quiet ones
    why = []
    if not sized.any():
        why.append(f"How much KV space {rank.name} has is not told, so the share that could be handed over is not known.")
    elif sized.sum() > known.sum():
        why.append(
            f"At {int(sized.sum() - known.sum())} moments the trace does not tell how much KV of {rank.name} each request held; "
            + ("they are left out." if known.any() else "what could be handed over is not known.")
        )
    if not known.any():
        return None, None, why
    rate = None if link is None else link.bytes_per_s
    if link is None:
        why.append(
            f"No link with a known rate leaves {rank.name}: what could be moved out is not known. Name one in the manifest's "
            "platform (links: a, b, bytes_per_s)."
        )
    elif rank.bytes_per_token is None:
        why.append(f"The KV geometry of {rank.name} is not told, so what could be moved out over {link.name} is not known.")
    t, used, capacity = m.time[known], m.used[known], m.capacity[known]
    held, growth = h.held[known], h.growth[known]
    within, frames = [], []
    for k, horizon in enumerate(HORIZONS_S):
        # Blocks that requests share go back with the last of them; what nobody is known to hold stays until all is empty.
        freed = np.maximum(np.minimum(held, used) - h.remaining[known, k], 0)
        freed = np.where(m.empty[known] - t <= round(horizon * 1e9), used, freed)
        share = (capacity - used + freed) / capacity
        w = Within(horizon, *_three(share))
        moved_share = None
        if link is not None and rate is not None and rank.bytes_per_token is not None:
            seconds = max(horizon - (link.latency_ns or 0.0) / 1e9, 0.0)
            most = int(min(rate * seconds / rank.bytes_per_token, 1 << 40))
            moved = np.minimum(used - freed, most)
            moved_share = (capacity - used + freed + moved) / capacity
            w = Within(horizon, *_three(share), *_three(moved_share), float(moved.mean()) * rank.bytes_per_token)
        within.append(w)
        frames.append(_frame("kv", rank.name, t, horizon, share, moved_share))
    free, more = float(((capacity - used) / capacity).mean()), float((growth / capacity).mean())
    dropped = None
    if cached is not None and rank.bytes_per_token is not None:
        blocks = np.minimum(cached.at(t) * rank.block_tokens, capacity)
        dropped = float(np.maximum(blocks - used, 0).mean()) * rank.bytes_per_token
    way = None if link is None else link.name
    return Reclaim("kv", rank.name, len(t), free, more, within, dropped, way, rate), pl.concat(frames), why


def _slots(
    server: str, slots: int | None, ranks: int, who: pl.DataFrame, t: Ints, horizons: list[int]
) -> tuple[Reclaim, pl.DataFrame] | None:
    mine = who.filter((pl.col("server") == server) & pl.col("scheduled_ns").is_not_null())
    if not slots or mine.is_empty() or not len(t):
        return None
    places = slots * ranks
    begin, end = mine["scheduled_ns"].to_numpy(), mine["end_ns"].to_numpy()
    low = np.searchsorted(t, begin, side="left")

    def still(horizon: int) -> Ints:
        """Who runs at each moment and is still there after the horizon."""
        high = np.maximum(np.searchsorted(t, end - horizon, side="left"), low)
        change = np.zeros(len(t) + 1, dtype=np.int64)
        np.add.at(change, low, 1)
        np.add.at(change, high, -1)
        found: Ints = np.cumsum(change[:-1])
        return found

    shares = [np.maximum(places - still(h), 0) / places for h in (0, *horizons)]
    within = [Within(s, *_three(x)) for s, x in zip(HORIZONS_S, shares[1:], strict=True)]
    frame = pl.concat([_frame("slots", server, t, s, x) for s, x in zip(HORIZONS_S, shares[1:], strict=True)])
    return Reclaim("slots", server, len(t), float(shares[0].mean()), None, within), frame


def _three(share: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float]:
    """Mean, the share at 5 % from below (a moment's own), the worst."""
    ordered = np.sort(share)
    return float(ordered.mean()), float(ordered[int(0.05 * (len(ordered) - 1))]), float(ordered[0])


def _frame(
    what: str,
    name: str,
    t: Ints,
    horizon: float | None = None,
    share: Any = None,
    moved: Any = None,
    drain: Any = None,
    kind: str = "",
) -> pl.DataFrame:
    n = len(t)

    def column(values: Any, dtype: Any) -> pl.Series:
        return pl.Series(values, dtype=dtype) if values is not None else pl.Series([None] * n, dtype=dtype)

    return pl.DataFrame(
        {
            "what": pl.Series([what] * n, dtype=pl.String), "name": pl.Series([name] * n, dtype=pl.String),
            "kind": pl.Series([kind] * n, dtype=pl.String), "time_ns": pl.Series(t, dtype=pl.Int64),
            "horizon_s": pl.Series([horizon] * n, dtype=pl.Float64), "share": column(share, pl.Float64),
            "moved_share": column(moved, pl.Float64), "drain_ns": column(drain, pl.Int64),
        }
    ).with_columns(pl.when(pl.col("drain_ns") >= 0).then("drain_ns").alias("drain_ns"))  # fmt: skip


def _notes(found: list[Reclaim], ranks: list[Rank]) -> list[str]:
    if not any(r.what == "kv" for r in found):
        return []
    notes = [
        "Drain times and what ends within T are as recorded: later requests slowed those that were there, so it would have been "
        "sooner without them."
    ]
    derived = [r.name for r in ranks if r.basis == "derived"]
    if derived:
        notes.append(
            f"What {', '.join(derived)} has in use is derived, a lower bound: what could be handed over is an upper bound."
        )
    return notes
