"""What the sniffer costs hoptrace: packets of many token streams, from frames to rows. Needs no rights, captures nothing.

Prints ``NAME: VALUE UNIT`` lines. The client confirms each token with a packet of its own, so an event is two packets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.streams import sniff
from hoptrace.collectors.engines.streams.capture import Frame
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.engines.streams.place import WIRE
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.collectors.engines.streams.sniff import Sniffer
from hoptrace.manifest import Manifest, Server
from hoptrace.writer import TraceWriter

PORT = 8000
HOST = bytes([10, 0, 0, 1])
BODY = json.dumps({"model": "m", "prompt": "word " * 400, "stream": True, "max_tokens": 128}).encode()
ASK = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str, finish: str | None) -> bytes:
    """One token as a server streams it, in an HTTP chunk of its own."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    data = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    line = b"data: " + json.dumps(data).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


class Stream:
    """The packets of one connection with one request on it: each token is confirmed by the client, as over a network."""

    def __init__(self, number: int, tokens: int) -> None:
        self.client = struct.pack("!I", 0x0A010000 + number), 1024 + number % 60_000
        self.up, self.down = 1, 1
        self.left = [(True, 2, b""), (False, 18, b""), (True, 16, b""), (True, 24, ASK), (False, 24, HEAD)]
        for i in range(tokens):
            self.left += [(False, 24, event(" token", "length" if i == tokens - 1 else None)), (True, 16, b"")]
        self.left += [(False, 24, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"), (True, 17, b""), (False, 17, b"")]
        self.left.reverse()

    def packet(self) -> bytes:
        """The next one, from its IP header on."""
        up, flags, data = self.left.pop()
        address, port = self.client
        seq, ack = (self.up, self.down) if up else (self.down, self.up)
        ports = (port, PORT) if up else (PORT, port)
        ends = address + HOST if up else HOST + address
        step = len(data) + bool(flags & 3)
        self.up, self.down = (self.up + step, self.down) if up else (self.up, self.down + step)
        head = struct.pack("!BBHHHBBH", 0x45, 0, 40 + len(data), 1, 0x4000, 64, 6, 0) + ends
        return head + struct.pack("!HHIIBBHHH", *ports, seq, ack if flags & 16 else 0, 0x50, flags, 500, 0, 0) + data


class Played:
    """A capture that gives what lies in memory; a beat's worth at a time."""

    kind = "played"

    def __init__(self, packets: list[bytes], beat: int) -> None:
        self._packets, self._at, self._beat = packets, 0, beat

    def frames(self) -> Iterator[Frame]:
        """The packets of one beat."""
        for packet in self._packets[self._at : self._at + self._beat]:
            yield Frame(packet, 0, len(packet), 0, time.time_ns())
        self._at += self._beat

    @property
    def done(self) -> bool:
        """Whether all have been given."""
        return self._at >= len(self._packets)

    def dropped(self) -> int:
        """None."""
        return 0

    def close(self) -> None:
        """Nothing to do."""


def packets(streams: int, tokens: int, at_once: int) -> list[bytes]:
    """Packets of many streams, mixed as they would come."""
    chance = random.Random(1)
    waiting = [Stream(i, tokens) for i in range(streams)]
    running: list[Stream] = []
    out: list[bytes] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop())
        stream = chance.choice(running)
        out.append(stream.packet())
        if not stream.left:
            running.remove(stream)
    return out


def _give(played: Played, interface: str, port: int) -> Played:
    return played


async def offline(streams: int, tokens: int, at_once: int, folder: Path) -> None:
    """From frames to rows, in CPU time of this process."""
    for count, told in ((max(streams // 10, 20), False), (streams, True)):  # what is imported on first use is no cost of a packet
        found = packets(count, tokens, at_once)
        played = Played(found, 1000)
        sniff.open_capture = partial(_give, played)  # type: ignore[assignment]
        with TraceWriter(folder / f"offline{count}.trace", Manifest(origin="recorded")) as writer:
            recorder = Recorder(writer, "toy", HashKey("bench", b"b" * 32), place=WIRE)
            ctx = Context(Api("http://10.0.0.1:8000"), Server(name="toy"), "host", writer)
            sniffer = Sniffer(ctx, recorder, "any", PORT)
            await sniffer.start()
            began = time.process_time_ns()
            while not played.done:
                await sniffer.sample()
            await sniffer.close()
            recorder.flush()
            writer.flush()
            cpu = time.process_time_ns() - began
            await ctx.api.close()
        if recorder.stats.tokens != count * tokens or recorder.stats.finished != count or writer.manifest.rows_dropped:
            raise SystemExit(f"not all was recorded: {recorder.stats}, {writer.manifest.rows_dropped}: not a measurement")
        if told:
            events = count * tokens
            print(f"sniff packets: {len(found) * 1e9 / cpu:,.0f} packets per CPU-second")
            print(f"sniff events: {events * 1e9 / cpu:,.0f} token events per CPU-second")
            print(f"sniff cpu per event: {cpu / 1e3 / events:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(offline(args.streams, args.tokens, args.at_once, Path(folder)))


if __name__ == "__main__":
    main()
