"""The Time page: steps and what was in them, requests waiting and running, token rate, counters, on one time axis."""

from __future__ import annotations

from typing import Any

import polars as pl
import streamlit as st

from hoptrace.analysis.text import count_text, counted, duration_text
from hoptrace.analysis.timeline import Series, Timeline
from hoptrace.app import charts_time as draw
from hoptrace.app import data
from hoptrace.app.words import plain

__all__ = ["show"]

Window = tuple[int, int]
_SHOWN_AT_FIRST = 5
_MOST_SHOWN = 12
# Processor time of the server, its waiting for a processor, its busy slots, those that wait, its memory.
_ASKED = (
    ("process:", "cpu_ns"),
    ("process:", "run_delay_ns"),
    ("server:", "slots_processing"),
    ("server:", "requests_deferred"),
    ("process:", "rss_bytes"),
)


def show() -> None:
    """Draw the page for the chosen trace."""
    path = data.selected()
    st.title("Time")
    whole = data.extent(path)
    if whole is None:
        st.info("This trace has no requests, tokens, steps or counters, so there is nothing to lay on a time axis.")
        return
    shown, window = _choose(path, whole)
    line = data.timeline(path, *window)
    window_s = ((window[0] - whole[0]) / 1e9, (window[1] - whole[0]) / 1e9)
    _say(line, whole, shown)
    _requests(line, whole[0], window_s)
    _steps(line, whole[0], window_s)
    _tokens(line, whole[0], window_s)
    _counters(path, window, whole[0], window_s)


def _choose(path: str, whole: Window) -> tuple[Window, Window]:
    """The range of the strip and the window chosen in it."""
    stack: list[Window] = st.session_state.setdefault(f"strip of {path}", [])
    shown = stack[-1] if stack else whole
    strip = data.timeline(path, *shown)
    key = f"strip {path} {shown}"
    shown_s = ((shown[0] - whole[0]) / 1e9, (shown[1] - whole[0]) / 1e9)
    kind, frame, value, unit = _strip_series(strip)
    st.markdown(
        f"**{kind}** over the range: drag to choose the window that the charts below show, double-click for all of it.",
        help="The charts below always have the same number of bins, so a narrower window shows finer detail; from about 240 "
        "steps down, each step is drawn by itself.",
    )
    chart = draw.strip(frame, value, unit, whole[0], shown_s)
    state: Any = st.altair_chart(chart, key=key, on_select="rerun", selection_mode=draw.BRUSH)
    window = _picked(state, whole[0], shown)
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Zoom in", disabled=window == shown, icon=":material/zoom_in:", help="The strip shows this window only."):
            stack.append(window)
            st.rerun()
        if st.button("Back", disabled=not stack, icon=":material/undo:"):
            stack.pop()
            st.rerun()
        since = duration_text(window[0] - whole[0]) if window[0] > whole[0] else "0 s"
        st.caption(f"{since} to {duration_text(window[1] - whole[0])} of {duration_text(whole[1] - whole[0])}")
    return shown, window


def _strip_series(line: Timeline) -> tuple[str, pl.DataFrame, str, str]:
    """What the strip shows: the best that the trace has."""
    if _has_rate(line):
        return "Output tokens per second", line.tokens, "tokens_per_s", "tokens/s"
    if not line.steps.is_empty():
        return "Time per step", line.steps.with_columns(pl.col("step_ns") / 1e6), "step_ns", "ms"
    return "Arrivals per second", line.arrivals, "requests_per_s", "req/s"


def _has_rate(line: Timeline) -> bool:
    """Not if all output is of unknown size: an axis without a mark would read as no output at all."""
    return not line.tokens.is_empty() and (line.unsized == 0 or bool((line.tokens["tokens_per_s"] > 0).any()))


def _picked(state: Any, origin_ns: int, shown: Window) -> Window:
    """The brushed window in ns, cut to what the strip shows; all of it if nothing is brushed."""
    picked = (state or {}).get("selection", {}).get(draw.BRUSH, {})
    ends = next((v for v in picked.values() if isinstance(v, list) and len(v) == 2), None) if picked else None
    if not ends:
        return shown
    low, high = (origin_ns + round(float(x) * 1e9) for x in sorted(ends))
    low, high = max(low, shown[0]), min(high, shown[1])
    return (low, high) if high > low else shown


def _say(line: Timeline, whole: Window, shown: Window) -> None:
    if line.occupancy.is_empty() and line.steps.is_empty():
        st.info(
            "This trace knows when requests arrived, but not when they were worked on or finished: a request log has no more. "
            "Replay it to see how a server would have handled them: hoptrace replay T.trace --policy P -o out.trace"
        )


def _requests(line: Timeline, origin: int, window_s: tuple[float, float]) -> None:
    if not line.occupancy.is_empty():
        _heading(
            "Requests in the server",
            "Mean over each bin of the number of requests in each state. Waiting: from arrival to the engine's first work. "
            "Running: from there to the end. Where nobody saw the first work, waiting and running are not told apart.",
        )
        st.altair_chart(draw.occupancy(line.occupancy, origin, window_s))
    if not line.arrivals.is_empty() and line.occupancy.is_empty():
        _heading("Arrivals", "Requests that arrive in the bin ÷ the bin's width.")
        st.altair_chart(draw.rate(line.arrivals, "requests_per_s", "req/s", origin, window_s))
        if line.arrivals["prompt_tokens_per_s"].null_count() < line.arrivals.height:
            _heading("Prompt tokens that arrive", "Prompt tokens of the requests that arrive in the bin ÷ the bin's width.")
            st.altair_chart(draw.rate(line.arrivals, "prompt_tokens_per_s", "tokens/s", origin, window_s))


def _steps(line: Timeline, origin: int, window_s: tuple[float, float]) -> None:
    if line.steps.is_empty():
        if not line.occupancy.is_empty():
            st.caption("No steps lie in this window: the engine told of none, and none could be reconstructed.")
        return
    each = "Each bar is one step." if line.exact else "Mean over step time: a step counts in a bin by its share of the bin."
    if (
        line.steps["prefill_tokens"].null_count() < line.steps.height
        or line.steps["decode_tokens"].null_count() < line.steps.height
    ):
        _heading("Tokens in a step", f"Prompt tokens computed and answer tokens generated in one engine iteration. {each}")
        st.altair_chart(draw.batch(line.steps, origin, window_s))
    _heading("Time per step", f"end_ns − start_ns of a step. {each} The tick is the longest step in the bin.")
    st.altair_chart(draw.step_time(line.steps, origin, window_s))
    if line.steps["kv_used_tokens"].null_count() < line.steps.height:
        _heading("KV places in use", f"Tokens whose keys and values the server holds. {each}")
        st.altair_chart(draw.rate(line.steps, "kv_used_tokens", "tokens", origin, window_s))


def _tokens(line: Timeline, origin: int, window_s: tuple[float, float]) -> None:
    if line.tokens.is_empty():
        return
    _heading(
        "Output tokens per second",
        "Tokens seen in the bin, at one vantage per request, ÷ the bin's width. Chunks of unknown size are left out: where "
        "there are any, the rate is a lower bound, and a bin with none but those is empty.",
    )
    if line.unsized:
        st.caption(
            f"Left out: chunks of {count_text(line.unsized)} of {counted(line.emitting, 'request')} with output in this window. "
            "Nobody knows how many tokens they held"
            + (": where there are any, the rate is a lower bound." if _has_rate(line) else ", so there is no rate.")
        )
    if _has_rate(line):
        st.altair_chart(draw.rate(line.tokens, "tokens_per_s", "tokens/s", origin, window_s))


def _counters(path: str, window: Window, origin: int, window_s: tuple[float, float]) -> None:
    there = data.counter_series(path)
    if not there:
        return
    st.subheader(
        "Counters",
        anchor=False,
        help="Mean over each bin. Cumulative counters are shown as rates: difference of two samples ÷ the time between "
        "them. A bin that no sample covers is empty.",
    )
    names = {" ".join(x for x in series if x): series for series in there}
    picked = st.multiselect(
        "Series",
        list(names),
        default=_first(names),
        max_selections=_MOST_SHOWN,
        label_visibility="collapsed",
        key=f"series {path}",
    )
    bins = data.counter_bins(path, [names[x] for x in picked], *window)
    for label in picked:
        entity, name, direction = names[label]
        frame = bins.filter((pl.col("entity") == entity) & (pl.col("name") == name) & (pl.col("direction") == direction))
        st.caption(plain(label))
        if frame.is_empty():
            st.caption("No sample covers this window.")
            continue
        unit, scale = _unit(frame["unit"][0], bool(frame["per_second"][0]))
        st.altair_chart(draw.counter(frame, unit, scale, origin, window_s))


def _first(names: dict[str, Series]) -> list[str]:
    """Those that people ask for first, where they were recorded."""
    hits = [label for kind, name in _ASKED for label, (e, n, _) in names.items() if e.startswith(kind) and n.endswith(name)]
    return (hits or list(names))[:_SHOWN_AT_FIRST]


def _unit(unit: str | None, per_second: bool) -> tuple[str, float]:
    """The unit to show and the factor to it."""
    if unit == "ns":
        return ("s per s", 1e-9) if per_second else ("ms", 1e-6)
    if unit == "bytes":
        return ("KiB/s", 1 / 1024) if per_second else ("MiB", 1 / 1024**2)
    shown = "" if unit in (None, "", "1") else str(unit)
    return (f"{shown}/s" if per_second else shown or "value"), 1.0


def _heading(title: str, formula: str) -> None:
    st.markdown(f"**{title}**", help=formula)
