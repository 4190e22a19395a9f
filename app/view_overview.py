"""The Overview page: what latency is made of, what moved, what arranging cost, and how far the trace can be believed."""

from __future__ import annotations

import polars as pl
import streamlit as st

from hoptrace.analysis.arranging.osfigures import OsFigures
from hoptrace.analysis.latency.parts import CLASSES, PARTS
from hoptrace.analysis.moves.ledger import Ledger
from hoptrace.analysis.report import Report
from hoptrace.analysis.text import bytes_text, count_text, counted, duration_text, percent
from hoptrace.app import charts_overview as draw
from hoptrace.app import data
from hoptrace.app.charts_overview import parts_frame
from hoptrace.app.view_origin import badge, origin
from hoptrace.app.words import per_second, plain
from hoptrace.metrics import METRICS, Stat

__all__ = ["latencies", "parts_frame", "show"]

_ROWS = {"all": "mean of all", "p50": "around p50", "p95": "around p95", "p99": "around p99"}
_LARGEST = 8
_OTHERS = "Share of the machine's busy CPU time that was not the servers'"
_BASIS = {
    "counted": "Counted: each was observed.",
    "derived": "Derived: from descriptors, block sizes or the make-up of steps.",
    "assumed": "Assumed: from the table of the mechanism.",
}


def show() -> None:
    """Draw the page for the chosen trace."""
    path = data.selected()
    trace, report = data.opened(path), data.report(path)
    st.title(plain(data.name_of(path)), anchor=False)
    badge(trace.manifest)
    st.markdown(f"#### {plain(report.headline, 600)}")
    if report.warnings:
        texts = [plain(text, 400) for text in report.warnings]
        st.warning(texts[0] if len(texts) == 1 else "\n".join(f"- {text}" for text in texts), icon=":material/warning:")
    if report.accounting.compositions:
        _three(report)
        _accounting(report)
        _latency(report)
    else:
        st.info(
            "Latency needs requests with an end. This trace has none that finished, so there is nothing to account for. "
            "A request log without times can be replayed: hoptrace replay T.trace --policy P -o out.trace"
        )
    _ledger(report.ledger)
    _arranging(report)
    origin(trace, report)


def _three(report: Report) -> None:
    left, middle, right = st.columns([6, 3, 3])
    with left.container(border=True, height="stretch"):
        st.markdown(
            "**Latency by class**",
            help="Class time ÷ end-to-end time, over all finished requests. Each nanosecond of a request is in "
            "exactly one class. " + " ".join(f"**{k}**: {v}" for k, v in CLASSES.items()),
        )
        rows = [{"class": k, "share": v, "doc": CLASSES[k]} for k, v in report.accounting.shares["all"].items()]
        st.altair_chart(draw.class_shares(pl.DataFrame(rows)))
    with middle.container(border=True, height="stretch"):
        _per_token(report.ledger)
    with right.container(border=True, height="stretch"):
        value = report.coordination.share
        st.metric(
            "Coordination share",
            percent(value.get("all")),
            help="Coordination ÷ end-to-end time, over all finished requests: hand-overs, host work, waiting for a batch, and "
            "queueing while the server has room. Waiting for a full server is capacity, not coordination.",
        )
        st.caption(f"{percent(value.get('p50'))} around the median, {percent(value.get('p99'))} around p99")


def _per_token(ledger: Ledger) -> None:
    rows = {r["basis"]: r for r in ledger.per_token(memory=False).to_dicts()}
    help_text = (
        "Sums over all moves but the compute's own memory ÷ output tokens of all requests. What was counted, derived and assumed "
        "is never added up in one number. Transfers are separate messages, reads or descriptors."
    )
    if not rows or ledger.output_tokens in (None, 0):
        st.metric("Moved per output token", bytes_text(None), help=help_text)
        st.caption("No moves were recorded." if not rows else "The number of output tokens is unknown.")
        return
    first = next((b for b in _BASIS if b in rows), next(iter(rows)))
    st.metric("Moved per output token", bytes_text(rows[first]["bytes"]), help=help_text)
    for basis, row in rows.items():
        size = "" if basis == first else f"{bytes_text(row['bytes'])} in "
        st.caption(
            f"{size}{count_text(row['moves'])} moves, {count_text(row['transfers'])} transfers, {plain(basis or 'basis unknown')}"
        )


def _accounting(report: Report) -> None:
    accounting = report.accounting
    st.subheader(
        "Where the time goes",
        anchor=False,
        help="Mean of each part over the requests around a percentile of end-to-end time: ±5 % of the ranks around the median, "
        "±1 % around p95, ±0.5 % around p99, at least one request. The parts of a request add up to its latency exactly.",
    )
    frame = parts_frame(accounting.compositions, _ROWS)
    st.altair_chart(draw.accounting(frame, list(_ROWS.values())))
    behind = ", ".join(f"{_ROWS[k]}: {count_text(c.requests)}" for k, c in accounting.compositions.items())
    st.caption(f"Requests behind the bars: {behind}. {' '.join(plain(n, 900) for n in accounting.notes)}")
    with st.expander("The same as a table"):
        st.dataframe(_parts_table(frame), hide_index=True)


def _parts_table(frame: pl.DataFrame) -> pl.DataFrame:
    """One row per part, one column per bar, in words; parts that are 0 everywhere are left out, unseen ones are said."""
    out = []
    for p in PARTS:
        rows = {r["row"]: r for r in frame.filter(pl.col("part") == p.label).to_dicts()}
        if not rows or all(r["ns"] == 0 for r in rows.values()):
            continue
        shown = {
            name: "not recorded" if r["ns"] is None else f"{duration_text(r['ns'])} ({percent(r['share'])})"
            for name, r in rows.items()
        }
        out.append({"part": p.label, "class": p.klass, **shown, "what it is": p.doc, "needs": p.needs})
    return pl.DataFrame(out)


def latencies(metrics: dict[str, Stat]) -> pl.DataFrame:
    """Latency distributions in words: metric, n, mean, p50, p95, p99, formula."""
    return pl.DataFrame(
        {
            "metric": METRICS[name].title,
            "values": s.n,
            "mean": duration_text(s.mean_ns),
            "p50": duration_text(s.p50_ns),
            "p95": duration_text(s.p95_ns),
            "p99": duration_text(s.p99_ns),
            "formula": METRICS[name].formula,
        }
        for name, s in metrics.items()
        if s.n
    )


def _latency(report: Report) -> None:
    m = report.metrics
    st.subheader("Latency and throughput", anchor=False, help="Only finished requests count; percentiles interpolate linearly.")
    columns = st.columns(4)
    facts = (
        ("Requests finished", f"{count_text(m.finished)} of {count_text(m.requests)}", "failed"),
        ("Output", per_second(m.output_tokens_per_s, "tokens"), "output_tokens_per_s"),
        ("Throughput", per_second(m.requests_per_s, "req"), "requests_per_s"),
    )
    for column, (label, value, name) in zip(columns, facts, strict=False):
        column.metric(label, value, help=f"{METRICS[name].formula}. {METRICS[name].doc}")
    columns[3].metric("Duration", duration_text(m.duration_ns), help="First arrival to last finish, over finished requests.")
    st.dataframe(latencies(m), hide_index=True)
    if m.itl_left_out:
        st.caption(
            f"ITL leaves out {count_text(m.itl_left_out)} of {counted(m.finished, 'finished request')}: their tokens, counted "
            "chunk by chunk, are not the server's total, so some chunks held several and nobody knows which."
        )


def _ledger(ledger: Ledger) -> None:
    st.subheader(
        "What moved",
        anchor=False,
        help="The largest rows of the ledger by bytes. Memory → compute is what the steps read and write of their own memory: "
        "derived from the model's size and the steps' make-up.",
    )
    if ledger.rows.is_empty():
        st.caption("No moves were recorded, and no steps from which memory traffic could be derived.")
        return
    rates = ledger.matrix()["bytes_per_output_token"].alias("per_token")
    ordered = ledger.rows.with_columns(rates)
    largest = ordered.sort("bytes", "object", "src", descending=[True, False, False], nulls_last=True).head(_LARGEST)
    shown = [
        {
            "object": r["object"],
            "from": r["src"],
            "to": r["dst"],
            "how": r["mechanism"],
            "bytes": bytes_text(r["bytes"]),
            "per output token": bytes_text(r["per_token"]),
            "moves": count_text(r["moves"]),
            "transfers": count_text(r["transfers"]),
            "control operations": count_text(r["control_ops"]),
            "known": r["basis"],
        }
        for r in largest.to_dicts()
    ]
    config = {
        "bytes": st.column_config.TextColumn(help="Σ payload bytes of the moves."),
        "per output token": st.column_config.TextColumn(help="Σ bytes ÷ output tokens of all requests."),
        "transfers": st.column_config.TextColumn(help="Separate messages, reads or descriptors."),
        "control operations": st.column_config.TextColumn(help="Steps of the access paths that carry no payload."),
        "known": st.column_config.TextColumn(help=" ".join(_BASIS.values())),
    }
    st.dataframe(pl.DataFrame(shown), hide_index=True, column_config=config)
    if ledger.rows.height > _LARGEST:
        st.caption(
            f"{count_text(_LARGEST)} of {count_text(ledger.rows.height)} rows; all of them: hoptrace report T.trace --json"
        )


def _counted(figures: OsFigures) -> None:
    """What the operating system counted, as far as it did."""
    said = figures.as_dict()
    # Without a count of its own, the capture is in the servers' share or in this one, by whose process it ran in.
    apart = "." if figures.hoptrace_cpu_ns is None else ", nor hoptrace's own (the capture)."
    known = [
        (
            "CPU time per output token",
            said["cpu_ns_per_output_token"],
            duration_text,
            "CPU time of the server's processes ÷ output tokens.",
        ),
        (
            "Waiting for a CPU",
            said["run_delay_share"],
            percent,
            "Run-queue delay ÷ (run-queue delay + CPU time) of the server's processes: of the time in which they wanted a CPU, "
            "how much they waited for one.",
        ),
        ("Others' CPU share", said["foreign_cpu_share"], percent, f"{_OTHERS}{apart}"),
        (
            "Switches per output token",
            said["switches_per_output_token"],
            count_text,
            "Context switches of the server's processes ÷ output tokens.",
        ),
        (
            "Capture's CPU per output token",
            said["hoptrace_cpu_ns_per_output_token"],
            duration_text,
            "What recording cost: CPU time of hoptrace itself (collectors, proxy, what else runs in that process) ÷ "
            "output tokens.",
        ),
        (
            "Capture's CPU share",
            said["hoptrace_cpu_share"],
            percent,
            "CPU time of hoptrace itself ÷ the machine's busy CPU time. It competes with the server for the same CPUs.",
        ),
    ]
    shown = [(label, text(value), formula) for label, value, text, formula in known if value is not None]
    width = 4 if len(shown) <= 4 else 3
    for i in range(0, len(shown), width):
        for column, (label, value, formula) in zip(st.columns(width), shown[i : i + width], strict=False):
            column.metric(label, value, help=formula)
    if figures.breaks:
        st.caption(f"{count_text(figures.breaks)} restarts or resets of counters: these sums are lower bounds.")


def _arranging(report: Report) -> None:
    c = report.coordination
    if c.operations.is_empty() and c.os is None:
        return
    st.subheader(
        "What arranging took", anchor=False, help="Recorded waits of coordination kinds, and what the operating system counted."
    )
    if c.os is not None:
        _counted(c.os)
    if not c.operations.is_empty():
        rows = [
            {
                "kind": r["kind"],
                "on": r["on"],
                "operations": count_text(r["operations"]),
                "per output token": count_text(r["per_output_token"]),
                "time": duration_text(r["wait_ns"]),
                "known": r["basis"],
            }
            for r in c.operations.to_dicts()
        ]
        st.dataframe(pl.DataFrame(rows), hide_index=True)
