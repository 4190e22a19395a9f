"""One direction of a connection: however its segments come, the bytes are those that were sent, or a gap says what is missing."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hoptrace.collectors.engines.streams.reassembly import Piece, Stream, distance

WRAP = 2**32


def joined(pieces: list[Piece | int]) -> bytes:
    return b"".join(p.data for p in pieces if isinstance(p, Piece))


def fed(stream: Stream, base: int, segments: list[tuple[int, bytes]]) -> list[Piece | int]:
    out: list[Piece | int] = []
    for i, (at, data) in enumerate(segments):
        out += stream.add((base + at) % WRAP, data, i)
    return out


def test_distance_wraps() -> None:
    assert distance(5, WRAP - 5) == 10
    assert distance(WRAP - 5, 5) == -10


def test_in_order() -> None:
    s = Stream(100)
    assert s.add(100, b"ab", 7) == [Piece(b"ab", 7)]
    assert s.add(102, b"", 8) == []
    assert s.add(102, b"c", 9) == [Piece(b"c", 9)]
    assert s.next_seq == 103 and not s.waits


def test_what_waited_behind_a_hole_has_the_time_of_its_filling_and_is_late() -> None:
    s = Stream(0)
    assert s.add(2, b"cd", 5_000_000) == []
    assert s.waits and not s.confirmed and s.held_bytes == 2
    assert s.add(0, b"ab", 205_000_000) == [Piece(b"ab", 205_000_000), Piece(b"cd", 205_000_000, late=True)]
    assert not s.waits and s.held_bytes == 0


def test_order_mixed_up_by_less_than_a_millisecond_is_not_late() -> None:
    s = Stream(0)
    s.add(2, b"cd", 1_000)
    assert s.add(0, b"ab", 3_000) == [Piece(b"ab", 3_000), Piece(b"cd", 3_000)]


def test_of_bytes_that_come_twice_the_first_are_kept() -> None:
    s = Stream(0)
    assert joined(fed(s, 0, [(0, b"abc"), (1, b"XYd"), (6, b"gh"), (5, b"fXYi"), (4, b"e")])) == b"abcdefghi"


def test_a_segment_over_what_is_held_gives_what_lies_on_both_sides_of_it() -> None:
    s = Stream(0)
    assert joined(fed(s, 0, [(2, b"c"), (5, b"f"), (0, b"abXdeXgh")])) == b"abcdefgh"
    assert not s.waits


def test_a_reader_that_takes_nothing_makes_the_next_bytes_late() -> None:
    s = Stream(0)
    s.late_next = True
    assert [p.late for p in s.add(0, b"a", 1) + s.add(1, b"b", 2)] == [True, False]


def test_confirmed_bytes_are_given_up_as_a_gap() -> None:
    s = Stream(0)
    s.add(0, b"ab", 1)
    s.acked(5)
    assert s.waits and s.confirmed
    assert s.skip(False) == [3]
    assert s.add(5, b"f", 2) == [Piece(b"f", 2)]
    assert s.add(2, b"cde", 3) == [], "too late"


def test_only_what_is_confirmed_is_given_up() -> None:
    s = Stream(0)
    s.add(4, b"ef", 1)
    s.add(9, b"j", 2)
    s.acked(6)
    assert s.skip(False) == [4, Piece(b"ef", 1)]
    assert s.waits and not s.confirmed
    assert s.skip(True) == [3, Piece(b"j", 2)]
    assert not s.waits


def test_the_end() -> None:
    s = Stream(WRAP - 1)
    s.ends(2)
    assert s.waits and not s.ended
    s.acked(3)
    assert s.confirmed
    s.add(WRAP - 1, b"abc", 1)
    assert s.ended and not s.waits and not s.confirmed, "the FIN's own number is no byte"


def test_an_acknowledgement_of_another_connection_is_no_loss() -> None:
    s = Stream(0)
    s.acked(1 << 30)
    s.acked(WRAP - 4)
    assert not s.waits


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[int, bytes, list[tuple[int, bytes]]]:
    """A start near the wrap or not, the bytes sent, and segments that cover them: cut, repeated, overlapping, in any order."""
    base = draw(st.one_of(st.integers(0, WRAP - 1), st.integers(WRAP - 300, WRAP - 1)))
    sent = draw(st.binary(min_size=1, max_size=300))
    cuts = sorted({0, len(sent), *draw(st.lists(st.integers(0, len(sent)), max_size=12))})
    segments = [(a, sent[a:b]) for a, b in pairwise(cuts)]
    for _ in range(draw(st.integers(0, 6))):
        a = draw(st.integers(0, len(sent)))
        segments.append((a, sent[a : draw(st.integers(a, len(sent)))]))
    return base, sent, draw(st.permutations(segments))


@given(cut_up())
def test_any_cut_order_repetition_and_overlap_gives_the_same_bytes(case: tuple[int, bytes, list[tuple[int, bytes]]]) -> None:
    base, sent, segments = case
    s = Stream(base)
    out = fed(s, base, segments)
    assert joined(out) == sent and all(isinstance(p, Piece) for p in out)
    assert s.held_bytes == 0 and s.held == 0 and not s.waits and s.at == len(sent)
    times = [p.time_ns for p in out if isinstance(p, Piece)]
    assert times == sorted(times)


@given(cut_up(), st.data())
def test_loss_gives_a_prefix_then_marked_gaps_and_no_byte_that_was_not_sent(
    case: tuple[int, bytes, list[tuple[int, bytes]]], data: st.DataObject
) -> None:
    base, sent, segments = case
    dropped = data.draw(st.sets(st.integers(0, len(segments) - 1), min_size=1))
    kept = [s for i, s in enumerate(segments) if i not in dropped]
    there = {i for at, part in kept for i in range(at, at + len(part))}
    s = Stream(base)
    out = fed(s, base, kept)
    prefix = next((i for i in range(len(sent)) if i not in there), len(sent))
    assert joined(out) == sent[:prefix]
    if data.draw(st.booleans()):
        s.acked((base + len(sent)) % WRAP)
    s.ends((base + len(sent)) % WRAP)
    out += s.skip(everything=True)
    at = 0
    for found in out:
        if isinstance(found, int):
            assert found > 0 and not there & set(range(at, at + found)), "what was captured is not called missing"
            at += found
        else:
            assert found.data == sent[at : at + len(found.data)]
            at += len(found.data)
    assert at == len(sent) and s.ended and s.held_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("aefs"), st.integers(0, WRAP - 1), st.binary(max_size=40)), max_size=40))
def test_no_numbers_raise_and_bytes_are_counted_rightly(calls: list[tuple[str, int, bytes]]) -> None:
    s = Stream(0)
    at = 0
    for kind, seq, data in calls:
        if kind == "a":
            s.acked(seq)
        elif kind == "e":
            s.ends(seq)
        else:
            found = s.add(seq % 100, data, 0) if kind == "f" else s.skip(bool(seq & 1))
            at += sum(f if isinstance(f, int) else len(f.data) for f in found)
        assert s.at == at and s.held_bytes == sum(len(h[1]) for h in s._held)
        ends = [(p, p + len(d)) for p, d, _ in s._held]
        assert all(a[1] <= b[0] for a, b in pairwise(ends)), "held in order, without overlap"
