"""Which charts stand in the HTML report: those of the dashboard, over the report's own figures."""

from __future__ import annotations

import altair as alt
import polars as pl

from hoptrace.analysis.report import Report
from hoptrace.analysis.text import duration_text
from hoptrace.analysis.timeline import extent, timeline
from hoptrace.app import charts_layers, charts_ledger, charts_overview, charts_stranding, charts_time
from hoptrace.app.static_charts import svg
from hoptrace.reader import Trace

__all__ = ["figures"]

AnyChart = alt.Chart | alt.LayerChart | alt.FacetChart

_TOKENS = 2_000_000  # rows of `tokens` up to which the series over time are drawn
_GROUPS = {"all": "mean of all", "p50": "around p50", "p95": "around p95", "p99": "around p99"}


def figures(report: Report, trace: Trace) -> dict[str, list[tuple[str, str]]]:
    """Captions and SVG by section of the report; ``trace`` is read for what is drawn over time. Raises as ``svg``, InputError."""
    out: dict[str, list[tuple[str, str]]] = {}

    def add(section: str, caption: str, chart: AnyChart) -> None:
        out.setdefault(section, []).append((caption, svg(chart, f"c{sum(map(len, out.values()))}")))

    compositions = report.accounting.compositions
    if compositions and compositions["all"].e2e_ns:
        shares = [{"class": k, "share": v, "doc": ""} for k, v in compositions["all"].class_shares.items()]
        add("time", "Latency by class, all finished requests", charts_overview.class_shares(pl.DataFrame(shares)))
        parts = charts_overview.parts_frame(compositions, _GROUPS)
        caption = "Parts of the latency, of all and around the percentiles of end-to-end time"
        add("time", caption, charts_overview.accounting(parts, list(_GROUPS.values())))
    window = extent(trace)
    if window is not None and trace.rows("tokens") <= _TOKENS:
        line, span = timeline(trace, *window), (0.0, (window[1] - window[0]) / 1e9)
        if line.occupancy.height:
            caption = f"Requests in the server over {duration_text(window[1] - window[0])}"
            add("latency", caption, charts_time.occupancy(line.occupancy, window[0], span))
        if line.steps.height:
            add("time", "Time per step: mean, and the longest", charts_time.step_time(line.steps, window[0], span))
    if report.ledger.rows.height and (report.ledger.matrix()["bytes"] > 0).any():
        add("moves", "What moves, by way", charts_ledger.flows(report.ledger.matrix()))
    origin = window[0] if window is not None else 0
    if report.layers is not None and report.layers.over_time.height > 1:
        add("layers", "Layers of the requests that arrived in each bin", charts_layers.over_time(report.layers.over_time, origin))
    if report.stranding is not None and (report.stranding.series["provisioned"] > 0).any():
        add("stranding", "KV space in use", charts_stranding.space_in_use(report.stranding.series, origin))
    if report.reversibility is not None:
        rows = [
            {
                "what": {"kv": "KV space"}.get(r.what, r.what),
                "name": r.name,
                "horizon_s": w.horizon_s,
                "mean": w.mean,
                "worst": w.worst,
            }
            for r in report.reversibility.reclaim
            for w in r.within
        ]
        if rows:
            add("reversibility", "What could be handed over within a time", charts_stranding.reclaimable(pl.DataFrame(rows)))
        moments = report.reversibility.moments
        if moments.filter(pl.col("drain_ns").is_not_null()).height:
            add("reversibility", "Drain time, from each moment", charts_stranding.drain(moments, origin))
    return out
