"""Stranding for the terminal, and its terms. Nothing is computed here: every figure is a field of :class:`Stranding`."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.stranding import Pool, Space, Stranding
from hoptrace.analysis.term import Term, sql_of
from hoptrace.analysis.text import bytes_text, count_text, duration_text, percent

__all__ = ["TERMS", "blocks"]

_KIND = "stranding"

TERMS: tuple[Term, ...] = (
    Term(
        "kv_used",
        _KIND,
        "KV space in use",
        "bytes × s (tokens × s where the KV geometry is not told)",
        "∫ used dt; used = kv_used_tokens × KV bytes per token",
        "As the engine counts it: what requests hold, without cached blocks that none holds. A step's value holds from its "
        "start to "
        "its end; between two steps the lesser of their values, or 0 where no request was there. Only over recorded time. Where "
        "the "
        "engine does not say it, the contexts in its steps (derived: a lower bound).",
    ),
    Term(
        "kv_idle",
        _KIND,
        "idle KV space",
        "bytes × s",
        "∫ (capacity − used) dt, capacity = kv_capacity_tokens × KV bytes per token",
        "What was provisioned and held by nobody, cached blocks that no request holds included.",
    ),
    Term(
        "stranded",
        _KIND,
        "stranded memory",
        "bytes × s",
        "∫ (capacity − used) dt over the moments at which requests of another KV space wait for KV",
        "Provisioned, idle, and unusable where it was wanted. Requests wait for KV where a step preempts, where a wait for KV "
        "was "
        "recorded, or where one waits, a slot is free, and the free KV is less than what the first in the queue needs (its "
        "prompt less "
        "the cached part; what it had, if it was preempted). How much of it would have been used is `lendable`.",
        sql_of("stranding_waits"),
    ),
    Term(
        "lendable",
        _KIND,
        "lendable memory",
        "bytes × s",
        "∫ min(Σ wanted, Σ idle of the spaces that lack none) dt; wanted = queued tokens × min(1, free slots ÷ waiting) − free",
        "How much of what requests waited for the idle KV of the other spaces would have held.",
    ),
    Term(
        "pool_saving",
        _KIND,
        "saving of a pool",
        "share",
        "1 − max over t of Σ used ÷ Σ over spaces of max over t of used",
        "What one pool behind all KV spaces would need less than spaces that are each as large as their own peak (Pond, ASPLOS "
        "2023: "
        "hosts do not peak at one moment). Over the time that is known of all. It says nothing of the pool's longer way.",
    ),
    Term(
        "cached_idle",
        _KIND,
        "cached, held by no request",
        "bytes",
        "mean of max(0, blocks stored − evicted since the last clear, in bytes, − used)",
        "Cached blocks that give way to whoever wants the space: a lower bound, since blocks in use need not be cached ones, and "
        "since what was cached before the recording is seen only when it goes.",
        sql_of("stranding_blocks"),
    ),
)


def blocks(s: Stranding, *, full: bool = False) -> list[RenderableType]:
    """A line per KV space (the worst three) and one for the pool; ``full``: the table of all, cache, gauges, platform, notes."""
    out: list[RenderableType] = []
    if full and s.spaces:
        out.append(_table(s.spaces))
    else:
        ordered = sorted(s.spaces, key=lambda x: -(x.stranded_x_ns or 0))
        out += [Text(_line(x)) for x in ordered[:3]]
        if len(ordered) > 3:
            out.append(Text(f"{len(ordered) - 3} more KV spaces: see the full report.", style="dim"))
    if s.pool is not None:
        out += [Text(line) for line in pool_lines(s.pool)]
    if full:
        out += [Text(line) for line in _beside(s)]
        out += [Text(note, style="dim") for note in s.notes]
    return out


def amount(n: float | None, unit: str) -> str:
    """Bytes, or tokens."""
    return bytes_text(n) if unit == "bytes" else f"{count_text(None if n is None else round(n))} tokens"


def integral(x_ns: int | None, unit: str) -> str:
    """GB·s (10⁹ bytes), or token·s; an en dash if unknown."""
    if x_ns is None:
        return "–"
    if unit != "bytes":
        return f"{count_text(round(x_ns / 1e9))} token·s"
    value = x_ns / 1e18
    return f"{value:,.3g} GB·s" if value < 1000 else f"{value:,.0f} GB·s"


def _line(x: Space) -> str:
    if x.capacity is None:
        return f"KV space of {x.name}: {amount(x.mean, x.unit)} in use at the mean, {amount(x.peak, x.unit)} at most; its size "
        "is not told."
    parts = [
        f"KV space of {x.name}: {amount(x.capacity, x.unit)}, in use {percent(_share(x.mean, x.capacity))} at the mean, "
        f"{percent(_share(x.peak, x.capacity))} at most"
    ]
    if x.over_90_ns:
        parts.append(f"over 90 % for {duration_text(x.over_90_ns)}")
    if x.lacking_ns:
        parts.append(f"requests wait for it for {duration_text(x.lacking_ns)}")
    if x.stranded_x_ns:
        parts.append(f"stranded {integral(x.stranded_x_ns, x.unit)} ({percent(x.stranded_share)} of what is provisioned)")
    return "; ".join(parts) + "."


def pool_lines(p: Pool) -> list[str]:
    """The pool in one or two sentences."""
    lines = [
        f"One pool behind all {len(p.spaces)} would need {amount(p.peak_of_sum, p.unit)} at its peak: {percent(p.saving)} less "
        "than the "
        f"{amount(p.sum_of_peaks, p.unit)} of their own peaks, {percent(p.saving_of_provisioned)} less than the "
        f"{amount(p.provisioned, p.unit)} provisioned{' (derived: a lower bound)' if p.basis == 'derived' else ''}."
    ]
    if p.wanted_x_ns and p.lendable_x_ns is not None:
        lines.append(
            f"Waiting requests lacked {integral(p.wanted_x_ns, p.unit)} of KV space; the idle space of the others would have "
            "held "
            f"{percent(p.lendable_x_ns / p.wanted_x_ns)} of it."
        )
    return lines


def _table(spaces: list[Space]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("KV space")
    names = ("size", "mean", "peak", ">90 %", "used", "idle", "stranded", "waited for", "cached", "unheld", "known")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("basis")
    for x in spaces:
        table.add_row(
            x.name,
            amount(x.capacity, x.unit),
            amount(x.mean, x.unit),
            amount(x.peak, x.unit),
            duration_text(x.over_90_ns),
            integral(x.used_x_ns, x.unit),
            integral(x.idle_x_ns, x.unit),
            integral(x.stranded_x_ns, x.unit),
            duration_text(x.lacking_ns),
            amount(x.cached, x.unit) if x.cached is not None else "–",
            amount(x.cached_idle, x.unit) if x.cached_idle is not None else "–",
            duration_text(x.covered_ns),
            x.basis or "–",
        )
    return table


def _beside(s: Stranding) -> list[str]:
    lines = []
    for x in s.spaces:
        if x.used_x_ns and x.held_x_ns < 0.99 * x.used_x_ns:
            lines.append(
                f"Of what {x.name} counts as in use, requests that skip steps, or cached blocks, are at least "
                f"{percent(1 - x.held_x_ns / x.used_x_ns)}."
            )
        if x.queued_x_ns and x.queued_x_ns != x.stranded_x_ns:
            lines.append(f"{x.name} lay idle while requests waited elsewhere, for whatever: {integral(x.queued_x_ns, x.unit)}.")
    for server, weights in {x.server: x.weight_bytes for x in s.spaces if x.weight_bytes}.items():
        lines.append(f"Weights beside the KV space of {server}: {bytes_text(weights)}.")
    for n in s.platform:
        known = "" if n.assigned_bytes is None else f", {bytes_text(n.assigned_bytes)} of it for weights and KV"
        used = "" if n.used_mean_bytes is None else f", {bytes_text(n.used_mean_bytes)} in use at the mean"
        lines.append(f"Memory {n.name}: {bytes_text(n.capacity_bytes)}{known}{used}.")
    for g in s.gauges:
        of = "" if g.total_bytes is None else f" of {bytes_text(g.total_bytes)}"
        lines.append(f"{g.entity} {g.name}: {bytes_text(g.mean_bytes)} at the mean, {bytes_text(g.peak_bytes)} at most{of}.")
    return lines


def _share(a: float | None, b: int) -> float | None:
    return None if a is None or not b else a / b
