"""Predicted beside observed, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from hoptrace.replay.fidelity import Comparison, Difference

__all__ = ["comparison_table"]

_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "queue": "queue", "throughput": "throughput"}


def comparison_table(title: str, comparison: Comparison) -> Table:
    """One row a figure: observed, predicted, error. Notes of the comparison stand below."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "observed", "error"):
        table.add_column(name, justify="right")
    for d in comparison.differences:
        table.add_row(
            f"{_NAMES.get(d.metric, d.metric)} {d.statistic}", _figure(d, d.predicted), _figure(d, d.observed), _error(d)
        )
    if comparison.notes:
        table.caption = " ".join(comparison.notes)
        table.caption_justify = "left"
    return table


def _figure(d: Difference, value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / 1e6:,.1f} ms" if d.unit == "ns" else f"{value:,.2f} /s"


def _error(d: Difference) -> str:
    return "" if d.error_pct is None else f"{d.error_pct:+.1f} %"
