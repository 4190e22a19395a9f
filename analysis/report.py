"""The report on one trace: headline, accounting, ledger, coordination, and what cannot be seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.accounting import Accounting, account
from hoptrace.analysis.coordination import Coordination, coordination
from hoptrace.analysis.ledger import Ledger, ledger
from hoptrace.analysis.parts import CLASSES, part
from hoptrace.analysis.serverstate import changes
from hoptrace.analysis.text import bytes_text, count_text, counted, percent
from hoptrace.metrics import Summary, summary
from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of

__all__ = ["SCHEMA", "Report", "headline", "none_seen", "origin_note", "report", "warnings"]

SCHEMA = "hoptrace.report/1"
# Runs in which others took more than a tenth of the CPU spread by tens of per cent (measured on a two-core machine).
_FOREIGN = 0.1


@dataclass(frozen=True)
class Report:
    """Everything that the report says; :mod:`hoptrace.analysis.report_text` renders it, ``as_dict`` gives it as JSON.

    ``headline`` is one sentence in words; ``origin_note`` says how the trace came to be; ``warnings`` are what a reader must
    know before the figures (rows dropped, not closed, closed loop …); ``unseen`` is what the trace cannot show.
    """

    name: str
    origin: str
    origin_note: str
    headline: str
    metrics: Summary
    accounting: Accounting
    ledger: Ledger
    coordination: Coordination
    warnings: list[str]
    unseen: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values, stable under :data:`SCHEMA`: fields may be added, never change or go."""
        a = self.accounting
        se = a.interference_se["interference_se_ns"].drop_nulls()
        return {
            "schema": SCHEMA,
            "trace": self.name,
            "origin": self.origin,
            "origin_note": self.origin_note,
            "headline": self.headline,
            "metrics": self.metrics.as_dict(),
            "accounting": {
                "requests": {
                    "finished": a.finished,
                    "failed": a.failed,
                    "unfinished": a.unfinished,
                    "impossible": a.impossible,
                },
                "classes": list(CLASSES),
                "compositions": {k: c.as_dict() for k, c in a.compositions.items()},
                "tail": a.tail.as_dict() if a.tail else None,
                "interference_se_ns": round(float(se.sum()) / se.len()) if se.len() else None,
                "steps_origin": a.steps_origin,
                "notes": a.notes,
            },
            "ledger": self.ledger.as_dict(),
            "coordination": self.coordination.as_dict(),
            "warnings": self.warnings,
            "unseen": self.unseen,
        }


def report(trace: Trace) -> Report:
    """The report on any trace, whatever it lacks.

    Raises:
        InputError: a table is damaged.
    """
    steps = steps_of(trace)
    accounting = account(trace, steps=steps)
    moved = ledger(trace, steps=steps)
    arranged = coordination(trace, accounting=accounting, moved=moved)
    figures = summary(trace)
    unseen = list(dict.fromkeys([*accounting.unseen, *moved.unseen, *arranged.unseen]))
    if figures.itl_left_out:
        unseen.append(
            f"ITL leaves out {figures.itl_left_out:,} of {counted(figures.finished, 'finished request')}: their tokens, counted "
            "chunk by chunk, are not the server's total, so some chunks held several."
        )
    return Report(
        name=trace.name,
        origin=trace.origin,
        origin_note=origin_note(trace),
        headline=headline(accounting, moved, arranged),
        metrics=figures,
        accounting=accounting,
        ledger=moved,
        coordination=arranged,
        warnings=warnings(trace, accounting, arranged),
        unseen=unseen,
    )


def headline(a: Accounting, moved: Ledger, arranged: Coordination) -> str:
    """The trace in one sentence: what a request's time is, what moves per token, what coordination takes."""
    if "all" not in a.compositions:
        others = a.failed + a.unfinished + a.impossible
        if not others:
            return "No request was recorded: the trace shows what its counters and moves show, and no latency."
        return f"None of its {others:,} requests is known to have finished: the trace shows their work, and no latency."
    shares = sorted(((k, v) for k, v in a.shares["all"].items() if v is not None), key=lambda x: -x[1])
    named = [f"{percent(v)} {k}" for k, v in shares[:3] if v >= 0.01 and k != "coordination"]
    requests = "The one finished request's" if a.finished == 1 else f"The {a.finished:,} finished requests'"
    text = f"{requests} time is {_joined(named)}; {_coordination_text(arranged)}"
    for basis in ("counted", "assumed"):
        seen = _of_basis(moved.per_token(memory=False), basis)
        if seen and seen["bytes"] is not None:
            moves = seen["transfers"] if seen["transfers"] is not None else seen["moves"]
            bound = "at least " if _of_basis(moved.totals(memory=False), basis)["bytes_unknown"] else ""  # type: ignore[index]
            size = bound + bytes_text(seen["bytes"])
            text += f"; each output token takes {count_text(moves)} transfers of together {size} ({basis})"
            break
    own = _of_basis(moved.per_token(memory=True), "derived")
    if own and own["bytes"] is not None:
        text += f"; the server reads and writes {bytes_text(own['bytes'])} of its own memory per output token (derived)"
    elif own and (least := moved.memory_at_least()) is not None:
        text += f"; the server reads and writes at least {bytes_text(least)} of its own memory per output token (derived"
        text += ", not all steps are known)"
    return text + "."


def none_seen(arranged: Coordination) -> bool:
    """Whether no coordination shows though some of its parts could not be seen: then a share of 0 would be a claim too much."""
    share = arranged.share["all"]
    return any(v is None for v in arranged.parts_ns.values()) and (share is None or share < 0.0005)


def _coordination_text(arranged: Coordination) -> str:
    """What coordination takes. A share of 0 is only told as such where all its parts can be seen."""
    share = arranged.share["all"]
    hidden = [part(n).label for n, v in arranged.parts_ns.items() if v is None]
    if share is None:
        return "how much of it is coordination cannot be seen"
    if none_seen(arranged):
        return f"no coordination is seen in it ({_joined(hidden)} cannot be)"
    return f"coordination takes {percent(share)} of it"


def _of_basis(frame: pl.DataFrame, basis: str) -> dict[str, Any] | None:
    return next((r for r in frame.to_dicts() if r["basis"] == basis), None)


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else "nothing but coordination"


def origin_note(trace: Trace) -> str:
    """How the trace came to be, in a sentence or two."""
    m = trace.manifest
    if m.replay is not None:
        r = m.replay
        policy = r.policy.get("name") or "unnamed"
        error = _error_text(r.error)
        return f"Replayed from {r.parent} under policy {policy}, seed {r.seed}. {error}".strip()
    if m.imported_from:
        sources = ", ".join(str(s.get("source") or s.get("file") or s.get("path") or "a file") for s in m.imported_from)
        return f"Imported from {sources}."
    servers = ", ".join(f"{s.engine or 'server'} {s.name}" + (f" ({s.model})" if s.model else "") for s in m.servers)
    return f"{m.origin.capitalize()}{' from ' + servers if servers else ''}{' on ' + m.created_utc if m.created_utc else ''}."


def _error_text(error: dict[str, Any] | None) -> str:
    if not error:
        return "The replay's error is not known: its parent was not replayed under its own policy."
    named = []
    for metric, value in error.items():
        if isinstance(value, dict) and isinstance(value.get("p50"), int | float) and isinstance(value.get("p95"), int | float):
            named.append(f"{metric} {value['p50']:+.1%} ({value['p95']:+.1%})")
    return f"Its error under the trace's own policy, p50 (p95): {', '.join(named)}." if named else ""


def warnings(trace: Trace, a: Accounting, arranged: Coordination) -> list[str]:
    """What a reader has to know before the figures."""
    m = trace.manifest
    out = []
    if not m.closed:
        out.append("The trace was not closed cleanly: at most its last second is missing, and requests may be unfinished.")
    for reason, n in sorted(m.rows_dropped.items()):
        out.append(f"{counted(n, 'row was', 'rows were')} dropped: {reason}.")
    for c in m.collectors:
        out += [f"Collector {c.name} dropped {n:,}: {why}." for why, n in sorted(c.dropped.items())]
        if not c.available:
            out.append(f"Collector {c.name} was not available: {c.reason or 'no reason given'}.")
    if m.replay is not None:
        out += m.replay.warnings
    out += changes(trace)
    if a.failed:
        out.append(f"{counted(a.failed, 'request')} failed: counted, but in no figure of latency.")
    if a.unfinished and a.finished + a.failed:  # else the headline says that it is a workload
        out.append(f"{counted(a.unfinished, 'request')} had not finished: counted, but in no figure of latency.")
    foreign = arranged.os.foreign_cpu_share if arranged.os is not None else None
    if foreign is not None and foreign > _FOREIGN:
        out.append(f"Others took {percent(foreign)} of the machine's busy CPU time: the latencies hold their load too.")
    return out
