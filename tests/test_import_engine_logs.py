"""Logs and recordings of engines become traces: vLLM, llama.cpp in both forms, SGLang, vllm-vcr, LLMServingSim."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import hoptrace
from hoptrace.collectors.files.run import Imported, import_files
from hoptrace.errors import InputError
from hoptrace.metrics import summary
from hoptrace.reader import Trace
from hoptrace.validate import validate

DATA = Path(__file__).parent / "data" / "bench"


def read(tmp_path: Path, path: Path) -> tuple[Trace, Imported]:
    done = import_files([path], tmp_path / "t.trace")
    assert done.read == done.written + done.rejected
    trace = hoptrace.open(tmp_path / "t.trace")
    assert not [f for f in validate(trace) if f.level == "error"]
    return trace, done


def says(trace: Trace, words: str) -> bool:
    return any(words in n for n in trace.manifest.notes)


# -- vLLM's log -----------------------------------------------------------------------------------------------------------


def test_vllm_log_steps(tmp_path: Path) -> None:
    text = (DATA / "vllm_server.log").read_text()
    told = re.findall(
        r"(\d\d):(\d\d):(\d\d) .*Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
        r"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms",
        text,
    )
    trace, done = read(tmp_path, DATA / "vllm_server.log")
    steps = trace.table("steps").sort("step").collect()
    assert done.written == len(told) == 173 and trace.manifest.imported_from[0]["kind"] == "vllm-log"
    columns = ("step", "prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens")
    assert steps.select(columns).rows() == [tuple(int(x) for x in t[3:8]) for t in told]
    assert (steps["end_ns"] - steps["start_ns"]).to_list() == [round(float(t[8]) * 1e6) for t in told]
    # None overlaps the one ahead, and each ends within a second after what its stamp says.
    assert (steps["start_ns"] - steps["end_ns"].shift(1)).drop_nulls().min() >= 0  # type: ignore[operator]
    stamps = pl.Series([(int(h) * 60 + int(m)) * 60 + int(s) for h, m, s, *_ in told])
    since = steps["end_ns"] - stamps * 10**9
    assert since.max() - since.min() < 1_000_000_000  # type: ignore[operator]
    server = trace.manifest.server("vllm")
    assert server is not None
    found = (server.engine_version, server.model, server.kv_capacity_tokens, server.block_size_tokens, server.max_sequences)
    assert found == ("0.32.0", "toy", 4_194_304, 32, 8)
    assert (server.context_tokens, server.max_batched_tokens) == (2048, 512)
    assert says(trace, "known to one second only") and says(trace, "neither year nor zone")


def test_vllm_log_holds_the_work_that_the_benchmarks_asked_for(tmp_path: Path) -> None:
    """Two runs of `vllm bench serve` were all that the server had: every prompt token is in a chunk, each token but a request's
    first in a decode."""
    trace, _ = read(tmp_path, DATA / "vllm_server.log")
    steps = trace.table("steps").collect()
    runs = [json.loads((DATA / name).read_text()) for name in ("vllm_detailed.json", "vllm_summary.json")]
    assert steps["prefill_tokens"].sum() == sum(r["total_input_tokens"] for r in runs) == 1520
    assert steps["prefill_requests"].sum() == sum(r["completed"] for r in runs) == 32
    assert steps["decode_tokens"].sum() == sum(r["total_output_tokens"] - r["completed"] for r in runs) == 480


def test_vllm_log_summaries_become_counters(tmp_path: Path) -> None:
    trace, _ = read(tmp_path, DATA / "vllm_server.log")
    rows = trace.table("counters").sort("name").collect()
    told = re.search(r"Avg prompt throughput: ([\d.]+)", (DATA / "vllm_server.log").read_text())
    assert told is not None
    mine = rows.filter(pl.col("name") == "log:prompt_tokens_per_s")
    assert mine["value_float"].to_list() == [float(told[1])] and mine["uncertainty_ns"].to_list() == [500_000_000]


def line(n: int, clock: str = "12:00:00", ms: str = "5.00", rank: int = 0) -> str:
    return (
        f"INFO 11-30 {clock} [loggers.py:199] Engine {rank:03d}: Iteration({n}): 0 context requests, 0 context tokens, "
        f"2 generation requests, 2 generation tokens, iteration elapsed time: {ms} ms, GPU KV cache usage: 0.6%\n"
    )


def test_vllm_log_restarts_gaps_ranks_and_cut_lines(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    path.write_text(
        line(0)
        + line(1)
        + line(4)
        + line(0, rank=1)
        + line(0, "12:00:09")
        + line(1, "12:00:09")
        + line(2, "12:00:10").split(" ms")[0]
    )
    trace, done = read(tmp_path, path)
    assert (done.read, done.written, done.rejected) == (7, 6, 1)
    assert done.first_rejects[0]["row"] == 7 and "cut" in str(done.first_rejects[0]["reason"])
    steps = trace.table("steps").filter(pl.col("dp_rank") == 0).sort("start_ns").collect()
    assert steps["step"].to_list() == [0, 1, 4, 5, 6]
    assert says(trace, "1 times the iterations begin anew") and says(trace, "2 iterations are missing")


def test_vllm_log_of_one_second_that_holds_more_than_a_second(tmp_path: Path) -> None:
    """Lines that were written late: their steps are kept, with a word."""
    path = tmp_path / "s.log"
    path.write_text("".join(line(i, ms="400.00") for i in range(4)))
    trace, _ = read(tmp_path, path)
    assert says(trace, "1 steps end later than their line was written")


def test_vllm_log_without_iterations(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    path.write_text(
        "(APIServer pid=1) INFO 11-30 12:00:00 [loggers.py:3] Engine 000: Avg prompt throughput: 1.5 tokens/s, Avg generation "
        "throughput: 2.0 tokens/s, Running: 3 reqs, Waiting: 4 reqs, GPU KV cache usage: 0.6%, Prefix cache hit rate: 0.0%\n"
    )
    trace, done = read(tmp_path, path)
    assert done.written == 6 and not trace.has("steps") and says(trace, "--enable-logging-iteration-details")
    path.write_text("(APIServer pid=1) INFO 11-30 12:00:00 [x.py:3] started\n")
    with pytest.raises(InputError, match="neither Iteration lines nor summaries"):
        import_files([path], tmp_path / "u.trace")


def test_vllm_log_year_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    path.write_text(line(0))
    os.utime(path, (1_735_700_000, 1_735_700_000))  # 1 January 2025
    trace, _ = read(tmp_path, path)
    assert 1_732_900_000 < trace.table("steps").collect()["end_ns"].item() / 1e9 < 1_733_100_000  # 30 November 2024


# -- llama.cpp's log ------------------------------------------------------------------------------------------------------


def test_llamacpp_log_against_guidellm_that_saw_the_same_requests(tmp_path: Path) -> None:
    """The log's first tasks are the requests that guidellm.json has: one run, seen from both ends."""
    trace, done = read(tmp_path, DATA / "llamacpp.log")
    ours = trace.table("requests").sort("request").collect()
    assert done.written == 9 and says(trace, "2 requests were still running")
    done_rows = ours.filter(pl.col("finish_ns").is_not_null())
    # 54 prompt tokens each as guidellm was told; the later ones found some of them cached.
    assert done_rows["prompt_tokens"].to_list() == [54] * 7 and done_rows["output_tokens"].to_list() == [12] * 7
    cached = trace.table("stages").sort("request").collect()["cached_tokens"].to_list()
    assert cached[:7] == [0, 0, 0, 0, 26, 26, 26]
    theirs = json.loads((DATA / "guidellm.json").read_text())["benchmarks"][0]["requests"]["successful"]
    client = sorted((t["info"]["timings"] for t in theirs), key=lambda t: t["request_start"])
    for i in range(4):
        decode = (done_rows["last_token_ns"][i] - done_rows["first_token_ns"][i]) / 1e6
        seen = (client[i]["last_token_iteration"] - client[i]["first_token_iteration"]) * 1e3
        assert decode == pytest.approx(seen, abs=2.0)
        ttft = (done_rows["first_token_ns"][i] - done_rows["arrival_ns"][i]) / 1e6
        assert (
            0 < (client[i]["first_token_iteration"] - client[i]["request_start"]) * 1e3 - ttft < 60
        )  # an iteration ran when it came
    first = ours.row(0, named=True)
    assert first["arrival_ns"] == 85_286_702_000 and first["last_token_ns"] - first["first_token_ns"] == 1_279_030_000


def test_llamacpp_json_lines_with_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    trace, done = read(tmp_path, DATA / "llamacpp.jsonl")
    rows = trace.table("requests").sort("request").collect()
    assert (done.written, summary(trace).failed) == (6, 1)
    assert rows.filter(pl.col("error").is_not_null())["error"].to_list() == [
        "request (3001 tokens) exceeds the available context size (1024 tokens), try increasing it"
    ]
    kept = rows.filter(pl.col("error").is_null())
    assert kept["prompt_tokens"].to_list() == [9] * 5
    assert sorted(trace.table("stages").drop_nulls("cached_tokens").collect()["cached_tokens"].to_list()) == [0, 0, 4, 4, 4]
    assert summary(trace)["queue"].n == 5
    server = trace.manifest.server("llamacpp")
    assert server is not None and server.model == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_llamacpp_log_restart_and_impossible_timings(tmp_path: Path) -> None:
    text = (DATA / "llamacpp.log").read_text()
    path = tmp_path / "two.log"
    path.write_text(text + text.replace("total time", "total time"))
    trace, done = read(tmp_path, path)
    assert done.written == 18 and says(trace, "1 restarts of the server")
    events = trace.table("events").filter(pl.col("kind") == "restart").collect()
    assert events["server"].to_list() == ["llamacpp"]
    starts = trace.table("requests").sort("request").collect()["arrival_ns"]
    assert starts[9] > starts[8]
    path.write_text(text.replace("prompt eval time =     336.95 ms", "prompt eval time =  936336.95 ms", 1))
    done = import_files([path], tmp_path / "u.trace")
    assert done.rejected == 1 and done.first_rejects[0]["reason"] == "its timings are longer than its stay in the slot"
    path.write_text("0.00.016.209 I slot get_availabl: id  3 | task -1 | selected slot by LRU, t_last = -1\n")
    with pytest.raises(InputError, match=r"no task of llama\.cpp"):
        import_files([path], tmp_path / "v.trace")


# -- SGLang's export ------------------------------------------------------------------------------------------------------


def exported(**more: Any) -> dict[str, Any]:
    """A line as SGLang 0.5.23 writes it (request_metrics_exporter.py, tokenizer_manager.py, req_time_stats.py)."""
    return {
        "request_parameters": json.dumps({"text": "secret words", "sampling_params": {"max_new_tokens": 64}}),
        "id": "abc", "finish_reason": {"type": "length", "length": 8}, "prompt_tokens": 100, "weight_version": "default",
        "num_retractions": 0, "forward_entry_time": 1_700_000_000.25, "prefill_finished_time": 1_700_000_000.4,
        "queue_time": 0.125, "reasoning_tokens": 0, "completion_tokens": 8, "cached_tokens": 48,
        "cached_tokens_details": {"device": 32, "host": 16}, "dp_rank": 1, "request_received_ts": 1_700_000_000.0,
        "first_token_latency": 0.5, "response_sent_to_client_ts": 1_700_000_000.5, "request_finished_ts": 1_700_000_001.5,
        "e2e_latency": 1.5,
    } | more  # fmt: skip


def test_sglang_export(tmp_path: Path) -> None:
    path = tmp_path / "sglang-request-metrics-20261130_12.log"
    aborted = exported(id="bad", finish_reason={"type": "abort", "message": "Request too long\nby 3"}, first_token_latency=None)
    bare = exported(id="bare", forward_entry_time=None, queue_time=None, request_finished_ts=None)
    path.write_text("\n".join(json.dumps(x) for x in (exported(), aborted, bare)) + '\n{"request_parameters": "{}", "id"')
    trace, done = read(tmp_path, path)
    assert (done.read, done.written, done.rejected) == (4, 3, 1)
    assert (done.first_rejects[0]["row"], done.first_rejects[0]["reason"]) == (4, "the file ends inside it")
    rows = trace.table("requests").sort("request").collect()
    first = rows.row(0, named=True)
    t = 1_700_000_000_000_000_000
    assert (first["received_ns"], first["queued_ns"], first["scheduled_ns"]) == (t, t + 125_000_000, t + 250_000_000)
    assert (first["first_token_ns"], first["finish_ns"]) == (t + 500_000_000, t + 1_500_000_000)
    assert (first["prompt_tokens"], first["output_tokens"], first["max_tokens"]) == (100, 8, 64)
    assert rows["error"].to_list() == [None, "by 3", None] and rows["finish_ns"][2] == t + 1_500_000_000
    stay = trace.table("stages").sort("request").collect().row(0, named=True)
    assert (stay["cached_tokens"], stay["cached_device_tokens"], stay["cached_host_tokens"]) == (48, 32, 16)
    assert (stay["dp_rank"], stay["engine_request_id"], stay["cached_disk_tokens"]) == (1, "abc", None)
    # Nothing of what was asked is kept but the limit.
    assert not any(b"secret" in p.read_bytes() for p in trace.path.rglob("*") if p.is_file())


# -- vllm-vcr and LLMServingSim -------------------------------------------------------------------------------------------


def test_vllm_vcr_speculation(tmp_path: Path) -> None:
    trace, done = read(tmp_path, DATA / "vcr_spec_decode.jsonl")
    records = [json.loads(x) for x in (DATA / "vcr_spec_decode.jsonl").read_text().splitlines()][1:]
    assert done.written == 8
    tokens = trace.table("tokens").sort("request", "index").collect()
    assert tokens["count"].sum() == 347 and summary(trace).itl_left_out == 0
    mine = tokens.filter(pl.col("request") == 0)
    assert mine["count"].to_list() == [1, *records[0]["itl_tokens"]]
    assert mine["index"].to_list() == [0, *(1 + sum(records[0]["itl_tokens"][:i]) for i in range(len(records[0]["itl_tokens"])))]
    assert mine["time_ns"][-1] == round((records[0]["ttft_ms"] + sum(records[0]["itl_ms"])) * 1e6)
    # 347 tokens, one of each request has no gap.
    assert summary(trace)["itl"].n == 347 - 8
    server = trace.manifest.server("vllm")
    assert server is not None and server.block_size_tokens == 16


def test_vllm_vcr_edge_cases(tmp_path: Path) -> None:
    trace, done = read(tmp_path, DATA / "vcr_edge_cases.jsonl")
    rows = trace.table("requests").sort("request").collect()
    assert done.written == 8 and (rows["prompt_tokens"].sum(), rows["output_tokens"].sum()) == (3919, 903)
    assert rows["finish_reason"].to_list().count("length") == 3
    assert sorted(rows["error"].drop_nulls().to_list()) == ["the engine ended it: abort", "the engine ended it: error"]
    assert says(trace, "3 requests have the mean gap")
    # 200 ms + 99 gaps of 5.5 ms, from 50 ms on.
    second = rows.row(1, named=True)
    assert (second["arrival_ns"], second["last_token_ns"]) == (50_000_000, 794_500_000)


def test_llmservingsim_run(tmp_path: Path) -> None:
    trace, done = read(tmp_path, DATA / "llmservingsim" / "requests.jsonl")
    assert (done.written, [e["file"] for e in trace.manifest.imported_from]) == (
        300,
        ["requests.jsonl", "timeseries.csv", "meta.json"],
    )
    s = summary(trace)
    # Published by the repository (summary.txt, ms): mean, median, p99.
    for name, mean, p50, p99 in (
        ("ttft", 65456.6, 60110.9, 137356.3), ("tpot", 32.4, 30.8, 56.0), ("e2e", 86578.3, 83413.3, 153627.5),
    ):  # fmt: skip
        found = s[name]
        assert [round(x / 1e6, 1) for x in (found.mean_ns, found.p50_ns, found.p99_ns) if x is not None] == [mean, p50, p99]
    rows = trace.table("requests").sort("request").collect()
    assert (rows["prompt_tokens"].sum(), rows["output_tokens"].sum()) == (257_239, 195_753)
    assert rows["arrival_ns"][0] == rows["queued_ns"][0] == 27_536_660_701_067
    assert rows["received_ns"].null_count() == rows["sent_ns"].null_count() == 300
    server = trace.manifest.server("vllm")
    assert server is not None
    assert (server.engine_version, server.max_sequences, server.block_count, server.block_size_tokens) == (
        "0.19.0",
        256,
        2588,
        16,
    )


def test_llmservingsim_ticks_lie_on_the_engines_clock(tmp_path: Path) -> None:
    trace, _ = read(tmp_path, DATA / "llmservingsim" / "requests.jsonl")
    counters = trace.table("counters").collect()
    made = counters.filter(pl.col("name") == "generation_tokens_per_s").sort("time_ns")
    assert made["value_float"].sum() == 195_753.0 and made["semantics"].unique().to_list() == ["rate"]
    assert counters.filter(pl.col("name") == "requests_running")["value_float"].max() == 49
    assert counters.filter(pl.col("name") == "requests_deferred")["value_float"].max() == 234
    requests = trace.table("requests").collect()
    # No tick says more than arrived by then, and tokens are made while requests run.
    assert 0 < requests["arrival_ns"].min() - (made["time_ns"][0] - 10**9) < 10**9  # type: ignore[operator]
    assert abs(made.filter(pl.col("value_float") > 0)["time_ns"].max() - requests["finish_ns"].max()) < 2 * 10**9  # type: ignore[operator]
    offset = trace.table("clock_sync").collect()["offset_ns"].item()
    records = [json.loads(x) for x in (DATA / "llmservingsim" / "requests.jsonl").read_text().splitlines()]
    assert offset == pytest.approx(max(r["arrival_time"] - r["queued_ts"] for r in records) * 1e9, abs=300)


def test_llmservingsim_kv_that_was_not_logged_is_left_out(tmp_path: Path) -> None:
    folder = DATA / "llmservingsim"
    (tmp_path / "requests.jsonl").write_bytes((folder / "requests.jsonl").read_bytes())
    (tmp_path / "meta.json").write_bytes((folder / "meta.json").read_bytes())
    lines = (folder / "timeseries.csv").read_text().splitlines()
    (tmp_path / "timeseries.csv").write_text("\n".join([lines[0], *(x.rsplit(",", 1)[0] + ",0.0" for x in lines[1:])]))
    trace, _ = read(tmp_path, tmp_path / "requests.jsonl")
    assert trace.table("counters").filter(pl.col("name") == "kv_cache_usage").collect().is_empty()
    assert says(trace, "it was not logged")
    (tmp_path / "meta.json").write_text("{")
    import_files([tmp_path / "requests.jsonl"], tmp_path / "u.trace")
    other = hoptrace.open(tmp_path / "u.trace")
    assert says(other, "meta.json beside the requests cannot be read") and not other.has("counters")
