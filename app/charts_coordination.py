"""Chart of coordination: operations per token by kind. Report and app use it."""

from __future__ import annotations

import math

import altair as alt
import polars as pl

from hoptrace.app.theme import CLASS_COLOURS, GREY

__all__ = ["operations"]

_ORDER = ("counted", "derived", "unstated", "assumed")
_COLOUR = CLASS_COLOURS["coordination"]


def operations(frame: pl.DataFrame, per: str = "per_output_token") -> alt.Chart:
    """Operations by kind on a logarithmic axis, a bar per kind and basis: filled where counted, paler where derived, an outline
    where assumed. A kind that nobody recorded has no bar, since unknown is not 0.

    ``frame``: :attr:`coordination.Coordination.operations`: kind, on, basis, source, operations, at_least and
    ``per``, one of per_output_token, per_request, per_step.
    """
    words = per.removeprefix("per_").replace("_", " ")
    data = (
        frame.filter(pl.col(per) > 0)
        .group_by("kind", "basis", maintain_order=True)
        .agg(
            pl.col(per).sum().alias("each"),
            pl.col("operations").sum(),
            pl.col("at_least").any(),
            pl.col("on").drop_nulls().unique(maintain_order=True).str.join(", ").alias("of"),
            pl.col("source").unique(maintain_order=True).str.join("; ").alias("source"),
        )
    )
    # A logarithmic axis has no zero: bars begin a decade below the smallest.
    smallest = data["each"].min()
    low = 10.0 ** math.floor(math.log10(smallest) - 0.5) if isinstance(smallest, float) else 0.1
    data = data.with_columns(
        pl.lit(low).alias("low"),
        (pl.col("kind") + pl.when(pl.col("basis") == "assumed").then(pl.lit(", assumed")).otherwise(pl.lit(""))).alias("row"),
        pl.when("at_least").then(pl.lit("at least")).otherwise(pl.lit("all")).alias("known"),
    ).drop("at_least")
    base = alt.Chart(data).encode(
        y=alt.Y("row:N", sort=list(dict.fromkeys(data["row"].to_list())), title=None, axis=alt.Axis(domain=False, ticks=False)),
        x=alt.X(
            "low:Q",
            scale=alt.Scale(type="log", domainMin=low),
            title=f"operations per {words} (logarithmic)",
            axis=alt.Axis(format="~g", grid=True, values=[10.0**k for k in range(-9, 10)]),
        ),
        x2="each:Q",
        tooltip=[
            alt.Tooltip("kind:N"),
            alt.Tooltip("each:Q", title=f"per {words}", format=",.3~g"),
            alt.Tooltip("known:N"),
            alt.Tooltip("operations:Q", format=","),
            alt.Tooltip("of:N"),
            alt.Tooltip("basis:N"),
            alt.Tooltip("source:N", title="from"),
        ],
    )
    chart: alt.Chart = base.mark_bar(strokeWidth=1.4, height={"band": 0.7}).encode(
        fill=alt.Fill(
            "basis:N",
            scale=alt.Scale(domain=list(_ORDER), range=[_COLOUR, "#F0B48C", GREY, "#FFFFFF"]),
            legend=alt.Legend(
                title=None, orient="top", symbolStrokeColor=_COLOUR, values=[b for b in _ORDER if b in data["basis"]]
            ),
        ),
        stroke=alt.value(_COLOUR),
    )
    return chart.properties(height=alt.Step(22))
