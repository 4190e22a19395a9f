"""Which of the counters of a link is believed, and why: payload or wire, counts or rates, one source or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hoptrace.analysis.text import counted, duration_text
from hoptrace.contradictions import LEAST_BYTES, STILL

__all__ = ["Choice", "Counter", "Row", "chosen"]

Row = Mapping[str, Any]
"""A row of ``ledger_link_counted``."""

_FALLS = 0.1  # share of falling pairs from which a "counter" reads like a gauge
_COVERS = 0.9  # of the longest time that one of them covers
_SAME_TIME = 0.02  # by how much two counters' times may differ and their difference still be protocol
_WORDS = {"payload": "payload", "wire": "payload and protocol", "unknown": "bytes"}


@dataclass(frozen=True, slots=True)
class Counter:
    """A byte counter of a link.

    ``bytes`` over ``covered_ns`` of spans inside the time in which moves were recorded; ``counted_bytes`` over ``counted_ns``,
    all its samples; null: ``why`` says the reason. ``what``: payload, wire (with protocol) or unknown, by its name. ``falls``:
    steps back that no wrap explains; ``ambiguous``: differences that are not known since it can have wrapped more than once;
    ``restarts``: new incarnations; ``partial``: some samples had no value or difference. ``others``: counters of the same that
    were not taken, in words.
    """

    name: str
    source: str
    host: str
    direction: str
    what: str
    bytes: int | None
    covered_ns: int
    counted_bytes: int | None
    counted_ns: int
    samples: int
    unknown_samples: int
    falls: int
    ambiguous: int
    restarts: int
    why: str | None
    others: tuple[str, ...] = ()

    @property
    def partial(self) -> bool:
        return bool(self.unknown_samples or self.falls or self.restarts or self.ambiguous)

    def as_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__} | {"others": list(self.others), "partial": self.partial}


@dataclass(frozen=True, slots=True)
class Choice:
    """The counter that is taken; what moves carried in its spans, by way (``moved``); ``wire_bytes``: what the wire carried in
    the same time with protocol, null where nobody counted that. ``keys``: (host, source, name, direction) of the rows that tell
    how full the link was."""

    counter: Counter
    moved: dict[str, float]
    wire_bytes: int | None
    keys: tuple[tuple[str, str, str, str], ...]

    @property
    def protocol_bytes(self) -> int | None:
        """Counted: what the wire carried beyond the payload."""
        if self.counter.bytes is None or self.wire_bytes is None:
            return None
        return max(0, self.wire_bytes - self.counter.bytes)


def chosen(rows: Sequence[Row], home: str | None, compared: str | None) -> Choice | None:
    """The choice among rows of one direction, or of several, of which each has its own and they are added up. Counters without a
    direction only count where there are none with one.

    Args:
        home: host of the link's ends: where counters of several hosts bear the same entity, that one's are meant.
        compared: why no counter can be held against moves; null: they can.
    """
    by_way: dict[str, list[Row]] = {}
    for r in rows:
        by_way.setdefault(r["direction"], []).append(r)
    if len(by_way) > 1:
        by_way.pop("", None)
    found = [_of_one_way(mine, home, compared) for _, mine in sorted(by_way.items())]
    return _together(found) if found else None


def _of_one_way(rows: Sequence[Row], home: str | None, compared: str | None) -> Choice:
    mine = [r for r in rows if r["host"] == home] or list(rows)
    most = max((r["all_bytes"] or 0.0 for r in mine if _doubt(r) is None), default=0.0)
    longest = max((r["all_ns"] or 0 for r in mine if _doubt(r) is None), default=0)

    def against(r: Row) -> tuple[str, ...]:
        """What speaks against a counter, the worst first."""
        said = []
        if _doubt(r) is not None:
            said.append("of no use")
        elif most >= LEAST_BYTES and r["all_bytes"] < STILL * most:
            said.append("stood still")
        elif (r["all_ns"] or 0) < _COVERS * longest:
            said.append("covers less time")
        elif r["semantics"] == "rate":
            said.append("a rate")
        return tuple(said)

    severity = ("of no use", "stood still", "a rate", "covers less time")
    kinds = ("payload", "wire", "unknown")

    def rank(r: Row) -> tuple[Any, ...]:
        worst = min((severity.index(w) for w in against(r)), default=len(severity))
        return -worst, kinds.index(_what(r)), -(r["all_bytes"] or 0.0), r["name"], r["source"]

    ordered = sorted(mine, key=rank)
    best = ordered[0]
    wire = next((r for r in ordered if _beside(best, r)), None)
    others = []
    for r in ordered[1:]:
        why = "tells the protocol" if r is wire else ", ".join(against(r)) or _kept(r)
        others.append(f"{r['name']}{_from(r)}: {why}")
    counter = replace(_counter(best, compared), others=tuple(others))
    told = wire if wire is not None else best
    wire_bytes = None if wire is None or wire["bytes"] is None else round(wire["bytes"])
    keys = ((told["host"], told["source"], told["name"], told["direction"]),)
    return Choice(counter, {n: best[n] or 0.0 for n in ("moved_ab", "moved_ba", "moved_either")}, wire_bytes, keys)


def _kept(r: Row) -> str:
    return "counts less" if _what(r) == "unknown" else f"{_WORDS[_what(r)]} too"


def _beside(best: Row, r: Row) -> bool:
    """Whether ``r`` tells what the wire carried with protocol in the very time in which ``best`` counted payload."""
    if _what(best) != "payload" or _what(r) != "wire" or _doubt(best) is not None or _doubt(r) is not None:
        return False
    if r["host"] != best["host"] or (r["semantics"] == "rate") != (best["semantics"] == "rate"):
        return False
    times = [(a[n] or 0, b[n] or 0) for a, b in ((best, r),) for n in ("all_ns", "covered_ns")]
    return all(abs(a - b) <= _SAME_TIME * max(a, b) for a, b in times) and r["all_bytes"] >= best["all_bytes"]


def _what(r: Row) -> str:
    first = str(r["name"]).split("_", 1)[0]
    return {"data": "payload", "raw": "wire"}.get(first, "unknown")


def _from(r: Row) -> str:
    return f" ({r['source']})" if r["source"] else ""


def _counter(r: Row, compared: str | None) -> Counter:
    doubt = _doubt(r)
    why = doubt or compared
    if why is None and r["bytes"] is None:
        why = "no two of its samples lie within the time in which moves were recorded"
    return Counter(
        r["name"], r["source"], r["host"], r["direction"], _what(r),
        None if why is not None else round(r["bytes"]), r["covered_ns"] or 0,
        None if doubt is not None else round(r["all_bytes"]), r["all_ns"] or 0,
        r["samples"], r["unknown_samples"], r["falls"], r["ambiguous"], r["restarts"], why,
    )  # fmt: skip


def _doubt(r: Row) -> str | None:
    """Why what it counted is not known at all."""
    if r["semantics"] == "gauge":
        return "it is recorded as a gauge, and a gauge of bytes is no count"
    if r["samples"] == r["unknown_samples"]:
        return f"every sample is without a value ({r['why']})"
    if r["falls"] and r["falls"] >= _FALLS * max(1, r["samples"] - r["unknown_samples"] - 1):
        return f"it falls {counted(r['falls'], 'time')} though nothing restarted: it reads like a gauge or a rate, not a count"
    if r["all_bytes"] is None or not r["all_ns"]:
        if r["ambiguous"]:
            return (
                f"it can have wrapped more than once between any two samples ({duration_text(r['apart_ns'])} apart), at the rate "
                "that its link may have"
            )
        return "it has no two samples to take a difference of"
    return None


def _together(found: list[Choice]) -> Choice:
    """Both directions as one. Moves are measured over each direction's spans: once is enough."""
    if len(found) == 1:
        return found[0]
    cs = [c.counter for c in found]
    why = next((c.why for c in cs if c.why is not None), None)

    def total(values: list[int | None]) -> int | None:
        known = [v for v in values if v is not None]
        return sum(known) if len(known) == len(values) else None

    counter = replace(
        cs[0],
        name=" + ".join(dict.fromkeys(c.name for c in cs)),
        source=" + ".join(dict.fromkeys(c.source for c in cs)),
        direction="both",
        what=cs[0].what if len({c.what for c in cs}) == 1 else "unknown",
        bytes=total([c.bytes for c in cs]),
        covered_ns=max(c.covered_ns for c in cs),
        counted_bytes=total([c.counted_bytes for c in cs]),
        counted_ns=max(c.counted_ns for c in cs),
        **{n: sum(getattr(c, n) for c in cs) for n in ("samples", "unknown_samples", "falls", "ambiguous", "restarts")},
        why=why,
        others=tuple(dict.fromkeys(o for c in cs for o in c.others)),
    )
    moved = {n: sum(c.moved[n] for c in found) / len(found) for n in found[0].moved}
    return Choice(counter, moved, total([c.wire_bytes for c in found]), tuple(k for c in found for k in c.keys))
