"""Batching as recorded: who computes how many tokens in which step. Only when the steps begin and end is predicted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from hoptrace.replay.draws import draw_plain
from hoptrace.replay.outcome import CHUNK, DECODE, DONE, PREEMPTED, REQUEST, RUN, SKIPPED, STEP, Outcome, Sink
from hoptrace.replay.plan import Plan
from hoptrace.replay.truths.recorded import COMPOSITION, EngineSteps, Recorded
from hoptrace.replay.workload import Workload
from hoptrace.stepcost_kernel import RUN as RUN_STEPS
from hoptrace.stepcost_kernel import step_ns
from hoptrace.stepcost_pack import pack

__all__ = ["retimed", "unplaced"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_PHASES = {"chunk": CHUNK, "decode": DECODE, "skipped": SKIPPED, "preempted": PREEMPTED}
_ROW = {name: i for i, name in enumerate(REQUEST)}


def retimed(
    recorded: Recorded, work: Workload, plan: Plan, sink: Sink, ready: _Ints | None, *, steps_as_recorded: bool
) -> Outcome:
    """The recording's steps at other times.

    A step lasts what the step cost says of its recorded composition. It begins as long after the one before as it did in the
    recording; where the recorded engine was idle before it, the plan's gap after the one before. Never before those who are in it
    for the first time are ready: ``ready`` [n], or (null) their arrival and the way to the engine.

    Args:
        steps_as_recorded: begin and end are the recorded ones too.
    """
    runs = _runs(recorded, work)
    state = _State(work, plan, ready)
    pending = [(int(s.start_ns[k]), e, k) for e, s in enumerate(recorded.engines) for k in range(len(s.number))]
    clocks = [_Clock(e, s, plan) for e, s in enumerate(recorded.engines)]
    costs, cost_at = pack(plan.costs)
    comes, leaves = _edges(recorded, runs)
    for start, e, k in sorted(pending):
        clock, steps = clocks[e], recorded.engines[e]
        if steps_as_recorded:
            clock.begin, clock.end = start, int(steps.end_ns[k])
        else:
            clock.next(k, [state.ready(r) for r in comes.get((e, k), ())])
            clock.end = clock.begin + max(1, _cost(costs, int(cost_at[plan.engines[e].cost]), clock, k, plan.seed))
        clock.rows.append([e, k, clock.begin, clock.end])
        for r in comes.get((e, k), ()):
            state.put(r, "engine", e)
            state.put(r, "scheduled_ns", clock.begin)
            state.put(r, "first_seen_ns", clock.begin)
        for r, what in leaves.get((e, k), ()):
            state.reached(r, what, clock.end)
    _give(sink, clocks, recorded, runs)
    ends = [c.end for c in clocks if c.rows]
    return Outcome(state.rows(runs, recorded), np.array([len(c.rows) for c in clocks], dtype=np.int64), max(ends, default=0))


def unplaced(recorded: Recorded, work: Workload) -> int:
    """How many requests of the work the recording has in no step, or not to their end."""
    runs = _runs(recorded, work)
    if not runs.height:
        return work.n
    each = pl.col("emitted") * pl.when(pl.col("phase") == DECODE).then(pl.col("last") - pl.col("first") + 1).otherwise(1)
    total = runs.group_by("position").agg(each.sum().alias("n"), (pl.col("tokens").max()).alias("most"))
    wanted = pl.DataFrame({"position": np.arange(work.n), "wanted": work.output_tokens})
    # A speculator's steps yield several tokens each, how many is not told.
    whole = total.join(wanted, on="position").filter((pl.col("n") == pl.col("wanted")) | pl.col("position").is_in(_many(runs)))
    return work.n - whole.height


def _many(runs: pl.DataFrame) -> pl.Series:
    """Requests that computed several tokens in a step as decoders."""
    return runs.filter((pl.col("phase") == DECODE) & (pl.col("tokens") > 1))["position"].unique().implode()


@dataclass
class _Clock:
    engine: int
    steps: EngineSteps
    plan: Plan
    begin: int = 0
    end: int = -(1 << 62)
    kinds: list[int] = field(default_factory=lambda: [0, 0, 0])
    composition: list[list[int]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.steps.rows.height:
            self.composition = self.steps.rows.select(pl.col(COMPOSITION).fill_null(0)).to_numpy().tolist()

    def next(self, k: int, ready: list[int]) -> None:
        s = self.steps
        if k == 0:
            self.begin = max(ready) if ready else int(s.start_ns[0])
            return
        gap = self.plan.engines[self.engine].gap_ns if s.opens[k] else int(s.start_ns[k] - s.end_ns[k - 1])
        self.begin = max([self.end + gap, *ready])


def _cost(costs: _Ints, at: int, clock: _Clock, k: int, seed: int) -> int:
    row = clock.composition[k]
    prefill, decode = row[:3], (row[3], row[5])
    kind = (2 if decode[0] else 1) if prefill[0] else 0
    # As in the engine: seed 0 takes the residuals in the order of the recording, others draw them in runs.
    if seed == 0:
        clock.kinds[kind] += 1
        draw = 1009 * clock.engine + clock.kinds[kind] - 1
    else:
        h = draw_plain(seed, 5, clock.engine, k // RUN_STEPS)
        draw = h - h % RUN_STEPS + k % RUN_STEPS
    return int(step_ns(costs, at, draw, *prefill, *decode, row[4] - row[3]))


class _State:
    """Where the requests are."""

    def __init__(self, work: Workload, plan: Plan, ready: _Ints | None) -> None:
        self._work, self._plan, self._ready = work, plan, ready
        self._table = np.full((work.n, len(REQUEST)), -1, dtype=np.int64)
        self._ended: dict[int, int] = {}

    def put(self, r: int, name: str, value: int) -> None:
        if self._table[r, _ROW[name]] < 0:
            self._table[r, _ROW[name]] = value

    def ready(self, r: int) -> int:
        """When the engine could begin with it, by what has happened so far."""
        arrival = self._arrival(r)
        self.put(r, "arrival_ns", arrival)
        at = int(self._ready[r]) if self._ready is not None else arrival + self._plan.before_ns
        self.put(r, "routed_ns", at)
        return at

    def _arrival(self, r: int) -> int:
        w = self._work
        recorded = int(w.arrival_ns[r])
        before = int(w.after[r]) if w.after is not None else -1
        if before < 0 or w.think_ns is None or before not in self._ended:
            return recorded
        at = self._ended[before] + self._plan.after_ns + int(w.think_ns[r])
        return max(at, recorded) if w.floor is not None and bool(w.floor[r]) else at

    def reached(self, r: int, what: str, end: int) -> None:
        if what == "first":
            self.put(r, "first_token_ns", end)
            self.put(r, "prefill_end_ns", end)
        else:
            self._table[r, _ROW["last_token_ns"]] = end
            self._ended[r] = end

    def rows(self, runs: pl.DataFrame, recorded: Recorded) -> _Ints:
        """The REQUEST rows, with what the recording says of cache and preemptions."""
        stays = recorded.trace.table("stages").filter(pl.col("sequence").fill_null(0) == 0).sort("request", "attempt", "stage")
        told = stays.group_by("request", maintain_order=True).agg(
            pl.col("cached_tokens").first(), pl.col("resumed_tokens", "recomputed_tokens").sum()
        )  # fmt: skip
        mine = pl.DataFrame({"request": self._work.request}).join(told.collect(), on="request", how="left", maintain_order="left")
        t = self._table
        for name in ("cached_tokens", "resumed_tokens", "recomputed_tokens"):
            t[:, _ROW[name]] = mine[name].fill_null(0).to_numpy()
        lost = runs.filter(pl.col("phase") == PREEMPTED).group_by("position").len()
        t[:, _ROW["preemptions"]] = t[:, _ROW["prefill_preemptions"]] = 0
        t[lost["position"].to_numpy(), _ROW["preemptions"]] = lost["len"].to_numpy()
        for r in range(self._work.n):
            self.ready(r)
        t[:, _ROW["generated_tokens"]] = self._work.output_tokens
        t[:, _ROW["status"]] = DONE
        return t


def _runs(recorded: Recorded, work: Workload) -> pl.DataFrame:
    """The runs of the work's requests: position, engine, first and last (positions of steps), phase, tokens, context,
    and emitted: of each step, or of a prompt's last one (as ``outcome.RUN`` has it)."""
    of = pl.DataFrame({"request": work.request, "position": np.arange(work.n), "prompt": work.prompt_tokens})
    if not recorded.residency.height:
        return pl.DataFrame(schema={"position": pl.Int64, "emitted": pl.Int64})
    place = pl.concat([
        pl.DataFrame({"engine": np.full(len(s.number), e), "step": s.number, "at": np.arange(len(s.number))})
        for e, s in enumerate(recorded.engines)
    ])  # fmt: skip
    joined = (
        recorded.residency.join(of, on="request")
        .join(place.rename({"step": "first_step", "at": "first"}), on=["engine", "first_step"])
        .join(place.rename({"step": "last_step", "at": "last"}), on=["engine", "last_step"])
        .with_columns(
            pl.col("phase").cast(pl.String).replace_strict(_PHASES, default=SKIPPED, return_dtype=pl.Int64),
            pl.col("sequence").fill_null(0),
            pl.col("tokens_per_step").fill_null(0).alias("tokens"), pl.col("context_at_start").fill_null(0).alias("context"),
        )
        .sort("position", "sequence", "first", "last")
    )  # fmt: skip
    return joined.with_columns(_emitted(joined))


def _emitted(runs: pl.DataFrame) -> pl.Series:
    """Output tokens of a run's steps: a decoder's one each; a prompt's one in its last step, if that ended the prompt: its
    next run is one of decoding, or there is none, or (before a preemption) it had computed all that it knew."""
    working = runs.with_row_index("row").filter(pl.col("phase") != SKIPPED)
    after = dict(working.select("row", pl.col("phase").shift(-1).over("position", "sequence")).iter_rows())
    found: list[int] = []
    generated: dict[tuple[int, int], int] = {}
    columns = ("position", "sequence", "prompt", "phase", "tokens", "context", "first", "last")
    for row, (position, sequence, prompt, phase, tokens, context, first, last) in enumerate(runs.select(columns).iter_rows()):
        key, n = (position, sequence), last - first + 1
        so_far = generated.get(key, 0)
        each = int(phase == DECODE)
        if phase == CHUNK:
            following = after.get(row)
            whole = context + tokens * n >= prompt + so_far
            each = int(following is None or following == DECODE or (following == PREEMPTED and whole))
        generated[key] = so_far + (each * n if phase == DECODE else each)
        found.append(each)
    return pl.Series("emitted", found, dtype=pl.Int64)


def _edges(
    recorded: Recorded, runs: pl.DataFrame
) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], list[tuple[int, str]]]]:
    """By (engine, step): the requests that are in it for the first time, and what ends with it for whom."""
    comes: dict[tuple[int, int], list[int]] = {}
    leaves: dict[tuple[int, int], list[tuple[int, str]]] = {}
    works = runs.filter(pl.col("phase").is_in([CHUNK, DECODE])).sort("first")
    for position, e, first in works.group_by("position", maintain_order=True).agg(
        pl.col("engine").first(), pl.col("first").first()
    ).iter_rows():  # fmt: skip
        comes.setdefault((e, first), []).append(position)
    told = works.filter(pl.col("emitted") > 0).with_columns(
        pl.when(pl.col("phase") == DECODE).then("first").otherwise("last").alias("begins")
    )  # fmt: skip
    for column, what, by in (("begins", "first", False), ("last", "last", True)):
        ends = told.sort(column, descending=by).group_by("position", maintain_order=True).agg(
            pl.col("engine").first(), pl.col(column).first()
        )  # fmt: skip
        for position, e, at in ends.iter_rows():
            leaves.setdefault((e, at), []).append((position, what))
    return comes, leaves


def _give(sink: Sink, clocks: list[_Clock], recorded: Recorded, runs: pl.DataFrame) -> None:
    at = {name: i for i, name in enumerate(STEP)}
    for clock, steps in zip(clocks, recorded.engines, strict=True):
        if not clock.rows:
            continue
        rows = np.zeros((len(clock.rows), len(STEP)), dtype=np.int64)
        rows[:, :4] = clock.rows
        for name in COMPOSITION:
            rows[:, at[name]] = steps.rows[name].fill_null(0).to_numpy()
        sink.take("step", rows)
    columns = ("position", "engine", "first", "last", "phase", "tokens", "context", "emitted")
    if runs.height:
        assert len(columns) == len(RUN)
        sink.take("run", runs.select(columns).to_numpy().astype(np.int64))
