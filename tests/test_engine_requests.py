"""Requests and steps that engines tell one record at a time: SGLang's export files, TensorRT-LLM's /metrics and /perf_metrics."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pages import ENGINES, Pages, asked, context

import hoptrace
from hoptrace.collectors.base import ServerAway
from hoptrace.collectors.engines import trtllm_requests
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.sglang_export import SglangExport, rows_of
from hoptrace.collectors.engines.trtllm_requests import TrtllmRequests, times_of
from hoptrace.collectors.engines.trtllm_steps import TrtllmSteps, step_of
from hoptrace.manifest import Manifest, Server
from hoptrace.writer import TraceWriter


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
        yield writer


def rows(writer: TraceWriter, table: str) -> list[dict[str, Any]]:
    writer.flush()
    return hoptrace.open(writer.path).table(table).collect().to_dicts()


# -- SGLang's export --------------------------------------------------------------------------------------------------


def record(number: str = "r1", **more: Any) -> dict[str, Any]:
    """As request_metrics_exporter.py and tokenizer_manager.py of SGLang 0.5.23 write it, with metrics on."""
    asked = {
        "text": "my secret prompt",
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 64},
        "priority": 3,
        "rid": number,
    }
    return {
        "request_parameters": json.dumps(asked), "id": number, "finish_reason": {"type": "length", "length": 64},
        "prompt_tokens": 100, "completion_tokens": 64, "cached_tokens": 32, "weight_version": "default", "num_retractions": 0,
        "cached_tokens_details": {"device": 24, "host": 8}, "dp_rank": 1, "queue_time": 0.25, "e2e_latency": 2.0,
        "request_received_ts": 1_796_000_000.0, "api_server_dispatch_finish_ts": 1_796_000_000.01,
        "forward_entry_time": 1_796_000_000.26, "first_token_latency": 0.5, "request_finished_ts": 1_796_000_002.0,
    } | more  # fmt: skip


def test_a_record_of_sglang() -> None:
    number, request, stage = rows_of(json.dumps(record())) or ("", {}, {})
    t0 = 1_796_000_000 * 10**9
    assert number == "r1"
    assert request == {
        "received_ns": t0, "scheduled_ns": t0 + 260_000_000, "engine_first_token_ns": t0 + 500_000_000,
        "finish_ns": t0 + 2 * 10**9, "prompt_tokens": 100, "output_tokens": 64, "finish_reason": "length", "error": None,
        "max_tokens": 64, "priority": 3,
    }  # fmt: skip
    assert (stage["cached_tokens"], stage["cached_device_tokens"], stage["cached_host_tokens"]) == (32, 24, 8)
    assert (stage["dp_rank"], stage["end_reason"]) == (1, "done")
    assert abs(stage["enqueued_ns"] - (t0 + 10_000_000)) < 1000, "a double holds this many seconds to a quarter of a microsecond"
    assert "secret" not in str((request, stage)) and "[1, 2, 3]" not in str((request, stage))


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "null", "1", '{"id": 3}', '{"id": "x"}', '{"id": "x", "prompt_tokens": "9"}', "[" * 100_000, "\x00\xff",
     json.dumps(record(prompt_tokens=-1)), json.dumps(record(prompt_tokens=1.5))],
)  # fmt: skip
def test_what_is_no_record(line: str) -> None:
    assert rows_of(line) is None


_NUMBER = st.none() | st.integers() | st.floats() | st.text(max_size=5)
_ANY = _NUMBER | st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(max_size=4), st.integers(), max_size=2)


@given(st.dictionaries(st.sampled_from([*record(), "x"]), _ANY))
def test_no_record_breaks_the_reader(changes: dict[str, Any]) -> None:
    found = rows_of(json.dumps(record() | changes))
    if found is not None:
        assert all(v is None or isinstance(v, int | str) for row in found[1:] for v in row.values())


async def test_files_of_the_export_are_followed_from_hour_to_hour(tmp_path: Path, writer: TraceWriter) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    old = folder / "sglang-request-metrics-20261130_10.log"
    old.write_text(json.dumps(record("before")) + "\n")
    async with asked(Pages({})) as api:
        ctx = context(api, writer, server=Server(name="s", engine="sglang", model="m"))
        c = SglangExport(ctx, folder)
        assert (await c.probe()).available
        await c.start()
        with old.open("a") as f:
            f.write(json.dumps(record("r1")) + "\n" + json.dumps(record("r2"))[:40])
        assert await c.sample() == 2
        with old.open("a") as f:
            f.write(json.dumps(record("r2"))[40:] + "\nnoise\n")
        (folder / "sglang-request-metrics-20261130_11.log").write_text(json.dumps(record("r3", cached_tokens=0)) + "\n")
        assert await c.sample() == 4
        await c.close()
    found = {r["request_id"]: r for r in rows(writer, "requests")}
    assert set(found) == {"r1", "r2", "r3"}, "what stood there before the capture is left"
    assert found["r1"]["arrival_of"] == "received" and found["r1"]["arrival_ns"] == found["r1"]["received_ns"]
    assert len(rows(writer, "stages")) == 3 and {s["server"] for s in rows(writer, "stages")} == {"s"}
    assert writer.manifest.rows_dropped == {"sglang-export: line that is no record of a request": 1}
    assert "secret" not in (writer.path / "manifest.json").read_text()


async def test_beside_a_proxy_the_records_join_its_requests(tmp_path: Path, writer: TraceWriter) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    async with asked(Pages({})) as api:
        ctx = context(api, writer, server=Server(name="s", engine="sglang"))
        assert ctx.links is not None
        ctx.links.primary = True
        number = ctx.links.new()
        writer.append(
            "requests", [{"request": number, "arrival_ns": 5, "received_ns": 5, "arrival_of": "received", "source": "proxy"}]
        )
        ctx.links.claim(number, "r1")
        c = SglangExport(ctx, folder)
        await c.probe()
        await c.start()
        (folder / "sglang-request-metrics-20261130_11.log").write_text(json.dumps(record("r1")) + "\n")
        await c.sample()
        await c.close()
    (row,) = rows(writer, "requests")
    assert (row["received_ns"], row["arrival_ns"], row["output_tokens"]) == (5, 5, 64), "when it came is the proxy's to say"


async def test_an_export_that_is_off_or_elsewhere(tmp_path: Path, writer: TraceWriter) -> None:
    async with asked(Pages({})) as api:
        ctx = context(api, writer)
        off = await SglangExport(ctx, None).probe()
        gone = await SglangExport(ctx, tmp_path / "nothing").probe()
    assert "--export-metrics-to-file --export-metrics-to-file-dir DIR --enable-metrics" in str(off.reason)
    assert not gone.available and "can't be read here" in str(gone.reason)


async def test_records_without_times_are_counted(tmp_path: Path, writer: TraceWriter) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    async with asked(Pages({})) as api:
        c = SglangExport(context(api, writer), folder)
        await c.probe()
        await c.start()
        (folder / "sglang-request-metrics-1.log").write_text(json.dumps(record("r", request_received_ts=None)) + "\n")
        assert await c.sample() == 0
    assert writer.manifest.rows_dropped == {"sglang-export: request without times (start SGLang with --enable-metrics)": 1}


# -- TensorRT-LLM's iterations ----------------------------------------------------------------------------------------


def iteration(number: int, ms: float = 20.0, **more: Any) -> dict[str, Any]:
    """The fields of tensorrt_llm's iteration report of 2026 (executor/stats)."""
    return {
        "timestamp": "", "iter": number, "iterLatencyMS": ms, "numActiveRequests": 9, "numQueuedRequests": 4, "gpuMemUsage": 1,
        "kvCacheStats": {"maxNumBlocks": 5358, "freeNumBlocks": 5350, "usedNumBlocks": 8, "tokensPerBlock": 32},
        "inflightBatchingStats": {
            "numScheduledRequests": 9, "numContextRequests": 1, "numGenRequests": 8, "numPausedRequests": 0, "numCtxTokens": 13,
            "numCtxKvTokens": 64, "numGenKvTokens": 9000, "numQueuedContextRequests": 3, "numQueuedCtxTokens": 700,
            "numQueuedGenRequests": 1, "numQueuedGenKvTokens": 50, "avgNumDecodedTokensPerIter": 0.0, "microBatchId": 0,
        },
        "specDecodingStats": {"numDraftTokens": 24, "numAcceptedTokens": 12}, "attentionDpRank": 0,
    } | more  # fmt: skip


def test_an_iteration_of_trtllm() -> None:
    assert step_of(iteration(7, gpuForwardTimeMS=12.5)) == (0, 7, 20_000_000, {
        "running": 9, "waiting": 4, "prefill_requests": 1, "prefill_tokens": 13, "prefill_context_tokens": 64,
        "decode_requests": 8, "decode_context_tokens": 9000, "queued_prefill_requests": 3, "queued_prefill_tokens": 700,
        "queued_decode_requests": 1, "queued_decode_context_tokens": 50, "preempted": 0, "draft_proposed": 24,
        "draft_accepted": 12, "kv_used_tokens": 256, "kv_capacity_tokens": 171456, "device_ns": 12_500_000,
    })  # fmt: skip
    (quoted,) = json.loads((ENGINES / "trtllm" / "metrics.json").read_text())
    assert step_of(quoted) == (0, 154, 7_006_884, {"running": 1, "kv_used_tokens": 96, "kv_capacity_tokens": 3_240_192})


@pytest.mark.parametrize(
    "change",
    [{"iter": None}, {"iter": "7"}, {"iter": True}, {"iterLatencyMS": None}, {"iterLatencyMS": -1}, {"iterLatencyMS": True}],
)
def test_what_is_no_iteration(change: dict[str, Any]) -> None:
    assert step_of(iteration(7) | change) is None


async def test_iterations_that_the_server_tells_once(writer: TraceWriter) -> None:
    pages = Pages({"/version": {"version": "1.2.0"}, "/metrics": []})
    async with asked(pages) as api:
        c = TrtllmSteps(context(api, writer))
        found = await c.probe()
        assert found.available and "another reader of /metrics takes iterations away" in str(found.reason)
        assert "/metrics" not in pages.seen, "the probe takes nothing away"
        await c.start()
        for batch in ([iteration(1), iteration(2)], [], [iteration(3), iteration(6)], [iteration(7)]):
            pages.answers["/metrics"] = batch
            await c.sample()
        c.restarted()
        pages.answers["/metrics"] = [iteration(1), iteration(2)]
        await c.sample()
        await c.close()
    steps = sorted(rows(writer, "steps"), key=lambda r: r["step"])
    assert [s["step"] for s in steps] == [1, 2, 3, 6, 7, 9, 10], "numbers go on after a restart"
    assert {s["end_ns"] - s["start_ns"] for s in steps} == {20_000_000}
    assert all(a["end_ns"] <= b["start_ns"] for a, b in pairwise(steps))
    assert [e["kind"] for e in rows(writer, "events")] == ["gap"]
    assert writer.manifest.rows_dropped == {"trtllm-steps: iterations that somebody else read": 2}
    assert any("steps are from /metrics" in n for n in writer.manifest.notes)


async def test_ranks_of_attention_dp_have_numbers_of_their_own(writer: TraceWriter) -> None:
    async with asked(
        Pages({"/metrics": [iteration(1), iteration(1, attentionDpRank=1), iteration(2), iteration(2, attentionDpRank=1)]})
    ) as api:
        c = TrtllmSteps(context(api, writer))
        await c.sample()
        await c.close()
    assert sorted((r["dp_rank"], r["step"]) for r in rows(writer, "steps")) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert rows(writer, "events") == []


async def test_the_servers_own_stamp_bounds_the_end(writer: TraceWriter) -> None:
    stamp = time.time() - 3.0
    text = time.strftime("%m-%d-%Y %H:%M:%S", time.localtime(stamp)) + f".{int(stamp % 1 * 1e6):06d}"
    async with asked(Pages({"/metrics": [iteration(1, timestamp=text)]})) as api:
        c = TrtllmSteps(context(api, writer))
        await c.sample()
        await c.close()
    (step,) = rows(writer, "steps")
    assert abs(step["end_ns"] - (stamp * 1e9 + 20e6)) < 5e6


@pytest.mark.parametrize("body", [b"{}", b"[" * 100_000, b"\x00", b'[1, "x", null, {}]', b"# TYPE a counter\na 1\n"])
async def test_hostile_iterations(writer: TraceWriter, body: bytes) -> None:
    async with asked(Pages({"/metrics": body})) as api:
        c = TrtllmSteps(context(api, writer))
        assert await c.sample() == 0
        await c.close()
    assert rows(writer, "steps") == [] and c.tables == () and sum(writer.manifest.rows_dropped.values()) in (1, 4)
    with pytest.raises(ServerAway):
        await TrtllmSteps(context(Api("http://127.0.0.1:9"), writer)).sample()


# -- TensorRT-LLM's requests ------------------------------------------------------------------------------------------


def measured(number: int, t0: float, **more: Any) -> dict[str, Any]:
    """As openai_server.py of TensorRT-LLM 1.2 writes /perf_metrics: seconds of the steady clock."""
    timing = {
        "server_arrival_time": t0, "arrival_time": t0 + 0.001, "first_scheduled_time": t0 + 0.003, "first_token_time": t0 + 0.5,
        "server_first_token_time": t0 + 0.501, "last_token_time": t0 + 1.5,
    } | more  # fmt: skip
    kv = {"num_total_allocated_blocks": 3, "num_new_allocated_blocks": 3, "num_reused_blocks": 0, "num_missed_blocks": 3}
    return {
        "request_id": number,
        "perf_metrics": {"first_iter": 1, "last_iter": 9, "timing_metrics": timing, "kv_cache_metrics": kv},
    }


def test_times_of_a_request() -> None:
    number, found = times_of(measured(3, 100.0)) or ("", {})
    assert number == "3" and found["arrival_time"] == 100_001_000_000 and len(found) == 6
    assert times_of({"ctx_perf_metrics": measured(1, 1.0), "gen_perf_metrics": measured(1, 2.0)}) is None
    for bad in (None, 3, [], {}, {"request_id": 1}, {"request_id": 1, "perf_metrics": {"timing_metrics": {"arrival_time": 0}}}):
        assert times_of(bad) is None


class Steady(Pages):
    """A server whose steady clock is ``ahead_s`` ahead of this host's."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__({})
        self.ahead_s = ahead_s

    def __call__(self, request: Any) -> Any:
        now = time.monotonic() + self.ahead_s
        self.answers["/steady_clock_offset"] = {"receive_ts": now, "transmit_ts": now}
        return super().__call__(request)


async def test_requests_on_the_traces_clock(writer: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtllm_requests, "_EVERY_S", 0.0)
    pages = Steady(5000.0)
    async with asked(pages) as api:
        c = TrtllmRequests(context(api, writer, server=Server(name="s", model="m")))
        assert (await c.probe()).available
        t0 = time.monotonic() - 10.0
        moved = {"kv_cache_transfer_start": t0 + 5001.1, "kv_cache_transfer_end": t0 + 5001.2}
        pages.answers["/perf_metrics"] = [measured(1, t0 + 5000.0), measured(2, t0 + 5001.0, **moved), 7]
        assert await c.sample() == 5
        pages.answers["/perf_metrics"] = []
        assert await c.sample() == 0
    found = sorted(rows(writer, "requests"), key=lambda r: r["arrival_ns"])
    true = writer.clock.from_monotonic_ns(round(t0 * 1e9))
    (sync,) = rows(writer, "clock_sync")
    assert sync["clock"] == "steady" and 0 <= sync["uncertainty_ns"] < 2 * 10**9
    for i, row in enumerate(found):
        assert abs(row["arrival_ns"] - (true + i * 10**9)) <= sync["uncertainty_ns"]
        assert row["queued_ns"] - row["arrival_ns"] == 1_000_000 and row["finish_ns"] - row["arrival_ns"] == 1_500_000_000
        assert row["engine_first_token_ns"] - row["scheduled_ns"] == 497_000_000
    assert [(s["engine_request_id"], s["end_reason"]) for s in sorted(rows(writer, "stages"), key=lambda r: r["end_ns"])] == [
        ("1", "done"), ("2", "done"),
    ]  # fmt: skip
    (wait,) = rows(writer, "waits")
    assert (wait["kind"], wait["on"], round((wait["end_ns"] - wait["start_ns"]) / 1e6)) == ("transfer", "kv", 100)
    assert writer.manifest.rows_dropped == {"trtllm-requests: record that is no request of one server": 1}


async def test_beside_a_proxy_it_keeps_still(writer: TraceWriter) -> None:
    pages = Steady(0.0)
    async with asked(pages) as api:
        ctx = context(api, writer)
        assert ctx.links is not None
        ctx.links.primary = True
        c = TrtllmRequests(ctx)
        found = await c.probe()
        assert not found.available and "can't be joined" in str(found.reason)
        assert await c.sample() == 0
    assert "/perf_metrics" not in pages.seen, "nothing is taken from other readers"


async def test_a_clock_that_cannot_be_compared(writer: TraceWriter) -> None:
    async with asked(Pages({})) as api:
        found = await TrtllmRequests(context(api, writer)).probe()
    assert not found.available and "its clock can't be compared" in str(found.reason)
