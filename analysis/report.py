"""The report on one trace: a headline, and a section for each question that it answers. Sections are computed when asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.arranging.coordination import Arranged, Coordination, arranged_of, coordination
from hoptrace.analysis.arranging.hidden import Hidden, hidden
from hoptrace.analysis.hardware.hardware import Hardware, hardware
from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.latency.parts import CLASSES, part
from hoptrace.analysis.latency.serverstate import changes
from hoptrace.analysis.layers.ceilings import Ceiling
from hoptrace.analysis.layers.layers import Layers, layers
from hoptrace.analysis.memory.reversibility import Reversibility, reversibility
from hoptrace.analysis.memory.stranding import Stranding, stranding
from hoptrace.analysis.moves.ledger import Ledger, ledger
from hoptrace.analysis.text import bytes_text, count_text, counted, duration_text, percent
from hoptrace.errors import UsageError
from hoptrace.field_metrics import FieldMetrics, field_metrics
from hoptrace.metrics import Summary, summary
from hoptrace.reader import Trace
from hoptrace.step_source import step_source

__all__ = ["SCHEMA", "SECTIONS", "Report", "headline", "none_seen", "origin_note", "quick", "quick_lines", "report", "warnings"]

SCHEMA = "hoptrace.report/2"
SECTIONS = {
    "latency": "Latency",
    "time": "Where the time goes",
    "moves": "What moved",
    "coordination": "Coordination",
    "hardware": "Hardware and operating system",
    "hidden": "Hidden carrying",
    "layers": "Bottleneck layers",
    "stranding": "Stranded memory",
    "reversibility": "What could be handed over",
    "unseen": "What this trace cannot show",
}
"""Sections by name, in the order of the report, with their titles."""

PARTS_OF_REPORT = ("field", "hardware", "hidden", "layers", "stranding", "reversibility")
"""Fields of :class:`Report` that are computed only when a section that shows them is asked for."""

# Runs in which others took more than a tenth of the CPU spread by tens of per cent (measured on a two-core machine).
_FOREIGN = 0.1


@dataclass(frozen=True)
class Report:
    """Everything that the report says; :mod:`hoptrace.analysis.report_text` renders it, ``as_dict`` gives it as JSON.

    ``headline`` is one sentence in words; ``origin_note`` says how the trace came to be; ``warnings`` are what a reader must
    know before the figures (rows dropped, not closed, closed loop …); ``unseen`` is what the trace cannot show. What stands after
    them is null where it was not asked for.
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
    field: FieldMetrics | None = None
    hardware: Hardware | None = None
    hidden: Hidden | None = None
    layers: Layers | None = None
    stranding: Stranding | None = None
    reversibility: Reversibility | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values, stable under :data:`SCHEMA`: fields may be added, never change or go."""
        a = self.accounting
        out = {
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
                "ttft_compositions": {k: c.as_dict() for k, c in a.ttft_compositions.items()},
                "ttft_tail": a.ttft_tail.as_dict() if a.ttft_tail else None,
                "interference_se_ns": None if a.interference_se_ns is None else round(a.interference_se_ns),
                "steps_origin": a.steps_origin,
                "level": a.level.as_dict(),
                "notes": a.notes,
            },
            "ledger": self.ledger.as_dict(),
            "coordination": self.coordination.as_dict(),
        }
        for name in PARTS_OF_REPORT:
            if (found := getattr(self, name)) is not None:
                out[name] = found.as_dict()
        return {**out, "warnings": self.warnings, "unseen": self.unseen}


def report(
    trace: Trace,
    *,
    sections: Collection[str] = tuple(SECTIONS),
    slo: Mapping[str, int] | None = None,
    platform: Mapping[str, Any] | None = None,
    ceilings: Sequence[Ceiling] = (),
) -> Report:
    """The report on any trace, whatever it lacks.

    Args:
        sections: which of :data:`SECTIONS` will be looked at. None of them leaves the headline and what it rests on: metrics,
            accounting, ledger, coordination.
        slo: limits in ns for the goodput, as :func:`hoptrace.slo.parse_slo` gives them.
        platform: rates of one device of every server, for the layers; ceilings: what replays said of them.

    Raises:
        InputError: a table is damaged.
        UsageError: there is no such section.
    """
    if wrong := [s for s in sections if s not in SECTIONS]:
        raise UsageError(f"There is no section {wrong[0]!r}.", hint=f"Sections: {', '.join(SECTIONS)}.")
    wanted = set(SECTIONS) if "unseen" in sections else set(sections)  # each has something that it cannot see
    steps = step_source(trace)
    accounting = account(trace, steps=steps)
    moved = ledger(trace, steps=steps)
    arranged = coordination(trace, accounting=accounting, moved=moved, steps=steps)
    figures = summary(trace)
    field = field_metrics(trace, slo=slo) if "latency" in wanted or slo else None
    beside = None
    if "hardware" in wanted:
        tokens, known = moved.output_tokens, arranged.steps or None
        beside = hardware(trace, steps=steps, cost=accounting.cost, n_steps=known, output_tokens=tokens)
    carried = hidden(trace, steps=steps, accounting=accounting, moved=moved) if "hidden" in wanted else None
    layered = (
        layers(trace, steps=steps, accounting=accounting, platform=platform, ceilings=ceilings) if "layers" in wanted else None
    )
    stranded = stranding(trace, steps=steps) if "stranding" in wanted else None
    reversible = reversibility(trace, steps=steps) if "reversibility" in wanted else None
    unseen = [*accounting.unseen, *moved.unseen, *arranged.unseen]
    for found in (field, beside, carried, layered, stranded, reversible):
        unseen += found.unseen if found is not None else []
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
        warnings=[
            *(layered.warnings if layered else []),
            *(beside.warnings if beside else []),
            *warnings(trace, accounting, arranged),
        ],
        unseen=list(dict.fromkeys(unseen)),
        field=field,
        hardware=beside,
        hidden=carried,
        layers=layered,
        stranding=stranded,
        reversibility=reversible,
    )


def quick(trace: Trace) -> tuple[str, Summary]:
    """The headline and the metrics of any trace, the same as in :func:`report`, without what neither needs; InputError if a table
    is damaged. The tokens are read while the rest is computed."""

    def words() -> str:
        steps = step_source(trace)
        accounting = account(trace, steps=steps, ttft=False)
        return headline(accounting, ledger(trace, steps=steps, rows_only=True), arranged_of(accounting))

    with ThreadPoolExecutor(2) as pool:
        text, figures = pool.submit(words), pool.submit(summary, trace)
        return text.result(), figures.result()


def quick_lines(text: str, figures: Summary) -> list[str]:
    """What ``-q`` prints: the headline, and the latencies that are known."""
    known = [(name, figures[key]) for key, name in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "end to end"))]
    said = [
        f"{name} {duration_text(s.p50_ns)} (p50), {duration_text(s.p99_ns)} (p99)"
        for name, s in known
        if s.p50_ns is not None and s.p99_ns is not None
    ]
    return [text, *([f"{'; '.join(said)}."] if said else [])]


def headline(a: Accounting, moved: Ledger, arranged: Coordination | Arranged) -> str:
    """The trace in a few sentences: how much of the latency is coordination, carrying and work, what the rest is, and what
    moves."""
    if "all" not in a.compositions:
        others = a.failed + a.unfinished + a.impossible
        if not others:
            return "No request was recorded: the trace shows what its counters and moves show, and no latency."
        if a.impossible:
            return f"None of its {others:,} requests has times that can be: {_impossible_text(a.impossible)}."
        return f"None of its {others:,} requests is known to have finished: the trace shows their work, and no latency."
    shares = a.shares["all"]
    carried = "carrying data cannot be seen" if shares["carrying"] is None else f"{percent(shares['carrying'])} carrying data"
    worked = "work cannot be told apart" if shares["work"] is None else f"{percent(shares['work'])} work ({_work_text(a)})"
    requests = "the one finished request's" if a.finished == 1 else f"the {a.finished:,} finished requests'"
    text = f"Of {requests} time {_coordination_text(arranged)}, {carried}, {worked}"
    rest = [(k, v) for k, v in shares.items() if v is not None and k not in ("coordination", "carrying", "work")]
    named = [f"{percent(v)} {k}" for k, v in sorted(rest, key=lambda x: -x[1]) if v >= 0.005]
    text += f"; the rest is {_joined(named)}." if named else "."
    return f"{text}{_moved_text(moved)}"


def _impossible_text(n: int) -> str:
    return (
        f"{counted(n, 'finished request')} {'ends' if n == 1 else 'end'} before arriving, centuries later, or without an arrival"
    )


def _work_text(a: Accounting) -> str:
    """What counts as work: without steps, or with such as touch, more is in it than arithmetic."""
    if a.steps_origin is None:
        return "prefill and decode, host time and interference in them"
    if a.compositions["all"].parts["host_gap"] is None:
        return "arithmetic, own memory, and host time that is not told apart"
    return "arithmetic and own memory"


def _moved_text(moved: Ledger) -> str:
    """What moves per output token: counted (else assumed, and said so), and the server's own memory, which is derived."""
    said = []
    for basis in ("counted", "assumed"):
        seen = _of_basis(moved.per_token(memory=False), basis)
        if seen and seen["bytes"] is not None:
            moves = seen["transfers"] if seen["transfers"] is not None else seen["moves"]
            whole = _of_basis(moved.totals(memory=False), basis) or {}
            bound = "at least " if whole.get("bytes_unknown") or whole.get("partly") else ""
            few = "at least " if whole.get("transfers_unknown") or whole.get("partly") else ""
            said.append(f"{few}{count_text(moves)} transfers of together {bound}{bytes_text(seen['bytes'])} ({basis})")
            break
    own = _of_basis(moved.per_token(memory=True), "derived")
    if own and own["bytes"] is not None:
        said.append(f"{bytes_text(own['bytes'])} of the server's own memory (derived)")
    elif own and (least := moved.memory_at_least()) is not None:
        said.append(f"at least {bytes_text(least)} of the server's own memory (derived, not all steps are known)")
    return f" Each output token takes {_joined(said)}." if said else ""


def none_seen(arranged: Coordination | Arranged) -> bool:
    """Whether no coordination shows though some of its parts could not be seen: then a share of 0 would be a claim too much."""
    share = arranged.share["all"]
    return any(v is None for v in arranged.parts_ns.values()) and (share is None or share < 0.0005)


def _coordination_text(arranged: Coordination | Arranged) -> str:
    """What coordination takes. A share of 0 is only told as such where all its parts can be seen."""
    share = arranged.share["all"]
    hidden = [part(n).label for n, v in arranged.parts_ns.items() if v is None]
    if share is None:
        return "coordination cannot be seen"
    if none_seen(arranged):
        return f"no coordination is seen ({_joined(hidden)} cannot be)"
    return f"{percent(share)} is coordination"


def _of_basis(frame: pl.DataFrame, basis: str) -> dict[str, Any] | None:
    return next((r for r in frame.to_dicts() if r["basis"] == basis), None)


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


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
        if not c.available and not c.remedy:  # of a machine's many sources the hardware section tells
            out.append(f"Collector {c.name} was not available: {c.reason or 'no reason given'}.")
    if m.replay is not None:
        out += m.replay.warnings
    out += changes(trace)
    if a.impossible:
        out.append(f"{_impossible_text(a.impossible)}: accounted nowhere, and the distributions of latency are wrong by them.")
    if a.failed:
        out.append(f"{counted(a.failed, 'request')} failed: counted, but in no figure of latency.")
    if a.unfinished and a.finished + a.failed:  # else the headline says that it is a workload
        out.append(f"{counted(a.unfinished, 'request')} had not finished: counted, but in no figure of latency.")
    foreign = arranged.os.foreign_cpu_share if arranged.os is not None else None
    if foreign is not None and foreign > _FOREIGN:
        out.append(f"Others took {percent(foreign)} of the machine's busy CPU time: the latencies hold their load too.")
    return out
