"""Charts of the Overview page, used by Compare too: what latency is made of, stacked by part and coloured by class."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from hoptrace.analysis.latency.composition import Composition
from hoptrace.analysis.latency.parts import PARTS
from hoptrace.app.charts import CLASS_SCALE, axis_unit
from hoptrace.app.theme import classes, inks, order

__all__ = ["accounting", "class_shares", "parts_frame"]

_NAMED_FROM = 0.09
"""A segment narrower than this share of the longest bar bears no name: the tooltip and the table do."""

_PER_LETTER = 0.01
"""A letter is about 6 px wide, the longest bar about 600 px in the narrowest of the charts: a name must fit its segment."""

_INK = alt.Color("class:N", scale=alt.Scale(domain=classes(), range=inks()), legend=None)


def accounting(frame: pl.DataFrame, rows: list[str]) -> alt.LayerChart:
    """One bar per row, one segment per part.

    ``frame``: row, part (label), class, ns, share (of the row's latency), doc. ``rows`` is the order from the top.
    """
    rank = {label: i for i, label in enumerate(order())}
    kind = {c: i for i, c in enumerate(classes())}
    segments = (
        frame.filter(pl.col("ns") > 0)
        .with_columns(
            (pl.col("class").replace_strict(kind, default=99) * 100 + pl.col("part").replace_strict(rank, default=99)).alias(
                "rank"
            )
        )
        .sort("row", "rank")
        .with_columns(pl.col("ns").cum_sum().over("row").alias("end_ns"))
    )
    longest = segments["end_ns"].max()
    unit, size = axis_unit(float(longest) if isinstance(longest, int | float) else 0.0)
    data = segments.with_columns(
        (pl.col("ns") / size).alias("time"),
        (pl.col("end_ns") / size).alias("end"),
        ((pl.col("end_ns") - pl.col("ns")) / size).alias("start"),
        ((pl.col("end_ns") - pl.col("ns") / 2) / size).alias("middle"),
        (
            pl.col("ns") >= pl.max_horizontal(_NAMED_FROM, pl.col("part").str.len_chars() * _PER_LETTER) * pl.col("end_ns").max()
        ).alias("wide"),
    ).drop("ns", "end_ns", "rank")
    base = alt.Chart(data).encode(
        y=alt.Y("row:N", sort=rows, title=None, axis=alt.Axis(labelLimit=220, domain=False, ticks=False, labelFontSize=13)),
    )
    bars = base.mark_bar(stroke="white", strokeWidth=0.6, height={"band": 0.72}).encode(
        x=alt.X("start:Q", title=f"{unit} from arrival to finish", axis=alt.Axis(format=",.3~f", grid=True)),
        x2="end:Q",
        color=alt.Color(
            "class:N",
            scale=CLASS_SCALE,
            legend=alt.Legend(
                title=None, orient="top", direction="horizontal", columns=7, symbolType="square", symbolStrokeWidth=0
            ),
        ),
        tooltip=[
            alt.Tooltip("row:N", title="requests"),
            alt.Tooltip("part:N"),
            alt.Tooltip("class:N"),
            alt.Tooltip("time:Q", title=unit, format=",.4~f"),
            alt.Tooltip("share:Q", format=".1%"),
            alt.Tooltip("doc:N", title="what"),
        ],
    )
    names = (
        base.transform_filter("datum.wide")
        .mark_text(fontSize=11, fontWeight="bold")
        .encode(x="middle:Q", text="part:N", color=_INK)
    )
    chart: alt.LayerChart = (
        alt.layer(bars, names).resolve_scale(color="independent").properties(height=130 + 36 * max(1, len(rows)))
    )
    return chart


def class_shares(frame: pl.DataFrame) -> alt.LayerChart:
    """One bar from 0 to 100 %. ``frame``: class, share, doc. The legend names the classes that are there."""
    kind = {c: i for i, c in enumerate(classes())}
    data = (
        frame.filter(pl.col("share") > 0)
        .sort(pl.col("class").replace_strict(kind, default=99))
        .with_columns(pl.col("share").cum_sum().alias("end"))
        .with_columns(
            (pl.col("end") - pl.col("share")).alias("start"),
            (pl.col("end") - pl.col("share") / 2).alias("middle"),
            (pl.col("share") >= _NAMED_FROM).alias("wide"),
        )
    )
    base = alt.Chart(data)
    bars = base.mark_bar(stroke="white", strokeWidth=0.6, size=40).encode(
        x=alt.X("start:Q", title=None, axis=alt.Axis(format="%", tickCount=5, grid=False), scale=alt.Scale(domain=[0, 1])),
        x2="end:Q",
        color=alt.Color(
            "class:N",
            scale=CLASS_SCALE,
            legend=alt.Legend(
                title=None,
                orient="bottom",
                direction="horizontal",
                columns=4,
                symbolType="square",
                symbolStrokeWidth=0,
                values=data["class"].to_list(),
            ),
        ),
        tooltip=[alt.Tooltip("class:N"), alt.Tooltip("share:Q", format=".2%"), alt.Tooltip("doc:N", title="what")],
    )
    names = (
        base.transform_filter("datum.wide")
        .mark_text(fontSize=13, fontWeight="bold")
        .encode(x="middle:Q", text=alt.Text("share:Q", format=".0%"), color=_INK)
    )
    chart: alt.LayerChart = alt.layer(bars, names).resolve_scale(color="independent").properties(height=140)
    return chart


def parts_frame(compositions: dict[str, Composition], names: dict[str, str]) -> pl.DataFrame:
    """row, part, class, ns, share, doc: what the accounting chart and its table show. ``names``: composition → row."""
    rows: list[dict[str, Any]] = []
    for key, name in names.items():
        whole = compositions.get(key)
        if whole is None:
            continue
        shares = whole.part_shares
        for p in PARTS:
            row = {
                "row": name,
                "part": p.label,
                "class": p.klass,
                "ns": whole.parts[p.name],
                "share": shares[p.name],
                "doc": p.doc,
            }
            rows.append(row)
    schema = {"row": pl.String, "part": pl.String, "class": pl.String, "ns": pl.Float64, "share": pl.Float64, "doc": pl.String}
    return pl.DataFrame(rows, schema=schema)
