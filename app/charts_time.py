"""Charts of the Time page. They stand above each other: same width, same margin on the left, same window on the x axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import polars as pl

from hoptrace.app.charts import axis_unit, seconds
from hoptrace.app.theme import CLASS_COLOURS, GREY, PHASE_COLOURS, STATE_COLOURS

__all__ = ["BRUSH", "batch", "counter", "occupancy", "rate", "step_time", "strip"]

BRUSH = "window"
_MARGIN = 56
_BLUE = CLASS_COLOURS["work"]
Seconds = tuple[float, float]


def strip(frame: pl.DataFrame, value: str, unit: str, origin_ns: int, window_s: Seconds) -> alt.Chart:
    """The whole range in one low chart: drag over it to choose the window (selection ``window``, encoding x)."""
    brush = alt.selection_interval(name=BRUSH, encodings=["x"])
    chart: alt.Chart = (
        _bars(_valued(frame, value, origin_ns), unit, window_s, opacity=0.55).add_params(brush).properties(height=100)
    )
    return chart


def rate(frame: pl.DataFrame, value: str, unit: str, origin_ns: int, window_s: Seconds) -> alt.Chart:
    """One series as bars. A bin without a value stays empty."""
    chart: alt.Chart = _bars(_valued(frame, value, origin_ns), unit, window_s).properties(height=140)
    return chart


def occupancy(frame: pl.DataFrame, origin_ns: int, window_s: Seconds) -> alt.Chart:
    """Requests in each state, stacked. ``frame``: state, from_ns, to_ns, requests."""
    data = seconds(frame, origin_ns, "from_ns", "to_ns").select(
        "from_s", "to_s", pl.col("state").alias("series"), pl.col("requests").alias("value")
    )
    chart: alt.Chart = _stacked(data, STATE_COLOURS, "requests", window_s).properties(height=190)
    return chart


def batch(frame: pl.DataFrame, origin_ns: int, window_s: Seconds) -> alt.Chart:
    """Tokens in a step by phase, stacked. ``frame``: the steps of a timeline."""
    data = (
        seconds(frame, origin_ns, "from_ns", "to_ns")
        .select("from_s", "to_s", pl.col("decode_tokens").alias("answer"), pl.col("prefill_tokens").alias("prompt"))
        .unpivot(on=["answer", "prompt"], index=["from_s", "to_s"], variable_name="series")
    )
    chart: alt.Chart = _stacked(data, PHASE_COLOURS, "tokens", window_s).properties(height=170)
    return chart


def step_time(frame: pl.DataFrame, origin_ns: int, window_s: Seconds) -> alt.LayerChart:
    """How long a step took: the mean as bars, the longest of the bin as a line above."""
    longest = frame["longest_ns"].max()
    unit, size = axis_unit(float(longest) if isinstance(longest, int) else 0.0)
    data = seconds(frame, origin_ns, "from_ns", "to_ns").select(
        "from_s", "to_s", "steps", (pl.col("step_ns") / size).alias("value"), (pl.col("longest_ns") / size).alias("longest")
    )
    tips = [
        alt.Tooltip("value:Q", title=f"mean {unit}", format=",.4~f"),
        alt.Tooltip("longest:Q", title=f"longest {unit}", format=",.4~f"),
        alt.Tooltip("steps:Q", title="steps"),
        *_when(),
    ]
    bars = _bars(data, unit, window_s).encode(tooltip=tips)
    ticks = (
        alt.Chart(data)
        .mark_rule(color=GREY, strokeWidth=1.5)
        .encode(x=_x(window_s), x2="to_s:Q", y=_y("longest:Q", unit), tooltip=tips)
    )
    chart: alt.LayerChart = (bars + ticks).properties(height=140)
    return chart


def counter(frame: pl.DataFrame, unit: str, scale: float, origin_ns: int, window_s: Seconds) -> alt.Chart:
    """One counter as bars; ``scale`` brings its values to ``unit``. A bin that no sample covers stays empty."""
    scaled = frame.with_columns(pl.col("value") * scale)
    chart: alt.Chart = _bars(_valued(scaled, "value", origin_ns), unit, window_s, colour=GREY).properties(height=110)
    return chart


def _valued(frame: pl.DataFrame, value: str, origin_ns: int) -> pl.DataFrame:
    named = seconds(frame, origin_ns, "from_ns", "to_ns").select("from_s", "to_s", pl.col(value).cast(pl.Float64).alias("value"))
    return named.filter(pl.col("value").is_not_null())


def _x(window_s: Seconds) -> alt.X:
    axis = alt.Axis(title=None, grid=False, tickCount=10, labelExpr="format(datum.value, ',~g') + ' s'")
    return alt.X("from_s:Q", axis=axis, scale=alt.Scale(domain=list(window_s), nice=False))


def _y(field: str, unit: str, flat: bool = False) -> alt.Y:
    text = "abs(datum.value) >= 1e6 ? format(datum.value, '~s') : format(datum.value, ',.3~f')"
    axis = alt.Axis(title=unit, minExtent=_MARGIN, maxExtent=_MARGIN, tickCount=3, labelExpr=text, titlePadding=4)
    # All values 0 would leave an axis without length.
    return alt.Y(
        field, axis=axis, scale=alt.Scale(zero=True, nice=True, domainMax=1) if flat else alt.Scale(zero=True, nice=True)
    )


def _when() -> list[alt.Tooltip]:
    return [alt.Tooltip("from_s:Q", title="from s", format=",.4f"), alt.Tooltip("to_s:Q", title="to s", format=",.4f")]


def _bars(data: pl.DataFrame, unit: str, window_s: Seconds, opacity: float = 0.85, colour: str = _BLUE) -> alt.Chart:
    chart: alt.Chart = (
        alt.Chart(data)
        .mark_rect(color=colour, opacity=opacity, strokeWidth=0, clip=True)
        .encode(
            x=_x(window_s),
            x2="to_s:Q",
            y=_y("value:Q", unit, flat=not (data["value"] > 0).any()),
            y2=alt.Y2Datum(0),
            tooltip=[alt.Tooltip("value:Q", title=unit, format=",.4~f"), *_when()],
        )
    )
    return chart


def _stacked(data: pl.DataFrame, colours: Mapping[str, str], unit: str, window_s: Seconds) -> alt.Chart:
    """``data``: from_s, to_s, series, value. Drawn from the bottom in the order of ``colours``."""
    present = set(data["series"])
    keys = [k for k in colours if k in present]
    stacked = (
        data.filter(pl.col("value").is_not_null())
        .sort(pl.col("series").cast(pl.Enum(keys)))
        .with_columns(pl.col("value").cum_sum().over("from_s").alias("top"))
        .with_columns((pl.col("top") - pl.col("value")).alias("bottom"))
    )
    legend = alt.Legend(
        title=None, orient="top", direction="horizontal", offset=4, padding=0, symbolType="square", symbolStrokeWidth=0
    )
    colour: Any = alt.Color("series:N", scale=alt.Scale(domain=keys, range=[colours[k] for k in keys]), legend=legend, sort=keys)
    chart: alt.Chart = (
        alt.Chart(stacked)
        .mark_rect(strokeWidth=0, clip=True)
        .encode(
            x=_x(window_s),
            x2="to_s:Q",
            y=_y("bottom:Q", unit),
            y2="top:Q",
            color=colour,
            tooltip=[alt.Tooltip("series:N", title=" "), alt.Tooltip("value:Q", title=unit, format=",.4~f"), *_when()],
        )
    )
    return chart
