"""Predicted beside observed, and how quiet the machine was meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hoptrace.cli.figures import figure, percent_off

if TYPE_CHECKING:
    from hoptrace.comparison import Comparison

__all__ = ["drift", "print_comparison", "quiet_enough"]

_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "queue": "queue", "throughput": "throughput"}

# Above this share of the busy CPU time, latencies are the other processes' as much as the server's: on a busy two-core machine
# identical runs were seen to spread by 30 to 90 %.
_DISTURBED = 0.10


def print_comparison(out: Console, title: str, comparison: Comparison) -> None:
    """One row a figure: predicted, observed, error; notes below."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "observed", "error"):
        table.add_column(name, justify="right")
    for d in comparison.differences:
        cells = figure(d.predicted, d.unit), figure(d.observed, d.unit), percent_off(d.error_pct)
        table.add_row(f"{_NAMES.get(d.metric, d.metric)} {d.statistic}", *cells)
    out.print(f"[bold]{title}[/bold]", soft_wrap=True)
    out.print(table)
    for note in comparison.notes:
        out.print(note, soft_wrap=True)


def quiet_enough(others: dict[str, float | None]) -> tuple[bool | None, str]:
    """Whether the machine was quiet, from the share of busy CPU time that others took in each run; and that in a sentence."""
    known = {name: share for name, share in others.items() if share is not None}
    if len(known) < len(others):
        return None, "How much of the machine others used is unknown, so the error may be theirs."
    said = ", ".join(f"{100 * share:.0f} % ({name})" for name, share in known.items())
    if all(share <= _DISTURBED for share in known.values()):
        return True, f"The machine was quiet: others took {said} of its busy CPU time."
    return (
        False,
        f"The machine was NOT quiet: others took {said} of its busy CPU time. The errors above are theirs as much as the "
        "model's: run the demo again on a quiet machine.",
    )


def drift(slower: float | None, steady: Comparison) -> str:
    """How much of the error is the speed of the machine, which no replay can foresee, in a sentence."""
    if slower is None:
        return "How fast the machine was in the second capture is unknown."
    left = ", ".join(f"{_NAMES[m]} {percent_off(steady.get(m, 'mean').error_pct)}" for m in ("ttft", "itl", "e2e"))
    more = f"{100 * abs(slower - 1):.0f} % {'longer' if slower >= 1 else 'less'}"
    return (
        f"Equal steps took {more} in the second capture: the machine's drift, or the step cost. "
        f"With each step at the second capture's own speed, the error of the means is {left}."
    )
