"""Each link of the platform graph: how full it was, and what its counters say against the recorded moves.

``explained``: bytes that recorded moves say crossed it; ``protocol``: what the packets add (counted where the link counts
payload and wire, else assumed by the kind of the link); ``unexplained``: the rest of what its counters counted. Only spans that
both cover are compared: time between samples of the counter in which everyone who records moves did so. Where nobody recorded
moves, what the counters counted stands by itself. A counter that is absent, falls, may have wrapped unseen, or is no count gives
null with the reason, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.access import OVERHEAD
from hoptrace.analysis.moves.ledger_link_counter import Choice, Counter, chosen
from hoptrace.analysis.moves.ledger_link_fill import BINS, BUSY, Fill, fill
from hoptrace.analysis.moves.ledger_link_says import elsewhere, says
from hoptrace.analysis.moves.ledger_rows import local_links
from hoptrace.analysis.moves.movecover import covered
from hoptrace.analysis.query import Ask, asking
from hoptrace.platform import Graph, Link, graph_of
from hoptrace.reader import Trace

__all__ = ["BUSY", "Counter", "LinkUse", "LinkWay", "link_uses"]

NOBODY = "no one recorded moves here"
_VIEWS = {"crossings": "ledger_link_crossings"}
_TABLES = {"series": "ledger_link_series", "spans": "ledger_link_spans"}
_QUERIES = ("ledger_link_moved", "ledger_link_counted", "ledger_link_bins")
_WAY = {"tx": "ab", "write": "ab", "rx": "ba", "read": "ba"}
_KEYS = ("link", "host", "source", "name", "direction")


@dataclass(frozen=True, slots=True)
class LinkWay:
    """One direction of a link (``a → b``), or both together where counters or moves do not tell it.

    ``moved_bytes``: of all recorded moves, by basis (``bytes_unknown`` of them do not say theirs). ``explained_bytes``: what
    moves say of the counter's spans; ``protocol_bytes``: what packets add to that, ``protocol_basis`` counted (wire less
    payload) or assumed; ``unexplained_bytes``: counter less explained, and less protocol where the counter holds it
    (negative: the moves tell more than the wire carried). ``wire_bytes``: what the wire carried with protocol, where that was
    counted beside payload. ``mean`` and ``peak``: utilisation over the time that is covered, and in the fullest of at most
    240 bins of ``bin_ns``; ``busy_ns``: time in bins over 80 %, ``busy``: when (at most 20 stretches); ``told_by``: counter
    or moves. ``at_least``: not all moves were recorded or say their bytes, so what they explain is a lower bound, and what is
    unexplained an upper one. ``says``: in a sentence.
    """

    way: str
    moved_bytes: dict[str, int]
    bytes_unknown: int
    transfers: int
    counter: Counter | None
    explained_bytes: int | None
    protocol_bytes: int | None
    protocol_basis: str | None
    wire_bytes: int | None
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
    graph = graph_of(trace.manifest)
    links = graph.links
    when = covered(trace)
    span, moves = _extent(trace, when)
    if not links or span is None:
        return [], []
    lossy = _lossy(trace)
    compared = [span] if when is None and moves else when or []
    relations = {
        "ends": pl.DataFrame(
            [(k.name, k.a, k.b) for k in links.values()], schema=dict.fromkeys(("link", "a", "b"), pl.String), orient="row"
        ),
        "watched": pl.DataFrame(
            [(k.name, k.entity, k.bytes_per_s) for k in links.values() if k.entity is not None],
            schema={"link": pl.String, "entity": pl.String, "bytes_per_s": pl.Float64},
            orient="row",
        ),
        "span": pl.DataFrame(compared, schema={"from_ns": pl.Int64, "to_ns": pl.Int64}, orient="row"),
    }
    with asking(trace, _QUERIES, relations, _VIEWS, _TABLES) as ask:
        uses = _uses(ask, trace, graph, span, None if compared else NOBODY, when, lossy)
    return uses, elsewhere(uses)


def _uses(
    ask: Ask, trace: Trace, graph: Graph, span: tuple[int, int], nobody: str | None, when: Sequence[tuple[int, int]] | None,
    lossy: bool,
) -> list[LinkUse]:  # fmt: skip
    links = graph.links
    moved = ask("ledger_link_moved")
    crossed, none = _by_link(moved), moved.clear()
    told = _by_link(ask("ledger_link_counted").filter(pl.col("samples") > 0))
    local = local_links(trace.manifest)
    half = []
    for k in links.values():
        kind = "loopback" if k.name in local else k.kind
        rows = told.get(k.name)
        half.append((k, kind, _half(k, graph, crossed.get(k.name, none), [] if rows is None else rows.to_dicts(), nobody)))
    known = [(k.name, w.choice) for k, _, ways in half if k.bytes_per_s for w in ways if w.choice is not None]
    taken = [(name, *key) for name, choice in known for key in choice.keys]
    bins = _bins(ask, span, [k.name for k in links.values() if k.bytes_per_s], taken)
    return [
        LinkUse(k.name, k.kind, k.a, k.b, k.bytes_per_s, [_whole(k, kind, w, bins.get(k.name), when, lossy) for w in ways])
        for k, kind, ways in half
    ]


def _by_link(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    return {str(key[0]): mine for key, mine in frame.partition_by("link", as_dict=True).items()}


def _bins(ask: Ask, span: tuple[int, int], rated: Sequence[str], taken: Sequence[tuple[str, ...]]) -> dict[str, pl.DataFrame]:
    """The bins of the links of known capacity: without it there is no utilisation."""
    if not rated:
        return {}
    grid = pl.DataFrame(
        [(span[0], max(1, -(-(span[1] - span[0]) // BINS)), BINS)],
        schema={"from_ns": pl.Int64, "width_ns": pl.Int64, "bins": pl.Int64},
        orient="row",
    )
    more = {
        "rated": pl.DataFrame({"link": rated}, schema={"link": pl.String}),
        "chosen": pl.DataFrame(taken, schema=dict.fromkeys(_KEYS, pl.String), orient="row"),
        "grid": grid,
    }
    return _by_link(ask("ledger_link_bins", more))


def _extent(trace: Trace, when: Sequence[tuple[int, int]] | None) -> tuple[tuple[int, int] | None, bool]:
    """The window of the bins: the time in which moves were recorded, as far as it has an end; else from the first to the last
    instant of moves; else that of the counters. And whether there are moves."""
    found = trace.table("moves").select(
        pl.col("start_ns").min().alias("low"), pl.max_horizontal(pl.col("start_ns").max(), pl.col("end_ns").max()).alias("high")
    )
    low, high = found.collect(engine="streaming").row(0)
    counted_ = trace.table("counters").select(pl.col("time_ns").min().alias("low"), pl.col("time_ns").max().alias("high"))
    first, last = counted_.collect(engine="streaming").row(0)
    lows, highs = [x for x in (low, first) if x is not None], [x for x in (high, last) if x is not None]
    if not lows or not highs:
        return None, False
    if low is None or high is None:
        return (min(lows), max(highs) + 1), False
    if when:
        return (min(low, when[0][0]), max(high + 1, when[-1][1] if when[-1][1] < 1 << 62 else 0)), True
    return (low, high + 1), True


def _lossy(trace: Trace) -> bool:
    """Whether the coverage says that not all moves were recorded while somebody recorded them."""
    rows = trace.table("coverage").filter((pl.col("table") == "moves") & (pl.col("fraction") < 1)).select(pl.len())
    return bool(rows.collect().item())


@dataclass(frozen=True, slots=True)
class _Half:
    """A direction before it is known how full it was: its name, the ways (ab, ba, ""), what crossed and what came back."""

    name: str
    ways: tuple[str, ...]
    crossed: pl.DataFrame
    back: pl.DataFrame
    choice: Choice | None


def _half(link: Link, graph: Graph, crossed: pl.DataFrame, told: Sequence[dict[str, Any]], nobody: str | None) -> list[_Half]:
    if not told and not crossed.height:
        return []
    ends = [graph.nodes[n].host for n in (link.a, link.b) if n in graph.nodes]
    home = next((h for h in ends if h is not None), None)
    directed = any(r["direction"] in _WAY for r in told)
    moved = set(crossed["way"].to_list())

    def one(name: str, ways: tuple[str, ...]) -> _Half:
        mine = [r for r in told if len(ways) > 1 or _WAY.get(r["direction"], "") in ways]
        other = ways if len(ways) > 1 else tuple(w for w in ("ab", "ba") if w not in ways)
        choice = chosen(mine, home, nobody) if mine else None
        return _Half(name, ways, crossed.filter(pl.col("way").is_in(ways)), crossed.filter(pl.col("way").is_in(other)), choice)

    if "" in moved or (told and not directed):
        return [one("both", ("ab", "ba", ""))]
    named = {"ab": f"{link.a or '?'} → {link.b or '?'}", "ba": f"{link.b or '?'} → {link.a or '?'}"}
    seen = moved | {_WAY.get(r["direction"], "") for r in told}
    return [one(named[w], (w,)) for w in ("ab", "ba") if w in seen]


def _whole(
    link: Link, kind: str | None, h: _Half, bins: pl.DataFrame | None, when: Sequence[tuple[int, int]] | None, lossy: bool
) -> LinkWay:
    by_basis: dict[str, int] = {}
    for basis, n in h.crossed.select("basis", "bytes").iter_rows():
        if n is not None:
            by_basis[basis] = by_basis.get(basis, 0) + n
    counter = None if h.choice is None else h.choice.counter
    explained = protocol = unexplained = basis = None
    if h.choice is not None and counter is not None and counter.bytes is not None:
        explained = _inside(h.choice, h.ways)
        protocol = h.choice.protocol_bytes
        basis = None if protocol is None else "counted"
        held = 0
        if protocol is None and counter.what != "payload":
            back = h.ways if len(h.ways) > 1 else tuple(w for w in ("ab", "ba") if w not in h.ways)
            protocol = _protocol(kind, h.crossed, explained, h.back, _inside(h.choice, back))
            basis, held = (None, 0) if protocol is None else ("assumed", protocol)
        unexplained = counter.bytes - explained - held
    use: Fill = fill(link, h.ways, bins, counter, when)
    unknown = int(h.crossed["bytes_unknown"].sum())
    partly = lossy or unknown > 0
    said = says(link, kind, counter, explained, protocol, basis, unexplained, at_least=partly, moves=bool(h.crossed.height))
    return LinkWay(
        h.name, by_basis, unknown, int(h.crossed["transfers"].sum()), counter, explained, protocol, basis,
        None if h.choice is None or counter is None or counter.bytes is None else h.choice.wire_bytes, unexplained,
        use.mean, use.peak, use.busy_ns, use.busy, use.bin_ns, use.told_by, said, partly,
    )  # fmt: skip


def _inside(choice: Choice, ways: tuple[str, ...]) -> int:
    """Bytes that moves carried that way within the counter's spans."""
    return round(sum(choice.moved[f"moved_{w or 'either'}"] for w in ways))


def _protocol(kind: str | None, moved: pl.DataFrame, inside: int, back: pl.DataFrame, back_inside: int) -> int | None:
    """What packets add to ``inside`` bytes of ``moved``, and acknowledgements of ``back_inside`` bytes that go the other way."""
    overhead = OVERHEAD.get(kind or "")
    if overhead is None:
        return None

    def transfers(frame: pl.DataFrame, n: int) -> int:
        whole = int(frame["bytes"].sum())
        return round(int(frame["transfers"].sum()) * min(1.0, n / whole)) if whole else 0

    return overhead.of(inside, transfers(moved, inside)) + overhead.acks(back_inside, transfers(back, back_inside))
