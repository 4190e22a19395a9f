"""When a server is full: slots over time, requests whose client has gone, counters that speak against the stamps."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from support.memory import MemoryTrace

from hoptrace.analysis.latency.accounting import account
from hoptrace.analysis.latency.fullness import fullness
from hoptrace.analysis.latency.marks import read_requests, read_stays
from hoptrace.analysis.latency.runs import read_runs
from hoptrace.analysis.latency.serverstate import changes, server_state
from hoptrace.analysis.report import report
from hoptrace.manifest import Manifest, Server

S = 1_000_000_000
DOWN = [
    {"kind": "stop", "time_ns": 100 * S, "detail": "the server's port is closed", "server": "s"},
    {"kind": "restart", "time_ns": 200 * S, "detail": "the server answers again", "server": "s"},
]
CHANGED = {
    "kind": "configuration change",
    "time_ns": 201 * S,
    "detail": "context_tokens: 8 -> 4; max_sequences: 2 -> 1",
    "server": "s",
}


def stay(request: int, enqueued: int, scheduled: int | None, end: int | None, **kw: Any) -> dict[str, Any]:
    def at(t: int | None) -> int | None:
        return None if t is None else t * S

    return {
        "request": request,
        "stage": 0,
        "server": "s",
        "enqueued_ns": at(enqueued),
        "scheduled_ns": at(scheduled),
        "end_ns": at(end),
    } | kw


def gauge(name: str, values: dict[int, int]) -> list[dict[str, Any]]:
    return [
        {"entity": "server:s", "name": name, "time_ns": t * S, "uncertainty_ns": 0, "value_int": v, "status": "ok"}
        for t, v in values.items()
    ]


def states(
    stages: list[dict[str, Any]],
    *moments: int,
    slots: int | None = 2,
    requests: dict[int, dict[str, Any]] | None = None,
    **tables: list[dict[str, Any]],
) -> list[str]:
    """full, room or unknown in the second after each moment."""
    rows = {
        "requests": [
            {"request": s["request"], "arrival_ns": s["enqueued_ns"], "finish_ns": s["end_ns"]}
            | (requests or {}).get(s["request"], {})
            for s in stages
        ],
        "stages": stages,
    }
    trace = MemoryTrace(rows | tables, Manifest(origin="recorded", servers=[Server(name="s", max_sequences=slots)], closed=True))
    stays = read_stays(trace, read_requests(trace), read_runs(pl.DataFrame(schema=trace.table("residency").collect_schema()), {}))
    found = fullness(stays, pl.DataFrame(), trace.manifest.servers[0], server_state(trace, "s"))
    said = []
    for t in moments:
        ends = np.array([t * S, (t + 1) * S])
        busy, known = (sum(int(np.diff(x.before(ends))[0]) for x in all_) for all_ in (found.by.values(), [found.known]))
        said.append({(S, S): "full", (0, S): "room", (0, 0): "unknown"}.get((busy, known), f"{busy}/{known}"))
    return said


LONG = [stay(1, 0, 0, 99), stay(2, 210, 210, 300)]


def test_without_events_the_manifest_holds() -> None:
    assert states(LONG, 50, 150, 250) == ["room", "room", "room"]
    assert states(LONG, 50, 150, 250, slots=1) == ["full", "room", "full"]
    assert states(LONG, 50, slots=None) == ["unknown"]


def test_a_change_holds_from_the_restart_and_nothing_is_known_while_away() -> None:
    assert states(LONG, 50, 150, 200, 250, 350, events=[*DOWN, CHANGED]) == ["room", "unknown", "room", "full", "room"]
    assert states(LONG, 50, 150, 250, events=DOWN) == ["room", "unknown", "room"]
    # From the restart, not from when the session had asked: a request that began in between fills the one slot.
    assert states([stay(1, 200, 200, 300)], 200, events=[*DOWN, CHANGED]) == ["full"]


def test_the_process_tells_of_its_end_before_the_port_does() -> None:
    gone = {"kind": "stop", "time_ns": 98 * S, "detail": "process 7 is gone"}
    assert states([], 97, 98, 150, 250, events=[gone, *DOWN]) == ["room", "unknown", "unknown", "room"]


def test_a_metric_that_fell_first_ends_the_same_absence() -> None:
    fell = {"kind": "restart", "time_ns": 199 * S, "detail": "a cumulative metric fell", "server": "s"}
    assert states(LONG, 150, 199, 250, events=[DOWN[0], fell, DOWN[1], CHANGED]) == ["unknown", "room", "full"]


def test_a_restart_that_nobody_saw_coming_leaves_the_slots_unknown() -> None:
    fell = {"kind": "restart", "time_ns": 200 * S, "detail": "a cumulative metric fell", "server": "s"}
    assert states([], 150, 250, events=[fell]) == ["room", "unknown"]


def test_a_change_to_none_is_unknown() -> None:
    none = CHANGED | {"detail": "max_sequences: 2 -> None"}
    assert states([], 50, 250, events=[*DOWN, none]) == ["room", "unknown"]


def test_no_stay_outlives_its_server() -> None:
    assert states([stay(1, 0, 0, None)], 50, 250, slots=1, events=DOWN) == ["full", "room"]


CANCELLED = [stay(1, 0, None, 1, end_reason="cancelled")]


def test_a_request_whose_client_has_gone_may_hold_a_slot() -> None:
    assert states(CANCELLED, 50, slots=1) == ["unknown"]
    assert states(CANCELLED, 50, slots=2) == ["room"]
    # What surely runs fills the server, whatever the other does.
    assert states([*CANCELLED, stay(2, 40, 40, 60)], 30, 50, 70, slots=1) == ["unknown", "full", "unknown"]
    assert states([stay(1, 0, None, 1, end_reason="refused")], 50, slots=1) == ["room"]


def test_the_counters_decide_what_the_stamps_cannot() -> None:
    slots = gauge("slots_processing", {48: 1, 50: 1, 52: 1, 54: 0})
    # The sample at 50 speaks from 49 to 51; nobody speaks for 60, but the server was seen idle at 54.
    assert states(CANCELLED, 40, 50, 60, slots=1, counters=slots) == ["unknown", "full", "room"]
    metric = gauge("llamacpp:requests_processing", {48: 1, 50: 1, 52: 1})
    assert states(CANCELLED, 40, 50, 60, slots=1, counters=metric) == ["unknown", "full", "unknown"]
    deferred = gauge("llamacpp:requests_deferred", {48: 0, 50: 3, 52: 0})
    assert states(CANCELLED, 48, 50, 52, slots=1, counters=deferred) == ["unknown", "full", "unknown"]
    free = gauge("slots_processing", {48: 1, 50: 1, 52: 1})
    two = [*CANCELLED, stay(2, 0, None, 1, end_reason="cancelled")]
    assert states(two, 40, 50, counters=free) == ["unknown", "room"]


def test_idle_while_the_client_still_waited_clears_nothing() -> None:
    late = [stay(1, 0, None, 50, end_reason="cancelled")]
    assert states(late, 60, slots=1, counters=gauge("slots_processing", {9: 0, 10: 0, 11: 0})) == ["unknown"]


def test_deferred_requests_speak_against_room() -> None:
    deferred = gauge("llamacpp:requests_deferred", {48: 0, 50: 3, 52: 0})
    assert states([], 48, 50, 52, counters=deferred) == ["room", "full", "room"]
    assert states([], 48, 50, 52, slots=None, counters=deferred) == ["unknown", "full", "unknown"]
    # A sample that was not taken says nothing.
    lost = [g | {"status": "absent"} for g in deferred]
    assert states([], 50, counters=lost) == ["room"]


def test_a_queue_of_vllms_is_no_room_whatever_its_slots() -> None:
    """KV may be full while sequences are not: what vLLM says of its queue decides, a wait for KV from elsewhere does not."""
    many = '{engine="0",model_name="m"}'
    waiting = gauge(f"vllm:num_requests_waiting{many}", {44: 0, 47: 0, 48: 3, 56: 3, 57: 0, 58: 0})
    assert states([], 44, 52, 57, slots=8, counters=waiting) == ["room", "full", "room"]
    reasons = '{engine="0",model_name="m",reason="%s"}'
    apart = [
        *waiting,
        *gauge(f"vllm:num_requests_waiting_by_reason{reasons % 'deferred'}", {44: 0, 47: 0, 48: 3, 56: 3, 57: 0, 58: 0}),
        *gauge(f"vllm:num_requests_waiting_by_reason{reasons % 'capacity'}", {44: 0, 47: 0, 48: 0, 56: 0, 57: 0, 58: 0}),
    ]
    assert states([], 44, 52, 57, slots=8, counters=apart) == ["room", "room", "room"]
    running = gauge(f"vllm:num_requests_running{many}", {44: 1, 47: 1, 48: 1, 56: 1, 57: 0, 58: 0})
    assert states(CANCELLED, 40, 52, 57, slots=1, counters=running) == ["unknown", "full", "room"]


def test_an_end_that_is_not_known() -> None:
    unfinished = [stay(1, 0, 0, None)]
    assert states(unfinished, 50, slots=1) == ["full"]
    assert states(unfinished, 20, 50, slots=1, requests={1: {"finish_ns": 40 * S}}) == ["unknown", "room"]
    assert states(unfinished, 50, slots=1, requests={1: {"error": "The stream broke."}}) == ["unknown"]
    # Finished, but nobody saw the engine begin.
    assert states([stay(1, 0, None, 40, end_reason="done")], 20, 50, slots=1) == ["unknown", "room"]


def test_changes_are_told() -> None:
    def told(*events: dict[str, Any]) -> list[str]:
        servers = [Server(name="s", max_sequences=2)]
        return changes(MemoryTrace({"events": list(events)}, Manifest(origin="recorded", servers=servers, closed=True)))

    detached = {"kind": "stop", "time_ns": 900 * S, "detail": "detached", "server": "s"}
    assert told({"kind": "start", "time_ns": 0, "server": "s"}, detached) == []
    restarted, changed = told(*DOWN, CHANGED, detached)
    assert restarted.startswith("s was restarted once during the capture")
    assert "max_sequences: 2 -> 1" in changed
    assert told(DOWN[0], detached) == ["s stopped during the capture and did not come back."]


def accounted(stages: list[dict[str, Any]], **tables: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts of request 9, which waits from 240 to 260 and finishes at 300."""
    own = {"request": 9, "arrival_ns": 240 * S, "received_ns": 240 * S, "first_token_ns": 270 * S, "last_token_ns": 300 * S}
    requests = [{"request": s["request"], "arrival_ns": 0} for s in stages] + [own | {"finish_ns": 300 * S}]
    rows = {"requests": requests, "stages": [*stages, stay(9, 240, 260, 300, end_reason="done")]} | tables
    trace = MemoryTrace(rows, Manifest(origin="recorded", servers=[Server(name="s", max_sequences=2)], closed=True))
    found = account(trace)
    return {k: found.parts[f"queue_{k}_ns"][0] for k in ("room", "slots", "full", "unknown")} | {"unseen": " ".join(found.unseen)}


def test_accounting_follows_the_slots_over_time() -> None:
    other = [stay(1, 205, 205, 250)]
    found = accounted(other)
    assert (found["room"], found["slots"], found["unknown"]) == (20 * S, 0, 0)
    found = accounted(other, events=[*DOWN, CHANGED])
    assert (found["room"], found["slots"], found["unknown"]) == (10 * S, 10 * S, 0)


def test_accounting_says_unknown_where_cancelled_requests_may_run() -> None:
    ghosts = [stay(n, 220, None, 221, end_reason="cancelled") | {"request": n} for n in (1, 2)]
    found = accounted(ghosts)
    assert (found["room"], found["slots"], found["unknown"]) == (None, None, 20 * S)
    assert "whether their server was full" in found["unseen"]
    deferred = gauge("llamacpp:requests_deferred", dict.fromkeys(range(230, 270), 5))
    found = accounted(ghosts, counters=deferred)
    assert (found["room"], found["full"], found["unknown"]) == (0, 20 * S, 0)


def test_the_report_warns_of_a_restart() -> None:
    servers = [Server(name="s", max_sequences=2)]
    found = report(MemoryTrace({"events": [*DOWN, CHANGED]}, Manifest(origin="recorded", servers=servers, closed=True)))
    assert any("restarted once" in w for w in found.warnings) and any("max_sequences: 2 -> 1" in w for w in found.warnings)
