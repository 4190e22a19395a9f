"""The verdict for the terminal. Nothing is computed here."""

from __future__ import annotations

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from hoptrace.analysis.compare.verdict import UNTOLD, Verdict

__all__ = ["blocks"]

_MOST = 5


def blocks(v: Verdict, *, full: bool = False) -> list[RenderableType]:
    """The three answers; the costs that were moved, and the trades between latencies (``full``: all of them)."""
    out: list[RenderableType] = []
    for a in v.answers.values():
        style = "dim" if a.answer == UNTOLD else "bold"
        out += [Text(a.question, style=style), Padding(Text(a.sentence), (0, 0, 0, 2))]
    said = [*v.moved, *v.trades]
    if said:
        out.append(
            Text("Moved, not removed" if any(s.is_moved for b in v.balances for s in b.shifts) else "Beside it", style="bold")
        )
        shown = said if full else said[:_MOST]
        out += [Padding(Text(s), (0, 0, 0, 2)) for s in shown]
        if len(said) > len(shown):
            out.append(Padding(Text(f"… and {len(said) - len(shown)} more: --json has all.", style="dim"), (0, 0, 0, 2)))
    elif any(b.falls for b in v.balances) and not any(b.untold for b in v.balances):
        out.append(Text("No cost that fell stands elsewhere, among the figures that both traces show.", style="dim"))
    return out
