"""Outputs of benchmarks become traces: real files, held against what the tools and the files themselves say."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import hoptrace
from hoptrace.collectors.files.run import Imported, import_files
from hoptrace.metrics import METRICS, request_metrics, summary
from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of
from hoptrace.replay.workload import workload
from hoptrace.validate import validate

DATA = Path(__file__).parent / "data" / "bench"
SHARED = Path(__file__).parents[2] / "shared" / "traces"


def read(tmp_path: Path, *names: str) -> tuple[Trace, Imported]:
    out = tmp_path / "t.trace"
    done = import_files([DATA / n for n in names], out)
    assert done.read == done.written + done.rejected
    trace = hoptrace.open(out)
    assert not [f for f in validate(trace) if f.level == "error"]
    return trace, done


def kind(trace: Trace) -> str:
    return str(trace.manifest.imported_from[0]["kind"])


def ms(seconds: float) -> float:
    return seconds * 1e3


def figure(trace: Trace, name: str) -> float:
    rows = trace.table("counters").filter(pl.col("name") == f"bench:{name}").collect()
    assert rows.height == 1 and rows["semantics"].to_list() == ["gauge"]
    return float(rows["value_float"].item())


# -- vllm bench serve -----------------------------------------------------------------------------------------------------


def test_vllm_bench_against_a_real_vllm(tmp_path: Path) -> None:
    trace, done = read(tmp_path, "vllm_detailed.json")
    assert kind(trace) == "vllm-bench" and (done.written, done.rejected) == (24, 0)
    told = json.loads((DATA / "vllm_detailed.json").read_text())
    rows = trace.table("requests").sort("request").collect()
    # The tool's timer starts when it sends; ours when the request was due.
    since_sent = (rows["first_token_ns"] - rows["sent_ns"]) / 1e6
    assert since_sent.mean() == pytest.approx(told["mean_ttft_ms"], abs=1e-6)
    assert since_sent.quantile(0.99, "linear") == pytest.approx(told["p99_ttft_ms"], abs=1e-6)
    s = summary(trace)
    for ours, theirs in (("tpot", "tpot"), ("itl", "itl")):
        assert s[ours].mean_ns == pytest.approx(told[f"mean_{theirs}_ms"] * 1e6, abs=1)
        assert s[ours].p50_ns == pytest.approx(told[f"median_{theirs}_ms"] * 1e6, abs=2)
        assert s[ours].p99_ns == pytest.approx(told[f"p99_{theirs}_ms"] * 1e6, abs=2)
    waits = (rows["sent_ns"] - rows["intended_ns"]) / 1e9
    assert waits.to_list() == pytest.approx(told["queue_times"], abs=2e-9)
    assert rows["arrival_of"].unique().to_list() == ["intended"]
    assert s["ttft"].mean_ns == pytest.approx((told["mean_ttft_ms"] + ms(sum(told["queue_times"]) / 24)) * 1e6, abs=2)
    assert s.itl_left_out == 0 and s.output_tokens == told["total_output_tokens"] == 384
    assert figure(trace, "mean_ttft_ms") == told["mean_ttft_ms"]
    assert any("intended_ns is when the benchmark created" in n for n in trace.manifest.notes)


def test_vllm_bench_token_times_are_ttft_and_the_gaps(tmp_path: Path) -> None:
    trace, _ = read(tmp_path, "vllm_detailed.json")
    told = json.loads((DATA / "vllm_detailed.json").read_text())
    tokens = trace.table("tokens").sort("request", "index").collect()
    assert tokens["vantage"].unique().to_list() == ["client"] and tokens["count"].unique().to_list() == [1]
    sent = trace.table("requests").sort("request").collect()["sent_ns"].to_list()
    for i in (0, 7, 23):
        mine = tokens.filter(pl.col("request") == i)
        assert mine["index"].to_list() == list(range(16))
        assert mine["time_ns"][0] - sent[i] == round(told["ttfts"][i] * 1e9)
        assert mine["time_ns"].diff().drop_nulls().to_list() == pytest.approx([g * 1e9 for g in told["itls"][i]], abs=1.01)
        # Rounding does not add up: the last token lies at the stated latency.
        assert mine["time_ns"][-1] - sent[i] == pytest.approx(told["latencies"][i] * 1e9, abs=1)


def test_a_cap_on_concurrency_a_failure_and_empty_chunks(tmp_path: Path) -> None:
    """llama.cpp sends an 11th chunk without text for 10 tokens; the 10th request met a closed connection."""
    trace, done = read(tmp_path, "vllm_llamacpp.json")
    told = json.loads((DATA / "vllm_llamacpp.json").read_text())
    assert (done.written, done.rejected) == (10, 0)
    rows = trace.table("requests").sort("request").collect()
    assert rows["error"].to_list() == [None] * 9 + ["aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected"]
    failed = rows.row(9, named=True)
    # vLLM leaves 0 where nothing was measured: that is unknown, not 0.
    assert (failed["finish_ns"], failed["first_token_ns"], failed["output_tokens"]) == (None, None, None)
    assert failed["sent_ns"] - failed["intended_ns"] == pytest.approx(told["queue_times"][9] * 1e9, abs=2)
    s = summary(trace)
    assert (s.finished, s.failed) == (9, 1)
    # 11 chunks, 10 tokens: nobody knows which is empty, so these gaps are in no ITL.
    assert s["itl"].n == 0 and s.itl_left_out == 9
    assert s["tpot"].mean_ns == pytest.approx(told["mean_tpot_ms"] * 1e6, abs=1)
    assert any("9 requests got another number of chunks" in n for n in trace.manifest.notes)


def test_vllm_bench_without_a_rate_intends_nothing(tmp_path: Path) -> None:
    told = json.loads((DATA / "vllm_detailed.json").read_text()) | {"request_rate": "inf"}
    (tmp_path / "inf.json").write_text(json.dumps(told))
    import_files([tmp_path / "inf.json"], tmp_path / "t.trace")
    trace = hoptrace.open(tmp_path / "t.trace")
    rows = trace.table("requests").collect()
    assert rows["intended_ns"].null_count() == 24 and rows["arrival_of"].unique().to_list() == ["sent"]
    assert summary(trace)["ttft"].mean_ns == pytest.approx(told["mean_ttft_ms"] * 1e6, abs=1)


def test_older_vllm_bench_files(tmp_path: Path) -> None:
    """Before queue_times only sending is known; before start_times nothing of arrivals is."""
    told = json.loads((DATA / "vllm_detailed.json").read_text())
    for gone in ("queue_times", "latencies"):
        del told[gone]
    (tmp_path / "a.json").write_text(json.dumps(told))
    import_files([tmp_path / "a.json"], tmp_path / "a.trace")
    a = hoptrace.open(tmp_path / "a.trace")
    assert a.table("requests").collect()["intended_ns"].null_count() == 24
    assert any("Only the moment of sending" in n for n in a.manifest.notes)
    assert summary(a).requests_per_s is not None
    del told["start_times"]
    (tmp_path / "b.json").write_text(json.dumps(told))
    import_files([tmp_path / "b.json"], tmp_path / "b.trace")
    unknown(hoptrace.open(tmp_path / "b.trace"))


def unknown(trace: Trace) -> None:
    """Arrivals are unknown: latencies are there, rates are not, and no steps are made of tokens that did not leave together."""
    s = summary(trace)
    assert s["ttft"].n and s["e2e"].n
    assert (s.duration_ns, s.requests_per_s, s.output_tokens_per_s) == (None, None, None)
    for name in ("requests_per_s", "output_tokens_per_s"):
        assert trace.sql(METRICS[name].sql)["value"].item() is None
    rows = trace.table("requests").collect()
    assert rows["arrival_ns"].unique().to_list() == [0]
    assert rows["arrival_of"].null_count() == rows["sent_ns"].null_count() == rows["intended_ns"].null_count() == rows.height
    covered = trace.table("coverage").filter(pl.col("table") == "requests").collect()["columns"].to_list()
    assert covered and not any("arrival_ns" in c for c in covered)
    assert any("durations only" in n for n in trace.manifest.notes)
    assert steps_of(trace).steps.is_empty()
    assert any("all come at once" in n for n in workload(trace).notes)


def test_vllm_bench_without_detail_has_figures_only(tmp_path: Path) -> None:
    trace, done = read(tmp_path, "vllm_summary.json")
    assert done.written == 26 and not trace.has("requests")
    assert figure(trace, "median_ttft_ms") == 68.01151350009604
    assert any("--save-detailed" in n for n in trace.manifest.notes)


def test_appended_runs_are_all_read(tmp_path: Path) -> None:
    one = (DATA / "vllm_detailed.json").read_text()
    (tmp_path / "two.json").write_text(one + "\n" + (DATA / "vllm_llamacpp.json").read_text())
    done = import_files([tmp_path / "two.json"], tmp_path / "t.trace")
    assert (done.read, done.written) == (34, 34)
    runs = hoptrace.open(tmp_path / "t.trace").table("counters").filter(pl.col("name") == "bench:mean_ttft_ms").collect()
    figures = [json.loads((DATA / n).read_text())["mean_ttft_ms"] for n in ("vllm_detailed.json", "vllm_llamacpp.json")]
    assert dict(zip(runs["incarnation"], runs["value_float"], strict=True)) == dict(
        zip(("two.json:1", "two.json:2"), figures, strict=True)
    )


# -- SGLang ---------------------------------------------------------------------------------------------------------------


def test_sglang_bench(tmp_path: Path) -> None:
    trace, done = read(tmp_path, "sglang.jsonl")
    told = json.loads((DATA / "sglang.jsonl").read_text())
    assert kind(trace) == "sglang-bench" and done.written == 8
    s = summary(trace)
    assert s["ttft"].mean_ns == pytest.approx(told["mean_ttft_ms"] * 1e6, abs=1)
    assert s["ttft"].p99_ns == pytest.approx(told["p99_ttft_ms"] * 1e6, abs=1)
    assert s["itl"].mean_ns == pytest.approx(told["mean_itl_ms"] * 1e6, abs=1)
    assert s["itl"].p99_ns == pytest.approx(told["p99_itl_ms"] * 1e6, abs=2)
    # The tool's end-to-end runs on to the end of the stream, its TPOT with it.
    assert 0 < told["mean_e2e_latency_ms"] * 1e6 - s["e2e"].mean_ns < 1e6  # type: ignore[operator]
    unknown(trace)


def test_sglang_shares_gaps_out_and_they_are_put_together(tmp_path: Path) -> None:
    """Chunks of 2, 3 and 1 tokens: SGLang's backend writes the gap ÷ 3 three times, and none for the first chunk."""
    told = json.loads((DATA / "sglang.jsonl").read_text())
    told |= {
        "backend": "sglang", "input_lens": [5], "output_lens": [6], "ttfts": [0.5], "itls": [[0.1, 0.1, 0.1, 0.25]],
        "errors": [""], "generated_texts": ["x"], "cached_tokens": [4],
    }  # fmt: skip
    (tmp_path / "n.jsonl").write_text(json.dumps(told) + "\n")
    import_files([tmp_path / "n.jsonl"], tmp_path / "t.trace")
    trace = hoptrace.open(tmp_path / "t.trace")
    tokens = trace.table("tokens").sort("index").collect()
    assert tokens.select("index", "count", "time_ns").rows() == [
        (0, 2, 500_000_000),
        (2, 3, 800_000_000),
        (5, 1, 1_050_000_000),
    ]
    assert trace.table("stages").collect()["cached_tokens"].to_list() == [4]
    assert summary(trace).itl_left_out == 0


# -- AIPerf ---------------------------------------------------------------------------------------------------------------


def test_aiperf_facts(tmp_path: Path) -> None:
    trace, done = read(tmp_path, "aiperf_qwen.jsonl")
    assert kind(trace) == "aiperf" and done.written == 10
    s = summary(trace)
    # Facts of the shared index: 31.275540 ms, 3629.643170 ms, 2000 tokens, 199 gaps a request.
    assert s["ttft"].mean_ns == 31_275_540 and s["e2e"].mean_ns == 3_629_643_170
    assert s.output_tokens == 2000 and s["itl"].n == 1990 and s.itl_left_out == 0
    first = trace.table("requests").sort("request").collect().row(0, named=True)
    assert (first["sent_ns"], first["request_id"]) == (1762551534797067827, "fd78b108-2a8f-43b0-8327-0f97e76c6a9c")
    # request_end_ns is later than start + request_latency, by at most 0.058 ms.
    lines = [json.loads(x) for x in (DATA / "aiperf_qwen.jsonl").read_text().splitlines()]
    ends = [x["metadata"]["request_end_ns"] for x in lines]
    late = [e - f for e, f in zip(ends, trace.table("requests").sort("request").collect()["finish_ns"], strict=True)]
    assert max(late) < 58_000 and min(late) >= -1


def test_aiperf_keeps_credit_and_the_servers_counts(tmp_path: Path) -> None:
    trace, _ = read(tmp_path, "aiperf_llamacpp.jsonl")
    rows = trace.table("requests").sort("request").collect()
    first = json.loads((DATA / "aiperf_llamacpp.jsonl").read_text().splitlines()[0])
    assert rows["intended_ns"][0] == first["metadata"]["credit_issued_ns"] == rows["arrival_ns"][0]
    assert rows["sent_ns"][0] == first["metadata"]["request_start_ns"]
    # 54 tokens with the chat template, of which AIPerf's own tokenizer counts 24.
    assert rows["prompt_tokens"].to_list()[:1] == [54] and first["metrics"]["input_sequence_length"]["value"] == 24
    assert any("which leaves out the chat template" in n for n in trace.manifest.notes)
    told = json.loads((DATA / "aiperf_llamacpp_figures.json").read_text())
    since_sent = (rows["first_token_ns"] - rows["sent_ns"]).mean()
    assert since_sent == pytest.approx(told["time_to_first_token"]["avg"] * 1e6, abs=1)
    # AIPerf's inter_token_latency is what hoptrace calls TPOT.
    assert summary(trace)["tpot"].mean_ns == pytest.approx(told["inter_token_latency"]["avg"] * 1e6, abs=1)
    assert summary(trace)["tpot"].p99_ns == pytest.approx(told["inter_token_latency"]["p99"] * 1e6, abs=1)


def test_aiperf_figures_beside_its_requests(tmp_path: Path) -> None:
    trace, done = read(tmp_path, "aiperf_llamacpp.jsonl", "aiperf_llamacpp_figures.json")
    assert [e["kind"] for e in trace.manifest.imported_from] == ["aiperf", "aiperf-figures"]
    assert done.written == 9 + 142
    rows = trace.table("counters").filter(pl.col("name") == "bench:time_to_first_token.p99").collect()
    told = json.loads((DATA / "aiperf_llamacpp_figures.json").read_text())
    assert (rows["value_float"].item(), rows["unit"].item()) == (told["time_to_first_token"]["p99"], "ms")


def test_shared_aiperf_aggregate(tmp_path: Path) -> None:
    path = SHARED / "measured" / "aiperf" / "qwen_concurrency1" / "profile_export_aiperf.json"
    if not path.exists():
        pytest.skip("extra check: needs ../shared, which a user's clone lacks")
    import_files([path], tmp_path / "t.trace")
    trace = hoptrace.open(tmp_path / "t.trace")
    assert figure(trace, "request_count.avg") == 64.0
    assert figure(trace, "inter_token_latency.p99") == 19.481766498241203


# -- guidellm, inference-perf, LLMPerf, multi-round QA ----------------------------------------------------------------------


def test_guidellm_with_requests(tmp_path: Path) -> None:
    trace, done = read(tmp_path, "guidellm.json")
    assert kind(trace) == "guidellm" and done.written == 9
    told = json.loads((DATA / "guidellm.json").read_text())["benchmarks"][0]
    s = summary(trace)
    rows = trace.table("requests").sort("request").collect()
    assert rows["prompt_tokens"].unique().to_list() == [54] and s.output_tokens == 108
    # Sent to end, as guidellm measures; ours begins at the targeted start.
    assert (rows["finish_ns"] - rows["sent_ns"]).mean() == pytest.approx(
        told["metrics"]["request_latency"]["successful"]["mean"] * 1e9, abs=500
    )
    assert rows["arrival_of"].unique().to_list() == ["intended"]
    assert s["e2e"].mean_ns == pytest.approx(
        sum(r["request_scheduled_latency"] for r in told["requests"]["successful"]) / 9 * 1e9, abs=500
    )
    # guidellm's ITL of a request is (last − first) ÷ (tokens − 1): TPOT. Its TPOT includes the first token.
    per = request_metrics(trace)["tpot_ns"].to_list()
    assert per == pytest.approx([r["inter_token_latency_ms"] * 1e6 for r in told["requests"]["successful"]], abs=50)
    assert not trace.has("tokens")
    assert figure(trace, "requests_made.total") == 9


def test_guidellm_without_requests(tmp_path: Path) -> None:
    trace, done = read(tmp_path, "guidellm_no_requests.json")
    assert not trace.has("requests") and done.written == 204
    made = trace.table("counters").filter(pl.col("name") == "bench:requests_made.successful").sort("incarnation").collect()
    assert made.select("incarnation", "value_float").rows() == [
        ("guidellm_no_requests.json:1", 2.0),
        ("guidellm_no_requests.json:2", 2.0),
    ]
    assert any("no requests" in n for n in trace.manifest.notes)


def test_inference_perf_requests_and_its_own_summary(tmp_path: Path) -> None:
    trace, done = read(tmp_path, "inference_perf_requests.json")
    told = json.loads((DATA / "inference_perf_stage_0.json").read_text())["successes"]
    assert kind(trace) == "inference-perf" and done.written == told["count"] == 9
    s = summary(trace)
    for ours, theirs in (("ttft", "time_to_first_token"), ("e2e", "request_latency"), ("itl", "inter_token_latency")):
        assert s[ours].mean_ns == pytest.approx(told["latency"][theirs]["mean"] * 1e9, abs=2), ours
        assert s[ours].p50_ns == pytest.approx(told["latency"][theirs]["median"] * 1e9, abs=2), ours
        assert s[ours].p99_ns == pytest.approx(told["latency"][theirs]["p99"] * 1e9, abs=2), ours
    rows = trace.table("requests").sort("request").collect()
    assert rows["sent_ns"][0] == 11705330210292 and rows["prompt_tokens"][0] == 27
    assert rows["intended_ns"].null_count() == 9


def test_inference_perf_stage_of_a_real_vllm(tmp_path: Path) -> None:
    trace, _ = read(tmp_path, "inference_perf_kubecon_stage_0.json")
    assert figure(trace, "load_summary.achieved_rate") == 1.0254654214024423
    assert figure(trace, "successes.latency.request_latency.p99") == 0.489441333723953
    assert not trace.has("requests")


def test_inference_perf_chunks_of_several_tokens(tmp_path: Path) -> None:
    """computed_metrics gives each token of a chunk the chunk's time."""
    record = {
        "start_time": 10.0, "end_time": 12.0, "error": None,
        "info": {
            "request_metrics": {"text": {"input_tokens": 7}},
            "response_metrics": {"output_tokens": 5, "output_token_times": [10.5, 11.0, 11.0, 11.0, 12.0]},
        },
    }  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps([record]))
    import_files([tmp_path / "r.json"], tmp_path / "t.trace")
    trace = hoptrace.open(tmp_path / "t.trace")
    tokens = trace.table("tokens").sort("index").collect().select("index", "time_ns", "count").rows()
    assert tokens == [(0, 10_500_000_000, 1), (1, 11_000_000_000, 3), (4, 12_000_000_000, 1)]
    assert any("inference-perf's own count" in n for n in trace.manifest.notes)


@pytest.mark.parametrize(
    ("name", "finished", "failed", "ttft", "ttft_p50", "e2e", "output"),
    [
        ("llmperf_anyscale_70b.json", 150, 0, 0.248903, 0.212830, 2.354667, 146.947),
        ("llmperf_bedrock_13b.json", 53, 97, 0.330884, 0.268764, 3.984835, 147.792),
    ],
)
def test_llmperf_facts(
    tmp_path: Path, name: str, finished: int, failed: int, ttft: float, ttft_p50: float, e2e: float, output: float
) -> None:
    trace, done = read(tmp_path, name)
    s = summary(trace)
    assert (kind(trace), done.written, s.finished, s.failed) == ("llmperf", 150, finished, failed)
    assert s["ttft"].mean_ns == pytest.approx(ttft * 1e9, abs=501) and s["ttft"].p50_ns == pytest.approx(ttft_p50 * 1e9, abs=501)
    assert s["e2e"].mean_ns == pytest.approx(e2e * 1e9, abs=501)
    assert s.output_tokens is not None and s.output_tokens / finished == pytest.approx(output, abs=5e-4)
    # Its inter-token latency includes the first token: neither ITL nor TPOT may come of it.
    assert s["itl"].n == s["tpot"].n == 0
    unknown(trace)
    if failed:
        assert (
            trace.table("requests").filter(pl.col("error").is_not_null()).collect()["error"][0]
            == "-100: Output too few tokens 39"
        )


def test_llmperf_summary(tmp_path: Path) -> None:
    told = {
        "version": "2023-08-31",
        "model": "m",
        "mean_input_tokens": 550,
        "results_ttft_s_quantiles_p99": 0.5,
        "results_ttft_s_mean": 0.25,
    }
    (tmp_path / "s.json").write_text(json.dumps(told))
    import_files([tmp_path / "s.json"], tmp_path / "t.trace")
    assert figure(hoptrace.open(tmp_path / "t.trace"), "results_ttft_s_quantiles_p99") == 0.5


def test_multi_round_qa_facts(tmp_path: Path) -> None:
    trace, done = read(tmp_path, "aibrix_qps0.5.csv")
    s = summary(trace)
    assert (kind(trace), done.written) == ("multi-round-qa", 55)
    assert s["ttft"].mean_ns == pytest.approx(0.319373 * 1e9, abs=501) and s["ttft"].p99_ns == pytest.approx(2.000971e9, abs=501)
    assert s["e2e"].mean_ns == pytest.approx(1.721762 * 1e9, abs=501) and s["tpot"].n == 0
    first = trace.table("requests").sort("request").collect().row(0, named=True)
    assert (first["sent_ns"], first["session"], first["request_id"]) == (1742756980_911225080, "2", "2/1")
    assert s.requests_per_s == pytest.approx(0.5520, abs=1e-4)


def test_shared_multi_round_qa(tmp_path: Path) -> None:
    path = SHARED / "measured" / "aibrix" / "v0.2.1_ps_stack_low_high_qps4.1.csv"
    if not path.exists():
        pytest.skip("extra check: needs ../shared, which a user's clone lacks")
    assert import_files([path], tmp_path / "t.trace").written == 455
    s = summary(hoptrace.open(tmp_path / "t.trace"))
    assert s["ttft"].mean_ns == pytest.approx(6.333810e9, abs=501) and s["ttft"].p99_ns == pytest.approx(48.144301e9, abs=501)
    assert s["e2e"].mean_ns == pytest.approx(13.703523e9, abs=501)
