"""Ids of short blocks become ids of the engine's own: what is found is found in whole engine blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoptrace.replay.common_text import common_tokens
from hoptrace.replay.engine_blocks import in_engine_blocks
from hoptrace.replay.outcome import REQUEST, Kept
from hoptrace.replay.plan import EngineSpec, Plan
from hoptrace.replay.simulation import simulation
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost

_COST = StepCost({"step": 1_000_000}, "fixed")


def _work(prompts: list[int], blocks: list[list[int]], ends: list[list[int]], gap_ns: int = 10**9) -> Workload:
    n = len(prompts)
    ids = np.array([b for one in blocks for b in one], dtype=np.int64)
    end = np.array([e for one in ends for e in one], dtype=np.int64)
    length = [e - (one[i - 1] if i else 0) for one in ends for i, e in enumerate(one)]
    least = np.full(int(ids.max()) + 1 if len(ids) else 0, 1 << 60, dtype=np.int64)
    np.minimum.at(least, ids, np.array(length, dtype=np.int64))
    ptr = np.cumsum([0, *map(len, blocks)]).astype(np.int64)
    number = np.arange(n, dtype=np.int64)
    ones = np.ones(n, dtype=np.int64)
    return Workload(number, number * gap_ns, np.array(prompts, dtype=np.int64), ones, ptr, ids, end, least)


def _plan(*sizes: int, cache: Any = "pool") -> Plan:
    return Plan(tuple(EngineSpec(f"e{i}", block_size_tokens=s, cache=cache) for i, s in enumerate(sizes)), (_COST,))


def test_two_of_sixteen_make_one_of_thirty_two() -> None:
    work = _work([90, 40], [[0, 1, 2, 3, 4], [0, 1]], [[16, 32, 48, 64, 80], [16, 32]])
    made = in_engine_blocks(work, _plan(32))
    assert made.block_ptr.tolist() == [0, 2, 3]
    assert made.block_id.tolist() == [1, 3, 1]
    assert made.block_end.tolist() == [32, 64, 32]
    assert made.block_tokens[[1, 3]].tolist() == [32, 32]


@pytest.mark.parametrize(
    ("ends", "sizes", "why"),
    [
        ([16, 32, 48], (16,), "as long as the engine's"),
        ([64, 128], (32,), "longer than the engine's"),
        ([15, 31, 46], (32,), "blocks of characters end unevenly"),
        ([24, 48], (32,), "no whole part"),
        ([16, 32], (32, 48), "the engines' common divisor is what they are"),
    ],
)
def test_others_stay(ends: list[int], sizes: tuple[int, ...], why: str) -> None:
    work = _work([200], [list(range(len(ends)))], [ends])
    assert in_engine_blocks(work, _plan(*sizes)) is work, why


def test_blocks_of_characters_count_with_the_mean_of_those_that_begin_alike() -> None:
    """Two prompts share eight blocks; theirs are of 15 and 13 tokens by their own count, of 14 together: 32 tokens are full with
    the third, 64 with the fifth, 96 with the seventh, 128 with the tenth."""
    work = _work(
        [160, 110, 70],
        [list(range(10)), [*range(8), 20], [30, 31, 32, 33]],
        [[15 * (i + 1) for i in range(10)], [13 * (i + 1) - (i == 8) for i in range(9)], [20, 35, 52, 66]],
    )
    made = in_engine_blocks(replace(work, in_characters=np.array([True, True, True])), _plan(32))
    assert made.block_id.tolist() == [2, 4, 6, 9, 2, 4, 6, 31, 33]
    assert made.block_end.tolist() == [32, 64, 96, 128, 32, 64, 96, 32, 64]


def test_no_block_of_characters_ends_beyond_its_prompt() -> None:
    work = _work([62, 200], [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]], [[15, 31, 46, 62], [33, 66, 99, 132, 165, 198]])
    made = in_engine_blocks(replace(work, in_characters=np.array([True, True])), _plan(32))
    assert made.block_ptr.tolist() == [0, 1, 5]
    assert made.block_end.tolist() == [32, 32, 64, 96, 128]


def test_without_a_pool_nothing_changes() -> None:
    work = _work([90], [[0, 1, 2, 3]], [[16, 32, 48, 64]])
    assert in_engine_blocks(work, _plan(32, cache=None)) is work
    assert in_engine_blocks(work, _plan(32, cache="slot")) is work


def test_requests_without_blocks_and_unlike_ones_stand_side_by_side() -> None:
    work = _work([10, 90, 70], [[], [0, 1, 2, 3], [5]], [[], [16, 32, 48, 64], [64]])
    made = in_engine_blocks(work, _plan(32))
    assert made.block_ptr.tolist() == [0, 0, 2, 3]
    assert made.block_id.tolist() == [1, 3, 5]
    assert made.block_end.tolist() == [32, 64, 64]


@given(
    text=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=2, max_size=6),
    parts=st.sampled_from([1, 2, 4]),
    engine=st.sampled_from(["plain", "compiled"]),
)
@settings(max_examples=40, deadline=None)
def test_hits_are_whole_engine_blocks(text: list[list[int]], parts: int, engine: str) -> None:
    """Prompts of four-token pieces, in a cache without end: found is the longest common beginning with any prompt before, in
    whole engine blocks, less what must be computed."""
    known: dict[tuple[int, ...], int] = {}
    blocks = [[known.setdefault(tuple(t[: i + 1]), len(known)) for i in range(len(t))] for t in text]
    work = _work([4 * len(t) for t in text], blocks, [[4 * (i + 1) for i in range(len(t))] for t in text])
    size = 4 * parts
    found = simulation(engine)(work, _plan(size), Kept()).requests[:, REQUEST.index("cached_tokens")].tolist()
    expected = []
    for i, t in enumerate(text):
        best = 0
        for other in text[:i]:
            same = next((k for k, (a, b) in enumerate(zip(t, other, strict=False)) if a != b), min(len(t), len(other)))
            best = max(best, 4 * same // size * size)
        expected.append(min(best, (4 * len(t) - 1) // size * size))
    assert found == expected


def test_what_the_recorded_server_found_says_how_far_blocks_of_characters_are_equal() -> None:
    """Three prompts share two blocks of 14 tokens. The second found 32 tokens: what they share fills a block of 32, although no
    whole block of characters reaches so far. The third shares as much as the second, though it did not say what it found."""
    work = _work(
        [100, 100, 100], [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]], [[14, 28, 42, 56]] * 3
    )  # fmt: skip
    work = replace(work, in_characters=np.array([True, True, True]))
    assert in_engine_blocks(work, _plan(32)).block_id.tolist() == [2, 4, 6]
    common = common_tokens(work.block_ptr, work.block_id, np.array([0, 32, -1]))
    assert common.tolist() == [0, 32, 0, 0, 0, 0, 0, 0]
    made = in_engine_blocks(replace(work, common=common), _plan(32))
    assert made.block_id.tolist() == [1, 1, 1]
    assert made.block_end.tolist() == [32, 32, 32]


def test_a_first_prompt_and_one_that_shares_nothing_show_nothing_common() -> None:
    ptr, ids = np.array([0, 2, 4, 4]), np.array([0, 1, 2, 3])
    assert common_tokens(ptr, ids, np.array([64, 32, 16])).tolist() == [0, 0, 0, 0]
    assert common_tokens(np.zeros(1, dtype=np.int64), ids[:0], ids[:0]).tolist() == []
