"""Charts of the ledger: what moves where, and what a cache of each size would have given."""

from __future__ import annotations

import altair as alt
import polars as pl

from hoptrace.analysis.text import bytes_text
from hoptrace.app.theme import CLASS_COLOURS, GREY

__all__ = ["flows", "reusable_curve"]

_OBJECTS = {
    "weights": CLASS_COLOURS["work"],
    "kv": CLASS_COLOURS["sharing"],
    "activations": CLASS_COLOURS["repeated work"],
    "logits": CLASS_COLOURS["capacity"],
    "tokens": CLASS_COLOURS["coordination"],
    "prompt": CLASS_COLOURS["carrying"],
    "other": GREY,
}
_MOST = 30
_LEAST = 1.0  # a logarithm needs a floor: less than a byte a token is shown as one


def flows(matrix: pl.DataFrame) -> alt.LayerChart:
    """Bytes per output token by way, one bar an object, on a logarithmic axis (own memory moves a million times what the network
    does); in all where the figure per token is unknown.

    ``matrix``: :meth:`hoptrace.analysis.moves.ledger.Ledger.matrix`. The largest 30 rows.
    """
    per = matrix["bytes_per_output_token"].null_count() < matrix.height
    value = "bytes_per_output_token" if per else "bytes"
    data = (
        matrix.with_columns(pl.col(value).cast(pl.Float64).alias("value"))
        .filter(pl.col("value") > 0)
        .sort("value", "way", "object", descending=[True, False, False])
        .head(_MOST)
        .with_columns(
            (pl.col("object") + ": " + pl.col("way") + " (" + pl.col("basis") + ")").alias("row"),
            pl.col("value").clip(_LEAST, None).alias("shown"),
            pl.lit(_LEAST).alias("floor"),
            pl.col("value").map_elements(bytes_text, return_dtype=pl.String).alias("text"),
        )
    )
    base = alt.Chart(data).encode(
        y=alt.Y("row:N", sort=data["row"].to_list(), title=None, axis=alt.Axis(labelLimit=420, domain=False, ticks=False)),
    )
    bars = base.mark_bar(height={"band": 0.72}).encode(
        x=alt.X(
            "shown:Q",
            title="bytes per output token" if per else "bytes",
            scale=alt.Scale(type="log", domainMin=_LEAST, nice=True),
            axis=alt.Axis(format="~s", grid=False, tickCount=6),
        ),
        x2="floor:Q",
        color=alt.Color(
            "object:N",
            scale=alt.Scale(domain=list(_OBJECTS), range=list(_OBJECTS.values())),
            legend=alt.Legend(title=None, orient="top", direction="horizontal", values=data["object"].unique().sort().to_list()),
        ),
        tooltip=[
            alt.Tooltip("object:N"),
            alt.Tooltip("way:N"),
            alt.Tooltip("basis:N", title="known"),
            alt.Tooltip("text:N", title="per output token" if per else "in all"),
            alt.Tooltip("transfers:Q", title="transfers in all", format=","),
        ],
    )
    labels = base.mark_text(align="left", dx=4, fontSize=11).encode(x="shown:Q", text="text:N")
    chart: alt.LayerChart = alt.LayerChart(layer=[bars, labels]).properties(height=40 + 26 * max(1, data.height))
    return chart


def reusable_curve(points: pl.DataFrame) -> alt.LayerChart:
    """Share of prompt blocks that one shared cache would have had, over its capacity.

    ``points``: capacity_blocks, block_share, token_share (null if unknown), ascending; the last row is the cache without a limit,
    its capacity the number of different blocks.
    """
    data = points.unpivot(on=["block_share", "token_share"], index="capacity_blocks", variable_name="of", value_name="share")
    data = data.drop_nulls("share").with_columns(
        pl.col("of").replace_strict({"block_share": "blocks", "token_share": "tokens"}, return_dtype=pl.String)
    )
    scale = alt.Scale(domain=["blocks", "tokens"], range=[CLASS_COLOURS["work"], CLASS_COLOURS["carrying"]])
    base = alt.Chart(data).encode(
        x=alt.X(
            "capacity_blocks:Q", title="capacity in blocks", scale=alt.Scale(type="log"), axis=alt.Axis(format="~s", tickCount=6)
        ),
        y=alt.Y("share:Q", title="found in the cache", axis=alt.Axis(format="%"), scale=alt.Scale(zero=True)),
        color=alt.Color("of:N", scale=scale, legend=alt.Legend(title=None, orient="top", direction="horizontal")),
        tooltip=[
            alt.Tooltip("capacity_blocks:Q", title="blocks", format=","),
            alt.Tooltip("of:N", title="share of"),
            alt.Tooltip("share:Q", format=".2%"),
        ],
    )
    chart: alt.LayerChart = alt.LayerChart(layer=[base.mark_line(), base.mark_point(filled=True, size=50)]).properties(height=220)
    return chart
