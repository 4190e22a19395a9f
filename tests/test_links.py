"""Which request an engine's identifier means: claims before and after, those that nobody claims, bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hoptrace
from hoptrace.collectors import links as module
from hoptrace.collectors.left import Left
from hoptrace.collectors.links import GRACE_NS, Links, readings
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []

    def append(self, table: str, rows: list[dict[str, Any]]) -> None:
        self.rows += [(table, row) for row in rows]


def make(primary: bool = True) -> tuple[Links, Kept]:
    kept = Kept()
    links = Links(kept)  # type: ignore[arg-type]
    links.primary = primary
    return links, kept


def rows_of(kept: Kept) -> list[tuple[str, int, Any]]:
    return [(table, row["request"], row.get("x")) for table, row in kept.rows]


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        ("cmpl-abc", [("cmpl-abc", 0, 0)]),
        ("cmpl-abc-2-1a2b3c4d", [("cmpl-abc", 2, 0), ("cmpl-abc-2", 0, 0), ("cmpl-abc-2-1a2b3c4d", 0, 0)]),
        ("3_chatcmpl-9f-1a2b3c4d", [("chatcmpl-9f", 0, 3), ("chatcmpl-9f-1a2b3c4d", 0, 3)]),
    ],
)
def test_what_an_engines_identifier_may_mean(told: str, meant: list[tuple[str, int, int]]) -> None:
    assert readings(told) == meant


@pytest.mark.parametrize("client", ["cmpl-hoptrace-00c0ffee-7", "cmpl-a-12345678", "chatcmpl-12345678", "cmpl-7"])
@pytest.mark.parametrize("before", [True, False])
def test_a_claim_finds_its_engine_whatever_its_own_identifier_ends_with(client: str, before: bool) -> None:
    links, kept = make()
    inside = f"{client}-0-1a2b3c4d" if client.startswith("cmpl") else f"{client}-1a2b3c4d"
    number, first = links.begin(None, "a")
    assert first
    if before:
        links.claim(number, client)
    links.add(inside, "stages", {"server": "a"}, 1)
    if not before:
        assert kept.rows == [] and links.find(inside) is None
        links.claim(number, client)
    assert [(t, r["request"], r["sequence"], r["stage"]) for t, r in kept.rows] == [("stages", number, 0, 0)]
    assert links.find(inside) == number and links.late == 0


def test_sequences_of_one_request() -> None:
    links, kept = make()
    for n in (2, 0, 1):
        links.add(f"{n}_chatcmpl-x-1a2b3c4{n}", "tokens", {"x": n}, 1)
    links.claim(links.new(), "chatcmpl-x")
    assert sorted((r["sequence"], r["x"], r["request"]) for _, r in kept.rows) == [(0, 0, 0), (1, 1, 0), (2, 2, 0)]


def test_of_several_stays_the_first_is_when_an_engine_began() -> None:
    links, kept = make()
    links.claim(links.new(), "cmpl-a")
    for server, queued in (("d", 50), ("p", 10), ("d", 60)):
        times = {"queued_ns": queued, "scheduled_ns": queued + 5, "engine_first_token_ns": queued + 9}
        links.add("cmpl-a-0-1a2b3c4d", "requests", times, 1)
        links.add("cmpl-a-0-1a2b3c4d", "stages", {"server": server, "cached_tokens": 7 if server == "d" else None}, 1)
    told = [(r["queued_ns"], r["scheduled_ns"], r["engine_first_token_ns"]) for t, r in kept.rows if t == "requests"]
    assert told == [(50, 55, 59), (10, 15, 19), (10, 15, 69)]
    assert links.knows_cached(0, "d") and not links.knows_cached(0, "p")


def aborted(links: Links, name: str, queued: int, end: int, **more: int) -> None:
    links.add(name, "requests", {"request_id": name, "queued_ns": queued, "finish_ns": end} | more, end)
    links.add(name, "stages", {"server": "a", "end_ns": end, "end_reason": "cancelled"}, end, done=True)


@pytest.mark.parametrize("at_the_end", [True, False])
def test_who_left_before_the_answer_is_the_engines_aborted_request(at_the_end: bool) -> None:
    """vLLM names a whole answer's request at its end only: who leaves before that stood twice."""
    links, kept = make()
    number, _ = links.begin(None, "a")
    links.left(Left(number, "a", 10, 50, prompt_tokens=310, max_tokens=400))
    aborted(links, "cmpl-x-0-1a2b3c4d", 12, 52, prompt_tokens=310, max_tokens=400)
    aborted(links, "cmpl-y-0-1a2b3c4d", 13, 52, prompt_tokens=310, max_tokens=300)
    links.settle(None if at_the_end else 53 + GRACE_NS)
    rows = [r for t, r in kept.rows if t == "requests"]
    assert [(r["request"], r.get("request_id"), r.get("queued_ns")) for r in rows] == [
        (0, "cmpl-x", None), (0, None, 12), (1, "cmpl-y-0-1a2b3c4d", 13),
    ]  # fmt: skip
    assert links.find("cmpl-x-0-1a2b3c4d") == 0 and not links._left


@pytest.mark.parametrize(
    ("left", "others"),
    [
        (Left(0, "b", 10, 50), []),  # another server
        (Left(0, "a", 20_000_000, 50_000_000), []),  # queued before it was sent
        (Left(0, "a", 10, 50, max_tokens=7), []),
        (Left(0, "a", 10, 50), ["cmpl-z-0-1a2b3c4d"]),  # it may be either
    ],
)
def test_a_doubt_joins_nobody(left: Left, others: list[str]) -> None:
    links, kept = make()
    links.begin(None, "a")
    links.left(left)
    for name in ("cmpl-x-0-1a2b3c4d", *others):
        aborted(links, name, 12, 52, max_tokens=400)
    links.settle()
    assert 0 not in {r["request"] for _, r in kept.rows}


BATCH = [(f"{choice}_cmpl-x-{prompt}-1a2b3c4{prompt}", 2 * prompt + choice) for prompt in range(3) for choice in range(2)]


@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_sequences_of_several_prompts_have_the_numbers_of_their_choices(primary: bool, before: bool) -> None:
    """vLLM 0.32, three prompts with n = 2: each sequence its own number, that of the choice in the answer."""
    links, kept = make(primary)
    number = links.new()
    if before:
        links.claim(number, "cmpl-x")
        links.choices(number, 2)
    for engine_id, _ in BATCH if not before else reversed(BATCH):
        links.add(engine_id, "tokens", {"x": engine_id}, 1)
    links.claim(number, "cmpl-x")
    assert sorted((r["x"], r["sequence"]) for _, r in kept.rows) == sorted(BATCH)


def test_without_a_primary_each_identifier_is_a_request_at_once() -> None:
    links, kept = make(primary=False)
    links.add("cmpl-a-0-1a2b3c4d", "requests", {"arrival_ns": 5, "x": 1}, 1)
    links.add("cmpl-b-0-1a2b3c4d", "requests", {"x": 2}, 1)
    links.add("cmpl-a-1-ffffffff", "tokens", {"x": 3}, 1)
    assert rows_of(kept) == [("requests", 0, 1), ("requests", 1, 2), ("tokens", 0, 3)]
    assert kept.rows[0][1]["arrival_ns"] == 5 and kept.rows[2][1]["sequence"] == 1


def test_what_a_primary_saw_is_not_overwritten() -> None:
    links, kept = make()
    links.claim(links.new(), "cmpl-a")
    links.add("cmpl-a-0-1a2b3c4d", "requests", {"arrival_ns": 5, "finish_ns": 9, "queued_ns": 6}, 1)
    assert kept.rows == [("requests", {"request": 0, "queued_ns": 6})]


def test_who_is_never_claimed_gets_a_number_after_the_grace() -> None:
    links, kept = make()
    links.add("cmpl-a-0-1a2b3c4d", "requests", {"arrival_ns": 5, "x": 1}, 10, done=True)
    links.add("cmpl-b-0-1a2b3c4d", "requests", {"arrival_ns": 6, "x": 2}, 10)
    links.settle(10 + GRACE_NS)
    assert kept.rows == []
    links.settle(11 + GRACE_NS)
    assert rows_of(kept) == [("requests", 0, 1)] and kept.rows[0][1]["arrival_ns"] == 5
    links.claim(links.new(), "cmpl-a")
    assert links.late == 1
    links.settle()
    assert rows_of(kept)[1:] == [("requests", 2, 2)]


def test_a_router_passes_a_request_on() -> None:
    links, _ = make()
    assert links.begin("r1", "router") == (0, True)
    assert links.begin("r1", "prefill") == (0, False)
    assert links.begin("r1", "decode") == (0, False)
    assert links.begin("r1", "router") == (1, True)  # the client's second request of that name
    assert links.begin("r1", "decode") == (1, False)
    assert links.begin(None, "decode") == (2, True)
    assert [links.stage(0, s) for s in ("router", "prefill", "decode", "prefill")] == [0, 1, 2, 1]


def test_parked_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PARKED_ROWS", 10)
    links, kept = make()
    for i in range(25):
        links.add(f"id{i // 5}", "tokens", {"x": i}, i)
    assert [x for _, _, x in rows_of(kept)] == list(range(15))
    links.settle()
    assert [x for _, _, x in rows_of(kept)] == list(range(25))
    assert [n for _, n, _ in rows_of(kept)] == [i // 5 for i in range(25)]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["claim", "add", "settle"])), max_size=60))
def test_no_row_is_lost_or_doubled(script: list[tuple[int, str]]) -> None:
    links, kept = make()
    numbers = {i: links.new() for i in range(5)}
    added = 0
    for now, (i, what) in enumerate(script):
        if what == "claim":
            links.claim(numbers[i], f"cmpl-{i}")
        elif what == "add":
            links.add(f"cmpl-{i}-0-1a2b3c4{i}", "tokens", {"x": added}, now)
            added += 1
        else:
            links.settle(now)
    links.settle()
    assert sorted(x for _, _, x in rows_of(kept)) == list(range(added))


def test_rows_reach_the_trace(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
        links = Links(writer)
        links.add("cmpl-a-0-1a2b3c4d", "requests", {"arrival_ns": 5, "source": "s"}, 1)
        links.add("cmpl-a-0-1a2b3c4d", "stages", {"server": "v", "source": "s"}, 1, done=True)
    (row,) = hoptrace.open(tmp_path / "t.trace").table("stages").collect().to_dicts()
    assert (row["request"], row["sequence"], row["attempt"], row["stage"], row["server"]) == (0, 0, 0, 0, "v")
