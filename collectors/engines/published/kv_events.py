"""KV events of vLLM and SGLang into `blocks`: what was stored, copied to another memory, evicted, cleared.

Token ids are in the messages and are never decoded. Hashes are keyed again, so that nobody can check a guess at a prompt. What an
engine reports as stored a second time (a second copy of the same block) is a second row, as its eviction will be: rows stored
less rows evicted are the blocks in the cache. Rows of event `hit` are not made: the engines do not publish hits.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.published.foreign_clock import OneWay
from hoptrace.collectors.engines.published.kv_endpoints import of_address
from hoptrace.collectors.engines.published.kv_messages import Batch, Removed, Stored, decode_batch
from hoptrace.collectors.engines.published.kv_sequence import Gap, Item, Message, Sequence
from hoptrace.collectors.engines.published.zmq_stream import Endpoint, Stream, look, sequence_number
from hoptrace.kv import geometry

__all__ = ["FLAG", "KvEvents", "block_hash", "medium_of"]

FLAG = (
    '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5558"}\''
)
"""What makes vLLM publish its KV events, with a replay (SGLang: the same without ``enable_kv_cache_events``)."""

_MEDIA = {
    "gpu": "device", "cuda": "device", "xpu": "device", "hpu": "device", "npu": "device", "tpu": "device", "device": "device",
    "hbm": "device", "cpu": "host", "cpu_pinned": "host", "host": "host", "dram": "host", "disk": "disk", "storage": "disk",
    "nvme": "disk", "ssd": "disk", "external": "pool", "remote": "pool",
}  # fmt: skip
_WHOLE_MODEL = (None, "full_attention", "mla_attention")
_KNOWN_BLOCKS = 1_000_000


def medium_of(name: str | None, remote: bool = False) -> str | None:
    """The medium in the trace's words; a name that is not known stays as it is, in small letters."""
    if name is None:
        return None
    medium = _MEDIA.get(name.lower(), name.lower()[:40])
    return {"host": "peer", "disk": "pool"}.get(medium, medium) if remote else medium


def block_hash(value: int | bytes, group: int | None, key: bytes) -> int:
    """Keyed hash of an engine's block hash, signed 64 bits. The KV-cache group is part of it: groups hold different layers."""
    data = b"b" + value if isinstance(value, bytes) else b"i" + value.to_bytes(16, "little", signed=True)
    if group:
        data += b"/" + str(group).encode()
    return int.from_bytes(blake2b(data, digest_size=8, key=key, person=b"hoptrace-blocks").digest(), "little", signed=True)


@dataclass(slots=True)
class _Known:
    tokens: int | None
    copies: dict[str | None, int] = field(default_factory=dict)


class KvEvents:
    """Reads a server's KV events, from one publisher per data-parallel rank.

    ``endpoint`` is an address (see :func:`kv_endpoints.of_address` for its forms; rank r is at its port plus r), or the list of
    endpoints that :mod:`kv_endpoints` found. Null: the server publishes none, and the probe says what would make it.
    """

    name = "kv-events"
    tables: tuple[str, ...] = ("blocks",)

    def __init__(
        self, ctx: Context, endpoint: str | Seq[Endpoint] | None, replay_endpoint: str | None = None, *, ranks: int = 1
    ) -> None:
        host = urlsplit(ctx.api.url).hostname or "127.0.0.1"
        self._endpoints = (
            of_address(endpoint, replay_endpoint, host, ranks) if isinstance(endpoint, str) else list(endpoint or ())
        )
        self._ctx = ctx
        # No key: hashes that are equal within this run only, and nowhere else.
        self._key = ctx.key.key if ctx.key is not None else secrets.token_bytes(32)
        self._ranks = [_Rank(self, e) for e in self._endpoints]
        self._stream: Stream | None = None
        self.rows = 0
        self._told = 0
        self.hybrid = False

    async def probe(self) -> Finding:
        if not self._endpoints:
            return Finding(False, f"the server publishes no KV events: start it with {FLAG}")
        problems = [p for e in self._endpoints if (p := await look(e, f"start the server with {FLAG}")) is not None]
        if len(problems) == len(self._endpoints):
            return Finding(False, problems[0])
        if problems:
            return Finding(True, f"{len(problems)} of {len(self._endpoints)} ranks publish none: {problems[0]}")
        if any(e.replay is None for e in self._endpoints):
            return Finding(True, "no replay endpoint: what is missed stays missing (replay_endpoint in --kv-events-config)")
        return Finding(True)

    async def start(self) -> None:
        self._stream = Stream(self._endpoints, list(self._ranks), self.name)
        self._stream.start()

    async def sample(self) -> int:
        rows = self.rows
        new, self._told = rows - self._told, rows
        return new

    def restarted(self) -> None:
        for rank in self._ranks:
            rank.sequence.suspect_restart()

    async def close(self) -> None:
        if self._stream is None:
            return
        await asyncio.to_thread(self._stream.close)
        for rank in self._ranks:
            rank.end()
        writer = self._ctx.writer
        assert writer is not None
        for what, n in self._stream.faults.items():
            writer.drop(f"{self.name}: {what}", n)
        notes = self.notes()
        if notes:
            writer.update(lambda m: m.notes.extend(notes))

    def notes(self) -> list[str]:
        """What the reader of the trace should know, beyond what is counted in the manifest."""
        server, notes = self._ctx.server.name, []
        lost, replayed = sum(r.sequence.lost for r in self._ranks), sum(r.sequence.replayed_count for r in self._ranks)
        if replayed:
            notes.append(f"{server}: {replayed:,} batches of KV events were missed and had by replay.")
        if lost:
            notes.append(f"{server}: {lost:,} batches of KV events are lost: `blocks` has gaps (see `events`).")
        if self.hybrid:
            notes.append(f"{server}: the model has several kinds of KV cache, so the bytes of its blocks are not known.")
        if forgotten := sum(r.forgotten for r in self._ranks):
            notes.append(
                f"{server}: more blocks than {_KNOWN_BLOCKS:,}: {forgotten:,} were forgotten, their copies count as stored."
            )
        if self._ctx.key is None:
            notes.append(f"{server}: hashes of KV blocks were made with a key of this run only.")
        return notes


class _Rank:
    """One publisher: its messages in order, what is in its caches, its rows. Runs in the stream's thread."""

    def __init__(self, owner: KvEvents, endpoint: Endpoint) -> None:
        self._owner, self._endpoint = owner, endpoint
        self.sequence = Sequence(endpoint.replay is not None)
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self.forgotten = 0
        self._clock: OneWay | None = None
        self._token_bytes: int | None = None

    def live(self, frames: list[bytes], received_ns: int) -> None:
        number = sequence_number(frames[1]) if len(frames) == 3 else None
        if number is None or number < 0:
            self._drop("message that is not topic, number, payload", 1)
            return
        if not self._local and (batch := decode_batch(frames[2])) is not None:
            self._compare(batch, received_ns)
        self._use(self.sequence.live(number, frames[2], received_ns), received_ns)

    def replayed(self, frames: list[bytes]) -> None:
        # vLLM 0.32 answers topic, number, payload; SGLang and older vLLM number, payload.
        number = sequence_number(frames[-2]) if len(frames) >= 2 else None
        now = time.monotonic_ns()
        if number is not None:
            self._use(self.sequence.replayed(number, frames[-1], now), now)

    def wanted(self, now_ns: int) -> int | None:
        self._use(self.sequence.late(now_ns), now_ns)
        return self.sequence.wanted(now_ns)

    def end(self) -> None:
        now = time.monotonic_ns()
        self._use(self.sequence.end(now), now)
        if self._clock is not None and self._owner._ctx.writer is not None:
            self._clock.flush(self._owner._ctx.writer.clock.from_monotonic_ns(now))

    @property
    def _local(self) -> bool:
        """Whether the publisher's wall clock is this host's."""
        ctx = self._owner._ctx
        return self._endpoint.local or (ctx.server.host is not None and ctx.server.host == ctx.host)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _use(self, items: list[Item], now_ns: int) -> None:
        writer = self._owner._ctx.writer
        assert writer is not None
        for item in items:
            if isinstance(item, Message):
                self._take(item.payload)
            elif isinstance(item, Gap):
                self._drop("batches that were missed and could not be replayed", item.count)
                what = f"{item.count:,} batches of KV events of rank {self._endpoint.rank} are lost ({item.first} to {item.last})"
                self._event("gap", what, now_ns)
            else:
                self._known.clear()
                self._event("restart", f"the publisher of KV events of rank {self._endpoint.rank} began anew", now_ns)

    def _take(self, payload: bytes) -> None:
        owner = self._owner
        writer = owner._ctx.writer
        assert writer is not None
        batch = decode_batch(payload)
        if batch is None:
            self._drop("batch that is not [time, events, rank]", 1)
            return
        if batch.malformed:
            self._drop("event that cannot be read", batch.malformed)
        for kind, n in batch.unknown.items():
            self._drop(f"event of unknown type {kind or '(none)'}", n)
        stored = [e for e in batch.events if isinstance(e, Stored)]
        if not owner.hybrid and any((e.group or 0) > 0 or e.kind not in _WHOLE_MODEL for e in stored):
            owner.hybrid = True
        shape = geometry(owner._ctx.server)
        self._token_bytes = None if shape is None or owner.hybrid else shape.bytes_per_token
        time_ns = round(batch.time_s * 1e9)
        if self._local:
            time_ns -= writer.clock.wall_step_ns()
        rank = batch.rank if batch.rank is not None and 0 <= batch.rank < 1 << 31 else self._endpoint.rank
        common = {"time_ns": time_ns, "server": owner._ctx.server.name, "dp_rank": rank, "source": owner.name}
        rows: list[dict[str, Any]] = []
        for event in batch.events:
            if isinstance(event, Stored):
                self._stored(event, common, rows)
            elif isinstance(event, Removed):
                self._removed(event, common, rows)
            else:
                self._known.clear()
                rows.append(common | {"event": "cleared"})
        writer.append("blocks", rows)
        owner.rows += len(rows)

    def _stored(self, event: Stored, common: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        medium = medium_of(event.medium, event.remote)
        key, group = self._owner._key, event.group
        parent = block_hash(event.parent, group, key) if event.parent is not None and event.chained else None
        for value in event.hashes:
            name = block_hash(value, group, key)
            known = self._known.get(name)
            if known is None:
                known = self._known[name] = _Known(event.tokens)
                if len(self._known) > _KNOWN_BLOCKS:
                    self._known.popitem(last=False)
                    self.forgotten += 1
            elif event.tokens is not None:
                known.tokens = event.tokens
            elsewhere = medium is not None and any(m is not None and m != medium for m in known.copies)
            copied = elsewhere and medium not in known.copies
            known.copies[medium] = known.copies.get(medium, 0) + 1
            rows.append(common | {"event": "copied" if copied else "stored", "hash": name, "parent": parent, "medium": medium,
                                  "bytes": self._bytes(known.tokens)})  # fmt: skip
            parent = name if event.chained else None

    def _removed(self, event: Removed, common: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        medium = medium_of(event.medium, event.remote)
        for value in event.hashes:
            name = block_hash(value, event.group, self._owner._key)
            known = self._known.get(name)
            # Stored before the capture: a block of the device's own cache has the server's block size.
            tokens = known.tokens if known else self._owner._ctx.server.block_size_tokens if medium == "device" else None
            if known is not None:
                left = known.copies.get(medium, 0) - 1
                if left > 0:
                    known.copies[medium] = left
                else:
                    known.copies.pop(medium, None)
                    if not known.copies:
                        del self._known[name]
            rows.append(common | {"event": "evicted", "hash": name, "medium": medium, "bytes": self._bytes(tokens)})

    def _bytes(self, tokens: int | None) -> int | None:
        return None if tokens is None or self._token_bytes is None else tokens * self._token_bytes

    def _compare(self, batch: Batch, received_ns: int) -> None:
        writer = self._owner._ctx.writer
        assert writer is not None
        if self._clock is None:
            host = self._endpoint.events.removeprefix("tcp://").rpartition(":")[0]
            self._clock = OneWay(writer, host, self._owner.name)
        self._clock.saw(round(batch.time_s * 1e9), writer.clock.from_monotonic_ns(received_ns))

    def _event(self, kind: str, detail: str, now_ns: int) -> None:
        ctx = self._owner._ctx
        assert ctx.writer is not None
        row = {"time_ns": ctx.writer.clock.from_monotonic_ns(now_ns), "host": ctx.host, "server": ctx.server.name, "kind": kind}
        ctx.writer.append("events", [row | {"detail": detail, "source": self._owner.name}])

    def _drop(self, what: str, n: int) -> None:
        assert self._owner._ctx.writer is not None
        self._owner._ctx.writer.drop(f"{self._owner.name}: {what}", n)
