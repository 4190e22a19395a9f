"""Server-sent events from bytes split anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.sse import ServerSentEvent, SSEParser


def parse(data: bytes, *cuts: int, limit: int = 4 << 20) -> tuple[list[ServerSentEvent], int]:
    parser = SSEParser(limit)
    events: list[ServerSentEvent] = []
    edges = [0, *sorted(cuts), len(data)]
    for a, b in pairwise(edges):
        events += parser.feed(data[a:b])
    events += parser.close()
    return events, parser.overflows


def test_the_common_case() -> None:
    events, lost = parse(b'data: {"a": 1}\n\ndata: [DONE]\n\n')
    assert [e.data for e in events] == ['{"a": 1}', "[DONE]"]
    assert [e.event for e in events] == ["message", "message"]
    assert lost == 0


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_all_three_line_ends(end: bytes) -> None:
    data = end.join([b"event: error", b"id: 7", b"data: x", b"data:y", b"", b"data: z", b"", b""])
    assert parse(data)[0] == [ServerSentEvent("x\ny", "error", "7"), ServerSentEvent("z")]


def test_comments_unknown_fields_and_retry_are_passed_over() -> None:
    data = b": keep-alive\n\nretry: 10\nfoo: bar\nno colon\ndata: a\n\n"
    assert parse(data)[0] == [ServerSentEvent("a")]


def test_only_one_space_after_the_colon_is_taken() -> None:
    assert parse(b"data:  two\n\n")[0] == [ServerSentEvent(" two")]


def test_an_empty_data_line_is_an_event() -> None:
    assert parse(b"data\n\n")[0] == [ServerSentEvent("")]


def test_a_byte_order_mark_at_the_start_only() -> None:
    assert parse(b"\xef\xbb\xbfdata: a\n\n", 1, 2)[0] == [ServerSentEvent("a")]


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"\xef\xbb\xbf",
        b"data: a\n",
        b"event: error\n",
        b"id: 7\n",
        b"id:\n",
        b"data: a\r",
        b"data: a\n\r",
        b"da",
        b": c\n",
        b"\n",
    ],
)
@pytest.mark.parametrize("chunk", [b"data: x\n\n", b"data: \n\n", b"data: x\r\n\n", b"data: \xff\n\n", b"data: x\n\r\n\n"])
def test_one_line_that_comes_whole_is_no_other_event(before: bytes, chunk: bytes) -> None:
    data = before + chunk + chunk
    assert parse(data, len(before), len(before) + len(chunk)) == parse(data, *range(len(data)))
    small = 70
    assert parse(data, len(before), len(before) + len(chunk), limit=small) == parse(data, *range(len(data)), limit=small)


def test_the_last_event_needs_no_blank_line() -> None:
    assert parse(b"data: a\n\ndata: b")[0] == [ServerSentEvent("a"), ServerSentEvent("b")]
    assert parse(b"data: a\n\ndata: b\n")[0] == [ServerSentEvent("a"), ServerSentEvent("b")]


def test_an_error_event_without_data_and_the_old_llama_cpp_form() -> None:
    assert parse(b"event: error\n\n")[0] == [ServerSentEvent("", "error")]
    assert parse(b'error: {"message": "slot"}\n\n')[0] == [ServerSentEvent('{"message": "slot"}', "error")]


def test_bytes_that_are_no_utf8_become_replacement_characters() -> None:
    assert parse(b"data: \xff\xfe\n\n")[0] == [ServerSentEvent("\ufffd\ufffd")]


def test_a_character_cut_in_two_is_whole() -> None:
    data = "data: käse 🧀\n\n".encode()
    for cut in range(len(data)):
        assert parse(data, cut)[0] == [ServerSentEvent("käse 🧀")]


def test_an_event_that_is_too_large_is_dropped_and_the_next_is_read() -> None:
    events, lost = parse(b"data: " + b"x" * 500 + b"\ndata: y\n\ndata: ok\n\n", limit=200)
    assert events == [ServerSentEvent("ok")]
    assert lost == 1


def test_memory_stays_bounded_against_a_line_without_end_and_lines_without_number() -> None:
    parser = SSEParser(10_000)
    for _ in range(1000):
        assert parser.feed(b"x" * 1000) == []
        assert len(parser._buffer) <= 10_000
    parser = SSEParser(10_000)
    for _ in range(1000):
        assert parser.feed(b"data:\n" * 100) == []
        assert len(parser._data) <= 10_000
    assert parser.feed(b"\ndata: ok\n\n") == [ServerSentEvent("ok")]
    assert parser.overflows == 1


_LINES = st.lists(
    st.sampled_from(
        [b"data: a", b"data:b", b"data", b"", b"", b"", b": c", b"event: error", b"event", b"id: 1", b"error: e",
         b"data: \xf0\x9f\xa7\x80", b"data: " + b"x" * 60, b"\xef\xbb\xbfdata: m", b"nonsense"]
    ),
    max_size=30,
)  # fmt: skip


@given(
    lines=_LINES, ends=st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=1), cuts=st.lists(st.integers(0, 900)),
    limit=st.sampled_from([150, 300, 4 << 20]), tail=st.booleans(),
)  # fmt: skip
def test_events_do_not_depend_on_the_split(
    lines: list[bytes], ends: list[bytes], cuts: list[int], limit: int, tail: bool
) -> None:
    data = b"".join(line + ends[i % len(ends)] for i, line in enumerate(lines)) + (b"data: t" if tail else b"")
    whole = parse(data, limit=limit)
    assert parse(data, *(c for c in cuts if c <= len(data)), limit=limit) == whole
    assert parse(data, *range(len(data)), limit=limit) == whole


_TEXT = st.characters(blacklist_characters="\r\n\ufeff", blacklist_categories=("Cs",))


@given(st.lists(st.text(alphabet=_TEXT, min_size=1), max_size=20))
def test_what_is_sent_is_what_is_read(texts: list[str]) -> None:
    data = b"".join(f"data: {t}\n\n".encode() for t in texts)
    assert [e.data for e in parse(data)[0]] == texts


@given(st.binary(max_size=400), st.lists(st.integers(0, 400)))
def test_any_bytes_are_borne(data: bytes, cuts: list[int]) -> None:
    assert parse(data, *(c for c in cuts if c <= len(data))) == parse(data)
