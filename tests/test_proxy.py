"""The recording proxy against a toy server: bytes pass unchanged whatever happens, and what happened is in the rows."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.toy_server import Toy, event, serve, token

import hoptrace
from hoptrace.collectors.engines.streams.exchange import Exchange
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.engines.streams.proxy import Proxy, listen
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.errors import EnvironmentProblem
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

KEY = HashKey("test", b"k" * 32)
DONE = b"data: [DONE]\n\n"
USAGE = ',"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}'
STREAM = [token("a"), 0.02, token("b"), 0.02, token("c"), token("", "length", USAGE), DONE]
ASK: dict[str, Any] = {"model": "m", "prompt": "x" * 130, "max_tokens": 3, "stream": True}


class Run:
    """A proxy before a toy, and the trace that it leaves."""

    def __init__(self, proxy: Proxy, recorder: Recorder, writer: TraceWriter) -> None:
        self.proxy, self.recorder, self.writer = proxy, recorder, writer

    @property
    def url(self) -> str:
        return self.proxy.url

    def rows(self, table: str) -> list[dict[str, Any]]:
        self.recorder.flush()
        self.writer.flush()
        return hoptrace.open(self.writer.path).table(table).collect().to_dicts()

    async def settled(self, requests: int = 1) -> None:
        """Wait until the recorder has seen the end of that many requests (the client can be faster)."""
        for _ in range(500):
            s = self.recorder.stats
            if s.finished + s.failed + s.cancelled >= requests and not self.recorder.busy:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"requests did not end: {self.recorder.stats}")


@asynccontextmanager
async def running(toy: Toy, path: Path, *, prefix: str = "", key: HashKey | None = KEY) -> AsyncIterator[Run]:
    writer = TraceWriter(path / "t.trace", Manifest(origin="recorded"))
    recorder = Recorder(writer, "toy", key)
    proxy = Proxy(toy.url + prefix, recorder, writer.clock.now_ns)
    await proxy.start(listen("127.0.0.1", 0))
    try:
        yield Run(proxy, recorder, writer)
    finally:
        await proxy.close()
        writer.close()


async def post(url: str, body: Any = ASK, path: str = "/v1/completions", **more: Any) -> tuple[int, bytes]:
    async with aiohttp.ClientSession(auto_decompress=False) as client, client.post(url + path, json=body, **more) as answer:
        return answer.status, await answer.read()


def joined(steps: Any) -> bytes:
    return b"".join(s for s in steps if isinstance(s, bytes))


async def test_a_stream_passes_byte_for_byte_and_is_recorded(tmp_path: Path) -> None:
    async with serve(Toy(STREAM)) as toy, running(toy, tmp_path) as run:
        status, body = await post(run.url)
        await run.settled()
        assert (status, body) == (200, joined(STREAM))
        (request,) = run.rows("requests")
        (stage,) = run.rows("stages")
        tokens = run.rows("tokens")
        moves = run.rows("moves")
        (wait,) = run.rows("waits")
    assert (request["model"], request["max_tokens"], request["request_id"]) == ("m", 3, "c1")
    assert (request["prompt_tokens"], request["output_tokens"], request["finish_reason"]) == (7, 3, "length")
    assert (request["prompt_chars"], request["block_size"], request["block_unit"]) == (130, 64, "characters")
    assert len(request["prefix_blocks"]) == 2
    assert request["error"] is None
    assert request["arrival_of"] == "received" and request["arrival_ns"] == request["received_ns"]
    assert [t["count"] for t in tokens] == [1, 1, 1]
    assert [t["index"] for t in tokens] == [0, 1, 2]
    assert request["first_token_ns"] == request["first_visible_ns"] == tokens[0]["time_ns"]
    assert request["last_token_ns"] == tokens[-1]["time_ns"]
    times = [request["received_ns"], stage["enqueued_ns"], *(t["time_ns"] for t in tokens), stage["end_ns"], request["finish_ns"]]
    assert times == sorted(times)
    assert tokens[1]["time_ns"] - tokens[0]["time_ns"] >= 10_000_000, "the planted sleep lies between the two"
    assert (stage["end_reason"], stage["cached_tokens"], stage["server"]) == ("done", 2, "toy")
    assert (wait["start_ns"], wait["end_ns"]) == (request["received_ns"], stage["enqueued_ns"])
    assert [(m["object"], m["src"], m["dst"], m["bytes"]) for m in moves] == [
        ("prompt", "client", "server:toy", len(json.dumps(ASK))),
        ("tokens", "server:toy", "client", len(joined(STREAM))),
    ]


async def test_no_prompt_and_no_secret_is_stored(tmp_path: Path) -> None:
    async with serve(Toy([token("SECRETOUT"), DONE])) as toy, running(toy, tmp_path) as run:
        await post(run.url, ASK | {"prompt": "SECRETIN" * 20}, headers={"Authorization": "Bearer SECRETKEY"})
        await run.settled()
        run.writer.flush()
        written = b"".join(p.read_bytes() for p in (tmp_path / "t.trace").rglob("*") if p.is_file())
        cells = str([run.rows(name) for name in ("requests", "stages", "tokens", "moves", "waits")])
        assert toy.requests[0][2]["Authorization"] == "Bearer SECRETKEY"
    assert b"SECRET" not in written
    assert "SECRET" not in cells and "Bearer" not in cells


async def test_equal_prefixes_have_equal_hashes_under_one_key_only(tmp_path: Path) -> None:
    async with serve(Toy([DONE])) as toy:
        async with running(toy, tmp_path / "a") as run:
            await post(run.url, ASK | {"prompt": "a" * 64 + "b" * 64})
            await post(run.url, ASK | {"prompt": "a" * 64 + "c" * 64})
            await post(run.url, ASK | {"prompt": list(range(40))})
            await post(run.url, {"messages": [{"role": "user", "content": "z" * 200}]}, "/v1/chat/completions")
            await run.settled(4)
            one, two, ids, chat = (r["prefix_blocks"] for r in run.rows("requests"))
            units = [r["block_unit"] for r in run.rows("requests")]
        async with running(toy, tmp_path / "b", key=HashKey("test", b"o" * 32)) as run:
            await post(run.url, ASK | {"prompt": "a" * 64 + "b" * 64})
            await run.settled()
            other = run.rows("requests")[0]
        async with running(toy, tmp_path / "c", key=None) as run:
            await post(run.url)
            await run.settled()
            off = run.rows("requests")[0]
    assert one[0] == two[0] and one[1] != two[1]
    assert other["prefix_blocks"][0] != one[0] and other["hash_space"] != KEY.space
    assert len(ids) == 2 and len(chat) == 3
    assert units == ["characters", "characters", "tokens", "characters"]
    assert off["prefix_blocks"] is None and off["prompt_chars"] == 130


async def test_load_generator_headers_are_recorded_and_taken_out(tmp_path: Path) -> None:
    async with serve(Toy(STREAM)) as toy, running(toy, tmp_path) as run:
        now = run.writer.clock.now_ns()
        headers = {"x-hoptrace-intended-ns": str(now - 5_000_000), "x-hoptrace-sent-ns": str(now), "x-request-id": "mine"}
        await post(run.url, headers=headers)
        await post(run.url, headers={"x-hoptrace-intended-ns": "12", "x-hoptrace-sent-ns": "-1e9"})
        await run.settled(2)
        first, second = run.rows("requests")
    assert (first["intended_ns"], first["sent_ns"], first["request_id"]) == (now - 5_000_000, now, "mine")
    assert (first["arrival_ns"], first["arrival_of"]) == (now - 5_000_000, "intended")
    assert (second["intended_ns"], second["sent_ns"], second["arrival_of"]) == (None, None, "received")
    assert not [k for _, _, headers, _ in toy.requests for k in headers if k.lower().startswith("x-hoptrace")]


@pytest.mark.parametrize("size", [1, 2, 7])
async def test_chunks_cut_anywhere(tmp_path: Path, size: int) -> None:
    data = token("käse 🧀") + token("!", "length", USAGE.replace("3", "2")) + DONE
    steps: list[bytes | float] = []
    for i in range(0, len(data), size):
        steps += [data[i : i + size], 0.0]
    async with serve(Toy(steps)) as toy, running(toy, tmp_path) as run:
        assert (await post(run.url))[1] == data
        await run.settled()
        assert [t["count"] for t in run.rows("tokens")] == [1, 1]
        assert run.rows("requests")[0]["output_tokens"] == 2


async def test_several_tokens_in_one_read_are_coalesced(tmp_path: Path) -> None:
    data = token("a") + token("b") + token("", "length", USAGE.replace("3", "2")) + DONE
    async with serve(Toy([data])) as toy, running(toy, tmp_path) as run:
        await post(run.url)
        await run.settled()
        assert [t["coalesced"] for t in run.rows("tokens")] == [False, True]


async def test_the_end_of_sequence_token_is_made_when_the_finishing_chunk_comes(tmp_path: Path) -> None:
    steps = [token("a"), 0.02, token("b"), 0.02, token("", "stop", USAGE), DONE]
    async with serve(Toy(steps)) as toy, running(toy, tmp_path) as run:
        await post(run.url)
        await run.settled()
        tokens, (request,), (stage,) = run.rows("tokens"), run.rows("requests"), run.rows("stages")
    assert [t["count"] for t in tokens] == [1, 1, 1]
    assert request["last_token_ns"] == tokens[2]["time_ns"] == stage["end_ns"]
    assert run.recorder.stats.counts_differ == 0


async def test_chunks_that_do_not_add_up_are_told_and_not_mended(tmp_path: Path) -> None:
    steps = [token("a"), token("bcd"), token("", "length", USAGE.replace("3", "9")), DONE]
    async with serve(Toy(steps)) as toy, running(toy, tmp_path) as run:
        await post(run.url)
        await run.settled()
        tokens, (request,) = run.rows("tokens"), run.rows("requests")
    assert request["output_tokens"] == 9 != sum(t["count"] for t in tokens)
    assert run.recorder.stats.counts_differ == 1


async def test_without_a_total_output_tokens_is_unknown(tmp_path: Path) -> None:
    async with serve(Toy([token("a"), token("b", "length"), DONE])) as toy, running(toy, tmp_path) as run:
        await post(run.url)
        await run.settled()
        assert run.rows("requests")[0]["output_tokens"] is None
        assert run.recorder.stats.counts_untold == 1


async def test_b24_trailing_usage_is_not_a_token(tmp_path: Path) -> None:
    usage = event(
        '{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"completion_tokens_details":{"reasoning_tokens":1}}}'
    )
    async with serve(Toy([token("a"), token("b", "stop"), 0.03, usage, DONE])) as toy, running(toy, tmp_path) as run:
        await post(run.url)
        await run.settled()
        (request,), tokens = run.rows("requests"), run.rows("tokens")
    assert request["output_tokens"] == 2
    assert request["last_token_ns"] == tokens[-1]["time_ns"]
    assert request["finish_ns"] - request["last_token_ns"] >= 20_000_000


async def test_b24_an_error_event_within_a_good_stream(tmp_path: Path) -> None:
    bad = b'event: error\ndata: {"error": {"message": "quotes the prompt", "type": "server_error"}}\n\n'
    async with serve(Toy([token("a"), bad])) as toy, running(toy, tmp_path) as run:
        assert (await post(run.url))[1] == token("a") + bad
        await run.settled()
        (request,), (stage,) = run.rows("requests"), run.rows("stages")
    assert request["error"] == "the stream reported an error: server_error"
    assert stage["end_reason"] == "failed"


async def test_llama_cpp_timings_give_the_engines_times(tmp_path: Path) -> None:
    timings = ',"timings":{"cache_n":1,"prompt_n":6,"prompt_ms":20.0,"predicted_n":2,"predicted_ms":30.0}'
    steps = [0.05, token("a"), 0.03, token("b"), token("", "length", timings), DONE]
    async with serve(Toy(steps)) as toy, running(toy, tmp_path) as run:
        await post(run.url)
        await run.settled()
        (request,), (stage,), tokens = run.rows("requests"), run.rows("stages"), run.rows("tokens")
    first = min(tokens[0]["time_ns"], stage["end_ns"] - 30_000_000)
    assert request["engine_first_token_ns"] == first
    assert stage["scheduled_ns"] == request["scheduled_ns"] == first - 20_000_000
    assert (request["prompt_tokens"], request["output_tokens"], stage["cached_tokens"]) == (7, 2, 1)


async def test_durations_that_contradict_the_clock_are_left_out(tmp_path: Path) -> None:
    timings = ',"timings":{"cache_n":0,"prompt_n":1,"prompt_ms":60000.0,"predicted_n":1,"predicted_ms":0.1}'
    async with serve(Toy([token("a", "length", timings), DONE])) as toy, running(toy, tmp_path) as run:
        await post(run.url)
        await run.settled()
        assert run.rows("stages")[0]["scheduled_ns"] is None


async def test_non_streaming_answers(tmp_path: Path) -> None:
    answer = json.dumps(
        {"id": "n", "choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}],
         "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    ).encode()  # fmt: skip
    toy = Toy([answer[:20], 0.01, answer[20:]], headers={"Content-Type": "application/json"}, length=len(answer))
    async with serve(toy), running(toy, tmp_path) as run:
        assert (await post(run.url, path="/v1/chat/completions"))[1] == answer
        await run.settled()
        (request,) = run.rows("requests")
        assert run.rows("tokens") == []
    assert (request["output_tokens"], request["prompt_tokens"], request["finish_reason"]) == (2, 5, "stop")
    assert request["first_token_ns"] is None and request["finish_ns"] is not None


@pytest.mark.parametrize(("status", "reason"), [(400, "refused"), (503, "refused"), (500, "failed")])
async def test_http_errors(tmp_path: Path, status: int, reason: str) -> None:
    answer = b'{"error": {"message": "your prompt was ...", "type": "exceed_context_size_error", "code": 400}}'
    toy = Toy([answer], status=status, headers={"Content-Type": "application/json"}, length=len(answer))
    async with serve(toy), running(toy, tmp_path) as run:
        assert await post(run.url) == (status, answer)
        await run.settled()
        (request,), (stage,) = run.rows("requests"), run.rows("stages")
    assert request["error"] == f"HTTP {status}: exceed_context_size_error 400"
    assert stage["end_reason"] == reason
    assert run.recorder.stats.failed == 1


async def test_a_stream_that_breaks_is_seen_broken_by_the_client(tmp_path: Path) -> None:
    async with serve(Toy([token("a"), 0.01, token("b"), "break"])) as toy, running(toy, tmp_path) as run:
        async with aiohttp.ClientSession() as client, client.post(run.url + "/v1/completions", json=ASK) as answer:
            got = b""
            with pytest.raises(aiohttp.ClientPayloadError):
                while True:
                    got += await answer.content.readany()
        assert got == token("a") + token("b")
        await run.settled()
        (request,), (stage,) = run.rows("requests"), run.rows("stages")
        assert len(run.rows("tokens")) == 2
    assert "the server broke off" in request["error"]
    assert stage["end_reason"] == "failed" and stage["end_ns"] is not None


async def test_a_client_that_leaves_cancels_the_servers_work(tmp_path: Path) -> None:
    async with serve(Toy([token("a"), "hang"])) as toy, running(toy, tmp_path) as run:
        async with aiohttp.ClientSession() as client:
            async with client.post(run.url + "/v1/completions", json=ASK) as answer:
                assert await answer.content.readany() == token("a")
                answer.close()
            await asyncio.wait_for(toy.cancelled.wait(), 10)
        await run.settled()
        (request,), (stage,) = run.rows("requests"), run.rows("stages")
    assert stage["end_reason"] == "cancelled"
    assert request["error"] == "the client closed the connection"
    assert run.recorder.stats.cancelled == 1


async def test_a_client_that_leaves_before_the_first_byte(tmp_path: Path) -> None:
    toy = Toy([])
    toy.handle = _never(toy)  # type: ignore[method-assign]
    async with serve(toy), running(toy, tmp_path) as run, aiohttp.ClientSession() as client:
        with pytest.raises(TimeoutError):
            await client.post(run.url + "/v1/completions", json=ASK, timeout=aiohttp.ClientTimeout(total=0.2))
        await asyncio.wait_for(toy.cancelled.wait(), 10)
        await run.settled()
        assert run.rows("stages")[0]["end_reason"] == "cancelled"


def _never(toy: Toy) -> Any:
    async def handle(request: Any) -> Any:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            toy.cancelled.set()
            raise

    return handle


async def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    async with serve(Toy()) as toy:
        pass
    async with running(toy, tmp_path) as run:
        status, body = await post(run.url)
        await run.settled()
        (request,), (stage,) = run.rows("requests"), run.rows("stages")
    assert status == 502 and json.loads(body)["error"]["type"] == "proxy_error"
    assert "can't be reached" in request["error"] and stage["end_reason"] == "failed"


async def test_a_slow_client_gets_every_byte(tmp_path: Path) -> None:
    steps = [token("x" * 50_000) for _ in range(60)]
    async with serve(Toy([*steps, DONE])) as toy, running(toy, tmp_path) as run:
        got = b""
        async with (
            aiohttp.ClientSession(read_bufsize=1024) as client,
            client.post(run.url + "/v1/completions", json=ASK) as answer,
        ):
            await asyncio.sleep(0.3)
            async for piece in answer.content.iter_any():
                got += piece
        await run.settled()
        assert got == joined(steps) + DONE
        assert len(run.rows("tokens")) == 60


@pytest.mark.parametrize("method", ["_emit", "_end", "_describe", "_moves"])
async def test_a_recorder_that_raises_never_disturbs_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def raises(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Exchange, method, raises)
    async with serve(Toy(STREAM)) as toy, running(toy, tmp_path) as run:
        assert await post(run.url) == (200, joined(STREAM))
        for _ in range(300):
            if run.recorder.stats.faults:
                break
            await asyncio.sleep(0.01)
        assert run.recorder.stats.faults == 1
        assert run.writer.manifest.rows_dropped == {"proxy recorder: RuntimeError": 1}


async def test_a_recorder_that_cannot_even_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted")

    async with serve(Toy(STREAM)) as toy, running(toy, tmp_path) as run:
        monkeypatch.setattr(run.writer, "append", raises)
        monkeypatch.setattr(run.writer, "drop", raises)
        assert await post(run.url) == (200, joined(STREAM))
        for _ in range(300):
            if run.recorder.stats.faults:
                break
            await asyncio.sleep(0.01)
        assert run.recorder.stats.faults == 1


async def test_paths_queries_methods_and_headers_pass(tmp_path: Path) -> None:
    def get(request: Any) -> Any:
        from aiohttp import web

        answer = web.Response(status=207, reason="Odd", body=b"body", headers={"X-A": "1", "Connection": "x-hop", "X-Hop": "1"})
        answer.headers.add("Set-Cookie", "a=1")
        answer.headers.add("Set-Cookie", "b=2")
        return answer

    async with serve(Toy(get=get)) as toy, running(toy, tmp_path) as run, aiohttp.ClientSession() as client:
        for method in ("GET", "DELETE", "PUT", "OPTIONS"):
            headers = {"X-B": "2", "Connection": "x-mine", "X-Mine": "1", "Accept-Encoding": "gzip"}
            async with client.request(method, run.url + "/some%2Fpath/é?q=a%20b&q=2", headers=headers) as answer:
                assert (answer.status, answer.reason, await answer.read()) == (207, "Odd", b"body")
                assert answer.headers["X-A"] == "1"
                assert answer.headers.getall("Set-Cookie") == ["a=1", "b=2"]
        async with client.head(run.url + "/x") as answer:
            assert answer.status == 207 and answer.headers["Content-Length"] == "4"
        assert [r[0] for r in toy.requests] == ["GET", "DELETE", "PUT", "OPTIONS", "HEAD"]
        assert toy.requests[0][1] == "/some%2Fpath/%C3%A9?q=a%20b&q=2"
        asked = {k.lower(): v for k, v in toy.requests[0][2].items()}
        assert asked["x-b"] == "2" and "x-mine" not in asked and asked["accept-encoding"] == "gzip"
        assert asked["host"] == toy.url.removeprefix("http://")
        assert run.rows("requests") == []


async def test_a_url_with_a_path_before_v1(tmp_path: Path) -> None:
    async with serve(Toy(STREAM)) as toy, running(toy, tmp_path, prefix="/engine/v1") as run:
        await post(run.url)
        await post(run.url, path="/engine/v1/completions")
        await run.settled(2)
    assert [r[1] for r in toy.requests] == ["/engine/v1/completions"] * 2


async def test_big_bodies_pass_in_full(tmp_path: Path) -> None:
    body = ASK | {"prompt": "y" * (9 << 20)}
    async with serve(Toy(STREAM)) as toy:
        toy.handle = _counting(toy)  # type: ignore[method-assign]
        async with serve(toy), running(toy, tmp_path) as run:
            async with aiohttp.ClientSession() as client:
                async with client.post(run.url + "/v1/completions", json=body) as answer:
                    assert await answer.text() == str(len(json.dumps(body)))
                async with client.post(run.url + "/v1/embeddings", data=b"z" * (3 << 20)) as answer:
                    assert await answer.text() == str(3 << 20)
            await run.settled()
            (request,) = run.rows("requests")
            assert [m["bytes"] for m in run.rows("moves") if m["object"] == "prompt"] == [len(json.dumps(body))]
    assert request["prompt_chars"] is None, "too large to read: unknown, not zero"


def _counting(toy: Toy) -> Any:
    async def handle(request: Any) -> Any:
        from aiohttp import web

        size = 0
        async for piece in request.content.iter_any():
            size += len(piece)
        return web.Response(text=str(size))

    return handle


async def test_a_compressed_answer_passes_unchanged_and_is_read(tmp_path: Path) -> None:
    data = gzip.compress(token("a") + token("b", "length", USAGE.replace("3", "2")) + DONE)
    headers = {"Content-Type": "text/event-stream", "Content-Encoding": "gzip"}
    async with serve(Toy([data], headers=headers)) as toy, running(toy, tmp_path) as run:
        assert (await post(run.url))[1] == data
        await run.settled()
        assert len(run.rows("tokens")) == 2
    async with serve(Toy([b"???"], headers=headers | {"Content-Encoding": "br"})) as toy, running(toy, tmp_path / "b") as run:
        assert (await post(run.url))[1] == b"???"
        await run.settled()
        assert run.rows("requests")[0]["output_tokens"] is None


async def test_http_1_0_clients_and_absolute_targets(tmp_path: Path) -> None:
    async with serve(Toy(STREAM)) as toy, running(toy, tmp_path) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.proxy.port)
        body = json.dumps(ASK).encode()
        target = b"http://example.invalid/v1/completions"
        writer.write(b"POST %s HTTP/1.0\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s" % (target, len(body), body))
        answer = await reader.read()
        writer.close()
        await run.settled()
    assert answer.endswith(b"\r\n\r\n" + joined(STREAM))
    assert b"chunked" not in answer.lower()


async def test_a_connection_of_ones_own_is_used_again_and_ends_when_the_servers_ends(tmp_path: Path) -> None:
    async with serve(Toy(STREAM), idle_s=0.3) as toy, running(toy, tmp_path) as run:
        async with aiohttp.ClientSession() as client:
            for _ in range(3):
                async with client.post(run.url + "/v1/completions", json=ASK) as answer:
                    assert await answer.read() == joined(STREAM)
            assert len(toy.connections) == 1
            # llama.cpp closes idle connections after five seconds: the client must see it, or its next request would be lost.
            for _ in range(500):
                if not run.proxy.clients:
                    break
                await asyncio.sleep(0.01)
            assert not run.proxy.clients
            async with client.post(run.url + "/v1/completions", json=ASK) as answer:
                assert await answer.read() == joined(STREAM)
        assert len(toy.connections) == 2


async def test_many_streams_at_once(tmp_path: Path) -> None:
    async with serve(Toy(STREAM)) as toy, running(toy, tmp_path) as run:
        answers = await asyncio.gather(*(post(run.url) for _ in range(150)))
        await run.settled(150)
        assert set(answers) == {(200, joined(STREAM))}
        assert len(run.rows("tokens")) == 450
        assert sorted(r["request"] for r in run.rows("requests")) == list(range(150))


def test_a_port_that_is_taken() -> None:
    sock = listen("127.0.0.1", 0)
    try:
        with pytest.raises(EnvironmentProblem, match="already in use") as caught:
            listen("127.0.0.1", sock.getsockname()[1])
        assert caught.value.hint
        with pytest.raises(EnvironmentProblem):
            listen("192.0.2.1", 0)
    finally:
        sock.close()


async def _raw(url: str, *pieces: bytes | float, half: bool = False) -> tuple[bytes, float]:
    """Send pieces and pauses over a socket; gives what came back, and after how long its first byte came."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    loop = asyncio.get_running_loop()
    try:
        for piece in pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
            else:
                await asyncio.sleep(piece)
        if half:
            writer.write_eof()
        began = loop.time()
        first = await asyncio.wait_for(reader.read(1 << 16), 5.0)
        after = loop.time() - began
        return first + await asyncio.wait_for(reader.read(), 5.0), after
    finally:
        writer.close()


def _head(body: bytes, *more: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}", *more, "", ""]
    return "\r\n".join(lines).encode()


async def test_the_clients_upload_is_not_the_proxys_wait(tmp_path: Path) -> None:
    body = json.dumps(ASK).encode()
    async with serve(Toy(STREAM)) as toy, running(toy, tmp_path) as run:
        await _raw(run.url, _head(body) + body[:9], 0.4, body[9:])
        await run.settled()
        (request,), (wait,), (stage,) = run.rows("requests"), run.rows("waits"), run.rows("stages")
        prompt = next(m for m in run.rows("moves") if m["object"] == "prompt")
    assert wait["end_ns"] - wait["start_ns"] < 200_000_000
    assert request["received_ns"] == request["arrival_ns"] == wait["start_ns"]
    assert stage["enqueued_ns"] - request["received_ns"] < 200_000_000
    assert prompt["end_ns"] - prompt["start_ns"] >= 400_000_000


async def test_what_the_end_of_the_capture_cuts_is_not_the_clients_doing(tmp_path: Path) -> None:
    async with serve(Toy([token("a"), "hang"])) as toy, running(toy, tmp_path) as run:
        asking = asyncio.create_task(post(run.url))
        while not run.rows("tokens"):
            await asyncio.sleep(0.01)
        await run.proxy.close()
        with pytest.raises(aiohttp.ClientError):
            await asking
        (request,) = run.rows("requests")
    assert request["error"] == "the capture ended"


def _two(total: str = "") -> list[bytes]:
    pieces = [(0, "a", None), (1, "b", None), (0, "c", "length"), (1, "d", "length")]
    chunks = [{"id": "c1", "choices": [{"index": i, "text": t, "finish_reason": r}]} for i, t, r in pieces]
    return [event(json.dumps(c)) for c in chunks] + ([event(total)] if total else []) + [DONE]


@pytest.mark.parametrize(("told", "output", "prompt"), [(2, 4, None), (4, 4, 3)])
async def test_a_total_of_one_sequence_among_several(tmp_path: Path, told: int, output: int, prompt: int | None) -> None:
    usage = f'{{"choices":[],"usage":{{"prompt_tokens":3,"completion_tokens":{told}}},"timings":{{"prompt_ms":1}}}}'
    async with serve(Toy(_two(usage))) as toy, running(toy, tmp_path) as run:
        await post(run.url, ASK | {"prompt": ["x", "y"]})
        await run.settled()
        (request,) = run.rows("requests")
    assert (request["output_tokens"], request["prompt_tokens"], request["scheduled_ns"]) == (output, prompt, None)
    assert run.recorder.stats.totals_of_one == (output != told)


async def test_a_total_of_one_sequence_without_a_stream(tmp_path: Path) -> None:
    choices = [{"index": i, "text": "ab", "finish_reason": "length"} for i in (0, 1)]
    answer = {"choices": choices, "usage": {"completion_tokens": 2}, "timings": {"predicted_n": 2}}
    toy = Toy([json.dumps(answer).encode()], headers={"Content-Type": "application/json"})
    async with serve(toy) as toy, running(toy, tmp_path) as run:
        await post(run.url, {"prompt": "x", "n": 2})
        await run.settled()
        (request,) = run.rows("requests")
    assert request["output_tokens"] is None and request["error"] is None


async def test_when_a_server_stopped_for_a_client_that_left_is_unknown_without_a_stream(tmp_path: Path) -> None:
    async with serve(Toy(["hang"], headers={"Content-Type": "application/json"})) as toy, running(toy, tmp_path) as run:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(run.url, {"prompt": "x"}), 0.3)
        await run.settled()
        (stage,), (request,) = run.rows("stages"), run.rows("requests")
    assert stage["end_reason"] == "cancelled" and stage["end_ns"] is None
    assert request["finish_ns"] is not None
