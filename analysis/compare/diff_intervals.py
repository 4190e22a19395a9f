"""Intervals of a comparison's figures over requests, and the figures anew where one side does not know all requests that the
other does: of the same requests, only those compare that both sides know."""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from hoptrace.analysis.compare.bootstrap import STATS, Floats, Sample, chosen, composition_intervals, interval, ratio_intervals
from hoptrace.analysis.compare.diff_figure import Figure
from hoptrace.analysis.compare.diff_figures import LATENCIES, around, share_name
from hoptrace.analysis.compare.diff_ledger import MOVED, TIERS, reuse_figures
from hoptrace.analysis.compare.diff_pairs import Pairing
from hoptrace.analysis.compare.diff_side import Side
from hoptrace.analysis.latency.parts import CLASSES, PARTS
from hoptrace.analysis.text import counted
from hoptrace.metrics import stat

__all__ = ["Bounds", "Own", "intervals"]

_TOKENS = 300_000  # inter-token latencies that are drawn from at most, on each side
_Z = 1.96  # 95 % of a normal error
_FEWEST = 500  # requests whose tokens are drawn from at least

Bounds = dict[str, tuple[float, float]]
Own = tuple[dict[str, Figure], dict[str, Figure]]


def intervals(a: Side, b: Side, pairs: Pairing | None, own: Own) -> tuple[Bounds, list[str]]:
    """Bounds of B − A by figure, and notes on figures that leave requests out: those of ``own`` are replaced."""
    bounds: Bounds = {}
    rows = _rows(a, b, pairs)
    notes: list[str] = []
    for instead, said in (
        _latencies(rows, pairs is not None, bounds),
        _tokens(a, b, pairs, rows, bounds),
    ):
        for side, found in zip(own, instead, strict=True):
            side.update(found)
        notes += said
    _compositions(a, b, pairs, bounds)
    notes += _alike(a, b, pairs, own)
    _ratios(a, b, pairs, own, bounds)
    _widen(a, b, own, bounds)
    if a.work.requests and not rows[0].height + rows[1].height:
        notes.append("No request is known to have finished: there is no latency to compare.")
    return bounds, notes


def _rows(a: Side, b: Side, pairs: Pairing | None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Metrics of the finished requests, in the order of the pairs if there are any."""
    if pairs is None:
        return a.rows, b.rows
    left, right = (
        pl.DataFrame({"request": order}).join(s.rows, on="request", how="left", maintain_order="left")
        for s, order in ((a, pairs.a), (b, pairs.b))
    )
    return left, right


def _latencies(rows: tuple[pl.DataFrame, pl.DataFrame], paired: bool, bounds: Bounds) -> tuple[Own, list[str]]:
    """Intervals of the latencies of requests; and the figures anew where one side does not know all requests that the other
    does."""
    instead: Own = ({}, {})
    left: dict[int, list[str]] = {}
    for name in (n for n in LATENCIES if n != "itl"):
        x, y = (r[name + "_ns"] for r in rows)
        both = paired
        if paired and not x.is_null().equals(y.is_null().alias(x.name)):
            known = x.is_not_null() & y.is_not_null()
            if known.any():
                x, y = x.filter(known), y.filter(known)
                left.setdefault(x.len(), []).append(name)
                for side, values in zip(instead, (x, y), strict=True):
                    found = stat(values)
                    side.update({f"{name}.{q}": Figure(getattr(found, q + "_ns"), "ns", "metrics", True) for q in STATS})
            else:
                both = False
        found_bounds = interval(*_samples(x, y, both), paired=both)
        bounds.update({f"{name}.{q}": v for q, v in found_bounds.items()})
    return instead, [
        f"{', '.join(names)}: over the {n:,} of {counted(rows[0].height, 'request')} that both traces know it for."
        for n, names in left.items()
    ]


def _samples(x: pl.Series, y: pl.Series, paired: bool) -> tuple[Sample, Sample]:
    out = []
    for values in (x.drop_nulls(), y.drop_nulls()):
        at = chosen(values.len())
        data = values.cast(pl.Float64).to_numpy()
        data = data if at is None else data[at]
        out.append(Sample(data, np.arange(len(data)), len(data), values.len()))
    assert not paired or out[0].requests == out[1].requests
    return out[0], out[1]


def _tokens(
    a: Side, b: Side, pairs: Pairing | None, rows: tuple[pl.DataFrame, pl.DataFrame], bounds: Bounds
) -> tuple[Own, list[str]]:
    """ITL: tokens of one request are drawn together. Of many tokens, those of some requests."""
    instead: Own = ({}, {})
    notes: list[str] = []
    tokens = max((w.output_tokens or 0) / max(w.finished, 1) for w in (a.work, b.work))
    most = max(_FEWEST, int(_TOKENS / max(tokens, 1.0)))
    if pairs is not None:
        at = chosen(rows[0].height, most)
        orders = [r["request"] if at is None else r["request"][at] for r in rows]
    else:
        orders = []
        for r in rows:
            at = chosen(r.height, most)
            orders.append(r["request"] if at is None else r["request"][at])
    # A trace whose every request is asked for is asked as it is.
    frames = [s.itl_of(None if o.len() == r.height else o) for s, o, r in zip((a, b), orders, rows, strict=True)]
    placed = [
        f.join(pl.DataFrame({"request": o}).with_row_index("at"), on="request", how="inner", maintain_order="left")
        for f, o in zip(frames, orders, strict=True)
    ]
    if pairs is not None:
        have = [set(p["at"].unique().to_list()) for p in placed]
        common = sorted(have[0] & have[1])
        if have[0] != have[1] and common:
            placed = [p.filter(pl.col("at").is_in(common)) for p in placed]
            notes.append(f"itl: over the {len(common):,} of {counted(orders[0].len(), 'request')} that both traces know it for.")
            for side, p in zip(instead, placed, strict=True):
                found = stat(p["itl_ns"])
                side.update({f"itl.{q}": Figure(getattr(found, q + "_ns"), "ns", "metrics", True) for q in STATS})
    samples = [
        Sample(p["itl_ns"].cast(pl.Float64).to_numpy(), p["at"].cast(pl.Int64).to_numpy(), o.len(), r.height)
        for p, o, r in zip(placed, orders, rows, strict=True)
    ]
    bounds.update({f"itl.{q}": v for q, v in interval(samples[0], samples[1], paired=pairs is not None).items()})
    return instead, notes


def _compositions(a: Side, b: Side, pairs: Pairing | None, bounds: Bounds) -> None:
    """Intervals of the parts and of the classes' shares, over all requests and around each percentile."""
    shown = [s.accounting.compositions.get("all") for s in (a, b)]
    if shown[0] is None or shown[1] is None:
        return
    seen = [{n for n, v in c.parts.items() if v is not None} for c in shown if c is not None]
    frames = [s.accounting.parts for s in (a, b)]
    of = [f.height for f in frames]
    paired = pairs is not None and of == [pairs.a.len()] * 2
    if pairs is not None and paired:
        at = chosen(of[0])
        frames = [
            pl.DataFrame({"request": o if at is None else o[at]}).join(f, on="request", how="left", maintain_order="left")
            for f, o in zip(frames, (pairs.a, pairs.b), strict=True)
        ]
        paired = not any(f["e2e_ns"].null_count() for f in frames)
    if not paired:
        frames = [f if (at := chosen(f.height)) is None else f[at] for f in (s.accounting.parts for s in (a, b))]
    narrower = max(float(np.sqrt(f.height / n)) for f, n in zip(frames, of, strict=True))
    found = composition_intervals(_matrix(frames[0]), _matrix(frames[1]), paired=paired, narrower=narrower)
    names = [p.name for p in PARTS]
    width = 1 + len(names) + len(CLASSES)
    for stat_, (low, high) in found.items():
        for i, name in enumerate(names, 1):
            if all(name in s for s in seen):
                bounds[f"{name}.{stat_}"] = (float(low[i]), float(high[i]))
        for i, klass in enumerate(CLASSES, width + 1 + len(names)):
            if all(s & {p.name for p in PARTS if p.klass == klass} for s in seen):
                name = share_name(klass) + ("" if stat_ == "mean" else f".{stat_}")
                bounds[name] = (float(low[i]), float(high[i]))


def _alike(a: Side, b: Side, pairs: Pairing | None, own: Own) -> list[str]:
    """Reuse over the requests that ran as many sequences on both sides: one that is answered twice looks its prompt up twice."""
    if pairs is None:
        return []
    rows = [
        pl.DataFrame({"request": o}).join(s.reuse, on="request", how="left", maintain_order="left")
        for s, o in zip((a, b), (pairs.a, pairs.b), strict=True)
    ]
    alike = rows[0]["sequences"].eq_missing(rows[1]["sequences"])
    n = int((~alike).sum())
    if not n or n == alike.len():
        return []
    for side, f in zip(own, rows, strict=True):
        side.update(reuse_figures(f.filter(alike)))
    return [
        f"{counted(n, 'request')} ran another number of sequences in {b.name} than in {a.name}: left out of what is reused and "
        "computed again."
    ]


def _ratios(a: Side, b: Side, pairs: Pairing | None, own: Own, bounds: Bounds) -> None:
    """Intervals of what is reused, repeated and moved per token, as far as requests tell it of themselves."""
    orders = [pairs.a, pairs.b] if pairs is not None else [a.rows["request"], b.rows["request"]]
    of = [o.len() for o in orders]
    if pairs is not None:
        at = chosen(of[0])
        orders = orders if at is None else [o[at] for o in orders]
    else:
        orders = [o if (at := chosen(o.len())) is None else o[at] for o in orders]
    narrower = max(float(np.sqrt(o.len() / n)) if n else 1.0 for o, n in zip(orders, of, strict=True))
    paired = pairs is not None
    reuse = [
        pl.DataFrame({"request": o}).join(s.reuse, on="request", how="left", maintain_order="left")
        for s, o in zip((a, b), orders, strict=True)
    ]
    if paired:
        alike = reuse[0]["sequences"].eq_missing(reuse[1]["sequences"])
        reuse = [f.filter(alike) for f in reuse]
    token_names = {"computed_prompt_tokens_per_token": pl.col("prompt") - pl.col("cached")}
    token_names |= {f"{n}_tokens_per_token": pl.col(n) for n in ("recomputed", "resumed")}
    share_names = {"cached_share": pl.col("cached")} | {f"cached_share.{t}": pl.col(t) for t in TIERS}
    for below, columns in ((pl.col("output"), token_names), (pl.col("prompt"), share_names)):
        x, y = (
            f.select(below.alias("_"), *(e.alias(n) for n, e in columns.items())).fill_null(0).cast(pl.Float64) for f in reuse
        )
        _shift(list(columns), ratio_intervals(x.to_numpy(), y.to_numpy(), paired=paired, narrower=narrower), own, bounds)
    output = [
        pl.DataFrame({"request": o}).join(
            s.done.select("request", "output_tokens"), on="request", how="left", maintain_order="left"
        )
        for s, o in zip((a, b), orders, strict=True)
    ]
    moved = [s.moved_by(o) for s, o in zip((a, b), orders, strict=True)]
    for basis in sorted(set(moved[0]["basis"].drop_nulls()) & set(moved[1]["basis"].drop_nulls())):
        frames = [
            o.join(m.filter(pl.col("basis") == basis).drop("basis"), on="request", how="left", maintain_order="left")
            for o, m in zip(output, moved, strict=True)
        ]
        known = [c for c in MOVED if all(m.filter(pl.col("basis") == basis)[c].null_count() == 0 for m in moved)]
        data = [f.select("output_tokens", *known).fill_null(0).cast(pl.Float64).to_numpy() for f in frames]
        found = ratio_intervals(data[0], data[1], paired=paired, narrower=narrower)
        _shift([f"{c}_per_token.{basis}" for c in known], found, own, bounds)


def _shift(names: list[str], found: list[tuple[float, float]], own: Own, bounds: Bounds) -> None:
    """Bounds around the changes of the figures, which may count a few requests more than those that were drawn."""
    for name, (low, high) in zip(names, found, strict=False):
        values = [f.value if (f := side.get(name)) is not None else None for side in own]
        if values[0] is not None and values[1] is not None:
            change = values[1] - values[0]
            bounds[name] = (change + low, change + high)


def _widen(a: Side, b: Side, own: Own, bounds: Bounds) -> None:
    """Where a step's work ends and interference begins is modelled: the standard errors of both sides' models go into the
    intervals of what is split by them. They act on all requests alike, so redrawing requests does not show them."""
    for stat_ in STATS:
        sides = [s.accounting.compositions.get(around(stat_)) for s in (a, b)]
        if sides[0] is None or sides[1] is None:
            continue
        of_parts = [{f"{n}.{stat_}": v for n, v in c.part_errors.items()} for c in sides if c is not None]
        dot = "" if stat_ == "mean" else f".{stat_}"
        of_shares = [{share_name(k) + dot: v for k, v in c.class_share_errors.items()} for c in sides if c is not None]
        for errors in (of_parts, of_shares):
            for name in errors[0].keys() | errors[1].keys():
                if name in bounds:
                    bounds[name] = _wider(name, bounds[name], [e.get(name, 0.0) for e in errors], own)


def _wider(name: str, found: tuple[float, float], errors: list[float], own: Own) -> tuple[float, float]:
    values = [f.value if (f := side.get(name)) is not None else None for side in own]
    if values[0] is None or values[1] is None:
        return found
    change, more = values[1] - values[0], _Z * math.hypot(*errors)
    return change - math.hypot(change - found[0], more), change + math.hypot(found[1] - change, more)


def _matrix(parts: pl.DataFrame) -> Floats:
    """A row per request: e2e, each part (unknown is 0: it adds nothing to a mean), each class."""
    own = parts.select("e2e_ns", *(pl.col(p.column).fill_null(0) for p in PARTS)).cast(pl.Float64)
    sums = [pl.sum_horizontal(p.column for p in PARTS if p.klass == k).alias(k) for k in CLASSES]
    found: Floats = own.with_columns(sums).to_numpy()
    return found
