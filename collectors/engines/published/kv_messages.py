"""KV events as vLLM and SGLang publish them (msgpack), decoded without their token ids.

A batch is an array ``[time, events, data-parallel rank]``. An event is a map with its type under ``type`` (vLLM 0.32, SGLang
0.5.23), or an array that begins with its type (older ones: ``["BlockStored", block_hashes, parent_block_hash, token_ids,
block_size, lora_id, medium, lora_name, extra_keys, group_idx]``, ``["BlockRemoved", block_hashes, medium, group_idx]``), its
later places absent in the oldest. Places after ``medium`` differ between engines: ``group_idx`` is taken where a number stands
there. Fields that are not known are skipped; the token ids are never decoded, only counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

__all__ = ["Batch", "Cleared", "Event", "Removed", "Stored", "decode_batch"]

_MAX_HASHES = 1_000_000


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks were put into a cache: a chain, each the parent of the next where ``chained``. ``tokens`` is of one block."""

    hashes: list[int | bytes]
    parent: int | bytes | None
    tokens: int | None
    medium: str | None = None
    group: int | None = None
    kind: str | None = None
    remote: bool = False
    chained: bool = True


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks were taken out of a cache."""

    hashes: list[int | bytes]
    medium: str | None = None
    group: int | None = None
    remote: bool = False


@dataclass(frozen=True, slots=True)
class Cleared:
    """A cache was emptied."""


Event = Stored | Removed | Cleared


@dataclass(slots=True)
class Batch:
    """``time_s`` is the publisher's wall clock. ``unknown`` counts event types that are not known, ``malformed`` the rest."""

    time_s: float
    events: list[Event] = field(default_factory=list)
    rank: int | None = None
    unknown: dict[str, int] = field(default_factory=dict)
    malformed: int = 0


class _Map(msgspec.Struct):
    type: str
    block_hashes: list[int | bytes] = []
    parent_block_hash: int | bytes | None = None
    token_ids: msgspec.Raw = msgspec.Raw()
    block_size: int | None = None
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


_AS_BATCH = msgspec.msgpack.Decoder(list[msgspec.Raw])
_AS_MAP = msgspec.msgpack.Decoder(_Map)
_AS_HASHES = msgspec.msgpack.Decoder(list[int | bytes])
_AS_HASH = msgspec.msgpack.Decoder(int | bytes | None)
_AS_INT = msgspec.msgpack.Decoder(int | None)
_AS_TEXT = msgspec.msgpack.Decoder(str | None)
_AS_TIME = msgspec.msgpack.Decoder(float)
# Decoding untrusted bytes: a depth bomb is a RecursionError, a bad UTF-8 string a UnicodeDecodeError.
_BAD = (msgspec.MsgspecError, ValueError, RecursionError)


def decode_batch(payload: bytes) -> Batch | None:
    """The batch, or null for bytes that are none. Never raises."""
    try:
        places = _AS_BATCH.decode(payload)
        time_s = _AS_TIME.decode(places[0])
        events = _AS_BATCH.decode(places[1])
        # Beyond: no time since 1970 that int64 nanoseconds can hold.
        if not 0 <= time_s < 9e9:
            return None
    except (*_BAD, IndexError):
        return None
    batch = Batch(time_s)
    if len(places) > 2:
        batch.rank = _or_none(_AS_INT, places[2])
    for raw in events:
        try:
            event = _event(bytes(raw))
        except (*_BAD, IndexError):
            batch.malformed += 1
            continue
        if isinstance(event, str):
            if event in batch.unknown or len(batch.unknown) < 20:
                batch.unknown[event] = batch.unknown.get(event, 0) + 1
        else:
            batch.events.append(event)
    return batch


def _event(raw: bytes) -> Event | str:
    """The event, or the name of a type that is not known."""
    head = raw[0]
    if 0x80 <= head <= 0x8F or head in (0xDE, 0xDF):
        m = _AS_MAP.decode(raw)
        remote = m.locality is not None and m.locality.upper() == "REMOTE"
        if m.type == "BlockStored":
            return _stored(m.block_hashes, m.parent_block_hash, _length(bytes(m.token_ids)), m.block_size, m.medium, m.group_idx,
                           m.kv_cache_spec_kind, remote)  # fmt: skip
        if m.type == "BlockRemoved":
            return Removed(_bounded(m.block_hashes), m.medium, m.group_idx, remote)
        return Cleared() if m.type == "AllBlocksCleared" else m.type[:60]
    places = _AS_BATCH.decode(raw)
    kind = _AS_TEXT.decode(places[0]) or ""
    if kind == "BlockStored":
        return _stored(
            _AS_HASHES.decode(places[1]), _AS_HASH.decode(places[2]), _length(bytes(places[3])), _AS_INT.decode(places[4]),
            _or_none(_AS_TEXT, places[6]) if len(places) > 6 else None,
            _or_none(_AS_INT, places[9]) if len(places) > 9 else None,
        )  # fmt: skip
    if kind == "BlockRemoved":
        return Removed(
            _bounded(_AS_HASHES.decode(places[1])),
            _or_none(_AS_TEXT, places[2]) if len(places) > 2 else None,
            _or_none(_AS_INT, places[3]) if len(places) > 3 else None,
        )
    return Cleared() if kind == "AllBlocksCleared" else kind[:60]


def _stored(
    hashes: list[int | bytes], parent: int | bytes | None, tokens: int | None, size: int | None, medium: str | None,
    group: int | None, kind: str | None = None, remote: bool = False,
) -> Stored:  # fmt: skip
    size = size if size is not None and 0 < size < 1 << 40 else None
    # Where blocks were left out (sliding window, Mamba), the ids span more tokens than the hashes: the next one's parent is then
    # not the one before it in the list.
    chained = len(hashes) == 1 or (size is not None and tokens == size * len(hashes))
    return Stored(_bounded(hashes), parent, size, medium, group, kind, remote, chained)


def _bounded(hashes: list[int | bytes]) -> list[int | bytes]:
    if len(hashes) > _MAX_HASHES:
        raise ValueError("too many hashes")
    return hashes


def _length(raw: bytes) -> int | None:
    """Length of the msgpack array that ``raw`` is, from its head alone; null if it is none."""
    if not raw:
        return None
    if 0x90 <= raw[0] <= 0x9F:
        return raw[0] & 0x0F
    if raw[0] == 0xDC:
        return int.from_bytes(raw[1:3], "big")
    if raw[0] == 0xDD:
        return int.from_bytes(raw[1:5], "big")
    return None


def _or_none(decoder: Any, raw: msgspec.Raw) -> Any:
    try:
        return decoder.decode(raw)
    except _BAD:
        return None
