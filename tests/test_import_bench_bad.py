"""What benchmarks leave behind when things go wrong: each record is read or rejected with its row and a reason."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hoptrace
from hoptrace.collectors.files.run import Imported, import_files
from hoptrace.errors import InputError
from hoptrace.metrics import summary
from hoptrace.validate import validate

DATA = Path(__file__).parent / "data" / "bench"
NAN, INF = float("nan"), float("inf")


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / name).read_text())
    return found


def run(folder: Path, content: object, name: str = "in.json") -> tuple[Imported, list[tuple[int, str]]]:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    out = folder / f"{name}.trace"
    done = import_files([path], out)
    assert done.read == done.written + done.rejected
    assert not [f for f in validate(hoptrace.open(out)) if f.level == "error"]
    return done, [(int(str(r["row"])), str(r["reason"])) for r in done.first_rejects]


def spoil(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    told = load("vllm_detailed.json")
    change(told)
    return told


def at(name: str, value: object, i: int = 4) -> Callable[[dict[str, Any]], None]:
    def change(told: dict[str, Any]) -> None:
        told[name][i] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (at("ttfts", NAN), "ttft is not finite"),
        (at("ttfts", "fast"), "ttft is not a number"),
        (at("ttfts", -0.5), "ttft is negative"),
        (at("latencies", -1), "latency is negative"),
        (at("latencies", 0.001), "its end is before its last token"),
        (at("start_times", None), "it has no start_time"),
        (at("start_times", INF), "start_time is not finite"),
        (at("start_times", 1e300), "start_time is too large for a time"),
        (at("queue_times", -3), "queue_time is negative"),
        (at("itls", [0.1, None]), "an inter-token latency is null"),
        (at("itls", [0.1, NAN]), "an inter-token latency is not finite"),
        (at("itls", [0.1, -0.05]), "an inter-token latency is negative"),
        (at("itls", "none"), "an inter-token latency list is no list"),
        (at("input_lens", 3.5), "input_len is not a whole number"),
        (at("output_lens", -2), "output_len is negative"),
        (at("output_lens", True), "output_len is not a number"),
        (at("output_lens", 10**30), "output_len is not a whole number"),
        (at("ttfts", 10**400), "ttft is not finite"),
        (at("itls", [0.1, 10**400]), "a number of it is too large"),
        (at("itls", [0.1, 1e300]), "a time of it is too large"),
        (at("latencies", 1e200), "a time of it is too large"),
        (at("ttfts", "\ud800"), "ttft is not a number"),
    ],
)
def test_one_bad_request_is_rejected_with_its_row(tmp_path: Path, change: Callable[[Any], None], reason: str) -> None:
    done, rejects = run(tmp_path, spoil(change))
    assert (done.written, rejects) == (23, [(5, reason)])
    assert done.manifest.rows_dropped == {reason: 1}


def test_null_gaps_shorter_lists_and_no_length(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        told["itls"][0] = None  # TTFT only: what is known stays
        told["itls"][1] = told["itls"][1][:3]
        told["output_lens"][2] = None

    done, _ = run(tmp_path, spoil(change))
    trace = hoptrace.open(tmp_path / "in.json.trace")
    assert done.written == 24
    # Requests 0 and 1 have fewer chunks than tokens: doubted, their gaps are in no ITL.
    assert summary(trace).itl_left_out == 1 and summary(trace)["itl"].n == 22 * 15
    notes = " ".join(done.manifest.notes)
    assert "2 requests got another number of chunks" in notes and "1 requests have no total" in notes
    assert "2 requests: TTFT + Σ ITL is not the latency" in notes
    first = trace.table("requests").sort("request").collect().row(0, named=True)
    told = load("vllm_detailed.json")
    assert first["finish_ns"] - first["sent_ns"] == pytest.approx(told["latencies"][0] * 1e9, abs=1)


def test_a_request_that_failed_in_its_middle_keeps_its_tokens(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        told["errors"][3] = 'Traceback:\n  File "x"\nConnectionResetError: gone'
        told["latencies"][3], told["output_lens"][3] = 0.0, 0
        told["itls"][3] = told["itls"][3][:2]

    run(tmp_path, spoil(change))
    trace = hoptrace.open(tmp_path / "in.json.trace")
    row = trace.table("requests").filter(pl.col("request") == 3).collect().row(0, named=True)
    assert (row["error"], row["finish_ns"], row["output_tokens"]) == ("ConnectionResetError: gone", None, None)
    assert trace.table("tokens").filter(pl.col("request") == 3).collect().height == 3
    assert summary(trace).finished == 23


def test_a_failure_without_words(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        for name, value in (("ttfts", 0.0), ("itls", []), ("latencies", 0.0), ("output_lens", 0)):
            told[name][9] = value

    run(tmp_path, spoil(change))
    rows = hoptrace.open(tmp_path / "in.json.trace").table("requests").collect()
    assert rows["error"].drop_nulls().to_list() == ["failed without a message: no token came"]


@pytest.mark.parametrize(("name", "more"), [("itls", 1), ("itls", -1), ("errors", 1), ("errors", -20)])
def test_long_lists_of_unequal_length_are_refused(tmp_path: Path, name: str, more: int) -> None:
    def change(told: dict[str, Any]) -> None:
        told[name] = told[name] + [told[name][0]] * more if more > 0 else told[name][:more]

    with pytest.raises(InputError, match=rf"lists of run 1 differ in length \({name}: {24 + more}, requests: 24\)"):
        run(tmp_path, spoil(change))


def test_lists_of_unequal_length_are_refused(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        told["ttfts"].pop()

    with pytest.raises(InputError, match=r"lists of run 1 differ in length \(.*ttfts: 23"):
        run(tmp_path, spoil(change))


def test_a_run_that_was_cut_off(tmp_path: Path) -> None:
    whole = (DATA / "vllm_detailed.json").read_text()
    for cut in (len(whole) // 3, len(whole) - 1, 1500):
        with pytest.raises(InputError, match="ends in the middle of a run's results"):
            run(tmp_path, whole[:cut], f"cut{cut}.json")
    # What stands before the cut in an appended file is kept.
    done, rejects = run(tmp_path, whole + "\n" + whole[:5000], "two.json")
    assert (done.written, rejects) == (24, [(25, "run 2 is cut off: the file ends inside it")])


def test_rubbish_inside_is_named(tmp_path: Path) -> None:
    text = (DATA / "vllm_detailed.json").read_text()
    with pytest.raises(InputError, match=r"is not JSON at byte \d"):
        run(tmp_path, text.replace('"ttfts": [', '"ttfts": [oops, ', 1))
    done, rejects = run(tmp_path, text.replace('"itls": [[', '"itls": [[oops, ', 1), "b.json")
    assert (done.written, rejects) == (23, [(1, "its list of inter-token latencies is no JSON")])


def test_compressed_files_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress((DATA / "vllm_detailed.json").read_bytes()))
    assert import_files([path], tmp_path / "a.trace").written == 24
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(InputError, match="is damaged"):
        import_files([path], tmp_path / "b.trace")


@pytest.mark.parametrize(
    ("name", "records"),
    [("inference_perf_requests.json", 9), ("llmperf_bedrock_13b.json", 150), ("guidellm.json", 9), ("aiperf_qwen.jsonl", 10)],
)
def test_files_of_records_are_read_up_to_the_cut(tmp_path: Path, name: str, records: int) -> None:
    text = (DATA / name).read_text()
    import_files([DATA / name], tmp_path / "whole.trace")
    whole = hoptrace.open(tmp_path / "whole.trace").table("requests").sort("request").collect()
    seen = set()
    for part in (0.35, 0.6, 0.97):
        cut = text[: int(len(text) * part)]
        try:
            _, rejects = run(tmp_path, cut, f"{part}-{name}")
        except InputError as e:
            assert "before its first request" in str(e) or "was rejected" in str(e)
            continue
        rows = hoptrace.open(tmp_path / f"{part}-{name}.trace").table("requests").sort("request").collect()
        assert rows.equals(whole.head(rows.height)) and rows.height <= records
        assert [reason for _, reason in rejects if "ends inside it" in reason]
        seen.add(rows.height)
    assert seen


def test_aiperf_records(tmp_path: Path) -> None:
    good = json.loads((DATA / "aiperf_llamacpp.jsonl").read_text().splitlines()[0])

    def line(**changes: object) -> str:
        record = json.loads(json.dumps(good))
        for path, value in changes.items():
            *parents, last = path.split("__")
            inner = record
            for p in parents:
                inner = inner[p]
            inner[last] = value
        return json.dumps(record)

    lines = [
        line(),
        line(error={"code": 429, "type": "Too Many Requests", "message": "slow\ndown"}, metrics={}),
        line(metadata__was_cancelled=True, metrics={}),
        line(metadata__request_start_ns=None),
        line(metadata__request_start_ns=-5),
        line(metrics__request_latency={"value": 1.0, "unit": "parsecs"}),
        line(metrics__inter_chunk_latency={"value": [1.0, NAN], "unit": "ms"}),
        line(metadata__credit_issued_ns=good["metadata"]["request_start_ns"] + 10**9),
        "[1]",
        "{",
    ]
    done, rejects = run(tmp_path, "\n".join(lines) + "\n", "p.jsonl")
    assert (done.written, done.rejected) == (4, 6)
    assert rejects == [
        (4, "it has no request_start_ns"),
        (5, "request_start_ns is not a time in ns"),
        (6, "request_latency has a unit that is no time"),
        (7, "an inter-chunk latency is not finite"),
        (9, "it is not a JSON object"),
    ]
    rows = hoptrace.open(tmp_path / "p.jsonl.trace").table("requests").sort("request").collect()
    assert rows["error"].to_list() == [None, "429 Too Many Requests: down", "cancelled by the benchmark", None]
    # A credit after the sending cannot be its intent, but neither is anything thrown away: the earlier one is the arrival.
    assert rows["arrival_of"].to_list() == ["intended", "intended", "intended", "sent"]


def test_every_record_rejected_is_an_error(tmp_path: Path) -> None:
    told = [{"ttft_s": -1, "end_to_end_latency_s": 1.0, "error_code": None}] * 3
    with pytest.raises(InputError, match=r"all 3 were rejected\. The first: row 1: ttft_s is negative"):
        run(tmp_path, told)
    with pytest.raises(InputError, match="has neither requests nor figures"):
        run(tmp_path, {"metadata": {"guidellm_version": "1"}, "benchmarks": []}, "g.json")


def test_steps_that_gave_no_token_are_no_emissions(tmp_path: Path) -> None:
    lines = [
        {"meta": {"model": "m"}},
        {
            "prompt_tokens": 5,
            "output_tokens": 4,
            "ttft_ms": 10.0,
            "itl_ms": [1.0, 2.0, 4.0],
            "itl_tokens": [2, 0, 1],
            "arrival_ms": 1.0,
        },
        {"prompt_tokens": 5, "output_tokens": 2, "ttft_ms": 10.0, "itl_ms": [1.0], "itl_tokens": [1, 1], "arrival_ms": 2.0},
        {"prompt_tokens": 5, "output_tokens": 2, "ttft_ms": 10.0, "itl_ms": [1.0]},
    ]
    done, rejects = run(tmp_path, "\n".join(map(json.dumps, lines)), "v.jsonl")
    assert done.written == 1
    assert rejects == [(3, "itl_tokens and itl_ms are not two lists of one length"), (4, "it has no start time")]
    tokens = hoptrace.open(tmp_path / "v.jsonl.trace").table("tokens").sort("index").collect()
    assert tokens.select("index", "count", "time_ns").rows() == [(0, 1, 11_000_000), (1, 2, 12_000_000), (3, 1, 18_000_000)]


def genai(requests: list[dict[str, Any]]) -> dict[str, Any]:
    return {"experiments": [{"experiment": {"mode": "concurrency", "value": 1}, "requests": requests}], "service_kind": "openai"}


def chunk(text: str | None = None, **more: object) -> dict[str, str]:
    delta = {"role": "assistant"} if text is None else {"content": text}
    data = {"id": "a", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} | more
    return {"response": f"data: {json.dumps(data)}\n\n"}


def test_genai_perf(tmp_path: Path) -> None:
    """The layout that GenAI-Perf 0.0.16 parses: role chunk, tokens, two events in one response, a split event, usage, [DONE]."""
    split = chunk(" c")["response"]
    two = chunk(" d")["response"] + chunk(" e")["response"]
    usage = chunk(usage={"prompt_tokens": 12, "completion_tokens": 5}, choices=[])
    told = {
        "timestamp": 1000, "request_inputs": {"payload": "secret", "session_id": "s1"},
        "response_timestamps": [3000, 4000, 5000, 6000, 6100, 8000, 9000, 9500],
        "response_outputs": [
            chunk(), chunk("a"), chunk(" b"), {"response": split[:40]}, {"response": split[40:]}, {"response": two}, usage,
            {"response": "data: [DONE]\n\n"},
        ],
    }  # fmt: skip
    failed = {
        "timestamp": 2000,
        "response_timestamps": [2500],
        "response_outputs": [{"response": 'data: {"error": {"message": "no"}}'}],
    }
    bad = {"timestamp": 3000, "response_timestamps": [2500, 1], "response_outputs": [chunk("a"), chunk("b")]}
    odd = {"timestamp": 3000, "response_timestamps": [2500], "response_outputs": []}
    none = {"timestamp": 3000, "response_timestamps": [], "response_outputs": []}
    done, rejects = run(tmp_path, genai([told, failed, bad, odd, none]))
    assert [row for row, _ in rejects] == [3, 4] and done.written == 3
    trace = hoptrace.open(tmp_path / "in.json.trace")
    rows = trace.table("requests").sort("request").collect()
    first = rows.row(0, named=True)
    assert (first["sent_ns"], first["first_token_ns"], first["last_token_ns"], first["finish_ns"]) == (1000, 4000, 8000, 9500)
    assert (first["prompt_tokens"], first["output_tokens"], first["session"]) == (12, 5, "s1")
    tokens = trace.table("tokens").sort("index").collect().select("index", "time_ns", "count", "coalesced").rows()
    assert tokens == [(0, 4000, 1, False), (1, 5000, 1, False), (2, 6000, 1, False), (3, 8000, 1, False), (4, 8000, 1, True)]
    assert rows["error"].to_list() == [None, "no", "no response came"]
    assert not any(b"secret" in p.read_bytes() for p in trace.path.rglob("*") if p.is_file())


def test_genai_perf_of_triton_and_a_cut(tmp_path: Path) -> None:
    told = {
        "timestamp": 1_000_000, "response_timestamps": [3_000_000, 5_000_000, 8_000_000],
        "response_outputs": [{"text_output": "I"}, {"text_output": " like"}, {"text_output": " dogs"}],
    }  # fmt: skip
    text = json.dumps(genai([told, told]))
    done, _ = run(tmp_path, text)
    assert done.written == 2 and any("no count of tokens" in n for n in done.manifest.notes)
    s = summary(hoptrace.open(tmp_path / "in.json.trace"))
    assert (s["ttft"].mean_ns, s["e2e"].mean_ns, s.output_tokens) == (2_000_000, 7_000_000, None)
    done, rejects = run(tmp_path, text[:-60], "cut.json")
    assert done.written == 1 and rejects == [(2, "the file ends inside it")]


SECONDS = st.floats(0, 1000, allow_nan=False) | st.sampled_from([0.0, 1e-9, 3.3e-7])


@settings(max_examples=15)
@given(
    data=st.lists(
        st.tuples(
            st.floats(0, 1e7),
            st.floats(0, 100),
            st.floats(1e-9, 100),
            st.lists(SECONDS, max_size=12),
            st.integers(0, 14),
            st.sampled_from([None, NAN, -1.0, "x", INF]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_a_run_measured_adds_up(data: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Law: read = written + rejected, a bad value takes its own request only, each token lies where TTFT and the gaps put it
    (to a nanosecond, however many there are), and a request's gaps add up to its decode time."""
    told = load("vllm_detailed.json") | {
        "start_times": [s for s, *_ in data], "queue_times": [q for _, q, *_ in data], "errors": [""] * len(data),
        "ttfts": [t if bad is None else bad for *_, t, _, _, bad in data],
        "itls": [g for *_, g, _, _ in data], "output_lens": [n for *_, n, _ in data], "input_lens": [5] * len(data),
        "latencies": [t + sum(g) for *_, t, g, _, _ in data],
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("law")
    bad = [i for i, d in enumerate(data) if d[-1] is not None]
    if len(bad) == len(data):
        with pytest.raises(InputError, match="rejected"):
            run(folder, told)
        return
    done, _ = run(folder, told)
    assert (done.read, done.rejected) == (len(data), len(bad))
    tokens = hoptrace.open(folder / "in.json.trace").table("tokens").sort("request", "index").collect()
    rows = hoptrace.open(folder / "in.json.trace").table("requests").sort("request").collect()
    for i, (start, queue, ttft, gaps, _, _) in enumerate(d for d in data if d[-1] is None):
        times = tokens.filter(pl.col("request") == i)["time_ns"].to_list()
        sent = rows["sent_ns"][i]
        assert sent == pytest.approx(start * 1e9, abs=2) and sent - rows["intended_ns"][i] == pytest.approx(queue * 1e9, abs=3)
        assert len(times) == 1 + len(gaps)
        for k, time in enumerate(times):
            assert time - sent == pytest.approx((ttft + sum(gaps[:k])) * 1e9, abs=1.5)
        assert rows["last_token_ns"][i] - rows["first_token_ns"][i] == times[-1] - times[0]
