"""The OTLP receiver: both doors, what is refused and how, bounds, whose a span is, and the rows in the trace."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from support.context import KEY, context, events, rows
from support.spans import S, as_json, message, vllm_span

import hoptrace
from hoptrace.collectors.engines.published import otlp
from hoptrace.collectors.engines.published.otlp import OtlpReceiver
from hoptrace.collectors.engines.published.otlp_ports import MAX_BODY_BYTES
from hoptrace.manifest import Server
from hoptrace.validate import validate

MS = 1_000_000
PROTOBUF = {"Content-Type": "application/x-protobuf"}
Use = Callable[[OtlpReceiver], Awaitable[Any]]


def _now() -> int:
    return time.time_ns() - 2 * S


def capture(folder: Path, use: Use, *, primary: bool = False, **options: Any) -> tuple[Any, dict[str, int]]:
    """Run a receiver on free ports into the trace ``folder``; gives what ``use`` gave and what was dropped."""

    async def go(ctx: Any) -> Any:
        ctx.links.primary = primary
        servers = options.pop("servers", [ctx.server])
        receiver = OtlpReceiver(
            ctx.writer, ctx.links, ctx.host, ("127.0.0.1", 0), ("127.0.0.1", 0), servers=servers, key=ctx.key, **options
        )
        assert (await receiver.probe()).available
        await receiver.start()
        try:
            given = await use(receiver)
            await receiver.sample()
        finally:
            await receiver.close()
            ctx.links.settle()
        return given

    with context(folder) as ctx:
        given = asyncio.run(go(ctx))
        dropped = dict(ctx.writer.manifest.rows_dropped)
    return given, dropped


async def post(receiver: OtlpReceiver, body: bytes, headers: dict[str, str] | None = None, path: str = "/v1/traces") -> Any:
    url = f"http://127.0.0.1:{receiver.http.port}{path}"
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers or PROTOBUF) as answer:
        return answer.status, answer.content_type, await answer.read()


async def export(receiver: OtlpReceiver, body: bytes, **options: Any) -> bytes:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{receiver.grpc.port}") as channel:
        call = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        answer: bytes = await call(body, timeout=20, **options)
        return answer


# -- doors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["http", "gzip", "json", "grpc", "grpc-gzip"])
def test_every_door_gives_the_same_rows(tmp_path: Path, door: str) -> None:
    start = _now()
    body = message(vllm_span(0, start), vllm_span(1, start + 50 * MS))

    async def use(receiver: OtlpReceiver) -> Any:
        if door == "grpc":
            return await export(receiver, body)
        if door == "grpc-gzip":
            return await export(receiver, body, compression=grpc.Compression.Gzip)
        if door == "json":
            return await post(receiver, json.dumps(as_json(body)).encode(), {"Content-Type": "application/json; charset=utf-8"})
        if door == "gzip":
            return await post(receiver, gzip.compress(body), PROTOBUF | {"Content-Encoding": "gzip"})
        return await post(receiver, body)

    given, dropped = capture(tmp_path / "t.trace", use)
    if door.startswith("grpc"):
        assert given == ExportTraceServiceResponse().SerializeToString() == b""
    elif door == "json":
        assert given == (200, "application/json", b"{}")
    else:
        assert given == (200, "application/x-protobuf", b"")
    frame = rows(tmp_path / "t.trace", "requests")
    assert dropped == {} and frame.height == 2
    got = frame.row(0, named=True)
    began = got["arrival_ns"]
    # The trace clock is the wall clock less what it has been set since the start: nothing, or some microseconds.
    assert abs(began - start) < 5 * MS and got["received_ns"] == began and got["arrival_of"] == "received"
    assert (got["queued_ns"] - began, got["scheduled_ns"] - began, got["engine_first_token_ns"] - began) == (
        20 * MS, 40 * MS, 100 * MS,
    )  # fmt: skip
    assert (got["first_token_ns"] - began, got["finish_ns"] - began) == (100 * MS, 400 * MS)
    assert (got["prompt_tokens"], got["output_tokens"], got["max_tokens"], got["request_id"]) == (50, 7, 7, "cmpl-r0")
    stage = rows(tmp_path / "t.trace", "stages").row(0, named=True)
    assert (stage["server"], stage["engine_request_id"], stage["end_ns"] - began) == ("s", "cmpl-r0-0", 390 * MS)
    assert frame["source"].unique().to_list() == ["otlp"]
    assert not [f for f in validate(hoptrace.open(tmp_path / "t.trace")) if f.level == "error"]


def test_a_partial_success_says_what_was_not_kept(tmp_path: Path) -> None:
    body = message(vllm_span(0, _now()), vllm_span(1, start=0), vllm_span(2, id=""))

    async def use(receiver: OtlpReceiver) -> Any:
        return (
            await post(receiver, body),
            await post(receiver, json.dumps(as_json(body)).encode(), {"Content-Type": "application/json"}),
            await export(receiver, body),
        )

    (a, b, c), dropped = capture(tmp_path / "t.trace", use)
    for answer in (a[2], c):
        told = ExportTraceServiceResponse()
        told.ParseFromString(answer)
        assert told.partial_success.rejected_spans == 2
        assert told.partial_success.error_message == "span without a start time; span without an identifier"
    assert json.loads(b[2]) == {"partialSuccess": {
        "rejectedSpans": "2", "errorMessage": "span without a start time; span without an identifier"}}  # fmt: skip
    assert a[0] == b[0] == 200
    # The good span came three times: once is counted.
    assert rows(tmp_path / "t.trace", "requests").height == 1
    assert dropped == {
        "otlp: span without a start time": 3, "otlp: span without an identifier": 3,
        "otlp: span that had come before (sent again)": 2,
    }  # fmt: skip


def test_what_is_refused(tmp_path: Path) -> None:
    good = message(vllm_span(0, _now()))

    async def use(receiver: OtlpReceiver) -> Any:
        answers = [
            await post(receiver, b"\xff\xff no protobuf"),
            await post(receiver, b"{", {"Content-Type": "application/json"}),
            await post(receiver, b"[]", {"Content-Type": "application/json"}),
            await post(receiver, b"x", {"Content-Type": "text/plain"}),
            await post(receiver, b"not gzip", PROTOBUF | {"Content-Encoding": "gzip"}),
            # 20 KB that unpack to 20 MB
            await post(receiver, gzip.compress(bytes(MAX_BODY_BYTES + (4 << 20))), PROTOBUF | {"Content-Encoding": "gzip"}),
            await post(receiver, b"", PROTOBUF, "/v1/metrics"),
        ]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await export(receiver, b"\xff\xff no protobuf")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{receiver.grpc.port}") as channel:
                await channel.unary_unary("/opentelemetry.proto.collector.metrics.v1.MetricsService/Export")(b"", timeout=20)
        after = await post(receiver, good)
        return [a[0] for a in answers], refused.value.code(), unknown.value.code(), after[0], answers[0], answers[1]

    given, dropped = capture(tmp_path / "t.trace", use)
    statuses, refused, unknown, after, first, second = given
    assert statuses == [400, 400, 400, 415, 400, 413, 404]
    assert (refused, unknown) == (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    assert after == 200, "and goes on"
    assert b"no ExportTraceServiceRequest" in first[2] and first[2][:4] == b"\x08\x03\x12" + bytes([len(first[2]) - 4])
    assert json.loads(second[2])["message"] == "it is no JSON"
    assert sum(n for what, n in dropped.items() if "refused" in what) == 6
    assert dropped["otlp: message of an unknown content type"] == 1
    assert dropped["otlp: message to another path than /v1/traces"] == 1
    assert rows(tmp_path / "t.trace", "requests").height == 1


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    async def go(ctx: Any) -> Any:
        with socket.socket() as web, socket.socket() as rpc:
            for s in (web, rpc):
                s.bind(("127.0.0.1", 0))
                s.listen()
            http, grpc_ = web.getsockname(), rpc.getsockname()
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                open_port = free.getsockname()
            one = OtlpReceiver(ctx.writer, ctx.links, "h", open_port, grpc_)
            found = [await one.probe(), await OtlpReceiver(ctx.writer, ctx.links, "h", http, grpc_).probe()]
            await one.start()
            status = (await post(one, message(vllm_span(0, _now()))))[0]
            await one.close()
            return found, status, grpc_[1]

    with context(tmp_path / "t.trace") as ctx:
        found, status, port = asyncio.run(go(ctx))
    assert found[0].available and f"gRPC on 127.0.0.1:{port} is not possible" in (found[0].reason or "")
    assert not found[1].available and "HTTP on" in (found[1].reason or "") and "--otlp" in (found[1].reason or "")
    assert status == 200


def test_the_default_ports() -> None:
    receiver = OtlpReceiver(None, None, "h")
    assert (receiver._address, receiver._grpc_address) == (("127.0.0.1", 4318), ("127.0.0.1", 4317))


def test_what_comes_when_too_many_wait_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_PENDING", 3)
    body = message(*(vllm_span(i, _now()) for i in range(5)))

    async def use(receiver: OtlpReceiver) -> Any:
        return await post(receiver, body)

    given, dropped = capture(tmp_path / "t.trace", use)
    told = ExportTraceServiceResponse()
    told.ParseFromString(given[2])
    assert (told.partial_success.rejected_spans, told.partial_success.error_message) == (2, "hoptrace is behind")
    assert dropped == {"otlp: span that came when too many waited": 2}
    assert rows(tmp_path / "t.trace", "requests").height == 3


# -- into the trace ---------------------------------------------------------------------------------------------------


def test_a_proxy_s_requests_get_the_engine_s_times_and_keep_their_own(tmp_path: Path) -> None:
    start = _now()

    async def go(ctx: Any) -> None:
        ctx.links.primary = True
        receiver = OtlpReceiver(ctx.writer, ctx.links, "h", ("127.0.0.1", 0), ("127.0.0.1", 0), servers=[ctx.server])
        await receiver.start()
        body = message(
            vllm_span(0, start), vllm_span(1, start),
            {"id": "ff" * 8, "kind": 3, "start": start, "attributes": {"gen_ai.operation.name": "chat"}},
        )  # fmt: skip
        await post(receiver, body)
        await receiver.sample()
        number, _ = ctx.links.begin(None, "s")
        ctx.writer.append("requests", [{"request": number, "received_ns": start + 1, "arrival_ns": start + 1, "arrival_of":
                                        "received", "finish_ns": start + 2 * S, "source": "proxy"}])  # fmt: skip
        ctx.links.claim(number, "cmpl-r0")
        await receiver.close()
        ctx.links.settle()

    with context(tmp_path / "t.trace") as ctx:
        asyncio.run(go(ctx))
        dropped = dict(ctx.writer.manifest.rows_dropped)
    seen, unseen = rows(tmp_path / "t.trace", "requests").sort("request").rows(named=True)
    assert (seen["arrival_ns"], seen["finish_ns"]) == (start + 1, start + 2 * S)
    assert seen["scheduled_ns"] is not None and seen["output_tokens"] == 7 and seen["first_token_ns"] is None
    # Nobody else saw the second one: its span's own word stands.
    assert unseen["arrival_ns"] is not None and unseen["first_token_ns"] is not None
    assert dropped == {"otlp: span of a client or gateway, whose requests are seen otherwise": 1}


def test_a_closer_source_s_times_are_left_to_it(tmp_path: Path) -> None:
    async def use(receiver: OtlpReceiver) -> Any:
        return await post(receiver, message(vllm_span(0, _now())))

    capture(tmp_path / "t.trace", use, exact={"s"})
    (row,) = rows(tmp_path / "t.trace", "requests").rows(named=True)
    assert (row["queued_ns"], row["scheduled_ns"], row["engine_first_token_ns"]) == (None, None, None)
    assert row["output_tokens"] == 7 and row["finish_ns"] is not None
    assert rows(tmp_path / "t.trace", "stages").is_empty()


def test_start_up_spans_and_others(tmp_path: Path) -> None:
    start = _now()
    code = {"code.function": "load", "code.namespace": "vllm.x"}

    async def use(receiver: OtlpReceiver) -> Any:
        load = {"id": "01" * 8, "name": "Load weights", "start": start, "end": start + S, "attributes": code}
        await post(receiver, message(load, scope="vllm.model_executor.x", resource={"vllm.process_name": "Worker_0"}))
        await post(receiver, message({"id": "02" * 8, "name": "GET /", "start": start}, scope="http"))
        return receiver.tables

    tables, dropped = capture(tmp_path / "t.trace", use)
    assert tables == (), "nothing has come of it yet: nobody can say that requests are covered"
    assert events(tmp_path / "t.trace", "start-up") == ["Load weights (Worker_0): 1.000 s"]
    notes = hoptrace.open(tmp_path / "t.trace").manifest.notes
    assert notes == [
        "Exporters send spans every five seconds or so: those of the last requests may not have come.",
        "1 spans of http are not about a request to a model, and were left out.",
    ]
    assert dropped == {}


def test_no_span_at_all_is_said(tmp_path: Path) -> None:
    async def use(receiver: OtlpReceiver) -> Any:
        return receiver._named("HTTP")

    where, _ = capture(tmp_path / "t.trace", use)
    (note,) = hoptrace.open(tmp_path / "t.trace").manifest.notes
    assert note.startswith(f"No span came to the OTLP receiver ({where} and 127.0.0.1:")


def test_whose_a_span_is_among_several_servers(tmp_path: Path) -> None:
    servers = [Server(name="a", pid=41), Server(name="b", url="http://10.0.0.1:8000"), Server(name="c", pid=43)]
    start = _now()
    said = [
        {"service.name": "a"}, {"service.name": "other", "vllm.process_id": "43"}, {"service.instance.id": "http://10.0.0.1:8000"},
        {"service.name": "other"},
    ]  # fmt: skip

    async def use(receiver: OtlpReceiver) -> Any:
        for i, resource in enumerate(said):
            await post(receiver, message(vllm_span(i, start), resource=resource))

    capture(tmp_path / "t.trace", use, servers=servers)
    assert rows(tmp_path / "t.trace", "stages").sort("request")["server"].to_list() == ["a", "c", "b", None]


def test_another_host_s_clock_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    ahead = time.time_ns() + 40 * S

    async def use(receiver: OtlpReceiver) -> Any:
        return await post(receiver, message(vllm_span(0, ahead), resource={"host.name": "far", "service.name": "x"}))

    capture(tmp_path / "t.trace", use)
    (row,) = rows(tmp_path / "t.trace", "clock_sync").rows(named=True)
    assert (row["host"], row["clock"], row["uncertainty_ns"], row["source"]) == ("far", "utc", None, "otlp")
    assert abs(row["offset_ns"] - 40 * S - S // 2) < 5 * S
    assert rows(tmp_path / "t.trace", "requests")["arrival_ns"].to_list() == [ahead]
    assert any("far" in n for n in hoptrace.open(tmp_path / "t.trace").manifest.notes)


def test_a_client_s_span_waits_for_the_engine_s(tmp_path: Path) -> None:
    """The client's comes first, from a process of its own; without the engine's it is a request by itself after six seconds."""
    start = _now()
    client = {"id": "aa" * 8, "trace": "11" * 16, "kind": 3, "name": "chat", "start": start - MS, "end": start + S,
              "attributes": {"gen_ai.operation.name": "chat", "gen_ai.conversation.id": "mine"}}  # fmt: skip
    alone = client | {"id": "bb" * 8, "trace": "22" * 16}
    engine = vllm_span(0, start) | {"trace": "11" * 16, "parent": "aa" * 8}

    async def use(receiver: OtlpReceiver) -> Any:
        await post(receiver, message(client, alone, scope="openai"))
        assert await receiver.sample() == 0
        await post(receiver, message(engine))
        return await receiver.sample()

    written, _ = capture(tmp_path / "t.trace", use)
    assert written == 2
    frame = rows(tmp_path / "t.trace", "requests").sort("output_tokens", nulls_last=True)
    assert frame.height == 2
    joined, single = frame.rows(named=True)
    assert joined["arrival_of"] == "sent" and joined["output_tokens"] == 7 and joined["received_ns"] > joined["sent_ns"]
    assert single["output_tokens"] is None and single["received_ns"] is None
    assert joined["session"] == single["session"] and joined["session"] not in (None, "mine")
    assert rows(tmp_path / "t.trace", "stages")["request"].to_list() == [joined["request"]]


def test_without_a_key_no_conversation_is_kept(tmp_path: Path) -> None:
    span = {"id": "aa" * 8, "kind": 3, "start": _now(), "attributes": {"gen_ai.operation.name": "chat", "session.id": "mine"}}
    odd = span | {"id": "ab" * 8, "attributes": span["attributes"] | {"session.id": "x"}}

    async def go(ctx: Any) -> None:
        receiver = OtlpReceiver(ctx.writer, ctx.links, "h", ("127.0.0.1", 0), ("127.0.0.1", 0))
        await receiver.start()
        text = json.dumps(as_json(message(span, odd))).replace('"x"', '"\\ud800"')
        assert (await post(receiver, text.encode(), {"Content-Type": "application/json"}))[0] == 200
        await receiver.close()

    with context(tmp_path / "t.trace") as ctx:
        asyncio.run(go(ctx))
        assert ctx.writer is not None and not ctx.writer.manifest.rows_dropped
    assert rows(tmp_path / "t.trace", "requests")["session"].to_list() == [None, None]


def test_an_exporter_is_not_held_up_by_a_slow_session(tmp_path: Path) -> None:
    """Nobody takes samples: messages are answered all the same."""
    bodies = [message(*(vllm_span(100 * i + k, _now()) for k in range(100))) for i in range(20)]

    async def use(receiver: OtlpReceiver) -> Any:
        answers = await asyncio.gather(*(post(receiver, b) for b in bodies), *(export(receiver, b) for b in bodies))
        return [a[0] for a in answers[:20]]

    statuses, dropped = capture(tmp_path / "t.trace", use)
    assert statuses == [200] * 20
    assert rows(tmp_path / "t.trace", "requests").height == 2000
    assert dropped == {"otlp: span that had come before (sent again)": 2000}


def test_the_key_is_needed_for_equal_sessions() -> None:
    with_key = OtlpReceiver(None, None, "h", key=KEY)
    assert with_key._hashed("a") == with_key._hashed("a") != with_key._hashed("b")
    assert with_key._hashed("\ud800") is not None, "half a character, as JSON may have it"
