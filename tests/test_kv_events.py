"""KV events: decoding of every form, order, gaps and replays, restarts, and the rows that come of them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.context import KEY, context, events, rows, until
from support.publisher import Publisher

from hoptrace.collectors.engines.kv_endpoints import endpoints_of, of_address, of_sources
from hoptrace.collectors.engines.kv_events import KvEvents, block_hash, medium_of
from hoptrace.collectors.engines.kv_messages import Cleared, Removed, Stored, decode_batch
from hoptrace.collectors.engines.kv_sequence import REPLAY_NS, Gap, Message, Restart, Sequence
from hoptrace.collectors.engines.zmq_stream import Endpoint

_pack = msgspec.msgpack.encode
SHAPE = {"layers": 2, "kv_heads": 1, "head_size": 32, "kv_dtype": "float32", "block_size_tokens": 32}
TOKEN_BYTES = 2 * 2 * 1 * 32 * 4


def stored(hashes: list[Any], parent: Any = None, size: int = 32, medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    """As vLLM 0.32 encodes it: a map; ``omit_defaults`` leaves out what is null from ``extra_keys`` on."""
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
            "token_ids": list(range(size * len(hashes))), "block_size": size, "lora_id": None, "medium": medium,
            "lora_name": None, **more}  # fmt: skip


def removed(hashes: list[Any], medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}


def batch(*happened: Any, at: float = 1_700_000_000.0, rank: int | None = 0) -> bytes:
    return _pack([at, list(happened), rank])


# -- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        stored([b"\x01" * 32, b"\x02" * 32], b"\x09" * 32, extra_keys=[["salt"], None], group_idx=0),
        # positional, by age: vLLM 0.8 and SGLang 0.4 (no medium), vLLM 0.11 (medium), vLLM 0.14 (names, keys, group)
        ["BlockStored", [b"\x01" * 32, b"\x02" * 32], b"\x09" * 32, list(range(64)), 32, None],
        ["BlockStored", [b"\x01" * 32, b"\x02" * 32], b"\x09" * 32, list(range(64)), 32, None, "GPU"],
        ["BlockStored", [b"\x01" * 32, b"\x02" * 32], b"\x09" * 32, list(range(64)), 32, None, "GPU", None, [None, None], 0],
        # SGLang's later places are others: what is no number is no group
        ["BlockStored", [b"\x01" * 32, b"\x02" * 32], b"\x09" * 32, list(range(64)), 32, None, "GPU", None, None, "salt"],
    ],
)
def test_each_form_of_stored_reads_alike(event: Any) -> None:
    found = decode_batch(batch(event))
    assert found is not None and not found.malformed and not found.unknown
    (got,) = found.events
    assert isinstance(got, Stored)
    assert (got.hashes, got.parent, got.tokens, got.chained) == ([b"\x01" * 32, b"\x02" * 32], b"\x09" * 32, 32, True)
    assert got.group in (0, None) and got.medium in ("GPU", None)


def test_int_hashes_unknown_fields_and_unknown_events() -> None:
    found = decode_batch(
        _pack([1.5, [stored([-5, 2**63 + 1], 7, brand_new={"x": 1}), ["BlockRemoved", [3], "CPU", 2],
                     {"type": "BlockMoved", "a": 1}, ["AllBlocksCleared"], {"type": "AllBlocksCleared"},
                     {"no": "type"}, 17], 3, "later"])
    )  # fmt: skip
    assert found is not None and (found.time_s, found.rank, found.malformed) == (1.5, 3, 2)
    assert found.unknown == {"BlockMoved": 1}
    assert found.events == [
        Stored([-5, 2**63 + 1], 7, 32, "GPU"), Removed([3], "CPU", 2), Cleared(), Cleared(),
    ]  # fmt: skip


def test_a_list_with_blocks_left_out_is_no_chain() -> None:
    found = decode_batch(batch(stored([1, 2], 9) | {"token_ids": list(range(96))}))
    assert found is not None and isinstance(found.events[0], Stored) and not found.events[0].chained


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=20) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=12) | st.integers(0, 99), inner, max_size=5),
    max_leaves=20,
)
_event = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])},
    optional=dict.fromkeys(("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "group_idx"), _plain),
) | st.lists(_plain, max_size=11).map(lambda rest: ["BlockStored", *rest])


@given(st.binary(max_size=200) | _plain.map(_pack) | st.lists(_event, max_size=4).map(lambda e: _pack([1.0, e, 0])))
def test_decoding_never_raises(payload: bytes) -> None:
    found = decode_batch(payload)
    if found is not None:
        for event in found.events:
            assert not isinstance(event, Stored) or event.tokens is None or event.tokens > 0


def test_a_pit_of_arrays_is_refused() -> None:
    assert decode_batch(b"\x91" * 100_000) is None
    found = decode_batch(b"\x92\xcb" + b"\x00" * 8 + b"\x91" + b"\x91" * 100_000)
    assert found is None or not found.events


# -- order ------------------------------------------------------------------------------------------------------------


class _Truth:
    """A publisher's messages, of which some never come, with a replay that has the last ``buffer`` of them."""

    def __init__(self, total: int, lost: set[int], buffer: int) -> None:
        self.total, self.lost, self.buffer = total, lost, buffer
        self.given: list[int] = []
        self.gone: set[int] = set()

    def take(self, items: list[Any]) -> None:
        for item in items:
            if isinstance(item, Message):
                assert item.payload == str(item.number).encode()
                self.given.append(item.number)
            elif isinstance(item, Gap):
                assert item.first <= item.last
                self.gone |= set(range(item.first, item.last + 1))
            else:
                raise AssertionError("no restart happened")


@given(
    st.integers(2, 60), st.sets(st.integers(0, 59)), st.integers(0, 60), st.booleans(), st.lists(st.integers(0, 59), max_size=8),
    st.integers(0, 12),
)  # fmt: skip
def test_each_message_once_in_order_or_told_as_lost(
    total: int, lost: set[int], buffer: int, can_replay: bool, answers_drop: list[int], lag: int
) -> None:
    truth, sequence = _Truth(total, lost, buffer), Sequence(can_replay)
    pending: list[tuple[int, list[int]]] = []
    dropped = set(answers_drop)
    for number in range(total):
        if number not in lost:
            truth.take(sequence.live(number, str(number).encode(), number))
        start = sequence.wanted(number)
        if start is not None:
            assert can_replay
            kept = list(range(max(start, number + 1 - buffer), number + 1))
            pending.append((number + lag, [n for n in kept if n not in dropped]))
            dropped = set()  # a queue that was full once
        while pending and pending[0][0] <= number:
            for n in pending.pop(0)[1]:
                truth.take(sequence.replayed(n, str(n).encode(), number))
            truth.take(sequence.replayed(-1, b"", number))
    truth.take(sequence.end(total))
    assert truth.given == sorted(set(truth.given)), "in order, none twice"
    came = [n for n in range(total) if n not in lost]
    if came:
        expected = set(range(came[0], came[-1] + 1))
        assert set(truth.given) | truth.gone == expected
        assert not set(truth.given) & truth.gone
        assert set(came) <= set(truth.given)
        assert sequence.lost == len(truth.gone)


def test_a_full_replay_loses_nothing() -> None:
    sequence = Sequence(True)
    assert sequence.live(0, b"a", 0) == [Message(0, b"a")]
    assert sequence.live(3, b"d", 1) == []
    assert sequence.wanted(1) == 1 and sequence.wanted(2) is None
    assert sequence.live(4, b"e", 2) == []
    assert sequence.replayed(1, b"b", 3) == [Message(1, b"b")]
    assert sequence.replayed(2, b"c", 3) == [Message(2, b"c"), Message(3, b"d"), Message(4, b"e")]
    assert sequence.replayed(3, b"d", 3) == [] and sequence.replayed(4, b"e", 3) == []
    assert sequence.replayed(-1, b"", 3) == []
    assert (sequence.lost, sequence.replayed_count, sequence.repeated) == (0, 2, 2)
    assert sequence.live(5, b"f", 4) == [Message(5, b"f")]


def test_what_the_publisher_forgot_is_a_gap() -> None:
    sequence = Sequence(True)
    sequence.live(0, b"", 0)
    sequence.live(9, b"", 1)
    assert sequence.wanted(1) == 1
    assert sequence.replayed(6, b"", 2) == [Gap(1, 5), Message(6, b"")]
    assert sequence.replayed(7, b"", 2) == [Message(7, b"")]
    assert sequence.replayed(8, b"", 2) == [Message(8, b""), Message(9, b"")]


def test_a_replay_that_was_cut_is_asked_for_again_and_a_silent_one_given_up() -> None:
    sequence = Sequence(True)
    sequence.live(0, b"", 0)
    sequence.live(5, b"", 1)
    assert sequence.wanted(1) == 1
    assert sequence.replayed(1, b"", 2) == [Message(1, b"")]
    assert sequence.replayed(4, b"", 2) == []  # 2 and 3 were dropped under way
    assert sequence.replayed(-1, b"", 2) == []
    assert sequence.wanted(3) == 2
    assert sequence.late(3 + REPLAY_NS) == []
    assert sequence.late(4 + REPLAY_NS) == [Gap(2, 4), Message(5, b"")]
    assert sequence.lost == 3


def test_restarts() -> None:
    sequence = Sequence(False)
    sequence.live(7, b"", 0)
    assert sequence.live(0, b"x", 1) == [Restart(), Message(0, b"x")]
    sequence.live(1, b"", 2)
    assert sequence.live(1, b"", 3) == [Restart(), Gap(0, 0), Message(1, b"")]
    # A server that came back and is already further: told from outside, it is no gap of the old one.
    sequence.suspect_restart()
    assert sequence.live(2, b"", 4) == [Message(2, b"")]
    sequence.suspect_restart()
    assert sequence.live(5, b"", 5) == [Restart(), Gap(0, 4), Message(5, b"")]
    waiting = Sequence(True)
    waiting.live(0, b"", 0)
    waiting.live(4, b"", 1)
    assert waiting.live(0, b"", 2) == [Gap(1, 3), Message(4, b""), Restart(), Message(0, b"")]


# -- endpoints --------------------------------------------------------------------------------------------------------


def test_endpoints_of_a_configuration() -> None:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}
    assert endpoints_of(config, "10.0.0.3", 2) == [
        Endpoint("tcp://10.0.0.3:5557", "tcp://10.0.0.3:5657", 0), Endpoint("tcp://10.0.0.3:5558", "tcp://10.0.0.3:5658", 1),
    ]  # fmt: skip
    # An address without a wildcard is one that the publisher connects to: hoptrace has to be there.
    assert endpoints_of(config | {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": None, "topic": "kv"}) == [
        Endpoint("tcp://127.0.0.1:5557", None, 0, bind=True, topic="kv")
    ]
    assert endpoints_of({"enable_kv_cache_events": True}) == [Endpoint("tcp://127.0.0.1:5557")]
    assert endpoints_of({"enable_kv_cache_events": False, "publisher": "zmq"}) == []
    assert endpoints_of({"publisher": "zmq"}) == [Endpoint("tcp://127.0.0.1:5557")], "SGLang has no enable flag"
    assert endpoints_of({"publisher": "null"}) == [] == endpoints_of({}) == endpoints_of(config | {"endpoint": "tcp://*:0"})
    told = {"1": config | {"endpoint": "tcp://10.1.1.1:40001", "replay_endpoint": None}, "0": config, "x": 3}
    assert [(e.events, e.rank, e.bind) for e in of_sources(told, "h", "tcp://*:0")] == [
        ("tcp://h:5557", 0, False), ("tcp://10.1.1.1:40001", 1, False),
    ]  # fmt: skip
    assert of_address("bind:tcp://*:5557")[0] == Endpoint("tcp://*:5557", bind=True)
    assert of_address("tcp://*:5557", "tcp://*:5558", "::1")[0] == Endpoint("tcp://[::1]:5557", "tcp://[::1]:5558")


def test_media() -> None:
    assert [medium_of(m) for m in ("GPU", "CPU", "cpu", "CPU_PINNED", "STORAGE", "DISK", "Tape", None)] == [
        "device", "host", "host", "host", "disk", "disk", "tape", None,
    ]  # fmt: skip
    assert (medium_of("CPU", True), medium_of("STORAGE", True)) == ("peer", "pool")


# -- rows -------------------------------------------------------------------------------------------------------------


def _capture(folder: Path, messages: list[bytes], *, server: dict[str, Any] | None = None, **more: Any) -> Any:
    """Publish ``messages`` to a collector and give the rows of `blocks`."""

    async def go(ctx: Any, publisher: Publisher) -> None:
        source = KvEvents(ctx, publisher.events, publisher.replay)
        assert (await source.probe()).available
        await source.start()
        await asyncio.to_thread(publisher.wait)
        for m in messages:
            publisher.send(m)
        publisher.send(batch(rank=0))
        await asyncio.to_thread(until, lambda: source._ranks[0].sequence._expected == len(messages) + 1)
        await source.sample()
        await source.close()

    with context(folder, **(SHAPE if server is None else server), **more) as ctx, Publisher() as publisher:
        asyncio.run(go(ctx, publisher))
    return rows(folder, "blocks")


def test_rows_of_blocks(tmp_path: Path) -> None:
    a, b, c = b"a" * 32, b"b" * 32, b"c" * 32
    frame = _capture(
        tmp_path / "t.trace",
        [
            batch(stored([a, b]), stored([c], b)),
            batch(stored([a], medium="CPU"), at=1_700_000_000.25),
            batch(removed([a]), removed([b"?" * 32]), removed([a], "CPU"), at=1_700_000_000.5),
            batch(stored([a]), at=1_700_000_001.25, rank=3),
            batch({"type": "AllBlocksCleared"}, at=1_700_000_002.0),
        ],
    )
    ha, hb, hc = (block_hash(h, None, KEY.key) for h in (a, b, c))
    got = frame.select("event", "hash", "parent", "medium", "bytes").rows()
    size = 32 * TOKEN_BYTES
    assert got == [
        ("stored", ha, None, "device", size),
        ("stored", hb, ha, "device", size),
        ("stored", hc, hb, "device", size),
        ("copied", ha, None, "host", size),
        ("evicted", ha, None, "device", size),
        ("evicted", block_hash(b"?" * 32, None, KEY.key), None, "device", size),
        ("evicted", ha, None, "host", size),
        ("stored", ha, None, "device", size),
        ("cleared", None, None, None, None),
    ]
    assert frame["dp_rank"].to_list() == [0] * 7 + [3, 0]
    assert frame["source"].unique().to_list() == ["kv-events"] and frame["server"].unique().to_list() == ["s"]
    # The publisher's wall clock is this host's: the trace clock has moved away from it by less than a minute.
    assert abs(frame["time_ns"].min() - 1_700_000_000 * 10**9) < 60 * 10**9
    assert abs(frame["time_ns"].max() - frame["time_ns"].min() - 2 * 10**9) < 10**8


def test_no_token_id_is_in_the_trace(tmp_path: Path) -> None:
    marks = [7_777_777, 8_888_888] * 16
    _capture(tmp_path / "t.trace", [batch(stored([b"a" * 32]) | {"token_ids": marks})])
    for path in (tmp_path / "t.trace").rglob("*"):
        if path.is_file():
            assert not any(m.to_bytes(4, order) in path.read_bytes() for m in marks[:2] for order in ("little", "big"))


def test_hashes_are_the_keys(tmp_path: Path) -> None:
    one = _capture(tmp_path / "1.trace", [batch(stored([5]))])
    same = _capture(tmp_path / "2.trace", [batch(stored([5]))])
    none = _capture(tmp_path / "3.trace", [batch(stored([5], None))], key=None)
    again = _capture(tmp_path / "4.trace", [batch(stored([5]))], key=None)
    assert one["hash"].to_list() == same["hash"].to_list()
    assert len({one["hash"][0], none["hash"][0], again["hash"][0]}) == 3
    assert block_hash(5, None, KEY.key) != block_hash(5, 1, KEY.key) != block_hash(b"\x05", 1, KEY.key)
    assert block_hash(5, 0, KEY.key) == block_hash(5, None, KEY.key)


def test_bytes_are_null_where_they_are_not_known(tmp_path: Path) -> None:
    assert _capture(tmp_path / "1.trace", [batch(stored([1]))], server={})["bytes"].to_list() == [None]
    hybrid = _capture(tmp_path / "2.trace", [batch(stored([1], group_idx=0), stored([1], group_idx=1))])
    assert hybrid["bytes"].to_list() == [None, None] and hybrid["hash"].n_unique() == 2
    # An offloading tier's placeholder: no size of its own, but the same block's on the device.
    copied = _capture(tmp_path / "3.trace", [batch(stored([1]), stored([1], medium="CPU") | {"block_size": 0})])
    assert copied.select("event", "bytes").rows() == [("stored", 32 * TOKEN_BYTES), ("copied", 32 * TOKEN_BYTES)]
    strange = _capture(tmp_path / "4.trace", [batch(stored([1], medium="CPU") | {"block_size": 0, "token_ids": []})])
    assert strange.select("event", "bytes").rows() == [("stored", None)]


def test_a_block_held_twice_is_stored_and_evicted_twice(tmp_path: Path) -> None:
    frame = _capture(
        tmp_path / "t.trace", [batch(stored([1]), stored([1]), removed([1]), stored([1], medium="CPU"), removed([1]))]
    )
    assert frame["event"].to_list() == ["stored", "stored", "evicted", "copied", "evicted"]


# -- gaps, replays and restarts on real sockets -------------------------------------------------------------------------


def _gap(folder: Path, *, replay: bool, buffer: int = 10_000, old: bool = False) -> tuple[Any, Any, Publisher]:
    """Messages 0 to 9, of which 3 to 6 are lost on the wire."""

    async def go(ctx: Any, publisher: Publisher) -> KvEvents:
        source = KvEvents(ctx, publisher.events, publisher.replay)
        await source.start()
        await asyncio.to_thread(publisher.wait)
        for n in range(10):
            publisher.send(batch(stored([n + 1]), at=1_700_000_000.0 + n), lose=3 <= n <= 6)
        await asyncio.to_thread(
            until, lambda: source._ranks[0].sequence._expected == 10 and not source._ranks[0].sequence.waiting
        )
        await source.close()
        return source

    with context(folder, **SHAPE) as ctx, Publisher(replay=replay, buffer=buffer, old=old) as publisher:
        source = asyncio.run(go(ctx, publisher))
    return rows(folder, "blocks"), source, publisher


@pytest.mark.parametrize("old", [False, True])
def test_a_gap_is_filled_by_replay(tmp_path: Path, old: bool) -> None:
    frame, source, publisher = _gap(tmp_path / "t.trace", replay=True, old=old)
    assert frame["hash"].to_list() == [block_hash(n + 1, None, KEY.key) for n in range(10)]
    assert publisher.asked == [3]
    assert source._ranks[0].sequence.replayed_count == 4
    assert events(tmp_path / "t.trace", "gap") == []
    assert any("had by replay" in n for n in source.notes())


def test_a_gap_without_replay_is_told(tmp_path: Path) -> None:
    frame, source, _ = _gap(tmp_path / "t.trace", replay=False)
    assert frame["hash"].to_list() == [block_hash(n + 1, None, KEY.key) for n in (0, 1, 2, 7, 8, 9)]
    assert events(tmp_path / "t.trace", "gap") == ["4 batches of KV events of rank 0 are lost (3 to 6)"]
    assert source.notes()[0] == "s: 4 batches of KV events are lost: `blocks` has gaps (see `events`)."


def test_what_the_replay_has_no_more_is_told(tmp_path: Path) -> None:
    frame, _, _ = _gap(tmp_path / "t.trace", replay=True, buffer=4)
    # At 7 the publisher still has 4 to 7, or later ones if the question came late: nothing is given twice or made up.
    told = events(tmp_path / "t.trace", "gap")
    assert len(told) == 1 and told[0].split("(")[1].startswith("3 to ")
    lost = int(told[0].split(" to ")[1].rstrip(")")) - 3 + 1
    assert frame["hash"].n_unique() == frame.height == 10 - lost


def test_a_restarted_publisher(tmp_path: Path) -> None:
    async def go(ctx: Any) -> None:
        first = Publisher(replay=False)
        source = KvEvents(ctx, first.events)
        await source.start()
        await asyncio.to_thread(first.wait)
        first.send(batch(stored([1])))
        first.send(batch(stored([2], medium="CPU")))
        await asyncio.to_thread(until, lambda: source.rows == 2)
        first.close()
        second = Publisher(events=first.events, replay=False)
        await asyncio.to_thread(second.wait)
        second.send(batch(stored([2])))
        await asyncio.to_thread(until, lambda: source.rows == 3)
        second.close()
        await source.close()

    with context(tmp_path / "t.trace", **SHAPE) as ctx:
        asyncio.run(go(ctx))
    assert events(tmp_path / "t.trace", "restart") == ["the publisher of KV events of rank 0 began anew"]
    # After the restart its host memory is empty: the block was stored, not copied from there.
    assert rows(tmp_path / "t.trace", "blocks")["event"].to_list() == ["stored", "stored", "stored"]


def test_garbage_on_the_wire_is_counted(tmp_path: Path) -> None:
    async def go(ctx: Any, publisher: Publisher) -> dict[str, int]:
        source = KvEvents(ctx, publisher.events)
        await source.start()
        await asyncio.to_thread(publisher.wait)
        publisher.raw(b"hello")
        publisher.raw(b"", b"short", b"")
        publisher.send(b"\xc1 no msgpack")
        publisher.send(batch({"type": "BlockDreamt"}, 5, stored([1])))
        await asyncio.to_thread(until, lambda: source.rows == 1)
        await source.close()
        return dict(ctx.writer.manifest.rows_dropped)

    with context(tmp_path / "t.trace", **SHAPE) as ctx, Publisher(replay=False) as publisher:
        dropped = asyncio.run(go(ctx, publisher))
    assert dropped == {
        "kv-events: message that is not topic, number, payload": 2,
        "kv-events: batch that is not [time, events, rank]": 1,
        "kv-events: event of unknown type BlockDreamt": 1,
        "kv-events: event that cannot be read": 1,
    }


def test_a_publisher_that_connects(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    async def go(ctx: Any) -> None:
        source = KvEvents(ctx, f"bind:tcp://127.0.0.1:{port}")
        assert (await source.probe()).available
        await source.start()
        with Publisher(events=f"connect:tcp://127.0.0.1:{port}", replay=False) as publisher:
            await asyncio.to_thread(publisher.wait)
            publisher.send(batch(stored([1])))
            await asyncio.to_thread(until, lambda: source.rows == 1)
        await source.close()

    with context(tmp_path / "t.trace", **SHAPE) as ctx:
        asyncio.run(go(ctx))


def test_a_probe_says_why_not(tmp_path: Path) -> None:
    async def go(ctx: Any) -> list[Any]:
        with socket.socket() as closed, socket.socket() as web:
            closed.bind(("127.0.0.1", 0))
            web.bind(("127.0.0.1", 0))
            web.listen()
            shut, other = closed.getsockname()[1], web.getsockname()[1]
            found = [await KvEvents(ctx, None).probe(), await KvEvents(ctx, f"tcp://127.0.0.1:{shut}").probe()]

            async def http() -> None:
                connection, _ = await asyncio.to_thread(web.accept)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                connection.close()

            task = asyncio.create_task(http())
            found.append(await KvEvents(ctx, f"tcp://127.0.0.1:{other}").probe())
            await task
            found.append(await KvEvents(ctx, f"bind:tcp://127.0.0.1:{other}").probe())
            found.append(await KvEvents(ctx, "ipc:///nowhere/at.all").probe())
            found.append(await KvEvents(ctx, "tcp://nonsense").probe())
            return found

    with context(tmp_path / "t.trace") as ctx:
        found = asyncio.run(go(ctx))
    assert not any(f.available for f in found)
    said = [f.reason or "" for f in found]
    assert "--kv-events-config" in said[0] and "enable_kv_cache_events" in said[0]
    assert "nothing listens" in said[1] and "no ZeroMQ socket" in said[2] and "cannot be bound" in said[3]
    assert "there is no socket" in said[4] and "no host and port" in said[5]


def test_a_foreign_clock_is_told_and_changes_no_time(tmp_path: Path) -> None:
    """A publisher on another host whose clock is 40 s ahead: times stay as they were stamped."""
    from hoptrace.collectors.engines.kv_events import _Rank

    with context(tmp_path / "t.trace", **SHAPE) as ctx:
        source = KvEvents(ctx, [Endpoint("tcp://10.9.8.7:5557")])
        rank: _Rank = source._ranks[0]
        clock = ctx.writer.clock  # type: ignore[union-attr]
        received = clock.now_ns() - clock.utc_offset_ns
        ahead = (clock.now_ns() + 40 * 10**9) / 1e9
        rank.live([b"", (0).to_bytes(8, "big"), batch(stored([1]), at=ahead)], received)
        rank.end()
    (row,) = rows(tmp_path / "t.trace", "clock_sync").rows(named=True)
    assert row["host"] == "10.9.8.7" and abs(row["offset_ns"] - 40 * 10**9) < 10**8 and row["uncertainty_ns"] is None
    assert rows(tmp_path / "t.trace", "blocks")["time_ns"][0] == round(ahead * 1e9)
