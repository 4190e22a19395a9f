"""How full a link was over time: by its counter, else by the recorded moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import polars as pl

from hoptrace.analysis.moves.ledger_link_counter import Counter
from hoptrace.analysis.moves.movecover import length_within
from hoptrace.platform import Link

__all__ = ["BINS", "BUSY", "Fill", "fill"]

BINS = 240
BUSY = 0.8
"""Utilisation above which a link counts as busy."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Fields as those of a ``LinkWay``."""

    mean: float | None = None
    peak: float | None = None
    busy_ns: int | None = None
    busy: list[tuple[int, int]] = field(default_factory=list)
    bin_ns: int = 0
    told_by: str | None = None


def fill(
    link: Link, ways: tuple[str, ...], bins: pl.DataFrame | None, counter: Counter | None, when: Sequence[tuple[int, int]] | None
) -> Fill:
    """From the rows of ``ledger_link_bins`` of this link; ``when``: in which time moves were recorded, null where nobody says."""
    by_counter = counter is not None and counter.counted_bytes is not None
    told_by = "counter" if by_counter else "moves"
    rate = link.bytes_per_s
    if bins is None or not rate:
        return Fill()
    mine = bins.filter((pl.col("told_by") == told_by) & pl.col("way").is_in(ways))
    if not mine.height:
        return Fill()
    # Both directions together can carry what one does in each.
    sides = max(1, mine["way"].n_unique()) if len(ways) > 1 else 1
    rows = mine.group_by("from_ns", "to_ns").agg(pl.col("bytes").sum(), pl.col("counted_ns").max()).sort("from_ns")
    width = int(rows["to_ns"][0] - rows["from_ns"][0])
    if by_counter:
        time = rows["counted_ns"].clip(0, width)
    else:  # what was not recorded is no idle time
        ends = rows.select("from_ns", "to_ns").iter_rows()
        time = pl.Series([width if when is None else length_within(when, a, z) for a, z in ends], dtype=pl.Int64)
    rows = rows.with_columns(time.alias("time")).filter(pl.col("time") > 0)
    if not rows.height:
        return Fill(bin_ns=width, told_by=told_by)
    rows = rows.with_columns((pl.col("bytes") * 1e9 / pl.col("time") / (rate * sides)).alias("use"))
    mean = float(rows["bytes"].sum()) * 1e9 / float(rows["time"].sum()) / (rate * sides)
    full = rows.filter(pl.col("use") > BUSY)
    peak = rows["use"].max()
    stretches = _stretches(full.select("from_ns", "to_ns").iter_rows())
    return Fill(mean, float(peak) if isinstance(peak, float) else None, int(full["time"].sum()), stretches, width, told_by)


def _stretches(bins: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for a, z in bins:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], z)
        else:
            out.append((a, z))
    return sorted(sorted(out, key=lambda s: s[0] - s[1])[:20])
