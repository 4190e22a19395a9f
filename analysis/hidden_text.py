"""The five hidden kinds of carrying on the terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.hidden import Figure, Hidden, View
from hoptrace.analysis.text import bytes_text, count_text, duration_text, percent

__all__ = ["blocks", "value_text"]


def blocks(h: Hidden, *, full: bool = False) -> list[RenderableType]:
    """One line for each kind of which something is known; ``full``: all figures with basis and source, and what is unknown."""
    out: list[RenderableType] = []
    for view in h:
        if not full and not view.seen:
            continue
        share = (
            "" if not view.share or not view.time_ns else f" [{duration_text(view.time_ns)}, {percent(view.share)} of latency]"
        )
        line = Text(f"{view.title[:1].upper()}{view.title[1:]}: ", style="bold")
        line.append(view.sentence + share, style="not bold")
        out.append(line)
        if full:
            out.append(_table(view))
            out += [Text(f"Not seen: {s}", style="dim") for s in view.unseen]
    if full:
        out += [Text(note, style="dim") for note in h.notes]
    return out


def value_text(f: Figure) -> str:
    """A figure with its unit; an en dash if unknown."""
    if f.value is None:
        return "–"
    least = "≥ " if f.at_least else ""
    if f.unit == "share":
        return least + percent(float(f.value))
    if f.unit.startswith("ns"):
        return least + duration_text(f.value) + f.unit[2:].replace("/", " a ")
    if f.unit.startswith("bytes"):
        return least + bytes_text(f.value) + f.unit[5:].replace("/", " a ")
    return f"{least}{count_text(f.value)}{'' if f.unit == '×' else ' '}{f.unit.replace('/', ' a ')}"


def _table(view: View) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("basis")
    table.add_column("from", style="dim")
    for f in view.figures:
        table.add_row(f.what, value_text(f), f.basis or "unknown", f.source if f.value is not None else f.why or "")
    return table
