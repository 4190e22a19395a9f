"""What must hold of whatever an engine of the replay says, with the numbers by which to check it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from hoptrace.replay import outcome
from hoptrace.replay.outcome import Kept, Outcome
from hoptrace.replay.plan import Plan
from hoptrace.replay.workload import Workload

__all__ = ["Said", "check_laws", "first_difference", "said_by"]


@dataclass(frozen=True)
class Said:
    """All rows of one simulation."""

    outcome: Outcome
    steps: pl.DataFrame
    runs: pl.DataFrame
    moves: pl.DataFrame
    requests: pl.DataFrame


def said_by(simulate: Any, work: Workload, plan: Plan, **more: Any) -> Said:
    """Run it, and put the rows into an order that does not depend on the engine."""
    sink = Kept()
    found = simulate(work, plan, sink, **more)

    def frame(rows: np.ndarray[Any, Any], columns: tuple[str, ...], by: list[str]) -> pl.DataFrame:
        schema = dict.fromkeys(columns, pl.Int64)
        made = pl.DataFrame({c: rows[:, i] for i, c in enumerate(columns)}, schema=schema)
        return made.sort(by, maintain_order=True)

    return Said(
        found,
        frame(sink.rows("step"), outcome.STEP, ["engine"]),
        frame(sink.rows("run"), outcome.RUN, ["request", "engine", "first_step"]),
        frame(sink.rows("move"), outcome.MOVE, ["end_ns", "start_ns", *outcome.MOVE[2:]]),
        pl.DataFrame(
            {c: found.requests[:, i] for i, c in enumerate(outcome.REQUEST)}, schema=dict.fromkeys(outcome.REQUEST, pl.Int64)
        ),
    )


def first_difference(a: Said, b: Said) -> str | None:
    """Where two results differ first, in words; null if they are equal in every row."""
    found = []
    for name in ("steps", "requests", "runs", "moves"):
        x, y = getattr(a, name), getattr(b, name)
        if x.equals(y):
            continue
        for i in range(max(x.height, y.height)):
            p = x.row(i) if i < x.height else None
            q = y.row(i) if i < y.height else None
            if p != q:
                columns = [c for c, u, v in zip(x.columns, p, q, strict=True) if u != v] if p and q else ["one has no such row"]
                found.append(f"{name}[{i}] differ in {columns}:\n  {p}\n  {q}")
                break
    if a.outcome.steps.tolist() != b.outcome.steps.tolist():
        found.append(f"number of steps: {a.outcome.steps.tolist()} and {b.outcome.steps.tolist()}")
    if a.outcome.end_ns != b.outcome.end_ns:
        found.append(f"end: {a.outcome.end_ns} and {b.outcome.end_ns}")
    return "\n".join(found) or None


def check_laws(said: Said, work: Workload, plan: Plan) -> None:
    """Nothing is lost, no limit is broken, time goes on."""
    of, steps, runs = said.requests, said.steps, said.runs
    done = of.filter(pl.col("status") == outcome.DONE)
    _check_requests(of, work, plan)
    # Work: each step's tokens are those of the runs that hold it, and what they emit is what was asked for.
    for e, spec in enumerate(plan.engines):
        mine = steps.filter(pl.col("engine") == e)
        assert mine["step"].to_list() == list(range(mine.height)) == list(range(int(said.outcome.steps[e])))
        assert ((mine["end_ns"] - mine["start_ns"]) >= 1).all()
        assert (mine["start_ns"][1:] >= mine["end_ns"][:-1] + spec.gap_ns).all()
        if spec.capacity_tokens is not None and mine.height:
            assert mine["kv_used_tokens"].max() <= spec.capacity_tokens
        if mine.height:
            assert mine["kv_used_tokens"].min() >= 0
        if spec.max_sequences is not None and mine.height:
            assert mine["running"].max() <= spec.max_sequences
        if spec.max_batched_tokens is not None and spec.mode != "static" and spec.chunked_prefill and mine.height:
            assert (mine["prefill_tokens"] + mine["decode_tokens"]).max() <= spec.max_batched_tokens
        assert (mine["waiting"] == mine["queued_prefill_requests"] + mine["queued_decode_requests"]).all()
        prefill, decode = np.zeros(mine.height, dtype=int), np.zeros(mine.height, dtype=int)
        for _, _, first, last, phase, tokens, _, _ in runs.filter(pl.col("engine") == e).iter_rows():
            assert 0 <= first <= last < mine.height
            if phase == outcome.CHUNK:
                prefill[first : last + 1] += tokens
            elif phase == outcome.DECODE:
                decode[first : last + 1] += tokens
        assert prefill.tolist() == mine["prefill_tokens"].to_list()
        if spec.mode != "static":
            assert decode.tolist() == mine["decode_tokens"].to_list()
    emitted = np.zeros(work.n, dtype=int)
    for r, _, first, last, phase, _, _, each in runs.iter_rows():
        emitted[r] += each if phase == outcome.CHUNK else each * (last - first + 1)
    assert emitted.tolist() == of["generated_tokens"].to_list()
    assert (done["generated_tokens"] == pl.Series(work.output_tokens)[done_at(of)]).all()
    # Runs of one request on one engine follow each other without a hole, and never overlap.
    for (_, _), mine in runs.group_by("request", "engine", maintain_order=True):
        assert (mine["first_step"][1:] > mine["last_step"][:-1]).all()
    if plan.horizon_ns is None:
        assert (of["status"] != outcome.UNFINISHED).all()
        assert steps["preempted"].sum() == of["preemptions"].sum()
    moves = said.moves
    assert (moves["end_ns"] >= moves["start_ns"]).all()
    assert (moves["bytes"] >= 0).all()
    for _, mine in moves.filter(pl.col("way") >= 0).group_by("way"):
        way = plan.ways[mine["way"][0]]
        fixed = way.base_ns + mine["blocks"] * way.per_block_ns
        least = min((plan.links[i].bytes_per_s for i in way.links), default=None)
        alone = fixed if least is None else fixed + (mine["bytes"] * 1e9 / least).ceil().cast(pl.Int64) - 1
        assert (mine["end_ns"] - mine["start_ns"] >= alone).all()


def done_at(of: pl.DataFrame) -> list[int]:
    """Positions of the requests that are done."""
    return [i for i, s in enumerate(of["status"].to_list()) if s == outcome.DONE]


def _check_requests(of: pl.DataFrame, work: Workload, plan: Plan) -> None:
    for r, row in enumerate(of.iter_rows(named=True)):
        if row["status"] != outcome.DONE:
            assert row["last_token_ns"] == -1
            if row["status"] == outcome.REFUSED:
                assert row["routed_ns"] == row["engine"] == -1 < row["arrival_ns"] + 1
            continue
        times = [row[c] for c in ("arrival_ns", "routed_ns", "first_seen_ns", "scheduled_ns", "prefill_end_ns", "last_token_ns")]
        assert times == sorted(times)
        assert row["prefill_end_ns"] <= row["first_token_ns"] or plan.handover is None or row["preemptions"] > 0
        assert row["first_token_ns"] <= row["last_token_ns"]
        found = sum(row[c] for c in ("cached_tokens", *(f"cached_tier{i}_tokens" for i in range(4))))
        assert 0 <= found <= work.prompt_tokens[r] - 1
        assert row["resumed_tokens"] >= 0
        if row["decode_engine"] >= 0:
            assert 0 <= row["decode_cached_tokens"] <= work.prompt_tokens[r]
            way = ("prefill_end_ns", "decode_queued_ns", "decode_seen_ns", "decode_scheduled_ns", "last_token_ns")
            assert [row[c] for c in way] == sorted(row[c] for c in way)
            assert row["handover_start_ns"] <= row["handover_end_ns"] <= row["decode_scheduled_ns"]
        if row["load_start_ns"] >= 0:
            assert row["load_start_ns"] <= row["load_end_ns"]
