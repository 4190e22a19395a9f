"""What `hoptrace doctor` prints."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from hoptrace.cli.console import PlainConsole
from hoptrace.collectors.hardware.examination import Entry
from hoptrace.collectors.hardware.here import Here
from hoptrace.collectors.hardware.topology.text import graph_text

__all__ = ["Examined", "as_dict", "missing_text", "text"]

_WIDTH = 130


@dataclass(frozen=True, slots=True)
class Examined:
    """All that was found: sources, the platform graph, contradictions between sources in words, servers that run here."""

    entries: Sequence[Entry]
    graph: dict[str, Any]
    contradictions: Sequence[str]
    here: Sequence[Here]
    every_s: float


def as_dict(found: Examined) -> dict[str, Any]:
    """Everything, for scripts: `doctor/1`."""
    return {
        "format": "doctor/1",
        "sources": [_entry(e) for e in found.entries],
        "core_share": _total(found.entries),
        "every_s": found.every_s,
        "servers": [asdict(h) for h in found.here],
        "contradictions": list(found.contradictions),
        "platform": found.graph,
    }


def text(found: Examined) -> str:
    """The whole for a screen."""
    there = [e for e in found.entries if e.found.available]
    missing = [e for e in found.entries if not e.found.available]
    parts = [_servers(found.here, found.entries), _there(there, found.every_s)]
    if missing:
        parts.append("Not here:\n" + "\n".join(_why(e) for e in missing))
    if found.contradictions:
        parts.append("Contradictions:\n" + "\n".join(f"  {c}" for c in found.contradictions))
    parts.append("Platform:\n" + graph_text(found.graph))
    return "\n\n".join(parts)


def missing_text(found: Examined) -> str:
    """What is not there, what would make it so, and what it would answer."""
    missing = [e for e in found.entries if not e.found.available]
    if not missing:
        return "Every source that hoptrace knows is here."
    return "\n".join(f"{_why(e)}\n      would answer: {e.answers}" for e in missing)


def _entry(e: Entry) -> dict[str, Any]:
    found = {"available": e.found.available, **asdict(e.found)}
    return {
        "name": e.name, "answers": e.answers, "pace": e.pace, **found, "every_s": e.every_s, "samples": e.samples,
        "series": e.series, "cpu_us_per_sample": _round(e.cpu_us, 1), "core_share": _round(e.core_share, 6), "failed": e.failed,
    }  # fmt: skip


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _total(entries: Sequence[Entry]) -> float | None:
    known = [e.core_share for e in entries if e.core_share is not None]
    return round(sum(known), 6) if known else None


def _servers(here: Sequence[Here], entries: Sequence[Entry]) -> str:
    if not here:
        own = any(e.name == "process" and e.found.available for e in entries)
        instead = "; of processes this one is looked at in its place" if own else ""
        return f"No inference server was found running here{instead}."
    lines = ["Servers running here:"]
    for h in here:
        where = f"port {', '.join(map(str, h.ports))}" if h.ports else "its ports can't be seen from here"
        lines.append(f"  {h.pid}  {h.command}  ({where})")
        lines += [f"      hoptrace attach http://127.0.0.1:{h.ports[0]} --explain"] if h.ports else []
    return "\n".join(lines)


def _there(entries: Sequence[Entry], every_s: float) -> str:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, pad_edge=False)
    for head in ("Source", "Answers", "Sees"):
        table.add_column(head, overflow="fold")
    for head in ("Every", "µs/sample", "of a core"):
        table.add_column(head, justify="right", no_wrap=True)
    for e in entries:
        cost = "" if e.cpu_us is None else f"{e.cpu_us:,.0f}"
        share = "" if e.core_share is None else f"{e.core_share:.3%}"
        notes = [n for n in (e.found.sees, e.found.reason, e.failed and f"could not be read: {e.failed}") if n]
        table.add_row(e.name, e.answers, "; ".join(notes), f"{e.every_s:g} s", cost, share)
    console = PlainConsole(file=io.StringIO(), width=_WIDTH, highlight=False, markup=False)
    console.print(table)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    told = "\n".join(line.rstrip() for line in out.splitlines())
    total = _total(entries)
    share = "" if total is None else f" At {every_s:g} s between samples they take {total:.2%} of one core together."
    return f"Here: {len(entries)} sources.{share}\n{told}"


def _why(e: Entry) -> str:
    remedy = f"\n      to have it: {e.found.remedy}" if e.found.remedy else ""
    return f"  {e.name} ({e.found.status}): {e.found.reason or 'not found'}{remedy}"
