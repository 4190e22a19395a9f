"""How far both engines stand from each reference that the tests hold them to, as figures: rows for docs/fidelity.md.

The references and how they were made: tests/data/reference/README.md. The tests say what must be met; this says what is met.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

sys.path.append(str(Path(__file__).parents[2] / "tests"))

import test_reference_dynamo as dynamo
import test_reference_vllm_transfers as transfers
from support.vllm_reference import (
    ENGINES,
    REFERENCE,
    Simulate,
    names,
    ours,
    plan_of,
    scenario,
    theirs,
    work_of,
)  # fmt: skip

from hoptrace.replay.costs.table import read_table
from hoptrace.replay.outcome import REQUEST, Kept
from hoptrace.replay.plan import EngineSpec, Plan
from hoptrace.stepcost import fixed

__all__ = ["Agreement", "agreements"]

_DATA = REFERENCE.parent
_VLLM = "vLLM 0.32's scheduler"


@dataclass(frozen=True)
class Agreement:
    """One reference under both engines.

    Attributes:
        reference: whose output, with its version. what: which policies it shows.
        cases: scenarios. compared: how many things were held against each other. things: what they are.
        equal: how many of them are equal (to a microsecond where they are times), by the engine that is worse.
        worst: the largest difference, as a sentence; empty if all are equal.
    """

    reference: str
    what: str
    cases: int
    compared: int
    things: str
    equal: int
    worst: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def agreements(say: Callable[[str], None] = lambda _: None) -> Iterator[Agreement]:
    """All of them, one after another; some minutes of one core."""
    for make in (_scheduler, _tiers, _pairs, _aisimulate, _mocker, _caches, _prompts_first, _split, _splitwise):
        say(make.__doc__ or "")
        yield from make()


def _steps(
    scenarios: list[str], folder: str, played: Callable[[Simulate, dict[str, Any]], list[tuple[list[Any], list[Any]]]]
) -> tuple[int, int]:
    """(steps, equal ones by the worse engine)."""
    total, equal = 0, []
    for simulate in ENGINES.values():
        total = good = 0
        for name in scenarios:
            for a, b in played(simulate, scenario(folder, name)):
                total += max(len(a), len(b))
                good += sum(x == y for x, y in zip(map(_plain, a), map(_plain, b), strict=False))
        equal.append(good)
    return total, min(equal)


def _plain(step: dict[str, Any]) -> dict[str, Any]:
    return step | {"preempted": sorted(step["preempted"])}


def _scheduler() -> Iterator[Agreement]:
    """vLLM's scheduler"""
    kinds = {
        "batching, chunks, budget, places": lambda n: (
            not n.startswith(("prefix", "spec", "tight", "water", "prio", "short", "dead"))
        ),
        "preemption, watermark": lambda n: n.startswith(("tight", "water")),
        "priority, shortest first, deadlines": lambda n: n.startswith(("prio", "short", "dead")),
        "prefix cache": lambda n: n.startswith("prefix"),
        "speculation": lambda n: n.startswith("spec"),
    }

    def played(simulate: Simulate, said: dict[str, Any]) -> list[tuple[list[Any], list[Any]]]:
        (steps,), _, _ = ours(simulate, work_of(said["requests"], said["settings"]["block"]), plan_of(said))
        return [(steps, theirs(said))]

    there = names("vllm_scheduler")
    for what, chosen in kinds.items():
        some = [n for n in there if chosen(n)]
        total, equal = _steps(some, "vllm_scheduler", played)
        yield Agreement(f"{_VLLM} on a virtual clock", what, len(some), total, "steps", equal)


def _tiers() -> Iterator[Agreement]:
    """vLLM's host tier"""

    def played(simulate: Simulate, said: dict[str, Any]) -> list[tuple[list[Any], list[Any]]]:
        work = work_of(said["requests"], said["settings"]["block"])
        (steps,), _, _ = ours(simulate, work, transfers.tiered(said))
        return [(steps, theirs(said))]

    total, equal = _steps(transfers.TIERS, transfers.FOLDER, played)
    yield Agreement(
        f"{_VLLM} with its OffloadingConnector", "host tier, write-through", len(transfers.TIERS), total, "steps", equal
    )


def _pairs() -> Iterator[Agreement]:
    """vLLM's prefill/decode pair"""

    def played(simulate: Simulate, said: dict[str, Any]) -> list[tuple[list[Any], list[Any]]]:
        work = work_of(said["requests"], said["settings"]["block"])
        (prefill, decode), _, _ = ours(simulate, work, transfers.paired(said))
        return [(prefill, theirs(said)), (decode, theirs(said, "decode_"))]

    total, equal = _steps(transfers.PAIRS, transfers.FOLDER, played)
    yield Agreement(
        f"two of {_VLLM}s, NIXL's rules", "prefill/decode, pull, first token again", len(transfers.PAIRS), total, "steps", equal
    )


def _times(
    reference: str,
    what: str,
    sides: Callable[[Simulate], list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]],
    cases: int = 1,
) -> Agreement:
    """Times in ms of both engines against the reference's."""
    total, equal, worst = 0, [], 0.0
    for simulate in ENGINES.values():
        total = good = 0
        for here, there in sides(simulate):
            apart = np.abs(here - there)
            total, good, worst = total + len(apart), good + int((apart <= 0.001).sum()), max(worst, float(apart.max()))
        equal.append(good)
    said = f"{1000 * worst:.2g} µs" if worst < 0.1 else f"{worst:.2g} ms"
    return Agreement(reference, what, cases, total, "first tokens and ends", min(equal), f"at most {said} apart" if worst else "")


_MOCKER = "Dynamo's mocker replay 1.6.1"


def _aisimulate() -> Iterator[Agreement]:
    """AISimulate"""
    asked = pl.read_csv(REFERENCE / "r5_200.csv")
    said = pl.read_csv(REFERENCE / "fixed_cost_one_worker.csv")
    work = work_of([{"arrival_ns": round(a * 1e9), "prompt": p, "output": o} for a, p, o in asked.iter_rows()], 64)
    plan = Plan((EngineSpec("w0", **dynamo.RULES),), (fixed(any_prefill_ns=50e6, any_decode_ns=12e6),))

    def sides(simulate: Simulate) -> list[tuple[Any, Any]]:
        first, last = dynamo.column(simulate, work, plan, "first_token_ns", "last_token_ns")
        return [(first, said["first_token_ms"].to_numpy()), (last, said["finish_ms"].to_numpy())]

    yield _times("AISimulate 0.13.0.dev", "continuous batching, chunks", sides)


def _mocker_sides(rows: list[dict[str, Any]], work: Any, plan: Plan) -> Callable[[Simulate], list[tuple[Any, Any]]]:
    def sides(simulate: Simulate) -> list[tuple[Any, Any]]:
        first, last = dynamo.column(simulate, work, plan, "first_token_ns", "last_token_ns")
        return [(first, dynamo.of(rows, "first_token_ms")), (last, dynamo.of(rows, "last_token_ms"))]

    return sides


def _mocker() -> Iterator[Agreement]:
    """Dynamo's mocker"""
    for name, workers in (("one_worker", 1), ("three_workers", 3)):
        rows = dynamo.said(name)
        plan = Plan(tuple(EngineSpec(f"w{i}", **dynamo.RULES) for i in range(workers)), (dynamo.COST,))
        what = f"chunks, round robin over {workers}" if workers > 1 else "chunks"
        yield _times(_MOCKER, what, _mocker_sides(rows, dynamo.asked(rows), plan))


def _caches() -> Iterator[Agreement]:
    """Dynamo's mocker with a prefix cache"""
    for name, blocks, workers in (("prefix", 200_000, 1), ("prefix_evictions", 3000, 1), ("prefix_four_workers", 2000, 4)):
        rows = dynamo.said(name)
        work, plan = dynamo.mooncake(rows, blocks, workers)
        what = "prefix cache" + (", evictions" if blocks < 100_000 else "") + (f", {workers} workers" if workers > 1 else "")
        yield _times(_MOCKER, what, _mocker_sides(rows, work, plan))


def _prompts_first() -> Iterator[Agreement]:
    """Dynamo's model of SGLang"""
    for name, budget in (("prompts_first", 8192), ("prompts_first_in_chunks", 1024)):
        rows = dynamo.said(name)
        rules = {**dynamo.RULES, "block_size_tokens": 1, "max_batched_tokens": budget, "mode": "prefill_first"}
        plan = Plan((EngineSpec("e", chunked_prefill=True, **rules),), (dynamo.COST,))
        yield _times(f"{_MOCKER}, its SGLang", f"prefill first, budget {budget:,}", _mocker_sides(rows, dynamo.asked(rows), plan))


def _split() -> Iterator[Agreement]:
    """Dynamo's mocker, prefill and decode apart"""
    for name, prefills in (("pair", 1), ("two_to_one", 2)):
        rows = dynamo.said(name)
        work, plan = dynamo.split(rows, prefills)
        at, worst, good, total = dynamo.of(rows, "arrival_time_ms"), 0.0, [], 0
        for simulate in ENGINES.values():
            first, last = dynamo.column(simulate, work, plan, "first_token_ns", "last_token_ns")
            pairs = [(first - at, dynamo.of(rows, "first_token_ms") - at), (last - at, dynamo.of(rows, "last_token_ms") - at)]
            apart = [abs(float(f(a)) / float(f(b)) - 1) for a, b in pairs for f in (np.mean, *(_at(q) for q in (10, 50, 90, 99)))]
            total, worst = len(apart), max(worst, *apart)
            good.append(sum(x <= 0.02 for x in apart))
        yield Agreement(
            _MOCKER, f"prefill/decode {prefills}:1", 1, total, "means and percentiles (within 2 %)", min(good),
            f"at most {100 * worst:.1f} % apart",
        )  # fmt: skip


def _at(q: int) -> Callable[[Any], Any]:
    return lambda v: np.percentile(v, q)


def _splitwise() -> Iterator[Agreement]:
    """splitwise-sim"""
    rows = pl.read_parquet(REFERENCE / "splitwise" / "one_server_1k.parquet")
    asked = [
        {"arrival_ns": round(at * 1e9), "prompt": prompt, "output": output}
        for at, prompt, output in rows.select("arrival_s", "prompt_tokens", "output_tokens").iter_rows()
    ]
    table = f"{_DATA / 'costs' / 'splitwise_perf_model.csv'},model=llama2-70b,hardware=h100-80gb,tensor_parallel=8,beyond=line"
    rules = EngineSpec("e", mode="prompts_first", chunked_prefill=False, max_sequences=512, max_batched_tokens=2048)
    plan, work = Plan((rules,), (read_table(table, None),)), work_of(asked, 1)
    worst, good, total = 0.0, [], 0
    for simulate in ENGINES.values():
        found = simulate(work, plan, Kept()).requests
        here = [
            (found[:, REQUEST.index(c)] - found[:, REQUEST.index("arrival_ns")]) / 1e6
            for c in ("first_token_ns", "last_token_ns")
        ]
        apart = np.concatenate(
            [np.abs(h - 1e3 * rows[t].to_numpy()) for h, t in zip(here, ("ttft_s", "response_s"), strict=True)]
        )
        total, worst = len(apart), max(worst, float(apart.max()))
        good.append(int((apart <= 0.1).sum()))
    yield Agreement(
        "splitwise-sim 8f99e7d with its own cost table", "prompts first, decoders in what the budget leaves", 1, total,
        "first tokens and ends (within 0.1 ms)", min(good), f"at most {worst:.2g} ms apart",
    )  # fmt: skip
