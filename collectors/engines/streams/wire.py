"""TCP connections to one server port, from captured segments to conversations. Knows nothing of sockets and interfaces.

Bytes that were not captured are given up as soon as it is certain that they won't come: the receiver has confirmed them, and has
gone on (a request after the answer, an answer after the request) or some time has passed. So the order of requests and answers
that a conversation is told is that of the wire, with gaps in it, and no answer meets another's request.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Literal, Protocol

from hoptrace.collectors.engines.streams.packets import ACK, FIN, RST, SYN, Segment
from hoptrace.collectors.engines.streams.reassembly import Piece, Stream

__all__ = ["Talk", "Wire"]

CONFIRMED_WAIT_NS = 300_000_000
"""How long to wait for bytes that the receiver has confirmed: they come late only if the capture mixed up the order."""
MISSING_WAIT_NS = 10_000_000_000
"""How long to wait for bytes that nobody has confirmed: they may be sent again (in Linux after 0.2 s, 0.4 s, …: RFC 6298)."""
HELD_BYTES, HELD_PIECES, HELD_BYTES_ALL = 4 << 20, 4096, 64 << 20
"""What may be kept behind missing bytes: of one direction, and of all."""
CONNECTIONS = 16_384
_IDLE_NS = 3_600_000_000_000
_LINGER_NS = 10_000_000_000
_ADDRESSES = 64
_FAR = 1 << 24  # boxes on the way make resets with numbers of their own

_TLS = re.compile(rb"\x16\x03[\x00-\x04]")
Side = Literal["client", "server"]


class Talk(Protocol):
    """What a connection's bytes are told to: see :class:`~hoptrace.collectors.engines.streams.conversation.Conversation`."""

    def from_client(self, data: bytes, now_ns: int) -> None: ...
    def from_server(self, data: bytes, now_ns: int, late: bool = False) -> None: ...
    def client_closed(self, now_ns: int) -> None: ...
    def server_closed(self, now_ns: int, reset: bool = False) -> None: ...
    def lost(self, now_ns: int, side: Side) -> None: ...
    def ended(self, now_ns: int) -> None: ...


class _Connection:
    """``up`` (from the client) and ``down`` are null until it is known where they begin."""

    __slots__ = ("closed", "down", "key", "last_ns", "noticed", "opaque", "syn", "talk", "told_client", "up")

    def __init__(self, key: bytes, talk: Talk, now_ns: int) -> None:
        self.key = key
        self.talk = talk
        self.syn: int | None = None
        self.up: Stream | None = None
        self.down: Stream | None = None
        self.last_ns = now_ns
        self.noticed: tuple[int, int, int] | None = None
        self.opaque = self.closed = self.told_client = False

    @property
    def streams(self) -> list[tuple[Side, Stream]]:
        found: list[tuple[Side, Stream | None]] = [("client", self.up), ("server", self.down)]
        return [(side, stream) for side, stream in found if stream is not None]

    @property
    def waits(self) -> bool:
        return any(stream.waits for _, stream in self.streams)

    @property
    def progress(self) -> tuple[int, int]:
        return (self.up.at if self.up else 0, self.down.at if self.down else 0)


class Wire:
    """All connections to one port. ``make`` gives a new conversation; ``ours`` says whether an address is the server's.

    ``connections``: open now; ``joined``: their beginning was not seen; ``lost_bytes`` in ``gaps`` of requests and answers;
    ``tls``: connections that can't be read; ``forgotten``: given up since they were too many or silent for an hour;
    ``elsewhere``: packets with a payload by address and port of other servers.
    """

    def __init__(self, make: Callable[[], Talk], ours: Callable[[bytes], bool] = lambda address: True) -> None:
        self._make = make
        self._ours = ours
        self._table: OrderedDict[bytes, _Connection] = OrderedDict()
        self._missing: dict[bytes, _Connection] = {}
        self._closed: deque[tuple[int, _Connection]] = deque()
        self._swept_ns = 0
        self.connections = 0
        self.joined = 0
        self.gaps = 0
        self.lost_bytes = 0
        self.tls = 0
        self.forgotten = 0
        self.elsewhere: Counter[bytes] = Counter()

    def feed(self, s: Segment, time_ns: int) -> None:
        """One captured segment."""
        key = s.client + s.server
        c = self._table.get(key)
        if c is None:
            c = self._new(s, key, time_ns)
            if c is None:
                return
        else:
            self._table.move_to_end(key)
            if s.flags == ACK and not s.size and s.window and c.up is not None and c.down is not None and not c.closed:
                # Half of all packets, and nothing but this.
                c.last_ns = time_ns
                heard = c.down if s.to_server else c.up
                heard.acked(s.ack)
                if heard.confirmed and not c.opaque:
                    self._missing[key] = c
                return
        if s.flags & SYN:
            c = self._syn(c, s, time_ns)
        c.last_ns = time_ns
        if c.closed:
            return
        if not c.opaque:
            self._read(c, s, time_ns)
        elif s.flags & RST or (s.flags & FIN and not s.to_server):
            self._close(c, time_ns)

    def tick(self, now_ns: int) -> None:
        """Give up bytes that did not come in time, forget connections that have ended. Call it a few times a second."""
        held = sum(stream.held_bytes for c in self._missing.values() for _, stream in c.streams)
        for key, c in list(self._missing.items()):
            if c.closed or not c.waits:
                c.noticed = None
                del self._missing[key]
                continue
            if c.noticed is None or c.noticed[1:] != c.progress:
                c.noticed = (now_ns, *c.progress)
            waited_ns = now_ns - c.noticed[0]
            for side, stream in c.streams:
                if held > HELD_BYTES_ALL or waited_ns > MISSING_WAIT_NS:
                    self._skip(c, side, stream, now_ns, everything=True)
                elif waited_ns > CONFIRMED_WAIT_NS and stream.confirmed:
                    self._skip(c, side, stream, now_ns)
            self._ends(c, now_ns)
        while self._closed and now_ns - self._closed[0][0] > _LINGER_NS:
            _, c = self._closed.popleft()
            if self._table.get(c.key) is c:
                del self._table[c.key]
        if now_ns - self._swept_ns > _LINGER_NS:
            self._swept_ns = now_ns
            for c in list(self._table.values()):
                if now_ns - c.last_ns <= _IDLE_NS:
                    break
                self._forget(c, now_ns)

    def close(self, now_ns: int) -> None:
        """The capture ends: bytes that are known to be missing are lost, and what is open is cut."""
        for c in list(self._table.values()):
            if not c.closed:
                for side, stream in c.streams:
                    self._skip(c, side, stream, now_ns, everything=True)
                self._ends(c, now_ns)
            if not c.closed:
                c.talk.ended(now_ns)
                self._close(c, now_ns)

    # -- begin --------------------------------------------------------------------------------------------------------

    def _new(self, s: Segment, key: bytes, now_ns: int) -> _Connection | None:
        if not self._ours(s.server[:-2]):
            if s.size and (s.server in self.elsewhere or len(self.elsewhere) < _ADDRESSES):
                self.elsewhere[s.server] += 1
            return None
        if not s.flags & SYN and (not s.size or s.flags & RST):
            return None  # nothing to read; perhaps the last word of a connection that is over
        c = self._table[key] = _Connection(key, self._make(), now_ns)
        self.connections += 1
        if not s.flags & SYN:
            self.joined += 1
            c.talk.lost(now_ns, "client")
            c.talk.lost(now_ns, "server")
        while len(self._table) > CONNECTIONS:
            self._forget(next(iter(self._table.values())), now_ns)
        return c

    def _syn(self, c: _Connection, s: Segment, now_ns: int) -> _Connection:
        """Places where the streams begin. The same addresses and ports may be another connection's by now."""
        if not s.to_server:
            if s.flags & ACK and c.down is None and not c.closed:
                c.down = Stream(s.seq + 1)
                c.up = c.up or Stream(s.ack)
            return c
        if s.flags & ACK or (c.syn == s.seq and not c.closed):
            return c
        if c.syn is not None or c.up is not None or c.down is not None or c.closed:
            if not c.closed:
                c.talk.lost(c.last_ns, "server")
                c.talk.server_closed(c.last_ns, reset=True)
                self._close(c, now_ns)
            c = self._table[c.key] = _Connection(c.key, self._make(), now_ns)
            self.connections += 1
        c.syn = s.seq
        c.up = Stream(s.seq + 1)
        return c

    # -- read ---------------------------------------------------------------------------------------------------------

    def _read(self, c: _Connection, s: Segment, now_ns: int) -> None:
        flags, begin = s.flags, s.seq + 1 if s.flags & SYN else s.seq
        if s.to_server:
            if c.up is None:
                c.up = Stream(begin)
            if c.down is None and flags & ACK and (s.size or c.syn is not None):
                c.down = Stream(s.ack)
            mine, other = c.up, c.down
        else:
            if c.down is None:
                c.down = Stream(begin)
            mine, other = c.down, c.up
        if other is not None:
            if flags & ACK:
                other.acked(s.ack)
                if s.size and other.confirmed:
                    # Who now speaks had heard everything before.
                    self._skip(c, "server" if s.to_server else "client", other, now_ns)
            if not s.window and not flags & (SYN | RST):
                other.late_next = True  # who reads too slowly holds up what comes next
        if s.size:
            for piece in mine.add(begin, s.data, now_ns):
                self._tell(c, s.to_server, piece)
        if flags & FIN:
            mine.ends(s.seq + s.size)
        if flags & RST:
            self._reset(c, s, mine, now_ns)
        elif mine.held_bytes > HELD_BYTES or mine.held > HELD_PIECES:
            self._skip(c, "client" if s.to_server else "server", mine, now_ns, everything=True)
        if mine.told_end or (other is not None and other.told_end):
            self._ends(c, now_ns)
        if not c.closed and (mine.waits or (other is not None and other.waits)):
            self._missing[c.key] = c

    def _tell(self, c: _Connection, to_server: bool, piece: Piece) -> None:
        if c.opaque:
            return
        if not to_server:
            c.talk.from_server(piece.data, piece.time_ns, piece.late)
        elif c.syn is not None and c.up is not None and c.up.at == len(piece.data) and _TLS.match(piece.data):
            self.tls += 1
            c.opaque = True
        else:
            c.talk.from_client(piece.data, piece.time_ns)

    def _skip(self, c: _Connection, side: Side, stream: Stream, now_ns: int, *, everything: bool = False) -> None:
        for found in stream.skip(everything):
            if isinstance(found, int):
                if not c.opaque:
                    self.gaps += 1
                    self.lost_bytes += found
                    c.talk.lost(now_ns, side)
            else:
                self._tell(c, side == "client", found)

    # -- end ----------------------------------------------------------------------------------------------------------

    def _ends(self, c: _Connection, now_ns: int) -> None:
        """Tell of the ends that have been reached."""
        if c.up is not None and c.up.ended and not c.told_client:
            c.told_client = True
            c.talk.client_closed(now_ns)
        if c.down is not None and c.down.ended and not c.closed:
            c.talk.server_closed(now_ns)
            self._close(c, now_ns)

    def _reset(self, c: _Connection, s: Segment, mine: Stream, now_ns: int) -> None:
        """The connection is over at once. What its sender had sent before and was not captured is missing."""
        if 0 < mine.offset(s.seq) < _FAR:
            mine.ends(s.seq)
        for side, stream in c.streams:
            self._skip(c, side, stream, now_ns, everything=True)
        if s.to_server and not c.told_client:
            c.told_client = True
            c.talk.client_closed(now_ns)
        c.talk.server_closed(now_ns, reset=True)
        self._close(c, now_ns)

    def _close(self, c: _Connection, now_ns: int) -> None:
        """Nothing more is read. It is kept for a while, so that what still comes is not taken for a new connection."""
        c.closed = True
        self.connections -= 1
        self._missing.pop(c.key, None)
        self._closed.append((now_ns, c))

    def _forget(self, c: _Connection, now_ns: int) -> None:
        if not c.closed:
            c.talk.ended(now_ns)
            c.closed = True
            self.connections -= 1
            self.forgotten += 1
        del self._table[c.key]
        self._missing.pop(c.key, None)
