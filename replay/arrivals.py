"""When requests arrive in a replay: as recorded, as their sessions and clients would send them, or from N clients that wait.

An open-loop replay of closed-loop traffic is wrong in just the cases that people ask about: a slower server would have got fewer
requests, a faster one more. So the default follows the trace, and says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import polars as pl

from hoptrace.errors import UsageError
from hoptrace.load_loop import coupling
from hoptrace.reader import Trace
from hoptrace.replay.workload import Workload, sooner

__all__ = ["LINKS", "Arrivals", "arrange", "parse_arrivals"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
Kind = Literal["recorded", "sessions", "closed"]
MOST_CLIENTS = 1 << 20
_NONE = np.iinfo(np.int64).min

LINKS = ("request", "arrival_ns", "finish_ns", "parent_request", "think_ns", "client_slot")
"""Columns of `requests` that tell who waits for whom."""


@dataclass(frozen=True)
class Arrivals:
    """How requests arrive. ``reason``: why, in a sentence. ``clients``: of a closed loop. ``linked``: requests that wait for
    another; ``floored``: those of them that do not come before their recorded arrival either, since how long their client paused
    is unknown. ``rate``: so many times as fast. ``notes``: what a reader has to know besides."""

    kind: Kind
    reason: str
    clients: int | None = None
    linked: int = 0
    floored: int = 0
    rate: Fraction = Fraction(1)
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether these are the trace's own arrivals, as far as it tells them."""
        return self.kind != "closed" and self.rate == 1

    @property
    def label(self) -> str:
        """For the manifest and the screen: ``recorded, 1.5 times as fast``."""
        clients = "1 client" if self.clients == 1 else f"{self.clients or 0:,} clients"
        what = f"closed loop of {clients}" if self.kind == "closed" else self.kind
        return what if self.rate == 1 else f"{what}, {float(self.rate):g} times as fast"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return {
            "kind": self.kind, "clients": self.clients, "rate": str(self.rate), "waiting_for_another": self.linked,
            "not_before_recorded": self.floored, "reason": self.reason,
        }  # fmt: skip


def parse_arrivals(text: str | None) -> tuple[Kind | None, int | None]:
    """``recorded``, ``sessions``, ``closed:N`` or null (follow the trace) as (kind, clients). UsageError if it is none."""
    if text is None or text in ("", "auto"):
        return None, None
    name, colon, rest = text.partition(":")
    if name == "closed" and rest.isascii() and rest.isdigit() and 1 <= int(rest[:9]) <= MOST_CLIENTS and len(rest) < 9:
        return "closed", int(rest)
    if name in ("recorded", "sessions") and not colon:
        return ("recorded" if name == "recorded" else "sessions"), None
    raise UsageError(
        f"{text[:40]!r} is no way to arrive.",
        hint=f"--arrivals recorded, sessions, or closed:N with N clients from 1 to {MOST_CLIENTS}.",
    )


def arrange(work: Workload, trace: Trace, asked: str | None = None, rate: Fraction = Fraction(1)) -> tuple[Workload, Arrivals]:
    """The work with the arrivals that were asked for, ``rate`` times as fast.

    *recorded*: every request at its recorded arrival. *sessions*: one that continues another's answer (``parent_request``), or
    that a client's slot sent (``client_slot``), comes its think time after the one before has ended for its client; if the end
    or the think time is unknown, not before its recorded arrival either (``floor``). *closed:N*: N clients, each sends the
    next request in the recorded order as soon as its last one has ended.

    A rate divides the distances of arrivals from the first one, and think times: users who come and who think so much faster. A
    closed loop of N has none: its clients set it.

    Raises:
        UsageError: the words are wrong, nothing in the trace waits for anything, or a rate is asked of a closed loop.
    """
    kind, clients = parse_arrivals(asked)
    if kind == "closed":
        if rate != 1:
            raise UsageError("A closed loop has no rate: its clients send when they are answered.", hint="Change N instead.")
        reason = "asked for; each client sends its next request as soon as the last one is answered"
        return _plain(work), Arrivals("closed", reason, clients)
    faster = work.at_rate(rate)
    found = None if kind == "recorded" else _linked(work, trace)
    if found is None or not found.linked:
        if kind == "sessions":
            raise UsageError(
                "No request of this trace says which one it waited for (parent_request, client_slot).",
                hint="Use --arrivals recorded, or closed:N.",
            )
        if kind == "recorded":
            said = Arrivals("recorded", "asked for", rate=rate, notes=_ignored(trace))
        else:
            said = Arrivals("recorded", "no request says which one it waited for", rate=rate, notes=_coupled(trace))
        return _plain(faster), said
    think = found.think if rate == 1 else sooner(found.think, rate)
    paced = replace(faster, after=found.after, think_ns=think, floor=found.floor)
    reason = "asked for" if kind is not None else found.reason
    return paced, Arrivals("sessions", reason, None, found.linked, int(found.floor.sum()), rate, found.notes)


def _plain(work: Workload) -> Workload:
    return replace(work, after=None, think_ns=None, floor=None)


@dataclass(frozen=True)
class _Found:
    after: _Ints
    think: _Ints
    floor: np.ndarray[Any, np.dtype[np.bool_]]
    linked: int
    reason: str
    notes: tuple[str, ...]


def _linked(work: Workload, trace: Trace) -> _Found | None:
    """Who waits for whom, by position in the work."""
    rows = (
        trace.table("requests").select(LINKS).filter(pl.col("parent_request").is_not_null() | pl.col("client_slot").is_not_null())
    )
    links = rows.collect(engine="streaming")
    if not links.height:
        return None
    by_number = np.argsort(work.request, kind="stable")
    numbers = work.request[by_number]

    def places(values: pl.Series) -> _Ints:
        """Positions in the work; -1 where it is not there."""
        wanted = values.fill_null(_NONE).to_numpy()
        at = np.minimum(np.searchsorted(numbers, wanted), max(0, len(numbers) - 1))
        return np.where(numbers[at] == wanted, by_number[at], -1) if len(numbers) else np.full(len(wanted), -1)

    links = links.with_columns(pl.Series("at", places(links["request"]))).filter(pl.col("at") >= 0)
    parents = links.filter(pl.col("parent_request").is_not_null())
    after = np.full(work.n, -1, dtype=np.int64)
    think = np.zeros(work.n, dtype=np.int64)
    floor = np.zeros(work.n, dtype=np.bool_)
    ended = _ends(work, trace, by_number, numbers)
    at, before = parents["at"].to_numpy(), places(parents["parent_request"])
    known = before >= 0
    turns = _wait(at[known], before[known], parents["think_ns"].filter(pl.Series(known)), work, ended, after, think, floor)
    slots = links.filter(pl.col("client_slot").is_not_null()).sort("client_slot", "arrival_ns", "request")
    previous = slots.with_columns(pl.col("at").shift(1).over("client_slot").alias("before")).drop_nulls("before")
    mine, its = previous["at"].to_numpy(), previous["before"].to_numpy()
    free = after[mine] < 0  # a turn of a conversation is that first
    queued = _wait(mine[free], its[free], None, work, ended, after, think, floor)
    notes = []
    lost = int((~known).sum())
    if lost:
        notes.append(f"{_n(lost)} continue{'s' * (lost == 1)} one that is not replayed: arrived as recorded.")
    early = turns[1] + queued[1]
    if early:
        notes.append(f"{_n(early)} arrived before the one that went before had ended: arrived as recorded.")
    linked = int((after >= 0).sum())
    if floored := int(floor.sum()):
        notes.append(
            f"How long the clients of {_n(floored)} paused is unknown: these arrive when the one before has ended, and not "
            "before their recorded arrival. A faster server gets them no sooner."
        )
    parts = []
    if turns[0]:
        parts.append(
            f"{_n(turns[0])} continue{'s' * (turns[0] == 1)} another's answer and come{'s' * (turns[0] == 1)} a think time later"
        )
    if queued[0]:
        n = slots["client_slot"].n_unique()
        slots_said = "1 client slot, which waits" if n == 1 else f"{n:,} client slots, each of which waits"
        parts.append(f"{_n(queued[0])} come{'s' * (queued[0] == 1)} from {slots_said} for its answer")
    return _Found(after, think, floor, linked, "; ".join(parts), tuple(notes))


def _n(n: int) -> str:
    return "1 request" if n == 1 else f"{n:,} requests"


def _ends(work: Workload, trace: Trace, by_number: _Ints, numbers: _Ints) -> _Ints:
    """When each request of the work ended for its client; the least int64 where that is unknown."""
    found = np.full(work.n, _NONE, dtype=np.int64)
    rows = trace.table("requests").select("request", "finish_ns").drop_nulls().collect(engine="streaming")
    if not rows.height or not len(numbers):
        return found
    wanted = rows["request"].to_numpy()
    at = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    here = numbers[at] == wanted
    found[by_number[at[here]]] = rows["finish_ns"].to_numpy()[here]
    return found


def _wait(
    at: _Ints,
    before: _Ints,
    told: pl.Series | None,
    work: Workload,
    ended: _Ints,
    after: _Ints,
    think: _Ints,
    floor: np.ndarray[Any, np.dtype[np.bool_]],
) -> tuple[int, int]:
    """Let ``at`` wait for ``before``: how many do, and how many came too early for that. The three arrays are changed."""
    arrival, end = work.arrival_ns[at], ended[before]
    known = end != _NONE
    pause = np.where(known, arrival - np.where(known, end, 0), 0)
    if told is not None:
        # What the trace says of the pause itself counts, but for one that its own times belie.
        has = told.is_not_null().to_numpy()
        pause = np.where(has & ~known, told.fill_null(0).to_numpy(), pause)
        known = known | has
    fine = (pause >= 0) & (before < at)
    after[at[fine]], think[at[fine]], floor[at[fine]] = before[fine], pause[fine], ~known[fine]
    return int(fine.sum()), int((~fine).sum())


def _ignored(trace: Trace) -> tuple[str, ...]:
    """What recorded arrivals leave out, where requests do wait for others."""
    rows = trace.table("requests").select(pl.col("parent_request", "client_slot").is_not_null().any())
    turns, slots = rows.collect(engine="streaming").row(0)
    if slots:
        return ("The load was a closed loop; its arrivals are kept as recorded, though another policy would have moved them.",)
    return ("Conversations are in it; their turns arrive as recorded, though another policy would have moved them.",) * bool(
        turns
    )


def _coupled(trace: Trace) -> tuple[str, ...]:
    """Whether arrivals look as if they had waited for answers though no request says so."""
    rows = trace.table("requests").select("arrival_ns", "finish_ns").drop_nulls().sort("arrival_ns").collect(engine="streaming")
    if not rows.height:
        return ()
    test = coupling("arrival", rows["arrival_ns"].to_numpy(), rows["finish_ns"].to_numpy())
    if test.kind not in ("closed", "partly closed"):
        return ()
    return (
        f"The arrivals look like those of a {test.kind} loop (at most {test.most_in_flight:,} requests in flight), but no "
        f"request says which one it waited for: they are kept as recorded. Try --arrivals closed:{test.most_in_flight}.",
    )
