"""The Compare page: two traces side by side, and for a replay its prediction against what was observed."""

from __future__ import annotations

from typing import Any

import polars as pl
import streamlit as st

from hoptrace.analysis.compare.diff import Change, Diff
from hoptrace.analysis.latency.parts import part
from hoptrace.analysis.text import bytes_text, count_text, duration_text
from hoptrace.app import charts_compare as draw
from hoptrace.app import charts_overview, data
from hoptrace.app.view_origin import badge
from hoptrace.app.view_overview import parts_frame
from hoptrace.app.words import plain, signed_percent
from hoptrace.metrics import METRICS

__all__ = ["show"]

_STATS = ("mean", "p50", "p95", "p99")
_CHARTS = ("ttft", "itl", "e2e")
_EFFECT, _ERROR = "effect of what differs", "error of the prediction"
_COMPOSITIONS = {"all": "mean", "p50": "p50", "p95": "p95", "p99": "p99"}


def show() -> None:
    """Draw the page."""
    st.title("Compare", anchor=False)
    paths = data.given()
    if len(paths) < 2:
        st.info(
            "Comparing takes two traces, and there is one. Start the dashboard with both: hoptrace app run.trace what-if.trace"
        )
        return
    a, b = _choose(paths)
    if a == b:
        st.info("This is one trace twice: choose another for one of the sides.")
        return
    meaning = _meaning(a, b)
    if meaning == _ERROR and data.opened(b).manifest.replay is None:
        a, b = b, a  # an error is relative to what was observed
    result = data.diff(a, b)
    names = _names(a, b)
    _say(result, names, meaning)
    if not data.report(a).accounting.compositions and not data.report(b).accounting.compositions:
        st.info("Neither trace has a request that finished, so there are no latencies to compare.")
        return
    _percentiles(result, names)
    _table(result.metrics, names, meaning)
    _accounting(a, b, result, names, meaning)
    _moves(result, names, meaning)


def _choose(paths: list[str]) -> tuple[str, str]:
    chosen = data.selected()
    left, right = st.columns(2)
    with left:
        a = st.selectbox("A", paths, index=paths.index(chosen), format_func=data.name_of, key="compare a")
        badge(data.opened(a).manifest)
    with right:
        second = next(i for i, p in enumerate(paths) if p != chosen)
        b = st.selectbox("B", paths, index=second, format_func=data.name_of, key="compare b")
        badge(data.opened(b).manifest)
    return a, b


def _meaning(a: str, b: str) -> str:
    """How to read a difference between what was observed and what was predicted.

    Only the reader can know whether the configuration that was observed is the one that the replay was asked about; the guess is
    that it is, except for a replay of the observed trace under another policy.
    """
    replays = [data.opened(p).manifest.replay for p in (a, b)]
    if (replays[0] is None) == (replays[1] is None):
        return _EFFECT
    replay = replays[0] or replays[1]
    observed = data.opened(a if replays[0] is None else b)
    assert replay is not None
    own = replay.parent.removesuffix(".trace").split("/")[-1] == observed.name
    guess = _EFFECT if own and replay.policy.get("changes") else _ERROR
    chosen = st.segmented_control(
        "Read a difference as the",
        [_ERROR, _EFFECT],
        default=guess,
        required=True,
        key=f"meaning {a} {b}",
        help="One side was predicted by a replay. If the other was measured under the policy that the replay was asked about, "
        "the difference is the error of the prediction; if under another, it is the effect that the replay predicts.",
    )
    return str(chosen)


def _names(a: str, b: str) -> tuple[str, str]:
    """Column headings: the trace's name and how it came to be."""
    first, second = (f"{data.name_of(p)} ({data.opened(p).manifest.origin})" for p in (a, b))
    return (first, second) if first != second else (f"A: {first}", f"B: {second}")


def _say(result: Diff, names: tuple[str, str], meaning: str) -> None:
    if result.unequal:
        st.warning(
            "The work is not the same, so the figures do not compare: "
            + plain("; ".join(result.unequal), 500)
            + ". They are shown side by side nevertheless.",
            icon=":material/warning:",
        )
    for name, note in zip(names, (result.a_note, result.b_note), strict=True):
        st.caption(plain(f"{name}: {note}", 600))
    for note in result.notes:
        st.caption(plain(note))
    if meaning == _ERROR:
        st.markdown(
            f"Error: (predicted − observed) ÷ observed. Observed: **{plain(names[0])}**. Predicted: **{plain(names[1])}**."
        )
    else:
        st.markdown(f"Change: (B − A) ÷ A. A is **{plain(names[0])}**, B is **{plain(names[1])}**.")


def _percentiles(result: Diff, names: tuple[str, str]) -> None:
    columns = st.columns(len(_CHARTS))
    for column, metric in zip(columns, _CHARTS, strict=True):
        rows: list[dict[str, Any]] = []
        for stat in _STATS:
            c = result.changes.get(f"{metric}.{stat}")
            if c is not None:
                rows += [
                    {"stat": stat, "side": n, "ns": v, "text": duration_text(v)} for n, v in zip(names, (c.a, c.b), strict=True)
                ]
        frame = pl.DataFrame(rows, schema={"stat": pl.String, "side": pl.String, "ns": pl.Float64, "text": pl.String})
        with column:
            st.markdown(f"**{METRICS[metric].title}**", help=f"{METRICS[metric].formula}. {METRICS[metric].doc}")
            if frame["ns"].null_count() == frame.height:
                st.caption("Not recorded.")
            else:
                st.altair_chart(draw.percentiles(frame, list(names)))


def _table(changes: list[Change], names: tuple[str, str], meaning: str) -> None:
    st.subheader("Figures", anchor=False, help="The interval is that of the difference, 95 %, by resampling requests.")
    rows = [
        {
            "figure": _title(c.name),
            names[0]: _value(c.a, c.unit),
            names[1]: _value(c.b, c.unit),
            _heading(meaning): signed_percent(c.relative),
            "difference": _value(c.change, c.unit),
            "95 % interval": f"{_value(c.low, c.unit)} to {_value(c.high, c.unit)}" if c.low is not None else "–",
            **({} if meaning == _ERROR else {"verdict": c.verdict}),
        }
        for c in changes
        if c.a is not None or c.b is not None
    ]
    st.dataframe(pl.DataFrame(rows), hide_index=True, height="content", column_config=_help(meaning))


def _heading(meaning: str) -> str:
    return "error" if meaning == _ERROR else "change"


def _help(meaning: str) -> dict[str, Any]:
    column = st.column_config.TextColumn
    return {
        "change": column(help="(B − A) ÷ A"),
        "error": column(help="(predicted − observed) ÷ observed"),
        "difference": column(help="predicted − observed" if meaning == _ERROR else "B − A"),
        "verdict": column(help="Within noise: the interval of the difference holds 0."),
    }


def _title(name: str) -> str:
    metric, _, stat = name.partition(".")
    if metric in METRICS:
        return f"{METRICS[metric].title}{' ' + stat if stat else ''}"
    return part(metric).label if stat == "mean" and _is_part(metric) else name.replace("_", " ").replace(".", ", ")


def _is_part(name: str) -> bool:
    try:
        part(name)
    except KeyError:
        return False
    return True


def _value(value: float | None, unit: str) -> str:
    if unit == "ns":
        return duration_text(value)
    if unit == "bytes":
        return bytes_text(value)
    return count_text(value) if value is None or unit in ("", "1") else f"{count_text(value)} {unit}"


def _accounting(a: str, b: str, result: Diff, names: tuple[str, str], meaning: str) -> None:
    st.subheader(
        "Where the time goes",
        anchor=False,
        help="Mean of each part over all requests, and over those around a percentile of end-to-end time.",
    )
    frames, rows = [], []
    sides = [(name, data.report(path).accounting.compositions) for name, path in zip(names, (a, b), strict=True)]
    for key, label in _COMPOSITIONS.items():
        for name, compositions in sides:
            row = f"{label}, {name}"
            frames.append(parts_frame(compositions, {key: row}))
            rows += [row] if key in compositions else []
    st.altair_chart(charts_overview.accounting(pl.concat(frames), rows))
    with st.expander("Parts, mean per request"):
        _plain_table([c for c in result.parts if c.a or c.b], names, meaning)


def _moves(result: Diff, names: tuple[str, str], meaning: str) -> None:
    if not result.moves:
        return
    st.subheader("Moved per output token", anchor=False, help="Σ over moves ÷ output tokens, by how the figure is known.")
    _plain_table(result.moves, names, meaning)


def _plain_table(changes: list[Change], names: tuple[str, str], meaning: str) -> None:
    if not changes:
        st.caption("Nothing of this was recorded.")
        return
    rows = [
        {
            "figure": _title(c.name),
            names[0]: _value(c.a, c.unit),
            names[1]: _value(c.b, c.unit),
            _heading(meaning): signed_percent(c.relative),
            "difference": _value(c.change, c.unit),
        }
        for c in changes
    ]
    st.dataframe(pl.DataFrame(rows), hide_index=True, height="content", column_config=_help(meaning))
