"""How a trace came to be, and what it cannot show: on every page that shows figures, so that a prediction is never taken for a
measurement."""

from __future__ import annotations

import json
from typing import Any, Literal

import polars as pl
import streamlit as st

from hoptrace.analysis.report import Report
from hoptrace.analysis.text import count_text
from hoptrace.app.words import plain, signed_percent
from hoptrace.manifest import Manifest
from hoptrace.metrics import METRICS
from hoptrace.reader import Trace

__all__ = ["badge", "badge_text", "origin"]

_STATISTICS = ("mean", "p50", "p95", "p99")
_Colour = Literal["green", "violet", "orange"]
_SAYS: dict[str, tuple[str, str, _Colour]] = {
    "recorded": ("Recorded: measured on a live server", ":material/sensors:", "green"),
    "imported": ("Imported: read from another tool's files", ":material/upload_file:", "violet"),
    "replayed": ("Replayed: predicted, not measured", ":material/model_training:", "orange"),
}


def badge(manifest: Manifest) -> None:
    """recorded, imported or replayed, with the servers' facts beside it."""
    text, icon, colour = _SAYS[manifest.origin]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.badge(text, icon=icon, color=colour)
        facts = [_server(s.engine, s.model, s.max_sequences) for s in manifest.servers]
        if facts:
            st.caption(plain("; ".join(facts)))
    if manifest.replay is not None:
        st.caption(_error(manifest.replay.error))


def badge_text(manifest: Manifest) -> str:
    """The same in one word, for a list."""
    return manifest.origin


def _server(engine: str | None, model: str | None, slots: int | None) -> str:
    places = "number of places unknown" if slots is None else f"{slots} place{'' if slots == 1 else 's'}"
    return ", ".join([engine or "server", model or "model unknown", places])


def _error(error: dict[str, Any] | None) -> str:
    """The replay's error under its trace's own policy, as the manifest says it: the medians and p99."""
    figures = {name: value for name, value in (error or {}).items() if isinstance(value, dict)}
    said = []
    for name in ("ttft", "itl", "e2e"):
        value = figures.get(name, {})
        stats = [f"{k} {signed_percent(value[k])}" for k in ("p50", "p99") if isinstance(value.get(k), int | float)]
        if stats:
            said.append(f"{METRICS[name].title}: {', '.join(stats)}")
    if not said:
        return "How wrong this replay is, is unknown: its parent has not been replayed under its own policy."
    return plain("Error of a replay under the trace's own policy against what was observed. " + "; ".join(said), 600)


def _errors(error: dict[str, Any] | None) -> pl.DataFrame:
    """All of it: one row per latency, a column per statistic; a row per rate."""
    rows = []
    for name, value in (error or {}).items():
        if not isinstance(value, dict):
            continue
        known = {k: signed_percent(float(v)) for k, v in value.items() if isinstance(v, int | float)}
        if set(known) <= set(_STATISTICS):
            rows.append(
                {"figure": METRICS[name].title if name in METRICS else name, **{s: known.get(s, "–") for s in _STATISTICS}}
            )
        else:
            rows += [{"figure": f"{name}, {k}", "mean": v, **dict.fromkeys(_STATISTICS[1:], "–")} for k, v in known.items()]
    return pl.DataFrame(rows)


def origin(trace: Trace, report: Report) -> None:
    """How the trace came to be, what it could not see, what was dropped."""
    m = trace.manifest
    st.subheader("How far to trust it", anchor=False)
    left, right = st.columns(2)
    with left:
        st.markdown("**How the trace came to be**")
        st.markdown(plain(report.origin_note, 600))
        steps = report.accounting.steps_origin
        st.markdown(f"Steps: {plain(steps)}." if steps else "Steps: none are known.", help=_STEPS)
        for note in m.notes:
            st.markdown(f"- {plain(note)}")
        for source in m.imported_from:
            shown = {k: v for k, v in source.items() if isinstance(v, str | int | float)}
            st.markdown("- " + plain(", ".join(f"{k}: {v}" for k, v in shown.items()), 600))
        _drops(m)
        if m.replay is not None:
            errors = _errors(m.replay.error)
            if not errors.is_empty():
                st.markdown("**Error under the trace's own policy**", help="(predicted − observed) ÷ observed, per figure.")
                st.dataframe(errors, hide_index=True)
    with right:
        st.markdown("**What it could not see**")
        if not report.unseen:
            st.markdown("Nothing that these pages ask for is missing.")
        for text in report.unseen:
            st.markdown(f"- {plain(text, 400)}")
    _tables(trace)


_STEPS = (
    "Observed: the engine told of each iteration. Reconstructed: from the times of tokens, since the engine tells nothing. "
    "Replayed: from a replay."
)


def _drops(m: Manifest) -> None:
    lost = sum(m.rows_dropped.values())
    values = sum(m.values_dropped.values())
    if not lost and not values:
        st.markdown("No rows were dropped." if m.closed else "No rows were dropped so far.")
    for reason, n in {**m.rows_dropped, **m.values_dropped}.items():
        st.markdown(f"- {count_text(n)} dropped: {plain(reason)}")


def _tables(trace: Trace) -> None:
    with st.expander("Tables, collectors and configuration"):
        rows = [{"table": name, "rows": trace.rows(name), "parts": len(parts)} for name, parts in trace.manifest.tables.items()]
        st.dataframe(pl.DataFrame(rows, schema={"table": pl.String, "rows": pl.Int64, "parts": pl.Int64}), hide_index=True)
        collectors = [
            {
                "collector": c.name,
                "available": c.available,
                "rows": c.rows,
                "dropped": sum(c.dropped.values()),
                "reason": c.reason or "",
            }
            for c in trace.manifest.collectors
        ]
        if collectors:
            st.dataframe(pl.DataFrame(collectors), hide_index=True)
        shown = trace.manifest.model_dump(mode="json", exclude_none=True, include={"servers", "replay", "hosts", "platform"})
        st.code(json.dumps(shown, indent=1, ensure_ascii=False)[:20_000], language="json", height=320)
