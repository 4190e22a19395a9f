"""Several stays of a request that nobody handed over: tried again, refused, preempted; only stamps are known."""

from __future__ import annotations

from typing import Any

import pytest
from support.memory import MemoryTrace

from hoptrace.analysis.latency.accounting import Accounting, account

MS = 1_000_000


def of(first: int, *stays: tuple[int, int | None, int, str]) -> tuple[dict[str, float], Accounting]:
    """Arrives at 0, received at 1, last token at 95, ends at 100 ms. ``stays``: enqueued, scheduled, end, end_reason."""
    row: dict[str, Any] = {
        "request": 0, "arrival_ns": 0, "received_ns": MS, "sent_ns": 0, "intended_ns": 0, "first_token_ns": first * MS,
        "last_token_ns": 95 * MS, "finish_ns": 100 * MS, "output_tokens": 3, "prompt_tokens": 5,
    }  # fmt: skip
    stages = [
        {"request": 0, "attempt": i, "stage": 0, "server": "s", "enqueued_ns": a * MS, "end_ns": c * MS, "end_reason": why}
        | ({} if b is None else {"scheduled_ns": b * MS})
        for i, (a, b, c, why) in enumerate(stays)
    ]
    a = account(MemoryTrace({"requests": [row], "stages": stages}))
    (found,) = a.parts.drop("request", "arrival_ns", "finish_ns").to_dicts()
    named = {k[:-3]: v / MS for k, v in found.items() if v and k != "e2e_ns"}
    assert sum(named.values()) == 100
    return named, a


@pytest.mark.parametrize(
    ("first", "stays", "want"),
    [
        # What a stay did that failed before its first token nobody knows; the next one's work is known.
        (70, [(2, 10, 30, "failed"), (40, 50, 96, "done")],
         {"proxy": 11, "queue_room": 18, "unexplained": 20, "prefill": 20, "decode": 25}),
        (60, [(2, None, 5, "refused"), (20, 30, 96, "done")],
         {"proxy": 16, "queue_room": 10, "unexplained": 3, "prefill": 30, "decode": 35}),
        # It answered before it lost its place: what it did after that may be anything.
        (20, [(2, 10, 30, "preempted"), (30, 70, 96, "done")],
         {"proxy": 1, "queue_room": 8, "prefill": 10, "decode": 10, "preempted": 40, "unexplained": 25}),
        (80, [(2, 10, 30, "preempted"), (30, 70, 96, "done")],
         {"proxy": 1, "queue_room": 8, "unexplained": 20, "preempted": 40, "prefill": 10, "decode": 15}),
    ],
)  # fmt: skip
def test_by_hand(first: int, stays: list[tuple[int, int | None, int, str]], want: dict[str, float]) -> None:
    assert of(first, *stays)[0] == {"network_in": 1, "delivery": 5} | want


def test_who_was_refused_was_never_worked_on_there() -> None:
    _, a = of(60, (2, None, 5, "refused"), (20, 30, 96, "done"))
    assert not any("first worked on them is unknown" in u for u in a.unseen)
    _, a = of(60, (2, None, 5, "failed"), (20, 30, 96, "done"))
    assert any("first worked on them is unknown" in u for u in a.unseen)
