"""Each link of the platform graph: how full it was, and what its counters say against the recorded moves.

``explained``: bytes that recorded moves say crossed it; ``protocol``: what the packets add (assumed, by the kind of the link);
``unexplained``: the rest of what its counters counted. Only spans that both cover are compared: time between samples of the
counter in which everyone who records moves did so. A counter that is absent, falls, or is no count gives null with the reason,
never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.access import OVERHEAD
from hoptrace.analysis.moves.ledger_rows import local_links
from hoptrace.analysis.moves.movecover import covered, length_within
from hoptrace.analysis.query import query_with
from hoptrace.analysis.text import bytes_text, counted, percent
from hoptrace.platform import Link, graph_of
from hoptrace.reader import Trace

__all__ = ["BUSY", "Counter", "LinkUse", "LinkWay", "link_uses"]

BINS = 240
BUSY = 0.8
"""Utilisation above which a link counts as busy."""
_SAME = 0.02  # what counters and moves may differ by and still be said to agree
_FALLS = 0.1  # share of falling pairs from which a "counter" reads like a gauge
_MEMORY = ("dram", "hbm", "memory", "cxl", "ddr")
_NO_BINS = pl.DataFrame(
    schema=dict.fromkeys(("told_by", "host", "name", "link", "way"), pl.String)
    | {"from_ns": pl.Int64, "to_ns": pl.Int64, "bytes": pl.Float64, "counted_ns": pl.Int64}
)
_VIEWS = {"crossings": "ledger_link_crossings", "spans": "ledger_link_spans"}


@dataclass(frozen=True, slots=True)
class Counter:
    """A byte counter of a link: ``bytes`` over ``covered_ns`` of spans inside the moves' coverage (null: ``why`` says the
    reason); ``falls``: steps back that no wrap explains; ``restarts``: new incarnations; ``partial``: some samples had no
    value."""

    name: str
    host: str
    direction: str
    bytes: int | None
    covered_ns: int
    samples: int
    unknown_samples: int
    falls: int
    restarts: int
    why: str | None

    @property
    def partial(self) -> bool:
        return bool(self.unknown_samples or self.falls or self.restarts)

    def as_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__} | {"partial": self.partial}


@dataclass(frozen=True, slots=True)
class LinkWay:
    """One direction of a link (``a → b``), or both together where counters or moves do not tell it.

    ``moved_bytes``: of all recorded moves, by basis (``bytes_unknown`` of them do not say theirs). ``explained_bytes``: what
    moves say of the counter's spans; ``protocol_bytes``: what packets add to that (assumed); ``unexplained_bytes``: counter less
    both (negative: the moves tell more than the wire carried). ``mean`` and ``peak``: utilisation over the time that is covered,
    and in the fullest of at most 240 bins of ``bin_ns``; ``busy_ns``: time in bins over 80 %, ``busy``: when (at most 20
    stretches); ``told_by``: counter or moves. ``at_least``: not all moves were recorded or say their bytes, so what they explain
    is a lower bound, and what is unexplained an upper one. ``says``: in a sentence.
    """

    way: str
    moved_bytes: dict[str, int]
    bytes_unknown: int
    transfers: int
    counter: Counter | None
    explained_bytes: int | None
    protocol_bytes: int | None
    unexplained_bytes: int | None
    mean: float | None
    peak: float | None
    busy_ns: int | None
    busy: list[tuple[int, int]]
    bin_ns: int
    told_by: str | None
    says: str
    at_least: bool = False

    def as_dict(self) -> dict[str, Any]:
        plain = {f: getattr(self, f) for f in self.__slots__ if f not in ("counter", "mean", "peak")}
        rounded = {n: None if v is None else round(v, 6) for n, v in (("mean", self.mean), ("peak", self.peak))}
        return plain | rounded | {"counter": None if self.counter is None else self.counter.as_dict()}


@dataclass(frozen=True, slots=True)
class LinkUse:
    """A link with what crossed it. ``bytes_per_s`` is its capacity in one direction, null if unknown."""

    link: str
    kind: str | None
    a: str | None
    b: str | None
    bytes_per_s: float | None
    ways: list[LinkWay]

    def as_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__ if f != "ways"} | {"ways": [w.as_dict() for w in self.ways]}


def link_uses(trace: Trace) -> tuple[list[LinkUse], list[str]]:
    """The links of the platform graph, and sentences about data that took another way than its moves say.

    Raises:
        InputError: a table is damaged.
    """
    links = graph_of(trace.manifest).links
    when = covered(trace)
    span = _extent(trace, when)
    if not links or span is None:
        return [], []
    lossy = _lossy(trace)
    relations = {
        "ends": pl.DataFrame(
            [(k.name, k.a, k.b) for k in links.values()], schema=dict.fromkeys(("link", "a", "b"), pl.String), orient="row"
        ),
        "watched": pl.DataFrame(
            [(k.name, k.entity, k.bytes_per_s) for k in links.values() if k.entity is not None],
            schema={"link": pl.String, "entity": pl.String, "bytes_per_s": pl.Float64},
            orient="row",
        ),
        "rated": pl.DataFrame({"link": [k.name for k in links.values() if k.bytes_per_s]}, schema={"link": pl.String}),
        "span": pl.DataFrame([span] if when is None else when, schema={"from_ns": pl.Int64, "to_ns": pl.Int64}, orient="row"),
        "grid": pl.DataFrame(
            [(span[0], max(1, -(-(span[1] - span[0]) // BINS)), BINS)],
            schema={"from_ns": pl.Int64, "width_ns": pl.Int64, "bins": pl.Int64},
            orient="row",
        ),
    }
    names = ["ledger_link_moved", "ledger_link_counted", "ledger_link_bins"]
    if not any(k.bytes_per_s for k in links.values()):
        names.pop()  # without a capacity there is no utilisation
    found = [query_with(trace, name, relations, _VIEWS) for name in names]
    found += [_NO_BINS] * (3 - len(found))
    local = local_links(trace.manifest)
    out = []
    for k in links.values():
        moved, counters, bins = (f.filter(pl.col("link") == k.name) for f in found)
        kind = "loopback" if k.name in local else k.kind
        ways = _ways(k, kind, moved, counters, bins, when, lossy)
        out.append(LinkUse(k.name, k.kind, k.a, k.b, k.bytes_per_s, ways))
    return out, _elsewhere(out)


def _extent(trace: Trace, when: Sequence[tuple[int, int]] | None) -> tuple[int, int] | None:
    """The window of the bins: the time in which moves were recorded, as far as it has an end; else from the first to the last
    instant of moves."""
    found = trace.table("moves").select(
        pl.col("start_ns").min().alias("low"), pl.max_horizontal(pl.col("start_ns").max(), pl.col("end_ns").max()).alias("high")
    )
    low, high = found.collect(engine="streaming").row(0)
    counted_ = trace.table("counters").select(pl.col("time_ns").min().alias("low"), pl.col("time_ns").max().alias("high"))
    first, last = counted_.collect(engine="streaming").row(0)
    lows, highs = [x for x in (low, first) if x is not None], [x for x in (high, last) if x is not None]
    if not lows or not highs:
        return None
    if low is None or high is None:
        return min(lows), max(highs) + 1
    if when:
        return min(low, when[0][0]), max(high + 1, when[-1][1] if when[-1][1] < 1 << 62 else 0)
    return low, high + 1


def _lossy(trace: Trace) -> bool:
    """Whether the coverage says that not all moves were recorded while somebody recorded them."""
    rows = trace.table("coverage").filter((pl.col("table") == "moves") & (pl.col("fraction") < 1)).select(pl.len())
    return bool(rows.collect().item())


def _ways(
    link: Link,
    kind: str | None,
    crossed: pl.DataFrame,
    counters: pl.DataFrame,
    bins: pl.DataFrame,
    when: Sequence[tuple[int, int]] | None,
    lossy: bool,
) -> list[LinkWay]:
    told = [r for r in counters.to_dicts() if r["samples"]]
    undirected = any(not r["direction"] for r in told) or "" in crossed["way"].to_list()
    if not told and not crossed.height:
        return []
    if undirected:
        return [_way(link, kind, "both", ("ab", "ba", ""), crossed, told, bins, when, lossy)]
    named = {"ab": f"{link.a or '?'} → {link.b or '?'}", "ba": f"{link.b or '?'} → {link.a or '?'}"}
    seen = {r["way"] for r in crossed.to_dicts()} | {_WAY.get(r["direction"], "") for r in told}
    return [_way(link, kind, named[w], (w,), crossed, told, bins, when, lossy) for w in ("ab", "ba") if w in seen]


_WAY = {"tx": "ab", "write": "ab", "rx": "ba", "read": "ba"}


def _way(
    link: Link,
    kind: str | None,
    name: str,
    ways: tuple[str, ...],
    crossed: pl.DataFrame,
    told: list[dict[str, Any]],
    bins: pl.DataFrame,
    when: Sequence[tuple[int, int]] | None,
    lossy: bool,
) -> LinkWay:
    moved = crossed.filter(pl.col("way").is_in(ways))
    by_basis: dict[str, int] = {}
    for basis, n in moved.select("basis", "bytes").iter_rows():
        if n is not None:
            by_basis[basis] = by_basis.get(basis, 0) + n
    transfers = int(moved["transfers"].sum())
    counter, row = _counter([r for r in told if len(ways) > 1 or _WAY.get(r["direction"], "") in ways])
    explained = protocol = unexplained = None
    if counter is not None and counter.bytes is not None and row is not None:
        explained = _inside(row, ways)
        back = ways if len(ways) > 1 else tuple(w for w in ("ab", "ba") if w not in ways)
        protocol = _protocol(kind, moved, explained, crossed.filter(pl.col("way").is_in(back)), _inside(row, back))
        unexplained = counter.bytes - explained - (protocol or 0)
    mean, peak, busy_ns, busy, width, told_by = _utilisation(link, ways, bins, counter, when)
    unknown = int(moved["bytes_unknown"].sum())
    partly = lossy or unknown > 0
    return LinkWay(
        name, by_basis, unknown, transfers, counter, explained, protocol, unexplained, mean, peak,
        busy_ns, busy, width, told_by, _says(link, kind, counter, explained, protocol, unexplained, at_least=partly), partly,
    )  # fmt: skip


def _inside(row: Mapping[str, Any], ways: tuple[str, ...]) -> int:
    """Bytes that moves carried that way within the counter's spans."""
    return round(sum(row[f"moved_{w or 'either'}"] or 0.0 for w in ways))


def _protocol(kind: str | None, moved: pl.DataFrame, inside: int, back: pl.DataFrame, back_inside: int) -> int | None:
    """What packets add to ``inside`` bytes of ``moved``, and acknowledgements of ``back_inside`` bytes that go the other way."""
    overhead = OVERHEAD.get(kind or "")
    if overhead is None:
        return None

    def transfers(frame: pl.DataFrame, n: int) -> int:
        whole = int(frame["bytes"].sum())
        return round(int(frame["transfers"].sum()) * min(1.0, n / whole)) if whole else 0

    return overhead.of(inside, transfers(moved, inside)) + overhead.acks(back_inside, transfers(back, back_inside))


def _counter(rows: list[dict[str, Any]]) -> tuple[Counter | None, dict[str, Any] | None]:
    """The counter that saw most of the wire: of several names the largest total (the others count a part, as payload alone).
    Its directions are added up where both are asked for."""
    if not rows:
        return None, None
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in rows:
        by_name.setdefault((r["host"], r["name"]), []).append(r)
    # Counters of both directions often bear the direction in their names.
    groups = list(by_name.values())
    directions = {r["direction"] for r in rows}
    if len(directions) > 1 and all(len({r["direction"] for r in g}) == 1 for g in groups):
        best = [max((g[0] for g in groups if g[0]["direction"] == d), key=lambda r: r["bytes"] or -1) for d in sorted(directions)]
    else:
        best = max(groups, key=lambda g: sum(r["bytes"] or 0 for r in g) if all(r["bytes"] is not None for r in g) else -1)
    why = next((w for r in best if (w := _doubt(r)) is not None), None)
    total = None if why is not None else round(sum(r["bytes"] for r in best))
    merged: dict[str, Any] = {n: sum(r[n] or 0.0 for r in best) for n in ("moved_ab", "moved_ba", "moved_either")}
    # Moves of both directions are measured over each direction's spans: once is enough.
    merged = {n: v / len(best) for n, v in merged.items()}
    return (
        Counter(
            " + ".join(dict.fromkeys(r["name"] for r in best)),
            best[0]["host"],
            best[0]["direction"] if len(best) == 1 else "both",
            total,
            max(r["covered_ns"] or 0 for r in best),
            sum(r["samples"] for r in best),
            sum(r["unknown_samples"] for r in best),
            sum(r["falls"] for r in best),
            sum(r["restarts"] for r in best),
            why,
        ),
        merged,
    )


def _doubt(row: Mapping[str, Any]) -> str | None:
    if row["semantics"] == "gauge":
        return "it is recorded as a gauge, and a gauge of bytes is no count"
    if row["samples"] == row["unknown_samples"]:
        return f"every sample is without a value ({row['why']})"
    if row["falls"] and row["falls"] >= _FALLS * max(1, row["samples"] - row["unknown_samples"] - 1):
        return f"it falls {counted(row['falls'], 'time')} though nothing restarted: it reads like a gauge or a rate, not a count"
    if row["bytes"] is None:
        return "no two of its samples lie within the time in which moves were recorded"
    return None


def _utilisation(
    link: Link, ways: tuple[str, ...], bins: pl.DataFrame, counter: Counter | None, when: Sequence[tuple[int, int]] | None
) -> tuple[float | None, float | None, int | None, list[tuple[int, int]], int, str | None]:
    by_counter = counter is not None and counter.bytes is not None
    mine = bins.filter(pl.col("told_by") == ("counter" if by_counter else "moves"))
    if by_counter and counter is not None:
        mine = mine.filter(pl.col("name").is_in(counter.name.split(" + ")) & (pl.col("host") == counter.host))
    mine = mine.filter(pl.col("way").is_in(ways))
    if not mine.height:
        return None, None, None, [], 0, None
    # Both directions together can carry what one does in each.
    sides = max(1, mine["way"].n_unique()) if len(ways) > 1 else 1
    rows = mine.group_by("from_ns", "to_ns").agg(pl.col("bytes").sum(), pl.col("counted_ns").max()).sort("from_ns")
    width = int(rows["to_ns"][0] - rows["from_ns"][0])
    told_by = "counter" if by_counter else "moves"
    rate = link.bytes_per_s
    if not rate:
        return None, None, None, [], width, told_by
    if by_counter:
        time = rows["counted_ns"].clip(0, width)
    else:  # what was not recorded is no idle time
        ends = rows.select("from_ns", "to_ns").iter_rows()
        time = pl.Series([width if when is None else length_within(when, a, z) for a, z in ends], dtype=pl.Int64)
    rows = rows.with_columns(time.alias("time")).filter(pl.col("time") > 0)
    if not rows.height:
        return None, None, None, [], width, told_by
    rows = rows.with_columns((pl.col("bytes") * 1e9 / pl.col("time") / (rate * sides)).alias("use"))
    mean = float(rows["bytes"].sum()) * 1e9 / float(rows["time"].sum()) / (rate * sides)
    full = rows.filter(pl.col("use") > BUSY)
    peak = rows["use"].max()
    stretches = _stretches(full.select("from_ns", "to_ns").iter_rows())
    return mean, float(peak) if isinstance(peak, float) else None, int(full["time"].sum()), stretches, width, told_by


def _stretches(bins: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for a, z in bins:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], z)
        else:
            out.append((a, z))
    return sorted(sorted(out, key=lambda s: s[0] - s[1])[:20])


def _says(
    link: Link,
    kind: str | None,
    counter: Counter | None,
    explained: int | None,
    protocol: int | None,
    unexplained: int | None,
    *,
    at_least: bool,
) -> str:
    if counter is None:
        return "No counter of it was recorded: what moves do not tell is unknown." if link.entity else "No counter belongs to it."
    if counter.bytes is None or explained is None or unexplained is None:
        return f"Its counter {counter.name} is of no use: {counter.why}."
    said = f"Its counter saw {bytes_text(counter.bytes)}; moves explain {'at least ' if at_least else ''}{bytes_text(explained)}"
    said += f", packets add some {bytes_text(protocol)} (assumed)" if protocol is not None else ", what packets add is unknown"
    if unexplained < -_SAME * max(counter.bytes, explained):
        said += f". The moves tell {bytes_text(-unexplained)} more than it carried: "
        if kind in _MEMORY:
            return said + "that much never reached this memory (what a device writes can stay in the last-level cache)."
        return said + "that much took another way."
    if not counter.bytes:
        return said + "."
    most = "at most " if at_least else ""
    more = " Not all moves were recorded with their bytes." if at_least else ""
    return (
        said + f"; {most}{bytes_text(max(0, unexplained))} ({percent(max(0, unexplained) / counter.bytes)}) is unexplained.{more}"
    )


def _elsewhere(links: list[LinkUse]) -> list[str]:
    """Links whose moves tell more than they carried, with the link that carried about as much more than moves tell."""
    gaps = [(u, w, w.counter, w.unexplained_bytes) for u in links for w in u.ways]
    out: list[str] = []
    for u, w, counter, gap in gaps:
        if gap is None or counter is None or u.kind in _MEMORY or gap >= -_SAME * max(w.explained_bytes or 0, 1):
            continue
        others = [(v, x) for v, _, _, x in gaps if x is not None and v.link != u.link and 0.5 <= x / -gap <= 1.5]
        if others:
            v, x = min(others, key=lambda o: abs(o[1] + gap))
            out.append(
                f"Moves name link {u.link} for {bytes_text(w.explained_bytes)}, its counter saw {bytes_text(counter.bytes)}; "
                f"{v.link} carried {bytes_text(x)} that no move explains: the data took that way."
            )
        else:
            out.append(f"Moves name link {u.link} for {bytes_text(-gap)} more than its counter saw, and no other link shows it.")
    return out
