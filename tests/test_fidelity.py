"""Predicted against observed: literal figures, pairing, and what is said of unequal work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.workloads import MS, store

from hoptrace.reader import Trace
from hoptrace.replay.fidelity import compare


def capture(path: Path, *requests: tuple[int, int, int, int, int]) -> Trace:
    """A trace of (number, arrival ms, first token ms, finish ms, output tokens)."""
    rows: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    for number, arrival, first, finish, output in requests:
        rows.append({
            "request": number, "arrival_ns": arrival * MS, "arrival_of": "received", "received_ns": arrival * MS,
            "scheduled_ns": (arrival + 1) * MS, "first_token_ns": first * MS, "last_token_ns": finish * MS,
            "finish_ns": finish * MS, "prompt_tokens": 5, "output_tokens": output, "source": "t",
        })  # fmt: skip
        for i in range(output):
            at = first * MS + (finish - first) * MS * i // max(1, output - 1)
            tokens.append(
                {"request": number, "sequence": 0, "index": i, "time_ns": at, "count": 1, "vantage": "proxy", "source": "t"}
            )
    return store(path, {"requests": pl.DataFrame(rows), "tokens": pl.DataFrame(tokens)})


def test_literal_figures(tmp_path: Path) -> None:
    a = capture(tmp_path / "a.trace", (0, 0, 100, 300, 3), (1, 0, 200, 400, 3))
    b = capture(tmp_path / "b.trace", (0, 0, 110, 330, 3), (1, 0, 220, 400, 3))
    c = compare(a, b)
    assert c.paired and c.requests == (2, 2) and c.notes == ()
    ttft = c.get("ttft", "mean")
    assert (ttft.observed, ttft.predicted, ttft.error, ttft.error_pct) == (150 * MS, 165 * MS, 15 * MS, 10.0)
    assert c.get("e2e", "p50").error == 15 * MS
    assert c.get("itl", "mean").observed == 100 * MS
    assert c.get("throughput", "requests").observed == 5.0
    assert c.per_request["ttft"] == {"n": 2, "p50": 10.0, "p95": 10.0}
    assert c.errors()["ttft"] == {"mean": 0.1, "p50": 0.1, "p95": 0.1, "p99": 0.1}
    with pytest.raises(KeyError):
        c.get("ttft", "p1")


def test_a_trace_against_itself_has_no_error(tmp_path: Path) -> None:
    a = capture(tmp_path / "a.trace", (0, 0, 100, 300, 3), (1, 0, 200, 400, 1))
    assert all(v == 0 for m in compare(a, a).errors().values() for v in m.values())


def test_only_twins_are_compared_if_nearly_all_have_one(tmp_path: Path) -> None:
    rows = [(i, 0, 100, 300, 3) for i in range(20)]
    a = capture(tmp_path / "a.trace", *rows)
    b = capture(tmp_path / "b.trace", *rows[:19])
    c = compare(a, b)
    assert c.paired and c.requests == (19, 19)
    assert c.notes == ("19 requests are on both sides (observed 20, predicted 19); only they are compared.",)


def test_unequal_work_is_said(tmp_path: Path) -> None:
    a = capture(tmp_path / "a.trace", (0, 0, 100, 300, 120), (1, 0, 100, 300, 120))
    b = capture(tmp_path / "b.trace", (0, 0, 100, 300, 111), (1, 0, 100, 300, 111))
    c = compare(a, b)
    assert not c.paired and c.per_request == {}
    assert "They do unequal work: 240 output tokens observed, 222 predicted." in c.notes


def test_what_is_unknown_stays_unknown(tmp_path: Path) -> None:
    a = capture(tmp_path / "a.trace", (0, 0, 100, 300, 1))
    c = compare(a, a)
    assert c.get("itl", "p50").observed is None
    assert c.get("tpot", "mean").error_pct is None
    assert "itl" not in c.errors()
