"""Operations that arrange and carry nothing, by kind: what tells them, which teller wins where several tell of one thing, and how
many there are per token, request and step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.access import Access, access, is_loopback
from hoptrace.analysis.arranging.osfigures import OsFigures
from hoptrace.analysis.arranging.steptotals import basis_of
from hoptrace.analysis.query import query
from hoptrace.manifest import Manifest
from hoptrace.reader import Trace

__all__ = ["KINDS", "Told", "access_of", "as_rows", "frame", "operations", "summed"]

# Kind → (what one operation is, what would have to be recorded).
KINDS: dict[str, tuple[str, str]] = {
    "queue": ("an entry into a queue: a stay into the engine's, a preempted request again", "`stages`, or waits of kind queue"),
    "batch": ("a decision which requests the next step takes: one a step", "`steps`, or waits of kind batch"),
    "doorbell": (
        "a write that tells a device of work",
        "waits of kind doorbell, moves whose mechanism rings one (dma, rdma, file), Intel IIO counters, or, on a host with GPUs, "
        "counted ioctl calls (attach --tracepoints)",
    ),
    "poll": (
        "a look whether something is done",
        "counted poll calls (attach --tracepoints), waits of kind poll, or moves whose mechanism polls",
    ),
    "sync": ("the host waits for the device", "`steps.syncs`, or waits of kind sync"),
    "launch": ("a kernel or a graph is started", "`steps.launches`, or waits of kind launch"),
    "interrupt": ("a device interrupts a processor", "a counter of interrupts, or waits of kind interrupt"),
    "switch": ("a processor changes to another thread", "counters of the server's threads, or waits of kind switch"),
    "lock": ("a thread takes a lock that others want", "counted futex calls (attach --tracepoints), or waits of kind lock"),
    "message": ("a message is sent between processes", "moves of mechanism message, or waits of kind message"),
    "serialize": ("data or descriptors are brought into the form that is sent", "waits of kind serialize"),
}

# Who is believed first. What the engine or the kernel counts as a whole goes before waits, which tell of single requests.
_ORDER: dict[str, tuple[str, ...]] = {
    "queue": ("stages", "waits"), "batch": ("steps", "waits"), "doorbell": ("waits", "counters", "access"),
    "poll": ("counters", "waits", "access"), "sync": ("steps", "waits"), "launch": ("steps", "waits"),
    "interrupt": ("counters", "waits", "access"), "switch": ("counters", "waits"), "lock": ("counters", "waits"),
    "message": ("moves", "waits"), "serialize": ("waits",),
}  # fmt: skip
_DOORBELL_BYTES = 8  # a doorbell is a write of 4 or 8 bytes (NVMe 1.4 3.1.24: 4; mlx5 BlueFlame: 8): at least so many writes
_OF_HOP = {"queue entry": "queue", "doorbell": "doorbell", "poll": "poll", "interrupt": "interrupt"}


@dataclass(frozen=True, slots=True)
class Told:
    """What one source tells of a kind. ``teller``: waits, steps, stages, counters, moves, access; ``source``: column or table;
    ``on``: what the waits waited on, the object of a move, voluntary or not; ``at_least``: not all of it was told."""

    kind: str
    teller: str
    source: str
    basis: str
    operations: int
    on: str | None = None
    wait_ns: int | None = None
    at_least: bool = False


def operations(
    trace: Trace, steps: pl.DataFrame, waits: pl.DataFrame, moves: pl.DataFrame, os: OsFigures | None
) -> tuple[list[Told], list[tuple[Told, str]], dict[str, str]]:
    """What is told of each kind, by the teller that wins; what others told of the same thing, with the winner's name, not added;
    and, by kind of which nobody told, what would have to be recorded.

    Args:
        steps: :func:`steptotals.step_totals`. waits: ``coordination_waits``. moves: ``coordination_moves``.
    """
    told = [
        *_waits(waits), *_steps(steps), *_stays(trace, steps), *_counters(os), *_messages(moves),
        *_assumed(moves, trace.manifest),
    ]  # fmt: skip
    won: list[Told] = []
    also: list[tuple[Told, str]] = []
    unknown: dict[str, str] = {}
    for kind, order in _ORDER.items():
        mine = [t for t in told if t.kind == kind]
        # A device's queue is not the engine's: what access paths say of queues stands beside it, and is never added to it.
        beside = [t for t in mine if t.teller == "access" and "access" not in order]
        winner = next((teller for teller in order if any(t.teller == teller for t in mine)), None)
        if winner is None and beside:
            won += beside
            continue
        if winner is None:
            unknown[kind] = f"nobody recorded it: would need {KINDS[kind][1]}"
            continue
        first = [t for t in mine if t.teller == winner]
        won += first + beside
        also += [(t, first[0].source) for t in mine if t.teller != winner and t not in beside]
    return won, also, unknown


def frame(told: list[Told], tokens: int | None, requests: int, steps: int) -> pl.DataFrame:
    """One row per entry: kind, on, basis, source, operations, at_least, wait_ns, and per_output_token, per_request and per_step
    (Float64, null where there is nothing to divide by)."""
    rows = [
        {
            "kind": t.kind, "on": t.on, "basis": t.basis, "source": t.source, "operations": t.operations, "at_least": t.at_least,
            "wait_ns": t.wait_ns,
            "per_output_token": t.operations / tokens if tokens else None,
            "per_request": t.operations / requests if requests else None,
            "per_step": t.operations / steps if steps else None,
        }
        for t in told
    ]  # fmt: skip
    return pl.DataFrame(
        rows,
        schema={
            "kind": pl.String, "on": pl.String, "basis": pl.String, "source": pl.String, "operations": pl.Int64,
            "at_least": pl.Boolean, "wait_ns": pl.Int64, "per_output_token": pl.Float64, "per_request": pl.Float64,
            "per_step": pl.Float64,
        },
    )  # fmt: skip


def access_of(mechanism: str | None, server: str | None, manifest: Manifest) -> Access | None:
    """The access path of a mechanism from or to a server: a message to a server on this very host takes the short one."""
    found = manifest.server(server)
    return access(mechanism, local=found is not None and is_loopback(found.url))


def _waits(waits: pl.DataFrame) -> Iterator[Told]:
    columns = ("operations", "uncounted", "wait_ns")
    for (kind, on, basis), sums in summed(waits.filter(pl.col("kind").is_in(list(KINDS))), ("kind", "on", "basis"), columns):
        n, uncounted, wait_ns = sums
        if n is not None:
            yield Told(kind, "waits", "waits.count", basis, n, on, wait_ns, at_least=bool(uncounted))


def summed(
    rows: pl.DataFrame, keys: tuple[str, ...], columns: tuple[str, ...]
) -> Iterator[tuple[tuple[Any, ...], list[int | None]]]:
    """Sums of the few rows of a query by key, in Python's integers; null where one is unknown or the sum is no int64."""
    found: dict[tuple[Any, ...], list[int | None]] = {}
    for r in rows.to_dicts():
        have = found.setdefault(tuple(r[k] for k in keys), [0] * len(columns))
        for i, column in enumerate(columns):
            before, value = have[i], r[column]
            have[i] = None if before is None or value is None or before + value >= 1 << 63 else before + value
    yield from found.items()


def _steps(steps: pl.DataFrame) -> Iterator[Told]:
    for (origin,), rows in steps.group_by(["origin"], maintain_order=True):
        n = int(rows["steps"].sum())
        if n:
            # The row is the step, not the decision, so the number follows from it.
            yield Told("batch", "steps", "steps (one decision each)", "derived", n, _of_origin(str(origin)))
        for kind, column in (("launch", "launches"), ("sync", "syncs")):
            known = int(rows[f"{column}_known"].sum())
            if known:
                yield Told(
                    kind, "steps", f"steps.{column}", basis_of(str(origin)), round(rows[column].sum()), at_least=known < n
                )  # fmt: skip


def _of_origin(origin: str) -> str | None:
    return None if origin == "observed" else origin


def _stays(trace: Trace, steps: pl.DataFrame) -> Iterator[Told]:
    stays = query(trace, "coordination_stays")
    n = int(stays["stays"].sum())
    if not n:
        return
    yield Told("queue", "stages", "stages (one entry each)", "derived", n, "engine")
    known = int(steps["preempted_known"].sum())
    # A stay that ended preempted is followed by one of its own: the rows hold the second entry already.
    if known and not int(stays["preempted"].sum()) and (again := round(steps["preempted"].sum() or 0)):
        yield Told(
            "queue", "stages", "steps.preempted", "derived", again, "engine, again", at_least=known < int(steps["steps"].sum())
        )


def _counters(os: OsFigures | None) -> Iterator[Told]:
    if os is None:
        return
    for on, n in (("voluntary", os.voluntary_switches), ("involuntary", os.involuntary_switches)):
        if n is not None:
            source = f"counters.{on}_switches of the server's threads"
            yield Told("switch", "counters", source, "counted", n, on, at_least=os.switches_at_least)
    yield from _calls(os)
    if os.interrupts is not None:
        yield Told("interrupt", "counters", "counters.interrupts", "counted", os.interrupts, "the whole machine")


def _calls(os: OsFigures) -> Iterator[Told]:
    """System calls, and what stands in for doorbells. Whoever spins in user space, or takes a lock that is free, makes no call:
    at least so many. By CPU the calls are those of the whole machine."""
    at_least = not os.calls_of_machine
    on = "the whole machine" if os.calls_of_machine else None
    for kind, name in (("lock", "futex_calls"), ("poll", "poll_calls")):
        if (n := os.calls.get(name)) is not None:
            yield Told(kind, "counters", f"counters.{name}", "counted", n, on, at_least=at_least)
    if os.outbound_write_bytes is not None:
        source = f"counters.outbound_write_bytes ÷ {_DOORBELL_BYTES} (CPU writes to devices)"
        yield Told(
            "doorbell",
            "counters",
            source,
            "derived",
            os.outbound_write_bytes // _DOORBELL_BYTES,
            "the whole machine",
            at_least=True,
        )
    elif os.gpus and (n := os.calls.get("ioctl_calls")) is not None:
        # No counter sees a write to a mapped register; requests to the driver are what can be seen of submissions.
        yield Told("doorbell", "counters", "counters.ioctl_calls (a stand-in)", "derived", n, on)


def _messages(moves: pl.DataFrame) -> Iterator[Told]:
    mine = moves.filter(pl.col("mechanism") == "message")
    for (what, basis), (n, unknown) in summed(mine, ("object", "basis"), ("transfers", "transfers_unknown")):
        if n is not None:
            source = "moves.transfers of mechanism message"
            yield Told("message", "moves", source, basis, n, what, at_least=bool(unknown))


def _assumed(moves: pl.DataFrame, manifest: Manifest) -> Iterator[Told]:
    """What the access paths of the moves' mechanisms take, by kind of their hops: at least, since each path is the shortest."""
    sums: dict[tuple[str, str], int] = {}
    for r in moves.to_dicts():
        path = access_of(r["mechanism"], r["server"], manifest)
        if path is None or r["transfers"] is None:
            continue
        for hops, times in ((path.hops, 1), (path.per_link, r["links"])):
            for hop in hops:
                if not hop.payload and (kind := _OF_HOP.get(hop.kind)) is not None:
                    key = (kind, path.mechanism)
                    sums[key] = sums.get(key, 0) + r["transfers"] * times
    for (kind, mechanism), n in sorted(sums.items()):
        if n < 1 << 63:
            source = "moves.transfers × access path of the mechanism"
            yield Told(kind, "access", source, "assumed", n, mechanism, at_least=True)


def as_rows(also: list[tuple[Told, str]]) -> list[dict[str, Any]]:
    """What others told of the same things, for JSON."""
    return [
        {"kind": t.kind, "on": t.on, "basis": t.basis, "source": t.source, "operations": t.operations, "won": winner}
        for t, winner in also
    ]
