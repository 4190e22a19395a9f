"""Charts of the Requests page."""

from __future__ import annotations

import altair as alt
import polars as pl

from hoptrace.app.charts import CLASS_SCALE, axis_unit, seconds
from hoptrace.app.theme import GREY, classes

__all__ = ["PICK", "neighbours", "scatter", "waterfall"]

PICK = "picked"


def scatter(frame: pl.DataFrame) -> alt.Chart:
    """TTFT against prompt length, coloured by the class of the largest part; a click picks a request (selection ``picked``).

    ``frame``: request, request_id, prompt_tokens, output_tokens, ttft_ns, e2e_ns, largest_part, largest_class.
    """
    known = frame.filter(pl.col("ttft_ns").is_not_null() & pl.col("prompt_tokens").is_not_null())
    longest = known["ttft_ns"].max()
    unit, size = axis_unit(float(longest) if isinstance(longest, int) else 0.0)
    data = known.select(
        "request",
        pl.col("request_id").fill_null("").str.slice(0, 80),
        "prompt_tokens",
        "output_tokens",
        (pl.col("ttft_ns") / size).alias("ttft"),
        (pl.col("e2e_ns") / size).alias("e2e"),
        pl.col("largest_part").fill_null("unknown"),
        pl.col("largest_class").fill_null("unexplained").alias("class"),
    )
    pick = alt.selection_point(name=PICK, fields=["request"], on="click")
    present = _present(data)
    chart: alt.Chart = (
        alt.Chart(data)
        .mark_circle(size=70, stroke="white", strokeWidth=0.4)
        .encode(
            x=alt.X("prompt_tokens:Q", title="prompt tokens", scale=alt.Scale(zero=True)),
            y=alt.Y("ttft:Q", title=f"TTFT {unit}", scale=alt.Scale(zero=True)),
            color=alt.Color(
                "class:N",
                scale=CLASS_SCALE,
                legend=alt.Legend(
                    title="largest part is",
                    orient="top",
                    direction="horizontal",
                    symbolType="circle",
                    symbolStrokeWidth=0,
                    values=present,
                ),
            ),
            opacity=alt.condition(pick, alt.value(0.9), alt.value(0.25)),
            tooltip=[
                alt.Tooltip("request:Q", format="d"),
                alt.Tooltip("request_id:N", title="id"),
                alt.Tooltip("prompt_tokens:Q", title="prompt tokens", format=","),
                alt.Tooltip("output_tokens:Q", title="output tokens", format=","),
                alt.Tooltip("ttft:Q", title=f"TTFT {unit}", format=",.4~f"),
                alt.Tooltip("e2e:Q", title=f"end to end {unit}", format=",.4~f"),
                alt.Tooltip("largest_part:N", title="largest part"),
            ],
        )
        .add_params(pick)
        .properties(height=380)
    )
    return chart


def waterfall(spans: pl.DataFrame, tokens: pl.DataFrame, origin_ns: int) -> alt.LayerChart:
    """One request: a row per part in the order of its first appearance, bars where its time was spent, below a tick per read.

    ``tokens``: as in :class:`hoptrace.analysis.request_detail.Detail`.
    """
    bars, unit, size = _bars(spans, origin_ns)
    rows = bars["label"].unique(maintain_order=True).to_list()
    names = [*rows, "tokens"] if tokens.height else rows
    y = alt.Y(
        "label:N",
        sort=names,
        title=None,
        axis=alt.Axis(labelLimit=160, labelOverlap=False, domain=False, ticks=False),
        scale=alt.Scale(domain=names),
    )
    ticks = tokens.select(
        ((pl.col("time_ns") - origin_ns) / size).alias("start"),
        pl.lit("tokens").alias("label"),
        pl.col("index").cast(pl.String).fill_null("unknown"),
        pl.col("count").cast(pl.String).fill_null("unknown"),
    )
    marks = (
        alt.Chart(ticks)
        .mark_tick(color=GREY, thickness=1.2, size=16)
        .encode(
            x="start:Q",
            y=y,
            tooltip=[
                alt.Tooltip("index:N", title="token"),
                alt.Tooltip("count:N", title="tokens in it"),
                alt.Tooltip("start:Q", title=unit),
            ],
        )
    )
    height = 110 + 28 * max(1, len(names))
    chart: alt.LayerChart = alt.layer(_span_chart(bars, unit, y), marks).properties(height=height)  # type: ignore[assignment]
    return chart


def neighbours(spans: pl.DataFrame, request: int, own: pl.DataFrame, origin_ns: int) -> alt.Chart:
    """The requests that ran beside it, one row each, on the same axis; the request itself on top."""
    both = pl.concat([own.with_columns(pl.lit(request, pl.Int64).alias("request")).select(spans.columns), spans])
    bars, unit, _ = _bars(both, origin_ns)
    first = both.group_by("request").agg(pl.col("start_ns").min()).sort("start_ns", "request")["request"].to_list()
    names = [f"request {r}" for r in (request, *(r for r in first if r != request))]
    named = bars.with_columns(pl.format("request {}", "request").alias("row"))
    y = alt.Y(
        "row:N",
        sort=names,
        title=None,
        axis=alt.Axis(labelLimit=160, labelOverlap=False, domain=False, ticks=False),
        scale=alt.Scale(domain=names),
    )
    chart: alt.Chart = _span_chart(named, unit, y).properties(height=120 + 24 * len(names))
    return chart


def _bars(spans: pl.DataFrame, origin_ns: int) -> tuple[pl.DataFrame, str, float]:
    """Spans in the unit that suits them: start, end, length since ``origin_ns``."""
    longest = spans["end_ns"].max()
    unit, size = axis_unit(float(longest - origin_ns) if isinstance(longest, int) else 0.0)
    frame = seconds(spans, origin_ns, "start_ns", "end_ns").with_columns(
        (pl.col("start_s") * 1e9 / size).alias("start"),
        (pl.col("end_s") * 1e9 / size).alias("end"),
        ((pl.col("end_ns") - pl.col("start_ns")) / size).alias("length"),
    )
    return frame.drop("start_s", "end_s", "start_ns", "end_ns"), unit, size


def _present(frame: pl.DataFrame) -> list[str]:
    """The classes in ``frame``, in their fixed order."""
    have = set(frame["class"])
    return [c for c in classes() if c in have]


def _span_chart(bars: pl.DataFrame, unit: str, y: alt.Y) -> alt.Chart:
    legend = alt.Legend(
        title=None, orient="top", direction="horizontal", symbolType="square", symbolStrokeWidth=0, values=_present(bars)
    )
    chart: alt.Chart = (
        alt.Chart(bars)
        # An outline in the bar's own colour: what is shorter than a pixel is still seen.
        .mark_bar(strokeWidth=1.2, height={"band": 0.75})
        .encode(
            x=alt.X("start:Q", title=f"{unit} since the request arrived", axis=alt.Axis(grid=True)),
            x2="end:Q",
            y=y,
            color=alt.Color("class:N", scale=CLASS_SCALE, legend=legend),
            stroke=alt.Stroke("class:N", scale=CLASS_SCALE, legend=legend),
            tooltip=[
                alt.Tooltip("label:N", title="part"),
                alt.Tooltip("class:N"),
                alt.Tooltip("start:Q", title=f"from {unit}", format=",.4~f"),
                alt.Tooltip("end:Q", title=f"to {unit}", format=",.4~f"),
                alt.Tooltip("length:Q", title=f"length {unit}", format=",.4~f"),
            ],
        )
    )
    return chart
