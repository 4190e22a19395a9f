"""What a trace did, and why two traces did not do the same: latencies of different work say nothing about each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.compare.diff_pairs import Pairing
from hoptrace.analysis.compare.diff_settings import other_model
from hoptrace.analysis.text import counted, percent
from hoptrace.load_loop import load_loop
from hoptrace.reader import Trace

__all__ = ["Reason", "Work", "notes_on", "reasons_text", "unequal", "work_of"]

_RATE = 0.05  # arrivals that come this much faster are another load
_OTHERS = 0.10  # requests that did not finish, against those that did: more of them on one side is another load
_VANTAGE = 0.05  # share of what was seen elsewhere
_LOST = 0.01  # share of the rows that may be missing
_MANY = 3


@dataclass(frozen=True, slots=True)
class Work:
    """``requests``: all of them; tokens are those of the finished ones without error, null if one of them does not say.

    ``loop``: open, closed, partly closed, or null where nobody can tell (:mod:`hoptrace.load_loop`); ``slots`` of its client;
    ``rate_per_s`` at which requests were meant to be sent. ``arrival_of`` and ``vantage``: shares of where arrivals and tokens
    were seen. ``lost``: rows that were dropped ÷ all; ``covered``: least share of requests and tokens that was recorded.
    """

    requests: int
    finished: int
    prompt_tokens: int | None
    output_tokens: int | None
    loop: str | None = None
    slots: int | None = None
    rate_per_s: float | None = None
    arrival_of: dict[str, float] | None = None
    vantage: dict[str, float] | None = None
    lost: float = 0.0
    covered: float = 1.0
    closed: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "finished": self.finished,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "loop": self.loop,
            "client_slots": self.slots,
            "arrivals_per_s": None if self.rate_per_s is None else round(self.rate_per_s, 6),
            "arrival_of": self.arrival_of,
            "vantage": self.vantage,
            "rows_lost": round(self.lost, 6),
            "covered": self.covered,
            "closed": self.closed,
        }


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the work is not the same: a stable ``code`` and the reason in words."""

    code: str
    text: str

    def as_dict(self) -> dict[str, str]:
        return {"code": self.code, "text": self.text}


def work_of(trace: Trace, done: pl.DataFrame) -> Work:
    """``done``: the finished requests, as :func:`hoptrace.analysis.compare.diff_pairs.finished` gives them."""
    m = trace.manifest
    rows = sum(p.rows or 0 for parts in m.tables.values() for p in parts)
    dropped = sum(m.rows_dropped.values()) + sum(n for c in m.collectors for n in c.dropped.values())
    coverage = trace.table("coverage").filter(pl.col("table").is_in(["requests", "tokens"])).select("fraction").collect()
    least = coverage["fraction"].min()
    loop, slots = _loop(done)
    return Work(
        requests=int(trace.table("requests").select(pl.len()).collect().item()),
        finished=done.height,
        prompt_tokens=_total(done["prompt_tokens"]),
        output_tokens=_total(done["output_tokens"]),
        loop=loop,
        slots=slots,
        rate_per_s=_rate(done),
        arrival_of=_shares(done["arrival_of"].value_counts()),
        vantage=_shares(trace.table("tokens").group_by("vantage").agg(pl.len().alias("count")).collect(engine="streaming")),
        lost=dropped / (rows + dropped) if rows else 0.0,
        covered=1.0 if not isinstance(least, int | float) else float(least),
        closed=m.closed,
    )


def unequal(
    a: Trace, b: Trace, work: tuple[Work, Work], done: tuple[pl.DataFrame, pl.DataFrame], pairs: Pairing | None
) -> list[Reason]:
    """Every reason why the figures of the two do not compare; empty if they do."""
    x, y = work
    out = [Reason("model", text) for text in other_model(a.manifest, b.manifest)]
    for code, u, v in (
        ("finished requests", x.finished, y.finished),
        ("prompt tokens", x.prompt_tokens, y.prompt_tokens),
        ("output tokens", x.output_tokens, y.output_tokens),
    ):
        if u != v:
            out.append(Reason(code.replace(" ", "_"), f"{_number(u)} against {_number(v)} {code}"))
    out += _per_request(done, pairs, {r.code for r in out})
    out += _load(x, y)
    out += _seen(x, y, done, pairs)
    for trace, w in ((a, x), (b, y)):
        out += _partial(trace, w)
    return out


def notes_on(a: Trace, b: Trace, x: Work, y: Work) -> list[str]:
    """What is not quite the same and yet compares, in sentences."""
    out = []
    others = [w.requests - w.finished for w in (x, y)]
    if others[0] != others[1]:
        out.append(
            f"{counted(others[0], 'request')} of {a.name} and {others[1]:,} of {b.name} failed or had not finished: they are in "
            "no latency, but the server had that work too."
        )
    for trace, w in ((a, x), (b, y)):
        if not w.closed:
            out.append(f"{trace.name} was not closed cleanly: at most its last second is missing.")
        if 0 < w.lost <= _LOST:
            out.append(f"{percent(w.lost)} of the rows of {trace.name} were dropped.")
    if x.loop != y.loop and "closed" in (x.loop, y.loop):
        closed, other = (a, b) if x.loop == "closed" else (b, a)
        out.append(
            f"The load of {closed.name} was a closed loop; whether that of {other.name} was is not sure. In a closed loop a "
            "slower server gets fewer requests to queue up."
        )
    if x.output_tokens is None or x.prompt_tokens is None:
        out.append("Some requests do not say how many tokens they had: that the work is the same cannot be checked in full.")
    return out


def _per_request(done: tuple[pl.DataFrame, pl.DataFrame], pairs: Pairing | None, have: set[str]) -> list[Reason]:
    """Requests of other lengths or limits than their partners. Totals may be equal though no request is."""
    out = []
    if pairs is not None:
        left = pl.DataFrame({"request": pairs.a}).join(done[0], on="request", how="left", maintain_order="left")
        right = pl.DataFrame({"request": pairs.b}).join(done[1], on="request", how="left", maintain_order="left")
        for code, what in (("prompt_tokens", "a prompt of another length"), ("output_tokens", "another number of tokens")):
            n = int((left[code] != right[code]).fill_null(False).sum())
            if n and code not in have:
                out.append(Reason(code, f"{n:,} of {counted(left.height, 'request')} have {what}, though the totals are equal"))
        n = int((left["max_tokens"] != right["max_tokens"]).fill_null(False).sum())
        if n:
            out.append(Reason("max_tokens", f"{n:,} of {counted(left.height, 'request')} have another limit (max_tokens)"))
        return out
    lengths = [d.select("prompt_tokens", "output_tokens").sort("prompt_tokens", "output_tokens") for d in done]
    if not have & {"finished_requests", "prompt_tokens", "output_tokens"} and not lengths[0].equals(lengths[1]):
        out.append(Reason("lengths", "the totals are equal, but the requests have other lengths"))
    return out


def _load(x: Work, y: Work) -> list[Reason]:
    out = []
    if {x.loop, y.loop} == {"open", "closed"}:
        out.append(
            Reason(
                "loop", f"{_loop_text(x)} against {_loop_text(y)}: in a closed loop a slow server gets fewer requests to queue up"
            )
        )
    elif x.loop == "closed" and x.slots != y.slots and x.slots and y.slots:
        out.append(Reason("client_slots", f"{x.slots:,} against {y.slots:,} clients of a closed loop"))
    if x.rate_per_s and y.rate_per_s and abs(x.rate_per_s - y.rate_per_s) > _RATE * max(x.rate_per_s, y.rate_per_s):
        out.append(Reason("rate", f"arrivals at {x.rate_per_s:.3g} against {y.rate_per_s:.3g} requests/s"))
    others = [w.requests - w.finished for w in (x, y)]
    if abs(others[0] - others[1]) > _OTHERS * max(x.finished, y.finished, 1):
        out.append(Reason("not_finished", f"{others[0]:,} against {others[1]:,} requests that failed or did not finish"))
    return out


def _seen(x: Work, y: Work, done: tuple[pl.DataFrame, pl.DataFrame], pairs: Pairing | None) -> list[Reason]:
    """Times that run from another moment, or tokens that were seen from elsewhere: their difference is not the servers'."""
    out = []
    if x.arrival_of and y.arrival_of and _apart(x.arrival_of, y.arrival_of, done, pairs) > _VANTAGE:
        text = f"times run from another moment: {_shares_text(x.arrival_of)} against {_shares_text(y.arrival_of)}"
        out.append(Reason("arrival_of", text))
    if x.vantage and y.vantage and _distance(x.vantage, y.vantage) > _VANTAGE:
        out.append(Reason("vantage", f"tokens were seen elsewhere: {_shares_text(x.vantage)} against {_shares_text(y.vantage)}"))
    return out


def _apart(x: dict[str, float], y: dict[str, float], done: tuple[pl.DataFrame, pl.DataFrame], pairs: Pairing | None) -> float:
    """Share of the requests whose arrival is another moment than their partner's; without pairs, by how much the shares
    differ."""
    if pairs is None:
        return _distance(x, y)
    sides = [
        pl.DataFrame({"request": order}).join(d.select("request", "arrival_of"), on="request", how="left", maintain_order="left")
        for order, d in zip((pairs.a, pairs.b), done, strict=True)
    ]
    differ = (sides[0]["arrival_of"] != sides[1]["arrival_of"]).fill_null(False)
    return float(differ.sum()) / max(differ.len(), 1)


def _distance(x: dict[str, float], y: dict[str, float]) -> float:
    return max(abs(x.get(k, 0.0) - y.get(k, 0.0)) for k in x.keys() | y.keys())


def _partial(trace: Trace, w: Work) -> list[Reason]:
    out = []
    if w.lost > _LOST:
        out.append(Reason("partial", f"{percent(w.lost)} of the rows of {trace.name} were dropped"))
    if w.covered < 1 - _LOST:
        out.append(Reason("partial", f"of {trace.name} only {percent(w.covered)} was recorded"))
    if not w.closed and w.requests > w.finished:
        out.append(Reason("partial", f"{trace.name} broke off, with {counted(w.requests - w.finished, 'request')} not finished"))
    return out


def _loop(done: pl.DataFrame) -> tuple[str | None, int | None]:
    """What is known of how the load was made: declared by the client's slots, else tested on arrivals and durations."""
    known = done.drop_nulls(["arrival_ns", "finish_ns"])
    late = known["sent_ns"].count() == known.height and bool((known["sent_ns"] != known["arrival_ns"]).any())
    found = load_loop(
        known["arrival_ns"].to_numpy(),
        known["sent_ns"].to_numpy() if late else None,
        known["finish_ns"].to_numpy(),
        requests=done.height,
        slots=done["client_slot"].drop_nulls().n_unique(),
        in_slots=done["client_slot"].count(),
        turns=done["parent_request"].count(),
    )
    return (None if found.kind == "unknown" else found.kind), found.slots


def _rate(done: pl.DataFrame) -> float | None:
    """Requests a second that the load generator meant to send; null where nobody says what it meant."""
    at = done["intended_ns"].drop_nulls()
    first, last = at.min(), at.max()
    if at.len() < _MANY or 2 * at.len() < done.height or not isinstance(first, int) or not isinstance(last, int) or last <= first:
        return None
    return (at.len() - 1) * 1e9 / (last - first)


def _loop_text(w: Work) -> str:
    if w.loop == "closed":
        return f"a closed loop of {w.slots:,} clients" if w.slots else "a closed loop"
    return "an open loop"


def _total(column: pl.Series) -> int | None:
    return None if column.null_count() else int(column.sum())


def _shares(counts: pl.DataFrame) -> dict[str, float] | None:
    """By name, of the rows that say; null if none does."""
    found = {str(k): int(n) for k, n in counts.rows() if k is not None}
    total = sum(found.values())
    return {k: round(n / total, 6) for k, n in sorted(found.items())} if total else None


def _shares_text(shares: dict[str, float]) -> str:
    if len(shares) == 1:
        return next(iter(shares))
    return ", ".join(f"{k} {percent(v)}" for k, v in sorted(shares.items(), key=lambda x: -x[1]))


def _number(n: int | None) -> str:
    return "an unknown number of" if n is None else f"{n:,}"


def reasons_text(found: Sequence[Reason]) -> str:
    """All of them in a line."""
    return "; ".join(r.text for r in found)
