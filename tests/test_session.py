"""Sessions against a toy that answers like llama.cpp: begin, server's death and return, end; and one against the real server."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.toy_server import Toy, serve, token

import hoptrace
from hoptrace.collectors.attached import attached
from hoptrace.collectors.engines.streams.hashing import HashKey, load_key
from hoptrace.collectors.explain import explain
from hoptrace.collectors.session import Session
from hoptrace.errors import EnvironmentProblem, UsageError

DATA = Path(__file__).parent / "data" / "llamacpp"
KEY = HashKey("test", b"k" * 32)
FILES = {"/v1/models": "models.json", "/props": "props.json", "/slots": "slots_busy.json", "/metrics": "metrics.prom"}
STREAM = [token("a"), 0.02, token("b", "length", ',"usage":{"prompt_tokens":3,"completion_tokens":2}'), b"data: [DONE]\n\n"]
ASK = {"prompt": "x", "stream": True, "max_tokens": 2}


def get(request: Any) -> Any:
    name = FILES.get(request.path)
    return web.Response(body=(DATA / name).read_bytes()) if name else None


def toy() -> Toy:
    return Toy(STREAM, get=get)


def rows(path: Path, table: str) -> list[dict[str, Any]]:
    return hoptrace.open(path).table(table).collect().to_dicts()


async def until(what: Any) -> None:
    for _ in range(1000):
        if what():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came to pass")


async def test_a_capture_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    options: dict[str, Any] = {"proxy": ("127.0.0.1", 0), "pid": os.getpid(), "every_s": 0.02, "hash_key": KEY}
    async with serve(toy()) as server, Session(server.url, out, **options) as s:
        async with aiohttp.ClientSession() as client:
            for _ in range(3):
                async with client.post(s.proxy_url + "/v1/completions", json=ASK) as answer:
                    await answer.read()
        await until(lambda: all(s.status().samples.get(n) for n in ("process", "llamacpp-metrics", "llamacpp-slots")))
        await until(lambda: s.status().requests.finished == 3)
    trace = hoptrace.open(out)
    assert trace.manifest.closed and trace.manifest.rows_dropped == {}
    (told,) = trace.manifest.servers
    assert (told.name, told.max_sequences, told.pid) == ("llamacpp", 4, os.getpid())
    assert {c.name for c in trace.manifest.collectors if c.available} >= {
        "llamacpp-metrics", "llamacpp-slots", "process", "proxy",
    }  # fmt: skip
    assert len(rows(out, "requests")) == 3 and len(rows(out, "tokens")) == 6
    assert [e["kind"] for e in rows(out, "events")] == ["start", "stop"]
    covered = {(r["table"], r["source"]) for r in rows(out, "coverage")}
    assert {("tokens", "proxy"), ("counters", "process"), ("counters", "llamacpp-metrics")} <= covered
    assert all(r["to_ns"] >= r["from_ns"] for r in rows(out, "coverage"))


async def test_without_a_proxy_requests_are_not_covered(tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    async with serve(toy()) as server, Session(server.url, out, pid=None, every_s=0.02) as s:
        with pytest.raises(RuntimeError):
            _ = s.proxy_url
        await until(lambda: s.status().samples.get("llamacpp-metrics"))
    covered = {r["table"] for r in rows(out, "coverage")}
    assert "counters" in covered and "requests" not in covered and "tokens" not in covered
    reasons = {c.name: c.reason for c in hoptrace.open(out).manifest.collectors}
    assert "no --proxy" in str(reasons["proxy"]) and "--pid none" in str(reasons["process"])


async def test_a_server_that_dies_and_returns(tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    server = toy()
    async with serve(server):
        session = Session(server.url, out, proxy=("127.0.0.1", 0), pid=None, every_s=0.02, hash_key=KEY)
        await session.start()
        await until(lambda: session.status().samples.get("llamacpp-metrics"))
    port = int(server.url.rsplit(":", 1)[1])
    await until(lambda: session.status().away)
    async with aiohttp.ClientSession() as client, client.post(session.proxy_url + "/v1/completions", json=ASK) as answer:
        assert answer.status == 502
    before = session.status().samples["llamacpp-metrics"]
    async with serve(server, port):
        await until(lambda: not session.status().away)
        await until(lambda: session.status().samples["llamacpp-metrics"] > before)
        await session.close()
    assert [e["kind"] for e in rows(out, "events")] == ["start", "stop", "restart", "stop"]
    incarnations = {r["incarnation"] for r in rows(out, "counters") if r["source"] == "llamacpp-metrics"}
    assert incarnations == {"llamacpp#1", "llamacpp#2"}
    stretches = [r for r in rows(out, "coverage") if r["source"] == "llamacpp-metrics"]
    assert len(stretches) == 2, "the gap is not covered"
    assert hoptrace.open(out).manifest.closed


async def test_a_collector_that_fails_is_counted_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hoptrace.collectors.engines.metrics_source import MetricsSource

    def fails(self: Any, *_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(MetricsSource, "_take", fails)
    out = tmp_path / "t.trace"
    async with serve(toy()) as server, Session(server.url, out, pid=None, every_s=0.01) as s:
        await until(lambda: s.status().dropped.get("llamacpp-metrics: ZeroDivisionError", 0) >= 2)
        await until(lambda: s.status().samples.get("llamacpp-slots"))
    assert hoptrace.open(out).manifest.closed


async def test_what_goes_wrong_at_the_beginning_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    async with serve(toy()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(EnvironmentProblem, match="already in use"):
            await Session(server.url, out, proxy=("127.0.0.1", port), hash_key=KEY).start()
        assert not out.exists()
        out.mkdir()
        with pytest.raises(UsageError, match="already there"):
            await Session(server.url, out).start()
        assert list(out.iterdir()) == []
        out.rmdir()
    with pytest.raises(EnvironmentProblem, match="Nothing listens"):
        await Session(server.url, out).start()
    assert not out.exists()


async def test_explain_records_nothing() -> None:
    async with serve(toy()) as server:
        told = await explain(server.url, pid=os.getpid())
    assert told.server.engine == "llama.cpp"
    assert [c.name for c in told.plan.data_path] == ["sniff", "proxy"]
    findings = told.findings
    assert {n for n, f in findings.items() if f.available} == {"llamacpp-metrics", "llamacpp-slots", "process"}


def test_beside_a_program_without_an_event_loop(tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    with pytest.raises(EnvironmentProblem), attached("http://127.0.0.1:1", out):
        pass
    assert not out.exists()


def test_keys_are_made_once_and_kept_private(tmp_path: Path) -> None:
    first, again = load_key("g", tmp_path), load_key("g", tmp_path)
    assert first == again and len(first.key) == 32
    assert (tmp_path / "g.key").stat().st_mode & 0o777 == 0o600
    assert load_key("other", tmp_path).key != first.key
    assert first.key.hex() not in first.space
    (tmp_path / "file").write_text("")
    assert load_key("g", tmp_path / "file").group == "g-once", "no folder to keep it in: for this run only"


@pytest.mark.server
def test_a_real_server(model: Path, tmp_path: Path) -> None:
    from hoptrace.demo_server import DemoServer

    out = tmp_path / "t.trace"
    with DemoServer(model, slots=2, log=tmp_path / "log") as server:
        pid = server.pid
        with attached(server.url, out, proxy=("127.0.0.1", 0), hash_key=KEY) as session:
            for n, words in ((6, "The capital of France"), (9, "Once upon a time")):
                ask = {"prompt": words, "max_tokens": n, "stream": True, "ignore_eos": True}
                ask["stream_options"] = {"include_usage": True}
                body = json.dumps(ask).encode()
                with urllib.request.urlopen(urllib.request.Request(session.proxy_url + "/v1/completions", body)) as answer:
                    assert answer.read().endswith(b"data: [DONE]\n\n")
    requests, stages = rows(out, "requests"), rows(out, "stages")
    assert [r["output_tokens"] for r in requests] == [6, 9]
    for r, s in zip(requests, stages, strict=True):
        assert r["error"] is None and r["prompt_tokens"] >= 4
        assert (
            r["received_ns"]
            <= s["enqueued_ns"]
            <= s["scheduled_ns"]
            < r["first_token_ns"]
            <= r["last_token_ns"]
            <= r["finish_ns"]
        )
        counted = [t["count"] for t in rows(out, "tokens") if t["request"] == r["request"]]
        assert sum(counted) == r["output_tokens"]
    (told_server,) = hoptrace.open(out).manifest.servers
    assert (told_server.max_sequences, told_server.pid) == (2, pid)
    t = told_server
    assert (t.layers, t.heads, t.kv_heads, t.head_size, t.hidden_size) == (30, 9, 3, 64, 576)
    assert (t.parameters, t.weight_bytes, t.kv_dtype) == (134_515_008, 96_576_768, "f16")
    assert rows(out, "steps"), "steps are reconstructed and stored at the end"


@pytest.mark.parametrize("body", [b"{}", b'{"data":"nope"}', b'{"data":[1]}', b"[]"])
async def test_a_server_that_answers_anything_is_not_taken(tmp_path: Path, body: bytes) -> None:
    async with serve(Toy(get=lambda _: web.Response(body=body, content_type="application/json"))) as server:
        with pytest.raises(EnvironmentProblem, match="not an OpenAI-compatible server"):
            await Session(server.url, tmp_path / "t.trace").start()


async def test_two_servers_in_one_trace(tmp_path: Path) -> None:
    """A router hands a request from one server to the next under one x-request-id: one request, two stays."""
    out = tmp_path / "t.trace"
    async with (
        serve(toy()) as one,
        serve(toy()) as two,
        Session([one.url, two.url], out, proxy=("127.0.0.1", 0), pid=None, every_s=0.02, hash_key=KEY) as s,
    ):
        first, second = s.proxy_urls
        assert [t.name for t in s.targets] == ["llamacpp", "llamacpp-2"]
        async with aiohttp.ClientSession() as client:
            away, here = {"do_remote_decode": True}, {"do_remote_prefill": True}
            for url, name, kv in ((first, "r1", away), (second, "r1", here), (second, "r2", {}), (first, None, {})):
                headers = {"x-request-id": name} if name else {}
                ask = ASK | {"kv_transfer_params": kv}
                async with client.post(url + "/v1/completions", json=ask, headers=headers) as answer:
                    await answer.read()
        await until(lambda: s.status().requests.finished == 4)
    trace = hoptrace.open(out)
    assert sorted(c.name for c in trace.manifest.collectors if c.available and "@" in c.name) == sorted(
        f"{c}@{n}" for c in ("llamacpp-metrics", "llamacpp-slots", "proxy") for n in ("llamacpp", "llamacpp-2")
    )
    requests = trace.table("requests").collect().sort("request")
    assert requests["request_id"].to_list() == ["r1", "r2", "c1"]
    stays = trace.table("stages").collect().sort("request", "stage")
    assert stays.select("request", "stage", "server", "role", "end_reason").rows() == [
        (0, 0, "llamacpp", "prefill", "handed over"), (0, 1, "llamacpp-2", "decode", "done"),
        (1, 0, "llamacpp-2", "both", "done"), (2, 0, "llamacpp", "both", "done"),
    ]  # fmt: skip
    first_stay, second_stay = stays.filter(request=0).to_dicts()
    row = requests.row(0, named=True)
    assert row["received_ns"] <= first_stay["enqueued_ns"] < second_stay["enqueued_ns"] < row["finish_ns"]
    assert row["arrival_ns"] == row["received_ns"]
    assert trace.manifest.rows_dropped == {} and len(rows(out, "tokens")) == 6
