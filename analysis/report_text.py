"""The report for the terminal, by rich. Nothing is computed here: every figure is a field of the report."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.composition import Composition
from hoptrace.analysis.parts import PARTS
from hoptrace.analysis.report import Report, none_seen
from hoptrace.analysis.text import bytes_text, count_text, counted, duration_text, percent

__all__ = ["print_report", "render"]

# A sign and a colour per class: the bars must read without colour too.
_LOOK = {
    "work": ("█", "green"),
    "coordination": ("▒", "red"),
    "carrying": ("▲", "magenta"),
    "repeated work": ("≡", "yellow"),
    "sharing": ("◆", "cyan"),
    "capacity": ("░", "blue"),
    "unexplained": ("?", "white"),
}
_BAR = 50
_METRICS = {"ttft": "TTFT", "visible_ttft": "visible TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "queue": "queue"}


def print_report(report: Report, console: Console) -> None:
    """Print the report."""
    console.print(render(report))


def render(report: Report) -> RenderableType:
    """The report as one renderable."""
    a = report.accounting
    blocks: list[RenderableType] = [
        Text.assemble((report.name, "bold"), "  ", (report.origin_note, "dim")),
        Text(),
        Text(report.headline, style="bold"),
    ]
    if report.warnings:
        blocks += [Text(), *_bullets(report.warnings, "yellow")]
    if a.finished:
        blocks += [_title("Latency", counted(a.finished, "finished request")), _latency(report)]
        blocks += [
            _title("Where the time goes", "mean of the requests whose end-to-end time lies around the percentile"),
            *_bars(report),
        ]
        blocks += [Text(), _parts(report)]
        if a.tail:
            blocks += [Text(), _tail(report)]
        if a.notes:
            blocks += [Text(), *_bullets(a.notes, "dim")]
    blocks += _ledger(report)
    blocks += _coordination(report)
    if report.unseen:
        blocks += [_title("What this trace cannot show", ""), *_bullets(report.unseen, "")]
    return Group(*blocks)


def _title(text: str, note: str) -> RenderableType:
    return Text.assemble("\n", (text, "bold underline"), *([("  " + note, "dim")] if note else []))


def _bullets(lines: list[str], style: str) -> list[RenderableType]:
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row(Text("•", style=style), Text(line, style=style))
    return [table]


def _latency(report: Report) -> Table:
    table = _table("", "mean", "p50", "p95", "p99", "n")
    for name, title in _METRICS.items():
        s = report.metrics.get(name)
        if s is None or not s.n or (name == "visible_ttft" and s == report.metrics.get("ttft")):
            continue
        table.add_row(title, *(duration_text(v) for v in (s.mean_ns, s.p50_ns, s.p95_ns, s.p99_ns)), f"{s.n:,}")
    m = report.metrics
    if m.output_tokens_per_s is not None and m.requests_per_s is not None:
        table.caption = f"{m.output_tokens_per_s:,.1f} output tokens/s, {m.requests_per_s:,.2f} requests/s"
        table.caption_justify = "left"
    return table


def _bars(report: Report) -> list[RenderableType]:
    lines: list[RenderableType] = []
    seen: set[str] = set()
    shown = {n: report.accounting.compositions[n] for n in ("p50", "p95", "p99")}
    behind = {n: counted(c.requests, "request") for n, c in shown.items()}
    wide = max(len(b) for b in behind.values())
    for name, c in shown.items():
        bar = Text(f"around {name}  {behind[name]:>{wide}}  {duration_text(c.e2e_ns):>9}  ")
        for klass, width in _widths(c).items():
            sign, colour = _LOOK[klass]
            bar.append(sign * width, style=colour)
            if width:
                seen.add(klass)
        lines.append(bar)
    legend = Text(" " * (wide + 23))
    for klass, (sign, colour) in _LOOK.items():
        if klass in seen:
            legend.append(sign, style=colour)
            legend.append(f" {klass}   ", style="dim")
    return [*lines, legend]


def _widths(c: Composition) -> dict[str, int]:
    """Characters of the bar by class: largest remainders, so that they add up to the bar."""
    exact = {k: (v or 0.0) * _BAR for k, v in c.class_shares.items()}
    whole = {k: int(v) for k, v in exact.items()}
    left = round(sum(exact.values())) - sum(whole.values())
    for k in sorted(exact, key=lambda k: whole[k] - exact[k])[:left]:
        whole[k] += 1
    return whole


def _parts(report: Report) -> Table:
    table = _table("part", "~p50", "~p95", "~p99", "all", "share", left=("class",))
    compositions = report.accounting.compositions
    for p in PARTS:
        values = [compositions[n].parts[p.name] for n in ("p50", "p95", "p99", "all")]
        if not any(values):
            continue
        share = compositions["all"].part_shares[p.name]
        table.add_row(p.label, *(duration_text(v) for v in values), percent(share), Text(p.klass, style=_LOOK[p.klass][1]))
    return table


def _tail(report: Report) -> Text:
    tail = report.accounting.tail
    assert tail is not None
    slow, median = tail.slowest, tail.median
    who = "The slowest request takes" if slow.requests == 1 else f"The slowest {slow.requests} requests (1 %) take"
    text = Text(f"{who} {duration_text(slow.e2e_ns)}, the median {duration_text(median.e2e_ns)}. ")
    labels = {p.name: p.label for p in PARTS}
    more = [f"{labels[p]} +{duration_text(v)}" for p, v in tail.more[:3] if v >= 0.01 * (slow.e2e_ns - median.e2e_ns)]
    text.append("What makes the difference: " + ", ".join(more) + "." if more else "No part is longer.")
    return text


def _ledger(report: Report) -> list[RenderableType]:
    book = report.ledger
    per = f"per output token ({counted(book.output_tokens, 'token')})" if book.output_tokens else "in all"
    blocks: list[RenderableType] = [_title("What moved", per if book.rows.height else "")]
    if not book.rows.height:
        return [*blocks, Text("No moves are known.")]
    table = _table("object", "bytes", "transfers", "hops", "total", left=("way", "basis"))
    n = book.output_tokens or 1
    # What was counted first, the largest first: derived and assumed figures are another matter.
    order = {"counted": 0, "derived": 1, "assumed": 2}
    for r in sorted(book.rows.to_dicts(), key=lambda r: (order.get(r["basis"], 3), -(r["bytes"] or 0), r["object"])):
        table.add_row(
            r["object"],
            _bound(None if r["bytes"] is None else r["bytes"] / n, book.is_bound(r)),
            count_text(None if r["transfers"] is None else r["transfers"] / n),
            count_text(None if r["payload_hops"] is None else r["payload_hops"] / n),
            _bound(r["bytes"], book.is_bound(r)),
            f"{r['src']} → {r['dst']}",
            r["basis"],
        )
    blocks.append(table)
    if any(book.is_bound(r) and r["bytes"] is not None for r in book.rows.to_dicts()):
        blocks.append(Text("≥: a lower bound; some moves do not say their bytes, or not all steps are known.", style="dim"))
    if book.amplification:
        said = "; ".join(f"{a.object} {'≥ ' if a.at_least else ''}×{_factor(a.factor)} ({a.size_is})" for a in book.amplification)
        blocks.append(Text(f"Moved ÷ size counted once: {said}."))
    if book.reuse.share is not None:
        tiers = ", ".join(f"{t} {v:,}" for t, v in book.reuse.by_tier.items() if v)
        blocks.append(
            Text(
                f"Reuse: {book.reuse.cached_tokens:,} of {book.reuse.prompt_tokens:,} prompt tokens came from a cache "
                f"({percent(book.reuse.share)}{'; ' + tiers if tiers else ''})."
            )
        )
    return blocks


def _factor(x: float) -> str:
    return count_text(round(x, 1) if x < 100 else round(x))


def _bound(n: float | None, at_least: bool) -> str:
    return f"≥ {bytes_text(n)}" if at_least and n is not None else bytes_text(n)


def _coordination(report: Report) -> list[RenderableType]:
    c = report.coordination
    blocks: list[RenderableType] = [_title("Coordination", "")]
    lines: list[str] = []
    if c.share and none_seen(c):
        lines.append("No part of end-to-end time is seen to be coordination; some of its parts cannot be seen.")
    elif c.share:
        lines.append(
            f"Share of end-to-end time: {percent(c.share['all'])} of all requests, {percent(c.share['p50'])} at p50, "
            f"{percent(c.share['p95'])} at p95, {percent(c.share['p99'])} at p99."
        )
    for r in c.operations.to_dicts():
        rate = "" if r["per_output_token"] is None else f", {count_text(r['per_output_token'])} per output token"
        on = f" on {r['on']}" if r["on"] else ""
        lines.append(
            f"Waits, {r['kind']}{on}: {r['operations']:,} operations{rate}, {duration_text(r['wait_ns'])} in all ({r['basis']})."
        )
    for d in c.density:
        lines.append(f"Semantic density: {bytes_text(d.bytes_per_op)} per control operation ({d.basis}).")
    o = c.os
    if o is not None:
        lines.append(
            f"The server's {'process' if o.processes == 1 else f'{o.processes} processes'}: CPU {duration_text(o.cpu_ns)}"
            f" ({duration_text(o.per_token(o.cpu_ns))} per output token), waited {duration_text(o.run_delay_ns)} for a CPU"
            f" ({percent(o.run_delay_share)} of the time it wanted one)."
        )
        if o.voluntary_switches is not None:
            lines.append(
                f"Context switches: {o.voluntary_switches:,} voluntary, {count_text(o.involuntary_switches)} involuntary."
            )
        if o.hoptrace_cpu_ns is not None:
            of = "" if o.hoptrace_cpu_share is None else f", {percent(o.hoptrace_cpu_share)} of the machine's busy CPU time"
            each = o.per_token(o.hoptrace_cpu_ns)
            per = "" if each is None else f" ({duration_text(each)} per output token)"
            lines.append(f"The capture itself (hoptrace): CPU {duration_text(o.hoptrace_cpu_ns)}{per}{of}.")
        if o.foreign_cpu_share is not None:
            lines.append(f"Others took {percent(o.foreign_cpu_share)} of the machine's busy CPU time.")
        if o.breaks:
            lines.append(
                f"{counted(o.breaks, 'restart or reset', 'restarts or resets')} of counters: these sums are lower bounds."
            )
    return [*blocks, *_bullets(lines, "")] if lines else []


def _table(first: str, *right: str, left: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for name in left:
        table.add_column(name)
    return table
