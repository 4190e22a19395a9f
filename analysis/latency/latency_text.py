"""Latency, throughput and the field's metrics on the terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.text import count_text, counted, duration_text, percent
from hoptrace.field_metrics import FieldMetrics
from hoptrace.metrics import Stat, Summary
from hoptrace.slo import Goodput, limits_text

__all__ = ["blocks", "latency_table"]

_NAMES = {"ttft": "TTFT", "visible_ttft": "visible TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "queue": "queue"}
_TIMES = {
    "client_ttft": "TTFT from sending",
    "server_ttft": "TTFT from receiving",
    "engine_ttft": "TTFT in the engine",
    "client_lateness": "intended → sent",
    "way_in": "sent → received",
    "first_token_way_out": "first token, engine → outside",
}


def blocks(metrics: Summary, field: FieldMetrics | None, *, full: bool = False) -> list[RenderableType]:
    """``full``: also ITL per chunk, who saw the first token when, preemption, drafts, and how the load was made."""
    if not metrics.finished:
        return [] if field is None or not full else [Text(line) for line in _more(field)]
    out: list[RenderableType] = [latency_table(metrics, field, full=full)]
    if said := _rates(metrics, field):
        out.append(Text(said))
    if field is None:
        return out
    if field.goodput is not None:
        out.append(Text(_goodput(field.goodput, full=full)))
    if full:
        out += [Text(line) for line in (*_more(field), *field.notes)]
    elif field.loop.kind in ("closed", "partly closed"):
        out.append(Text(field.loop.said))
    return out


def latency_table(metrics: Summary, field: FieldMetrics | None, *, full: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(counted(metrics.finished, "finished request"))
    for name in ("mean", "p50", "p95", "p99", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    rows: list[tuple[str, Stat]] = []
    for name, title in _NAMES.items():
        if name == "queue" and not full:  # it is among the parts of the time
            continue
        s = metrics.get(name)
        if s is not None and s.n and not (name == "visible_ttft" and s == metrics.get("ttft")):
            rows.append((title, s))
            if name == "itl" and full and field is not None and field.itl_chunk != s:
                rows.append(("ITL per chunk", field.itl_chunk))
    if full and field is not None:
        rows += [(title, field.times[name]) for name, title in _TIMES.items() if field.times[name].n]
    for title, s in rows:
        table.add_row(title, *(duration_text(v) for v in (s.mean_ns, s.p50_ns, s.p95_ns, s.p99_ns)), f"{s.n:,}")
    return table


def _rates(m: Summary, field: FieldMetrics | None) -> str:
    said = []
    if m.output_tokens_per_s is not None:
        said.append(f"{m.output_tokens_per_s:,.1f} output tokens/s")
    if field is not None and field.total_tokens_per_s is not None:
        said.append(f"{field.total_tokens_per_s:,.1f} with prompts")
    if m.requests_per_s is not None:
        said.append(f"{m.requests_per_s:,.2f} requests/s")
    return ", ".join(said)


def _goodput(g: Goodput, *, full: bool) -> str:
    bound = "at least " if g.unknown else ""
    rate = "" if g.per_s_at_least is None else f", {bound}{g.per_s_at_least:,.2f} requests/s"
    said = (
        f"Goodput under {limits_text(g.slo)}: {bound}{g.met:,} of {counted(g.arrived, 'request')} that arrived "
        f"({bound}{percent(g.share_at_least)}){rate}."
    )
    broke = [f"{name} {n:,}" for name, n in g.broke.items() if n]
    if broke:
        said += f" Over the limit: {', '.join(broke)}."
    if g.unknown:
        said += f" Of {g.unknown:,} nobody knows."
    return said


def _more(f: FieldMetrics) -> list[str]:
    lines = []
    if f.seen_from:
        seen = ", ".join(f"{k or 'unknown'} {n:,}" for k, n in f.seen_from.items())
        lines.append(f"First tokens seen from: {seen} (requests).")
    q = f.preemption
    if q.preemptions is not None:
        least = "at least " if q.at_least else ""
        who = "" if q.requests is None else f", of {counted(q.requests, 'request')}"
        each = "" if not q.preemptions else f" ({count_text(q.per_request)} a request)"
        lines.append(f"Preemptions: {least}{q.preemptions:,}{who if q.preemptions else ''}{each}.")
    d = f.drafts
    if d.proposed is not None:
        lines.append(
            f"Drafts: {d.accepted or 0:,} of {d.proposed:,} proposed tokens accepted ({percent(d.acceptance)}); "
            "by position in the draft it is unknown."
        )
    lines.append(f.loop.said)
    return lines
