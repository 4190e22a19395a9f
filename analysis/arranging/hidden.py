"""The five hidden kinds of carrying: work that looks like arranging, computing or asking, and is data or news being carried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hoptrace.analysis.arranging.hidden_confirm import confirm
from hoptrace.analysis.arranging.hidden_remote import remote
from hoptrace.analysis.arranging.hidden_shared import shared
from hoptrace.analysis.arranging.hidden_split import split
from hoptrace.analysis.arranging.hidden_terms import TERMS
from hoptrace.analysis.arranging.hidden_unlike import unlike
from hoptrace.analysis.arranging.hidden_view import Figure, Seen, View
from hoptrace.analysis.arranging.steptotals import step_totals
from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.moves.ledger import Ledger, ledger
from hoptrace.analysis.query import query
from hoptrace.reader import Trace
from hoptrace.step_source import StepSource, step_source

__all__ = ["TERMS", "Figure", "Hidden", "View", "hidden"]


@dataclass(frozen=True)
class Hidden:
    """The five views. Their times may overlap (a poll within a hand-over is in both): they are never added up.

    ``unseen``: what cannot be shown, over all five; ``notes``: how to read them.
    """

    split: View
    confirm: View
    unlike: View
    shared: View
    remote: View
    unseen: list[str]
    notes: list[str]

    def __iter__(self) -> Iterator[View]:
        return iter((self.split, self.confirm, self.unlike, self.shared, self.remote))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: one entry per view, by its name."""
        return {**{v.name: v.as_dict() for v in self}, "unseen": self.unseen, "notes": self.notes}


def hidden(
    trace: Trace, *, steps: StepSource | None = None, accounting: Accounting | None = None, moved: Ledger | None = None
) -> Hidden:
    """The five hidden kinds of carrying of any trace. What has been computed already may be handed in.

    Raises:
        InputError: a table is damaged.
    """
    source = steps if steps is not None else step_source(trace)
    accounting = accounting if accounting is not None else account(trace)
    moved = moved if moved is not None else ledger(trace)
    done = query(trace, "hidden_finished").row(0, named=True)
    whole = accounting.compositions.get("all")
    seen = Seen(
        trace=trace,
        accounting=accounting,
        totals=step_totals(source),
        waits=query(trace, "coordination_waits"),
        confirm=query(trace, "hidden_confirm"),
        tokens=moved.output_tokens,
        finished=0 if whole is None else whole.requests,
        finished_tokens=done["output_tokens"],
        e2e_ns=None if whole is None else round(whole.e2e_ns * whole.requests),
    )
    views = (split(seen), confirm(seen), unlike(seen), shared(seen), remote(seen))
    return Hidden(*views, unseen=list(dict.fromkeys(s for v in views for s in v.unseen)), notes=[_NOTE])


_NOTE = "The five times are seen from five sides and may be of the same nanoseconds: they are not to be added up."
