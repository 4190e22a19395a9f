"""Own memory per output token where not all steps are known: a lower bound, never a plain number."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, Group, RenderableType
from support.memory import MemoryTrace

from hoptrace.analysis.moves.ledger import ledger
from hoptrace.analysis.moves.ledger_text import blocks
from hoptrace.analysis.report import report
from hoptrace.manifest import Manifest, Server

SERVER = Server(name="s", weight_bytes=1000, layers=2, kv_heads=1, heads=1, head_size=4, kv_dtype="f16")
MANIFEST = Manifest(origin="recorded", servers=[SERVER], closed=True)
NOTHING = {"prefill_tokens": 0, "prefill_context_tokens": 0, "prefill_requests": 0}


def trace(hidden: int = 0, counters: list[dict[str, Any]] | None = None, **more: Any) -> MemoryTrace:
    """One request of five tokens in five steps, and ``hidden`` ones of five tokens of which no step is known."""
    steps: list[dict[str, Any]] = [
        {"server": "s", "step": 0, "start_ns": 0, "end_ns": 10, "prefill_tokens": 4, "prefill_context_tokens": 0,
         "prefill_requests": 1, "decode_requests": 0, "decode_tokens": 0, "decode_context_tokens": 0}
    ]  # fmt: skip
    steps += [
        {"server": "s", "step": i, "start_ns": 10 * i, "end_ns": 10 * i + 10, **NOTHING, "decode_requests": 1, "decode_tokens": 1,
         "decode_context_tokens": 3 + i}
        for i in range(1, 5)
    ]  # fmt: skip
    requests = [
        {"request": i, "arrival_ns": 100 * i, "finish_ns": 100 * i + 50, "output_tokens": 5, "prompt_tokens": 4}
        for i in range(1 + hidden)
    ]
    run = {"request": 0, "server": "s"}
    residency = [
        run | {"first_step": 0, "last_step": 0, "phase": "chunk", "tokens_per_step": 4, "context_at_start": 0},
        run | {"first_step": 1, "last_step": 4, "phase": "decode", "tokens_per_step": 1, "context_at_start": 4},
    ]
    rows = {"requests": requests, "steps": steps, "residency": residency, "counters": counters or [], **more}
    return MemoryTrace(rows, MANIFEST)


def shown(lines: list[RenderableType]) -> str:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(Group(*lines))
    return out.getvalue()


def passes(n: int) -> list[dict[str, Any]]:
    row = {"entity": "server:s", "name": "llamacpp:n_decode_total", "semantics": "cumulative", "width_bits": 64}
    return [row | {"time_ns": t, "value_int": v} for t, v in ((0, 7), (200, 7 + n))]


def test_all_steps_known_is_a_plain_number() -> None:
    book = ledger(trace(counters=passes(5)))
    assert book.cover.whole and book.cover.tokens == 5 and book.cover.passes == 5
    weights = next(r for r in book.as_dict()["rows"] if r["object"] == "weights")
    assert weights["bytes_per_output_token"] == 1000 and not weights["lower_bound"]
    assert not next(a for a in book.amplification if a.object == "weights").at_least
    assert "at least" not in report(trace()).headline


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (trace(hidden=4), "the known steps gave 5 of 25 output tokens; 4 requests with output are in no known step"),
        (trace(counters=passes(9)), "the server counted 9 passes over the model, 5 steps are known"),
        (trace(coverage=[{"table": "steps", "server": "s", "from_ns": 0, "to_ns": 50, "fraction": 0.4}]), "is 40%"),
    ],
)
def test_missing_steps_make_a_lower_bound(given: MemoryTrace, why: str) -> None:
    book = ledger(given)
    assert not book.cover.whole and any(why in s and "lower bound" in s for s in book.unseen)
    # 5 passes of 1,000 bytes, and KV, over all output tokens: never a plain number.
    assert book.per_token(memory=True)["bytes"].to_list() == [None]
    found = book.as_dict()
    rows = [r for r in found["rows"] if r["object"] in ("weights", "kv")]
    assert rows and all(r["lower_bound"] and r["bytes_per_output_token"] is None and r["bytes_per_s"] is None for r in rows)
    total = sum(r["bytes"] for r in rows)
    assert found["steps"]["memory_bytes_per_output_token_at_least"] == total / book.output_tokens  # type: ignore[operator]
    assert {a.object: a.at_least for a in book.amplification} == {"weights": True, "kv": False}
    r = report(given)
    assert "at least" in r.headline and "not all steps are known" in r.headline


def test_the_terminal_marks_the_bounds() -> None:
    text = shown(blocks(ledger(trace(hidden=4)), full=True))
    line = next(x for x in text.splitlines() if x.startswith("weights"))
    assert "≥ 200 B" in line and "≥ 4.88 KiB" in line
    assert "weights ≥ ×5" in text


def test_what_other_moves_do_not_say_is_a_bound_in_the_headline() -> None:
    move = {"start_ns": 0, "object": "tokens", "src": "server:s", "dst": "client", "basis": "counted", "transfers": 1}
    known = trace(moves=[move | {"bytes": 10}, move | {"bytes": 10}])
    some = trace(moves=[move | {"bytes": 10}, move])
    assert "of together 4 B (counted)" in report(known).headline
    assert "of together at least 2 B (counted)" in report(some).headline


def test_without_steps_nothing_is_said_to_be_whole() -> None:
    book = ledger(MemoryTrace({"requests": [{"request": 0, "arrival_ns": 0, "finish_ns": 9, "output_tokens": 5}]}, MANIFEST))
    assert not book.cover.whole and book.as_dict()["steps"]["missing"] == ["no steps are known"]
    assert not any("lower bound" in s for s in book.unseen)
