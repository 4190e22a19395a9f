"""A comparison for the terminal, by rich. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.compare.diff import Diff
from hoptrace.analysis.compare.diff_change import Change
from hoptrace.analysis.compare.diff_settings import Setting
from hoptrace.analysis.compare.diff_words import label, signed, value
from hoptrace.analysis.compare.rules import Outcome
from hoptrace.analysis.compare.verdict_text import blocks

__all__ = ["outcome_text", "render", "short", "signed"]

_STYLE = {"better": "green", "worse": "red", "within noise": "dim", "same": "dim", "unknown": "dim", "changed": ""}
_MOST_SETTINGS = 12
_MOST_ROWS = 12


def render(d: Diff) -> RenderableType:
    """The comparison as one renderable."""
    out: list[RenderableType] = [
        Text.assemble(("A  ", "bold"), d.a, ("  " + d.a_note, "dim")),
        Text.assemble(("B  ", "bold"), d.b, ("  " + d.b_note, "dim")),
        Text(_work(d)),
        Text(_settings(d.settings)),
    ]
    if d.unequal:
        out.append(Text(f"The work is not the same: {'; '.join(d.unequal)}. Compare with care.", style="yellow"))
    out += [Text(note, style="yellow") for note in d.notes]
    if any(c.a is not None or c.b is not None for c in d.metrics):
        out += [_title("Metrics"), _table(_metrics(d), d)]
    if d.parts:
        out += [_title("Parts of latency, mean per request"), _table(d.parts, d)]
    if shares := [c for c in d.sections["shares"] if _is_shown(c)]:
        out += [_title("Shares of latency, by class, and around the percentiles"), _table(shares, d)]
    ledger = [c for c in d.sections["ledger"] if not c.name.startswith("bytes_per_token[")]
    if any(c.a or c.b for c in ledger):
        out += [_title("Moved, reused and repeated, per output token"), _table(ledger, d)]
    if ways := _largest([c for c in d.sections["ledger"] if c.name.startswith("bytes_per_token[") and not _is_place(c)]):
        out += [_title("Bytes per output token, by object and way"), _table(ways, d)]
    if operations := [c for c in d.sections["coordination"] if c.a or c.b]:
        out += [_title("Coordination"), _table(operations, d)]
    out.append(Text("\n" + _about(d), style="dim"))
    return Group(*out, _title("Verdict"), *blocks(d.verdict))


def short(d: Diff) -> RenderableType:
    """The three answers in a line each."""
    return Group(*(Text(s) for s in d.verdict.sentences))


def outcome_text(o: Outcome) -> Text:
    """A rule's outcome in a line."""
    c = o.change
    if c is None or o.failed is None:
        name = o.rule.figure if c is None else c.name
        return Text(f"UNKNOWN  {o.rule.text}  ({name} is not known in both traces, so it does not pass)", style="yellow")
    was = f"{value(c.a, c.unit)} → {value(c.b, c.unit)}, {signed(c.change, c.unit)}"
    was += "" if c.relative is None else f", {c.relative:+.1%}"
    noise = ", within noise" if c.within_noise else ""
    return Text(f"{'FAILED ' if o.failed else 'ok     '}  {o.rule.text}  ({was}{noise})", style="red" if o.failed else "green")


def _work(d: Diff) -> str:
    w = d.b_work
    if d.unequal:
        return ""
    tokens = "" if w.output_tokens is None else f", {w.output_tokens:,} output tokens"
    how = "" if d.pairing is None else f"; requests are matched {d.pairing.how}"
    return f"   The same work: {w.finished:,} finished requests{tokens}{how}."


def _settings(found: Sequence[Setting]) -> str:
    if not found:
        return "   No setting that both traces tell differs."
    named = ", ".join(f"{s.name} {s.a} → {s.b}" for s in found[:_MOST_SETTINGS])
    more = f", and {len(found) - _MOST_SETTINGS} more (--json has all)" if len(found) > _MOST_SETTINGS else ""
    return f"   Settings that differ: {named}{more}."


def _metrics(d: Diff) -> list[Change]:
    """Without what repeats another figure: the first visible token is most often the first token."""
    known = d.changes
    hidden = all(
        c is not None and f is not None and (c.a, c.b) == (f.a, f.b)
        for c, f in ((known.get(f"visible_ttft.{s}"), known.get(f"ttft.{s}")) for s in ("mean", "p50", "p95", "p99"))
    )
    return [c for c in d.metrics if not (hidden and c.name.startswith("visible_ttft"))]


def _is_shown(c: Change) -> bool:
    return bool(c.a or c.b) and (abs(c.a or 0) >= 0.001 or abs(c.b or 0) >= 0.001)


def _is_place(c: Change) -> bool:
    return c.name.startswith(("bytes_per_token[node ", "bytes_per_token[link "))


def _largest(changes: list[Change]) -> list[Change]:
    if len(changes) <= _MOST_ROWS:
        return [c for c in changes if c.a or c.b]
    return sorted(changes, key=lambda c: -max(c.a or 0.0, c.b or 0.0))[:_MOST_ROWS]


def _title(text: str) -> Text:
    return Text("\n" + text, style="bold underline")


def _table(changes: Sequence[Change], d: Diff) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    noise = d.noise is not None
    for name in ("A", "B", "change", "%", "95 % interval", *(("± runs",) if noise else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for c in changes:
        if not c.a and not c.b:
            continue
        relative = "–" if c.relative is None else f"{c.relative:+.1%}"
        bounds = "" if c.low is None else f"{signed(c.low, c.unit)} … {signed(c.high, c.unit)}"
        values = [value(c.a, c.unit), value(c.b, c.unit), signed(c.change, c.unit), relative, bounds]
        if noise:
            values.append("" if c.noise is None else signed(c.noise, c.unit).lstrip("+"))
        table.add_row(label(c.name), *values, Text(c.verdict, style=_STYLE[c.verdict]))
    return table


def _about(d: Diff) -> str:
    how = "the same requests on both sides" if d.paired else "requests of each side by themselves"
    text = f"Intervals: 95 %, bootstrap over requests ({how}). They hold chance among requests"
    if d.noise is None:
        return text + ", not the noise between two runs of a machine: give repeats with --noise to know that."
    return (
        text + f"; ± runs: what two runs of one policy differ by at {d.noise.sure:.0%}. A change within either is within noise."
    )
