"""Time between steps: where nobody recorded them, and while a place is lost."""

from __future__ import annotations

from typing import Any

import pytest
from support.memory import MemoryTrace

from hoptrace.analysis.latency.accounting import account
from hoptrace.manifest import Manifest, Server

MS = 1_000_000
REQUEST = {
    "request": 0, "arrival_ns": 0, "arrival_of": "received", "received_ns": 0, "scheduled_ns": 0, "first_token_ns": 10 * MS,
    "last_token_ns": 90 * MS, "finish_ns": 100 * MS, "prompt_tokens": 5,
}  # fmt: skip


def step(number: int, start: int, end: int, **kw: Any) -> dict[str, Any]:
    return {
        "server": "s", "step": number, "start_ns": start * MS, "end_ns": end * MS, "origin": "observed", "preempted": 0,
        "prefill_tokens": 0, "decode_requests": 1,
    } | kw  # fmt: skip


def run(first: int, last: int, phase: str) -> dict[str, Any]:
    return {"request": 0, "server": "s", "first_step": first, "last_step": last, "phase": phase, "tokens_per_step": 1}


def covered(*spans: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"table": "steps", "server": "s", "from_ns": a * MS, "to_ns": b * MS} for a, b in spans]


def parts(**tables: list[dict[str, Any]]) -> dict[str, float]:
    servers = [Server(name="s", max_sequences=2)]
    trace = MemoryTrace({"requests": [REQUEST], **tables}, Manifest(origin="recorded", servers=servers, closed=True))
    (row,) = account(trace).parts.to_dicts()
    named = {k[:-3]: v / MS for k, v in row.items() if v and k.endswith("_ns") and k not in ("finish_ns", "arrival_ns", "e2e_ns")}
    assert sum(named.values()) == 100
    return named


@pytest.mark.parametrize("runs", [[run(1, 12, "decode")], [run(1, 2, "decode"), run(11, 12, "decode")]])
@pytest.mark.parametrize(
    ("cover", "gap"),
    [
        (covered((0, 35), (65, 100)), {"host_gap": 10, "unexplained": 30}),
        (covered((0, 100)), {"host_gap": 40}),
        ([], {"host_gap": 40}),
    ],
)
def test_no_step_seen_where_nobody_recorded_is_not_host_time(
    runs: list[dict[str, Any]], cover: list[dict[str, Any]], gap: dict[str, float]
) -> None:
    """Steps 1, 2, 11, 12 and 30 to 70 ms nothing, of which 35 to 65 was not recorded: the same whether it lies in a run or
    between two."""
    steps = [
        step(0, 0, 10, prefill_tokens=5, decode_requests=0),
        step(1, 10, 20),
        step(2, 20, 30),
        step(11, 70, 80),
        step(12, 80, 90),
    ]
    found = parts(steps=steps, residency=[run(0, 0, "chunk"), *runs], coverage=cover)
    assert found == {"prefill": 10, "decode": 40, "delivery": 10} | gap


def test_steps_that_follow_on_each_other_left_nothing_out() -> None:
    """Coverage that knows only a share of the steps: between two with neighbouring numbers there was none."""
    steps = [step(0, 0, 10, prefill_tokens=5, decode_requests=0), step(1, 20, 30), step(2, 60, 90)]
    cover = [c | {"fraction": 0.5} for c in covered((0, 100))]
    found = parts(steps=steps, residency=[run(0, 0, "chunk"), run(1, 2, "decode")], coverage=cover)
    assert found == {"prefill": 10, "decode": 40, "host_gap": 30, "unexplained": 10, "delivery": 10}


def test_a_lost_place_is_lost_until_a_step_takes_the_request_up_again() -> None:
    """Preempted in the step from 20 to 30, taken up at 60: the 30 ms without a step are no host time."""
    steps = [step(0, 0, 10, prefill_tokens=5, decode_requests=0), step(1, 10, 20), step(2, 20, 30, preempted=1), step(3, 60, 90)]
    runs = [run(0, 0, "chunk"), run(1, 1, "decode"), run(2, 2, "preempted"), run(3, 3, "decode")]
    assert parts(steps=steps, residency=runs) == {"prefill": 10, "decode": 40, "preempted": 40, "delivery": 10}


def test_a_place_lost_twice_is_not_lost_in_between() -> None:
    steps = [
        step(0, 0, 10, prefill_tokens=5, decode_requests=0), step(1, 10, 20, preempted=1), step(2, 20, 30),
        step(3, 30, 40, preempted=1), step(4, 40, 90),
    ]  # fmt: skip
    runs = [run(0, 0, "chunk"), run(1, 1, "preempted"), run(2, 2, "decode"), run(3, 3, "preempted"), run(4, 4, "decode")]
    assert parts(steps=steps, residency=runs) == {"prefill": 10, "decode": 60, "preempted": 20, "delivery": 10}
