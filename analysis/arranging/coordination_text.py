"""Coordination on the terminal."""

from __future__ import annotations

import polars as pl
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.arranging.coordination import Coordination
from hoptrace.analysis.arranging.operations import KINDS
from hoptrace.analysis.arranging.osfigures import OsFigures
from hoptrace.analysis.text import bytes_text, count_text, counted, duration_text, percent

__all__ = ["blocks"]

_BASES = ("counted", "derived", "assumed", "unstated")
_MUCH_DELAY = 0.1  # of the time in which a process wanted a CPU; below it, runs differ by as much
_MUCH_FOREIGN = 0.1


def blocks(c: Coordination, *, full: bool = False) -> list[RenderableType]:
    """Some lines for the one screen; ``full``: the table by kind, what lost against it, every process."""
    out: list[RenderableType] = [Text(line) for line in _share(c)]
    if full:
        out.append(_table(c))
        out += [Text(f"Not added: {line}", style="dim") for line in _also(c)]
        if c.unknown:
            out.append(Text(f"Unknown, not 0: {', '.join(c.unknown)}.", style="dim"))
    elif line := _short(c):
        out.append(Text(line))
    out += [Text(line) for line in _density(c, full=full)]
    if c.os is not None:
        out += [Text(line) for line in _os(c.os, full=full)]
    if full:
        out += [Text(note, style="dim") for note in c.notes]
    return out


def _share(c: Coordination) -> list[str]:
    if not c.share:
        return []
    share = c.share["all"]
    if any(v is None for v in c.parts_ns.values()) and (share is None or share < 0.0005):
        return ["No part of end-to-end time is seen to be coordination; some of its parts cannot be seen."]
    return [
        f"Share of end-to-end time: {percent(share)} of all requests, {percent(c.share['p50'])} at p50, "
        f"{percent(c.share['p95'])} at p95, {percent(c.share['p99'])} at p99."
    ]


def _per(c: Coordination) -> tuple[str, str]:
    """The column of the finest quotient there is, and its words."""
    if c.output_tokens:
        return "per_output_token", "per output token"
    return ("per_request", "per request") if c.requests else ("operations", "in all")


def _short(c: Coordination) -> str:
    """Operations by kind in one line, each basis by itself: figures of unlike basis are never added up."""
    column, words = _per(c)
    said = []
    for basis in _BASES:
        rows = c.operations.filter(pl.col("basis") == basis)
        kinds = []
        for kind in KINDS:
            mine = rows.filter(pl.col("kind") == kind)
            if mine.height:
                kinds.append(f"{kind} {'≥ ' if mine['at_least'].any() else ''}{count_text(float(mine[column].sum()))}")
        if kinds:
            said.append(f"{', '.join(kinds)} ({basis})")
    if not said:
        return ""
    missing = f"; unknown: {', '.join(c.unknown)}" if c.unknown else ""
    return f"Operations {words}: {'; '.join(said)}{missing}."


def _table(c: Coordination) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("operation")
    for name in ("per token", "per request", "per step", "in all", "waited"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("basis", "from"):
        table.add_column(name)
    for r in c.operations.to_dicts():
        least = "≥ " if r["at_least"] else ""
        table.add_row(
            f"{r['kind']} ({r['on']})" if r["on"] else r["kind"],
            *(f"{least}{count_text(r[k])}" if r[k] is not None else "–" for k in ("per_output_token", "per_request", "per_step")),
            f"{least}{r['operations']:,}",
            duration_text(r["wait_ns"]),
            r["basis"],
            r["source"],
        )
    return table


def _also(c: Coordination) -> list[str]:
    said = []
    for t, winner in c.also:
        on = f" on {t.on}" if t.on else ""
        time = "" if t.wait_ns is None else f" in {duration_text(t.wait_ns)}"
        said.append(f"{t.kind}{on}: {t.operations:,}{time} ({t.source}, {t.basis}); {winner} tells of the same.")
    return said


def _density(c: Coordination, *, full: bool) -> list[str]:
    said = [
        f"{d.object}{f' by {d.mechanism}' if d.mechanism else ''} {'≤ ' if d.ops_of != 'moves.control_ops' else ''}"
        f"{bytes_text(d.bytes_per_op)} ({d.basis})"
        for d in c.density
        if d.bytes_per_op is not None
    ]
    if not said:
        return []
    shown = said if full else said[:4]
    rest = f"; {len(said) - len(shown)} more" if len(said) > len(shown) else ""
    return [f"Semantic density, payload per control operation: {', '.join(shown)}{rest}."]


def _os(o: OsFigures, *, full: bool) -> list[str]:
    lines = [
        f"The server's {'process' if o.processes == 1 else f'{o.processes} processes'}: CPU {duration_text(o.cpu_ns)}"
        f" ({duration_text(o.per_token(o.cpu_ns))} per output token), waited {duration_text(o.run_delay_ns)} for a CPU"
        f" ({percent(o.run_delay_share)} of the time {'it' if o.processes == 1 else 'they'} wanted one)."
    ]
    if (said := _stolen(o)) is not None:
        lines.append(said)
    if full:
        for p in o.by_process:
            if (p.cpu_ns or 0) + (p.run_delay_ns or 0):
                lines.append(
                    f"  {p.entity}{f' ({p.role})' if p.role else ''}: CPU {duration_text(p.cpu_ns)}, waited "
                    f"{duration_text(p.run_delay_ns)} ({percent(p.run_delay_share)})."
                )
        if o.voluntary_switches is not None:
            least = "at least " if o.switches_at_least else ""
            lines.append(
                f"Context switches: {least}{o.voluntary_switches:,} voluntary, {count_text(o.involuntary_switches)} involuntary."
            )
    if o.hoptrace_cpu_ns is not None:
        of = "" if o.hoptrace_cpu_share is None else f", {percent(o.hoptrace_cpu_share)} of the machine's busy CPU time"
        each = o.per_token(o.hoptrace_cpu_ns)
        per = "" if each is None else f" ({duration_text(each)} per output token)"
        others = "" if o.foreign_cpu_share is None else f"; others took {percent(o.foreign_cpu_share)}"
        lines.append(f"The capture itself (hoptrace): CPU {duration_text(o.hoptrace_cpu_ns)}{per}{of}{others}.")
    elif o.foreign_cpu_share is not None:
        lines.append(f"Others took {percent(o.foreign_cpu_share)} of the machine's busy CPU time.")
    if o.breaks:
        lines.append(f"{counted(o.breaks, 'restart or reset', 'restarts or resets')} of counters: these sums are lower bounds.")
    return lines


def _stolen(o: OsFigures) -> str | None:
    """Whether somebody steals the server's steps, as far as the kernel's counters tell."""
    share = o.run_delay_share
    if share is None or share < _MUCH_DELAY:
        return None
    per = o.per_step(o.run_delay_ns)
    each = "" if per is None else f", {duration_text(per)} a step over all its threads"
    worst = o.longest_waiting
    who = (
        ""
        if worst is None or o.processes == 1
        else f" Most of it: {worst.role or worst.entity}, {duration_text(worst.run_delay_ns)}."
    )
    if o.foreign_cpu_share is None:
        why = "whether to others or to its own threads is not known, for want of the machine's counters"
    elif o.foreign_cpu_share >= _MUCH_FOREIGN:
        why = f"other processes took {percent(o.foreign_cpu_share)} of the busy CPU time, so they stand in its way"
    else:
        why = "others took little, so its own threads are more than the CPUs"
    return f"The server waits for CPUs {percent(share)} of the time it wants one{each}: {why}.{who}"
