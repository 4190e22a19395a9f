"""What arranging costs: its share of latency, its operations per token, and what the operating system counted of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from hoptrace.analysis.arranging.operations import KINDS, Told, access_of, as_rows, frame, operations
from hoptrace.analysis.arranging.osfigures import OsFigures, os_figures
from hoptrace.analysis.arranging.steptotals import step_totals
from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.latency.parts import PARTS
from hoptrace.analysis.moves.ledger import Ledger, ledger
from hoptrace.analysis.query import query
from hoptrace.analysis.term import Term, sql_of
from hoptrace.reader import Trace
from hoptrace.step_source import StepSource, step_source

__all__ = ["TERMS", "Arranged", "Coordination", "Density", "arranged_of", "coordination"]


@dataclass(frozen=True, slots=True)
class Density:
    """Semantic density: payload bytes ÷ control operations, of the moves of one object, mechanism and basis.

    ``ops_of``: where the operations come from: the moves say them, or their mechanism's access path gives the least there can be
    (then ``basis`` is assumed, and the density at most what is said)."""

    object: str
    mechanism: str | None
    basis: str
    ops_of: str
    payload_bytes: int
    control_ops: int

    @property
    def bytes_per_op(self) -> float | None:
        return self.payload_bytes / self.control_ops if self.control_ops else None

    def as_dict(self) -> dict[str, Any]:
        each = self.bytes_per_op
        return {
            "object": self.object,
            "mechanism": self.mechanism,
            "basis": self.basis,
            "ops_of": self.ops_of,
            "payload_bytes": self.payload_bytes,
            "control_ops": self.control_ops,
            "bytes_per_op": None if each is None else round(each, 3),
        }


@dataclass(frozen=True, slots=True)
class Arranged:
    """``share`` and ``parts_ns`` of :class:`Coordination`, which the accounting alone tells."""

    share: dict[str, float | None]
    parts_ns: dict[str, float | None]


def arranged_of(accounting: Accounting) -> Arranged:
    """The part of latency that is coordination."""
    whole = accounting.compositions.get("all")
    return Arranged(
        {k: c.class_shares["coordination"] for k, c in accounting.compositions.items()},
        {p.name: whole.parts[p.name] for p in PARTS if p.klass == "coordination"} if whole else {},
    )


@dataclass(frozen=True)
class Coordination:
    """The coordination of a trace.

    Attributes:
        share: coordination ÷ e2e: of all requests and around p50, p95, p99, null where no part of it is shown; empty without
            finished requests.
        parts_ns: mean ns per request of each part of the class; null where no request shows it.
        operations: what is known of each kind: kind, on, basis, source, operations, at_least, wait_ns (time in recorded waits),
            per_output_token, per_request, per_step (Float64).
        unknown: why nothing is known of the other kinds, by kind.
        also: what further sources say of a kind, and which one won. Nothing of it is in ``operations``.
        waits: kind, on, basis, waits (rows), operations (Σ count), wait_ns, per_output_token (Float64): all recorded waits of
            coordination kinds and queues, whether a request or a step waited.
        density: semantic density by object, mechanism and basis.
        os: what the operating system counted of the servers' processes, or null where no counters were recorded.
        output_tokens, requests, steps: what the figures are divided by; null or 0 where it is unknown.
        unseen: what cannot be shown, in sentences.
        notes: what the figures leave out.
    """

    share: dict[str, float | None]
    parts_ns: dict[str, float | None]
    operations: pl.DataFrame
    unknown: dict[str, str]
    also: list[tuple[Told, str]]
    waits: pl.DataFrame
    density: list[Density]
    os: OsFigures | None
    output_tokens: int | None
    requests: int
    steps: int
    unseen: list[str]
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "share": {k: _digits(v) for k, v in self.share.items()},
            "parts_ns": {k: None if v is None else round(v) for k, v in self.parts_ns.items()},
            "output_tokens": self.output_tokens,
            "requests": self.requests,
            "steps": self.steps or None,
            "operations": {kind: self._kind(kind) for kind in KINDS},
            "also": as_rows(self.also),
            "waits": [{**r, "per_output_token": _digits(r["per_output_token"])} for r in self.waits.to_dicts()],
            "semantic_density": [d.as_dict() for d in self.density],
            "os": None if self.os is None else self.os.as_dict(),
            "unseen": self.unseen,
            "notes": self.notes,
        }

    def _kind(self, kind: str) -> dict[str, Any]:
        rows = self.operations.filter(pl.col("kind") == kind).drop("kind").to_dicts()
        per = ("per_output_token", "per_request", "per_step")
        return {
            "what": KINDS[kind][0],
            "why_unknown": self.unknown.get(kind),
            "figures": [{k: _digits(v) if k in per else v for k, v in r.items()} for r in rows],
        }


def coordination(
    trace: Trace, *, accounting: Accounting | None = None, moved: Ledger | None = None, steps: StepSource | None = None
) -> Coordination:
    """The coordination of any trace. What has been computed already may be handed in.

    Raises:
        InputError: a table is damaged.
    """
    accounting = accounting if accounting is not None else account(trace)
    moved = moved if moved is not None else ledger(trace)
    arranged = arranged_of(accounting)
    totals = step_totals(steps if steps is not None else step_source(trace))
    n_steps = int(totals["steps"].sum())
    recorded = query(trace, "coordination_waits")
    moves = query(trace, "coordination_moves")
    figures = os_figures(trace, moved.output_tokens, n_steps or None)
    told, also, unknown = operations(trace, totals, recorded, moves, figures)
    density = _density(trace, moves)
    unseen = []
    if unknown:
        listed = "; ".join(f"{kind} ({KINDS[kind][1]})" for kind in unknown)
        unseen.append(f"Operations of {len(unknown)} of {len(KINDS)} kinds are unknown, not 0, for want of: {listed}.")
    if not density:
        unseen.append("No move says its bytes and its mechanism: semantic density is unknown.")
    if figures is None:
        unseen.append("No counters of the server's processes were recorded: run-queue delay, switches and CPU time are unknown.")
    if moved.output_tokens is None and moved.requests:
        unseen.append("The number of output tokens is unknown: operations are given per request and step only.")
    return Coordination(
        share=arranged.share,
        parts_ns=arranged.parts_ns,
        operations=frame(told, moved.output_tokens, moved.requests, n_steps),
        unknown=unknown,
        also=also,
        waits=_waits(recorded, moved.output_tokens),
        density=density,
        os=figures,
        output_tokens=moved.output_tokens,
        requests=moved.requests,
        steps=n_steps,
        unseen=unseen,
        notes=_notes(told),
    )


def _notes(told: list[Told]) -> list[str]:
    notes = []
    if any(t.teller == "access" for t in told):
        notes.append(
            "Assumed operations are those of the shortest path of each move's mechanism: at least so many, none was seen."
        )
    if any(t.kind == "doorbell" and t.teller == "counters" for t in told):
        notes.append("Doorbells stand for what was counted in their place: no counter sees the writes themselves.")
    if any(t.kind in ("lock", "poll") and t.teller == "counters" for t in told):
        notes.append("Locks and polls are system calls: what spins in user space, or finds a lock free, makes none.")
    if any(t.kind == "message" and t.teller == "moves" for t in told):
        notes.append(
            "Messages are those that were recorded, mostly clients'; what a server's processes tell each other is not seen."
        )
    return notes


def _waits(recorded: pl.DataFrame, tokens: int | None) -> pl.DataFrame:
    sums = (pl.when(pl.col(c).null_count() == 0).then(pl.col(c).sum()).alias(c) for c in ("waits", "operations", "wait_ns"))
    return (
        recorded.group_by("kind", "on", "basis", maintain_order=True)
        .agg(*sums)
        .with_columns((pl.col("operations") / pl.lit(tokens or None, dtype=pl.Int64)).alias("per_output_token"))
    )


def _density(trace: Trace, moves: pl.DataFrame) -> list[Density]:
    """What moves say of their control operations, and apart from it what their mechanisms' access paths give the others."""
    sums: dict[tuple[str, str | None, str, str], list[int]] = {}

    def add(key: tuple[str, str | None, str, str], size: int | None, ops: int | None) -> None:
        if size is not None and ops is not None:
            have = sums.setdefault(key, [0, 0])
            have[0] += size
            have[1] += ops

    for r in moves.to_dicts():
        add((r["object"], r["mechanism"], r["basis"], "moves.control_ops"), r["told_bytes"], r["told_ops"])
        path = access_of(r["mechanism"], r["server"], trace.manifest)
        if path is not None and r["untold_transfers"] is not None:
            key = (r["object"], r["mechanism"], "assumed", f"access path of {path.mechanism}")
            add(key, r["untold_bytes"], path.control_ops(r["links"]) * r["untold_transfers"])
    return [
        Density(*key, *have)
        for key, have in sorted(sums.items(), key=lambda x: (x[0][3] != "moves.control_ops", *map(str, x[0])))
    ]


def _digits(v: float | None) -> float | None:
    return None if v is None else round(v, 6)


TERMS: tuple[Term, ...] = (
    Term(
        "coordination_share",
        "coordination",
        "coordination share",
        "share of e2e",
        "Σ coordination ÷ Σ e2e",
        "How much of what users waited for was arranging. An overloaded server shows capacity, not coordination. At a "
        "percentile: over the requests around it by end-to-end time.",
    ),
    Term(
        "operations_per_token",
        "coordination",
        "operations per token",
        "operations/token",
        "operations of a kind ÷ output tokens",
        "Kinds: " + "; ".join(f"{kind}: {what}" for kind, (what, _) in KINDS.items()) + ". Of several sources that tell of one "
        "kind one wins, and nothing is added up between them: for sync and launch `steps`, for switch, interrupt, lock (futex "
        "calls) and poll (poll, select and epoll calls) the kernel's counters, for message `moves`, for queue `stages` (with "
        "`steps.preempted`), for batch `steps`, else recorded waits. Doorbells that no wait tells are derived: what CPUs wrote "
        "to devices (Intel IIO, 8 bytes each), else on a host with GPUs the ioctl calls, a stand-in. Where nobody recorded a "
        "doorbell, a poll or an interrupt, the access paths of the moves' mechanisms give the least there can be (assumed). A "
        "kind that nobody tells of is unknown, not 0.",
        sql_of("coordination_waits"),
    ),
    Term(
        "semantic_density",
        "coordination",
        "semantic density",
        "bytes/operation",
        "payload bytes ÷ control operations",
        "How much is carried for each operation that only arranges, by object and mechanism. What moves say themselves and what "
        "is assumed from their mechanism's access path stay apart: an assumed density is an upper bound, since the path is the "
        "shortest.",
        sql_of("coordination_density"),
    ),
    Term(
        "run_delay",
        "coordination",
        "run-queue delay",
        "ns",
        "Σ increase of run_delay_ns of the server's processes",
        "Time in which a thread of the server wanted a CPU and had none. Its share: delay ÷ (delay + CPU time). It sums over "
        "threads, so per step it may be longer than the step. Others' part shows in foreign_cpu_share; where that is small, the "
        "server's own threads are more than the CPUs.",
        sql_of("counter_totals"),
    ),
)
