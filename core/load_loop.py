"""Open or closed loop: whether requests arrived on their own, or each waited for another to end.

In a closed loop (a client with N slots, a conversation) an arrival follows a completion. Latency and load then regulate each
other: a slower server gets fewer requests, and figures of such a run say little about users who arrive whenever they like.

Nothing in a log says which it was, so it is tested. If arrivals do not depend on how long requests took (open loop), the
durations may be dealt out anew among the requests: the number in flight just after each arrival would vary as much as before. In
a closed loop it hardly varies, since every arrival answers a completion: dealing out anew makes it vary more. The statistic is
that variance, the null hypothesis is *open*, the test a one-sided permutation test (Fisher; p = (1 + as small) ÷ (1 +
permutations)). Bursts make the variance larger, so they are not taken for a closed loop. Durations are dealt out anew among
neighbours only, since load and with it durations drift. Equal durations change nothing when they are dealt out anew, so a regular
schedule that happens to keep step with a regular server is not taken for a closed loop either, nor for an open one: nothing can
be told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Coupling", "LoadLoop", "coupling", "load_loop"]

Kind = Literal["open", "closed", "partly closed", "unknown"]
Ints = npt.NDArray[np.int64]

_LEAST = 30  # arrivals: below, a test says nothing
_MOST = 5_000  # arrivals: a block from the middle of a longer trace
_DEALS = 999
_NEIGHBOURS = 50  # arrivals in a row, among which durations are dealt out anew
_TELLS = 0.25  # share of arrivals whose number in flight a new deal changes: below, durations are too even to tell
_SURE = 0.001  # the smallest p that this many permutations can give
_NO_SIGN = 0.05
_CLOSED = 0.3  # of the variance that durations dealt out anew give
_PARTLY = 0.9  # a drift of the load alone can push p down, never the ratio
_OPEN = 0.7
_MOST_OPEN_ENDED = 0.1


@dataclass(frozen=True, slots=True)
class Coupling:
    """The test on one kind of arrival time.

    ``of``: arrival or sent. ``arrivals``: how many were tested. ``variance_ratio``: variance of the requests in flight just after
    an arrival ÷ its mean over the permutations (0: each arrival answers a completion; about 1: none does). ``p``: of the null
    hypothesis that arrivals do not depend on durations. ``most_in_flight``: the cap, if there is one.
    """

    of: str
    arrivals: int
    variance_ratio: float | None
    p: float | None
    most_in_flight: int

    @property
    def kind(self) -> Kind:
        if self.p is None or self.variance_ratio is None:
            return "unknown"
        if self.p <= _SURE and self.variance_ratio <= _PARTLY:
            return "closed" if self.variance_ratio <= _CLOSED else "partly closed"
        return "open" if self.p > _NO_SIGN and self.variance_ratio >= _OPEN else "unknown"

    def as_dict(self) -> dict[str, Any]:
        return {
            "of": self.of,
            "kind": self.kind,
            "arrivals": self.arrivals,
            "variance_ratio": None if self.variance_ratio is None else round(self.variance_ratio, 4),
            "p": self.p,
            "most_in_flight": self.most_in_flight,
        }


@dataclass(frozen=True, slots=True)
class LoadLoop:
    """What is known of how the load was made.

    ``kind``: open, closed, partly closed (some arrivals answer completions: sessions, pauses between requests), unknown.
    ``sure``: declared (the load generator wrote its slots), tested, or null. ``said``: the reason in a sentence. ``slots``: the
    client's, where declared. ``turns``: requests that continue another's answer. ``tests``: of arrivals, and of sending where
    that was not when it was meant to be.
    """

    kind: Kind
    sure: Literal["declared", "tested"] | None
    said: str
    slots: int | None
    turns: int
    tests: tuple[Coupling, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "sure": self.sure,
            "said": self.said,
            "slots": self.slots,
            "turns": self.turns,
            "tests": [t.as_dict() for t in self.tests],
        }


def coupling(of: str, arrival_ns: Ints, finish_ns: Ints, *, seed: int = 0) -> Coupling:
    """Test whether arrivals answer completions. One entry per request whose two times are known, in any order; a request that
    ends before it arrives is left out. Deterministic for a ``seed``."""
    keep = finish_ns.astype(np.float64) >= arrival_ns.astype(np.float64)
    order = np.argsort(arrival_ns[keep], kind="stable")
    arrival, finish = arrival_ns[keep][order], finish_ns[keep][order]
    if arrival.size > _MOST:
        first = (arrival.size - _MOST) // 2
        arrival, finish = arrival[first : first + _MOST], finish[first : first + _MOST]
    if arrival.size < 2:
        return Coupling(of, int(arrival.size), None, None, int(arrival.size))
    origin = int(arrival[0])
    if float(finish.max()) - float(origin) > 2.0**62:  # hostile stamps: their differences do not fit
        return Coupling(of, int(arrival.size), None, None, 0)
    at, length = arrival - origin, finish - arrival
    # Until the first completion no arrival can answer one: a client that fills its slots.
    begun = at >= (at + length).min()
    tested = int(begun.sum())
    in_flight = _in_flight(at, length)
    most = int(in_flight.max())
    if tested < _LEAST:
        return Coupling(of, tested, None, None, most)
    observed = float(in_flight[begun].var())
    rng = np.random.default_rng(seed)
    dealt = np.empty(_DEALS)
    changed = 0.0
    group = np.arange(at.size) // _NEIGHBOURS
    for i in range(_DEALS):
        again = _in_flight(at, length[np.lexsort((rng.random(at.size), group))])[begun]
        dealt[i] = again.var()
        changed += float((again != in_flight[begun]).mean()) / _DEALS
    expected = float(dealt.mean())
    if expected == 0 or changed < _TELLS:
        return Coupling(of, tested, None, None, most)
    as_small = int((dealt <= observed * (1 + 1e-12)).sum())
    return Coupling(of, tested, observed / expected, (1 + as_small) / (1 + _DEALS), most)


def _in_flight(at: Ints, length: Ints) -> Ints:
    """Requests in flight just after each arrival: arrived, it among them, and not ended. One that ends at the very instant
    has."""
    ended = np.searchsorted(np.sort(at + length), at, side="right")
    # Those of one instant arrive together: each sees all of them.
    return (np.searchsorted(at, at, side="right") - ended).astype(np.int64)


def load_loop(
    arrival_ns: Ints, sent_ns: Ints | None, finish_ns: Ints, *, requests: int, slots: int, in_slots: int, turns: int
) -> LoadLoop:
    """What is known of how the load was made.

    Args:
        arrival_ns, finish_ns: of the requests that have both.
        sent_ns: of the same requests, where all were sent later than they were meant to be is known; else null.
        requests: all requests of the trace. slots, in_slots: distinct client slots, requests that bear one. turns: requests with
            a parent.
    """
    ended = arrival_ns.size
    tests = [coupling("arrival", arrival_ns, finish_ns)]
    if sent_ns is not None:
        tests.append(coupling("sent", sent_ns, finish_ns))
    test = tests[0]
    if slots and in_slots == requests:
        said = f"Closed loop, as its client says: {slots:,} slot{'' if slots == 1 else 's'}, each waits for its answer."
        return LoadLoop("closed", "declared", said, slots, turns, tuple(tests))
    if requests - ended > _MOST_OPEN_ENDED * requests or not requests:
        said = "Open or closed loop: unknown, since too many requests have no known arrival or end."
        return LoadLoop("unknown", None, said, slots or None, turns, tuple(tests))
    said = _words(test, turns)
    if len(tests) > 1 and tests[1].kind == "closed" and test.kind != "closed":
        said += f" Sending waited for completions (at most {tests[1].most_in_flight:,} in flight): the client held requests back."
    return LoadLoop(test.kind, None if test.kind == "unknown" else "tested", said, slots or None, turns, tuple(tests))


def _words(t: Coupling, turns: int) -> str:
    said = {
        "closed": f"Closed loop: each arrival answers a completion (at most {t.most_in_flight:,} in flight; p ≤ {t.p}). "
        "A slower server would have got fewer requests.",
        "partly closed": f"Partly closed loop: arrivals depend on completions (p ≤ {t.p}), but not each on one.",
        "open": f"Open loop, as far as {t.arrivals:,} arrivals show: they do not depend on completions "
        f"(p = {t.p}). Clients that pause long between requests would look the same.",
    }.get(t.kind)
    if said is None:
        why = (
            f"only {t.arrivals:,} arrivals after the first completion"
            if t.arrivals < _LEAST
            else "arrivals and durations hardly vary"
            if t.p is None
            else f"the test is not clear (p = {t.p}, variance ratio {t.variance_ratio:.2f})"
        )
        said = f"Open or closed loop: unknown, {why}."
    if turns and t.kind != "closed":
        said += f" {turns:,} request{'' if turns == 1 else 's'} continue{'s' if turns == 1 else ''} another's answer."
    return said
