"""llama.cpp's log, as text or as JSON lines (``--log-jsonl``): what each request took in its slot, into `counters`.

A line says which task ran in which slot, and no endpoint says which request a task was: the figures are the slot's. Each line has
the time since the server's start to the microsecond; that clock is placed on the trace's by when the lines were seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.log_source import LogSource

__all__ = ["LlamaCppLog", "LogClock", "figures_of", "kv_unified_of", "parsed"]

# [minutes.seconds.ms.us] and the level, common/log.cpp.
_TEXT = re.compile(
    r"^(?:\x1b\[[\d;]*m)?(\d+)\.(\d\d)\.(\d{3})\.(\d{3})(?:\x1b\[[\d;]*m)? +(?:\x1b\[[\d;]*m)?[IWED] *(?:\x1b\[[\d;]*m)? ?(.*)$"
)
_TASK = re.compile(r"^slot +\S*: id +(\d+) \| task (-?\d+) \| (.*)$")
_TIMING = re.compile(r"^ *(prompt eval|eval|total) time = +([\d.]+) ms / +(\d+) tokens")
_DRAFT = re.compile(r"draft acceptance(?: rate)? = +([\d.]+) \( *(\d+) accepted / *(\d+) generated")
_RELEASE = re.compile(r"stop processing: n_tokens = (\d+)")
_INIT = re.compile(r"kv_unified = '(true|false)'")
_HEAD_BYTES = 1 << 18


def parsed(line: str) -> tuple[int, str] | None:
    """(µs since the server's start, message) of a line in either form; null for one without a time."""
    if line.startswith("{"):
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(data, Mapping) or type(data.get("time")) is not int or not isinstance(data.get("msg"), str):
            return None
        return data["time"], data["msg"].rstrip("\n")
    m = _TEXT.match(line)
    if m is None:
        return None
    minutes, seconds, ms, us = (int(m[i]) for i in range(1, 5))
    return ((minutes * 60 + seconds) * 1000 + ms) * 1000 + us, m[5]


def figures_of(message: str) -> tuple[int, int, list[tuple[str, float, str]]] | None:
    """(slot, task, (name, value, unit) …) of a message about a slot; null for another, and for one without figures."""
    m = _TASK.match(message)
    if m is None:
        return None
    slot, task, text = int(m[1]), int(m[2]), m[3]
    figures: list[tuple[str, float, str]] = []
    if timing := _TIMING.match(text):
        what = {"prompt eval": "prompt", "eval": "decode", "total": "request"}[timing[1]]
        if what != "request":
            figures = [(f"log:{what}_ns", float(timing[2]) * 1e6, "ns"), (f"log:{what}_tokens", float(timing[3]), "tokens")]
    elif draft := _DRAFT.search(text):
        figures = [("log:draft_accepted", float(draft[2]), "tokens"), ("log:draft_proposed", float(draft[3]), "tokens")]
    elif release := _RELEASE.search(text):
        figures = [("log:slot_tokens", float(release[1]), "tokens")]
    return (slot, task, figures) if figures else None


def kv_unified_of(path: Path | None) -> bool | None:
    """Whether all slots share one context, as the log's beginning says; null if it does not."""
    if path is None:
        return None
    try:
        with path.open("rb") as f:
            found = _INIT.findall(f.read(_HEAD_BYTES).decode("utf-8", "replace"))
    except OSError:
        return None
    return found[-1] == "true" if found else None


class LogClock:
    """Places the server's clock (time since its start) on the trace's.

    A line is seen after it was written, and was not there at the look before: the server's start lies between (look before −
    time) and (seen − time). The more lines, the narrower; after a restart the two contradict each other, and it begins anew.
    """

    def __init__(self) -> None:
        self._low: int | None = None
        self._high: int | None = None

    def place(self, since_start_ns: int, before_ns: int, seen_ns: int) -> tuple[int, int]:
        """(time on the trace clock, half the width of what it may be) of a line."""
        low, high = before_ns - since_start_ns, seen_ns - since_start_ns
        if self._low is not None and self._high is not None and max(low, self._low) <= min(high, self._high):
            low, high = max(low, self._low), min(high, self._high)
        self._low, self._high = low, high
        return (low + high) // 2 + since_start_ns, (high - low + 1) // 2


class LlamaCppLog(LogSource):
    """Follows the log of llama-server."""

    name = "llamacpp-log"
    order = (2, 1)

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._clock = LogClock()
        self._looked_ns = 0

    async def start(self) -> None:
        assert self._ctx.writer is not None
        self._looked_ns = self._ctx.writer.clock.now_ns()
        await super().start()

    def _line(self, line: str, now: int) -> int:
        told = parsed(line)
        if told is None:
            return 0
        at, uncertain = self._clock.place(told[0] * 1000, self._looked_ns, now)
        found = figures_of(told[1])
        if found is None or self._ctx.writer is None:
            return 0
        slot, task, figures = found
        common = {
            "time_ns": at, "uncertainty_ns": uncertain, "host": self._ctx.host, "status": "ok", "source": self.name,
            "entity": f"server:{self._ctx.server.name}/slot:{slot}", "semantics": "delta",
        }  # fmt: skip
        rows = [common | {"name": name, "value_int": round(value), "unit": unit} for name, value, unit in figures]
        rows.append(common | {"name": "log:task", "value_int": task, "unit": "1", "semantics": "gauge"})
        self._ctx.writer.append("counters", rows)
        return len(rows)

    def _beat(self, before: int, now: int) -> int:
        self._looked_ns = before
        return 0
