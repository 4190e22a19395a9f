"""Where the time goes, on the terminal: bars by class, the parts, and what the slowest wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.latency.accounting import Accounting
from hoptrace.analysis.latency.composition import Composition, Tail
from hoptrace.analysis.latency.parts import PARTS, part
from hoptrace.analysis.text import counted, duration_text, percent

__all__ = ["LOOK", "Bars", "blocks", "parts_table"]

# A sign and a colour per class: the bars must read without colour too.
LOOK = {
    "work": ("█", "green"),
    "coordination": ("▒", "red"),
    "carrying": ("▲", "magenta"),
    "repeated work": ("≡", "yellow"),
    "sharing": ("◆", "cyan"),
    "capacity": ("░", "blue"),
    "unexplained": ("?", "white"),
}
_BAR = 50
_SHORTEST_BAR = 10
_ROWS = {"all": "mean", "p50": "around p50", "p95": "around p95", "p99": "around p99"}
_MOST = 6
_SMALL = 0.005


def blocks(a: Accounting, *, full: bool = False) -> list[RenderableType]:
    """The bars and the largest parts; ``full``: all parts, and how they were found."""
    if not a.finished:
        return []
    out: list[RenderableType] = [Bars({n: a.compositions[n] for n in (_ROWS if full else ("all", "p50", "p99"))})]
    if full:
        out += [Text(), parts_table(a.compositions)]
    else:
        out.append(_largest(a))
    if a.tail:
        out.append(_tail(a.tail, "The slowest", "takes"))
    if full:
        if a.ttft_compositions:
            out += [
                Text(),
                Text("Up to the first token, around the percentiles of TTFT", style="bold"),
                parts_table(a.ttft_compositions),
            ]
        if a.ttft_tail:
            out.append(_tail(a.ttft_tail, "The slowest", "waits for its first token for"))
        out += [Text(note, style="dim") for note in (*a.notes, f"This rests on: {a.level.name}.")]
    return out


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar for each composition: its classes' shares. They are as long as the terminal has room for, so none is ever cut."""

    shown: dict[str, Composition]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        behind = {n: counted(c.requests, "request") for n, c in self.shown.items()}
        wide = max(len(b) for b in behind.values())
        heads = {n: f"{_ROWS[n]:<10}  {behind[n]:>{wide}}  {duration_text(c.e2e_ns):>9}  " for n, c in self.shown.items()}
        indent = max(cell_len(h) for h in heads.values())
        length = max(_SHORTEST_BAR, min(_BAR, options.max_width - indent))
        seen: set[str] = set()
        for name, c in self.shown.items():
            bar = Text(heads[name], no_wrap=True)
            for klass, width in _widths(c, length).items():
                sign, colour = LOOK[klass]
                bar.append(sign * width, style=colour)
                if width:
                    seen.add(klass)
            yield bar
        legend = Text()
        for klass, (sign, colour) in LOOK.items():
            if klass in seen:
                legend.append(f"{'   ' if legend else ''}{sign}", style=colour)
                legend.append(f" {klass}", style="dim")
        room = indent + cell_len(legend.plain) <= options.max_width
        yield Text(" " * indent, no_wrap=True).append_text(legend) if room else legend


def _widths(c: Composition, length: int) -> dict[str, int]:
    """Characters of the bar by class: largest remainders, so that they add up to the bar."""
    exact = {k: (v or 0.0) * length for k, v in c.class_shares.items()}
    whole = {k: int(v) for k, v in exact.items()}
    left = round(sum(exact.values())) - sum(whole.values())
    for k in sorted(exact, key=lambda k: whole[k] - exact[k])[:left]:
        whole[k] += 1
    return whole


def _largest(a: Accounting) -> Text:
    shares = a.compositions["all"].part_shares
    ranked = sorted(((v, n) for n, v in shares.items() if v is not None and v >= _SMALL), reverse=True)
    shown = [f"{part(n).label} {percent(v)}" for v, n in ranked[:_MOST]]
    rest = sum(v for v, _ in ranked[_MOST:])
    tail = f", others {percent(rest)}" if len(ranked) > _MOST else ""
    return Text(f"Largest parts: {', '.join(shown)}{tail}.") if shown else Text("No time passed.")


def parts_table(compositions: Mapping[str, Composition]) -> Table:
    """Every part that takes time anywhere: mean around the percentiles and of all, share, class."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("part")
    for name in ("~p50", "~p95", "~p99", "all", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("class")
    for p in PARTS:
        values = [compositions[n].parts[p.name] for n in ("p50", "p95", "p99", "all")]
        if any(values):
            share = compositions["all"].part_shares[p.name]
            table.add_row(p.label, *(duration_text(v) for v in values), percent(share), Text(p.klass, style=LOOK[p.klass][1]))
    return table


def _tail(tail: Tail, who: str, does: str) -> Text:
    n = tail.slowest.requests
    said = (
        f"{who} request {does}"
        if n == 1
        else f"{who} {n:,} requests {does.replace('takes', 'take').replace('waits for its', 'wait for their')}"
    )
    gap = tail.slowest.e2e_ns - tail.median.e2e_ns
    more = [f"{part(name).label} +{duration_text(ns)}" for name, ns in tail.more[:3] if ns >= 0.01 * gap]
    said += f" {duration_text(tail.slowest.e2e_ns)}, the median {duration_text(tail.median.e2e_ns)}."
    return Text(f"{said} What makes the difference: {', '.join(more)}." if more else said)
