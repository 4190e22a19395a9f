"""Charts of the Compare page."""

from __future__ import annotations

import altair as alt
import polars as pl

from hoptrace.app.charts import axis_unit
from hoptrace.app.theme import SIDE_COLOURS

__all__ = ["percentiles"]


def percentiles(frame: pl.DataFrame, sides: list[str]) -> alt.Chart:
    """One metric: a pair of bars per statistic. ``frame``: stat, side, ns, text. ``sides`` names the two, in order."""
    longest = frame["ns"].max()
    unit, size = axis_unit(float(longest) if isinstance(longest, int | float) else 0.0)
    stats = frame["stat"].unique(maintain_order=True).to_list()
    data = frame.filter(pl.col("ns").is_not_null()).with_columns((pl.col("ns") / size).alias("time")).drop("ns")
    chart: alt.Chart = (
        alt.Chart(data)
        .mark_bar()
        .encode(
            x=alt.X("stat:N", sort=stats, title=None, axis=alt.Axis(labelAngle=0, domain=False, ticks=False)),
            xOffset=alt.XOffset("side:N", sort=sides),
            y=alt.Y("time:Q", title=unit, axis=alt.Axis(tickCount=4, format=",.3~f")),
            color=alt.Color(
                "side:N",
                sort=sides,
                scale=alt.Scale(domain=sides, range=list(SIDE_COLOURS)),
                legend=alt.Legend(
                    title=None, orient="top", direction="vertical", labelLimit=260, symbolType="square", symbolStrokeWidth=0
                ),
            ),
            tooltip=[
                alt.Tooltip("side:N", title=" "),
                alt.Tooltip("stat:N", title="statistic"),
                alt.Tooltip("text:N", title="value"),
            ],
        )
        .properties(height=250)
    )
    return chart
