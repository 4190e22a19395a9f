"""Lay outline, waits and runs over each other, cut them into segments, and turn each segment into nanoseconds of parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.latency.axis import Axis, Ints, distinct, flatten
from hoptrace.analysis.latency.fullness import Fullness
from hoptrace.analysis.latency.interference import PHASES, Model
from hoptrace.analysis.latency.marks import LABELS, L, Outline
from hoptrace.analysis.latency.parts import FULL, PART_OF_CAPACITY, PART_OF_WAIT, PARTS
from hoptrace.analysis.latency.stepline import StepLine

__all__ = ["Evaluation", "evaluate"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_COLUMN = {p.name: i for i, p in enumerate(PARTS)}
_FULL = [L[f"queue_{c}"] for c in FULL]
_OVER = [L["handover"], L["arranging"]]
_ARRANGING = [L["queue"], *(L[p.name] for p in PARTS if p.klass == "coordination")]
_SHOWN = {"prefill_steps": "prefill", "decode_steps": "decode"}


@dataclass(frozen=True)
class Evaluation:
    """``parts``, ``spans``, ``ttft`` and ``error`` as in :class:`hoptrace.analysis.latency.accounting.Accounting`."""

    parts: pl.DataFrame
    ttft: pl.DataFrame
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
) -> Evaluation:
    """Split the requests on the axis; every array of ``plan``, ``runs`` and ``waits`` is about them only. ``first_token``: when
    each had its first token (ns). ``spans``: whether to give those too (else null)."""
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
    covers = (plan.cover, working, idle, recorded, repeated)
    cuts = distinct(np.concatenate([*(c.points for c in covers), axis.base, first[first >= 0]]))
    a, b = cuts[:-1], cuts[1:]
    owner = axis.owner(a)
    base = plan.cover.at(a)
    real = base >= 0
    a, b, owner, base = a[real], b[real], owner[real], base[real]

    label = plan.label[base] if len(base) else base
    line = plan.line[base] if len(base) else base
    stepped = np.array([s is not None for s in steplines] + [False])[line]  # the last is of no server
    for name in ("prefill", "decode"):
        label = np.where(label == L[f"between_{name}"], np.where(stepped, L["between"], L[name]), label)
    run = np.full(len(a), -1, dtype=np.int64)
    # Idle runs lie over the outline, waits over both, working runs over all.
    i = idle.at(a)
    label, line = np.where(i >= 0, _take(run_label, i), label), np.where(i >= 0, _take(run_line, i), line)
    w = recorded.at(a)
    in_delivery = (label == L["delivery"]) & (w >= 0) & (_take(wait_label, w) == L["proxy"])
    # A place that was lost is waited for because the server is full: `preempted` says more.
    lost = (label == L["preempted"]) & (w >= 0) & np.isin(_take(wait_label, w), _FULL)
    # Between a stay's end and the next one's first work, what is arranged is the hand-over, whatever it was for.
    over = np.isin(label, _OVER) & np.isin(_take(wait_label, w), _ARRANGING)
    label = np.where((w >= 0) & ~in_delivery & ~lost & ~over, _take(wait_label, w), label)
    r = working.at(a)
    label, line = np.where(r >= 0, _take(run_label, r), label), np.where(r >= 0, _take(run_line, r), line)
    run = np.where(r >= 0, r, run)
    label = np.where((r >= 0) & (repeated.at(a) >= 0), L["recompute"], label)

    t0, t1 = axis.time(owner, a), axis.time(owner, b)
    out = np.zeros((len(PARTS), len(a)), dtype=np.int64)
    length = b - a
    column = np.full(len(LABELS), -1, dtype=np.int64)
    for name in ("client", "network_in", "proxy", "transfer", "delivery", "unexplained", "prefill", "decode", "preempted",
                 "recompute", "host_gap", "skipped", "handover", *(f"queue_{c}" for c in FULL)):  # fmt: skip
        column[L[name]] = _COLUMN[name]
    plain = np.flatnonzero(column[label] >= 0)
    out[column[label[plain]], plain] = length[plain]
    error = {phase: np.zeros((len(a), model.width if model is not None else 0)) for phase in PHASES}
    queue, arranging, between = (label == L[x] for x in ("queue", "arranging", "between"))
    for k in range(len(keys)):
        here = line == k
        _queue(out, here & queue, t0, t1, full[k], "queue_room")
        _queue(out, here & arranging, t0, t1, full[k], "handover")
        steps = steplines[k]
        if steps is None:
            out[_COLUMN["unexplained"]] += np.where(here & between, length, 0)
            continue
        _between(out, here & between, t0, t1, steps)
        for name in PHASES:
            _work(out, error[name], here & (label == L[name + "_steps"]), t0, t1, steps, name)
    nowhere = line < 0
    out[_COLUMN["queue_unknown"]] += np.where(nowhere & (queue | arranging), length, 0)
    out[_COLUMN["unexplained"]] += np.where(nowhere & between, length, 0)
    _repeat(out, run, runs)
    for what, choices in (
        ()
        if not spans
        else (
            (queue, ("queue_room", *(f"queue_{c}" for c in FULL), "queue_unknown")),
            (arranging, ("handover", *(f"queue_{c}" for c in FULL), "queue_unknown")),
            (between, ("skipped", "host_gap", "unexplained")),
        )
    ):
        label = np.where(what, _most(out, choices), label)
    computed = _computed(axis, at, runs["sequence"].to_numpy(), chunk, run_start, run_stop, first)
    ttft = _until_first(axis, owner, out, a, b, first, computed)
    return _gather(axis, owner, out, ttft, error, model, _spans(axis, owner, t0, t1, label, line, keys) if spans else None)


def _most(out: Ints, choices: tuple[str, ...]) -> Ints:
    """Label of the part that takes most of each segment; of equal ones the first."""
    labels = np.array([L[c] for c in choices], dtype=np.int64)
    most: Ints = labels[np.argmax(out[[_COLUMN[c] for c in choices]], axis=0)]
    return most


def _take(values: Ints, at: Ints) -> Ints:
    return values[np.maximum(at, 0)] if len(values) else np.full(len(at), -1, dtype=np.int64)


def _queue(out: Ints, here: Ints, t0: Ints, t1: Ints, full: Fullness, room: str) -> None:
    """``room``: the part that time with room belongs to."""
    if not here.any():
        return
    known = full.known.before(t1[here]) - full.known.before(t0[here])
    out[_COLUMN[room], here] += known
    for cause in FULL:
        taken = full.by[cause].before(t1[here]) - full.by[cause].before(t0[here])
        out[_COLUMN[f"queue_{cause}"], here] += taken
        out[_COLUMN[room], here] -= taken
    out[_COLUMN["queue_unknown"], here] += (t1 - t0)[here] - known


def _between(out: Ints, here: Ints, t0: Ints, t1: Ints, steps: StepLine) -> None:
    if not here.any():
        return
    length = (t1 - t0)[here]
    running = steps.busy.before(t1[here]) - steps.busy.before(t0[here])
    out[_COLUMN["skipped"], here] += running
    seen = length
    if steps.covered is not None:
        seen = steps.covered.before(t1[here]) - steps.covered.before(t0[here])
    # Where nobody recorded steps, no step seen does not mean that none ran.
    out[_COLUMN["host_gap"], here] += seen - running
    out[_COLUMN["unexplained"], here] += length - seen


def _work(out: Ints, error: Floats, here: Ints, t0: Ints, t1: Ints, steps: StepLine, phase: str) -> None:
    if not here.any():
        return
    inside = steps.busy.before(t1[here]) - steps.busy.before(t0[here])
    between = (t1 - t0)[here] - inside
    if steps.missing is not None:
        blank = steps.missing.before(t1[here]) - steps.missing.before(t0[here])
        out[_COLUMN["unexplained"], here] += blank
        between -= blank
    out[_COLUMN["host_gap"], here] += between
    shared = np.zeros(len(inside), dtype=np.int64)
    if phase in steps.felt:
        ns0, f0 = steps.interference(phase, t0[here])
        ns1, f1 = steps.interference(phase, t1[here])
        shared = np.clip(ns1 - ns0, 0, inside)
        error[here] += f1 - f0
    out[_COLUMN[phase + "_interference"], here] += shared
    out[_COLUMN[phase], here] += inside - shared


def _repeat(out: Ints, run: Ints, runs: pl.DataFrame) -> None:
    """Prefill of tokens that had been computed before is repeated work, in proportion to the tokens of its run."""
    if not runs.height or not (runs["repeated"].fill_null(0) > 0).any():
        return
    tokens, repeated = runs["tokens"].fill_null(0).to_numpy(), runs["repeated"].fill_null(0).to_numpy()
    share = np.where(run >= 0, _take(repeated, run) / np.maximum(_take(tokens, run), 1), 0.0)
    again = np.minimum(np.floor(out[_COLUMN["prefill"]] * share).astype(np.int64), out[_COLUMN["prefill"]])
    out[_COLUMN["prefill"]] -= again
    out[_COLUMN["recompute"]] += again


def _spans(axis: Axis, owner: Ints, t0: Ints, t1: Ints, label: Ints, line: Ints, keys: list[tuple[str, int]]) -> pl.DataFrame:
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


def _until_first(axis: Axis, owner: Ints, out: Ints, a: Ints, b: Ints, first: Ints, computed: Ints) -> pl.DataFrame:
    """The parts up to the first token. Once the prompt is computed the token is on its way, whatever else goes on."""
    own = np.flatnonzero(b <= first[owner])
    cut = np.zeros((len(PARTS), len(own)), dtype=np.int64)
    for i in np.flatnonzero(out.any(axis=1)).tolist():  # of all parts a trace has some
        cut[i] = out[i, own]
    on_its_way = a[own] >= computed[owner[own]]
    for name in ("decode", "decode_interference", "host_gap", "skipped"):
        cut[_COLUMN["delivery"]] += np.where(on_its_way, cut[_COLUMN[name]], 0)
        cut[_COLUMN[name]] = np.where(on_its_way, 0, cut[_COLUMN[name]])
    told = np.flatnonzero(first >= 0)
    total = _sums(owner[own], cut, len(axis.request))
    return _frame(axis, total, "first_token_ns", axis.time(np.arange(len(first)), first), "ttft_ns", told)


def _sums(owner: Ints, out: Ints, requests: int) -> Ints:
    """Σ of the columns of ``out`` by owner (ascending): parts × requests."""
    total = np.zeros((len(PARTS), requests), dtype=np.int64)
    if len(owner):
        first = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
        for i in np.flatnonzero(out.any(axis=1)).tolist():
            total[i, owner[first]] = np.add.reduceat(out[i], first)
    return total


def _frame(axis: Axis, total: Ints, end: str, end_ns: Ints, length: str, rows: Ints) -> pl.DataFrame:
    """``rows`` of the axis: request, arrival_ns, the end, the length from arrival to it, and the parts."""
    columns = {"request": axis.request, "arrival_ns": axis.arrival, end: end_ns, length: end_ns - axis.arrival}
    columns |= {p.column: total[i] for i, p in enumerate(PARTS)}
    return pl.DataFrame({k: v[rows] for k, v in columns.items()}, schema_overrides=dict.fromkeys(columns, pl.Int64))


def _gather(
    axis: Axis,
    owner: Ints,
    out: Ints,
    ttft: pl.DataFrame,
    error: dict[str, Floats],
    model: Model | None,
    spans: pl.DataFrame | None,
) -> Evaluation:
    n = len(axis.request)
    sums = {phase: np.zeros((n, rows.shape[1])) for phase, rows in error.items()}
    if len(owner):
        first = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
        for phase, rows in error.items():
            sums[phase][owner[first]] = np.add.reduceat(rows, first, axis=0)
    parts = _frame(axis, _sums(owner, out, n), "finish_ns", axis.arrival + axis.e2e, "e2e_ns", np.arange(n))
    known = model is not None and model.fitted
    frame = {"request": parts["request"]}
    for name, rows in (("interference", sums["prefill"] + sums["decode"]), *((f"{p}_interference", sums[p]) for p in PHASES)):
        se = model.standard_error_ns(rows) if known and model is not None else [None] * n
        frame[f"{name}_se_ns"] = pl.Series(se, dtype=pl.Float64)
    return Evaluation(parts, ttft, spans, pl.DataFrame(frame))
