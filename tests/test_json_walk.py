"""Walking JSON on the disk: the same values as parsing it whole, whatever it holds and wherever it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoptrace.collectors.files.json_walk import Buffer, Cut, Malformed, elements, load, members, one_line, roots, starts

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)
INDENTS = st.sampled_from([None, 0, 2])


def walked(buffer: Buffer, at: int) -> Any:
    """The value at ``at``, put together from its parts."""
    first = buffer[at : at + 1]
    if first == b"{":
        return {name: walked(buffer, begin) for name, begin in members(buffer, at)}
    if first == b"[":
        parts = [walked(buffer, begin) for begin in starts(buffer, at)]
        assert parts == [load(buffer, *span) for span in elements(buffer, at)]
        return parts
    return load(buffer, at)


@settings(max_examples=60)
@given(st.lists(VALUES, min_size=1, max_size=3), INDENTS, st.sampled_from(["", "\n", " \r\n\t"]), st.booleans())
def test_walking_is_parsing(values: list[Any], indent: int | None, between: str, ascii_: bool) -> None:
    # Two bare numbers need something between them.
    text = (between or " ").join(json.dumps(v, indent=indent, ensure_ascii=ascii_) for v in values)
    buffer = text.encode("utf-8", "surrogatepass")
    if not ascii_ and any(0xD800 <= ord(c) < 0xE000 for c in text):
        return
    assert [walked(buffer, at) for at in roots(buffer)] == values
    assert [walked(b"\xef\xbb\xbf" + buffer, at) for at in roots(b"\xef\xbb\xbf" + buffer)] == values


@settings(max_examples=20)
@given(st.lists(st.lists(VALUES, max_size=4) | st.dictionaries(st.text(max_size=5), VALUES, max_size=4), min_size=1, max_size=6))
def test_a_cut_array_gives_what_was_whole(records: list[Any]) -> None:
    buffer = json.dumps(records).encode()
    ends = [end for _, end in elements(buffer, 0)]
    for cut in range(1, len(buffer), 1 + len(buffer) // 200):
        found = []
        with pytest.raises(Cut):
            for span in elements(buffer[:cut], 0):
                found.append(load(buffer[:cut], *span))
        assert found == records[: sum(end <= cut for end in ends)]


@settings(max_examples=200)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\ 01ntfe', max_size=40).map(str.encode))
def test_rubbish_is_named_or_cut(buffer: bytes) -> None:
    try:
        for at in roots(buffer):
            walked(buffer, at)
    except (Cut, Malformed) as e:
        assert 0 <= e.at <= len(buffer)


def test_deep_nesting_is_stepped_over() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    buffer = b'{"a": ' + deep + b', "b": 7}'
    assert [(name, load(buffer, at)) for name, at in members(buffer, 0) if name == "b"] == [("b", 7)]
    with pytest.raises(Malformed):
        load(buffer, 6)


def test_one_line() -> None:
    assert one_line("Traceback (most recent call last):\n  File x\nOSError: gone\n") == "OSError: gone"
    assert one_line("") is one_line("  \n") is one_line(None) is one_line(3) is None
    assert one_line("x" * 300) == "x" * 199 + "…"
