"""The five hidden kinds of carrying on the terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.arranging.hidden import Figure, Hidden, View
from hoptrace.analysis.text import bytes_text, count_text, duration_text, percent

__all__ = ["blocks", "value_text"]


def blocks(h: Hidden, *, full: bool = False) -> list[RenderableType]:
    """A few words on each kind of which something is known, the largest share of latency first; ``full``: sentences, all figures
    with basis and source, and what is unknown."""
    if not full:
        said = [(view.share or 0.0, words) for view in h if (words := _words(view))]
        text = "; ".join(words for _, words in sorted(said, key=lambda x: -x[0]))
        return [Text(f"{text[:1].upper()}{text[1:]}.")] if text else []
    out: list[RenderableType] = []
    for view in h:
        share = f" [{duration_text(view.time_ns)}, {percent(view.share)} of latency]" if view.share and view.time_ns else ""
        line = Text(f"{view.title[:1].upper()}{view.title[1:]}: ", style="bold")
        line.append(view.sentence + share, style="not bold")
        out += [line, _table(view), *(Text(f"Not seen: {s}", style="dim") for s in view.unseen)]
    return out + [Text(note, style="dim") for note in h.notes]


def _words(view: View) -> str:
    """The most telling figure of a view in a few words, or nothing."""
    f = {x.name: x for x in view.figures}
    if view.name == "split":
        for name, of, size in (
            ("messages_per_transfer", "a transfer of state", "state_bytes_per_message"),
            ("messages_per_answer", "an answer", "bytes_per_message"),
        ):
            if (n := f[name].value) is not None:
                each = f" of {value_text(f[size])}" if f[size].value is not None else ""
                return f"{of} in {count_text(round(float(n), 1))} message{'' if n == 1 else 's'}{each}"
    if view.name == "confirm":
        ratio, handover = f["confirming_per_moving"].value, f["arranging_ns"].value
        if handover and view.share is not None:
            return f"hand-overs arranged for {percent(view.share)} of latency"
        if ratio is not None:
            return f"{count_text(round(float(ratio), 1))} times as long waiting for news of data as for data"
    if view.name == "unlike" and view.share is not None:
        return f"unlike work in one batch takes {percent(view.share)} of latency (modelled)"
    if view.name == "shared":
        if view.time_ns is not None:
            return f"locks, syncs and polls took {duration_text(view.time_ns)}"
        for name, of in (("repeated_turn_share", "sessions' prompts"), ("repeated_prompt_share", "the prompts")):
            if f[name].value:
                return f"{value_text(f[name])} of {of} had been sent before"
    if view.name == "remote":
        for name, of in (("server_bytes", "between servers"), ("device_bytes", "between devices")):
            if f[name].value is not None:
                rate = f[f"{name}_per_token"]
                return f"{value_text(rate if rate.value is not None else f[name])} of state {of} ({f[name].basis})"
        if f["collective_share"].value is not None:
            return f"collectives take {value_text(f['collective_share'])} of the steps"
    return ""


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
