"""Captured packets (pcap, pcapng) of plaintext HTTP to inference servers, as ``tcpdump -w`` leaves them.

Read twice: first to find the servers (who is asked for completions), then to put their connections together again, as the sniffer
does. Times are those of the packets, UTC.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import polars as pl
import pyarrow as pa

from hoptrace.collectors.engines.streams.conversation import Conversation
from hoptrace.collectors.engines.streams.hashing import load_key
from hoptrace.collectors.engines.streams.packets import BROKEN, FRAGMENT, LINK, Segment, link, segment
from hoptrace.collectors.engines.streams.pcap import Recording, is_pcap
from hoptrace.collectors.engines.streams.place import WIRE, Place
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.collectors.engines.streams.turn import RECORDED_PATHS
from hoptrace.collectors.engines.streams.wire import Wire
from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.links import Links
from hoptrace.errors import InputError
from hoptrace.manifest import Server
from hoptrace.schema import TABLES
from hoptrace.writer import TraceWriter

__all__ = ["IMPORTER", "Pcap"]

_ASK = re.compile(rb"POST ([!-~]+) HTTP/1\.[01]\r?\n")
_EVERY_NS = 100_000_000
_PACKETS = 4096
_KEPT_ASKS = 65_536
_ROWS = 4096
_REFUSED = {FRAGMENT: "IP fragments", BROKEN: "with a broken header", LINK: "of a link layer that is not known"}


class Pcap(Importer):
    """Packets of servers that are asked for completions."""

    kind = "pcap"
    summary = "captured packets (tcpdump, Wireshark: pcap, pcapng) of plaintext HTTP to inference servers: requests, tokens"

    def matches(self, path: Path, head: bytes) -> bool:
        return is_pcap(head)

    def read(self, path: Path, sink: Sink) -> None:
        """A record is a request."""
        sink.epoch = "utc"
        servers = _find(sink)
        rows = _Rows(sink)
        place = Place(sink.source, WIRE.vantage)
        writer = cast("TraceWriter", rows)  # a recorder appends, drops, and asks nothing else of it
        links, key = Links(writer), load_key()
        wires: dict[int, list[Wire]] = {}
        recorders = []
        for server, prefix in servers.items():
            name = _name(server)
            sink.manifest.servers.append(Server(name=name, url=f"http://{name}"))
            recorder = Recorder(writer, name, key, links, place)
            recorders.append(recorder)
            wire = Wire(lambda r=recorder, p=prefix: Conversation(r, p), lambda a, s=server: a == s[:-2])  # type: ignore[misc]
            wires.setdefault(int.from_bytes(server[-2:]), []).append(wire)
        _platform(sink, [_name(s) for s in servers])
        now_ns = due_ns = 0
        refused: Counter[str] = Counter()
        for n, (real_ns, data, at, size) in enumerate(_packets(sink, refused)):
            now_ns = max(now_ns, real_ns)
            for port, mine in wires.items():
                found = segment(data, at, len(data), size - len(data), port)
                if isinstance(found, Segment):
                    for wire in mine:
                        wire.feed(found, real_ns)
                elif found in _REFUSED:
                    refused[found] += 1
            if now_ns >= due_ns or n % _PACKETS == 0:
                due_ns = now_ns + _EVERY_NS
                _tick([w for mine in wires.values() for w in mine], recorders, now_ns)
        for wire in (w for mine in wires.values() for w in mine):
            wire.close(now_ns)
            _tell(sink, wire)
        _work(recorders)
        rows.write()
        for why, count in refused.items():
            sink.tally("{n} packets were passed over: " + _REFUSED[why] + ".", count)
        for recorder in recorders:
            for note in recorder.stats.notes():
                sink.note(f"{recorder.server}: {note}")


def _tick(wires: list[Wire], recorders: list[Recorder], now_ns: int) -> None:
    for wire in wires:
        wire.tick(now_ns)
    _work(recorders)


def _work(recorders: list[Recorder]) -> None:
    for recorder in recorders:
        while recorder.work():
            pass
        recorder.flush()


def _packets(sink: Sink, refused: Counter[str] | None = None) -> Iterator[tuple[int, bytes, int, int]]:
    """(time, frame, where its IP header begins, its size on the wire) of each packet that is IP."""
    with sink.open() as file:
        recording = Recording(file, str(sink.path))
        for p in recording:
            at = link(p.data, p.link)
            if isinstance(at, int):
                yield p.real_ns, p.data, at, p.size
            elif refused is not None and at in _REFUSED:
                refused[at] += 1
        if refused is None:
            return
        if recording.cut:
            sink.note("The file ends in the middle of a packet: what came before it is read.")
        sink.tally("{n} packets have no time, and are left out.", recording.untimed)
        sink.tally(
            "{n} packets were dropped where they were captured: the requests that miss them are marked.", recording.dropped
        )


def _find(sink: Sink) -> dict[bytes, str]:
    """Address and port of each server that is asked for completions, with the path before ``/v1``.

    Raises:
        InputError: there is none.
    """
    servers: dict[bytes, str] = {}
    asks: dict[tuple[int, int, int], bytes] = {}
    twins: Counter[tuple[bytes, bytes]] = Counter()
    for _, data, at, size in _packets(sink):
        s = segment(data, at, len(data), size - len(data), None)
        if not isinstance(s, Segment) or not (found := _ASK.match(s.data)):
            continue
        path = found[1].decode("ascii").split("?", 1)[0]
        fits = [p for p in RECORDED_PATHS if path.endswith(p)]
        if not fits:
            continue
        servers.setdefault(s.server, path.removesuffix(max(fits, key=len)))
        # Where addresses are translated between two interfaces, the same packet passes with its numbers as they were.
        first = asks.setdefault((s.seq, s.ack, s.size), s.server)
        if first != s.server:
            twins[first, s.server] += 1
        if len(asks) > _KEPT_ASKS:
            del asks[next(iter(asks))]
    if not servers:
        raise InputError(
            f"{sink.path}: nobody is asked for completions in plaintext HTTP in these packets.",
            hint="Capture whole packets behind what ends TLS: tcpdump -i any -s 0 -w FILE 'tcp port 8000'.",
        )
    for (first, again), n in twins.items():
        if servers.pop(again, None) is not None:
            sink.note(f"{_name(again)} is {_name(first)} behind a translation of addresses ({n} equal requests): it is left out.")
    return servers


def _tell(sink: Sink, wire: Wire) -> None:
    sink.tally(
        "{n} connections are seen from their middle on: a request that was under way on them is not recorded.", wire.joined
    )
    sink.tally("{n} bytes were not captured: the requests that miss them are marked.", wire.lost_bytes)
    sink.tally("{n} connections are TLS, which can't be read.", wire.tls)
    sink.tally("{n} connections were given up (too many at once, or silent for an hour).", wire.forgotten)


def _platform(sink: Sink, names: list[str]) -> None:
    nodes, links = [{"name": "client"}], []
    for name in names:
        nodes.append({"name": f"server:{name}"})
        links.append({"name": f"client-server:{name}", "a": "client", "b": f"server:{name}"})
    sink.manifest.platform = {"nodes": nodes, "links": links}


def _name(server: bytes) -> str:
    host = ipaddress.ip_address(server[:-2])
    port = int.from_bytes(server[-2:])
    return f"[{host}]:{port}" if host.version == 6 else f"{host}:{port}"


class _Rows:
    """Takes a recorder's rows. Those of requests and their stays come several times, the later the fuller: kept until the end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._kept: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {name: {} for name in ("requests", "stages")}
        self._waiting: dict[str, list[dict[str, Any]]] = {}

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        kept = self._kept.get(name)
        if kept is None:
            waiting = self._waiting.setdefault(name, [])
            waiting += (dict(row) for row in rows)
            if len(waiting) >= _ROWS:
                self._sink.write(name, _frame(name, waiting))
                waiting.clear()
            return
        for row in rows:
            key = tuple(row.get(column) for column in TABLES[name].key)
            if name == "requests" and key not in kept:
                self._sink.count()
            kept.setdefault(key, {}).update({k: v for k, v in row.items() if v is not None})

    def append_arrow(self, name: str, data: pa.RecordBatch) -> None:
        self._sink.write(name, cast("pl.DataFrame", pl.from_arrow(data)))

    def drop(self, reason: str, rows: int = 1) -> None:
        self._sink.tally("{n} × " + reason + ".", rows)

    def write(self) -> None:
        for name, rows in (*self._waiting.items(), *((name, list(kept.values())) for name, kept in self._kept.items())):
            self._sink.write(name, _frame(name, rows))


def _frame(name: str, rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Rows as a frame of the columns that any of them has."""
    columns = [c.name for c in TABLES[name].columns if any(c.name in row for row in rows)]
    arrays = [pa.array([row.get(c) for row in rows], TABLES[name].column(c).type) for c in columns]
    return cast("pl.DataFrame", pl.from_arrow(pa.table(arrays, names=columns)))


IMPORTER = Pcap()
