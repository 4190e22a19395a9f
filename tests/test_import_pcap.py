"""Packets captured elsewhere become a trace: the same rows as of a live capture."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.frames import Peers, ethernet
from support.pcaps import Packet, pcap, pcapng
from support.sniffing import needs_right, sniffing
from support.toy_server import Toy, serve, token

import hoptrace
from hoptrace.collectors.engines.streams.capture import Ring
from hoptrace.collectors.files.run import import_files
from hoptrace.errors import InputError
from hoptrace.validate import validate

BEGIN, MS = 1_796_040_500_000_000_000, 1_000_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def asked(path: str = "/v1/completions") -> bytes:
    body = json.dumps({"model": "m", "prompt": "x" * 130, "max_tokens": 9, "stream": True}).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def chunk(text: str, finish: str | None = None, **more: Any) -> bytes:
    data = {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}
    line = b"data: " + json.dumps(data).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


USAGE = {"prompt_tokens": 7, "completion_tokens": 3}
END = b"0\r\n\r\n"


def talk(peers: Peers, path: str = "/v1/completions") -> None:
    """Two requests on one connection."""
    peers.open()
    for _ in range(2):
        peers.up(asked(path))
        peers.down(HEAD)
        for text in "ab":
            peers.down(chunk(text))
        peers.down(chunk("c", "length", usage=USAGE) + END)
    peers.close()


def timed(*connections: Peers) -> list[Packet]:
    """Packets 10 ms apart."""
    return [(BEGIN + i * 10 * MS, ethernet(p)) for i, p in enumerate(p for c in connections for p in c.packets)]


def imported(tmp_path: Path, data: bytes, name: str = "a.pcap") -> tuple[hoptrace.Trace, Any]:
    path = tmp_path / name
    path.write_bytes(data)
    done = import_files([path], tmp_path / "t.trace")
    return hoptrace.open(tmp_path / "t.trace"), done


def rows(trace: hoptrace.Trace, name: str, *by: str) -> list[dict[str, Any]]:
    return trace.table(name).collect().sort(by).to_dicts()


@pytest.mark.parametrize("make", [pcap, pcapng])
def test_a_capture_becomes_a_trace(tmp_path: Path, make: Any) -> None:
    peers = Peers()
    talk(peers)
    trace, done = imported(tmp_path, make(timed(peers)))
    assert (done.read, done.written, done.rejected) == (2, 2, 0)
    first, second = rows(trace, "requests", "request")
    times = [BEGIN + i * 10 * MS for i in range(len(peers.packets))]
    assert (first["received_ns"], first["first_token_ns"], first["last_token_ns"], first["finish_ns"]) == (
        times[3], times[5], times[7], times[7],
    )  # fmt: skip
    assert [(r["prompt_tokens"], r["output_tokens"], r["max_tokens"], r["error"]) for r in (first, second)] == [
        (7, 3, 9, None)
    ] * 2
    assert first["prefix_blocks"] == second["prefix_blocks"] and len(first["prefix_blocks"]) == 2
    tokens = rows(trace, "tokens", "request", "index")
    assert [t["time_ns"] for t in tokens] == [times[i] for i in (5, 6, 7, 10, 11, 12)]
    assert {(t["vantage"], t["source"]) for t in tokens} == {("wire", "import:pcap")}
    (one, two) = rows(trace, "stages", "request")
    assert (one["server"], one["end_reason"], two["enqueued_ns"]) == ("10.0.0.1:8000", "done", times[8])
    assert [s.name for s in trace.manifest.servers] == ["10.0.0.1:8000"]
    assert rows(trace, "moves", "start_ns")[0]["path"] == ["client-server:10.0.0.1:8000"]
    assert [f for f in validate(trace) if f.level == "error"] == []


def test_servers_are_found_and_those_behind_a_translation_left_out(tmp_path: Path) -> None:
    outside, inside = Peers(), Peers(server=("172.17.0.2", 80))
    other = Peers(client=("10.0.0.9", 5), server=("10.0.0.1", 9000), client_seq=5, server_seq=6)
    web = Peers(client=("10.0.0.9", 6), server=("10.0.0.1", 81), client_seq=7, server_seq=8)
    talk(outside)
    talk(inside)
    talk(other, "/llm/v1/chat/completions")
    talk(web, "/other")
    mixed = Peers()
    mixed.packets = [p for pair in zip(outside.packets, inside.packets, strict=True) for p in pair]
    trace, done = imported(tmp_path, pcapng(timed(mixed, other, web)))
    assert done.written == 4
    assert {r["server"] for r in rows(trace, "stages", "request")} == {"10.0.0.1:8000", "10.0.0.1:9000"}
    assert any("172.17.0.2:80 is 10.0.0.1:8000 behind a translation of addresses" in n for n in done.manifest.notes)


def test_loss_and_a_file_that_ends_early_are_told(tmp_path: Path) -> None:
    peers = Peers()
    talk(peers)
    packets = timed(peers)
    del packets[6]
    data = pcap(packets)[:-3]
    trace, done = imported(tmp_path, data)
    first, second = rows(trace, "requests", "request")
    assert (first["error"], first["output_tokens"]) == ("some of its bytes were not captured", 3) and second["error"] is None
    assert [t["request"] for t in rows(trace, "tokens", "request", "index")] == [0, 1, 1, 1]
    notes = "\n".join(done.manifest.notes)
    assert f"{len(chunk('b'))} bytes were not captured" in notes and "ends in the middle of a packet" in notes


def test_a_capture_without_requests_says_what_to_do(tmp_path: Path) -> None:
    peers = Peers()
    peers.open()
    peers.up(b"\x16\x03\x01\x02\x00" + bytes(100))
    with pytest.raises(InputError) as e:
        imported(tmp_path, pcap(timed(peers)))
    assert "nobody is asked for completions" in e.value.message and "tcpdump" in str(e.value.hint)
    with pytest.raises(InputError) as e:
        imported(tmp_path, pcap([])[:24] + struct.pack("<IIII", 0, 0, 1 << 30, 1 << 30), "b.pcap")
    assert "packet 1" in e.value.message
    assert not (tmp_path / "t.trace").exists()


@needs_right
async def test_a_real_capture_gives_the_same_from_its_file_as_live(tmp_path: Path) -> None:
    steps: list[bytes | float] = []
    for text in "abc":
        steps += [token(text), 0.01]
    async with serve(Toy([*steps, token("", "length", ',"usage":{"prompt_tokens":7,"completion_tokens":3}')])) as toy:
        port = int(toy.url.rsplit(":", 1)[1])
        ring = Ring("lo", port)
        async with sniffing(toy.url, tmp_path) as s, aiohttp.ClientSession() as client:
            for size in (10, 200_000):
                ask = {"prompt": "x" * size, "max_tokens": 3, "stream": True}
                async with client.post(toy.url + "/v1/completions", json=ask) as answer:
                    await answer.read()
            await s.until(2)
        await asyncio.sleep(0.2)
        packets = [(f.real_ns, bytes(f.data[f.at : f.end])) for f in ring.frames()]
        ring.close()
    trace, _ = imported(tmp_path, pcapng(packets, link=101))
    live = hoptrace.open(tmp_path / "sniffed.trace")
    for name, by in (("requests", ["request"]), ("tokens", ["request", "index"]), ("stages", ["request"])):
        for mine, its in zip(rows(live, name, *by), rows(trace, name, *by), strict=True):
            for column, value in mine.items():
                if column.endswith("_ns") and value is not None:
                    assert abs(value - its[column]) < 1_000_000, (name, column)
                elif column not in ("source", "server", "prefix_blocks", "hash_space", "block_size", "block_unit", "session"):
                    assert value == its[column], (name, column)
