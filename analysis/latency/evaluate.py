"""Lay outline, waits and runs over each other, cut them into segments, and turn each segment into nanoseconds of parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.latency.axis import Axis, Ints, flatten
from hoptrace.analysis.latency.fullness import Fullness
from hoptrace.analysis.latency.interference import PHASES, Model
from hoptrace.analysis.latency.marks import LABELS, L, Outline
from hoptrace.analysis.latency.parts import FULL, PART_OF_CAPACITY, PART_OF_WAIT, PARTS
from hoptrace.analysis.latency.stepline import Busy, StepLine
from hoptrace.analysis.latency.sweep import sweep

__all__ = ["Evaluation", "evaluate"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_COLUMN = {p.name: i for i, p in enumerate(PARTS)}
_FULL = [L[f"queue_{c}"] for c in FULL]
_OVER = [L["handover"], L["arranging"]]
_ARRANGING = [L["queue"], *(L[p.name] for p in PARTS if p.klass == "coordination")]
_SHOWN = {"prefill_steps": "prefill", "decode_steps": "decode"}
_NEVER = Busy.of(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

# What the sweep has to tell apart, in its order: labels; then parts, and labels of the parts that a segment may be of several of.
_CODES = tuple(
    L[x]
    for x in ("between", "between_prefill", "between_decode", "prefill", "decode", "delivery", "proxy", "preempted", "recompute",
              "queue", "arranging", "prefill_steps", "decode_steps")
)  # fmt: skip
_COLUMNS = (
    *(
        _COLUMN[x]
        for x in ("prefill", "prefill_interference", "decode", "decode_interference", "host_gap", "skipped", "unexplained",
                  "queue_room", "handover", "queue_unknown", "delivery", "recompute", *(f"queue_{c}" for c in FULL))
    ),
    *(
        L[x]
        for x in ("queue_room", "handover", *(f"queue_{c}" for c in FULL), "queue_unknown", "skipped", "host_gap", "unexplained")
    ),
)  # fmt: skip
_PLAIN = (
    "client", "network_in", "proxy", "transfer", "delivery", "unexplained", "prefill", "decode", "preempted", "recompute",
    "host_gap", "skipped", "handover", *(f"queue_{c}" for c in FULL),
)  # fmt: skip
_FLAGS = (
    *(np.isin(np.arange(len(LABELS)), x) for x in (_FULL, _OVER, _ARRANGING)),
    np.array([_COLUMN[x] if x in _PLAIN else -1 for x in LABELS], dtype=np.int64),
)


@dataclass(frozen=True)
class Evaluation:
    """``parts``, ``spans``, ``ttft`` and ``error`` as in :class:`hoptrace.analysis.latency.accounting.Accounting`."""

    parts: pl.DataFrame
    ttft: pl.DataFrame | None
    spans: pl.DataFrame | None
    error: pl.DataFrame


def evaluate(
    axis: Axis,
    plan: Outline,
    runs: pl.DataFrame,
    run_line: Ints,
    waits: pl.DataFrame,
    steplines: list[StepLine | None],
    full: list[Fullness],
    keys: list[tuple[str, int]],
    model: Model | None,
    first_token: pl.Series,
    *,
    spans: bool = True,
    ttft: bool = True,
) -> Evaluation:
    """Split the requests on the axis; every array of ``plan``, ``runs`` and ``waits`` is about them only. ``first_token``: when
    each had its first token (ns). ``spans``, ``ttft``: whether to give those too (else null)."""
    at = axis.find(runs["request"].to_numpy())
    run_start, run_stop = axis.place(at, runs["start_ns"].to_numpy()), axis.place(at, runs["end_ns"].to_numpy())
    chunk, decode, lost_place = ((runs["phase"] == p).to_numpy() for p in ("chunk", "decode", "preempted"))
    active = chunk | decode
    working = flatten(np.where(active, run_start, 0), np.where(active, run_stop, 0))
    idle = flatten(np.where(active, 0, run_start), np.where(active, 0, run_stop))
    run_label = np.select(
        [chunk, decode, lost_place],
        [L["prefill_steps"], L["decode_steps"], L["preempted"]],
        L["between"],
    )

    wait_at = axis.find(waits["request"].to_numpy())
    w0, w1 = axis.place(wait_at, waits["start_ns"].to_numpy()), axis.place(wait_at, waits["end_ns"].to_numpy())
    rank = waits["rank"].to_numpy()
    recorded = flatten(w0, w1, rank)
    again = (waits["kind"] == "recompute").to_numpy()
    repeated = flatten(np.where(again, w0, 0), np.where(again, w1, 0))
    named = {k: L["queue" if k == "queue" else p] for k, p in PART_OF_WAIT.items()}
    cause = {on: L[p] for on, p in PART_OF_CAPACITY.items()}
    told = (pl.col("kind") == "capacity") & pl.col("on").is_in(list(cause))
    wait_label = (
        waits.select(
            pl.when(told.fill_null(False))
            .then(pl.col("on").replace_strict(cause, default=0, return_dtype=pl.Int64))
            .otherwise(pl.col("kind").replace_strict(named, return_dtype=pl.Int64))
        )
        .to_series()
        .to_numpy()
    )

    first = _first_tokens(axis, first_token)
    computed = _computed(axis, at, runs["sequence"].to_numpy(), chunk, run_start, run_stop, first)
    n, width = len(axis.request), model.width if model is not None else 0
    total = np.zeros((len(PARTS), n), dtype=np.int64)
    until_first = np.zeros((len(PARTS) if ttft else 0, n), dtype=np.int64)
    error = np.zeros((len(PHASES), n, width))
    covers = (plan.cover, working, idle, recorded, repeated)
    most = 2 * sum(len(c.start) for c in covers) + 2 * n
    segments = np.zeros((5, most if spans else 0), dtype=np.int64)
    used = sweep(
        (_own(axis.arrival), _own(axis.e2e), axis.base),
        (first, computed),
        (plan.cover.start, plan.cover.end, plan.label[plan.cover.row], plan.line[plan.cover.row]),
        (idle.start, idle.end, run_label[idle.row], run_line[idle.row]),
        (recorded.start, recorded.end, wait_label[recorded.row]),
        (working.start, working.end, run_label[working.row], run_line[working.row], working.row),
        (repeated.start, repeated.end),
        _CODES,
        _COLUMNS,
        _FLAGS,
        np.array([s is not None for s in steplines] + [False]),
        _steps(steplines),
        _felt(steplines, width),
        _full(full),
        (_known(runs["tokens"]), _known(runs["repeated"])),
        total,
        until_first,
        error,
        segments,
    )
    parts = _frame(axis, total, "finish_ns", axis.arrival + axis.e2e, "e2e_ns", np.arange(n))
    until = None
    if ttft:
        had = np.flatnonzero(first >= 0)
        until = _frame(axis, until_first, "first_token_ns", axis.time(np.arange(n), first), "ttft_ns", had)
    owner, t0, t1, label, line = segments[:, :used]
    shown = _spans(axis, owner, t0, t1, label, line, keys) if spans else None
    return Evaluation(parts, until, shown, _errors(parts["request"], error, model))


def _steps(steplines: list[StepLine | None]) -> tuple[Ints, ...]:
    """All servers' steps one after the other, when they were recorded, and what is missing: ``step`` of the sweep."""
    busy = [_NEVER if s is None else s.busy for s in steplines]
    seen = [_NEVER if s is None or s.covered is None else s.covered for s in steplines]
    at, of = _offsets([len(b.start) for b in busy]), _offsets([len(b.start) for b in seen])
    known = np.array([s is not None and s.covered is not None for s in steplines], dtype=bool)
    reach = np.stack([np.where(known, of[:-1], -1), of[1:]])
    gone = [_NEVER if s is None or s.missing is None else s.missing for s in steplines]
    return at, *_joined(busy), reach, *_joined(seen), _offsets([len(b.start) for b in gone]), *_joined(gone)


def _felt(steplines: list[StepLine | None], width: int) -> tuple[Any, ...]:
    """What the phases feel along the steps of all servers."""
    known, ns, before, mixed, sums, at = [], [], [], [], [], [0]
    for s in steplines:
        n = 0 if s is None else len(s.number)
        felt = [None if s is None else s.felt.get(p) for p in PHASES]
        known.append(felt[0] is not None and n > 0)
        zero = np.zeros(n, dtype=np.int64)
        ns.append(np.stack([zero if f is None else f.ns for f in felt]))
        before.append(np.stack([zero if f is None else f.total for f in felt]))
        mixed.append(np.zeros(n + 1, dtype=np.int64) if felt[0] is None else felt[0].mixed)
        for f in felt:
            sums.append(np.zeros((1, width)) if f is None else f.sums)
            at.append(at[-1] + len(sums[-1]))
    none = np.zeros((2, 0), dtype=np.int64)
    return (
        np.array(known, dtype=bool),
        np.concatenate([none, *ns], axis=1),
        np.concatenate([none, *before], axis=1),
        np.concatenate([none[0], *mixed]),
        np.array(at[:-1], dtype=np.int64).reshape(-1, 2).T.copy(),
        np.concatenate([np.zeros((0, width)), *sums]),
    )


def _full(full: list[Fullness]) -> tuple[Ints, ...]:
    """When each server was full, of what, and when that is known."""
    times = [b for f in full for b in (f.known, *(f.by[cause] for cause in FULL))]
    return _offsets([len(b.start) for b in times]), *_joined(times)


def _joined(times: list[Busy]) -> tuple[Ints, Ints, Ints]:
    start, end, total = (np.concatenate([_NEVER.start, *(getattr(b, x) for b in times)]) for x in ("start", "end", "total"))
    return start, end, total


def _offsets(lengths: list[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _known(values: pl.Series) -> Ints:
    return _own(values.fill_null(0).cast(pl.Int64).to_numpy())


def _own(x: Ints) -> Ints:
    """One that may be written to, so that the sweep is compiled for one kind of array only."""
    return x if x.flags.writeable and x.flags.c_contiguous else x.copy()


def _spans(axis: Axis, owner: Ints, t0: Ints, t1: Ints, label: Ints, line: Ints, keys: list[tuple[str, int]]) -> pl.DataFrame:
    """Neighbouring segments of one request with the same label and server as one."""
    names = pl.Series([_SHOWN.get(n, n) for n in LABELS], dtype=pl.String)
    servers = pl.Series([*(s for s, _ in keys), None], dtype=pl.String)
    frame = pl.DataFrame(
        {
            "request": axis.request[owner],
            "start_ns": t0,
            "end_ns": t1,
            "label": names.gather(label),
            "server": servers.gather(np.where(line < 0, len(keys), line)),
        },
        schema_overrides={"request": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64},
    )
    new = (pl.struct("request", "label", "server") != pl.struct("request", "label", "server").shift(1)).fill_null(True)
    return (
        frame.with_columns(new.cum_sum().alias("_group"))
        .group_by("_group", maintain_order=True)
        .agg(pl.col("request").first(), pl.col("start_ns").first(), pl.col("end_ns").last(), pl.col("label", "server").first())
        .drop("_group")
    )


def _first_tokens(axis: Axis, first_token: pl.Series) -> Ints:
    """Where each request's first token lies on the line; −1 where it is unknown or not within its life."""
    known = first_token.is_not_null().to_numpy()
    time = first_token.fill_null(0).to_numpy()
    known = known & (time >= axis.arrival) & (time <= axis.arrival + axis.e2e)
    every = np.arange(len(axis.request))
    return np.where(known, axis.place(every, time), -1).astype(np.int64)


def _computed(axis: Axis, at: Ints, sequence: Ints, chunk: Bools, start: Ints, stop: Ints, first: Ints) -> Ints:
    """When each request's prompt was computed: the end of the last chunk that began before its first token, of several sequences
    of the one that was ready first; beyond all where it has none."""
    before = chunk & (start < first[at])
    found = np.full(len(axis.request), np.iinfo(np.int64).max)
    if before.any():
        at, sequence, stop = at[before], sequence[before], stop[before]
        order = np.lexsort((stop, sequence, at))
        at, sequence, stop = at[order], sequence[order], stop[order]
        last = np.append((at[1:] != at[:-1]) | (sequence[1:] != sequence[:-1]), True)
        np.minimum.at(found, at[last], stop[last])
    return found


def _frame(axis: Axis, total: Ints, end: str, end_ns: Ints, length: str, rows: Ints) -> pl.DataFrame:
    """``rows`` of the axis: request, arrival_ns, the end, the length from arrival to it, and the parts."""
    columns = {"request": axis.request, "arrival_ns": axis.arrival, end: end_ns, length: end_ns - axis.arrival}
    columns |= {p.column: total[i] for i, p in enumerate(PARTS)}
    return pl.DataFrame({k: v[rows] for k, v in columns.items()}, schema_overrides=dict.fromkeys(columns, pl.Int64))


def _errors(request: pl.Series, error: Floats, model: Model | None) -> pl.DataFrame:
    """request, and the standard errors of interference, both phases' and each one's."""
    n = error.shape[1]
    known = model is not None and model.fitted
    frame = {"request": request}
    for name, rows in (
        ("interference", error.sum(axis=0)),
        *((f"{p}_interference", e) for p, e in zip(PHASES, error, strict=True)),
    ):
        se = model.standard_error_ns(rows) if known and model is not None else [None] * n
        frame[f"{name}_se_ns"] = pl.Series(se, dtype=pl.Float64)
    return pl.DataFrame(frame)
