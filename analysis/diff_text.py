"""A comparison for the terminal, by rich. Nothing is computed here."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.diff import Change, Diff
from hoptrace.analysis.parts import PARTS
from hoptrace.analysis.rules import Outcome
from hoptrace.analysis.text import bytes_text, count_text, duration_text

__all__ = ["outcome_text", "render", "signed"]

_STYLE = {"better": "green", "worse": "red", "within noise": "dim", "same": "dim", "unknown": "dim", "changed": ""}
_TITLE = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "queue": "queue"}


def render(d: Diff) -> RenderableType:
    """The comparison as one renderable."""
    blocks: list[RenderableType] = [
        Text.assemble(("A  ", "bold"), d.a, ("  " + d.a_note, "dim")),
        Text.assemble(("B  ", "bold"), d.b, ("  " + d.b_note, "dim")),
        Text(_work(d)),
    ]
    if d.unequal:
        blocks.append(Text(f"The work is not the same: {'; '.join(d.unequal)}. Compare with care.", style="yellow"))
    blocks += [Text(note, style="yellow") for note in d.notes]
    if any(c.a is not None or c.b is not None for c in d.metrics):
        blocks += [Text("\nMetrics", style="bold underline"), _table(d.metrics)]
    if d.parts:
        blocks += [Text("\nParts of latency, mean per request", style="bold underline"), _table(d.parts)]
    if d.moves:
        blocks += [Text("\nMoved per output token", style="bold underline"), _table(d.moves)]
    how = "the same requests on both sides" if d.paired else "requests of each side by themselves"
    blocks.append(
        Text(
            f"\nIntervals: 95 %, bootstrap over requests ({how}). They hold chance among requests, not the noise between two "
            "runs of a machine: repeat runs to know that.",
            style="dim",
        )
    )
    return Group(*blocks)


def _work(d: Diff) -> str:
    w = d.b_work
    if d.unequal:
        return ""
    tokens = "" if w.output_tokens is None else f", {w.output_tokens:,} output tokens"
    return f"   The same work: {w.finished:,} finished requests{tokens}."


def _table(changes: list[Change]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for name in ("A", "B", "change", "%", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for c in changes:
        if not c.a and not c.b:
            continue
        relative = "–" if c.relative is None else f"{c.relative:+.1%}"
        bounds = "" if c.low is None else f"{signed(c.low, c.unit)} … {signed(c.high, c.unit)}"
        style = _STYLE[c.verdict]
        values = (_value(c.a, c.unit), _value(c.b, c.unit), signed(c.change, c.unit), relative, bounds)
        table.add_row(_name(c), *values, Text(c.verdict, style=style))
    return table


def _name(c: Change) -> str:
    head, _, tail = c.name.partition(".")
    labels = {p.name: p.label for p in PARTS}
    if head in labels and tail == "mean":
        return labels[head]
    return f"{_TITLE.get(head, head.replace('_', ' '))} {tail}".strip()


def _value(v: float | None, unit: str) -> str:
    if unit == "ns":
        return duration_text(v)
    return bytes_text(v) if unit == "bytes" else count_text(v)


def signed(v: float | None, unit: str) -> str:
    """A difference with its sign."""
    text = _value(v, unit)
    return f"+{text}" if v is not None and v > 0 else text


def outcome_text(o: Outcome) -> Text:
    """A rule's outcome in a line."""
    c = o.change
    was = f"{_value(c.a, c.unit)} → {_value(c.b, c.unit)}" + ("" if c.relative is None else f", {c.relative:+.1%}")
    noise = ", within noise" if c.within_noise else ""
    if o.failed is None:
        return Text(f"UNKNOWN  {o.rule.text}  ({c.name} is not known in both traces)", style="yellow")
    return Text(f"{'FAILED ' if o.failed else 'ok     '}  {o.rule.text}  ({was}{noise})", style="red" if o.failed else "green")
