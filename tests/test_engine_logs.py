"""Logs of engines, followed live: lines whole and once, whatever happens to the file; steps and figures from real logs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pages import ENGINES, Pages, asked, context

import hoptrace
from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Context, Options
from hoptrace.collectors.engines import llamacpp_log, log_tail, vllm_log
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.llamacpp_log import LlamaCppLog, LogClock, figures_of, kv_unified_of, parsed
from hoptrace.collectors.engines.log_tail import LogTail, log_of
from hoptrace.collectors.engines.sglang_log import SglangLog, batch_of
from hoptrace.collectors.engines.vllm_log import VllmLog, stamp_ns, step_of, summary_of, transfers_of
from hoptrace.collectors.hardware.listener import Found
from hoptrace.manifest import Manifest, Server
from hoptrace.writer import TraceWriter

VLLM = (ENGINES / "vllm" / "log.txt").read_text().splitlines()
LLAMA = (ENGINES / "llamacpp" / "log.jsonl").read_text().splitlines()


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
        yield writer


def rows(writer: TraceWriter, table: str) -> list[dict[str, Any]]:
    writer.flush()
    return hoptrace.open(writer.path).table(table).collect().to_dicts()


def following(path: Path, writer: TraceWriter, engine: str = "vllm", **config: Any) -> Context:
    server = Server(name="s", engine=engine, config=config)
    return context(Api("http://127.0.0.1:9"), writer, server=server, log=path)


# -- the file ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=30), st.integers(0, 8)),
                max_size=40))  # fmt: skip
def test_every_line_is_read_once_and_whole(tmp_path_factory: pytest.TempPathFactory, script: list[tuple[str, int]]) -> None:
    """Lines are written in pieces (a write after any byte), the file is rotated now and then, and looked at whenever."""
    path = tmp_path_factory.mktemp("log") / "server.log"
    path.write_text("before\nhalf a li")
    tail = LogTail(path)
    found = tail.read()
    out = path.open("ab", buffering=0)
    out.write(b"ne\n")
    written = []
    for i, (line, what) in enumerate(script):
        data = (line + "\n").encode()
        out.write(data[: what * 3])
        if what % 2:
            found += tail.read()
        out.write(data[what * 3 :])
        written.append(line)
        if what == 7:
            out.close()
            path.rename(path.with_name(f"server.log.{i}"))
            out = path.open("ab", buffering=0)
            # Nothing is lost as long as it is looked at between two rotations.
            found += tail.read()
    out.close()
    found += tail.read()
    tail.close()
    assert found == written
    assert tail.rotations == sum(w == 7 for _, w in script) and tail.truncations == 0 == tail.dropped


def test_a_file_that_is_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old\n" * 50)
    tail = LogTail(path)
    assert tail.read() == []
    path.write_text("1\n")  # copytruncate, then less than before
    assert tail.read() == ["1"] and tail.truncations == 1
    path.write_text("".join(f"line {i}\n" for i in range(100)))  # cut, and longer than before when it is looked at
    assert len(tail.read()) == 100 and tail.truncations == 2
    with path.open("a") as f:
        f.write("last\n")
    assert tail.read() == ["last"] and tail.truncations == 2


def test_endless_lines_and_bytes_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "_LONGEST_LINE", 1000)
    path = tmp_path / "a.log"
    path.write_bytes(b"")
    tail = LogTail(path)
    tail.read()
    with path.open("ab") as f:
        f.write(b"x" * 700)
    assert tail.read() == []
    with path.open("ab") as f:
        f.write(b"x" * 700)
    assert tail.read() == []
    with path.open("ab") as f:
        f.write(b"x" * 5000 + b"\nfine\n\xff\xfe\x00\n")
    assert tail.read() == ["fine", "��\x00"] and tail.dropped == 1


def test_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "later.log", from_start=True)
    assert tail.read() == []
    (tmp_path / "later.log").write_text("a\nb\n")
    assert tail.read() == ["a", "b"]


def test_the_log_that_a_process_writes_to(tmp_path: Path) -> None:
    """Where standard output goes is seen in /proc; a pipe can't be followed, and that is said."""
    log, code = tmp_path / "out.log", "import time; print('x', flush=True); time.sleep(60)"
    with log.open("w") as out, subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE) as p:
        try:
            ctx = Context(Api("http://127.0.0.1:9"), Server(name="s"), "h", find=lambda: Found(p.pid))
            assert log_of(ctx, (1, 2)).path == log and log_of(ctx, (2, 1)).path == log
            only = Context(Api("http://127.0.0.1:9"), Server(name="s"), "h", find=lambda: Found(p.pid))
            found = log_of(only, (2,))
            assert found.path is None and "goes to pipe: redirect it to a file, or name its log file with --log" in str(
                found.reason
            )
        finally:
            p.kill()
    gone = Context(Api("http://127.0.0.1:9"), Server(name="s"), "h", options=Options(log=tmp_path / "no.log"))
    assert log_of(gone).reason == f"there is no {tmp_path / 'no.log'}"
    none = Context(Api("http://127.0.0.1:9"), Server(name="s"), "h")
    assert "--pid none" in str(log_of(none).reason)


# -- vLLM -------------------------------------------------------------------------------------------------------------


def test_the_steps_in_a_real_log() -> None:
    """Sums are those of the same run's /metrics: 300 tokens of 12 requests, 252 prompt tokens computed in 122 iterations."""
    steps = [s for line in VLLM if (s := step_of(line))]
    page = (ENGINES / "vllm" / "metrics.prom").read_text().splitlines()

    def total(name: str) -> float:
        return sum(float(x.split()[-1]) for x in page if x.startswith(name))

    assert len(steps) == 122 == total("vllm:iteration_tokens_total_count")
    assert [s[1] for s in steps] == list(range(122)) and {s[0] for s in steps} == {0}
    assert sum(s[3]["prefill_tokens"] for s in steps) == total(
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="toy",source="local_compute"'
    )
    first = sum(s[3]["prefill_requests"] for s in steps)
    assert sum(s[3]["decode_tokens"] for s in steps) + first == total("vllm:generation_tokens_total") == 300
    assert step_of(VLLM[2]) == (
        0, 0, 32_140_000, {"prefill_requests": 1, "prefill_tokens": 101, "decode_requests": 0, "decode_tokens": 0},
    )  # fmt: skip


def test_lines_of_other_versions_and_ranks() -> None:
    tail = "0 context requests, 0 context tokens, 1 generation requests, 1 generation tokens, iteration elapsed time: 686.84 ms"
    assert step_of(f"INFO Iteration(14): {tail}, CPU KV cache usage: 0.6%") == (
        0, 14, 686_840_000, {"prefill_requests": 0, "prefill_tokens": 0, "decode_requests": 1, "decode_tokens": 1},
    )  # fmt: skip
    assert step_of(f"Engine 003: Iteration(5): {tail} (dummy), GPU KV cache usage: 1.0%") is not None
    assert step_of(f"Engine 003: Iteration(5): {tail}")[0] == 3  # type: ignore[index]
    assert step_of("Iteration(5): nothing") is None
    assert step_of(f"Iteration(5): {tail.replace('686.84', '6.8.4')}") is None


def test_summaries_and_transfers() -> None:
    line = next(x for x in VLLM if "Avg prompt throughput" in x)
    assert summary_of(line) == (
        "",
        [("log:prompt_tokens_per_s", 18.5, "tokens/s"), ("log:generation_tokens_per_s", 17.1, "tokens/s"),
         ("log:requests_running", 0.0, "requests"), ("log:requests_waiting", 0.0, "requests"),
         ("log:kv_cache_usage", 0.0, "ratio"), ("log:prefix_cache_hit_rate", pytest.approx(0.757), "ratio")],
    )  # fmt: skip
    other = "Engine 002: Avg prompt throughput: 1.0 tokens/s, External prefix cache hit rate: 50.0%, MM cache hit rate: 9.0%"
    part, figures = summary_of(other) or ("", [])
    assert part == "/engine:2" and ("log:external_prefix_cache_hit_rate", 0.5, "ratio") in figures
    assert not any(n == "log:prefix_cache_hit_rate" for n, _, _ in figures)
    # vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py, reduce()
    nixl = (
        "KV Transfer metrics: Num successful transfers=3, Avg xfer time (ms)=12.5, P90 xfer time (ms)=20.1, "
        "Avg MB per transfer=1.5, Throughput (MB/s)=120.0, Num failed transfers=0"
    )
    assert transfers_of(nixl) == [
        ("log:kv_transfer:num_successful_transfers", 3.0, "1"), ("log:kv_transfer:avg_xfer_time_ms", 12.5, "ms"),
        ("log:kv_transfer:p90_xfer_time_ms", 20.1, "ms"), ("log:kv_transfer:avg_mb_per_transfer", 1.5, "MB"),
        ("log:kv_transfer:throughput_mb_s", 120.0, "MB/s"), ("log:kv_transfer:num_failed_transfers", 0.0, "1"),
    ]  # fmt: skip


def test_stamps_have_no_year_and_a_second_of_width() -> None:
    now = int(time.mktime((2026, 1, 1, 0, 0, 30, 0, 0, -1))) * 10**9
    low, high = stamp_ns("INFO 12-31 23:59:58 [x.py:1] hello", now) or (0, 0)
    assert (now - low, high - low) == (32 * 10**9, 10**9), "the last second but one of the year before"
    low, high = stamp_ns("INFO 01-01 00:00:30.250 [x.py:1] hello", now) or (0, 0)
    assert (low - now, high - low) == (250 * 10**6, 10**6)
    assert stamp_ns("hello", now) is None and stamp_ns("INFO 13-41 25:61:61 x", now) is None


async def test_steps_from_the_log_as_it_grows(tmp_path: Path, writer: TraceWriter) -> None:
    path = tmp_path / "vllm.log"
    path.write_text("\n".join(VLLM[:2]) + "\n")
    c = VllmLog(following(path, writer, enable_logging_iteration_details=True))
    assert await c.probe() == Finding(True) and c.tables == ("counters",)
    await c.start()
    began = writer.clock.now_ns()
    lines = [x for x in VLLM[2:] if "Iteration(" in x]
    for i in range(0, len(lines), 20):
        with path.open("a") as f:
            f.write("\n".join(lines[i : i + 20]) + "\n")
        await c.sample()
    with path.open("a") as f:
        f.write(next(x for x in VLLM if "Avg prompt" in x) + "\n")
    await c.sample()
    await c.close()
    ended = writer.clock.now_ns()
    steps = sorted(rows(writer, "steps"), key=lambda r: r["step"])
    assert [s["step"] for s in steps] == list(range(122))
    # Lengths are exact; they are longer in all than this test took, so that some must lie before it began.
    assert [s["end_ns"] - s["start_ns"] for s in steps] == [s[2] for line in lines if (s := step_of(line))]
    assert all(a["end_ns"] <= b["start_ns"] for a, b in pairwise(steps))
    assert steps[-1]["end_ns"] <= ended and steps[-1]["end_ns"] >= began
    assert {(s["server"], s["dp_rank"], s["origin"], s["source"]) for s in steps} == {("s", 0, "observed", "vllm-log")}
    assert c.tables == ("counters", "steps")
    assert any("steps are from its log" in n for n in writer.manifest.notes)
    (rate,) = [r for r in rows(writer, "counters") if r["name"] == "log:generation_tokens_per_s"]
    assert (rate["value_float"], rate["semantics"], rate["window_ns"]) == (17.1, "rate", 10**10)
    assert writer.manifest.rows_dropped == {} and rows(writer, "events") == []


async def test_an_engine_that_starts_anew_and_lines_that_are_missing(tmp_path: Path, writer: TraceWriter) -> None:
    path = tmp_path / "vllm.log"
    path.write_text("")
    c = VllmLog(following(path, writer))
    await c.start()
    lines = [x for x in VLLM if "Iteration(" in x]
    path.write_text("\n".join([*lines[:5], *lines[8:10], *lines[:3]]) + "\n")
    await c.sample()
    await c.close()
    assert sorted(r["step"] for r in rows(writer, "steps")) == [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]
    assert [e["detail"] for e in rows(writer, "events")] == ["3 iterations of engine 0 are not in the log before Iteration(8)"]


class There:
    """A plug-in that is there."""

    name = "vllm-plugin"
    tables = ("steps",)

    async def probe(self) -> Finding:
        return Finding(True)


async def test_the_plug_in_has_the_steps(tmp_path: Path, writer: TraceWriter) -> None:
    path = tmp_path / "vllm.log"
    path.write_text("x\n")
    c = VllmLog(following(path, writer), There())  # type: ignore[arg-type]
    assert (await c.probe()).reason == "summaries only: the plug-in has the steps"
    await c.start()
    with path.open("a") as f:
        f.write("\n".join(VLLM) + "\n")
    await c.sample()
    await c.close()
    assert rows(writer, "steps") == [] and {r["name"] for r in rows(writer, "counters")} >= {"log:requests_running"}


async def test_the_flag_that_is_missing_is_named(tmp_path: Path, writer: TraceWriter) -> None:
    path = tmp_path / "vllm.log"
    path.write_text("INFO started\n")
    found = await VllmLog(following(path, writer)).probe()
    assert found.available and "restart vLLM with --enable-logging-iteration-details" in str(found.reason)
    path.write_text(VLLM[5] + "\n")
    assert (await VllmLog(following(path, writer)).probe()).reason is None


async def test_a_stamp_of_another_zone_says_nothing(tmp_path: Path, writer: TraceWriter) -> None:
    path = tmp_path / "vllm.log"
    path.write_text("")
    c = VllmLog(following(path, writer))
    await c.start()
    old = time.strftime("%m-%d %H:%M:%S", time.localtime(time.time() - 7200))
    path.write_text(VLLM[5].replace("11-30 11:55:48", old) + "\n")
    assert old in path.read_text()
    before = writer.clock.now_ns()
    await c.sample()
    await c.close()
    (step,) = rows(writer, "steps")
    assert 0 <= step["end_ns"] - before < 5 * 10**9


# -- llama.cpp --------------------------------------------------------------------------------------------------------


def test_a_real_log_in_both_forms() -> None:
    told = [p for line in LLAMA if (p := parsed(line))]
    figures = [f for _, message in told if (f := figures_of(message))]
    assert figures[0] == (1, 0, [("log:prompt_ns", 57_090_000.0, "ns"), ("log:prompt_tokens", 5.0, "tokens")])
    assert figures[1] == (1, 0, [("log:decode_ns", 112_220_000.0, "ns"), ("log:decode_tokens", 8.0, "tokens")])
    assert {t for _, t, _ in figures} == {0, 9}
    # The same line as text: minutes.seconds.ms.us, common/log.cpp
    text = "0.05.123.106 I slot print_timing: id  1 | task 0 | prompt eval time =      57.09 ms /     5 tokens (   11.42 ms)"
    us, message = parsed(text) or (0, "")
    assert us == 5_123_106 and figures_of(message) == figures[0]
    assert parsed("\x1b[34m0.05.123.106\x1b[0m \x1b[32mI \x1b[0mslot x: hello") == (5_123_106, "slot x: hello")
    for line in ("", "{", "[]", '{"time":"x","msg":"y"}', '{"msg":"y"}', "{" * 5000, "no stamp", "1.2.3.4 I x"):
        assert parsed(line) is None


def test_whether_slots_share_one_context_is_in_the_log(tmp_path: Path) -> None:
    assert kv_unified_of(ENGINES / "llamacpp" / "log.jsonl") is False
    (tmp_path / "l").write_text("load_model: initializing, n_slots = 4, n_ctx_slot = 8192, kv_unified = 'true'\n")
    assert kv_unified_of(tmp_path / "l") is True
    assert kv_unified_of(tmp_path / "none") is None and kv_unified_of(None) is None


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**8), st.integers(0, 10**8)), min_size=1, max_size=50))
def test_the_servers_clock_is_placed_within_what_was_seen(lines: list[tuple[int, int, int]]) -> None:
    """Whatever the delays of looking, the true time lies within the uncertainty that is told, and that never grows."""
    clock, start, now, last = LogClock(), 5 * 10**12, 0, None
    for gap, since_look, until_seen in lines:
        now += gap
        at, uncertain = clock.place(now, start + now - since_look, start + now + until_seen)
        assert abs(at - (start + now)) <= uncertain
        assert last is None or uncertain <= last
        last = uncertain


def test_a_server_that_starts_anew_has_a_clock_of_its_own() -> None:
    clock = LogClock()
    clock.place(10**9, 0, 2 * 10**9)
    at, uncertain = clock.place(5, 90 * 10**9, 91 * 10**9)
    assert abs(at - 90.5 * 10**9) <= uncertain == 500_000_000


async def test_llamacpp_figures_as_the_log_grows(tmp_path: Path, writer: TraceWriter) -> None:
    path = tmp_path / "llama.log"
    path.write_text("")
    c = LlamaCppLog(following(path, writer, "llama.cpp"))
    assert (await c.probe()).available
    await c.start()
    with path.open("a") as f:
        f.write("\n".join(LLAMA) + "\n")
    assert await c.sample() == 16, "three lines with a figure or two each, and the task, for two requests"
    await c.close()
    found = [(r["entity"], r["name"], r["value_int"]) for r in rows(writer, "counters") if r["name"] == "log:decode_tokens"]
    assert found == [("server:s/slot:1", "log:decode_tokens", 8), ("server:s/slot:1", "log:decode_tokens", 30)]
    stamps = {r["time_ns"] for r in rows(writer, "counters")}
    assert len(stamps) > 1, "each line has its own time, to the microsecond"
    assert llamacpp_log.LlamaCppLog.order == (2, 1) and vllm_log.VllmLog.order == (1, 2)


# -- SGLang -----------------------------------------------------------------------------------------------------------

# srt/managers/scheduler_components/metrics_reporter.py of 0.5.23
PREFILL = (
    "[2026-11-30 11:00:00 TP0] Prefill batch, #new-seq: 3, #new-token: 512, #cached-token: 64, token usage: 0.01, "
    "#running-req: 2, #queue-req: 5, #pending-token: 900, cuda graph: False, input throughput (token/s): 1234.50"
)
DECODE = (
    "[2026-11-30 11:00:01.250 DP1 TP0] Decode batch [40], #running-req: 7, #token: 4096, token usage: 0.25, accept len: 2.10, "
    "accept rate: 0.55, cuda graph: True, gen throughput (token/s): 99.10, #queue-req: 0"
)


async def test_batches_of_sglang(tmp_path: Path, writer: TraceWriter) -> None:
    rank, figures = batch_of(PREFILL) or (9, [])
    found = {n: v for n, v, _ in figures}
    assert rank == 0 and found["log:prefill:new_tokens"] == 512 and found["log:prefill:cached_tokens"] == 64
    assert found["log:prefill:prompt_tokens_per_s"] == 1234.5 and found["log:prefill:pending_tokens"] == 900
    rank, figures = batch_of(DECODE) or (9, [])
    found = {n: v for n, v, _ in figures}
    assert rank == 1 and found["log:decode:running"] == 7 and found["log:decode:accept_length"] == 2.1
    assert found["log:decode:kv_tokens"] == 4096 and found["log:decode:waiting"] == 0
    assert batch_of("Prefill of a batch") is None and batch_of("") is None
    path = tmp_path / "s.log"
    path.write_text("")
    c = SglangLog(following(path, writer, "sglang"))
    await c.start()
    path.write_text(PREFILL + "\n" + DECODE + "\nnoise batch\n")
    assert await c.sample() == len(found) + 8
    await c.close()
    entities = {r["entity"] for r in rows(writer, "counters")}
    assert entities == {"server:s", "server:s/rank:1"}


async def test_a_log_whose_reader_may_not_read(tmp_path: Path, writer: TraceWriter) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path = tmp_path / "x.log"
    path.write_text("")
    path.chmod(0)
    found = await VllmLog(following(path, writer)).probe()
    assert not found.available and "may not be read by this user" in str(found.reason)


async def test_a_server_elsewhere_has_no_log_here(writer: TraceWriter) -> None:
    async with asked(Pages({})) as api:
        ctx = Context(api, Server(name="s"), "h", writer, find=lambda: Found(None, "h is another machine"))
        found = await VllmLog(ctx).probe()
    assert found == Finding(False, "h is another machine; or name the server's log file with --log")
