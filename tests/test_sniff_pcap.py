"""Capture files: both formats in both byte orders, other units of time, files that end early or are damaged."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pcaps import block, interface, option, packet, pcap, pcapng, section

from hoptrace.collectors.engines.streams.pcap import Captured, Recording, is_pcap, read_pcap
from hoptrace.errors import InputError

NS = 1_796_040_503_091_014_603
PACKETS = [(NS, b"one"), (NS + 1_000_000_001, b"second"), (NS + 5, b"")]


def read(data: bytes) -> tuple[list[Captured], Recording]:
    recording = Recording(io.BytesIO(data), "x.pcap")
    return list(recording), recording


@pytest.mark.parametrize("order", ["<", ">"])
def test_pcap(order: str) -> None:
    found, recording = read(pcap(PACKETS, link=113, order=order))
    assert found == [Captured(113, ns, data, len(data)) for ns, data in PACKETS] and not recording.cut
    found, _ = read(pcap(PACKETS, order=order, nanoseconds=False, snap=4))
    assert found == [Captured(1, ns // 1000 * 1000, data[:4], len(data)) for ns, data in PACKETS]


@pytest.mark.parametrize("order", ["<", ">"])
def test_pcapng(order: str) -> None:
    data = (
        section(order)
        + interface(order, 1)  # microseconds where it says nothing
        + interface(order, 276, unit=9, offset_s=100)
        + interface(order, 101, unit=0x80 | 10)
        + block(order, 4, bytes(4))  # names
        + packet(order, 0, NS // 1000, b"abcde", size=9)
        + packet(order, 1, 7, b"f")
        + packet(order, 2, 1024 + 512, b"")
        + block(order, 2, struct.pack(order + "HHIIII", 1, 3, 0, 9, 1, 1) + b"g")  # the packet block before 2004
        + block(order, 3, struct.pack(order + "I", 3) + b"xyz")
        + block(order, 5, struct.pack(order + "III", 1, 0, 0) + option(order, 5, struct.pack(order + "Q", 42)) + bytes(4))
        + block(order, 0x80000BAD, b"something")
    )
    found, recording = read(data)
    assert found == [
        Captured(1, NS // 1000 * 1000, b"abcde", 9),
        Captured(276, 100_000_000_007, b"f", 1),
        Captured(101, 1_500_000_000, b"", 0),
        Captured(276, 100_000_000_009, b"g", 1),
    ]
    assert (recording.untimed, recording.dropped, recording.cut) == (1, 42, False)


def test_sections_follow_each_other_with_interfaces_of_their_own() -> None:
    found, recording = read(pcapng(PACKETS[:1]) + pcapng(PACKETS[1:2], link=101, order=">"))
    assert [(p.link, p.data) for p in found] == [(1, b"one"), (101, b"second")] and not recording.cut


@pytest.mark.parametrize("make", [pcap, pcapng])
def test_a_file_that_ends_early_gives_what_it_has(make: object) -> None:
    whole = make(PACKETS)  # type: ignore[operator]
    for length in range(12, len(whole)):
        found, recording = read(whole[:length])
        assert [p.data for p in found] == [d for _, d in PACKETS[: len(found)]]
        rest, _ = read(whole)
        assert recording.cut or [p.data for p in rest[len(found) :]] != []
    assert not read(whole)[1].cut


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04", "is no pcap or pcapng file"),
        (b"", "is no pcap or pcapng file"),
        (pcap([])[:24] + struct.pack("<IIII", 0, 0, 1 << 30, 1 << 30), "packet 1 says it is 1073741824 bytes long"),
        (section("<") + struct.pack("<II", 6, 7), "packet 1 says it is 7 bytes long"),
        (section("<")[:8] + b"\x00\x00\x00\x00" + bytes(20), "no known byte order"),
        (section("<") + packet("<", 0, 1, b"x"), "packet 1 is damaged"),
        (
            section("<") + interface("<", 1) + block("<", 6, struct.pack("<IIIII", 0, 0, 0, 99, 99)),
            "packet 1 says it is 99 bytes",
        ),
        (section("<") + interface("<", 1) + block("<", 6, b"abcd"), "packet 1 is damaged"),
    ],
)
def test_a_damaged_file_is_named_with_the_packet(data: bytes, words: str) -> None:
    with pytest.raises(InputError) as e:
        read(data)
    assert "x.pcap" in e.value.message and words in e.value.message and e.value.hint


def test_the_path_form_and_the_recognition(tmp_path: Path) -> None:
    path = tmp_path / "a.pcapng"
    path.write_bytes(pcapng(PACKETS))
    assert [p.data for p in read_pcap(path)] == [d for _, d in PACKETS]
    assert is_pcap(path.read_bytes()[:64]) and is_pcap(pcap([])) and not is_pcap(b'{"a": 1}') and not is_pcap(b"\x0a\x0d\x0d\x0a")
    with pytest.raises(InputError):
        list(read_pcap(tmp_path / "none.pcap"))


@given(st.sampled_from([pcap(PACKETS), pcapng(PACKETS), pcapng(PACKETS, order=">")]), st.data())
def test_no_bytes_do_anything_but_read_or_be_refused(whole: bytes, data: st.DataObject) -> None:
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 5))):
        damaged[data.draw(st.integers(4, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found, _ = read(bytes(damaged))
    except InputError:
        return
    assert all(p.size >= len(p.data) for p in found)
