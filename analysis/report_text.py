"""The report for the terminal, by rich. Nothing is computed here: every figure is a field of the report."""

from __future__ import annotations

import re
from collections.abc import Collection

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.arranging import coordination_text, hidden_text
from hoptrace.analysis.hardware import hardware_text
from hoptrace.analysis.latency import latency_text, time_text
from hoptrace.analysis.layers import layers_text
from hoptrace.analysis.memory import reversibility_text, stranding_text
from hoptrace.analysis.moves import ledger_text
from hoptrace.analysis.report import SECTIONS, Report
from hoptrace.analysis.text import counted

__all__ = ["print_report", "render", "section_blocks"]

_WARNINGS = 3  # on the one screen
_LINES = {
    "latency": 7, "time": 9, "moves": 6, "coordination": 3, "hardware": 2, "hidden": 3, "layers": 5, "stranding": 2,
    "reversibility": 2, "unseen": 2,
}  # fmt: skip
"""Lines that a section may take on the one screen: what does not fit whole is left out, and the section says so by its name."""
_LABELS = {
    "coordination": "Coordination", "hardware": "Hardware", "hidden": "Hidden carrying", "layers": "Layers",
    "stranding": "Stranded", "reversibility": "Handing over",
}  # fmt: skip


def print_report(report: Report, console: Console, *, sections: Collection[str] | None = None) -> None:
    """Print the one screen, or ``sections`` of :data:`SECTIONS` in full."""
    console.print(render(report, sections=sections))


def render(report: Report, *, sections: Collection[str] | None = None) -> RenderableType:
    """The one screen, or ``sections`` in full, as one renderable."""
    full = sections is not None
    blocks: list[RenderableType] = [
        Text.assemble((report.name, "bold"), "  ", (report.origin_note, "dim")),
        Text(report.headline, style="bold"),
    ]
    blocks += _warnings(report.warnings, full=full)
    if sections is None:
        blocks += [Short(name, found) for name in SECTIONS if (found := section_blocks(report, name, full=False))]
    for name in SECTIONS if sections is not None else ():
        if name in (sections or ()) and (found := section_blocks(report, name, full=True)):
            blocks += [_title(SECTIONS[name], _note(report, name)), *found]
    return Group(*blocks)


class Short:
    """The first blocks of a section, as many as fit whole into its lines, at least one; a blank line before tables and bars."""

    def __init__(self, name: str, blocks: list[RenderableType]) -> None:
        self._most = _LINES[name]
        self._label = _LABELS.get(name)
        self._apart = self._label is None or name == "coordination"
        self._blocks = blocks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._apart:
            yield Text()
        left = self._most
        for i, block in enumerate(self._blocks):
            if not i and self._label and isinstance(block, Text):
                block = Text.assemble((f"{self._label}. ", "bold"), block)
            left -= len(console.render_lines(block, options, pad=False))
            if left < 0 and i:
                return
            yield block


def section_blocks(report: Report, name: str, *, full: bool) -> list[RenderableType]:
    """One section: a few lines, or all of it. Empty where the report says nothing of it."""
    return [_as_text(block) for block in _section(report, name, full=full)]


def _as_text(block: RenderableType) -> RenderableType:
    """A table's cells as text, since what stands in a trace (a server's name) must not be read as rich's markup; and none cut
    off where the terminal is narrow: then the widest columns are broken first, figures and names alike."""
    if isinstance(block, Table):
        for column in block.columns:
            column.overflow, column.no_wrap = "fold", False
            column._cells = [Text(c) if isinstance(c, str) else c for c in column._cells]
    return Text(block) if isinstance(block, str) else block


def _section(report: Report, name: str, *, full: bool) -> list[RenderableType]:
    if name == "latency":
        return latency_text.blocks(report.metrics, report.field, full=full)
    if name == "time":
        return time_text.blocks(report.accounting, full=full)
    if name == "moves":
        return ledger_text.blocks(report.ledger, full=full)
    if name == "coordination":
        return coordination_text.blocks(report.coordination, full=full)
    if name == "hardware":
        return [] if report.hardware is None else hardware_text.blocks(report.hardware, full=full)
    if name == "hidden":
        return [] if report.hidden is None else hidden_text.blocks(report.hidden, full=full)
    if name == "layers":
        return [] if report.layers is None else layers_text.blocks(report.layers, full=full)
    if name == "stranding":
        return [] if report.stranding is None else stranding_text.blocks(report.stranding, full=full)
    if name == "reversibility":
        return [] if report.reversibility is None else reversibility_text.blocks(report.reversibility, full=full)
    assert name == "unseen"
    return _unseen(report.unseen, full=full)


def _note(report: Report, name: str) -> str:
    if name == "time" and report.accounting.finished:
        return "mean of the requests whose end-to-end time lies around the percentile"
    if name == "moves" and report.ledger.rows.height and report.ledger.output_tokens:
        return f"per output token ({counted(report.ledger.output_tokens, 'token')})"
    return ""


def _title(text: str, note: str) -> RenderableType:
    return Text.assemble("\n", (text, "bold underline"), *([("  " + note, "dim")] if note else []))


def _warnings(lines: list[str], *, full: bool) -> list[RenderableType]:
    shown = lines if full else lines[:_WARNINGS]
    rest = [f"{counted(len(lines) - len(shown), 'more warning')}: --full."] if len(lines) > len(shown) else []
    return _bullets([*shown, *rest], "yellow") if shown else []


def _unseen(lines: list[str], *, full: bool) -> list[RenderableType]:
    if full:
        return _bullets(lines, "") if lines else [Text("Nothing that the report asks for is missing.")]
    if not lines:
        return []
    what = [head for line in lines if (head := line.split(":")[0]) != line and re.fullmatch(r"[A-Z][a-z ,]{2,40}", head)]
    named = f" ({', '.join(dict.fromkeys(w[0].lower() + w[1:] for w in what))} …)" if what else ""
    return [Text(f"{counted(len(lines), 'thing')} this trace cannot show{named}: --section unseen", style="dim")]


def _bullets(lines: list[str], style: str) -> list[RenderableType]:
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row(Text("•", style=style), Text(line, style=style))
    return [table]
