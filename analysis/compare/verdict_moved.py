"""Costs that were moved elsewhere rather than removed: of what fell, how much stands elsewhere.

A cost is compared with others of its own kind only (a *balance*: the parts of a request's time, the bytes of nodes, of links, of
ways, the queues of servers, the operations by kind), in one unit, per request or per output token. A figure counts as fallen
or risen if its change is beyond noise (:attr:`hoptrace.analysis.compare.diff_change.Change.direction`) and at least 1 % of the
balance's total.

Each rise is set against falls so that nothing is counted twice: the largest rise first, each against the fall that is nearest
to it in size, what is left of it against the next. Of a fall, the share that rises stand against is what moved: from one half
on it counts as moved. It says that one fell while the other rose, not that the one caused the other.

Time that nobody can explain is no place where a cost could stand: it is set against nothing. Where it changed by a tenth of what
fell or rose or more, nobody can tell whether a cost was removed, added or only went out of sight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hoptrace.analysis.compare.diff_change import Change
from hoptrace.analysis.compare.diff_words import label, step, value
from hoptrace.analysis.latency.parts import PARTS
from hoptrace.analysis.text import percent

__all__ = ["HALF", "Balance", "Shift", "balance", "balances"]

HALF = 0.5
_SOME = 0.1
_MATERIAL = 0.01
_FLAT = 0.03  # a total that changes by less hides what is in it (published: 1.00 to 1.03 × end to end hid −5 % and +5.5 %)
_CLASS = {p.name: p.klass for p in PARTS}
_NOWHERE = "unexplained"


@dataclass(frozen=True, slots=True)
class Shift:
    """``fell`` (a figure) by ``fell_by``, while the figures of ``rose`` rose; of what they rose by, ``explained`` stands
    against it."""

    fell: Change
    rose: tuple[tuple[Change, float], ...]

    @property
    def fell_by(self) -> float:
        return -(self.fell.change or 0.0)

    @property
    def explained(self) -> float:
        return sum(x for _, x in self.rose)

    @property
    def share(self) -> float:
        """Of the fall, what stands elsewhere: 0 to 1."""
        return min(1.0, self.explained / self.fell_by) if self.fell_by else 0.0

    @property
    def is_moved(self) -> bool:
        return self.share >= HALF

    @property
    def sentence(self) -> str:
        """In words, without its full stop; it claims no cause."""
        risen = " and ".join(f"{label(c.name)} rose by {value(c.change, c.unit)} ({step(c)})" for c, _ in self.rose)
        return (
            f"{_capital(label(self.fell.name))} fell by {value(self.fell_by, self.fell.unit)} ({step(self.fell)}) while {risen}: "
            f"{percent(self.share)} of what it fell by"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "fell": self.fell.name,
            "fell_by": self.fell_by,
            "class": _klass(self.fell),
            "rose": [{"name": c.name, "rose_by": c.change, "against_it": x, "class": _klass(c)} for c, x in self.rose],
            "share": round(self.share, 6),
            "moved": self.is_moved,
        }


@dataclass(frozen=True)
class Balance:
    """What fell and what rose of one kind of cost. ``total_a``, ``total_b``: sums over the figures known on both sides;
    ``unknown``: figures that one side cannot show, where a cost may have gone unseen. ``total``: the change of the whole,
    where it is a figure of its own. ``assumed``: its figures are assumed, and decide nothing alone. ``unexplained``: changes of
    time that nobody can explain; in neither falls nor rises."""

    key: str
    what: str
    unit: str
    total_a: float
    total_b: float
    falls: tuple[Change, ...]
    rises: tuple[Change, ...]
    shifts: tuple[Shift, ...]
    unknown: tuple[str, ...]
    total: Change | None = None
    assumed: bool = False
    unexplained: tuple[Change, ...] = ()

    @property
    def untold(self) -> bool:
        """Whether so much time went into or out of what nobody can explain that what became of the costs cannot be told."""
        dark = sum(abs(c.change or 0.0) for c in self.unexplained)
        return dark > 0 and dark >= _SOME * max(self.fell_by, self.rose_by)

    @property
    def fell_by(self) -> float:
        return -sum(c.change or 0.0 for c in self.falls)

    @property
    def rose_by(self) -> float:
        return sum(c.change or 0.0 for c in self.rises)

    @property
    def moved_share(self) -> float | None:
        """Of all that fell, what stands elsewhere; null where nothing fell, and where it cannot be told."""
        return None if self.untold else min(1.0, self.rose_by / self.fell_by) if self.falls and self.fell_by else None

    @property
    def outcome(self) -> str:
        """unchanged; added (only rises); removed (under 10 % of what fell stands elsewhere); partly moved; moved (half or
        more); cannot be told (:attr:`untold`)."""
        if self.untold:
            return "cannot be told"
        if not self.falls:
            return "added" if self.rises else "unchanged"
        share = self.moved_share or 0.0
        return "moved" if share >= HALF else "partly moved" if share >= _SOME else "removed"

    @property
    def hidden(self) -> bool:
        """Whether the total stays flat (within noise, or by less than 3 %) while parts of it fell and others rose."""
        t = self.total
        if t is None or not self.falls or not self.rises or t.change is None:
            return False
        return t.direction == "same" or (t.relative is not None and abs(t.relative) <= _FLAT)

    @property
    def sentences(self) -> list[str]:
        """What moved, largest first; and what a flat total hides."""
        out = []
        if self.hidden and self.total is not None:
            t = self.total
            changed = sorted((*self.falls, *self.rises), key=lambda c: -abs(c.change or 0.0))
            named = ", ".join(f"{label(c.name)} {_relative(c)} ({step(c)})" for c in changed[:4])
            out.append(f"{_capital(label(t.name))} stays about the same ({step(t)}, {_relative(t)}), and hides: {named}.")
        if self.untold:
            named = ", ".join(f"{label(c.name)} {step(c)}" for c in self.unexplained)
            out.append(f"Of {self.what}, what fell and what rose cannot all be told: {named}.")
        share = self.moved_share
        whole = f", and {percent(share)} of all that fell," if len(self.falls) > 1 and share is not None else ""
        out += [f"{s.sentence}{whole} stands elsewhere." for s in self.shifts if s.is_moved]
        note = " (Assumed figures: nobody counted them.)" if self.assumed else ""
        return [s + note for s in out]

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "what": self.what,
            "unit": self.unit,
            "outcome": self.outcome,
            "a": self.total_a,
            "b": self.total_b,
            "fell_by": self.fell_by,
            "rose_by": self.rose_by,
            "moved_share": None if self.moved_share is None else round(self.moved_share, 6),
            "hidden_in_flat_total": self.hidden,
            "falls": [c.name for c in self.falls],
            "rises": [c.name for c in self.rises],
            "shifts": [s.as_dict() for s in self.shifts],
            "unknown": list(self.unknown),
            "unexplained": [c.name for c in self.unexplained],
            "assumed": self.assumed,
            "sentences": self.sentences,
        }


def balance(key: str, what: str, changes: Iterable[Change], *, total: Change | None = None, assumed: bool = False) -> Balance:
    """Set falls against rises. ``changes``: costs of one unit, of which less is better, none of them part of another."""
    given = list(changes)
    known = [c for c in given if c.change is not None]
    total_a, total_b = sum(c.a or 0.0 for c in known), sum(c.b or 0.0 for c in known)
    least = _MATERIAL * max(total_a, total_b)
    changed = [c for c in known if abs(c.change or 0.0) >= least and c.direction in ("up", "down")]
    big = [c for c in changed if _klass(c) != _NOWHERE]
    falls = tuple(sorted((c for c in big if c.direction == "down"), key=lambda c: c.change or 0.0))
    rises = tuple(sorted((c for c in big if c.direction == "up"), key=lambda c: -(c.change or 0.0)))
    return Balance(
        key=key,
        what=what,
        unit=given[0].unit if given else "1",
        total_a=total_a,
        total_b=total_b,
        falls=falls,
        rises=rises,
        shifts=_shifts(falls, rises),
        unknown=tuple(c.name for c in given if c.change is None),
        total=total,
        assumed=assumed,
        unexplained=tuple(c for c in changed if _klass(c) == _NOWHERE),
    )


def _klass(c: Change) -> str | None:
    return _CLASS.get(c.name.partition(".")[0])


def _shifts(falls: tuple[Change, ...], rises: tuple[Change, ...]) -> tuple[Shift, ...]:
    open_ = {c.name: -(c.change or 0.0) for c in falls}
    against: dict[str, list[tuple[Change, float]]] = {c.name: [] for c in falls}
    for rise in rises:
        left = rise.change or 0.0
        while left > 0 and any(v > 0 for v in open_.values()):
            name = max((n for n, v in open_.items() if v > 0), key=lambda n: min(open_[n], left) / max(open_[n], left))
            taken = min(left, open_[name])
            against[name].append((rise, taken))
            open_[name] -= taken
            left -= taken
            if taken == 0:
                break
    return tuple(Shift(c, tuple(against[c.name])) for c in falls if against[c.name])


def balances(changes: Mapping[str, Change]) -> list[Balance]:
    """All balances of a comparison of which at least one figure is known on both sides."""
    out = []
    for stat, where in (("mean", "per request"), ("p50", "around the median"), ("p95", "around p95"), ("p99", "around p99")):
        parts = [c for p in PARTS if (c := changes.get(f"{p.name}.{stat}")) is not None]
        total = changes.get("e2e.mean") if stat == "mean" else None
        out.append(balance(f"time.{stat}", f"time {where}, by part", parts, total=total))
    phases = [c for n in ("ttft.mean", "after_ttft.mean") if (c := changes.get(n)) is not None]
    out.append(balance("phases", "time until and after the first token", phases, total=changes.get("e2e.mean")))
    for head, what in (("queue_of.", "queueing, by server"), ("service_of.", "time in the servers' hands, by server")):
        out.append(balance(head.rstrip("."), what, [c for n, c in changes.items() if n.startswith(head)]))
    out += _of_moves(changes)
    for basis in ("counted", "derived", "assumed"):
        operations = [c for n, c in changes.items() if n.startswith("operations_per_token.") and c.basis == basis]
        # Who runs the machine besides the server switches and interrupts too: without repeats that is no finding.
        sure = [c for c in operations if c.repeats or not _is_of_machine(c.name)]
        out.append(balance(f"operations.{basis}", f"operations per token, by kind ({basis})", sure, assumed=basis == "assumed"))
    return [b for b in out if b.falls or b.rises or b.total_a or b.total_b]


def _is_of_machine(name: str) -> bool:
    """Whether an operation is counted for the machine or its threads, whoever caused it."""
    return name.split(".")[1] in ("switch", "interrupt")


def _of_moves(changes: Mapping[str, Change]) -> list[Balance]:
    out = []
    rows = [(n, c) for n, c in changes.items() if n.startswith("bytes_per_token[")]
    for basis in ("counted", "derived", "assumed"):
        own = [c for n, c in rows if c.basis == basis and _is_own(n)]
        nodes = [c for n, c in rows if c.basis == basis and n.startswith("bytes_per_token[node ")]
        links = [c for n, c in rows if c.basis == basis and n.startswith("bytes_per_token[link ")]
        ways = [c for n, c in rows if c.basis == basis and not _is_own(n) and not n.startswith(_PLACES)]
        for key, what, found in (
            ("ways", "bytes per token, by object and way", ways),
            ("nodes", "bytes per token, by node", nodes),
            ("links", "bytes per token, by link", links),
            ("memory", "bytes per token of own memory", own),
        ):
            out.append(balance(f"{key}.{basis}", f"{what} ({basis})", found, assumed=basis == "assumed"))
    return out


_PLACES = ("bytes_per_token[node ", "bytes_per_token[link ")


def _relative(c: Change) -> str:
    return "from nothing" if c.relative is None else f"{c.relative:+.1%}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_own(name: str) -> bool:
    """Whether the way is between a server's compute and its own memory."""
    return "memory:" in name and "compute:" in name
