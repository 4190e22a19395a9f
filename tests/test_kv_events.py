"""KV events: the rows that come of them, on real sockets: gaps, replays, restarts, other hosts."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from support.context import KEY, context, events, rows, until
from support.kv import batch, removed, stored
from support.publisher import Publisher

from hoptrace.collectors.engines.published.kv_events import KvEvents, block_hash
from hoptrace.collectors.engines.published.zmq_stream import Endpoint

SHAPE = {"layers": 2, "kv_heads": 1, "head_size": 32, "kv_dtype": "float32", "block_size_tokens": 32}
TOKEN_BYTES = 2 * 2 * 1 * 32 * 4


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
    from hoptrace.collectors.engines.published.kv_events import _Rank

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
