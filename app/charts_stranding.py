"""Charts of stranding and reversibility: KV space in use over time, and what could be handed over within T."""

from __future__ import annotations

import altair as alt
import polars as pl

from hoptrace.app.charts import MAX_ROWS, seconds
from hoptrace.app.theme import CLASS_COLOURS, GREY

__all__ = ["drain", "reclaimable", "space_in_use"]

_SHOWN = {"in use": CLASS_COLOURS["work"], "stranded": CLASS_COLOURS["coordination"], "idle": "#D9D9D9"}


def space_in_use(series: pl.DataFrame, origin_ns: int) -> alt.FacetChart:
    """One strip a KV space: in use, stranded and other idle, as shares of its size. ``series``: of :class:`Stranding`; spaces
    that do not tell their size are left out."""
    share = pl.col("provisioned")
    data = (
        seconds(series.filter(share > 0), origin_ns, "from_ns", "to_ns")
        .with_columns(
            (pl.col("used") / share).alias("in use"),
            (pl.col("stranded").fill_null(0.0) / share).clip(0.0).alias("stranded"),
        )
        .with_columns((1 - pl.col("in use") - pl.col("stranded")).clip(0.0).alias("idle"))
        .unpivot(on=list(_SHOWN), index=["name", "from_s", "to_s"], variable_name="what", value_name="share")
        .sort(pl.col("what").cast(pl.Enum(list(_SHOWN))))
        .with_columns(pl.col("share").cum_sum().over("name", "from_s").alias("top"))
        .with_columns((pl.col("top") - pl.col("share")).alias("bottom"))
    )
    legend = alt.Legend(title=None, orient="top", direction="horizontal", symbolType="square", symbolStrokeWidth=0)
    keys = list(_SHOWN)
    bars = (
        alt.Chart(data)
        .mark_rect(strokeWidth=0)
        .encode(
            x=alt.X("from_s:Q", title="s", scale=alt.Scale(nice=False)),
            x2="to_s:Q",
            y=alt.Y("bottom:Q", title=None, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%", tickCount=3)),
            y2="top:Q",
            color=alt.Color("what:N", scale=alt.Scale(domain=keys, range=[_SHOWN[k] for k in keys]), sort=keys, legend=legend),
            tooltip=[
                alt.Tooltip("name:N", title="KV space"),
                alt.Tooltip("what:N", title=" "),
                alt.Tooltip("share:Q", format=".1%"),
                alt.Tooltip("from_s:Q", title="from s", format=",.4f"),
                alt.Tooltip("to_s:Q", title="to s", format=",.4f"),
            ],
        )
        .properties(height=90, width=640)
    )
    chart: alt.FacetChart = bars.facet(
        row=alt.Row("name:N", title=None, header=alt.Header(labelAngle=0, labelAlign="left", labelOrient="top"))
    )
    return chart


def reclaimable(frame: pl.DataFrame) -> alt.LayerChart:
    """Share that could be handed over within T: mean as bars, the worst moment as ticks. ``frame``: what (KV, slots), name,
    horizon_s, mean, worst."""
    data = frame.with_columns(
        pl.format("{} of {}", "what", "name").alias("of"), pl.format("{} s", pl.col("horizon_s").cast(pl.String)).alias("within")
    )
    order = [f"{h} s" for h in sorted(frame["horizon_s"].unique().to_list())]
    base = alt.Chart(data).encode(
        y=alt.Y("of:N", title=None, axis=alt.Axis(labelLimit=220, domain=False, ticks=False)),
        yOffset=alt.YOffset("within:N", sort=order),
        tooltip=[
            alt.Tooltip("of:N", title=" "),
            alt.Tooltip("within:N"),
            alt.Tooltip("mean:Q", format=".1%"),
            alt.Tooltip("worst:Q", format=".1%"),
        ],
    )
    bars: alt.Chart = base.mark_bar(height={"band": 0.9}).encode(
        x=alt.X("mean:Q", title="share", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
        color=alt.Color(
            "within:N",
            sort=order,
            scale=alt.Scale(domain=order, range=["#004C78", "#0072B2", "#56B4E9", "#BFE3F7"][: len(order)]),
            legend=alt.Legend(title="within", orient="top", direction="horizontal", symbolType="square", symbolStrokeWidth=0),
        ),
    )
    worst: alt.Chart = base.mark_tick(thickness=2, color=GREY).encode(x=alt.X("worst:Q"))
    height = 40 + 68 * max(1, data["of"].n_unique())
    chart: alt.LayerChart = alt.layer(bars, worst).resolve_scale(color="independent").properties(height=height, width=640)
    return chart


def drain(moments: pl.DataFrame, origin_ns: int) -> alt.Chart:
    """Drain time of each server and role over time. ``moments``: of :class:`Reversibility`."""
    found = moments.filter((pl.col("what") == "drain") & pl.col("drain_ns").is_not_null())
    if found.filter(pl.col("kind") == "role")["name"].n_unique() < 2:
        found = found.filter(pl.col("kind") != "role")  # it would be all servers in one
    found = found.gather_every(-(-max(found.height, 1) // MAX_ROWS))
    data = (
        seconds(found, origin_ns, "time_ns")
        .with_columns(
            (pl.col("drain_ns") / 1e9).alias("drain_s"),
            pl.when(pl.col("kind") == "role").then(pl.format("role {}", "name")).otherwise("name").alias("of"),
        )
        .select("of", "time_s", "drain_s")
    )
    chart: alt.Chart = (
        alt.Chart(data)
        .mark_line(interpolate="step-after", strokeWidth=1.5)
        .encode(
            x=alt.X("time_s:Q", title="s", scale=alt.Scale(nice=False)),
            y=alt.Y("drain_s:Q", title="s until drained"),
            color=alt.Color("of:N", legend=alt.Legend(title=None, orient="top")),
            tooltip=[
                alt.Tooltip("of:N", title=" "),
                alt.Tooltip("time_s:Q", format=",.3f"),
                alt.Tooltip("drain_s:Q", format=",.3~f"),
            ],
        )
        .properties(height=140, width=640)
    )
    return chart
