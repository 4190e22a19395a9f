"""Whole replays: law 3 (own policy), law 4 (same rows), and that a replay reads like any other trace."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.workloads import MS, server, store

from hoptrace.analysis.latency.accounting import account
from hoptrace.comparison import compare
from hoptrace.errors import InputError, UsageError
from hoptrace.metrics import summary
from hoptrace.reader import Trace, open_trace
from hoptrace.reconstruct import Steps, steps_of
from hoptrace.replay.overheads import overheads
from hoptrace.replay.policy import parse_policy
from hoptrace.replay.run import basis, drift, predict, replay
from hoptrace.schema import TABLES
from hoptrace.stepcost import fixed
from hoptrace.validate import validate

COST = fixed(step_ns=5 * MS, prefill_token_ns=90_000, decode_request_ns=700_000, decode_context_token_ns=900)


def log(path: Path, n: int = 120, *, apart_ms: int = 60) -> Trace:
    """A request log: arrivals and lengths only, some prompts beginning alike, one request that failed."""
    rows: list[dict[str, Any]] = []
    for i in range(n):
        prompt = 20 + (i * 37) % 200
        at = 10**18 + i * apart_ms * MS + (i * i % 7) * MS
        rows.append({
            "request": i, "request_id": f"r{i}", "arrival_ns": at, "arrival_of": "received", "received_ns": at,
            "prompt_tokens": prompt, "output_tokens": 1 + (i * 13) % 40,
            "prefix_blocks": [k if k < 2 else 1000 * i + k for k in range(prompt // 16)], "hash_space": "h", "block_size": 16,
            "block_unit": "tokens", "error": "HTTP 500" if i == 5 else None, "source": "t",
        })  # fmt: skip
    return store(path, {"requests": pl.DataFrame(rows, infer_schema_length=None)}, server(), origin="imported")


def capture(tmp: Path) -> Trace:
    """As good as a capture whose true step cost is COST: a replay of the log under its own server."""
    return replay(log(tmp / "log.trace"), "as-recorded", cost=COST, out=tmp / "capture.trace")


def rows_hash(trace: Trace) -> str:
    h = hashlib.sha256()
    for name in TABLES:
        frame = trace.table(name).collect()
        h.update(repr((name, sorted(frame.columns), frame.select(sorted(frame.columns)).rows())).encode())
    return h.hexdigest()


def test_own_policy_gives_the_trace_back(tmp_path: Path) -> None:
    """Law 3, with a cost that can be fitted exactly."""
    seen = capture(tmp_path)
    again = predict(seen, "as-recorded")
    assert again.own is not None and again.own.paired and again.own.requests == (119, 119)
    assert again.cost.origin == "fitted"
    for metric, errors in again.own.errors().items():
        for statistic, error in errors.items():
            assert abs(error) < 0.005, (metric, statistic)


@pytest.mark.parametrize("name", ["prefill-first", "prefix-cache", "one-slot", "small-chunks"])
def test_a_replay_can_be_replayed(tmp_path: Path, name: str) -> None:
    """Its manifest holds its whole policy: its own policy gives it back."""
    first = replay(log(tmp_path / "log.trace"), name, cost=COST, out=tmp_path / "a.trace")
    again = predict(first, "as-recorded", cost=COST)
    served = summary(first).finished  # prefill-first refuses prompts beyond the server's budget, since it does not cut them
    assert served > 20 and again.own is not None and again.own.requests == (served, served)
    assert all(e == 0 for m in again.own.errors().values() for e in m.values())


def test_a_what_if_is_what_the_other_policy_gives(tmp_path: Path) -> None:
    seen = capture(tmp_path)
    truth = replay(open_trace(tmp_path / "log.trace"), "one-slot", cost=COST, out=tmp_path / "truth.trace")
    predicted = predict(seen, "one-slot")
    c = compare(truth, predicted.trace)
    assert c.paired
    assert all(abs(e) < 0.01 for m in c.errors().values() for e in m.values())
    assert predicted.against is not None and predicted.against.get("ttft", "mean").error_pct > 20  # type: ignore[operator]


def test_same_trace_policy_and_cost_give_the_same_rows(tmp_path: Path) -> None:
    """Law 4."""
    seen = capture(tmp_path)
    a = replay(seen, "one-slot", seed=3, out=tmp_path / "a.trace")
    b = replay(open_trace(tmp_path / "capture.trace"), "one-slot", seed=3, out=tmp_path / "b.trace")
    assert rows_hash(a) == rows_hash(b)
    assert a.manifest.replay == b.manifest.replay
    other = replay(seen, "four-slots", out=tmp_path / "c.trace")
    assert rows_hash(a) != rows_hash(other)


def test_it_is_a_whole_trace(tmp_path: Path) -> None:
    seen = capture(tmp_path)
    t = replay(seen, "one-slot", out=tmp_path / "w.trace")
    assert [f for f in validate(t) if f.level == "error"] == []
    assert t.manifest.closed and t.origin == "replayed"
    for name in ("requests", "stages", "tokens", "steps", "residency", "waits", "coverage"):
        frame = t.table(name).collect()
        assert frame.height, name
        assert set(frame["source"]) == {"replay"}
    steps = t.table("steps").collect()
    assert set(steps["origin"]) == {"replayed"}
    assert steps["weight_bytes"].to_list() == [2000] * steps.height
    assert steps["kv_read_bytes"].null_count() == 0
    assert t.manifest.servers[0].max_sequences == 1
    assert summary(t).finished == 119
    info = t.manifest.replay
    assert info is not None
    assert info.parent == "capture"
    assert info.policy["name"] == "one-slot" and info.policy["changes"] == {"batching": {"max_sequences": 1}}
    assert info.cost_model["kind"] == "fitted" and info.cost_model["step"]["coefficients_ps"]
    assert info.error is not None and abs(info.error["ttft"]["p50"]) < 0.005
    assert t.manifest.rows_dropped == {}


def test_every_nanosecond_before_the_first_step_is_a_wait(tmp_path: Path) -> None:
    t = replay(log(tmp_path / "log.trace"), "one-slot", cost=COST, out=tmp_path / "w.trace")
    stays = t.table("stages").collect()
    waited = t.table("waits").group_by("request").agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("waited")).collect()
    both = stays.join(waited, on="request", how="left").with_columns(pl.col("waited").fill_null(0))
    both = both.join(t.table("requests").select("request", "received_ns").collect(), on="request")
    assert (both["scheduled_ns"] - both["received_ns"]).to_list() == both["waited"].to_list()
    # The log does not say when a request reached the engine: no equal stamps that would make a measured 0 of that.
    assert both["enqueued_ns"].null_count() == both.height
    assert account(t).parts["proxy_ns"].null_count() == both.height
    assert set(t.table("waits").collect()["kind"]) == {"queue", "capacity"}
    assert set(t.table("waits").filter(pl.col("kind") == "capacity").collect()["on"]) == {"slot"}
    a = account(t)
    assert a.parts.height == 119
    e2e = a.parts["e2e_ns"].sum()
    assert a.classes["unexplained_ns"].sum() <= 0.001 * e2e
    assert a.classes["capacity_ns"].sum() > 0.5 * e2e


def test_preemption_shows_in_stays_runs_and_waits(tmp_path: Path) -> None:
    tight = parse_policy("[kv]\ncapacity_tokens = 288\n")
    t = replay(log(tmp_path / "log.trace", apart_ms=5), tight, cost=COST, out=tmp_path / "w.trace")
    again = t.table("stages").filter(pl.col("recomputed_tokens") > 0).collect()
    assert again.height
    runs = t.table("residency").filter(pl.col("phase") == "preempted").collect()
    assert set(runs["request"]) == set(again["request"])
    kv = t.table("waits").filter((pl.col("kind") == "capacity") & (pl.col("on") == "kv")).collect()
    assert set(runs["request"]) <= set(kv["request"])
    assert t.table("steps").select(pl.col("kv_used_tokens").max()).collect().item() <= 288
    assert [f for f in validate(t) if f.level == "error"] == []


def test_the_prefix_cache_is_decided_anew(tmp_path: Path) -> None:
    parent = log(tmp_path / "log.trace")
    cached = predict(parent, "prefix-cache", cost=COST).trace.table("stages").collect()["cached_tokens"]
    assert cached.sum() > 0
    assert set(cached.to_list()) <= {0, 16, 32}
    assert predict(parent, "no-prefix-cache", cost=COST).trace.table("stages").collect()["cached_tokens"].sum() == 0


def test_refused_requests_are_in_the_trace_with_the_reason(tmp_path: Path) -> None:
    t = replay(log(tmp_path / "log.trace"), parse_policy("[kv]\ncontext_tokens = 200\n"), cost=COST, out=tmp_path / "w.trace")
    bad = t.table("requests").filter(pl.col("error").is_not_null()).collect()
    assert bad.height and bad["error"].str.starts_with("cannot ever fit").all()
    stays = t.table("stages").filter(pl.col("end_reason") == "refused").collect()
    assert stays["request"].to_list() == bad["request"].to_list()
    assert t.rows("requests") == 119
    info = t.manifest.replay
    assert info is not None
    assert any(w.startswith(f"{bad.height} requests are refused") for w in info.warnings)
    assert len([w for w in info.warnings if "cannot ever fit" in w]) == 1


def test_the_change_is_over_the_requests_that_both_replays_serve(tmp_path: Path) -> None:
    """The longest prompts are refused by the what-if, and nothing else changes: for those that are left, nothing does."""
    seen = replay(log(tmp_path / "log.trace", apart_ms=2000), "as-recorded", cost=COST, out=tmp_path / "capture.trace")
    r = predict(seen, parse_policy("[kv]\ncontext_tokens = 228\n"), cost=COST)
    assert r.change is not None and r.change.paired and 100 < r.change.requests[0] < 119
    assert all(e == 0 for m, s in r.change.errors().items() for e in s.values() if m != "throughput")
    assert r.own is not None and r.against is not None
    assert r.own.get("ttft", "mean").predicted != r.against.get("ttft", "mean").predicted


def test_messages_keep_their_bytes_and_say_that_they_are_assumed(tmp_path: Path) -> None:
    seen = log(tmp_path / "log.trace")
    r = seen.table("requests").select("request", "received_ns").head(3).collect()
    moves = [
        {"start_ns": t, "end_ns": t, "request": i, "server": "toy", "object": o, "src": "client", "dst": "server:toy",
         "bytes": 10 + i, "transfers": 1, "mechanism": "message", "path": ["a"], "payload_hops": 2, "basis": "counted",
         "source": "t"}
        for i, t in r.iter_rows() for o in ("prompt", "tokens", "tokens")
    ]  # fmt: skip
    parent = store(tmp_path / "p.trace", {"requests": seen.table("requests").collect(), "moves": pl.DataFrame(moves)}, server())
    out = predict(parent, "one-slot", cost=COST).trace
    got = out.table("moves").collect()
    assert got.height == 6
    assert set(got["basis"]) == {"assumed"}
    assert got.filter(pl.col("object") == "tokens").sort("request")["bytes"].to_list() == [20, 22, 24]
    times = out.table("requests").collect()
    j = got.filter(pl.col("object") == "tokens").join(times, on="request")
    assert (j["start_ns"] == j["first_token_ns"]).all() and (j["end_ns"] == j["last_token_ns"]).all()


def paced(path: Path, hide: dict[str, list[str]] | None = None, **of_server: Any) -> Trace:
    """Nine requests a second apart: 2 ms late, 3 on the way, 4 in the proxy, 1 until the engine began, 30 of work, 7 to end."""
    rows, stays, tokens = [], [], []
    for i in range(9):
        at = 10**18 + i * 1000 * MS
        rows.append({"request": i, "intended_ns": at, "arrival_ns": at, "arrival_of": "intended", "sent_ns": at + 2 * MS,
                     "received_ns": at + 5 * MS, "first_token_ns": at + 40 * MS, "last_token_ns": at + 40 * MS,
                     "finish_ns": at + 47 * MS, "prompt_tokens": 8, "output_tokens": 1, "source": "t"})  # fmt: skip
        stays.append({"request": i, "stage": 0, "server": "toy", "enqueued_ns": at + 9 * MS, "scheduled_ns": at + 10 * MS,
                      "end_ns": at + 40 * MS, "source": "t"})  # fmt: skip
        tokens.append({"request": i, "index": 0, "time_ns": at + 40 * MS, "count": 1, "vantage": "proxy", "source": "t"})
    frames = {n: pl.DataFrame(v) for n, v in (("requests", rows), ("stages", stays), ("tokens", tokens))}
    for name, columns in (hide or {}).items():
        frames[name] = frames[name].with_columns(pl.lit(None, dtype=pl.Int64).alias(c) for c in columns)
    return store(path, frames, server(**of_server))


def test_time_outside_the_engine_is_measured_and_put_back(tmp_path: Path) -> None:
    seen = paced(tmp_path / "s.trace")
    oh = overheads(seen)
    assert (oh.arrival_to_sent_ns, oh.sent_to_received_ns, oh.received_to_enqueued_ns) == (2 * MS, 3 * MS, 4 * MS)
    assert (oh.enqueued_to_ready_ns, oh.last_token_to_finish_ns) == (1 * MS, 7 * MS)
    out = predict(seen, "as-recorded", cost=fixed(any_prefill_ns=30 * MS))
    assert out.own is not None
    assert all(e == 0 for m in out.own.errors().values() for e in m.values())
    r = out.trace.table("requests").collect()
    assert (r["sent_ns"] - r["arrival_ns"]).to_list() == [2 * MS] * 9
    assert r["intended_ns"].to_list() == r["arrival_ns"].to_list()
    assert r["queued_ns"].null_count() == 9
    assert out.trace.table("tokens").collect()["vantage"].to_list() == ["proxy"] * 9
    said = out.trace.manifest.replay.cost_model["outside_steps"]  # type: ignore[union-attr]
    assert said["enqueued_to_ready_ns"] == {"ns": 1 * MS, "n": 9}
    assert said["between_steps_ns"] == {"ns": None, "n": 0}  # reconstructed steps touch: that tells nothing of a gap


def test_enqueued_to_ready_is_queueing_as_in_a_recording(tmp_path: Path) -> None:
    """It holds no place yet, so it is not time between its steps; all parts before the engine line up."""
    # (Of a pool of KV blocks nobody told the use, so whether there was room would be unknown in the recording.)
    seen = paced(tmp_path / "s.trace", block_size_tokens=None, kv_capacity_tokens=None)
    out = predict(seen, "as-recorded", cost=fixed(any_prefill_ns=30 * MS))
    a, b = account(seen).parts, account(out.trace).parts
    before = ["client_ns", "network_in_ns", "proxy_ns", "queue_room_ns", "queue_slots_ns", "prefill_ns", "delivery_ns"]
    assert a.select(before).rows() == b.select(before).rows() == [(2 * MS, 3 * MS, 4 * MS, 1 * MS, 0, 30 * MS, 7 * MS)] * 9
    assert b["host_gap_ns"].fill_null(0).sum() == 0
    assert "host" not in set(out.trace.table("waits").collect()["kind"])
    assert set(out.trace.table("waits").collect()["on"]) == {"server"}


def test_stamps_that_nobody_recorded_stay_unknown(tmp_path: Path) -> None:
    seen = paced(tmp_path / "s.trace", hide={"requests": ["received_ns", "sent_ns"], "stages": ["enqueued_ns"]})
    out = predict(seen, "as-recorded", cost=fixed(any_prefill_ns=30 * MS)).trace
    r = out.table("requests").collect()
    assert r["received_ns"].null_count() == r["sent_ns"].null_count() == 9
    assert out.table("stages").collect()["enqueued_ns"].null_count() == 9
    parts = account(out).parts
    assert all(parts[f"{p}_ns"].null_count() == 9 for p in ("client", "network_in", "proxy"))
    said = out.manifest.replay.cost_model["outside_steps"]  # type: ignore[union-attr]
    assert [said[f"{k}_ns"]["ns"] for k in ("arrival_to_sent", "sent_to_received", "received_to_enqueued")] == [None] * 3


def test_the_way_to_the_engine_counts_though_nobody_saw_it_received(tmp_path: Path) -> None:
    seen = paced(tmp_path / "s.trace", hide={"requests": ["received_ns"]})
    assert overheads(seen).received_to_enqueued_ns == 7 * MS
    out = predict(seen, "as-recorded", cost=fixed(any_prefill_ns=30 * MS))
    assert out.own is not None and out.own.get("ttft", "mean").error == 0


def test_a_replay_of_a_replay_does_not_make_known_what_was_not(tmp_path: Path) -> None:
    first = capture(tmp_path)
    assert overheads(first, first.table("steps").collect(), None).n[4] == 0
    first.manifest.replay.cost_model["outside_steps"]["between_steps_ns"]["n"] = 7  # type: ignore[union-attr]
    assert overheads(first, first.table("steps").collect(), None).n[4] > 0


def test_what_a_fit_rests_on_is_said(tmp_path: Path) -> None:
    """A request without token times ran beside the others: what the steps held then is unknown, and it is in none of them."""
    seen = capture(tmp_path)
    whole = steps_of(seen)
    assert basis(seen, whole) == []
    hidden = pl.col("request") != 3
    blind = pl.when(pl.col("step") < 200).then("decode_requests").alias("decode_requests")
    part = Steps(whole.steps.with_columns(blind), whole.residency.filter(hidden), whole.origin, whole.note)
    known = whole.steps.filter(pl.col("step") < 200)
    share = 100 * (known["end_ns"] - known["start_ns"]).sum() / (whole.steps["end_ns"] - whole.steps["start_ns"]).sum()
    r = seen.table("requests").filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null()).collect()
    tokens = 100 * r.filter(hidden)["output_tokens"].sum() / r["output_tokens"].sum()
    assert basis(seen, part) == [
        f"The step cost rests on 200 of {whole.steps.height} recorded steps, {share:.0f} % of their time: "
        "what the others held, or how long they took, is unknown.",
        f"The recorded steps show 118 of 119 finished requests ({tokens:.0f} % of the output tokens); "
        "what the others did in them is unknown, so the step cost may be theirs too.",
    ]
    assert share < 50
    assert drift(part.steps, COST) == []
    seen.manifest.replay = None
    assert 0 < overheads(seen, part.steps, part.residency).n[4] < 200


def test_a_replay_says_what_its_fit_rests_on_and_over_what_it_was_compared(tmp_path: Path) -> None:
    seen = capture(tmp_path)
    tables = {n: seen.table(n).collect() for n in ("requests", "stages", "tokens", "steps", "residency")}
    hidden = [7, 8, 9]
    unseen = pl.col("request").is_in(hidden)
    times = [pl.when(~unseen).then(c).alias(c) for c in ("first_token_ns", "first_visible_ns", "last_token_ns")]
    tables["requests"] = tables["requests"].with_columns(times)
    tables["tokens"] = tables["tokens"].filter(~unseen)
    tables["residency"] = tables["residency"].filter(~unseen)
    out = predict(store(tmp_path / "h.trace", tables, seen.manifest.servers[0]), "as-recorded")
    said = out.trace.manifest.replay.warnings  # type: ignore[union-attr]
    assert any(w.startswith("The recorded steps show 116 of 119 finished requests") for w in said)
    said_of = [w for w in said if w.startswith("Error under the trace's own policy: TTFT")]
    assert len(said_of) == 1 and "compared over 116 of 119 requests; for the others it is not known" in said_of[0]
    assert out.own is not None and out.own.get("ttft", "mean").n == 116 and out.own.get("e2e", "mean").n is None


def test_the_gap_between_steps_is_measured(tmp_path: Path) -> None:
    seen = capture(tmp_path)
    steps = seen.table("steps").collect()
    shifted = steps.with_columns(
        (pl.col("start_ns") + pl.col("step") * 3 * MS).alias("start_ns"),
        (pl.col("end_ns") + pl.col("step") * 3 * MS).alias("end_ns"),
    )
    seen.manifest.replay = None  # as of a capture: the manifest of a replay says that the gap was never known
    assert overheads(seen, steps, None).between_steps_ns < MS
    assert abs(overheads(seen, shifted, None).between_steps_ns - overheads(seen, steps, None).between_steps_ns - 3 * MS) < 1000


def test_extrapolation_is_said(tmp_path: Path) -> None:
    seen = replay(log(tmp_path / "log.trace"), "one-slot", cost=COST, out=tmp_path / "one.trace")
    info = predict(seen, "four-slots").trace.manifest.replay
    assert info is not None
    said = [w for w in info.warnings if w.startswith("decode_requests of 1 to 4 was asked for, 0 to 1 was seen: extrapolated in")]
    assert len(said) == 1


def test_a_machine_that_changes_its_speed_is_noticed(tmp_path: Path) -> None:
    steps = capture(tmp_path).table("steps").collect()
    assert drift(steps, COST) == []
    late = pl.when(pl.col("step") > steps.height // 2).then(1.5).otherwise(1.0)
    took = ((pl.col("end_ns") - pl.col("start_ns")) * late).cast(pl.Int64)
    slower = steps.with_columns((pl.col("start_ns") + took).alias("end_ns"))
    said = drift(slower, COST)
    assert len(said) == 1 and "equal steps took 50 % longer in its slowest quarter" in said[0]
    assert said[0].endswith("A replay runs at the mean speed.")
    # With the recorded steps' scatter, which is taken in their order, it does not.
    (with_scatter,) = drift(slower, dataclasses.replace(COST, residuals={"decode": (0, 1)}))
    assert with_scatter.endswith(
        "A replay has such phases where the recording had them (--seed 0); another run has them elsewhere."
    )


def test_without_observed_latencies_the_error_is_unknown_and_that_is_said(tmp_path: Path) -> None:
    out = predict(log(tmp_path / "log.trace"), "one-slot", cost="fixed:50,12")
    info = out.trace.manifest.replay
    assert out.own is None and info is not None and info.error is None
    assert "The trace holds no observed latencies, so the error of this replay is unknown." in info.warnings
    assert "1 of 120 requests are left out of the replay: failed." in info.warnings
    assert out.trace.manifest.rows_dropped == {"requests: failed": 1}


def test_a_higher_rate_waits_longer(tmp_path: Path) -> None:
    parent = log(tmp_path / "log.trace")
    slow, fast = (predict(parent, "one-slot", cost=COST, rate=r).trace for r in (1, 2))
    a, b = (x.table("requests").collect() for x in (slow, fast))
    assert (b["arrival_ns"].max() - b["arrival_ns"].min()) * 2 == pytest.approx(
        a["arrival_ns"].max() - a["arrival_ns"].min(), abs=2
    )  # type: ignore[operator]
    assert summary(fast)["queue"].mean_ns > summary(slow)["queue"].mean_ns  # type: ignore[operator]
    assert fast.manifest.replay is not None and fast.manifest.replay.arrivals == "recorded, 2 times as fast"


def test_a_configuration_that_changed_during_the_recording_is_said(tmp_path: Path) -> None:
    rows = log(tmp_path / "log.trace").table("requests").collect()
    event = {"time_ns": 10**18 + 5, "host": "h", "source": "attach"}
    for kinds, words in (
        (["start", "restart", "stop"], None),
        (["configuration change"], "(max_sequences: 2 -> 1). The replay takes the one at its start"),
        (["configuration change", "restart", "configuration change"], "(max_sequences: 2 -> 1) (and 1 more)"),
    ):
        events = pl.DataFrame([event | {"kind": k, "detail": "max_sequences: 2 -> 1"} for k in kinds])
        t = store(tmp_path / f"{len(kinds)}{kinds[0][:1]}.trace", {"requests": rows, "events": events}, server(max_sequences=2))
        said = predict(t, "as-recorded", cost=COST).trace.manifest.replay.warnings  # type: ignore[union-attr]
        found = [w for w in said if "configuration changed" in w]
        assert len(found) == (words is not None)
        assert words is None or words in found[0]


def test_what_cannot_be_replayed_is_refused_in_a_sentence(tmp_path: Path) -> None:
    parent = log(tmp_path / "log.trace")
    # What fails is no remedy: not `fitted`, nor a roofline of an unknown model.
    with pytest.raises(
        InputError, match=r"no steps to fit .*\. Use --cost fixed:PREFILL_MS,DECODE_MS, table:FILE, or --cost roof"
    ):
        predict(parent, "one-slot", cost="fitted")
    unsized = store(tmp_path / "u.trace", {"requests": parent.table("requests").collect()}, server(weight_bytes=None))
    with pytest.raises(InputError, match=r"--cost roofline --model NAME --platform NAME"):
        predict(unsized, "one-slot", cost="fitted")
    with pytest.raises(UsageError, match="no cost model"):
        predict(parent, "one-slot", cost="guess")
    with pytest.raises(UsageError, match="no policy"):
        predict(parent, "none")
    with pytest.raises(UsageError, match="already there"):
        replay(parent, "one-slot", cost=COST, out=tmp_path / "log.trace")
    two = store(tmp_path / "two.trace", {"requests": parent.table("requests").collect()}, server())
    two.manifest.servers.append(server(name="other", max_sequences=9))
    with pytest.raises(InputError, match="2 servers differ in max_sequences"):
        predict(two, "one-slot", cost=COST)


def test_a_roofline_by_platform(tmp_path: Path) -> None:
    out = predict(log(tmp_path / "log.trace"), "as-recorded", cost="roofline", platform="h100-sxm-80gb")
    info = out.trace.manifest.replay
    assert info is not None and info.cost_model["platform"]["memory_bytes_per_s"] == 3350e9
    mine = tmp_path / "p.toml"
    mine.write_text("flops_per_s = 1e9\nmemory_bytes_per_s = 1e9\n")
    slow = predict(log(tmp_path / "log2.trace"), "as-recorded", cost="roofline", platform=str(mine))
    assert summary(slow.trace)["ttft"].mean_ns > summary(out.trace)["ttft"].mean_ns  # type: ignore[operator]
    mine.write_text("flops_per_s = -1\nmemory_bytes_per_s = 1e9\n")
    with pytest.raises(InputError, match="flops_per_s must be a number"):
        predict(log(tmp_path / "log3.trace"), "as-recorded", cost="roofline", platform=str(mine))
