"""The workload of a trace: what is taken, what is left out and why, rates, blocks in tokens."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import MemoryTrace
from support.workloads import make

from hoptrace.errors import InputError, UsageError
from hoptrace.replay.workload import from_frame, parse_rate, workload
from hoptrace.schema import REQUESTS

EMPTY = pl.from_arrow(REQUESTS.arrow.empty_table())
assert isinstance(EMPTY, pl.DataFrame)


def frame(*rows: dict[str, Any]) -> pl.DataFrame:
    base = {"arrival_ns": 0, "prompt_tokens": 10, "output_tokens": 5}
    return pl.DataFrame([{"request": i} | base | r for i, r in enumerate(rows)], schema=EMPTY.schema)  # type: ignore[union-attr]


def test_sorted_by_arrival_then_number() -> None:
    w = from_frame(frame({"arrival_ns": 9}, {"arrival_ns": 3, "prompt_tokens": 7}, {"arrival_ns": 3}))
    assert w.request.tolist() == [1, 2, 0]
    assert w.arrival_ns.tolist() == [3, 3, 9]
    assert w.prompt_tokens.tolist() == [7, 10, 10]
    assert w.left_out == {}


def test_what_cannot_be_replayed_is_counted_by_reason() -> None:
    w = from_frame(
        frame(
            {},
            {"error": "HTTP 500"},
            {"prompt_tokens": None},
            {"output_tokens": None},
            {"output_tokens": 0},
            {"output_tokens": None},
        )
    )
    assert w.request.tolist() == [0]
    assert w.left_out == {"failed": 1, "no output": 1, "no output_tokens": 2, "no prompt_tokens": 1}
    assert "2 of 6 requests are left out of the replay: no output_tokens." in w.notes


def test_a_trace_without_any_usable_request_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match="Nothing in x can be replayed: 2 no output_tokens"):
        from_frame(frame({"output_tokens": None}, {"output_tokens": None}), "x")
    with pytest.raises(InputError, match="it has no requests"):
        from_frame(frame())


def test_blocks_in_tokens_and_the_partial_last_one() -> None:
    blocks = {"block_size": 4, "block_unit": "tokens", "hash_space": "a"}
    w = from_frame(frame({"prefix_blocks": [50, 51, 52], **blocks}, {}, {"prefix_blocks": [50, 99], **blocks}))
    assert w.block_ptr.tolist() == [0, 3, 3, 5]
    assert w.block_end.tolist() == [4, 8, 10, 4, 8]
    assert w.block_id.tolist() == [0, 1, 2, 0, 3]
    assert w.block_tokens.tolist() == [4, 4, 2, 4]


def test_blocks_in_characters_are_scaled_to_tokens() -> None:
    w = from_frame(
        frame({"prefix_blocks": [7, 8], "block_size": 64, "block_unit": "characters", "prompt_chars": 150, "prompt_tokens": 30})
    )
    assert w.block_end.tolist() == [12, 25]


def test_equal_hashes_of_unequal_spaces_are_not_equal() -> None:
    blocks = {"block_size": 4, "block_unit": "tokens", "prefix_blocks": [50]}
    w = from_frame(frame({"hash_space": "a", **blocks}, {"hash_space": "b", **blocks}, {"hash_space": "a", **blocks}))
    assert w.block_id.tolist() == [0, 1, 0]


def test_blocks_of_unknown_size_are_not_used() -> None:
    w = from_frame(frame({"prefix_blocks": [7], "block_size": 64, "block_unit": "characters"}))
    assert w.block_id.tolist() == []
    assert w.notes == ("The prefix blocks of 1 request are not used: their size in tokens is unknown.",)


def test_the_rate_moves_arrivals_towards_the_first() -> None:
    w = make((100, 1, 1), (400, 1, 1), (1000, 1, 1))
    assert w.at_rate(1.5).arrival_ns.tolist() == [100, 300, 700]
    assert w.at_rate(Fraction(1, 2)).arrival_ns.tolist() == [100, 700, 1900]
    assert w.at_rate(1) is w
    with pytest.raises(UsageError):
        w.at_rate(0)


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=20), st.fractions(Fraction(1, 100), 100, max_denominator=100))
def test_a_rate_keeps_the_order_and_divides_the_span(arrivals: list[int], rate: Fraction) -> None:
    w = make(*((a, 1, 1) for a in sorted(arrivals)))
    scaled = w.at_rate(rate).arrival_ns
    assert (np.diff(scaled) >= 0).all()
    assert abs((int(scaled[-1]) - int(scaled[0])) * rate - (int(w.arrival_ns[-1]) - int(w.arrival_ns[0]))) <= rate


def test_taking_some_keeps_their_blocks() -> None:
    w = make((0, 8, 1, [0, 1]), (1, 4, 1, [2]), (2, 8, 1, [0, 3]))
    t = w.take(np.array([2, 0]))
    assert t.request.tolist() == [2, 0]
    assert t.block_ptr.tolist() == [0, 2, 4]
    assert t.block_id.tolist() == [0, 3, 0, 1]


@pytest.mark.parametrize(("text", "rate"), [("1.5x", Fraction(3, 2)), ("2", Fraction(2)), (" 0.1X ", Fraction(1, 10))])
def test_rates_are_exact(text: str, rate: Fraction) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["0", "-1", "fast", "", "1/0", "nan"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rate(text)


def test_several_sequences_of_a_request_are_said_to_be_one() -> None:
    """n = 2 and 8 tokens in all: the replay computes 8 in a row. A request that is left out does not count."""
    asked = {"arrival_ns": 0, "received_ns": 0, "arrival_of": "received", "prompt_tokens": 10, "output_tokens": 8}
    requests = [{"request": i} | asked | ({"error": "HTTP 500"} if i == 2 else {}) for i in range(4)]
    stays = [{"request": i, "sequence": s, "attempt": 0, "stage": 0} for i, s in ((0, 0), (1, 0), (1, 1), (1, 2), (2, 1))]
    tokens = [{"request": 3, "sequence": s, "index": 0, "time_ns": 5, "count": 4} for s in (0, 1)]
    (note,) = (n for n in workload(MemoryTrace({"requests": requests, "stages": stays, "tokens": tokens})).notes if "n > 1" in n)
    assert note.startswith("2 requests had several sequences side by side")
    assert not any("n > 1" in n for n in workload(MemoryTrace({"requests": requests, "stages": stays[:2]})).notes)
