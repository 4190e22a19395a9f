"""vLLM's log: the line of each iteration (``--enable-logging-iteration-details``) into `steps`, the summary of every ten seconds
and that of KV transfers into `counters`.

The format is that of LoggingStatLogger in vllm/v1/metrics/loggers.py (0.10 to 0.32). A line's own stamp is in whole seconds, so
that it says little about steps of milliseconds; a line is seen within one sampling beat of when it was written, and that places
the step. Its composition and length are exact.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from hoptrace.collectors.base import Collector, Finding
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.log_source import LogSource
from hoptrace.collectors.engines.log_tail import log_of
from hoptrace.collectors.engines.published.step_times import StepTimes

__all__ = ["FLAG", "VllmLog", "stamp_ns", "step_of", "summary_of", "transfers_of"]

FLAG = "--enable-logging-iteration-details"

_STEP = re.compile(
    r"(?:Engine (?P<rank>\d+): )?Iteration\((?P<step>\d+)\): (?P<ctx>\d+) context requests, (?P<ctx_tokens>\d+) context tokens, "
    r"(?P<gen>\d+) generation requests, (?P<gen_tokens>\d+) generation tokens, iteration elapsed time: (?P<ms>[\d.]+) ms"
)
_STAMP = re.compile(r"\b(?:INFO|WARNING|ERROR|DEBUG) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,](\d{3}))? ")
_SUMMARY = re.compile(r"(?:Engine (\d+): |(\d+) Engines Aggregated: )?(Avg prompt throughput: .*)$")
_FIGURES = (
    (re.compile(r"Avg prompt throughput: ([\d.]+) tokens/s"), "log:prompt_tokens_per_s", "tokens/s", 1.0),
    (re.compile(r"Avg generation throughput: ([\d.]+) tokens/s"), "log:generation_tokens_per_s", "tokens/s", 1.0),
    (re.compile(r"Running: (\d+) reqs"), "log:requests_running", "requests", 1.0),
    (re.compile(r"Waiting: (\d+) reqs"), "log:requests_waiting", "requests", 1.0),
    (re.compile(r"Preemptions: (\d+)"), "log:preemptions", "preemptions", 1.0),
    (re.compile(r"(?<!\w )\w+ KV cache usage: ([\d.]+)%"), "log:kv_cache_usage", "ratio", 0.01),
    (re.compile(r"(?<!External )(?<!MM )Prefix cache hit rate: ([\d.]+)%"), "log:prefix_cache_hit_rate", "ratio", 0.01),
    (re.compile(r"External prefix cache hit rate: ([\d.]+)%"), "log:external_prefix_cache_hit_rate", "ratio", 0.01),
)
_TRANSFERS = re.compile(r"KV Transfer metrics: (.*)$")
_PAIR = re.compile(r"([A-Za-z0-9 /()]+)=([\d.]+)")
_UNITS = {"(ms)": "ms", "(MB/s)": "MB/s", "MB": "MB"}
_SUMMARY_NS = 10_000_000_000
_LATE_NS = 120_000_000_000
_LOOK_BYTES = 1 << 18


def step_of(line: str) -> tuple[int, int, int, dict[str, int]] | None:
    """(rank, number, length in ns, columns of `steps`) of an iteration's line; null for another."""
    m = _STEP.search(line)
    if m is None:
        return None
    columns = {
        "prefill_requests": int(m["ctx"]),
        "prefill_tokens": int(m["ctx_tokens"]),
        "decode_requests": int(m["gen"]),
        "decode_tokens": int(m["gen_tokens"]),
    }
    try:
        return int(m["rank"] or 0), int(m["step"]), round(float(m["ms"]) * 1e6), columns
    except ValueError:
        return None


def summary_of(line: str) -> tuple[str, list[tuple[str, float, str]]] | None:
    """(entity's part, (name, value, unit) …) of the summary line; the part is "" or ``/engine:N``."""
    m = _SUMMARY.search(line)
    if m is None:
        return None
    found = [(name, float(x[1]) * scale, unit) for p, name, unit, scale in _FIGURES if (x := p.search(m[3]))]
    return (f"/engine:{int(m[1])}" if m[1] is not None and int(m[1]) else ""), found


def transfers_of(line: str) -> list[tuple[str, float, str]]:
    """(name, value, unit) of the line of KV transfers: figures of the ten seconds before it."""
    m = _TRANSFERS.search(line)
    out = []
    for name, value in _PAIR.findall(m[1]) if m else ():
        unit = next((u for mark, u in _UNITS.items() if mark in name), "1")
        slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        try:
            out.append((f"log:kv_transfer:{slug}", float(value), unit))
        except ValueError:
            continue
    return out


def stamp_ns(line: str, near_ns: int) -> tuple[int, int] | None:
    """When the line says that it was written, as (from, to) in UTC ns: a second wide, or a millisecond where it tells that much.

    The stamp has neither year nor zone: the year that is nearest to ``near_ns`` and this machine's zone are taken.
    """
    m = _STAMP.search(line)
    if m is None:
        return None
    month, day, hour, minute, second = (int(x) for x in m.groups()[:5])
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 61):
        return None
    milli = int(m[6]) if m[6] else None
    best: int | None = None
    for year in {time.localtime(near_ns // 10**9 + days * 86400).tm_year for days in (-180, 0, 180)}:
        try:
            at = int(time.mktime((year, month, day, hour, minute, second, 0, 0, -1))) * 10**9
        except (ValueError, OverflowError):
            continue
        if best is None or abs(at - near_ns) < abs(best - near_ns):
            best = at
    if best is None:
        return None
    return (best + (milli or 0) * 10**6), best + ((milli + 1) * 10**6 if milli is not None else 10**9)


class VllmLog(LogSource):
    """Follows vLLM's log. ``unless``: a source that has the steps from inside; if it is there, only summaries are taken."""

    name = "vllm-log"

    def __init__(self, ctx: Context, unless: Collector | None = None) -> None:
        super().__init__(ctx)
        self._unless = unless
        self._steps = True
        self._seen = False
        self._times: dict[int, StepTimes[tuple[int, dict[str, int]]]] = {}
        self._next: dict[int, int] = {}
        self._base: dict[int, int] = {}
        self._heard_ns = 0

    @property
    def tables(self) -> tuple[str, ...]:
        """`steps` only once there was one: without the flag there is nothing to cover."""
        return ("counters", "steps") if self._seen else ("counters",)

    async def probe(self) -> Finding:
        log = await asyncio.to_thread(log_of, self._ctx, self.order)
        if log.path is None:
            return Finding(False, log.reason)
        if self._unless is not None and (await self._unless.probe()).available:
            self._steps = False
            return Finding(True, "summaries only: the plug-in has the steps")
        told = self._ctx.server.config.get("enable_logging_iteration_details")
        if told or await asyncio.to_thread(_has_steps, log.path):
            return Finding(True)
        return Finding(True, f"summaries only: restart vLLM with {FLAG} to get each step's composition")

    async def close(self) -> None:
        await super().close()
        self._hand_over(None)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _line(self, line: str, now: int) -> int:
        if "Iteration(" in line:
            step = step_of(line) if self._steps else None
            if step is not None:
                self._add(step, line, now)
            return 0
        if "Avg prompt throughput" in line and (summary := summary_of(line)) is not None:
            part, figures = summary
            return self._counters(figures, now, part, _SUMMARY_NS)
        if "KV Transfer metrics" in line:
            return self._counters(transfers_of(line), now, "", _SUMMARY_NS)
        return 0

    def _beat(self, before: int, now: int) -> int:
        return self._hand_over(now)

    def _add(self, step: tuple[int, int, int, dict[str, int]], line: str, now: int) -> None:
        rank, number, length, columns = step
        heard = now
        stamp = stamp_ns(line, now)
        # In another zone, or by another clock, the stamp says nothing.
        if stamp is not None and 0 <= now - stamp[1] <= _LATE_NS:
            heard = stamp[1]
        heard = self._heard_ns = max(heard, self._heard_ns)
        expected = self._next.get(rank)
        if expected is not None and number < expected:
            # The engine was started anew: its numbers begin again, ours go on.
            self._base[rank] = self._base.get(rank, 0) + expected
        elif expected is not None and number > expected:
            self._event("gap", f"{number - expected} iterations of engine {rank} are not in the log before Iteration({number})")
        self._next[rank] = number + 1
        self._times.setdefault(rank, StepTimes()).add((self._base.get(rank, 0) + number, columns), heard, max(length, 1))

    def _hand_over(self, now: int | None) -> int:
        rows: list[dict[str, Any]] = []
        for rank, times in self._times.items():
            before = times.unplaced
            for placed in times.take(now):
                number, columns = placed.what
                rows.append(
                    {"server": self._ctx.server.name, "dp_rank": rank, "pp_rank": 0, "step": number, "start_ns": placed.start_ns,
                     "end_ns": placed.end_ns, "origin": "observed", "source": self.name} | columns
                )  # fmt: skip
            if times.unplaced > before and self._ctx.writer is not None:
                self._ctx.writer.drop(f"{self.name}: steps that overlap the one ahead wholly", times.unplaced - before)
        if rows and self._ctx.writer is not None:
            if not self._seen:
                note = (
                    f"{self._ctx.server.name}: steps are from its log: composition and length are exact, ends are known to about "
                    "one sampling beat (a line is seen when the file is looked at). Under asynchronous scheduling the length is "
                    "that from schedule to result, not the device's."
                )
                self._ctx.writer.update(lambda m: m.notes.append(note))
            self._seen = True
            self._ctx.writer.append("steps", rows)
        return len(rows)


def _has_steps(path: Any) -> bool:
    """Whether the end of the log has a line of an iteration."""
    try:
        with path.open("rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - _LOOK_BYTES))
            return b"Iteration(" in f.read(_LOOK_BYTES)
    except OSError:
        return False
