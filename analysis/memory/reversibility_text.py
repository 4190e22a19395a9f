"""Reversibility for the terminal. Nothing is computed here: every figure is a field of :class:`Reversibility`."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.memory.reversibility import Reclaim, Reversibility
from hoptrace.analysis.memory.reversibility_drain import Drain
from hoptrace.analysis.text import bytes_text, duration_text, percent

__all__ = ["blocks"]


def blocks(r: Reversibility, *, full: bool = False) -> list[RenderableType]:
    """A line per KV space and for the slowest and the fastest drain; ``full``: the tables."""
    if full:
        out: list[RenderableType] = []
        if r.reclaim:
            out.append(_table(r.reclaim))
        if r.drains:
            out.append(_drains(r.drains))
        return out + [Text(note, style="dim") for note in r.notes]
    spaces = [x for x in r.reclaim if x.what == "kv"] or r.reclaim
    out = [Text(_line(x)) for x in sorted(spaces, key=lambda x: x.within[0].mean)[:3]]
    servers = sorted((d for d in r.drains if d.mean_ns is not None and d.kind == "server"), key=lambda d: -(d.mean_ns or 0))
    roles = sorted((d for d in r.drains if d.mean_ns is not None and d.kind == "role"), key=lambda d: -(d.mean_ns or 0))
    shown = servers[:2] + (servers[-1:] if len(servers) > 2 else []) + (roles if len(roles) > 1 else [])
    if shown:
        out.append(Text("Drains in " + "; ".join(_drain(d) for d in shown) + "."))
    return out


def _line(x: Reclaim) -> str:
    what = f"KV space of {x.name}" if x.what == "kv" else f"Slots of {x.name}"
    within = ", ".join(f"{percent(w.mean)} within {w.horizon_s:g} s" for w in x.within)
    worst = x.within[1]
    said = f"{what} that could be handed over: {within} (at worst {percent(worst.worst)} within {worst.horizon_s:g} s)"
    moved = x.within[0]
    if moved.moved_mean is not None:
        said += (
            f"; {percent(moved.moved_mean)} within {moved.horizon_s:g} s with {bytes_text(moved.moved_bytes)} moved over {x.link}"
        )
    return said + "."


def _drain(d: Drain) -> str:
    name = d.name if d.kind == "server" else f"role {d.name}"
    return f"{name}: {duration_text(d.mean_ns)} at the mean, {duration_text(d.max_ns)} at most"


def _table(found: list[Reclaim]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", caption_justify="left", caption_style="dim")
    table.caption = "Mean share over the moments (worst). Dropped: cached blocks that nobody holds, lost with the free space."
    table.add_column("within", min_width=10)
    for w in found[0].within:
        table.add_column(f"{w.horizon_s:g} s", justify="right", no_wrap=True)
    for name in ("free", "growth", "dropped"):
        table.add_column(name, justify="right", no_wrap=True)
    for x in found:
        cells = [f"{percent(w.mean)} ({percent(w.worst)})" for w in x.within]
        more = (percent(x.free_mean), percent(x.growth_mean), bytes_text(x.dropped_bytes))
        table.add_row(f"{'KV' if x.what == 'kv' else 'slots'} of {x.name}", *cells, *more)
        if any(w.moved_mean is not None for w in x.within):
            table.add_row(
                f"  and moved over {x.link}", *(f"{percent(w.moved_mean)} ({percent(w.moved_worst)})" for w in x.within)
            )
            table.add_row("  bytes moved", *(bytes_text(w.moved_bytes) for w in x.within))
    return table


def _drains(found: list[Drain]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("drain")
    for name in ("mean", "p50", "p95", "max", "nobody there", "end not seen", "KV then"):
        table.add_column(name, justify="right", no_wrap=True)
    for d in found:
        table.add_row(
            d.name if d.kind == "server" else f"role {d.name}",
            *(duration_text(v) for v in (d.mean_ns, d.p50_ns, d.p95_ns, d.max_ns)),
            percent(d.idle / d.moments if d.moments else None),
            percent(d.open / d.moments if d.moments else None),
            bytes_text(d.resident_bytes),
        )
    return table
