"""What a benchmark measured of one request, on its way into `requests`, `tokens` and `stages`: checked, or rejected.

All times are int64 nanoseconds. Tools write seconds or milliseconds as floats; a time is rounded once, where it is used: a
token's time is its request's start plus the sum of TTFT and the latencies up to it, rounded, so that rounding does not add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import polars as pl

from hoptrace.collectors.files.base import Sink
from hoptrace.collectors.files.json_walk import Buffer, Cut, Malformed, elements
from hoptrace.schema import REQUESTS, STAGES

__all__ = [
    "NO_ARRIVALS",
    "Measured",
    "Reject",
    "Rows",
    "emissions",
    "epoch_ns",
    "ns",
    "number",
    "stamp_ns",
    "text",
    "tokens_of",
    "read_records",
]

NO_ARRIVALS = (
    "The file has durations only, not when each request was sent: every request's times count from its own start, so latencies "
    "are right, and rates, concurrency and the order of requests are unknown (arrival_ns is 0 and not covered)."
)
_DIFFER = (
    "{n} requests got another number of chunks than they have tokens: which chunk held how many is unknown, so their gaps are in "
    "no ITL (itl_left_out); TTFT, TPOT and end-to-end latency are not concerned."
)
_UNTOLD = "{n} requests have no total of output tokens: each chunk is taken as one token."
_TOKEN_TYPES = {"request": pl.Int64, "index": pl.Int64, "time_ns": pl.Int64, "count": pl.Int64, "coalesced": pl.Boolean}
_ROUNDING_NS = 1_000
_FLUSH_REQUESTS = 20_000
_FLUSH_TOKENS = 400_000
_LARGEST = 1 << 53
_MOST_NS = 1 << 62
_MOST_S = 4e9
# JSON's integers have no end; NaN is within no bounds.
_FINITE = 1e308
_TOO_LARGE = "a time of it is too large"


class Reject(Exception):
    """A record that cannot be used: why (the same words for the same fault), and what stands there."""

    def __init__(self, reason: str, value: object = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = None if value is None else _clean(str(value)[:80])


def number(value: object, name: str, *, least: float | None = 0.0) -> float | None:
    """A number, or null where there is none. Rejects text, NaN, infinity, and what is less than ``least``."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Reject(f"{name} is not a number", value)
    if not -_FINITE <= value <= _FINITE:
        raise Reject(f"{name} is not finite", str(value)[:40])
    if least is not None and value < least:
        raise Reject(f"{name} is negative" if least == 0 else f"{name} is less than {least:g}", value)
    return value


def tokens_of(value: object, name: str) -> int | None:
    """A whole number of tokens, or null; 12.0 is 12."""
    found = number(value, name)
    if found is None:
        return None
    if found != int(found) or found > _LARGEST:
        raise Reject(f"{name} is not a whole number", value)
    return int(found)


def text(value: object) -> str | None:
    """A word of the file, or null."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return None
    return _clean(str(value)[:256])


def _clean(value: str) -> str:
    """Half a surrogate pair, which JSON may hold, is no text."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def ns(seconds: float) -> int:
    """Seconds as whole nanoseconds, halves to even."""
    return round(seconds * 1e9)


def epoch_ns(seconds: float, name: str = "the time") -> int:
    """A stamp in seconds (large: an epoch) as nanoseconds: whole seconds apart, so that no digit that the float has is lost."""
    whole = math.floor(seconds)
    found = whole * 1_000_000_000 + round((seconds - whole) * 1e9)
    if abs(found) > _MOST_NS:
        raise Reject(f"{name} is too large for a time", seconds)
    return found


def stamp_ns(value: object, name: str) -> int | None:
    """A stamp in whole nanoseconds, or null."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Reject(f"{name} is not a time in ns", value)
    return value


def emissions(start_ns: int, first_s: float, gaps_s: object, name: str = "an inter-token latency") -> list[int]:
    """Times of a request's chunks from its TTFT and the gaps after it, all in seconds."""
    if gaps_s is None:
        gaps_s = []
    if not isinstance(gaps_s, list):
        raise Reject(f"{name} list is no list", type(gaps_s).__name__)
    if not set(map(type, gaps_s)) <= {float, int} or (gaps_s and not (min(gaps_s) >= 0 and math.isfinite(sum(gaps_s)))):
        for gap in gaps_s:
            if number(gap, name) is None:
                raise Reject(f"{name} is null")
    sums = np.cumsum(np.array([first_s, *gaps_s], dtype=np.float64))
    if not sums[-1] <= _MOST_S:
        raise Reject(_TOO_LARGE, float(sums[-1]))
    # tolist: Python's integers, as everything else here.
    return [start_ns + t for t in np.rint(sums * 1e9).astype(np.int64).tolist()]


@dataclass(slots=True)
class Measured:
    """One request. Null is unknown. ``times`` are its chunks' times, ``counts`` their tokens (null: one each, as far as known).

    ``stay`` are further columns of its row of `stages`, if it has one.
    """

    request_id: str | None = None
    intended_ns: int | None = None
    sent_ns: int | None = None
    first_ns: int | None = None
    visible_ns: int | None = None
    last_ns: int | None = None
    finish_ns: int | None = None
    times: list[int] | None = None
    counts: list[int] | None = None
    coalesced: list[bool] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None
    cached_tokens: int | None = None
    session: str | None = None
    model: str | None = None
    adapter: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    more: dict[str, Any] = field(default_factory=dict)
    stay: dict[str, Any] | None = None


class Rows:
    """Checks, numbers and writes the requests of one file.

    ``anchored``: the file says when requests were sent. Where it does not, each request's times count from its own start.
    """

    def __init__(self, sink: Sink, *, anchored: bool = True, vantage: str = "client", server: str | None = None) -> None:
        self.sink = sink
        self.anchored = anchored
        self.next = 0
        self.last_ns: int | None = None
        self._vantage, self._server = vantage, server
        self._tables: dict[str, list[dict[str, Any]]] = {"requests": [], "stages": []}
        # By column: there are many.
        self._tokens: dict[str, list[Any]] = {name: [] for name in _TOKEN_TYPES}

    def take(self, m: Measured) -> None:
        """Keep one request. Raises Reject if its times or numbers cannot be; nothing of it is kept then."""
        arrival = min((t for t in (m.intended_ns, m.sent_ns) if t is not None), default=None)
        if arrival is None:
            if self.anchored and "arrival_ns" not in m.more:
                raise Reject("it has no start time")
            arrival = m.more.get("arrival_ns", 0)
        if m.times and m.counts and not all(m.counts):
            _without_empty(m)
        if m.times:
            m.first_ns, m.last_ns = m.times[0], m.times[-1]
        if m.finish_ns is None and m.error is None:
            m.finish_ns = m.last_ns
        if m.finish_ns is not None and m.last_ns is not None and 0 < m.last_ns - m.finish_ns <= _ROUNDING_NS:
            m.finish_ns = m.last_ns
        _forward(arrival, m)
        row = {
            "request": self.next, "request_id": m.request_id, "session": m.session, "model": m.model, "adapter": m.adapter,
            "intended_ns": m.intended_ns, "sent_ns": m.sent_ns, "first_token_ns": m.first_ns, "first_visible_ns": m.visible_ns,
            "last_token_ns": m.last_ns, "finish_ns": m.finish_ns, "arrival_ns": arrival, "prompt_tokens": m.prompt_tokens,
            "output_tokens": m.output_tokens, "max_tokens": m.max_tokens, "finish_reason": m.finish_reason, "error": m.error,
            "arrival_of": _arrival_of(arrival, m), **m.more,
        }  # fmt: skip
        stay = None
        if m.stay is not None or m.cached_tokens is not None:
            where = {"request": self.next, "sequence": 0, "attempt": 0, "stage": 0, "server": self._server}
            stay = {**where, "cached_tokens": m.cached_tokens, **(m.stay or {})}
        numbers = (*row.values(), *(stay or {}).values(), sum(m.counts or ()))
        if any(type(v) is int and abs(v) > _MOST_NS for v in numbers):
            raise Reject(_TOO_LARGE)
        self._tables["requests"].append(row)
        self._emit(m)
        if stay is not None:
            self._tables["stages"].append(stay)
        ends = [t for t in (arrival, m.last_ns, m.finish_ns, self.last_ns) if t is not None]
        self.last_ns = max(ends)
        self.next += 1
        if len(self._tables["requests"]) >= _FLUSH_REQUESTS or len(self._tokens["request"]) >= _FLUSH_TOKENS:
            self._flush()

    def record(self, where: int, make: Callable[..., Measured], *args: Any) -> None:
        """Count one record of the file and keep what ``make(*args)`` gives, or reject it. ``where``: its line or number."""
        self.sink.count()
        try:
            self.take(make(*args))
        except Reject as e:
            self.sink.reject(where, e.reason, e.value)
        except Malformed:
            self.sink.reject(where, "it is not JSON")
        except OverflowError:
            self.sink.reject(where, "a number of it is too large")

    def close(self) -> None:
        """Write what is left, and say what was assumed. Call it before anything else is written about coverage."""
        self._flush()
        if not self.anchored and self.next:
            self.sink.note(NO_ARRIVALS)
            self._uncover()

    def _emit(self, m: Measured) -> None:
        if not m.times:
            return
        counts = m.counts or [1] * len(m.times)
        if m.error is None:
            if m.output_tokens is None:
                self.sink.tally(_UNTOLD)
            elif sum(counts) != m.output_tokens:
                self.sink.tally(_DIFFER)
        kept = self._tokens
        kept["request"] += [self.next] * len(m.times)
        kept["index"] += list(accumulate(counts[:-1], initial=0))
        kept["time_ns"] += m.times
        kept["count"] += counts
        kept["coalesced"] += m.coalesced or [None] * len(m.times)

    def _flush(self) -> None:
        for spec in (REQUESTS, STAGES):
            rows = self._tables[spec.name]
            if not rows:
                continue
            present = set().union(*rows)
            names = [c for c in spec.names if c in present]
            frame = pl.DataFrame([{c: r.get(c) for c in names} for r in rows], schema={c: _polars(spec, c) for c in names})
            self.sink.write(spec.name, frame)
            rows.clear()
        if self._tokens["request"]:
            frame = pl.DataFrame(self._tokens, schema=_TOKEN_TYPES)
            told = (pl.lit(0, dtype=pl.Int64).alias("sequence"), pl.lit(self._vantage).alias("vantage"))
            self.sink.write("tokens", frame.with_columns(*told))
            self._tokens = {name: [] for name in _TOKEN_TYPES}

    def _uncover(self) -> None:
        """Coverage without arrivals: what is computed from them is not known."""
        rows = self.sink.coverage()
        for row in rows:
            if row["table"] == "requests":
                row["columns"] = [c for c in row["columns"] if c != "arrival_ns"]  # type: ignore[attr-defined]
        self.sink.write("coverage", pl.DataFrame(rows))


def _without_empty(m: Measured) -> None:
    """Leave out chunks (steps) that gave no token: the time until the next is one gap."""
    assert m.times is not None and m.counts is not None
    kept = [i for i, n in enumerate(m.counts) if n]
    m.times, m.counts = [m.times[i] for i in kept], [m.counts[i] for i in kept]
    if m.coalesced:
        m.coalesced = [m.coalesced[i] for i in kept]


def _forward(arrival: int, m: Measured) -> None:
    steps = (("arrival", arrival), ("first token", m.first_ns), ("last token", m.last_ns), ("end", m.finish_ns))
    known = [(name, t) for name, t in steps if t is not None]
    for (before, t0), (after, t1) in pairwise(known):
        if t1 < t0:
            raise Reject(f"its {after} is before its {before}", f"by {(t0 - t1) / 1e9:.6g} s")
    if m.times and m.times != sorted(m.times):
        raise Reject("its chunks' times go backwards")


def _arrival_of(arrival: int, m: Measured) -> str | None:
    if m.intended_ns == arrival:
        return "intended"
    return "sent" if m.sent_ns == arrival else None


def _polars(spec: Any, name: str) -> Any:
    import pyarrow as pa

    kind = next(c.type for c in spec.columns if c.name == name)
    if pa.types.is_int64(kind):
        return pl.Int64
    if pa.types.is_boolean(kind):
        return pl.Boolean
    if pa.types.is_floating(kind):
        return pl.Float64
    return pl.List(pl.Int64) if pa.types.is_list(kind) else pl.String


def read_records(
    sink: Sink, rows: Rows, buffer: Buffer, begin: int, measure: Callable[[Buffer, tuple[int, int]], Measured], cut: str
) -> None:
    """Read the array at ``begin``, a record an element. ``cut`` is the note where the file ends inside one."""
    record = 0
    try:
        for span in elements(buffer, begin):
            record += 1
            rows.record(record, measure, buffer, span)
    except Cut:
        sink.note(cut)
        sink.count()
        sink.reject(record + 1, "the file ends inside it")
