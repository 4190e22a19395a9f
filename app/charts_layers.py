"""Charts of the bottleneck layers: shares of latency over time, and of groups of requests, stacked."""

from __future__ import annotations

import altair as alt
import polars as pl

from hoptrace.analysis.layers.layer_of import LAYERS
from hoptrace.app.charts import seconds
from hoptrace.app.theme import CLASS_COLOURS, GREY

__all__ = ["LAYER_COLOURS", "groups", "over_time"]

# Work is blue on every page, coordination vermilion, carrying orange: the layers that mean the same bear the same colour.
LAYER_COLOURS = {
    "compute": CLASS_COLOURS["work"],
    "state": CLASS_COLOURS["carrying"],
    "scheduling": CLASS_COLOURS["coordination"],
    "unexplained": GREY,
    "undivided": "#C9C9C9",
    "outside": CLASS_COLOURS["sharing"],
}
_RANK = {layer: i for i, layer in enumerate(LAYERS)}


def over_time(frame: pl.DataFrame, origin_ns: int) -> alt.Chart:
    """Shares of each bin, stacked to 100 %. ``frame``: from_ns, to_ns and a column `X_ns` per layer, as ``Layers.over_time`` and
    ``Layers.steps_over_time`` have them; a bin without any time is left empty."""
    columns = [c for layer in LAYERS if (c := f"{layer}_ns") in frame.columns]
    data = (
        seconds(frame, origin_ns, "from_ns", "to_ns")
        .unpivot(on=columns, index=["from_s", "to_s"], variable_name="column", value_name="ns")
        .with_columns(pl.col("column").str.strip_suffix("_ns").alias("layer"), pl.col("ns").fill_null(0))
        .with_columns(pl.col("layer").replace_strict(_RANK, return_dtype=pl.Int64).alias("rank"))
        .filter(pl.col("ns") > 0)
        .sort("from_s", "rank")
        .with_columns((pl.col("ns") / pl.col("ns").sum().over("from_s")).alias("share"))
        .with_columns(pl.col("share").cum_sum().over("from_s").alias("top"))
        .with_columns((pl.col("top") - pl.col("share")).alias("bottom"))
        .drop("column", "rank")
    )
    chart: alt.Chart = (
        alt.Chart(data)
        .mark_rect(strokeWidth=0)
        .encode(
            x=alt.X(
                "from_s:Q", title=None, axis=alt.Axis(grid=False, tickCount=10, labelExpr="format(datum.value, ',~g') + ' s'")
            ),
            x2="to_s:Q",
            y=alt.Y("bottom:Q", title="share", axis=alt.Axis(format="%", tickCount=5), scale=alt.Scale(domain=[0, 1])),
            y2="top:Q",
            color=_colour(data),
            tooltip=[
                alt.Tooltip("layer:N"),
                alt.Tooltip("share:Q", format=".1%"),
                alt.Tooltip("from_s:Q", title="from s", format=",.4f"),
                alt.Tooltip("to_s:Q", title="to s", format=",.4f"),
            ],
        )
        .properties(height=180)
    )
    return chart


def groups(frame: pl.DataFrame, rows: list[str]) -> alt.Chart:
    """One bar per group of requests, from 0 to 100 %. ``frame``: row, layer, share, ns; ``rows`` is the order from the top."""
    data = (
        frame.filter(pl.col("share") > 0)
        .with_columns(pl.col("layer").replace_strict(_RANK, return_dtype=pl.Int64).alias("rank"))
        .sort("row", "rank")
        .with_columns(pl.col("share").cum_sum().over("row").alias("end"), (pl.col("ns") / 1e6).alias("ms"))
        .with_columns((pl.col("end") - pl.col("share")).alias("start"), pl.col("layer").replace_strict(LAYERS).alias("what"))
        .drop("rank", "ns")
    )
    chart: alt.Chart = (
        alt.Chart(data)
        .mark_bar(stroke="white", strokeWidth=0.6, height={"band": 0.72})
        .encode(
            x=alt.X("start:Q", title=None, axis=alt.Axis(format="%", tickCount=5), scale=alt.Scale(domain=[0, 1])),
            x2="end:Q",
            y=alt.Y("row:N", sort=rows, title=None, axis=alt.Axis(domain=False, ticks=False, labelFontSize=13)),
            color=_colour(data),
            tooltip=[
                alt.Tooltip("row:N", title="requests"),
                alt.Tooltip("layer:N"),
                alt.Tooltip("share:Q", format=".1%"),
                alt.Tooltip("ms:Q", title="ms", format=",.4~f"),
                alt.Tooltip("what:N"),
            ],
        )
        .properties(height=60 + 30 * max(1, len(rows)))
    )
    return chart


def _colour(data: pl.DataFrame) -> alt.Color:
    present = set(data["layer"].to_list())
    keys = [k for k in LAYERS if k in present]
    legend = alt.Legend(title=None, orient="top", direction="horizontal", symbolType="square", symbolStrokeWidth=0)
    return alt.Color("layer:N", scale=alt.Scale(domain=keys, range=[LAYER_COLOURS[k] for k in keys]), legend=legend, sort=keys)
