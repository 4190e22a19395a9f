"""The ledger on the terminal, in charts, and its terms."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console, Group
from support.memory import MemoryTrace

import hoptrace
from hoptrace.analysis.moves.ledger import Ledger, ledger
from hoptrace.analysis.moves.ledger_reusable import reusable
from hoptrace.analysis.moves.ledger_terms import TERMS
from hoptrace.analysis.moves.ledger_text import blocks
from hoptrace.app.charts_ledger import flows, reusable_curve
from hoptrace.manifest import Manifest

REAL = Path(__file__).parent / "data/vllm_traces"
LINK = {"name": "nic", "a": "client", "b": "server:s", "kind": "ethernet", "bytes_per_s": 100, "entity": "eth0"}


@pytest.fixture(scope="module")
def book() -> Ledger:
    return ledger(hoptrace.open(REAL / "preempted.trace"))


def shown(b: Ledger, *, full: bool = False, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(Group(*blocks(b, full=full)))
    return out.getvalue()


def test_one_screen_and_all_of_it(book: Ledger) -> None:
    short, whole = shown(book), shown(book, full=True)
    assert len(short.splitlines()) <= 12 < len(whole.splitlines())
    assert "288 more were own tokens found again after a preemption, which is no reuse" in " ".join(short.split())
    for line in (
        "12 KiB of KV a token",
        "74 blocks at the end = 0 before + 382 stored + 0 copied in - 308 freed",
        "In all 325 steps the KV in use is within the cached blocks",
        "control operations (9.98 per output token)",
        "vllm itself tells 12% (vllm:prefix_cache)",
    ):
        assert line in " ".join(whole.split())


def test_what_is_wrong_is_on_the_one_screen() -> None:
    moves = [
        {"start_ns": 0, "end_ns": 10**9, "object": "tokens", "src": "server:s", "dst": "client", "path": ["nic"], "bytes": 99,
         "transfers": 1, "mechanism": "message", "basis": "counted"}
    ]  # fmt: skip
    counters = [
        {
            "time_ns": t,
            "entity": "eth0",
            "name": "tx",
            "direction": "rx",
            "unit": "bytes",
            "semantics": "cumulative",
            "value_int": v,
        }
        for t, v in ((0, 5), (10**9, 10))
    ]
    manifest = Manifest(origin="recorded", platform={"links": [LINK]})
    text = shown(ledger(MemoryTrace({"moves": moves}, manifest)))
    assert "Link nic, server:s → client: over 80% full for 1.00 s (peak 99%, mean 99%; by its moves)." in text
    text = shown(ledger(MemoryTrace({"moves": moves, "counters": counters}, manifest)))
    assert "Moves name link nic for 160 B more than its counter saw, and no other link shows it." in text


def test_nothing_to_say() -> None:
    empty = ledger(MemoryTrace({}))
    assert shown(empty) == "\n" or shown(empty) == ""
    assert "No moves are known." in shown(empty, full=True)


def test_markup_in_names_is_text() -> None:
    moves = [{"start_ns": 0, "object": "kv", "src": "[red]x", "dst": "[/]", "bytes": 1, "mechanism": "dma", "basis": "counted"}]
    assert "[red]x → [/]" in shown(ledger(MemoryTrace({"moves": moves})), full=True)


def test_charts(book: Ledger) -> None:
    spec = json.loads(flows(book.matrix()).to_json())
    (rows,) = spec["datasets"].values()
    assert len(rows) == 5 and rows[0]["row"].startswith("weights: memory:vllm → compute:vllm (derived)")
    assert flows(ledger(MemoryTrace({})).matrix()).to_json()
    trace = MemoryTrace(
        {"requests": [{"request": i, "arrival_ns": i, "prefix_blocks": [1, 2, i + 9], "block_size": 2} for i in range(5)]}
    )
    found = reusable(trace, (1, 2, 4))
    assert found is not None
    spec = json.loads(reusable_curve(found.points()).to_json())
    (points,) = spec["datasets"].values()
    assert [(p["capacity_blocks"], round(p["share"], 4)) for p in points if p["of"] == "blocks"][-1] == (7, round(8 / 15, 4))


@pytest.mark.parametrize("name", [t.name for t in TERMS if t.sql])
def test_the_sql_of_each_term_runs(name: str) -> None:
    trace = hoptrace.open(REAL / "preempted.trace")
    term = next(t for t in TERMS if t.name == name)
    assert trace.sql(term.sql).columns and term.formula and term.unit


def test_json_is_json(book: Ledger) -> None:
    found = json.loads(json.dumps(book.as_dict(), allow_nan=False))
    assert set(found) >= {
        "rows", "links", "per_output_token", "per_request", "per_second", "assumed", "link_use", "elsewhere", "reuse",
        "engine_rates", "upkeep", "reusable", "geometry", "resident", "amplification", "unseen", "notes",
    }  # fmt: skip
