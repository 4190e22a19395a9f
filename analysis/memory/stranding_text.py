"""Stranding for the terminal. Nothing is computed here: every figure is a field of :class:`Stranding`."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.memory.stranding import Pool, Space, Stranding
from hoptrace.analysis.text import bytes_text, count_text, duration_text, percent

__all__ = ["blocks"]


def blocks(s: Stranding, *, full: bool = False) -> list[RenderableType]:
    """A line per KV space (the worst three) and one for the pool; ``full``: the table of all, cache, gauges, platform, notes."""
    out: list[RenderableType] = []
    if full and s.spaces:
        out += _tables(s.spaces)
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
        use = f"{amount(x.mean, x.unit)} in use at the mean, {amount(x.peak, x.unit)} at most"
        return f"KV space of {x.name}: {use}; its size is not told."
    least = "≥ " if x.basis == "derived" else ""
    parts = [
        f"KV space of {x.name}: {amount(x.capacity, x.unit)}, in use {least}{percent(_share(x.mean, x.capacity))} at the mean, "
        f"{least}{percent(_share(x.peak, x.capacity))} at most"
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


def _tables(spaces: list[Space]) -> list[RenderableType]:
    """Two tables, since one with all columns is wider than a terminal: what was in use, and what that adds up to over time."""
    use, sums = (
        _table("size", "mean", "peak", ">90 %", "waited for", "known"),
        _table("used", "idle", "stranded", "cached", "unheld"),
    )
    for x in spaces:
        use.add_row(
            x.name,
            amount(x.capacity, x.unit),
            amount(x.mean, x.unit),
            amount(x.peak, x.unit),
            duration_text(x.over_90_ns),
            duration_text(x.lacking_ns),
            duration_text(x.covered_ns),
            x.basis or "–",
        )
        sums.add_row(
            x.name,
            integral(x.used_x_ns, x.unit),
            integral(x.idle_x_ns, x.unit),
            integral(x.stranded_x_ns, x.unit),
            amount(x.cached, x.unit) if x.cached is not None else "–",
            amount(x.cached_idle, x.unit) if x.cached_idle is not None else "–",
            x.basis or "–",
        )
    return [use, sums]


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("KV space", min_width=8, overflow="fold")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("basis")
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
