"""The ledger: sums by way and basis, per token, what is unknown stays unknown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import MemoryTrace

from hoptrace.analysis.moves.ledger import ledger
from hoptrace.analysis.moves.ledger_rows import moved_rows
from hoptrace.analysis.query import query
from hoptrace.analysis.report import report
from hoptrace.manifest import Manifest, Server

GEOMETRY = Server(name="s", weight_bytes=1000, layers=2, kv_heads=1, heads=1, head_size=4, kv_dtype="f16")
MANIFEST = Manifest(origin="recorded", servers=[GEOMETRY])


def move(**columns: Any) -> dict[str, Any]:
    return {
        "start_ns": 0,
        "object": "tokens",
        "src": "server:s",
        "dst": "client",
        "mechanism": "message",
        "basis": "counted",
        **columns,
    }


REQUESTS = [
    {"request": 1, "arrival_ns": 0, "finish_ns": 1_000_000_000, "output_tokens": 6, "prompt_tokens": 10, "prompt_chars": 40},
    {"request": 2, "arrival_ns": 0, "finish_ns": 2_000_000_000, "output_tokens": 4, "prompt_tokens": 10, "prompt_chars": 60},
]


def test_moves_by_way_and_basis() -> None:
    moves = [
        move(bytes=100, transfers=4, payload_hops=2, control_ops=3, path=["a", "b"]),
        move(bytes=50, transfers=1, payload_hops=2, path=["a", "b"]),
        move(bytes=7, basis="assumed"),
        move(object="prompt", src="client", dst="server:s", bytes=300, path=["b", "a"]),
    ]
    book = ledger(MemoryTrace({"requests": REQUESTS, "moves": moves}, MANIFEST))
    rows = {(r["object"], r["basis"]): r for r in book.rows.to_dicts()}
    counted = rows["tokens", "counted"]
    assert (counted["moves"], counted["bytes"], counted["link_bytes"], counted["transfers"]) == (2, 150, 300, 5)
    # Hops and control operations are those of the path, for each transfer: 4 × 2 + 1 × 2, and 4 × 3.
    assert (counted["payload_hops"], counted["control_ops"], counted["control_ops_unknown"]) == (10, 12, 1)
    assert rows["tokens", "assumed"]["bytes"] == 7 and rows["tokens", "assumed"]["transfers"] is None
    assert book.output_tokens == 10 and book.requests == 2 and book.duration_ns == 2_000_000_000
    per = {r["basis"]: r for r in book.per_token().to_dicts()}
    assert per["counted"]["bytes"] == 45.0 and per["assumed"]["bytes"] == pytest.approx(0.7)
    assert per["counted"]["transfers"] == 0.5 and per["assumed"]["transfers"] is None
    links = {(r["link"], r["object"]): r["bytes"] for r in book.links.to_dicts()}
    assert links == {("a", "prompt"): 300, ("a", "tokens"): 150, ("b", "prompt"): 300, ("b", "tokens"): 150}
    found = {(a.object, a.moved_basis): (a.moved_bytes, a.size_bytes, a.factor, a.at_least) for a in book.amplification}
    assert found == {
        ("tokens", "counted"): (300, 40, 7.5, False),
        ("tokens", "assumed"): (7, 40, 7 / 40, False),
        ("prompt", "counted"): (600, 100, 6.0, False),
    }
    as_json = book.as_dict()
    assert as_json["rows"][0]["bytes_per_s"] == 150.0  # prompt: 300 bytes in two seconds


def test_what_moves_do_not_say_is_assumed_and_apart() -> None:
    moves = [
        move(bytes=100, transfers=4, payload_hops=2, control_ops=3, path=["a", "b"]),  # says its own
        move(bytes=50, transfers=5, payload_hops=2, path=["a", "b"]),  # two connections, 6 operations each
        move(bytes=None, transfers=1, path=["a", "b"]),  # counts as an operation, not in the density
        # One operation crosses both links.
        move(object="kv", bytes=640, transfers=2, mechanism="rdma", path=["a", "b"], basis="derived"),
        move(object="other", bytes=9, mechanism=None),
    ]
    book = ledger(MemoryTrace({"requests": REQUESTS, "moves": moves}, MANIFEST))
    rows = {r["object"]: r for r in book.rows.to_dicts()}
    tokens = rows["tokens"]
    assert (tokens["control_ops"], tokens["control_ops_unknown"], tokens["control_ops_assumed"]) == (12, 2, 6 * 12)
    assert (tokens["payload_hops"], tokens["payload_hops_assumed"]) == (8 + 10, 10)
    assert (tokens["assumed_payload_bytes"], tokens["assumed_payload_ops"]) == (50, 5 * 12)
    kv = rows["kv"]
    assert (kv["control_ops"], kv["control_ops_assumed"], kv["payload_hops_assumed"]) == (None, 2 * 5, 2 * 4)
    assert rows["other"]["control_ops_assumed"] is None, "no mechanism, no path"
    assert book.density_assumed() == (50 + 640, 60 + 10)
    per = {r["basis"]: r for r in book.per_token().to_dicts()}
    assert (per["counted"]["control_ops"], per["counted"]["control_ops_assumed"]) == pytest.approx((1.2, 7.2))
    assert {r["basis"]: r for r in book.per_request().to_dicts()}["counted"]["control_ops_assumed"] == 36
    assert {r["basis"]: r for r in book.per_second().to_dicts()}["counted"]["control_ops_assumed"] == 36, "two seconds"
    found = book.as_dict()["assumed"]
    assert (found["control_ops"], found["bytes_per_control_op"]) == (70, round(690 / 70, 3)) and set(found["access"]) == {
        "message",
        "rdma",
    }


def test_a_server_on_this_very_host_takes_fewer_operations() -> None:
    links = [{"name": "a", "a": "client", "b": "proxy"}, {"name": "b", "a": "proxy", "b": "server:s"}]
    here = Manifest(origin="recorded", servers=[Server(name="s", url="http://127.0.0.1:8000")], platform={"links": links})
    away = Manifest(origin="recorded", servers=[Server(name="s", url="http://10.1.2.3:8000")], platform={"links": links})
    moves = [move(bytes=50, transfers=5, path=["b", "a"])]
    ops = [ledger(MemoryTrace({"moves": moves}, m)).rows["control_ops_assumed"][0] for m in (here, away)]
    assert ops == [5 * (4 + 6), 5 * (6 + 6)]


def test_activations_and_logits_have_a_size() -> None:
    server = Server(name="s", hidden_size=16, config={"dtype": "bfloat16", "vocabulary": 1000})
    step = {"server": "s", "step": 0, "start_ns": 0, "end_ns": 5, "prefill_tokens": 9, "decode_tokens": 1}
    moves = [
        move(object="activations", src="stage0", dst="stage1", bytes=320, path=["x"], mechanism="collective"),
        move(object="activations", src="stage1", dst="stage2", bytes=320, path=["y"], mechanism="collective"),
        move(object="logits", bytes=80_000),
    ]
    rows = {"requests": REQUESTS, "steps": [step], "moves": moves}
    found = {a.object: a for a in ledger(MemoryTrace(rows, Manifest(origin="recorded", servers=[server]))).amplification}
    # 10 tokens of 16 × 2 bytes crossed two links; 10 output tokens of 1,000 × 4 bytes moved twice.
    assert (found["activations"].size_bytes, found["activations"].factor) == (320, 2.0)
    assert (found["logits"].size_bytes, found["logits"].factor, found["logits"].basis) == (40_000, 2.0, "assumed")
    bare = ledger(MemoryTrace(rows, Manifest(origin="recorded", servers=[Server(name="s")]))).amplification
    assert bare == []


def test_a_transfer_between_memories_is_no_own_memory() -> None:
    book = ledger(MemoryTrace({"moves": [move(object="kv", src="memory:p", dst="memory:d", bytes=7, mechanism="rdma")]}))
    assert book.totals(memory=False)["bytes"].to_list() == [7] and book.totals(memory=True).height == 0


def test_the_matrix_for_charts() -> None:
    book = ledger(MemoryTrace({"requests": REQUESTS, "moves": [move(bytes=30, transfers=2), move(object="kv", bytes=None)]}))
    rows = {r["object"]: r for r in book.matrix().to_dicts()}
    assert rows["tokens"] == {
        "object": "tokens", "way": "server:s → client", "basis": "counted", "bytes": 30, "bytes_per_output_token": 3.0,
        "transfers": 2, "at_least": False,
    }  # fmt: skip
    assert rows["kv"]["bytes"] is None and rows["kv"]["at_least"]


def test_unknown_bytes_stay_unknown() -> None:
    book = ledger(MemoryTrace({"requests": REQUESTS, "moves": [move(bytes=None), move(bytes=5), move(object="kv", bytes=None)]}))
    rows = {r["object"]: r for r in book.rows.to_dicts()}
    assert (rows["tokens"]["bytes"], rows["tokens"]["bytes_unknown"]) == (5, 1)
    assert (rows["kv"]["bytes"], rows["kv"]["bytes_unknown"]) == (None, 1)


def test_memory_traffic_of_steps() -> None:
    no_work = {
        "prefill_tokens": 0,
        "prefill_context_tokens": 0,
        "decode_requests": 0,
        "decode_tokens": 0,
        "decode_context_tokens": 0,
    }
    steps = [
        {"server": "s", "step": 0, "start_ns": 0, "end_ns": 5, **no_work, "prefill_tokens": 10},
        {"server": "s", "step": 1, "start_ns": 5, "end_ns": 9, **no_work, "decode_requests": 1, "decode_tokens": 1,
         "decode_context_tokens": 10},
    ]  # fmt: skip
    book = ledger(MemoryTrace({"requests": REQUESTS, "steps": steps}, MANIFEST))
    per_token = 2 * 2 * 1 * 4 * 2  # K and V × layers × heads × size × 2 bytes
    rows = {(r["object"], r["src"]): r for r in book.rows.to_dicts()}
    assert rows["weights", "memory:s"]["bytes"] == 2000 and rows["weights", "memory:s"]["basis"] == "derived"
    assert rows["kv", "memory:s"]["bytes"] == (10 + 11) * per_token
    assert rows["kv", "compute:s"]["bytes"] == 11 * per_token
    # Own memory is apart from what was moved between places.
    assert book.totals(memory=False).height == 0 and book.totals(memory=True)["bytes"].to_list() == [2000 + 32 * per_token]
    found = {a.object: a.factor for a in book.amplification}
    assert found == {"weights": 2.0, "kv": 32 / 11}
    bare = ledger(MemoryTrace({"requests": REQUESTS, "steps": steps}, Manifest(origin="recorded", servers=[Server(name="s")])))
    assert bare.rows.height == 0 and any("weight_bytes is unknown" in s for s in bare.unseen)


def test_output_tokens_come_from_tokens_where_the_request_does_not_say() -> None:
    requests = [REQUESTS[0], {"request": 2, "arrival_ns": 0, "error": "It broke."}]
    tokens = [{"request": 2, "index": 0, "time_ns": 1, "count": 2}, {"request": 2, "index": 2, "time_ns": 2, "count": 1}]
    assert ledger(MemoryTrace({"requests": requests, "tokens": tokens})).output_tokens == 9
    tokens[1]["count"] = None
    unknown = ledger(MemoryTrace({"requests": requests, "tokens": tokens, "moves": [move(bytes=9)]}))
    assert unknown.output_tokens is None and any("nothing is given per token" in s for s in unknown.unseen)
    assert unknown.per_token()["bytes"].to_list() == [None]


def test_reuse_by_tier_without_resumption() -> None:
    stages = [
        {"request": 1, "stage": 0, "cached_tokens": 4, "cached_device_tokens": 3, "cached_host_tokens": 1, "resumed_tokens": 9},
        {"request": 2, "stage": 0, "cached_tokens": None},
    ]
    reuse = ledger(MemoryTrace({"requests": REQUESTS, "stages": stages})).reuse
    # Only the stay that knows counts, in the denominator too.
    assert (reuse.cached_tokens, reuse.prompt_tokens, reuse.share, reuse.resumed_tokens) == (4, 10, 0.4, 9)
    batch = [{"request": 1, "sequence": i, "stage": 0, "cached_tokens": 2, "prompt_tokens": n} for i, n in enumerate((3, 7))]
    assert ledger(MemoryTrace({"requests": REQUESTS, "stages": batch})).reuse.prompt_tokens == 10, "each prompt once"
    assert reuse.by_tier == {"device": 3, "host": 1, "peer": None, "pool": None, "disk": None}


def test_more_cached_than_the_prompt_has_is_left_out_and_said() -> None:
    stages = [{"request": 1, "stage": 0, "cached_tokens": 99}, {"request": 2, "stage": 0, "cached_tokens": 10}]
    book = ledger(MemoryTrace({"requests": REQUESTS, "stages": stages}))
    assert (book.reuse.cached_tokens, book.reuse.prompt_tokens, book.reuse.share, book.reuse.impossible) == (10, 10, 1.0, 1)
    assert any(u.startswith("1 stay on a server: more tokens are said to come from a cache") for u in book.unseen)
    alone = ledger(MemoryTrace({"requests": REQUESTS, "stages": stages[:1]}))
    assert alone.reuse.share is None and alone.reuse.cached_tokens is None


def test_requests_cut_off_by_the_end_of_the_recording_are_in_no_quotient() -> None:
    cut = [REQUESTS[0], {"request": 2, "arrival_ns": 0, "finish_ns": None, "output_tokens": None}]
    tokens = [{"request": r, "index": i, "time_ns": i, "count": 1} for r, n in ((1, 6), (2, 90)) for i in range(n)]
    book = ledger(MemoryTrace({"requests": cut, "tokens": tokens, "moves": [move(request=1, bytes=600, transfers=6)]}))
    assert book.output_tokens is None and book.rows["bytes"].to_list() == [600]
    assert any(u.startswith("The recording broke off during 1 request: what they moved") for u in book.unseen)
    written = [move(request=r, bytes=600, transfers=6) for r in (1, 2)]
    assert ledger(MemoryTrace({"requests": cut, "tokens": tokens, "moves": written})).output_tokens == 96


def test_nothing_recorded() -> None:
    book = ledger(MemoryTrace({}))
    assert book.rows.height == 0 and book.output_tokens is None and book.duration_ns is None and book.reuse.share is None
    assert any("No moves were recorded" in s for s in book.unseen)


moves_drawn = st.lists(
    st.fixed_dictionaries(
        {
            "object": st.sampled_from(["kv", "tokens"]),
            "basis": st.sampled_from(["counted", "derived", "assumed", None]),
            "bytes": st.none() | st.integers(0, 1 << 50),
            "transfers": st.none() | st.integers(0, 9),
            "path": st.none() | st.lists(st.sampled_from("ab"), max_size=3),
        }
    ),
    max_size=12,
)


@given(moves_drawn)
@settings(max_examples=25, deadline=None)
def test_nothing_is_lost_from_the_ledger(drawn: list[dict[str, Any]]) -> None:
    """Sums over the rows are the sums over the moves, each basis by itself."""
    trace = MemoryTrace({"moves": [move(**m) for m in drawn]})
    found, links = moved_rows(trace), query(trace, "ledger_links")
    assert found["moves"].sum() == len(drawn)
    for basis in ("counted", "derived", "assumed", "unstated"):
        mine = [m for m in drawn if (m["basis"] or "unstated") == basis and m["bytes"] is not None]
        rows = [r for r in found.to_dicts() if r["basis"] == basis]
        assert sum(r["bytes"] or 0 for r in rows) == sum(m["bytes"] for m in mine)
        assert sum(r["link_bytes"] or 0 for r in rows) == sum(m["bytes"] * max(1, len(m["path"] or [])) for m in mine)
    assert sum(links["bytes"].drop_nulls().to_list()) == sum((m["bytes"] or 0) * len(m["path"] or []) for m in drawn)


hostile = st.lists(
    st.fixed_dictionaries(
        {
            "object": st.sampled_from(["kv", "tokens"]),
            "bytes": st.none() | st.sampled_from([-1, 0, (1 << 63) - 1, -(1 << 63)]),
            "transfers": st.none() | st.sampled_from([-1, 0, 1, (1 << 63) - 1]),
            "control_ops": st.none() | st.sampled_from([-1, 0, 3, (1 << 63) - 1]),
            "payload_hops": st.none() | st.sampled_from([-1, 2, (1 << 63) - 1]),
            "path": st.none() | st.just(["a", "a", "b"]) | st.just([]),
            "mechanism": st.none() | st.sampled_from(["message", "dma"]),
        }
    ),
    max_size=8,
)


@given(hostile)
@settings(max_examples=15, deadline=None)
def test_hostile_moves_give_no_wrong_number(drawn: list[dict[str, Any]]) -> None:
    """What is negative is unknown; what no longer fits in 64 bits is unknown; the rest is exact."""
    rows = moved_rows(MemoryTrace({"moves": [move(**m) for m in drawn]})).to_dicts()
    assert sum(r["moves"] for r in rows) == len(drawn)
    for r in rows:
        mine = [m for m in drawn if (m["object"], m["path"], m["mechanism"]) == (r["object"], r["path"], r["mechanism"])]
        sizes = [m["bytes"] for m in mine if m["bytes"] is not None and m["bytes"] >= 0]
        assert r["bytes_unknown"] == len(mine) - len(sizes)
        assert r["bytes"] == (sum(sizes) if sizes and sum(sizes) < 1 << 63 else None)
        each = [max(m["transfers"], 0) if (m["transfers"] or 0) >= 0 and m["transfers"] is not None else 1 for m in mine]
        told = [
            n * m["control_ops"]
            for n, m in zip(each, mine, strict=True)
            if m["control_ops"] is not None and m["control_ops"] >= 0
        ]
        assert r["control_ops"] == (sum(told) if told and sum(told) < 1 << 63 else None)


def test_json_holds_plain_values() -> None:
    import json

    text = json.dumps(ledger(MemoryTrace({"requests": REQUESTS, "moves": [move(bytes=3)]})).as_dict())
    assert json.loads(text)["rows"][0]["bytes_per_output_token"] == pytest.approx(0.3)


def test_of_kv_each_basis_has_its_own_factor() -> None:
    """10 tokens written, 1,000 bytes counted on the way to another server, 10^6 assumed: no factor holds them together."""
    server = Server(name="s", layers=1, kv_heads=1, head_size=4, kv_dtype="f16")  # 16 bytes of KV a token
    prompt = {
        "server": "s", "step": 0, "start_ns": 0, "end_ns": 5, "prefill_requests": 1, "prefill_tokens": 10,
        "prefill_context_tokens": 0, "decode_requests": 0, "decode_tokens": 0, "decode_context_tokens": 0, "origin": "observed",
    }  # fmt: skip
    moves = [
        move(object="kv", src="server:s", dst="server:d", bytes=1000),
        move(object="kv", src="server:s", dst="server:d", bytes=None),
        move(object="kv", src="server:s", dst="server:d", bytes=10**6, basis="assumed"),
    ]
    book = ledger(MemoryTrace({"steps": [prompt], "moves": moves}, Manifest(origin="recorded", servers=[server])))
    found = {a.moved_basis: (a.moved_bytes, a.size_bytes, a.at_least, a.weakest) for a in book.amplification if a.object == "kv"}
    assert found == {
        "counted": (1000, 160, True, "derived"),  # one of them does not say its bytes
        "assumed": (10**6, 160, False, "assumed"),
        "derived": (320, 160, False, "derived"),
    }


def test_the_stages_of_a_pipeline_read_the_model_once() -> None:
    server = Server(name="s", layers=2, kv_heads=1, head_size=4, kv_dtype="f16", weight_bytes=1000)  # 32 bytes of KV a token
    step = {
        "server": "s", "start_ns": 0, "end_ns": 5, "prefill_requests": 0, "prefill_tokens": 0, "prefill_context_tokens": 0,
        "decode_requests": 1, "decode_tokens": 1, "decode_context_tokens": 99, "origin": "observed",
    }  # fmt: skip

    def own(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[int, int]]:
        book = ledger(MemoryTrace({"steps": rows}, Manifest(origin="recorded", servers=[server])))
        return {(r["object"], r["src"]): (r["bytes"], r["bytes_unknown"]) for r in book.rows.to_dicts()}

    rows = [{**step, "step": i, "pp_rank": p} for i in range(10) for p in (0, 1)]
    once = {("weights", "memory:s"): (10_000, 0), ("kv", "memory:s"): (32_000, 0), ("kv", "compute:s"): (320, 0)}
    assert own(rows[::2]) == once and own(rows) == once
    # What each rank recorded itself adds up.
    halves = [{**r, "weight_bytes": 500, "kv_read_bytes": 1600, "kv_write_bytes": 16} for r in rows]
    assert own(halves) == once


def test_moves_that_were_recorded_for_half_of_the_time_are_a_lower_bound() -> None:
    """Requests from 0 to 2 s; the plug-in was there for the first second, the proxy all along."""
    kv = move(object="kv", src="server:p", dst="server:s", source="plug-in", bytes=100)
    cover = [{"table": "moves", "source": n, "from_ns": 0, "to_ns": z} for n, z in (("plug-in", 10**9), ("test", 2 * 10**9))]
    rows = {"requests": REQUESTS, "moves": [kv, move(bytes=70)], "coverage": cover}
    book = ledger(MemoryTrace(rows, MANIFEST))
    found = {r["object"]: (r["partly"], book.is_bound(r), r["bytes"]) for r in book.rows.to_dicts()}
    assert found == {"kv": (True, True, 100), "tokens": (False, False, 70)}
    assert any("plug-in: 50% of the time" in u for u in book.unseen)
    assert book.totals(memory=False)["partly"].to_list() == [True]
    lossy = {**rows, "coverage": [{"table": "moves", "source": "test", "from_ns": 0, "to_ns": 2 * 10**9, "fraction": 0.9}]}
    assert ledger(MemoryTrace(lossy, MANIFEST)).rows["partly"].to_list() == [False, True], "nobody says what the plug-in saw"


def test_transfers_that_some_moves_do_not_say_are_a_lower_bound() -> None:
    """A connector that tells bytes alone: the headline does not divide all bytes by the transfers of others."""
    told, silent = move(bytes=100, transfers=10, payload_hops=2), move(bytes=900, transfers=None, mechanism=None)
    trace = MemoryTrace({"requests": REQUESTS, "moves": [told, silent]}, MANIFEST)
    [row] = [r for r in ledger(trace).rows.to_dicts() if r["mechanism"] is None]
    assert (row["transfers"], row["transfers_unknown"], row["payload_hops_unknown"]) == (None, 1, 1)
    assert "at least 1 transfers of together 100 B (counted)" in report(trace).headline
    alone = report(MemoryTrace({"requests": REQUESTS, "moves": [told]}, MANIFEST)).headline
    assert "takes 1 transfers of together 10 B (counted)" in alone
