"""The Requests page: all requests with their parts, TTFT against prompt length, and one request from arrival to finish."""

from __future__ import annotations

from typing import Any

import polars as pl
import streamlit as st

from hoptrace.analysis.latency.parts import PARTS
from hoptrace.analysis.request_detail import STATUSES, Detail, thinned
from hoptrace.analysis.text import count_text, duration_text
from hoptrace.app import charts_overview, data
from hoptrace.app import charts_requests as draw
from hoptrace.app.words import plain
from hoptrace.metrics import METRICS

__all__ = ["show"]

_ROWS = 500
_POINTS = 2500
_METRICS = ("ttft", "e2e", "tpot", "queue")
_LENGTHS = ("prompt_tokens", "output_tokens", "cached_tokens")
_TITLES = {"ttft": "TTFT", "e2e": "end to end", "tpot": "TPOT", "queue": "queue"}


def show() -> None:
    """Draw the page for the chosen trace."""
    path = data.selected()
    st.title("Requests", anchor=False)
    table = data.request_table(path)
    if table.is_empty():
        st.info(
            "This trace holds no requests: counters alone say nothing of single requests. Attach with --proxy to record them."
        )
        return
    found = _filtered(table)
    if found.is_empty():
        st.info("No request passes the filters.")
        return
    picked = _table(found, path)
    clicked = _scatter(found, path)
    request = _choose(found, picked, clicked, path)
    _one(data.detail(path, request))


def _filtered(table: pl.DataFrame) -> pl.DataFrame:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        have = [s for s in STATUSES if s in set(table["status"])]
        statuses = st.multiselect("State", have, default=have, width=320)
        text = st.text_input("Identifier, model or error contains", width=280)
        ttft = st.number_input("TTFT at least, ms", min_value=0.0, value=0.0, step=100.0, width=170)
        prompt = st.number_input("Prompt tokens at least", min_value=0, value=0, step=100, width=170)
        parts = [p.label for p in PARTS if p.label in set(table["largest_part"])]
        largest = st.selectbox("Largest part", ["any", *parts], width=190, disabled=not parts)
    rows = table.filter(pl.col("status").is_in(statuses))
    if text:
        columns = ("request_id", "model", "error", "session", "tenant")
        rows = rows.filter(pl.any_horizontal(pl.col(c).fill_null("").str.contains(text, literal=True) for c in columns))
    if ttft > 0:
        rows = rows.filter(pl.col("ttft_ns") >= round(ttft * 1e6))
    if prompt > 0:
        rows = rows.filter(pl.col("prompt_tokens") >= prompt)
    return rows.filter(pl.col("largest_part") == largest) if largest != "any" else rows


def _table(found: pl.DataFrame, path: str) -> int | None:
    """The table; the request of the row that is picked in it."""
    order = {"number": "request", "arrival": "arrival_ns", **{_TITLES[m]: f"{m}_ns" for m in _METRICS}}
    order |= {"prompt tokens": "prompt_tokens", "output tokens": "output_tokens"} | {p.label: p.column for p in PARTS}
    order = {k: v for k, v in order.items() if found[v].null_count() < found.height}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        names = list(order)
        by = st.selectbox("Sort by", names, index=names.index("end to end") if "end to end" in names else 0, width=220)
        way = st.segmented_control("Order", ["largest first", "smallest first"], default="largest first", required=True)
    ranked = found.sort(order[by], "request", descending=[way != "smallest first", False], nulls_last=True).head(_ROWS)
    more = "" if found.height <= _ROWS else f"The first {count_text(_ROWS)} of {count_text(found.height)} in this order. "
    st.caption(f"{more}{count_text(found.height)} requests pass the filters. Pick a row to see that request below. Times in ms.")
    state: Any = st.dataframe(
        _shown(ranked),
        hide_index=True,
        height=330,
        placeholder="–",
        column_config=_columns(),
        key=f"table {path}",
        on_select="rerun",
        selection_mode="single-row",
    )
    rows = ((state or {}).get("selection") or {}).get("rows") or []
    return int(ranked["request"][rows[0]]) if rows and rows[0] < ranked.height else None


def _shown(ranked: pl.DataFrame) -> pl.DataFrame:
    """The columns that hold anything, times in ms."""
    seen = [p for p in PARTS if (ranked[p.column].fill_null(0) > 0).any()]
    text = [c for c in ("request_id", "model", "finish_reason", "error") if ranked[c].null_count() < ranked.height]
    plain_columns = [c for c in ("largest_part", *_LENGTHS) if ranked[c].null_count() < ranked.height]
    metrics = [m for m in _METRICS if ranked[f"{m}_ns"].null_count() < ranked.height]
    return ranked.select(
        "request",
        "status",
        *plain_columns,
        *((pl.col(f"{m}_ns") / 1e6).alias(_TITLES[m]) for m in metrics),
        *((pl.col(p.column) / 1e6).alias(p.label) for p in seen),
        *(pl.col(c).str.slice(0, 200) for c in text),
    )


def _columns() -> dict[str, Any]:
    number = st.column_config.NumberColumn
    config: dict[str, Any] = {
        "request": number(format="%d", pinned=True, help="Number of the request within the trace."),
        "largest_part": st.column_config.TextColumn("largest part", help="The part that took most of its time."),
        "prompt_tokens": number("prompt", help="Prompt tokens, cached part included."),
        "output_tokens": number("output", help="Output tokens."),
        "cached_tokens": number("cached", help="Prompt tokens served from a cache, whatever the tier."),
    }
    for m in _METRICS:
        config[_TITLES[m]] = number(format="%.1f", help=f"{METRICS[m].formula}. {METRICS[m].doc}")
    for p in PARTS:
        config[p.label] = number(format="%.2f", help=f"{p.doc} ({p.klass})")
    return config


def _scatter(found: pl.DataFrame, path: str) -> int | None:
    """The scatter plot; the request of the point that is picked in it."""
    known = found.filter(pl.col("ttft_ns").is_not_null() & pl.col("prompt_tokens").is_not_null())
    st.subheader(
        "TTFT against prompt length", anchor=False, help=f"TTFT: {METRICS['ttft'].formula}. Colour: class of the largest part."
    )
    if known.is_empty():
        st.caption("No request here has both a time to first token and a known prompt length.")
        return None
    points = thinned(known, "ttft_ns", _POINTS)
    if points.height < known.height:
        st.caption(
            f"{count_text(points.height)} of {count_text(known.height)} requests are drawn: the slowest, and an even "
            "choice of the others."
        )
    state: Any = st.altair_chart(draw.scatter(points), key=f"scatter {path}", on_select="rerun", selection_mode=draw.PICK)
    picked = ((state or {}).get("selection") or {}).get(draw.PICK) or []
    return int(picked[0]["request"]) if picked and "request" in picked[0] else None


def _choose(found: pl.DataFrame, picked: int | None, clicked: int | None, path: str) -> int:
    """The request to show: what was picked last, else the slowest of those that pass the filters."""
    memory = st.session_state.setdefault(f"picks {path}", {"table": None, "scatter": None, "now": None})
    for source, value in (("table", picked), ("scatter", clicked)):
        if value != memory[source]:
            memory[source] = value
            memory["now"] = value
    numbers = set(found["request"])
    if memory["now"] in numbers:
        return int(memory["now"])
    return int(found.sort("e2e_ns", "request", descending=[True, False], nulls_last=True)["request"][0])


def _one(d: Detail) -> None:
    row = d.row
    st.subheader(
        f"Request {row['request']}", anchor=False, help="The request picked in the table or the plot; at first the slowest."
    )
    names = [f"{k} {row[c]}" for k, c in (("id", "request_id"), ("model", "model"), ("session", "session")) if row[c] is not None]
    ended = row["error"] or row["finish_reason"]
    st.markdown(plain(", ".join([row["status"], *names, *([f"ended with {ended}"] if ended else [])]), 500))
    columns = st.columns(6)
    facts = [
        ("TTFT", duration_text(row["ttft_ns"]), METRICS["ttft"].formula),
        ("End to end", duration_text(row["e2e_ns"]), METRICS["e2e"].formula),
        ("TPOT", duration_text(row["tpot_ns"]), METRICS["tpot"].formula),
        ("Prompt", count_text(row["prompt_tokens"]), "Prompt tokens, cached part included."),
        ("Cached", count_text(row["cached_tokens"]), "Prompt tokens served from a cache."),
        ("Output", count_text(row["output_tokens"]), "Output tokens."),
    ]
    for column, (label, value, formula) in zip(columns, facts, strict=True):
        column.metric(label, value, help=formula)
    if not d.parts:
        st.info(
            "It did not finish, so its time is not accounted for."
            if row["status"] != "finished"
            else "Its times contradict each other."
        )
        return
    frame = pl.DataFrame(
        [
            {
                "row": "its time",
                "part": p.label,
                "class": p.klass,
                "ns": ns,
                "share": d.shares[p.name],
                "doc": p.doc,
            }
            for p in PARTS
            if (ns := d.parts[p.name]) is not None
        ]
    )
    st.altair_chart(charts_overview.accounting(frame, ["its time"]))
    origin = row["arrival_ns"]
    if d.spans.height:
        st.markdown(
            "**From arrival to finish**",
            help="Each row is a part, in the order in which the request met them. Prefill and decode include what other requests "
            "in the same steps added; the bar above has that apart. Queueing is in the colour of its larger "
            "share: room or a full server.",
        )
        st.altair_chart(draw.waterfall(d.spans, d.tokens, origin))
    if d.tokens["doubted"].any():
        st.caption(
            f"Its tokens, counted chunk by chunk, are not the server's total of {count_text(row['output_tokens'])}: some chunks "
            "held several, nobody knows which. The ticks show when chunks came, not how many tokens were in them."
        )
    if d.tokens_left_out:
        st.caption(f"{count_text(d.tokens_left_out)} more reads of tokens are not drawn.")
    if d.neighbours.height:
        st.markdown(
            "**Beside it**",
            help="The requests that share most time with it, cut to its life. Interference comes from what they do in the same "
            "steps.",
        )
        shown = d.neighbours["request"].n_unique()
        st.caption(f"{count_text(shown)} of {count_text(d.neighbours_all)} requests that ran at the same time.")
        st.altair_chart(draw.neighbours(d.neighbours.drop("server"), row["request"], d.spans.drop("server"), origin))
