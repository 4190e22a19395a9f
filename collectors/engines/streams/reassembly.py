"""One direction of a TCP connection, from captured segments back to its bytes, each with the time it was on the wire.

Segments may come twice, overlap, be out of order or be missing; sequence numbers wrap. Of bytes that come twice the first are
kept. Memory is bounded by whoever looks at :attr:`Stream.held_bytes` and calls :meth:`Stream.skip`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

__all__ = ["Piece", "Stream", "distance"]

_HALF, _MASK = 1 << 31, (1 << 32) - 1
_WINDOW = 1 << 30
_MOVED_NS = 1_000_000


def distance(a: int, b: int) -> int:
    """a − b for sequence numbers: −2³¹ to 2³¹ − 1 (RFC 9293, section 3.4)."""
    d = (a - b) & _MASK
    return d - (1 << 32) if d >= _HALF else d


@dataclass(slots=True)
class Piece:
    """Bytes that are next in the stream. ``late``: they waited for bytes before them, their gap is not the sender's."""

    data: bytes
    time_ns: int
    late: bool = False


class Stream:
    """Bytes from ``next_seq`` on. Positions are counted from there and do not wrap.

    ``late_next`` may be set by who knows that the next bytes were held up by the other side (it let nothing through).
    """

    def __init__(self, next_seq: int) -> None:
        self._seq = next_seq & _MASK  # of position `at`
        self.at = 0
        self._acked = 0
        self._fin: int | None = None
        self._held: list[tuple[int, bytes, int]] = []
        self._time_ns = 0
        self.held_bytes = 0
        self.late_next = False

    @property
    def next_seq(self) -> int:
        """Sequence number of the next byte."""
        return self._seq

    @property
    def ended(self) -> bool:
        """Whether all bytes up to the sender's FIN are there."""
        return self._fin is not None and self.at >= self._fin

    @property
    def told_end(self) -> bool:
        """Whether the sender's FIN was seen, though bytes before it may be missing."""
        return self._fin is not None

    @property
    def held(self) -> int:
        """How many pieces lie behind missing bytes."""
        return len(self._held)

    @property
    def waits(self) -> bool:
        """Whether bytes are missing: later ones were captured, or the receiver has confirmed them, or the end is known."""
        return bool(self._held) or self._acked > self.at or (self._fin is not None and self._fin > self.at)

    @property
    def confirmed(self) -> bool:
        """Whether the receiver has the missing bytes: they will not be sent again, so they will not be seen."""
        return self._acked > self.at

    def offset(self, seq: int) -> int:
        """How far ``seq`` lies after the next byte; negative for what is past."""
        return distance(seq, self._seq)

    def acked(self, ack: int) -> None:
        """The receiver has everything before ``ack``."""
        ahead = distance(ack, self._seq)
        if ahead >= _WINDOW:  # no window is that large (RFC 7323, section 2.3): the number is of another connection
            return
        at = self.at + ahead
        if self._fin is not None and at > self._fin:
            at = self._fin  # FIN takes one number and is no byte
        if at > self._acked:
            self._acked = at

    def ends(self, seq: int) -> None:
        """The sender's FIN stands at ``seq``."""
        if self._fin is None:
            self._fin = self.at + max(distance(seq, self._seq), 0)
            self._acked = min(self._acked, self._fin)

    def add(self, seq: int, data: bytes, time_ns: int) -> list[Piece]:
        """Take a segment's bytes; gives what is now next in the stream. Times never go back: a byte behind a hole can be read
        only when the hole is filled."""
        ahead = distance(seq, self._seq)
        if ahead == 0 and not self._held:  # nearly always
            if not data:
                return []
            late, self.late_next = self.late_next, False
            return [self._give(data, time_ns, late)]
        if ahead < 0:
            data, ahead = data[-ahead:], 0
        if not data:
            return []
        if ahead > 0:
            self._hold(self.at + ahead, data, time_ns)
            return []
        late, self.late_next = self.late_next, False
        # What is held begins somewhere in or after this: of bytes that are there already the first are kept.
        out = []
        if self._held and (room := self._held[0][0] - self.at) < len(data):
            self._hold(self.at + room, data[room:], time_ns)
            data = data[:room]
        if data:
            out.append(self._give(data, time_ns, late))
        return out + self._release() if self._held else out

    def skip(self, everything: bool) -> list[Piece | int]:
        """Give up bytes that are missing: those that the receiver has confirmed, or ``everything`` that is known to be missing.

        Gives, in order, the length of each gap and the pieces that follow it. Missing bytes that come later are not taken.
        """
        to = self._acked
        if everything:
            last = self._held[-1] if self._held else None
            to = max(to, self._fin or 0, last[0] + len(last[1]) if last else 0)
        out: list[Piece | int] = []
        while self.at < to:
            gap = min(to, self._held[0][0] if self._held else to) - self.at
            if gap > 0:
                out.append(gap)
                self.at += gap
                self._seq = (self._seq + gap) & _MASK
            out += self._release()
        return out

    # -- inside -------------------------------------------------------------------------------------------------------

    def _release(self) -> list[Piece]:
        """What was held and is next now."""
        out = []
        while self._held and self._held[0][0] <= self.at:
            position, data, at_ns = self._held.pop(0)
            self.held_bytes -= len(data)
            data = data[self.at - position :]
            if data:
                out.append(self._give(data, at_ns, self._time_ns - at_ns > _MOVED_NS))
        return out

    def _give(self, data: bytes, time_ns: int, late: bool) -> Piece:
        self.at += len(data)
        self._seq = (self._seq + len(data)) & _MASK
        self._time_ns = max(self._time_ns, time_ns)
        return Piece(data, self._time_ns, late)

    def _hold(self, position: int, data: bytes, time_ns: int) -> None:
        """Keep what is not held yet, in order and without overlap."""
        end = position + len(data)
        i = bisect_right(self._held, position, key=_position)
        if i and self._held[i - 1][0] + len(self._held[i - 1][1]) > position:
            i -= 1
        while data and i < len(self._held) and self._held[i][0] < end:
            begin, other, _ = self._held[i]
            if begin > position:
                self._keep(i, position, data[: begin - position], time_ns)
                i += 1
            stop = min(begin + len(other), end)
            data, position = data[stop - position :], stop
            i += 1
        if data:
            self._keep(i, position, data, time_ns)

    def _keep(self, i: int, position: int, data: bytes, time_ns: int) -> None:
        self._held.insert(i, (position, data, time_ns))
        self.held_bytes += len(data)


def _position(held: tuple[int, bytes, int]) -> int:
    return held[0]
