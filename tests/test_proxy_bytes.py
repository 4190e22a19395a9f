"""What passes through the proxy is what passes without it: any bytes, any cut, any end of a connection. On both loops."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.raw import between, both_loops, connect, raw_server, until

from hoptrace.collectors.engines.streams import relay

ASK = b"POST /v1/completions HTTP/1.1\r\nHost: me\r\nContent-Length: 2\r\n\r\n{}"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
END = b"0\r\n\r\n"


async def read(reader: asyncio.StreamReader, n: int = -1) -> bytes:
    return await asyncio.wait_for(reader.read() if n < 0 else reader.readexactly(n), 10.0)


def asked(port: int) -> bytes:
    """ASK as the server gets it."""
    return ASK.replace(b"me", b"127.0.0.1:%d" % port)


@both_loops
async def test_a_half_closed_client_gets_its_answer(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.read()).endswith(b"\r\n\r\n{}"), "the end of its sending came through"
        await asyncio.sleep(0.05)
        writer.write(HEAD + CHUNK + END)

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        writer.write(ASK)
        writer.write_eof()
        assert await read(reader) == HEAD + CHUNK + END
        await until(lambda: seen.recorder.stats.finished == 1)
        writer.close()


@pytest.mark.parametrize("how", ["close", "reset"])
@both_loops
async def test_a_client_that_leaves_is_gone_at_the_server_at_once(tmp_path: Path, how: str) -> None:
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(HEAD + CHUNK)
        try:
            assert await reader.read() == b"" and how == "close"
        except ConnectionResetError:
            assert how == "reset"
        gone.set()

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        writer.write(ASK)
        await read(reader, len(HEAD + CHUNK))
        if how == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()
        await asyncio.wait_for(gone.wait(), 2.0)
        await seen.quiet()
        assert seen.recorder.stats.cancelled == 1
        (row,) = seen.rows("requests")
    assert row["error"] == "the client closed the connection" and row["finish_ns"] >= row["last_token_ns"]


@both_loops
async def test_a_server_that_goes_on_for_a_client_that_left(tmp_path: Path) -> None:
    """It does not look whether the client is there: as without us, its writing fails."""
    failed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(HEAD)
        try:
            while True:
                writer.write(CHUNK)
                await writer.drain()
                await asyncio.sleep(0.005)
        except ConnectionError:
            failed.set()
            raise

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        writer.write(ASK)
        await read(reader, len(HEAD + CHUNK))
        writer.close()
        await asyncio.wait_for(failed.wait(), 5.0)
        await seen.quiet()
        assert seen.recorder.stats.cancelled == 1


@both_loops
async def test_a_server_that_resets_is_a_reset(tmp_path: Path) -> None:
    """An answer without a length ends with the connection: a reset must not look like its end."""
    until_close = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + EVENT

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(until_close)
        await asyncio.sleep(0.1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        writer.write(ASK)
        assert await read(reader, len(until_close)) == until_close
        with pytest.raises(ConnectionResetError):
            await read(reader)
        writer.close()
        await until(lambda: seen.recorder.stats.failed == 1)
        (row,) = seen.rows("requests")
    assert row["error"] == "the server broke off in the middle of its answer"


@both_loops
async def test_a_server_that_closes_in_mid_answer(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(HEAD + CHUNK)

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        writer.write(ASK)
        assert await read(reader) == HEAD + CHUNK
        writer.close()
        await until(lambda: seen.recorder.stats.failed == 1)


@both_loops
async def test_leave_to_send_a_body_is_the_servers_to_give(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"Expect: 100-continue" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await reader.readexactly(2) == b"{}"
        writer.write(HEAD + CHUNK + END)

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        head, body = ASK.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")[:-2], b"{}"
        writer.write(head)
        assert await read(reader, 25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert await read(reader) == HEAD + CHUNK + END
        await until(lambda: seen.recorder.stats.finished == 1)
        assert seen.recorder.stats.tokens == 1
        writer.close()


@both_loops
async def test_another_protocol_passes(tmp_path: Path) -> None:
    agreed = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"Upgrade: websocket" in await reader.readuntil(b"\r\n\r\n")
        writer.write(agreed + b"\x81\x02hi")
        while piece := await reader.read(99):
            writer.write(piece[::-1])

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        writer.write(b"GET /v1/realtime HTTP/1.1\r\nHost: me\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert await read(reader, len(agreed) + 4) == agreed + b"\x81\x02hi"
        for frame in (b"\x81\x03abc", b"GET / HTTP/1.1\r\nHost: me\r\n\r\n"):
            writer.write(frame)
            assert await read(reader, len(frame)) == frame[::-1]
        writer.close()
        await seen.quiet()
        assert seen.recorder.stats.faults == 0


@both_loops
async def test_a_client_that_does_not_read_stops_the_server(tmp_path: Path) -> None:
    total, sent = 48 << 20, 0
    block = b":" + b"x" * 99_998 + b"\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % total)
        writer.transport.set_write_buffer_limits(high=0)
        while sent < total:
            piece = block[: total - sent]
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", seen.proxy.port))
        await loop.sock_sendall(sock, ASK)
        await until(lambda: sent > 0)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 32 << 20, "what is not read is not taken from the server"
        held = sum(c.transport.get_write_buffer_size() for c in seen.proxy.clients)
        assert held <= relay._HIGH_BYTES + (1 << 18)
        got = 0
        while got < total:
            piece = await loop.sock_recv(sock, 1 << 20)
            assert piece
            got += len(piece)
            if piece.startswith(b"HTTP/1.1"):
                got -= piece.index(b"\r\n\r\n") + 4
        sock.close()
        await until(lambda: seen.recorder.stats.finished == 1, 30.0)
        assert sent == total


@both_loops
async def test_a_server_that_does_not_read_stops_the_client(tmp_path: Path) -> None:
    go = asyncio.Event()
    size = 48 << 20

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await go.wait()
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        got = 0
        while got < size:
            got += len(await reader.read(1 << 20))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: me\r\nContent-Length: %d\r\n\r\n" % size)
        writer.transport.set_write_buffer_limits(high=0)
        stuck = asyncio.create_task(_pour(writer, size))
        await asyncio.sleep(0.6)
        assert not stuck.done()
        (client,) = seen.proxy.clients
        assert client.server is not None and client.server.transport.get_write_buffer_size() <= relay._HIGH_BYTES + (1 << 18)
        go.set()
        await asyncio.wait_for(stuck, 20.0)
        assert (await read(reader, 38)).startswith(b"HTTP/1.1 200")
        writer.close()


async def _pour(writer: asyncio.StreamWriter, size: int) -> None:
    for _ in range(size >> 20):
        writer.write(b"y" * (1 << 20))
        await writer.drain()


@both_loops
async def test_an_answer_before_the_request_is_whole_arrives(tmp_path: Path) -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(refusal)
        writer.write_eof()
        await asyncio.sleep(0.3)

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        writer.write(ASK.replace(b"Length: 2", b"Length: 999999")[:-2] + b"z" * 5000)
        got = await read(reader, len(refusal))
        for _ in range(20):
            writer.write(b"z" * 5000)
            await asyncio.sleep(0.005)
        assert got == refusal and await read(reader) == b""
        await until(lambda: seen.recorder.stats.failed == 1)
        writer.close()
        (stage,) = seen.rows("stages")
    assert stage["end_reason"] == "refused"


@both_loops
async def test_a_server_that_restarts(tmp_path: Path) -> None:
    served: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(writer)
        while await reader.readuntil(b"{}"):
            writer.write(HEAD + CHUNK + END)

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        for _ in range(2):
            writer.write(ASK)
            assert await read(reader, len(HEAD + CHUNK + END)) == HEAD + CHUNK + END
        served[0].close()
        assert await read(reader) == b"", "the idle connection ends, as it would without us"
        writer.close()
        reader, writer = await connect(seen.proxy.port)
        writer.write(ASK)
        assert await read(reader, len(HEAD + CHUNK + END)) == HEAD + CHUNK + END
        writer.close()
        await seen.quiet()
        assert (seen.recorder.stats.finished, seen.recorder.stats.failed) == (3, 0)


@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
@both_loops
async def test_no_server_is_said_after_the_request_and_recorded(tmp_path: Path, method: bytes) -> None:
    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))
    async with between(f"http://127.0.0.1:{probe.getsockname()[1]}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        await asyncio.sleep(0.05)
        writer.write(ASK.replace(b"POST", method)[:-1])
        await asyncio.sleep(0.05)
        writer.write(b"}")
        got = await read(reader)
        assert got.startswith(b"HTTP/1.1 502 ") and (b"Connection refused" in got) == (method == b"POST")
        writer.close()
        await seen.quiet()
        assert seen.recorder.stats.failed == (method == b"POST")
        if method == b"POST":
            assert seen.rows("requests")[0]["error"] == "the server can't be reached (Connection refused)"
    probe.close()


@both_loops
async def test_a_server_that_is_there_only_when_it_is_asked(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(HEAD + CHUNK + END)

    async with raw_server(answer) as port:
        pass
    async with between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        reader, writer = await connect(seen.proxy.port)
        await until(lambda: any(c.refused for c in seen.proxy.clients))
        async with raw_server(answer, port=port):
            writer.write(ASK)
            assert await read(reader) == HEAD + CHUNK + END
        writer.close()


@both_loops
async def test_nothing_leaks(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        n = 0
        while await reader.readuntil(b"{}"):
            n += 1
            writer.write(HEAD + CHUNK + (END if n % 2 else b""))

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        before = descriptors()
        for i in range(120):
            reader, writer = await connect(seen.proxy.port)
            if i % 4:
                writer.write(ASK * (i % 4))
                await read(reader, len(HEAD + CHUNK))
            if i % 3:
                writer.close()
            else:
                writer.transport.abort()
        await seen.quiet()
        await until(lambda: descriptors() <= before + 2)
        assert seen.recorder.stats.in_flight == 0


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
@both_loops
async def test_ipv6(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"Host: [::1]:" in await reader.readuntil(b"{}")
        writer.write(HEAD + CHUNK + END)

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    async with raw_server(answer, "::1") as port, between(f"http://[::1]:{port}", tmp_path, "::1") as seen:
        assert seen.proxy.url == f"http://[::1]:{seen.proxy.port}"
        reader, writer = await connect(seen.proxy.port, "::1")
        writer.write(ASK)
        assert await read(reader) == HEAD + CHUNK + END
        writer.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    ask = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*ask.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    yield cert, key


@both_loops
async def test_a_server_behind_tls(tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(HEAD + CHUNK + END + HEAD + CHUNK)
        try:
            await reader.read()
        finally:
            gone.set()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with raw_server(answer, "localhost", ssl=context) as port:
        async with between(f"https://localhost:{port}", tmp_path / "untrusted") as seen:
            reader, writer = await connect(seen.proxy.port)
            writer.write(ASK)
            assert b"its certificate is not trusted" in await read(reader)
            writer.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        async with between(f"https://localhost:{port}", tmp_path / "trusted") as seen:
            reader, writer = await connect(seen.proxy.port)
            writer.write(ASK + ASK)
            assert await read(reader, 2 * len(HEAD + CHUNK) + len(END)) == HEAD + CHUNK + END + HEAD + CHUNK
            writer.close()
            await asyncio.wait_for(gone.wait(), 5.0)
            await seen.quiet()
            assert (seen.recorder.stats.finished, seen.recorder.stats.cancelled) == (1, 1)


@both_loops
async def test_the_end_of_the_capture_takes_a_second_at_most(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(HEAD + CHUNK)
        await asyncio.sleep(0.3)
        writer.write(CHUNK + END)
        await reader.readuntil(b"{}")
        writer.write(HEAD + CHUNK)
        await reader.read()

    async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", tmp_path) as seen:
        idle, _ = await connect(seen.proxy.port)
        reader, writer = await connect(seen.proxy.port)
        writer.write(ASK)
        await read(reader, len(HEAD + CHUNK))
        writer.write(ASK)
        closing = asyncio.create_task(seen.proxy.close())
        assert await read(idle) == b""
        assert (await read(reader)).startswith(CHUNK + END)
        await asyncio.wait_for(closing, 3.0)
        first, second = seen.rows("requests")
        writer.close()
    assert (first["error"], second["error"]) == (None, "the capture ended")
    assert not seen.proxy.clients


ODD = b"HTTP/1.1 404 No\r\nConnection: keep-alive, x-y\r\nX-Y: 1\r\nContent-Length: %d\r\n\r\n%s"
_piece = st.binary(min_size=1, max_size=40)
_answers = st.one_of(
    st.lists(_piece, max_size=4).map(lambda c: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
             + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in c) + b"0\r\n\r\n"),
    st.binary(max_size=80).map(lambda b: ODD % (len(b), b)),
    st.sampled_from([b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n"]),
    st.just(HEAD + CHUNK + CHUNK + END),
)  # fmt: skip


def _cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        n = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + n])
        at += n
    return pieces


@given(
    st.lists(st.tuples(st.binary(max_size=60), _answers), min_size=1, max_size=4),
    st.lists(st.integers(1, 90), min_size=1, max_size=8),
    st.lists(st.integers(1, 90), min_size=1, max_size=8),
)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_conversations_pass_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[bytes, bytes]], asks: list[int], answers: list[int]
) -> None:
    sent = b"".join(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(b), b) for b, _ in turns)
    told = b"".join(a for _, a in turns)
    got: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.readexactly(len(sent)))
        for piece in _cut(told, answers):
            writer.write(piece)
            await asyncio.sleep(0)
        got.append(await reader.read())

    async def talk() -> bytes:
        path = tmp_path_factory.mktemp("bytes")
        async with raw_server(answer) as port, between(f"http://127.0.0.1:{port}", path) as seen:
            reader, writer = await connect(seen.proxy.port)
            for piece in _cut(sent, asks):
                writer.write(piece)
                await asyncio.sleep(0)
            back = await read(reader, len(told))
            writer.close()
            await until(lambda: len(got) == 2)
            await seen.quiet()
            s = seen.recorder.stats
            assert (s.faults, s.in_flight, s.started) == (0, 0, len(turns))
            return back

    runner = asyncio.run if sys.version_info < (3, 12) and len(asks) % 2 else uvloop.run
    assert runner(talk()) == told
    assert got == [sent, b""]
