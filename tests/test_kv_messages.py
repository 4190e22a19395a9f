"""KV events: decoding of every form, the order of messages, gaps and replays, and where publishers are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kv import batch, stored

from hoptrace.collectors.engines.published.kv_endpoints import endpoints_of, of_address, of_sources
from hoptrace.collectors.engines.published.kv_events import medium_of
from hoptrace.collectors.engines.published.kv_messages import Cleared, Removed, Stored, decode_batch
from hoptrace.collectors.engines.published.kv_sequence import REPLAY_NS, Gap, Message, Restart, Sequence
from hoptrace.collectors.engines.published.zmq_stream import Endpoint

_pack = msgspec.msgpack.encode


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
