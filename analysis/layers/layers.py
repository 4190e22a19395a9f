"""Bottleneck layers: how much of the users' latency is compute, state or scheduling, by the design's rule.

In a step, compute or state gets at most the roofline time of that step, the larger side naming which; the rest is scheduling
where recorded host or collective time shows it, else unexplained. Outside steps the parts of the accounting say the layer
(:mod:`layer_of`). Each request's layers add up to its end-to-end time exactly, as the accounting's parts do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl

from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.layers.ceilings import Ceiling
from hoptrace.analysis.layers.layer_of import LAYER_OF_PART, LAYERS
from hoptrace.analysis.layers.layers_requests import per_request
from hoptrace.analysis.layers.layers_said import Said, bound_of, said
from hoptrace.analysis.layers.layers_steps import PIECES, ServerSteps, server_steps
from hoptrace.analysis.layers.layers_summary import StepLayers, step_layers
from hoptrace.analysis.layers.layers_terms import TERMS
from hoptrace.errors import InputError
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace
from hoptrace.roofline import Roofline, platform_of, roofline_of
from hoptrace.step_source import StepSource, step_source

__all__ = ["BINS", "TERMS", "LayerShares", "Layers", "layers"]

BINS = 500
"""Bins over time at most."""

_NO_PLATFORM = "no platform is known"
_COLUMNS = tuple(f"{layer}_ns" for layer in LAYERS)
# Half-width of the window of ranks around each percentile: those of the accounting's compositions.
_WINDOWS = {"p50": (0.50, 0.05), "p95": (0.95, 0.01), "p99": (0.99, 0.005)}


@dataclass(frozen=True)
class LayerShares:
    """Mean ns by layer over ``requests`` requests; they add up to ``e2e_ns``. Null: of no request is it known. While any of it
    is undivided, compute, state, scheduling and unexplained are at least what they say."""

    name: str
    requests: int
    e2e_ns: float
    ns: dict[str, float | None]

    @property
    def shares(self) -> dict[str, float | None]:
        """Share of each layer in e2e, 0 … 1; those that are known add up to 1 (all 0 where e2e is 0)."""
        return {k: None if v is None else (v / self.e2e_ns if self.e2e_ns else 0.0) for k, v in self.ns.items()}

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "e2e_ns": round(self.e2e_ns),
            "ns": {k: None if v is None else round(v) for k, v in self.ns.items()},
            "shares": {k: None if v is None else round(v, 6) for k, v in self.shares.items()},
        }


@dataclass(frozen=True)
class Layers:
    """The bottleneck layers of a trace.

    Attributes:
        rooflines: of the servers whose steps could be divided.
        per_request: request, arrival_ns, e2e_ns and one column per layer (`compute_ns` … `outside_ns`), which add up to e2e_ns.
            Where a request's steps are not divided at all, compute is null, and state is what lies outside steps (null if none).
        groups: `all`, around `p50`, `p95`, `p99` of e2e, and the `slowest` 1 %; empty without finished requests.
        over_time: from_ns, to_ns, requests, e2e_ns and the layers, summed over the requests that arrived in the bin.
        steps: what the steps alone say, all servers together; null without steps.
        steps_over_time: from_ns, to_ns and the layers of the steps that began in the bin, time between them as scheduling.
        ceilings: what replays said, as handed over.
        bound: compute, state or scheduling, if that is the largest share of all; null if nothing told is.
        headline: that, in a sentence.
        warnings: what contradicts the platform, or looks impossible: to be read first.
        unseen: what this trace cannot show, in sentences. notes: how what it does show was found.
    """

    rooflines: tuple[Roofline, ...]
    per_request: pl.DataFrame
    groups: dict[str, LayerShares]
    over_time: pl.DataFrame
    steps: StepLayers | None
    steps_over_time: pl.DataFrame
    ceilings: tuple[Ceiling, ...]
    bound: str | None
    headline: str
    warnings: list[str]
    unseen: list[str]
    notes: list[str]

    @cached_property
    def shares(self) -> dict[str, float | None]:
        """Share of each layer over all requests; empty without finished ones."""
        return self.groups["all"].shares if self.groups else {}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; null is unknown."""
        return {
            "bound": self.bound,
            "headline": self.headline,
            "groups": {name: g.as_dict() for name, g in self.groups.items()},
            "rooflines": [r.as_dict() for r in self.rooflines],
            "steps": None if self.steps is None else self.steps.as_dict(),
            "over_time": self.over_time.to_dicts(),
            "steps_over_time": self.steps_over_time.to_dicts(),
            "ceilings": [c.as_dict() for c in self.ceilings],
            "layer_of_part": {p: {"layer": layer, "why": why} for p, (layer, why) in LAYER_OF_PART.items()},
            "warnings": self.warnings,
            "unseen": self.unseen,
            "notes": self.notes,
        }


def layers(
    trace: Trace,
    *,
    steps: StepSource | None = None,
    accounting: Accounting | None = None,
    platform: Mapping[str, Any] | None = None,
    ceilings: Sequence[Ceiling] = (),
) -> Layers:
    """The bottleneck layers of a trace.

    Args:
        steps: if the caller has them. accounting: likewise.
        platform: rates of one device (:func:`hoptrace.platform.load_platform`) for every server; null: what the manifest's graph
            says of each server. Without either, compute and state of steps are unknown.
        ceilings: what replays said; kept as they are.

    Raises:
        InputError: a table is damaged.
    """
    source = steps if steps is not None else step_source(trace)
    acc = accounting if accounting is not None else account(trace)
    rooflines, why_not = _rooflines(trace.manifest, platform)
    first, width, bins = _grid(acc)
    split = server_steps(source, trace.manifest, {r.server: r for r in rooflines}, first, width, bins)
    frame = per_request(acc.part_batches(), source, split)
    groups = _groups(frame)
    of_steps = step_layers(split)
    told: Said = said(of_steps, split, rooflines, why_not, source.origin)
    whole = groups.get("all")
    no_platform = any(w.startswith(_NO_PLATFORM) for w in why_not.values())
    bound, headline = bound_of(whole.ns if whole else {}, whole.e2e_ns if whole else 0.0, no_platform=no_platform)
    return Layers(
        rooflines=tuple(rooflines),
        per_request=frame,
        groups=groups,
        over_time=_over_time(frame, first, width),
        steps=of_steps,
        steps_over_time=_steps_over_time(split, first, width),
        ceilings=tuple(ceilings),
        bound=bound,
        headline=headline,
        warnings=told.warnings,
        unseen=told.unseen,
        notes=told.notes,
    )


def _rooflines(manifest: Manifest, platform: Mapping[str, Any] | None) -> tuple[list[Roofline], dict[str, str]]:
    """The rooflines that can be told, and for each other server the reason."""
    found, why = [], {}
    for server in manifest.servers or [Server(name="engine")]:
        rates = platform if platform is not None else platform_of(manifest, server)
        if rates is None:
            why[server.name] = f"{_NO_PLATFORM}: give --platform NAME or FILE (`hoptrace platforms` lists those there are)"
            continue
        try:
            found.append(roofline_of(server, rates))
        except InputError as e:
            why[server.name] = e.message.rstrip(".") + (f". {e.hint}" if e.hint else "")
    return found, why


def _grid(accounting: Accounting) -> tuple[int, int, int]:
    """Start, width and number of the bins, from the first arrival to the last finish: some four requests each."""
    first, last, n = 0, 1, 0
    for parts in accounting.part_batches():
        low, high = parts.select(pl.col("arrival_ns").min(), pl.col("finish_ns").max()).row(0)
        if parts.height:
            first, last = (min(first, low), max(last, high)) if n else (low, high)
            n += parts.height
    bins = min(BINS, max(20, n // 4)) if n else 1
    return first, max(1, -(-(last - first) // bins)), bins


def _groups(frame: pl.DataFrame) -> dict[str, LayerShares]:
    n = frame.height
    if not n:
        return {}
    ranked = frame.sort("e2e_ns", "request")
    out = {"all": _mean("all", frame)}
    for name, (q, half) in _WINDOWS.items():
        nearest = min(n - 1, max(0, round(q * (n - 1))))
        low = max(0, min(nearest, -int(-(q - half) * (n - 1) // 1)))
        high = min(n - 1, max(nearest, int((q + half) * (n - 1))))
        out[name] = _mean(name, ranked.slice(low, high - low + 1))
    out["slowest"] = _mean("slowest", ranked.tail(max(1, n // 100)))
    return out


def _mean(name: str, rows: pl.DataFrame) -> LayerShares:
    n = rows.height
    ns = {
        layer: None if rows[c].null_count() == n else float(rows[c].cast(pl.Float64).sum()) / n
        for layer, c in zip(LAYERS, _COLUMNS, strict=True)
    }
    return LayerShares(name, n, float(rows["e2e_ns"].cast(pl.Float64).sum()) / n, ns)


def _over_time(frame: pl.DataFrame, first: int, width: int) -> pl.DataFrame:
    at = ((pl.col("arrival_ns") - first) // width).alias("bin")
    sums = [
        # Of no request of the bin is it known: null. Else those of which it is not known add nothing, and `undivided` holds it.
        pl.when(pl.col(c).null_count() < pl.len()).then(pl.col(c).sum()).alias(c)
        for c in _COLUMNS
    ]
    found = frame.group_by(at).agg(pl.len().cast(pl.Int64).alias("requests"), pl.col("e2e_ns").sum(), *sums).sort("bin")
    return _timed(found, first, width).select("from_ns", "to_ns", "requests", "e2e_ns", *_COLUMNS)


def _steps_over_time(split: list[ServerSteps], first: int, width: int) -> pl.DataFrame:
    pieces = [p + "_ns" for p in PIECES]
    if not split:
        return pl.DataFrame(schema=dict.fromkeys(("from_ns", "to_ns", *pieces), pl.Int64))
    found = pl.concat([s.bins for s in split]).group_by("bin").agg(pl.exclude("bin").sum()).sort("bin")
    found = found.with_columns(pl.col("scheduling_ns") + pl.col("between_ns"))
    return _timed(found, first, width).select("from_ns", "to_ns", *pieces)


def _timed(frame: pl.DataFrame, first: int, width: int) -> pl.DataFrame:
    start = pl.col("bin") * width + first
    return frame.with_columns(start.alias("from_ns"), (start + width).alias("to_ns"))
