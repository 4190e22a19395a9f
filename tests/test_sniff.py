"""The sniffer as a collector: what it says when it can't, what loss leaves in the rows, and real captures on loopback."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from support.frames import Peers
from support.sniffing import Played, Sniffed, needs_right, sniffing
from support.toy_server import Toy, serve, token

from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.streams import capture as capturing
from hoptrace.collectors.engines.streams import sniff
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.engines.streams.packets import SYN, Segment, segment
from hoptrace.collectors.engines.streams.sniff import Sniffer, parse_target
from hoptrace.errors import UsageError
from hoptrace.manifest import Server

KEY = HashKey("test", b"k" * 32)
USAGE = ',"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}'
DONE = b"data: [DONE]\n\n"
STREAM = [token("a"), 0.02, token("b"), 0.02, token("c"), token("", "length", USAGE), DONE]
BODY = json.dumps({"model": "m", "prompt": "x" * 130, "max_tokens": 3, "stream": True}).encode()
ASK = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
URL = "http://10.0.0.1:8000"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("lo:8000", ("lo", 8000)),
        ("any:1", ("any", 1)),
        ("8000", ("any", 8000)),
        (":8000", ("any", 8000)),
        ("br-0f3a.5:65535", ("br-0f3a.5", 65535)),
    ],
)
def test_a_target(text: str, target: tuple[str, int]) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text", ["", "lo", "lo:", "lo:0", "lo:65536", "lo:http", "a/b:80", "lo:80:80", "an-interface-too-long:80", "lo:-1", "lo:８０"]
)
def test_no_target_says_how_to_write_one(text: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_target(text)
    assert e.value.hint is not None and "lo:8000" in e.value.hint


async def found(url: str, iface: str = "lo", port: int = 8000) -> tuple[bool, str]:
    api = Api(url)
    finding = await Sniffer(Context(api, Server(name="s"), "h"), None, iface, port).probe()
    await api.close()
    return finding.available, finding.reason or ""


def refused(error: Exception) -> Any:
    def opened(*told: object) -> Any:
        raise error

    return opened


async def test_why_it_can_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tls = (
        "https://127.0.0.1:8000 is TLS, what passes can't be read: give the URL and port of the plain HTTP server behind what "
        "ends the TLS, or use --proxy"
    )
    assert await found("https://127.0.0.1:8000") == (False, tls)
    can, why = await found("http://127.0.0.1:8000", "nope0")
    assert not can and why.startswith("there is no network interface nope0 here: choose one of ") and "lo" in why
    monkeypatch.setattr(sniff, "Plain", refused(PermissionError(errno.EPERM, "Operation not permitted")))
    can, why = await found("http://127.0.0.1:8000")
    assert not can and all(
        w in why for w in ("CAP_NET_RAW", "sudo setcap cap_net_raw+ep /", "--cap-add NET_RAW", "capabilities.add: [NET_RAW]")
    )
    monkeypatch.setattr(sniff, "Plain", refused(OSError(errno.EAFNOSUPPORT, "Address family not supported")))
    assert await found("http://127.0.0.1:8000") == (
        False,
        "this kernel or sandbox has no packet sockets (AF_PACKET): use --proxy",
    )
    monkeypatch.setattr("sys.platform", "darwin")
    can, why = await found("http://127.0.0.1:8000")
    assert not can and "needs Linux" in why


async def test_what_may_make_it_blind_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sniff, "Plain", lambda *told: Played())
    assert await found("http://127.0.0.1:8000", "any") == (True, "")
    can, why = await found("http://127.0.0.1:8000", "lo")
    assert can and "--sniff any:8000" in why
    can, why = await found("http://127.0.0.1:8000", "any", 8001)
    assert can and why.startswith("packets of port 8001 are read, the URL's port is 8000")
    can, why = await found("http://198.51.100.7:8000", "any")
    assert can and why == "198.51.100.7 is another machine: only packets that pass through this one are seen"
    can, why = await found("http://no-such-host.invalid:8000", "any")
    assert not can and "no address" in why


# -- what loss leaves in the rows -------------------------------------------------------------------------------------


class Script:
    """Packets of one connection for a played capture, 10 ms apart from now on."""

    def __init__(self, sniffed: Sniffed, played: Played) -> None:
        self.peers = Peers()
        self.played, self.sniffed = played, sniffed
        self.zero_ns = self.at_ns = sniffed.writer.clock.now_ns()

    def packet(self, packet: bytes, *, captured: bool = True) -> int:
        """Gives its time on the trace clock, which is the wall clock as long as nobody sets it."""
        self.at_ns += 10_000_000
        if captured:
            self.played.packets.append((packet, self.at_ns + self.sniffed.sniffer._stamps._now))
        return self.at_ns

    def open(self) -> None:
        for packet in self.peers.open():
            self.packet(packet)

    def up(self, data: bytes = b"", *, captured: bool = True) -> int:
        return self.packet(self.peers.up(data), captured=captured)

    def down(self, data: bytes, *, captured: bool = True) -> int:
        return self.packet(self.peers.down(data), captured=captured)


class _Playing:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.played = Played()
        monkeypatch.setattr(sniff, "open_capture", lambda *told: self.played)
        self._around = sniffing(URL, path, iface="any", key=KEY)

    async def __aenter__(self) -> tuple[Sniffed, Script]:
        self.sniffed = await self._around.__aenter__()
        return self.sniffed, Script(self.sniffed, self.played)

    async def __aexit__(self, *told: Any) -> None:
        await self._around.__aexit__(*told)


@pytest.fixture
def playing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Playing:
    return _Playing(monkeypatch, tmp_path)


async def test_a_played_stream_has_the_packets_times(playing: _Playing) -> None:
    async with playing as (s, script):
        script.open()
        asked = script.up(ASK)
        script.down(HEAD)
        times = [script.down(chunk(token(t))) for t in "abc"]
        end = script.down(chunk(token("", "length", USAGE) + DONE) + END)
        await s.sniffer.sample()
        (request,), (stage,), tokens = s.rows("requests"), s.rows("stages"), s.rows("tokens", "index")
        moves = s.rows("moves", "object")
    # The stamps go through the wall clock, whose distance to the trace clock is read again: exact to a few µs.
    near = pytest.approx
    assert request["received_ns"] == near(asked, abs=200_000) and request["arrival_of"] == "received"
    assert [t["time_ns"] for t in tokens] == [near(t, abs=200_000) for t in times]
    assert {(t["vantage"], t["source"], t["count"], t["coalesced"]) for t in tokens} == {("wire", "sniff", 1, False)}
    assert request["finish_ns"] == near(end, abs=200_000)
    assert (request["prompt_tokens"], request["output_tokens"], request["max_tokens"], request["prompt_chars"]) == (7, 3, 3, 130)
    assert (stage["cached_tokens"], stage["end_reason"], len(request["prefix_blocks"])) == (2, "done", 2)
    assert [(m["object"], m["src"], m["dst"], m["path"], m["transfers"]) for m in moves] == [
        ("prompt", "client", "server:toy", ["client-server:toy"], 1),
        ("tokens", "server:toy", "client", ["client-server:toy"], 4),
    ]


async def test_a_gap_in_an_answer_ends_its_tokens_keeps_the_servers_total_and_costs_no_other_request(playing: _Playing) -> None:
    async with playing as (s, script):
        script.open()
        script.up(ASK)
        script.down(HEAD)
        seen = script.down(chunk(token("a")))
        script.down(chunk(token("b")), captured=False)
        script.down(chunk(token("c")))
        end = script.down(chunk(token("", "length", USAGE) + DONE) + END)
        script.up(ASK)
        script.down(HEAD)
        for t in "xyz":
            script.down(chunk(token(t)))
        script.down(chunk(token("", "length", USAGE) + DONE) + END)
        await s.sniffer.sample()
        (first, second), tokens = s.rows("requests", "request"), s.rows("tokens", "request", "index")
        (gap,) = s.rows("events")
        move = s.rows("moves", "request", "object")[1]
    assert first["error"] == "some of its bytes were not captured" and second["error"] is None
    assert [t["request"] for t in tokens] == [0, 1, 1, 1] and tokens[0]["time_ns"] == pytest.approx(seen, abs=200_000)
    assert (first["output_tokens"], first["finish_reason"], first["last_token_ns"]) == (3, "length", None)
    assert first["finish_ns"] == pytest.approx(end, abs=200_000)
    assert (move["object"], move["bytes"], move["transfers"]) == ("tokens", None, None), "not all of it was counted"
    size = len(chunk(token("b")))
    assert (gap["kind"], gap["source"], gap["server"]) == ("gap", "sniff", "toy")
    assert gap["detail"] == f"{size} bytes in 1 gaps of captured connections are missing"
    assert (s.sniffer.lost_bytes, s.writer.manifest.rows_dropped["sniff: gaps in captured connections"]) == (size, 1)
    assert s.writer.manifest.notes == [f"sniff: {size} bytes were not captured, in 1 gaps: the requests there are marked."]


async def test_a_gap_over_the_end_of_an_answer_leaves_its_total_unknown(playing: _Playing) -> None:
    async with playing as (s, script):
        script.open()
        script.up(ASK)
        script.down(HEAD + chunk(token("a")))
        script.down(chunk(token("b", None, USAGE.replace("3", "2"))), captured=False)
        seen = script.down(chunk(token("c", None, USAGE)))
        script.down(chunk(token("", "length", USAGE.replace("3", "4"))) + END, captured=False)
        script.up(ASK)
        script.down(HEAD)
        await s.sniffer.sample()
        first = s.rows("requests", "request")[0]
    assert (first["output_tokens"], first["finish_reason"]) == (None, None), "a total on the way is not the total"
    assert first["finish_ns"] == pytest.approx(seen, abs=200_000)


async def test_a_request_that_was_not_captured_takes_no_other_answer(playing: _Playing) -> None:
    async with playing as (s, script):
        script.open()
        script.up(ASK, captured=False)
        script.down(HEAD + chunk(token("lost")) + END)
        script.up(ASK)
        script.down(HEAD)
        mine = script.down(chunk(token("mine")) + END)
        await s.sniffer.sample()
        (token_row,), (request,) = s.rows("tokens"), s.rows("requests")
    assert token_row["time_ns"] == pytest.approx(mine, abs=200_000) and request["error"] is None
    assert s.sniffer.lost_bytes == len(ASK)


async def test_a_capture_that_begins_in_an_answer_waits_for_the_next_request(playing: _Playing) -> None:
    async with playing as (s, script):
        script.peers.open()
        script.up(ASK, captured=False)
        script.down(HEAD, captured=False)
        script.down(chunk(token("a")))
        script.down(chunk(token("b", "length")) + END)
        script.up(ASK)
        script.down(HEAD + chunk(token("c")) + END)
        await s.sniffer.sample()
        (request,), (row,) = s.rows("requests"), s.rows("tokens")
        assert s.sniffer.connections == 1
    assert row["request"] == request["request"] == 0
    (note,) = s.writer.manifest.notes
    assert note.startswith("sniff: 1 connections were seen from their middle on")
    assert s.sniffer.lost_bytes == 0 and s.writer.manifest.rows_dropped == {}


async def test_what_the_kernel_dropped_fragments_and_other_hosts_are_counted(playing: _Playing) -> None:
    async with playing as (s, script):
        playing.played.drops = 5
        script.open()
        fragment = bytearray(script.peers.up(ASK))
        fragment[6] = 0x20
        script.packet(bytes(fragment))
        other = Peers(server=("10.0.0.7", 8000))
        for packet in [*other.open(), other.up(ASK)]:
            script.packet(packet)
        await s.sniffer.sample()
        assert s.rows("requests") == []
    assert (s.sniffer.dropped, s.sniffer.packets) == (5, 8)
    assert s.writer.manifest.rows_dropped == {"sniff: packets dropped by the kernel, hoptrace was too slow": 5}
    assert s.writer.manifest.notes == [
        "sniff: the kernel dropped 5 packets since hoptrace did not read them fast enough.",
        "sniff: 1 packets were for port 8000 of other hosts than 10.0.0.1 (10.0.0.7:8000): to record one, attach to its URL.",
        "sniff: 1 packets could not be read (IP fragments, broken headers).",
    ]
    assert playing.played.closed


async def test_what_is_open_at_the_end_of_the_capture_is_cut(playing: _Playing) -> None:
    async with playing as (s, script):
        script.open()
        script.up(ASK)
        script.down(HEAD + chunk(token("a")))
    # What came after the last beat is taken at the end.
    (request,), (row,) = s.rows("requests"), s.rows("tokens")
    assert request["error"] == "the capture ended" and row["index"] == 0 and s.sniffer.connections == 0


async def test_a_server_of_this_machine_has_all_its_addresses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sniff, "open_capture", lambda *told: Played())
    async with sniffing("http://127.0.0.1:8000", tmp_path / "a", iface="any") as s:
        own = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
        for address in ["127.0.0.1", "127.0.0.2", *own]:
            assert s.sniffer._ours(socket.inet_aton(address))
        assert not s.sniffer._ours(socket.inet_aton("203.0.113.9"))
    async with sniffing("http://203.0.113.9:8000", tmp_path / "b", iface="any") as s:
        assert s.sniffer._ours(socket.inet_aton("203.0.113.9")) and not s.sniffer._ours(socket.inet_aton("127.0.0.1"))


async def test_an_interface_that_is_made_anew_is_captured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Played] = []
    index = [7]

    def opened(*told: object) -> Played:
        made.append(Played())
        return made[-1]

    def number(name: str) -> int:
        if not index[0]:
            raise OSError(errno.ENODEV, "No such device")
        return index[0]

    monkeypatch.setattr(sniff, "open_capture", opened)
    monkeypatch.setattr(socket, "if_nametoindex", number)
    monkeypatch.setattr(sniff, "_LOOK_NS", 0)
    async with sniffing(URL, tmp_path, iface="veth1") as s:
        for index[0] in (7, 7, 0, 0, 9, 9):
            await s.sniffer.sample()
        events = s.rows("events", "time_ns")
    words = ["the interface veth1 is gone: nothing is seen", "the interface veth1 is there again"]
    assert [(e["kind"], e["detail"]) for e in events] == [("gap", w) for w in words]
    assert [c.closed for c in made] == [True, True] and len(made) == 2


# -- real captures ----------------------------------------------------------------------------------------------------


async def post(client: aiohttp.ClientSession, url: str, **more: Any) -> bytes:
    body: dict[str, Any] = json.loads(BODY) | more
    async with client.post(url + "/v1/completions", json=body) as answer:
        return await answer.read()


@needs_right
@pytest.mark.parametrize("kind", ["ring", "socket"])
@pytest.mark.parametrize("iface", ["lo", "any"])
async def test_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, iface: str) -> None:
    if kind == "socket":
        monkeypatch.setattr(capturing, "Ring", refused(OSError(errno.EINVAL, "no ring here")))
    async with serve(Toy(STREAM)) as toy, sniffing(toy.url, tmp_path, iface=iface, key=KEY) as s:
        assert s.sniffer.kind == kind
        before = s.writer.clock.now_ns()
        async with aiohttp.ClientSession() as client:
            for _ in range(2):
                await post(client, toy.url)
            await asyncio.gather(*(post(client, toy.url, prompt="y" * 300_000) for _ in range(3)))
        after = s.writer.clock.now_ns()
        await s.until(5)
        requests, tokens = s.rows("requests", "request"), s.rows("tokens", "request", "index")
    assert [r["output_tokens"] for r in requests] == [3] * 5 and {r["error"] for r in requests} == {None}
    assert [r["prompt_chars"] for r in requests] == [130, 130, 300_000, 300_000, 300_000]
    assert [t["index"] for t in tokens] == [0, 1, 2] * 5 and {t["count"] for t in tokens} == {1}
    for request in requests:
        mine = [t["time_ns"] for t in tokens if t["request"] == request["request"]]
        times = [before, request["received_ns"], *mine, request["finish_ns"], after]
        assert times == sorted(times)
        assert mine[1] - mine[0] >= 10_000_000, "the planted sleep lies between the two"
    assert s.writer.manifest.rows_dropped == {} and s.writer.manifest.notes == [] and s.recorder.stats.faults == 0


@needs_right
async def test_loopback_over_ipv6(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    answer = HEAD + chunk(token("a", "length", USAGE.replace("3", "1")) + DONE) + END

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(ASK))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "::1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, sniffing(f"http://[::1]:{port}", tmp_path) as s:
        reader, writer = await asyncio.open_connection("::1", port)
        writer.write(ASK)
        assert await reader.read() == answer
        writer.close()
        await s.until(1)
        (request,) = s.rows("requests")
    assert (request["output_tokens"], request["error"]) == (1, None)


@needs_right
async def test_a_client_that_leaves_is_cancelled_on_the_wire_too(tmp_path: Path) -> None:
    async with serve(Toy([token("a"), "hang"])) as toy, sniffing(toy.url, tmp_path) as s:
        async with aiohttp.ClientSession() as client, client.post(toy.url + "/v1/completions", data=BODY) as answer:
            await answer.content.readany()
            answer.close()
        await asyncio.wait_for(toy.cancelled.wait(), 10)
        await s.until(1)
        (request,), (stage,) = s.rows("requests"), s.rows("stages")
    assert (request["error"], stage["end_reason"]) == ("the client closed the connection", "cancelled")


@needs_right
async def test_a_ring_that_is_full_drops_counts_and_marks_and_the_stream_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sniff, "open_capture", lambda interface, port: capturing.Ring(interface, port, blocks=2))
    more = "z" * 2000
    steps = [token(more) for _ in range(400)] + [token("", "length", USAGE.replace("3", "400")), DONE]
    async with serve(Toy(steps)) as toy, sniffing(toy.url, tmp_path) as s:
        async with aiohttp.ClientSession() as client:
            whole = await post(client, toy.url)
            assert len(whole) > 800_000, "nobody waits for hoptrace"
            await s.sniffer.sample()
            await asyncio.sleep(0.4)
            await post(client, toy.url, prompt="again")
        for _ in range(20):
            await asyncio.sleep(0.05)
            await s.sniffer.sample()
        requests, tokens = s.rows("requests", "request"), s.rows("tokens", "request", "index")
    assert s.sniffer.dropped > 0 and s.sniffer.lost_bytes > 0
    assert s.writer.manifest.rows_dropped["sniff: packets dropped by the kernel, hoptrace was too slow"] == s.sniffer.dropped
    assert requests[0]["error"] == "some of its bytes were not captured"
    assert requests[0]["output_tokens"] in (None, 400)
    assert 0 < len([t for t in tokens if t["request"] == 0]) < 400
    assert s.recorder.stats.faults == 0


@needs_right
@pytest.mark.parametrize("kind", [capturing.Ring, capturing.Plain])
def test_who_stops_reading_goes_on_where_it_stopped(kind: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        capture = kind("lo", port)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as client:
                peer, _ = server.accept()
                client.sendall(b"x" * 100)
                assert peer.recv(100)
                peer.close()
        time.sleep(0.2)
        found = []
        while (frame := next(capture.frames(), None)) is not None:
            found.append(segment(frame.data, frame.at, frame.end, frame.beyond, port))
        assert next(capture.frames(), None) is None and capture.dropped() == 0
        capture.close()
    segments = [f for f in found if isinstance(f, Segment)]
    assert len(segments) == len(found) >= 5 * 7
    assert [f.data for f in segments if f.size] == [b"x" * 100] * 5
    assert sum(bool(f.flags & SYN) for f in segments) == 10, "each packet once, though it passes twice on loopback"


@needs_right
async def test_the_probe_leaves_nothing_behind() -> None:
    def mine() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = mine()
    assert (await found("http://127.0.0.1:8000", "any"))[0]
    assert mine() == before
