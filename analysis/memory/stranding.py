"""Stranding: memory that was provisioned, lay idle, and could not be used where it was wanted.

For each KV space (a server's, or a data-parallel rank's): what was there, in use and idle over the recorded time, exact in
integer arithmetic; how much of the idle was stranded, that is idle while requests elsewhere waited for KV space; and what one
pool behind all servers would need. The vocabulary is Pond's (Li et al., ASPLOS 2023): stranded memory, and a pool that takes the
peaks of several hosts at different moments. GB are 10⁹ bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from hoptrace.analysis.memory.stranding_beside import Gauge, PlatformNode, cached_levels, gauges, platform_nodes
from hoptrace.analysis.memory.stranding_line import lines
from hoptrace.analysis.memory.stranding_rank import Rank
from hoptrace.analysis.memory.stranding_stays import stays
from hoptrace.analysis.memory.stranding_sums import SERIES, Common, Sums, sweep
from hoptrace.analysis.memory.stranding_terms import TERMS
from hoptrace.reader import Trace
from hoptrace.step_source import StepSource, step_source

__all__ = ["TERMS", "Pool", "Space", "Stranding", "stranding"]

BINS = 500
"""Bins of a series at most; fewer where there are many, so that a chart of all holds some 5,000 marks."""


@dataclass(frozen=True)
class Space:
    """One KV space over the time that is known of it. Amounts in ``unit`` (bytes, or tokens where the KV geometry is not told);
    integrals ``_x_ns`` in unit × ns, exact. Null: not told.

    ``used``: what requests hold, as the engine counts it (``basis`` counted), or the contexts in its steps (derived: a lower
    bound). ``held``: at most what the requests in the steps hold; the rest of ``used`` belongs to requests that skip steps, or
    is cache that the engine counts as in use. ``stranded``: idle while requests of another space wait for KV. ``queued``: idle
    while requests of another space wait for whatever. ``lacking_ns``: how long requests waited here for KV space. ``cached``:
    mean of cached blocks in the device's memory; ``cached_idle``: the least of them that no request held.
    """

    name: str
    server: str
    dp_rank: int
    basis: str | None
    unit: str
    recorded_ns: int
    covered_ns: int
    capacity: int | None
    provisioned_x_ns: int | None
    used_x_ns: int
    held_x_ns: int
    idle_x_ns: int | None
    stranded_x_ns: int | None
    queued_x_ns: int | None
    peak: int
    over_90_ns: int | None
    lacking_ns: int | None
    weight_bytes: int | None
    cached: float | None = None
    cached_idle: float | None = None

    @property
    def mean(self) -> float | None:
        """Mean in use over the covered time."""
        return self.used_x_ns / self.covered_ns if self.covered_ns else None

    @property
    def stranded_share(self) -> float | None:
        """Stranded ÷ provisioned."""
        return _ratio(self.stranded_x_ns, self.provisioned_x_ns)

    @property
    def idle_share(self) -> float | None:
        """Idle ÷ provisioned."""
        return _ratio(self.idle_x_ns, self.provisioned_x_ns)

    def as_dict(self) -> dict[str, Any]:
        """JSON. Integrals in unit × s: `_x_s`, and in GB × s: `_gb_s` (null where the unit is tokens)."""
        out: dict[str, Any] = {
            k: getattr(self, k)
            for k in ("name", "server", "dp_rank", "basis", "unit", "recorded_ns", "covered_ns", "capacity", "peak", "mean")
        }
        out["peak_share"] = _ratio(self.peak, self.capacity)
        for k in ("provisioned", "used", "held", "idle", "stranded", "queued"):
            value = getattr(self, f"{k}_x_ns")
            out[f"{k}_x_s"] = None if value is None else value / 10**9
            out[f"{k}_gb_s"] = None if value is None or self.unit != "bytes" else value / 10**18
        out |= {k: getattr(self, k) for k in ("idle_share", "stranded_share", "over_90_ns", "lacking_ns", "weight_bytes")}
        return out | {"cached": self.cached, "cached_idle": self.cached_idle}


@dataclass(frozen=True)
class Pool:
    """What one pool behind several KV spaces would need, over the time that is known of all of them (``common_ns``).

    ``provisioned``: Σ capacities. ``sum_of_peaks``: Σ over spaces of the most in use. ``peak_of_sum``: the most in use of all at
    one moment: what a pool needs. ``wanted_x_ns``: what those that waited for KV lacked; ``lendable_x_ns``: how much of that the
    idle of the other spaces would have held; null where the trace does not tell how much waits.
    """

    spaces: list[str]
    basis: str
    unit: str
    common_ns: int
    provisioned: int
    sum_of_peaks: int
    peak_of_sum: int
    mean_of_sum: float
    wanted_x_ns: int | None
    lendable_x_ns: int | None

    @property
    def saving(self) -> float | None:
        """1 − peak of the sum ÷ Σ peaks: what pooling saves of spaces that are as large as their peaks."""
        share = _ratio(self.peak_of_sum, self.sum_of_peaks)
        return None if share is None else 1 - share

    @property
    def saving_of_provisioned(self) -> float | None:
        """1 − peak of the sum ÷ Σ capacities."""
        share = _ratio(self.peak_of_sum, self.provisioned)
        return None if share is None else 1 - share

    def as_dict(self) -> dict[str, Any]:
        """JSON; integrals in unit × s."""
        keys = ("spaces", "basis", "unit", "common_ns", "provisioned", "sum_of_peaks", "peak_of_sum", "mean_of_sum", "saving")
        out: dict[str, Any] = {k: getattr(self, k) for k in keys} | {"saving_of_provisioned": self.saving_of_provisioned}
        for k in ("wanted", "lendable"):
            value = getattr(self, f"{k}_x_ns")
            out[f"{k}_x_s"] = None if value is None else value / 10**9
        return out


@dataclass(frozen=True)
class Stranding:
    """``series``: name, from_ns, to_ns, covered_ns, provisioned, used, held, stranded (means over the covered part of the bin,
    in the space's unit; null: not told), lacking (share of the bin in which requests waited here for KV), unit."""

    spaces: list[Space]
    pool: Pool | None
    gauges: list[Gauge]
    platform: list[PlatformNode]
    series: pl.DataFrame
    notes: list[str]
    unseen: list[str]

    def as_dict(self) -> dict[str, Any]:
        """JSON, without the series."""
        return {
            "spaces": [s.as_dict() for s in self.spaces],
            "pool": None if self.pool is None else self.pool.as_dict(),
            "memory": [g.as_dict() for g in self.gauges],
            "platform": [n.as_dict() for n in self.platform],
            "notes": self.notes,
            "unseen": self.unseen,
        }


def stranding(trace: Trace, *, steps: StepSource | None = None, rows: int | None = None) -> Stranding:
    """The figures of a trace. ``rows``: steps held at once (null: as memory allows)."""
    source = steps if steps is not None else step_source(trace)
    who = stays(trace)
    found = lines(trace, source, who, rows)
    ranks = found.ranks
    in_bytes = bool(ranks) and all(r.bytes_per_token is not None for r in ranks)
    scale = [r.bytes_per_token or 1 if in_bytes else 1 for r in ranks]
    unit = "bytes" if in_bytes else "tokens"
    pooled = _pooled(trace, ranks, in_bytes)
    bins = min(BINS, 10 * BINS // (3 * max(1, len(ranks))))
    sums, common, grid = sweep(trace, found, who, scale, pooled, max(1, bins))
    series = _series(ranks, sums, grid, scale, unit)
    spaces = [_space(trace, r, s, k, unit) for r, s, k in zip(ranks, sums, scale, strict=True)]
    spaces = _with_cache(trace, ranks, spaces, series, scale)
    pool = _pool(spaces, pooled, sums, common, unit)
    beside = gauges(trace)
    nodes = platform_nodes(trace, spaces)
    return Stranding(spaces, pool, beside, nodes, series, _notes(spaces, pool, ranks), _unseen(trace, spaces, pool, source))


def _pooled(trace: Trace, ranks: list[Rank], in_bytes: bool) -> list[int]:
    """The spaces that a pool could stand behind: of one basis (what is counted and what is derived is never added up) and, where
    their sizes are not told in bytes, of one model."""
    for basis in ("counted", "derived"):
        found = [i for i, r in enumerate(ranks) if r.basis == basis]
        if found:
            models = {d.model if (d := trace.manifest.server(ranks[i].server)) is not None else None for i in found}
            return found if in_bytes or len(found) == 1 or (len(models) == 1 and None not in models) else []
    return []


def _space(trace: Trace, r: Rank, s: Sums, scale: int, unit: str) -> Space:
    described = trace.manifest.server(r.server)
    sized = s.sized and s.covered > 0

    def told(value: int, also: bool = True) -> int | None:
        return value if sized and also else None

    return Space(
        r.name, r.server, r.dp_rank, r.basis, unit, r.to_ns - r.from_ns, s.covered, s.capacity if s.capacity >= 0 else None,
        told(s.provisioned), s.used, s.held, told(s.idle), told(s.stranded, s.known), told(s.queued, s.known), s.peak,
        told(s.over_90), told(s.lacking, s.known), None if described is None else described.weight_bytes,
    )  # fmt: skip


def _series(ranks: list[Rank], sums: list[Sums], grid: tuple[int, int, int], scale: list[int], unit: str) -> pl.DataFrame:
    low, high, width = grid
    frames = []
    for r, s in zip(ranks, sums, strict=True):
        covered = s.bins["covered_ns"]
        share = np.divide(1.0, covered, out=np.zeros_like(covered), where=covered > 0)
        begin = low + width * np.arange(len(covered), dtype=np.int64)
        frame = pl.DataFrame(
            {"from_ns": begin, "to_ns": np.minimum(begin + width, high), "covered_ns": covered}
            | {name: s.bins[name] * share for name in SERIES[1:]}
        )
        hidden = [] if s.sized else ["provisioned", "stranded", "lacking"]
        hidden += [] if s.known else ["stranded", "lacking"]
        none = pl.lit(None, pl.Float64)
        frame = frame.with_columns(none.alias(n) for n in dict.fromkeys(hidden)).filter(pl.col("covered_ns") > 0)
        frames.append(frame.select(pl.lit(r.name).alias("name"), pl.all(), pl.lit(unit).alias("unit")))
    kinds = {"name": pl.String, "from_ns": pl.Int64, "to_ns": pl.Int64} | dict.fromkeys(SERIES, pl.Float64) | {"unit": pl.String}
    return pl.concat(frames) if frames else pl.DataFrame(schema=kinds)


def _with_cache(trace: Trace, ranks: list[Rank], spaces: list[Space], series: pl.DataFrame, scale: list[int]) -> list[Space]:
    levels = cached_levels(trace)
    out = []
    for r, space, k in zip(ranks, spaces, scale, strict=True):
        mine = series.filter(pl.col("name") == r.name)
        level = levels.get((r.server, r.dp_rank))
        if level is None or mine.is_empty() or not mine["covered_ns"].sum():
            out.append(space)
            continue
        weights = mine["covered_ns"].to_numpy()
        most = space.capacity if space.capacity is not None else np.inf
        cached = np.minimum(level.at(mine["to_ns"].to_numpy()) * r.block_tokens * k, most)
        idle = np.maximum(cached - mine["used"].to_numpy(), 0)
        out.append(
            replace(space, cached=float(cached @ weights / weights.sum()), cached_idle=float(idle @ weights / weights.sum()))
        )
    return out


def _pool(spaces: list[Space], pooled: list[int], sums: list[Sums], c: Common, unit: str) -> Pool | None:
    if len(pooled) < 2 or not c.ns:
        return None
    mine = [sums[i] for i in pooled]
    return Pool(
        [spaces[i].name for i in pooled],
        str(spaces[pooled[0]].basis),
        unit,
        c.ns,
        sum(s.common_capacity for s in mine),
        sum(s.common_peak for s in mine),
        c.peak,
        c.used / c.ns,
        c.wanted if c.told and all(s.known for s in mine) else None,
        c.lendable if c.told and all(s.known for s in mine) else None,
    )


def _notes(spaces: list[Space], pool: Pool | None, ranks: list[Rank]) -> list[str]:
    notes = []
    derived = [r.name for r in ranks if r.basis == "derived" and r.samples is None]
    if derived:
        notes.append(
            f"What is in use on {', '.join(derived)} is derived from the contexts of the requests in its steps, since the engine "
            "does not say it: a request that skips a step is not in it, and a prefix that requests share counts for each."
        )
    sampled = [r.name for r in ranks if r.samples is not None]
    if sampled:
        notes.append(
            f"What is in use on {', '.join(sampled)} is from samples of the engine's own gauge: peaks between two are not seen, "
            "and the gauge tells of the end of an earlier step, before the prompts that are computed meanwhile. On a real "
            "capture with both it said 17 % less at the mean than the steps."
        )
    if len(spaces) == 1:
        notes.append(
            "There is one KV space: nothing can be stranded where nobody else wants it, and a pool needs at least two. "
            "Attach all servers of a deployment to one trace to see both."
        )
    if pool is not None and len(pool.spaces) < len(spaces):
        left = [s.name for s in spaces if s.name not in pool.spaces]
        notes.append(f"The pool is without {', '.join(left)}: counted and derived figures are not added up.")
    return notes


def _unseen(trace: Trace, spaces: list[Space], pool: Pool | None, source: StepSource) -> list[str]:
    said = []
    if not spaces:
        return [
            "No steps are known, so memory in use over time is not: attach with the engine's step source (see docs/steps.md)."
        ]
    for s in spaces:
        if s.capacity is None:
            said.append(
                f"{s.name} does not say how much KV space it has, so idle and stranded memory are not known: with llama.cpp a "
                "newer capture reads it from /props and /slots; else add kv_capacity_tokens to the server in manifest.json."
            )
        if s.unit != "bytes":
            said.append(
                f"The KV geometry of {s.name} (layers, KV heads, head size, type) is not told: its figures are in tokens, not "
                "bytes."
            )
        if s.recorded_ns and s.covered_ns < 0.99 * s.recorded_ns:
            said.append(f"What {s.name} had in use is known for {s.covered_ns / s.recorded_ns:.0%} of the recorded time.")
        if s.stranded_x_ns is None and s.capacity is not None and len(spaces) > 1:
            said.append("Who waits for KV space is not told by every server, so stranded memory is not known.")
    if pool is None and len(spaces) > 1:
        said.append("The KV spaces have no common time, unit or model, so what a pool would need is not known.")
    return list(dict.fromkeys(said))


def _ratio(a: int | float | None, b: int | float | None) -> float | None:
    return None if a is None or not b else a / b
