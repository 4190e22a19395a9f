"""Charts of the Fidelity page."""

from __future__ import annotations

import altair as alt
import polars as pl

from hoptrace.app.theme import CLASS_COLOURS, GREY

__all__ = ["errors"]

_WITHIN, _BEYOND = "within what was seen", "rests on extrapolated step costs"


def errors(frame: pl.DataFrame, names: list[str]) -> alt.LayerChart:
    """Errors of a prediction with their intervals. A figure that rests on extrapolation is drawn in outline; the noise floor is a
    grey band. ``frame``: figure, error_pct, low_pct, high_pct, noise_pct, beyond (bool), text; ``names``: the figures in order.
    """
    data = frame.with_columns(
        pl.when(pl.col("beyond")).then(pl.lit(_BEYOND)).otherwise(pl.lit(_WITHIN)).alias("basis"),
        (-pl.col("noise_pct")).alias("noise_low"),
    )
    y = alt.Y("figure:N", sort=names, title=None, axis=alt.Axis(labelLimit=200, domain=False, ticks=False))
    tooltip = [alt.Tooltip("figure:N", title=" "), alt.Tooltip("text:N", title="error"), alt.Tooltip("basis:N", title="basis")]
    base = alt.Chart(data)
    noise = base.mark_bar(color=GREY, opacity=0.25).encode(x=alt.X("noise_low:Q", title="error, %"), x2="noise_pct:Q", y=y)
    spread = base.mark_rule(color=CLASS_COLOURS["work"], strokeWidth=2).encode(x="low_pct:Q", x2="high_pct:Q", y=y)
    points = base.mark_point(size=70, strokeWidth=2).encode(
        x=alt.X("error_pct:Q", title="error, %"), y=y, tooltip=tooltip, color=alt.value(CLASS_COLOURS["work"]),
        fill=alt.Fill(
            "basis:N",
            scale=alt.Scale(domain=[_WITHIN, _BEYOND], range=[CLASS_COLOURS["work"], "transparent"]),
            legend=alt.Legend(title=None, orient="top"),
        ),
    )  # fmt: skip
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(color=GREY).encode(x="zero:Q")
    height = 22 * max(1, len(names)) + 40
    return alt.LayerChart(layer=[noise, zero, spread, points], height=height)
