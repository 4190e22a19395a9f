"""Predicted beside observed, and how quiet the machine was meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from hoptrace.replay.fidelity import Comparison, Difference

__all__ = ["print_comparison", "quiet_enough"]

_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "queue": "queue", "throughput": "throughput"}

# Above this share of time in which the server waited for a CPU, latencies are the machine's as much as the server's:
# on a busy two-core machine, identical runs were seen to spread by 30 to 90 %.
_DISTURBED = 0.10


def print_comparison(out: Console, title: str, comparison: Comparison) -> None:
    """One row a figure: predicted, observed, error; notes below."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "observed", "error"):
        table.add_column(name, justify="right")
    for d in comparison.differences:
        table.add_row(
            f"{_NAMES.get(d.metric, d.metric)} {d.statistic}", _figure(d, d.predicted), _figure(d, d.observed), _error(d)
        )
    out.print(f"[bold]{title}[/bold]", soft_wrap=True)
    out.print(table)
    for note in comparison.notes:
        out.print(note, soft_wrap=True)


def quiet_enough(delays: dict[str, float | None]) -> tuple[bool | None, str]:
    """Whether the machine was quiet, from the share of time that each run's server waited for a CPU; and that in a sentence."""
    known = {name: share for name, share in delays.items() if share is not None}
    if len(known) < len(delays):
        return None, "How long the server waited for a CPU is unknown, so the error may be the machine's."
    said = ", ".join(f"{100 * share:.0f} % ({name})" for name, share in known.items())
    if all(share <= _DISTURBED for share in known.values()):
        return True, f"The machine was quiet: the server waited for a CPU {said} of the time it wanted one."
    return (
        False,
        f"The machine was NOT quiet: the server waited for a CPU {said} of the time it wanted one. "
        "The errors above are other processes' as much as the model's: run the demo again on a quiet machine.",
    )


def _figure(d: Difference, value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / 1e6:,.1f} ms" if d.unit == "ns" else f"{value:,.2f} /s"


def _error(d: Difference) -> str:
    return "" if d.error_pct is None else f"{d.error_pct:+.1f} %"
