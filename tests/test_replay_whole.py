"""Replays under every preset: laws 1 and 2 on them, whole traces, and rows worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.workloads import MS, server, store

from hoptrace.analysis.latency.accounting import account
from hoptrace.analysis.moves.ledger import ledger
from hoptrace.analysis.report import report
from hoptrace.reader import Trace, open_trace
from hoptrace.replay.policy import load_policy, parse_policy, presets, with_settings
from hoptrace.replay.run import Replayed, run
from hoptrace.stepcost import fixed
from hoptrace.validate import validate

COST = fixed(step_ns=5 * MS, prefill_token_ns=90_000, decode_request_ns=700_000, decode_context_token_ns=900)
KV_TOKEN_BYTES = 128  # of the toy server: 2 layers x 2 heads x 8 x (K and V) x 2 bytes

# What a preset needs to be told where the trace does not tell it.
TOLD: dict[str, tuple[str, ...]] = {"ngram-speculation": ("speculation.acceptance=0.5",)}
# The trace tells no host time, so there is none to take away.
REFUSED = {"ceiling-host"}


def log(path: Path, n: int = 90, *, apart_ms: int = 12) -> Trace:
    """Arrivals and lengths; a third begins alike; priorities."""
    rows: list[dict[str, Any]] = []
    for i in range(n):
        prompt, at = 20 + (i * 37) % 200, 10**18 + i * apart_ms * MS
        rows.append({
            "request": i, "arrival_ns": at, "arrival_of": "received", "received_ns": at, "prompt_tokens": prompt,
            "output_tokens": 1 + (i * 13) % 40, "prefix_blocks": [k if i % 3 == 0 else 1000 * i + k for k in range(prompt // 16)],
            "hash_space": "h", "block_size": 16, "block_unit": "tokens", "priority": i % 3, "session": f"s{i % 7}", "source": "t",
        })  # fmt: skip
    return store(
        path, {"requests": pl.DataFrame(rows, infer_schema_length=None)}, server(kv_capacity_tokens=1600), origin="imported"
    )


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Replayed]]:
    """Every preset on the plain engine, which knows every part of a policy."""
    folder = tmp_path_factory.mktemp("whole")
    parent = log(folder / "log.trace")
    yield {
        name: run(
            parent, with_settings(load_policy(name), TOLD.get(name, ())), out=folder / f"{name}.trace", cost=COST, engine="plain"
        )
        for name in presets()
        if name not in REFUSED
    }


NAMES = sorted(set(presets()) - REFUSED)


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_is_a_whole_trace(replays: dict[str, Replayed], name: str) -> None:
    r = replays[name]
    assert [f.message for f in validate(r.trace) if f.level == "error"] == []
    assert sum(r.requests.values()) == 90 and r.requests["unfinished"] == r.requests["not_arrived"] == 0
    assert r.trace.rows("requests") == 90
    assert r.trace.manifest.closed
    names = {s.name for s in r.trace.manifest.servers}
    for table in ("stages", "steps", "residency", "waits", "moves"):
        assert set(r.trace.table(table).collect()["server"].drop_nulls()) <= names, table


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_from_the_clock_and_nothing_is_unexplained(replays: dict[str, Replayed], name: str) -> None:
    """Law 1."""
    a = account(replays[name].trace)
    assert a.finished == replays[name].requests["done"]
    parts = a.parts.select(pl.exclude("request", "arrival_ns", "finish_ns", "e2e_ns")).fill_null(0)
    assert (parts.sum_horizontal() == a.parts["e2e_ns"]).all() and parts.min_horizontal().min() >= 0  # type: ignore[operator]
    assert a.classes["unexplained_ns"].sum() == 0


@pytest.mark.parametrize("name", NAMES)
def test_tokens_follow_from_the_runs(replays: dict[str, Replayed], name: str) -> None:
    """As many as asked for, the last with the last step's end, indices without gaps."""
    t = replays[name].trace
    done = t.table("requests").filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null()).collect()
    seen = t.table("tokens").group_by("request").agg(
        pl.col("count").sum().alias("n"), pl.col("time_ns").min().alias("first"), pl.col("time_ns").max().alias("last"),
    ).collect()  # fmt: skip
    j = done.join(seen, on="request")
    assert j.height == done.height
    assert (j["n"] == j["output_tokens"]).all()
    assert (j["first"] == j["first_token_ns"]).all() and (j["last"] == j["last_token_ns"]).all()


@pytest.mark.parametrize("name", ["pd-1-1", "pd-2-6", "pd-per-layer", "ceiling-links"])
def test_handed_over_bytes_are_the_prompts(replays: dict[str, Replayed], name: str) -> None:
    """Law 2: what leaves the prefill servers is what the decode servers found, and its bytes are its tokens'."""
    t = replays[name].trace
    stays = t.table("stages").filter(pl.col("role") == "decode").collect()
    more = t.table("requests").filter(pl.col("output_tokens") > 1).collect()
    assert stays["request"].to_list() == more["request"].to_list()
    assert (stays["cached_tokens"] == more["prompt_tokens"]).all()
    moved = t.table("moves").group_by("request").agg(pl.col("bytes").sum()).sort("request").collect()
    sent = stays.filter(pl.col("cached_peer_tokens") > 0)
    assert moved["request"].to_list() == sent["request"].to_list()
    assert moved["bytes"].to_list() == [n * KV_TOKEN_BYTES for n in sent["cached_peer_tokens"]]
    ends = t.table("stages").filter(pl.col("stage") == 0).collect().join(stays, on="request", suffix="_decode")
    assert (ends["end_ns"] <= ends["enqueued_ns_decode"]).all() and set(ends["end_reason"]) == {"handed over"}


@pytest.mark.parametrize(("name", "place"), [("host-tier", "host"), ("cxl-pool", "pool")])
def test_what_a_tier_gave_was_read_from_it(replays: dict[str, Replayed], name: str, place: str) -> None:
    t = replays[name].trace
    found = t.table("stages").filter(pl.col(f"cached_{place}_tokens") > 0).collect()
    tier = load_policy(name).tiers[0].kind
    reads = t.table("moves").filter(pl.col("src").str.starts_with(f"{tier}:")).collect()
    assert found.height and found["request"].to_list() == reads["request"].sort().to_list()
    # Of a prompt that is there whole the last token is computed again, though its block is read.
    read = [-(-n // 16) * 16 * KV_TOKEN_BYTES for n in found[f"cached_{place}_tokens"]]
    assert read == reads.sort("request")["bytes"].to_list()
    waits = t.table("waits").filter(pl.col("kind") == "transfer").collect()
    assert set(waits["request"]) == set(found["request"])
    traffic = {(x["what"], x["bytes"]) for x in replays[name].traffic}
    assert ("read from", reads["bytes"].sum()) in traffic


def test_the_report_reads_a_split_and_its_links(replays: dict[str, Replayed]) -> None:
    found = report(replays["pd-1-1"].trace).as_dict()
    links = {u["link"]: u for u in found["ledger"]["link_use"]}
    assert set(links) == {"roce@prefill-0:out", "roce@decode-0:in"}
    out = links["roce@prefill-0:out"]
    assert out["bytes_per_s"] == 153e9
    moved = replays["pd-1-1"].trace.table("moves").collect()["bytes"].sum()
    assert [w["moved_bytes"] for w in out["ways"]] == [{"derived": moved}]
    assert out["ways"][0]["mean"] > 0


def test_one_request_handed_over_by_hand(tmp_path: Path) -> None:
    """Prompt of 10 at 50 ms, KV of 10 x 128 bytes over 1,280,000 bytes/s with 2 ms fixed: 3 ms; arranging takes 4 ms; two more
    tokens of 12 ms."""
    rows = [{"request": 5, "arrival_ns": 0, "received_ns": 0, "arrival_of": "received", "prompt_tokens": 10, "output_tokens": 3,
             "source": "t"}]  # fmt: skip
    parent = store(tmp_path / "l.trace", {"requests": pl.DataFrame(rows)}, server(), origin="imported")
    policy = parse_policy(
        'name = "pd"\n[split]\nprefill = 1\ndecode = 1\narrange_ms = 4\nlink = "wire"\n'
        '[links.wire]\ngbytes_per_s = 0.00128\nlatency_us = 2000\nmechanism = "rdma"\n'
    )
    for engine in ("plain", "compiled"):
        r = run(parent, policy, cost="fixed:50,12", engine=engine)  # type: ignore[arg-type]
        t = r.trace
        q = t.table("requests").collect().row(0, named=True)
        assert [q[c] for c in ("arrival_ns", "scheduled_ns", "first_token_ns", "last_token_ns", "finish_ns")] == [
            0, 0, 50 * MS, (50 + 4 + 3 + 24) * MS, 81 * MS,
        ]  # fmt: skip
        stays = t.table("stages").select("server", "role", "enqueued_ns", "scheduled_ns", "end_ns", "end_reason", "cached_tokens")
        assert stays.collect().rows() == [
            ("prefill-0", "prefill", None, 0, 50 * MS, "handed over", 0),
            ("decode-0", "decode", 54 * MS, 57 * MS, 81 * MS, "done", 10),
        ]
        assert t.table("waits").select("kind", "on", "server", "start_ns", "end_ns", "basis").collect().rows() == [
            ("message", "hand-over", "decode-0", 50 * MS, 54 * MS, "derived"),
            ("transfer", "kv", "decode-0", 54 * MS, 57 * MS, "derived"),
        ]
        move = t.table("moves").collect().row(0, named=True)
        assert (move["start_ns"], move["end_ns"], move["bytes"], move["object"]) == (54 * MS, 57 * MS, 1280, "kv")
        assert (move["src"], move["dst"], move["mechanism"]) == ("memory:prefill-0", "memory:decode-0", "rdma")
        # What a link of one's own costs in hops nobody said: the ledger assumes its mechanism's, apart from what is derived.
        assert (move["transfers"], move["payload_hops"], move["control_ops"], move["basis"]) == (1, None, None, "derived")
        (row,) = ledger(t).rows.filter(pl.col("object") == "kv", pl.col("path").is_not_null()).iter_rows(named=True)
        told = [row[c] for c in ("transfers", "payload_hops", "payload_hops_assumed", "control_ops_assumed")]
        assert told == [1, None, 4, 5]
        assert t.table("tokens").select("index", "time_ns").collect().rows() == [(0, 50 * MS), (1, 69 * MS), (2, 81 * MS)]
        parts = account(t).parts.row(0, named=True)
        assert {k: v for k, v in parts.items() if v and k.endswith("_ns") and k not in ("arrival_ns", "finish_ns", "e2e_ns")} == {
            "prefill_ns": 50 * MS, "handover_ns": 4 * MS, "transfer_ns": 3 * MS, "decode_ns": 24 * MS,
        }  # fmt: skip
        assert r.traffic == [{"what": "handed over", "tier": None, "moves": 1, "bytes": 1280, "time_ns": 3 * MS}]


def test_a_horizon_leaves_latencies_null(tmp_path: Path) -> None:
    """One slot, three requests at once of 50 + 2 x 12 ms: at 130 ms one is done, one under way, one waits; one comes later."""
    rows = [{"request": i, "arrival_ns": at, "received_ns": at, "arrival_of": "received", "prompt_tokens": p, "output_tokens": 3,
             "source": "t"} for i, (at, p) in enumerate([(0, 10), (0, 10), (0, 10), (10**10, 10), (0, 99)])]  # fmt: skip
    parent = store(tmp_path / "l.trace", {"requests": pl.DataFrame(rows)}, server(context_tokens=100), origin="imported")
    for engine in ("plain", "compiled"):
        r = run(parent, "one-slot", cost="fixed:50,12", until="130ms", engine=engine)  # type: ignore[arg-type]
        assert r.requests == {"done": 1, "refused": 1, "unfinished": 2, "not_arrived": 1}
        q = r.trace.table("requests").select("request", "first_token_ns", "last_token_ns", "finish_ns", "output_tokens", "error")
        assert q.collect().rows() == [
            (0, 50 * MS, 74 * MS, 74 * MS, 3, None),
            (1, 124 * MS, None, None, None, None),
            (2, None, None, None, None, None),
            (4, None, None, 0, None, "cannot ever fit: 102 tokens, the context holds 100"),
        ]
        assert r.trace.table("tokens").collect().height == 4
        assert [f.message for f in validate(Trace(r.trace.path, r.trace.manifest)) if f.level == "error" and f.table] == []
        info = r.trace.manifest.replay
        assert info is not None and "1 requests had not arrived by the horizon; they have no row." in info.warnings


def test_who_saw_a_request_first_may_differ_from_one_to_the_next(tmp_path: Path) -> None:
    """A capture in which a load generator sent some requests, and nobody knows when the others were sent."""
    seen = open_trace(Path(__file__).parent / "data" / "vllm_traces" / "steady.trace")
    assert seen.table("requests").collect()["arrival_of"].n_unique() > 1
    for name in ("as-recorded", "pd-1-1"):
        r = run(seen, name, out=tmp_path / f"{name}.trace", engine="plain", check=False)
        assert [f.message for f in validate(r.trace) if f.level == "error"] == []
        q = r.trace.table("requests").collect()
        late = q.filter(pl.col("arrival_of") == "received")
        assert (late["received_ns"] == late["arrival_ns"]).all() and late["sent_ns"].null_count() == late.height
        sent = q.filter(pl.col("arrival_of") == "intended")
        assert (sent["sent_ns"] >= sent["arrival_ns"]).all() and (sent["received_ns"] >= sent["sent_ns"]).all()
        assert account(r.trace).classes["unexplained_ns"].sum() == 0


def test_without_token_rows_all_else_is_the_same(tmp_path: Path) -> None:
    parent = log(tmp_path / "l.trace", 40)
    a = run(parent, "prefix-cache", cost=COST, out=tmp_path / "a.trace")
    b = run(parent, "prefix-cache", cost=COST, out=tmp_path / "b.trace", tokens=False)
    assert not b.trace.has("tokens") and a.trace.has("tokens")
    for name in ("requests", "stages", "steps", "residency", "waits"):
        assert a.trace.table(name).collect().equals(b.trace.table(name).collect()), name
    assert set(b.trace.table("coverage").collect()["table"]) == {"requests", "stages", "steps", "residency", "waits"}


def test_written_and_in_memory_are_the_same(tmp_path: Path) -> None:
    parent = log(tmp_path / "l.trace", 40)
    a, b = run(parent, "prefix-cache", cost=COST, out=tmp_path / "a.trace"), run(parent, "prefix-cache", cost=COST)
    for name in ("requests", "stages", "tokens", "steps", "residency", "waits", "coverage"):
        assert a.trace.table(name).collect().equals(b.trace.table(name).collect()), name
    assert a.requests == b.requests


def test_the_seed_draws_residuals(tmp_path: Path) -> None:
    """Law 4: the same seed gives the same rows, another one others, where a fit has scatter to draw."""
    seen = open_trace(Path(__file__).parent / "data" / "vllm_traces" / "steady.trace")

    def steps(seed: int) -> pl.DataFrame:
        return run(seen, "as-recorded", seed=seed, check=False).trace.table("steps").collect()

    assert steps(1).equals(steps(1))
    assert not steps(1).equals(steps(2))
