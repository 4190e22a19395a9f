"""Connections from packets: beginnings, ends, loss, ports used again; a conversation is told what came and what is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.frames import PSH, Peers, parsed

from hoptrace.collectors.engines.streams import wire as module
from hoptrace.collectors.engines.streams.packets import ACK, FIN, RST, SYN, Segment
from hoptrace.collectors.engines.streams.wire import Wire

MS = 1_000_000
ASK, ANSWER = b"POST /v1/completions HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"


@dataclass
class Told:
    """A conversation that only remembers."""

    said: list[tuple[Any, ...]] = field(default_factory=list)

    def from_client(self, data: bytes, now_ns: int) -> None:
        self.said.append(("up", data, now_ns))

    def from_server(self, data: bytes, now_ns: int, late: bool = False) -> None:
        self.said.append(("down late" if late else "down", data, now_ns))

    def client_closed(self, now_ns: int) -> None:
        self.said.append(("client closed", now_ns))

    def server_closed(self, now_ns: int, reset: bool = False) -> None:
        self.said.append(("reset" if reset else "server closed", now_ns))

    def lost(self, now_ns: int, side: str) -> None:
        self.said.append(("lost", side, now_ns))

    def ended(self, now_ns: int) -> None:
        self.said.append(("ended", now_ns))

    @property
    def words(self) -> list[Any]:
        """What was said, without times: bytes as they are, else words."""
        return [s[1] if s[0].startswith(("up", "down")) else " ".join(w for w in s if isinstance(w, str)) for s in self.said]


class Line:
    """A wire, and what its conversations were told, in the order in which they began. Packets come a millisecond apart."""

    def __init__(self) -> None:
        self.talks: list[Told] = []
        self.wire = Wire(self._make)
        self.now_ns = 0

    def _make(self) -> Told:
        self.talks.append(Told())
        return self.talks[-1]

    def feed(self, *packets: bytes | Segment) -> None:
        for packet in packets:
            self.now_ns += MS
            self.wire.feed(packet if isinstance(packet, Segment) else parsed(packet), self.now_ns)

    def wait(self, ns: int) -> None:
        """Time goes by in which nothing comes."""
        self.wire.tick(self.now_ns)
        self.now_ns += ns
        self.wire.tick(self.now_ns)

    @property
    def words(self) -> list[Any]:
        (talk,) = self.talks
        return talk.words


def test_a_connection_from_beginning_to_end() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK), peers.down(ANSWER), peers.up(), *peers.close())
    (talk,) = line.talks
    assert talk.said == [("up", ASK, 4 * MS), ("down", ANSWER, 5 * MS), ("server closed", 7 * MS)]
    assert (line.wire.connections, line.wire.joined, line.wire.gaps) == (0, 0, 0)
    line.wait(20_000 * MS)
    assert not line.wire._table and not line.wire._missing


def test_a_client_that_ends_its_side_is_told_apart_from_one_that_is_gone() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK), peers.up(flags=FIN | ACK), peers.down(ANSWER))
    assert line.words == [ASK, "client closed", ANSWER] and line.wire.connections == 1
    line.feed(peers.reset(up=True))
    assert line.words[3:] == ["reset"] and line.wire.connections == 0


def test_resets() -> None:
    for up, words in ((True, ["client closed", "reset"]), (False, ["reset"])):
        line, peers = Line(), Peers()
        line.feed(*peers.open(), peers.up(ASK), peers.down(ANSWER), peers.reset(up))
        assert line.words == [ASK, ANSWER, *words]
        line.feed(peers.up(b"x"), peers.down(b"y"))
        assert len(line.words) == 2 + len(words), "nothing is told after the end"


def test_a_refused_connection_is_nobody() -> None:
    line, peers = Line(), Peers()
    line.feed(peers.up(flags=SYN), peers.reset(up=False))
    assert line.words == ["reset"] and line.wire.connections == 0


def test_data_with_the_syn_is_read() -> None:
    line, peers = Line(), Peers()
    line.feed(peers.up(ASK, flags=SYN), peers.down(flags=SYN | ACK), peers.down(ANSWER))
    assert line.words == [ASK, ANSWER]


def test_a_syn_that_was_not_captured() -> None:
    for missing in ({0}, {1}):
        line, peers = Line(), Peers()
        line.feed(*(p for i, p in enumerate(peers.open()) if i not in missing), peers.up(ASK), peers.down(ANSWER))
        assert line.words == [ASK, ANSWER] and line.wire.joined == 0


def test_a_connection_seen_from_its_middle_on_is_marked_and_goes_on() -> None:
    line, peers = Line(), Peers()
    line.feed(peers.down(b"rest of an answer"), peers.up(), peers.up(ASK), peers.down(ANSWER))
    assert line.words == ["lost client", "lost server", b"rest of an answer", ASK, ANSWER]
    assert (line.wire.joined, line.wire.gaps, line.wire.lost_bytes) == (1, 0, 0)


def test_what_an_ended_connection_still_sends_begins_no_other() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), *peers.close(), peers.up(), peers.up(b"late", flags=PSH | ACK))
    line.feed(Peers(client=("10.0.0.9", 41_000)).up(), Peers(client=("10.0.0.9", 41_001)).reset(up=True))
    assert len(line.talks) == 1 and line.wire.joined == 0


def test_the_same_ports_again_are_another_connection() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK))
    again = Peers(client_seq=77_000, server_seq=5)
    line.feed(*again.open(), again.up(ASK), again.down(ANSWER))
    assert [t.words for t in line.talks] == [[ASK, "lost server", "reset"], [ASK, ANSWER]]
    assert line.wire.connections == 1
    line.feed(again.packets[0])
    assert len(line.talks) == 2, "a SYN that is sent again is the same connection"
    line.feed(*again.close())
    third = Peers(client_seq=1, server_seq=2)
    line.feed(*third.open(), third.up(ASK))
    assert len(line.talks) == 3 and line.talks[2].words == [ASK]
    line.wait(20_000 * MS)
    assert line.wire.connections == 1, "the end of the second has not taken the third along"
    line.feed(third.down(ANSWER))
    assert line.talks[2].words == [ASK, ANSWER]


def test_packets_that_come_twice_are_told_once() -> None:
    line, peers = Line(), Peers()
    packets = [*peers.open(), peers.up(ASK), peers.down(ANSWER), *peers.close()]
    line.feed(*(p for packet in packets for p in (packet, packet)))
    assert line.words == [ASK, ANSWER, "server closed"]


def test_missing_bytes_of_an_answer_are_given_up_when_confirmed_and_some_time_has_passed() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK), peers.down(ANSWER))
    peers.down(b"MISSING")
    line.feed(peers.down(b"more"), peers.up())
    line.wait(100 * MS)
    assert line.words == [ASK, ANSWER]
    line.wait(300 * MS)
    assert line.words == [ASK, ANSWER, "lost server", b"more"]
    assert (line.wire.gaps, line.wire.lost_bytes) == (1, 7)
    line.feed(peers.down(b"next"))
    line.wait(0)
    assert line.words[4:] == [b"next"] and not line.wire._missing


def test_the_end_of_an_answer_that_was_not_captured_is_missed_though_nothing_follows() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK), peers.down(ANSWER))
    peers.down(b"MISSING")
    line.feed(peers.up())
    line.wait(400 * MS)
    assert line.words == [ASK, ANSWER, "lost server"] and line.wire.lost_bytes == 7


def test_bytes_that_nobody_confirmed_may_be_sent_again() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK))
    first = peers.down(ANSWER)
    line.feed(peers.down(b"more"))
    line.wait(3_000 * MS)
    line.feed(first)
    assert line.talks[0].said[1:] == [("down", ANSWER, line.now_ns), ("down late", b"more", line.now_ns)]
    peers.down(b"never")
    line.feed(peers.down(b"end"))
    line.wait(10_001 * MS)
    assert line.words[3:] == ["lost server", b"end"]


def test_who_answers_has_heard_everything_so_a_request_that_is_missing_is_given_up_before_its_answer() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open())
    peers.up(ASK)
    line.feed(peers.down(ANSWER), peers.up(ASK), peers.down(b"2"))
    assert line.words == ["lost client", ANSWER, ASK, b"2"]


def test_who_asks_again_has_heard_the_answer_so_what_is_missing_of_it_is_given_up_before_the_request() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK), peers.down(ANSWER))
    peers.down(b"MISSING")
    line.feed(peers.down(b"end"), peers.up(ASK), peers.down(ANSWER))
    assert line.words == [ASK, ANSWER, "lost server", b"end", ASK, ANSWER]


def test_the_end_is_told_only_behind_what_is_missing_before_it() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK))
    peers.down(ANSWER)
    line.feed(peers.down(flags=FIN | ACK))
    assert line.words == [ASK]
    line.feed(peers.up(flags=FIN | ACK))
    line.wait(400 * MS)
    assert line.words == [ASK, "client closed", "lost server", "server closed"] and line.wire.connections == 0


def test_a_packet_that_the_capture_cut_is_a_gap() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK))
    whole = parsed(peers.down(ANSWER))
    whole.data = whole.data[:5]
    line.feed(whole, peers.down(b"next"), peers.up())
    line.wait(400 * MS)
    assert line.words == [ASK, ANSWER[:5], "lost server", b"next"] and line.wire.lost_bytes == len(ANSWER) - 5


def test_a_closed_window_makes_what_comes_next_late() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK), peers.up(window=0), peers.up(window=9), peers.down(b"a"), peers.down(b"b"))
    assert [s[0] for s in line.talks[0].said] == ["up", "down late", "down"]


def test_tls_is_counted_and_not_read() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(b"\x16\x03\x01\x02\x00hello"), peers.down(b"\x16\x03\x03"), peers.up(b"x" * 100))
    assert line.words == [] and (line.wire.tls, line.wire.connections) == (1, 1)
    peers.up(b"not captured")
    line.feed(*peers.close())
    line.wait(20_000 * MS)
    assert (line.wire.connections, line.wire.gaps) == (0, 0)


def test_other_hosts_with_the_same_port_are_counted_and_not_recorded() -> None:
    line = Line()
    line.wire = Wire(line._make, ours=lambda address: address == bytes([10, 0, 0, 1]))
    ours, other = Peers(), Peers(server=("10.0.0.7", 8000))
    line.feed(*ours.open(), *other.open(), other.up(ASK), other.down(ANSWER), ours.up(ASK))
    assert line.words == [ASK]
    assert dict(line.wire.elsewhere) == {bytes([10, 0, 0, 7, 0x1F, 0x40]): 2}


def test_the_end_of_the_capture_cuts_what_is_open() -> None:
    line = Line()
    open_one, lossy = Peers(), Peers(client=("10.0.0.9", 40_001))
    line.feed(*open_one.open(), open_one.up(ASK), *lossy.open(), lossy.up(ASK))
    lossy.down(b"MISSING")
    line.feed(lossy.down(b"x"))
    line.wire.close(99)
    assert [t.said[-1] for t in line.talks] == [("ended", 99), ("ended", 99)]
    assert line.talks[1].words == [ASK, "lost server", b"x", "ended"]
    assert line.wire.connections == 0


def test_connections_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "CONNECTIONS", 3)
    line = Line()
    for port in range(5):
        line.feed(*Peers(client=("10.0.0.9", 1000 + port)).open())
    assert [t.words for t in line.talks] == [["ended"], ["ended"], [], [], []]
    assert (line.wire.connections, line.wire.forgotten) == (3, 2)


def test_a_silent_connection_is_forgotten_after_an_hour_only() -> None:
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK))
    line.wait(3_500_000 * MS)
    assert line.wire.connections == 1, "a prompt may take long"
    line.wait(200_000 * MS)
    assert line.words == [ASK, "ended"] and (line.wire.connections, line.wire.forgotten) == (0, 1)


def test_what_is_held_behind_a_gap_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "HELD_PIECES", 10)
    line, peers = Line(), Peers()
    line.feed(*peers.open(), peers.up(ASK))
    peers.down(b"MISSING")
    line.feed(*(peers.down(b"x") for _ in range(11)))
    assert line.words == [ASK, "lost server", *[b"x"] * 11]
    monkeypatch.setattr(module, "HELD_BYTES", 100)
    peers.down(b"MISSING")
    line.feed(peers.down(b"y" * 101))
    assert line.words[-2:] == ["lost server", b"y" * 101]
    monkeypatch.setattr(module, "HELD_BYTES_ALL", 50)
    peers.down(b"MISSING")
    line.feed(peers.down(b"z" * 60))
    line.wire.tick(line.now_ns)
    assert line.words[-2:] == ["lost server", b"z" * 60]


@st.composite
def captured(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """What two peers said to each other by turns, and the packets that were captured: some are missing or come again."""
    peers = Peers(client_seq=draw(st.integers(0, 2**32 - 1)), server_seq=draw(st.integers(0, 2**32 - 1)))
    said: list[bytes] = []
    peers.open()
    for turn in range(draw(st.integers(1, 4))):
        for up in (True, False):
            for part in range(draw(st.integers(1, 3))):
                data = f"<{turn}{'u' if up else 'd'}{part}>".encode()
                (peers.up if up else peers.down)(data)
                said.append(data)
            if draw(st.booleans()):
                (peers.down if up else peers.up)()
    if draw(st.booleans()):
        peers.close()
    dropped = draw(st.sets(st.integers(0, len(peers.packets) - 1)))
    again = draw(st.sets(st.integers(0, len(peers.packets) - 1)))
    return said, [p for i, p in enumerate(peers.packets) if i not in dropped for p in [p, *([p] if i in again else [])]]


@given(captured())
def test_whatever_is_missing_what_is_told_is_in_the_wires_order_and_gaps_are_marked(
    case: tuple[list[bytes], list[bytes]],
) -> None:
    said, packets = case
    line = Line()
    line.feed(*packets)
    line.wait(11_000 * MS)
    line.wire.close(line.now_ns)
    words = [w for t in line.talks for w in t.words]
    told = b"".join(w for w in words if isinstance(w, bytes))
    # The order of the whole, for each word is told apart from the others: nothing comes twice, nothing before its time.
    places = [said.index(told[i : i + 5]) for i in range(0, len(told), 5)]
    assert places == sorted(set(places))
    assert line.wire.connections == 0 and not line.wire._missing
    if line.talks and not line.wire.joined and line.talks[0].words:
        missing = sum(len(s) for s in said) - len(told)
        seen_to_the_end = line.wire.lost_bytes >= missing
        tail = said[places[-1] + 1 :] if places else said
        assert seen_to_the_end or missing - line.wire.lost_bytes <= sum(map(len, tail)), (
            "only the unconfirmed tail may go unnoticed"
        )


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from([SYN, SYN | ACK, ACK, FIN | ACK, RST, RST | ACK, 0x3F, 0]),
            st.integers(0, 2**32 - 1) | st.integers(990, 1010),
            st.integers(0, 2**32 - 1) | st.integers(990, 1010),
            st.sampled_from([b"", b"x", ASK, ANSWER, b"\x16\x03\x01"]),
            st.integers(0, 3),
        ),
        max_size=30,
    )
)
def test_no_segments_raise(calls: list[tuple[bool, int, int, int, bytes, int]]) -> None:
    line = Line()
    for to_server, flags, seq, ack, data, more in calls:
        server = bytes([10, 0, 0, 1, 0x1F, 0x40])
        line.feed(Segment(to_server, b"client", server, seq, ack, flags, more, data, len(data) + more))
        if more == 3:
            line.wait(500 * MS)
    line.wire.close(line.now_ns)
    line.wait(20_000 * MS)
    assert line.wire.connections == 0 and not line.wire._table
