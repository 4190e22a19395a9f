"""The five hidden kinds of carrying: published cases made small, figures computed by hand, and hostile inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.memory import MemoryTrace

from hoptrace.analysis.arranging.hidden import Hidden, hidden
from hoptrace.analysis.arranging.hidden_remote import crossing
from hoptrace.analysis.arranging.hidden_text import blocks
from hoptrace.analysis.latency.accounting import account
from hoptrace.analysis.moves.ledger import ledger
from hoptrace.analysis.query import query
from hoptrace.manifest import Manifest, Server
from hoptrace.platform import graph_of
from hoptrace.reader import open_trace

MS = 1_000_000
GIB = 1 << 30
VLLM = Path(__file__).parent / "data" / "vllm_traces"

PAIR = Manifest(
    origin="recorded",
    servers=[
        Server(name="p", layers=2, kv_heads=1, heads=1, head_size=4, kv_dtype="f16", block_size_tokens=16, max_sequences=4),
        Server(name="d", layers=2, kv_heads=1, heads=1, head_size=4, kv_dtype="f16", block_size_tokens=16, max_sequences=4),
    ],
)


def move(start: int, end: int, **columns: Any) -> dict[str, Any]:
    return {"start_ns": start, "end_ns": end, "object": "kv", "src": "server:p", "dst": "server:d", "basis": "counted", **columns}


def wait(kind: str, start: int, end: int, **columns: Any) -> dict[str, Any]:
    return {"start_ns": start, "end_ns": end, "kind": kind, "basis": "counted", **columns}


def of(rows: dict[str, list[dict[str, Any]]], manifest: Manifest | None = None) -> Hidden:
    return hidden(MemoryTrace(rows, manifest))


def test_waiting_for_news_of_data() -> None:
    """nixl#440: 128 MB by GPUDirect Storage in one descriptor; posting takes 10 ms, polling its status 60 ms more."""
    moved = move(0, 70 * MS, bytes=128_000_000, transfers=1, mechanism="file", src="disk", dst="memory:d", request=1)
    h = of({"moves": [moved], "waits": [wait("poll", 10 * MS, 70 * MS, request=1, count=600, on="gds")]})
    v = h.confirm
    assert v.figure("confirming_ns").value == 60 * MS and v.figure("moving_ns").value == 10 * MS
    ratio = v.figure("confirming_per_moving")
    assert (ratio.value, ratio.at_least, ratio.basis) == (6.0, True, "counted")
    assert v.figure("confirmations_per_transfer").value == 600
    (line,) = blocks(h)
    assert str(line) == "A transfer of state in 1 message of 122 MiB; 6 times as long waiting for news of data as for data."
    assert v.time_ns == 60 * MS and v.share is None
    assert "6 times as long waiting for news as for data" in v.sentence
    # Those polls are the transfer's: they are not shared state that is polled as well.
    assert h.shared.figure("shared_waits").value is None


def test_polls_that_go_on_after_the_data_are_confirming_too() -> None:
    """The same, from a recorder whose move ends with the data: the polls touch it."""
    h = of({"moves": [move(0, 10 * MS, bytes=1, request=1)], "waits": [wait("poll", 10 * MS, 58 * MS, request=1)]})
    assert h.confirm.figure("confirming_ns").value == 48 * MS and h.confirm.figure("moving_ns").value == 10 * MS
    # A poll that begins later belongs to something else.
    h = of({"moves": [move(0, 10 * MS, bytes=1, request=1)], "waits": [wait("poll", 10 * MS + 1, 58 * MS, request=1)]})
    assert h.confirm.figure("confirming_ns").value is None and h.shared.figure("shared_wait_ns").value == 48 * MS - 1


def test_waits_that_overlap_are_confirming_once() -> None:
    waits = [wait("doorbell", 0, 10, request=1), wait("poll", 5, 30, request=1), wait("interrupt", 20, 40, request=1)]
    h = of({"moves": [move(0, 100, request=1), move(50, 120, request=1)], "waits": waits})
    assert (h.confirm.figure("confirming_ns").value, h.confirm.figure("moving_ns").value) == (40, 80)
    assert h.confirm.figure("confirmations_per_transfer").value == 1.5


def test_whose_wait_it_is() -> None:
    """Requests, else steps of a server, else servers; the device syncs of a step are no confirmations of its transfers."""
    moves = [move(0, 10, request=1), move(0, 10, server="d", step=7), move(0, 10, server="x")]
    for mine, waited in (
        (True, wait("poll", 5, 9, request=1)),
        (False, wait("poll", 5, 9, request=2)),
        (True, wait("poll", 5, 9, server="d", step=7)),
        (False, wait("poll", 5, 9, server="d", step=8)),
        (False, wait("poll", 5, 9, server="e", step=7)),
        (True, wait("poll", 5, 9, server="x")),
        (False, wait("poll", 11, 19, server="x")),
        (True, wait("sync", 5, 9, request=1)),
        (False, wait("sync", 5, 9, server="d", step=7)),
    ):
        kinds = query(MemoryTrace({"moves": moves, "waits": [waited]}), "hidden_confirm")["kind"].to_list()
        assert (waited["kind"] in kinds) is mine, waited


def test_an_earlier_longer_move_is_found() -> None:
    moves = [move(0, 100, request=1), move(10, 20, request=1)]
    assert of({"moves": moves, "waits": [wait("poll", 60, 70, request=1)]}).confirm.figure("confirming_ns").value == 10


def test_fifteen_thousand_segments() -> None:
    """nixl#176: 1 GB in 15,000 segments; the call that should return at once takes 0.6 s to build the descriptors."""
    moves = [move(600 * MS, 700 * MS, request=1, bytes=GIB, transfers=15_000, mechanism="rdma")]
    v = of({"moves": moves, "waits": [wait("serialize", 0, 600 * MS, request=1, on="nixl")]}, PAIR).split
    assert v.figure("messages_per_transfer").value == 15_000
    assert v.figure("state_bytes_per_message").value == pytest.approx(71_582.79, abs=0.01)
    assert v.time_ns == v.figure("describing_ns").value == 600 * MS
    # 2 layers × K and V × 1 head × 4 × 2 bytes = 32 bytes a token, 512 a block of 16.
    assert v.figure("messages_per_block").value == pytest.approx(512 / 71_582.79, rel=1e-6)
    assert "15,000 messages" in v.sentence and "600 ms" in v.sentence


def test_a_hand_over_that_is_mostly_arranged() -> None:
    """vllm#51919: 263 ms between prefill and decode, of which the transfer is 29 ms; the client waits for both."""
    requests = [
        {
            "request": 1, "arrival_ns": 0, "received_ns": 0, "first_token_ns": 400 * MS, "last_token_ns": 600 * MS,
            "finish_ns": 600 * MS, "output_tokens": 11, "prompt_tokens": 512,
        }
    ]  # fmt: skip
    stages = [
        {"request": 1, "stage": 0, "server": "p", "role": "prefill", "enqueued_ns": 0, "scheduled_ns": 0, "end_ns": 100 * MS,
         "end_reason": "handed over"},
        {"request": 1, "stage": 1, "server": "d", "role": "decode", "enqueued_ns": 363 * MS, "scheduled_ns": 363 * MS,
         "end_ns": 600 * MS, "end_reason": "done"},
    ]  # fmt: skip
    waits = [wait("transfer", 300 * MS, 329 * MS, request=1), wait("message", 100 * MS, 110 * MS, request=1, count=2)]
    moves = [move(300 * MS, 329 * MS, request=1, bytes=512 * 32, transfers=64, mechanism="rdma", server="d")]
    h = of({"requests": requests, "stages": stages, "waits": waits, "moves": moves}, PAIR)
    v = h.confirm
    assert v.figure("handovers").value == 1
    assert v.figure("carrying_ns").value == 29 * MS
    # Whether the message counts as the proxy's or as the hand-over's, the rest of the 263 ms is arranging.
    arranged = v.figure("arranging_ns").value
    assert arranged == h.confirm.time_ns and (263 - 29 - 10) * MS <= int(arranged or 0) <= (263 - 29) * MS
    assert v.figure("arranging_per_carrying").value == pytest.approx(int(arranged or 0) / (29 * MS))
    assert v.figure("waits_per_handover").value == 2
    assert v.share == pytest.approx(int(arranged or 0) / (600 * MS))
    assert h.remote.figure("handovers").value == 1 and h.remote.figure("server_bytes").value == 512 * 32
    assert h.remote.time_ns == 29 * MS


def test_which_wire_the_kv_took() -> None:
    """vllm#52607: prefill and decode on one node; pulled, the KV goes at 0.5 GB/s by TCP, pushed at 49 GB/s."""
    slow = move(0, 2_000 * MS, request=1, bytes=1_000_000_000, transfers=1, mechanism="message", server="d")
    fast = move(0, 20_408_163, request=1, bytes=1_000_000_000, transfers=1, mechanism="dma", server="d")
    for m, rate, mechanism in ((slow, 0.5e9, "message"), (fast, 49e9, "dma")):
        rows = of({"moves": [m]}, PAIR).remote.rows.to_dicts()
        assert [r["mechanism"] for r in rows] == [mechanism] and rows[0]["crosses"] == "other server"
        assert rows[0]["bytes_per_s"] == pytest.approx(rate, rel=1e-4)


def test_answers_in_messages() -> None:
    requests = [{"request": i, "arrival_ns": 0, "output_tokens": n} for i, n in ((1, 8), (2, 4), (3, 100))]
    moves = [
        {"start_ns": 0, "request": i, "object": "tokens", "src": "server:s", "dst": "client", "mechanism": "message",
         "basis": "counted", "bytes": b, "transfers": t}
        for i, b, t in ((1, 2000, 9), (2, 1000, 3), (3, 50, None))
    ]  # fmt: skip
    v = of({"requests": requests, "moves": moves}).split
    # The third does not say its transfers: neither its bytes nor its tokens are in the quotients.
    assert [v.figure(n).value for n in ("messages_per_answer", "tokens_per_message", "bytes_per_message")] == [6.0, 1.0, 250.0]
    header = v.figure("header_share")
    assert (header.value, header.basis) == (pytest.approx(66 / 316), "assumed")
    assert any("do not say their transfers" in s for s in v.unseen)


def test_answers_larger_than_a_column_holds() -> None:
    rows = {
        "requests": [{"request": i, "output_tokens": 6, "arrival_ns": 0, "finish_ns": 9} for i in range(3)],
        "moves": [
            {"request": i, "object": "tokens", "src": "server:s", "dst": "client", "mechanism": "message", "transfers": 6,
             "bytes": 2**62, "start_ns": 0, "end_ns": 9, "basis": "counted"}
            for i in range(3)
        ],
    }  # fmt: skip
    split = of(rows).split
    size, header = split.figure("bytes_per_message"), split.figure("header_share")
    assert size.value is None and header.value is None and size.why is not None and "do not add up" in size.why
    assert split.figure("messages_per_answer").value == 6.0


def test_unlike_bases_are_not_added_up() -> None:
    moves = [move(0, 1, request=1, bytes=100, transfers=10), move(0, 1, request=2, bytes=900, transfers=3, basis="assumed")]
    h = of({"moves": moves}, PAIR)
    size = h.remote.figure("server_bytes")
    assert (size.value, size.basis, size.at_least) == (900, "assumed", True)
    assert h.remote.sentence.startswith("At least 900 B of state went between servers (assumed)")
    assert (h.split.figure("messages_per_transfer").value, h.split.figure("messages_per_transfer").basis) == (10, "counted")


def test_waits_of_unlike_bases_are_not_added_up() -> None:
    """Counted and assumed looks, around a transfer and elsewhere: the counted ones are told, as a lower bound."""

    def wait(start: int, end: int, basis: str, count: int, **more: Any) -> dict[str, Any]:
        return {
            "start_ns": start,
            "end_ns": end,
            "kind": "poll",
            "on": "x",
            "count": count,
            "basis": basis,
            "server": "d",
            **more,
        }

    waits = [
        wait(2, 4, "counted", 3, request=1), wait(3, 9, "assumed", 1000, request=1),
        wait(100, 105, "counted", 7), wait(200, 290, "assumed", 5000),
    ]  # fmt: skip
    h = of({"moves": [move(0, 10, request=1, bytes=100, transfers=1)], "waits": waits}, PAIR)
    per, asking, ratio = (h.confirm.figure(n) for n in ("confirmations_per_transfer", "confirming_ns", "confirming_per_moving"))
    assert (per.value, per.basis, per.at_least) == (3, "counted", True)
    assert (asking.value, asking.at_least, ratio.value) == (2, True, 2 / 8)
    n, time = h.shared.figure("shared_waits"), h.shared.figure("shared_wait_ns")
    assert (n.value, n.basis, n.at_least, time.value) == (7, "counted", True, 5)
    assert h.shared.sentence.startswith("At least 7 syncs") or "at least 7 syncs" in h.shared.sentence
    only = of({"waits": waits[3:]}, PAIR).shared
    assert (only.figure("shared_waits").value, only.figure("shared_waits").basis) == (5000, "assumed")
    assert "(assumed)" in only.sentence


@pytest.mark.parametrize(
    ("src", "dst", "mechanism", "crosses"),
    [
        ("server:p", "server:d", "rdma", "other server"),
        ("remote", "server:d", None, "other server"),
        ("server:d", "server:d/offload", "dma", "other device"),
        ("memory:d", "compute:d", "load_store", "own memory"),
        ("server:d", "server:d", None, "own memory"),
        ("gpu0", "gpu1", "collective", "other device"),
        ("gpu0", "gpu1", "dma", "other device"),
        ("gpu0", "gpu9", "dma", "other host"),
        ("gpu0", "nowhere", "dma", "unknown"),
    ],
)
def test_what_a_move_crosses(src: str, dst: str, mechanism: str | None, crosses: str) -> None:
    nodes = [{"name": "gpu0", "host": "a"}, {"name": "gpu1", "host": "a"}, {"name": "gpu9", "host": "b"}]
    graph = graph_of(Manifest(origin="recorded", platform={"nodes": nodes}))
    assert crossing(src, dst, mechanism, graph) == crosses


def step(n: int, start: int, end: int, **columns: Any) -> dict[str, Any]:
    return {"server": "s", "step": n, "start_ns": start, "end_ns": end, "origin": "observed", **columns}


def test_unlike_work_in_one_batch() -> None:
    decoding = {"decode_requests": 2, "decode_context_tokens": 200, "decode_context_variance": 100.0}
    mixed = {"decode_requests": 2, "decode_context_tokens": 300, "decode_context_variance": 300.0}
    steps = [
        step(0, 0, 10, prefill_requests=0, prefill_tokens=0, **decoding),
        step(1, 10, 40, prefill_requests=2, prefill_tokens=64, prefill_length_variance=25.0, **mixed),
        step(2, 40, 50, prefill_requests=1, prefill_tokens=64, prefill_length_variance=0.0, decode_requests=0),
        step(3, 50, 60),
    ]
    v = of({"steps": steps}).unlike
    value = {f.name: f.value for f in v.figures}
    assert value["mixed_steps"] == pytest.approx(1 / 3) and v.figure("mixed_steps").at_least
    assert value["held_decoders"] == 0.5 and value["held_decoder_time"] == 0.75  # 2 × 30 of 2 × 40 ns
    assert value["context_spread"] == pytest.approx(200**0.5)
    assert value["context_spread_relative"] == pytest.approx(200**0.5 / 125)
    assert value["prompt_spread"] == 5.0
    assert value["lost_ns"] is None and v.figure("lost_ns").why


def test_collectives_and_pipeline_ranks() -> None:
    steps = [step(0, 0, 100, collective_ns=30, collective_bytes=4096, pp_rank=0), step(0, 0, 100, pp_rank=1, collective_ns=99)]
    steps.append(step(1, 100, 200, pp_rank=0))
    v = of({"steps": steps}).remote
    value = {f.name: f.value for f in v.figures}
    assert (value["collective_ns"], value["collective_bytes"], value["pipeline_ranks"]) == (30, 4096, 2)
    assert v.figure("collective_ns").at_least and value["collective_share"] == pytest.approx(30 / 200)


def test_prompts_sent_again() -> None:
    def request(i: int, session: str | None, hashes: list[int], **columns: Any) -> dict[str, Any]:
        return {"request": i, "arrival_ns": i, "session": session, "prefix_blocks": hashes, "hash_space": "h", "block_size": 64,
                "block_unit": "characters", "prompt_chars": 64 * len(hashes), **columns}  # fmt: skip

    requests = [request(1, "a", [1, 2]), request(2, "a", [1, 2, 3, 4]), request(3, "b", [1, 9]), request(4, None, [1])]
    requests.append(request(5, None, [1], hash_space="other"))
    moves = [
        {
            "start_ns": 0,
            "request": i,
            "object": "prompt",
            "src": "client",
            "dst": "server:s",
            "bytes": 2 * 64 * n,
            "basis": "counted",
        }
        for i, n in ((1, 2), (2, 4))
    ]
    v = of({"requests": requests, "moves": moves}).shared
    value = {f.name: f.value for f in v.figures}
    # 1 in three requests more, 2 once more; the hash of the other space is another prompt.
    assert value["prompt_blocks"] == 10 and value["repeated_prompt_share"] == pytest.approx(4 / 10)
    assert value["turn_blocks"] == 8 and value["repeated_turn_share"] == pytest.approx(2 / 8)
    # Two bytes a character on the wire, over the requests that say both.
    assert value["repeated_prompt_bytes"] == 4 * 64 * 2 and value["repeated_turn_bytes"] == 2 * 64 * 2


def test_shared_state_again_and_again() -> None:
    waits = [
        wait("lock", 0, 10, request=1, on="scheduler", count=5),
        wait("lock", 20, 30, request=1, on="scheduler", count=1),
        wait("lock", 0, 4, request=2, on="scheduler"),
        wait("sync", 0, 7, server="s", step=1, count=3),
    ]
    v = of({"requests": [{"request": 1, "arrival_ns": 0, "output_tokens": 4}], "waits": waits}).shared
    value = {f.name: f.value for f in v.figures}
    assert (value["shared_waits"], value["shared_wait_ns"], value["shared_waits_per_token"]) == (10, 31, 2.5)
    assert (value["repeats"], value["most_repeats"]) == (10 / 3, 6)
    assert v.figure("shared_waits").basis == "counted" and not v.figure("shared_waits").at_least
    assert v.time_ns == 31 and v.share is None


def test_nothing_recorded_is_unknown_and_not_zero() -> None:
    h = of({})
    counted = {f.name: f.value for v in h for f in v.figures if f.value is not None}
    assert counted == {}
    assert all(f.why for v in h for f in v.figures)
    assert all(v.time_ns is None and v.sentence.startswith("Not known") for v in h)
    assert blocks(h) == [] and len(blocks(h, full=True)) > 10


@pytest.mark.parametrize("name", ["steady", "preempted"])
def test_on_real_captures_of_vllm(name: str) -> None:
    h = hidden(open_trace(VLLM / f"{name}.trace"))
    assert json.loads(json.dumps(h.as_dict()))["split"]["figures"]["messages_per_answer"]["basis"] == "counted"
    for v in h:
        for f in v.figures:
            assert (f.value is None) == (f.basis is None) == (f.why is not None), f
            assert f.unit != "share" or f.value is None or 0 <= f.value <= 1, f
    assert h.unlike.figure("held_decoder_time").basis == "counted"
    assert h.remote.figure("pipeline_ranks").value == 1
    assert blocks(h) and blocks(h, full=True)


# Accounting and ledger have hostile inputs of their own; here they only take time.
NO_LATENCY, NO_LEDGER = account(MemoryTrace({})), ledger(MemoryTrace({}))
INT = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-5, 50)
ANY = st.none() | INT
OWNER = {
    "request": st.none() | st.integers(0, 2),
    "server": st.sampled_from([None, "s", "?"]),
    "step": st.none() | st.integers(0, 2),
    "basis": st.sampled_from([None, "counted", "assumed"]),
}
MOVES = OWNER | {
    "start_ns": INT,
    "end_ns": ANY,
    "object": st.sampled_from(["kv", "tokens", "prompt"]),
    "src": st.sampled_from(["client", "server:s", "remote", ""]),
    "dst": st.sampled_from(["client", "server:s", ":"]),
    "bytes": ANY,
    "transfers": ANY,
    "control_ops": ANY,
    "mechanism": st.sampled_from([None, "rdma", "message", "collective"]),
}
WAITS = OWNER | {
    "start_ns": INT,
    "end_ns": INT,
    "kind": st.sampled_from(["poll", "sync", "serialize", "lock", "queue"]),
    "on": st.sampled_from([None, "x"]),
    "count": ANY,
}
HOSTILE = st.fixed_dictionaries(
    {
        "moves": st.lists(st.fixed_dictionaries(MOVES), max_size=5),
        "waits": st.lists(st.fixed_dictionaries(WAITS), max_size=5),
    }
)


@given(HOSTILE)
@settings(max_examples=12, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_hostile_inputs(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Extremes, negative lengths, duplicates, unknown servers: figures are null or sound, times never negative."""
    h = hidden(MemoryTrace(rows), accounting=NO_LATENCY, moved=NO_LEDGER)
    json.dumps(h.as_dict())
    for v in h:
        assert v.time_ns is None or v.time_ns >= 0
        for f in v.figures:
            assert (f.value is None) == (f.why is not None) == (f.basis is None), f
            assert f.unit not in ("ns", "operations", "messages") or f.value is None or f.value >= 0, f
