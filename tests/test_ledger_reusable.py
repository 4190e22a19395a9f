"""What could have been re-used: published hit rates of the Mooncake conversation trace, and a plain cache played beside ours."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import MemoryTrace

import hoptrace
from hoptrace.analysis.moves.ledger_reusable import reusable
from hoptrace.collectors.files.run import import_files

DATA = Path(__file__).parent / "data/requests/mooncake_conversation.parquet"
SHARED = Path(__file__).parents[2] / "shared/traces/requests/mooncake/conversation_trace.jsonl"
# Published check X1: capacity in blocks → (block hit rate, token hit rate), lookup before insert, unbroken prefixes only.
X1 = {
    1_000: (0.0445, 0.0454), 10_000: (0.2112, 0.2153), 30_000: (0.3257, 0.3321), 50_000: (0.3546, 0.3615),
    100_000: (0.3637, 0.3708),
}  # fmt: skip


def requests(lists: list[list[int]], **more: Any) -> list[dict[str, Any]]:
    row = {"hash_space": "k", "block_size": 4, "block_unit": "tokens"}
    return [
        row | {"request": i, "arrival_ns": i, "prefix_blocks": x, "prompt_tokens": 4 * len(x)} | more for i, x in enumerate(lists)
    ]


@pytest.fixture(scope="module")
def mooncake() -> MemoryTrace:
    rows = pl.read_parquet(DATA)
    return MemoryTrace(
        {
            "requests": [
                {"request": i, "arrival_ns": t * 1_000_000, "prompt_tokens": n, "prefix_blocks": b, "hash_space": "mooncake",
                 "block_size": 512, "block_unit": "tokens"}
                for i, (t, n, b) in enumerate(rows.select("timestamp", "input_length", "hash_ids").iter_rows())
            ]
        }
    )  # fmt: skip


def test_x1_as_published(mooncake: MemoryTrace) -> None:
    r = reusable(mooncake, tuple(X1))
    assert r is not None
    u = r.unlimited
    assert (r.requests, u.blocks, r.distinct_blocks, u.hit_blocks) == (12_031, 288_500, 182_790, 105_710)
    assert round(u.block_share, 4) == 0.3664 and u.token_share is not None and round(u.token_share, 4) == 0.3736
    assert r.mean_ratio is not None and round(r.mean_ratio, 4) == 0.3843 and u.prompt_tokens == 144_793_823
    found = {p.capacity_blocks: (round(p.block_share, 4), round(p.token_share or 0, 4)) for p in r.curve}
    assert found == X1


def test_x1_from_the_file_itself(tmp_path: Path) -> None:
    if not SHARED.exists():
        pytest.skip("extra check: needs ../shared, which a user's clone lacks (the same trace runs from tests/data)")
    import_files([SHARED], tmp_path / "x.trace")
    r = reusable(hoptrace.open(tmp_path / "x.trace"), (1_000, 100_000))
    assert r is not None and r.unlimited.hit_blocks == 105_710 and [round(p.block_share, 4) for p in r.curve] == [0.0445, 0.3637]


def played(rows: list[dict[str, Any]], capacity: int | None) -> int:
    """Hit blocks of a plain LRU cache; without a limit where ``capacity`` is null."""
    cache: OrderedDict[Any, None] = OrderedDict()
    hits = 0
    for r in sorted(rows, key=lambda r: (r["arrival_ns"], r["request"])):
        kin = (r["hash_space"], r.get("model"), r.get("adapter"), r["block_size"], r["block_unit"])
        keys = [(*kin, b) for b in r["prefix_blocks"]]
        for k in keys:
            if k not in cache:
                break
            hits += 1
        for k in keys:
            cache[k] = None
            cache.move_to_end(k)
            if capacity is not None and len(cache) > capacity:
                cache.popitem(last=False)
    return hits


drawn = st.lists(
    st.fixed_dictionaries(
        {
            "prefix_blocks": st.lists(st.integers(-3, 12) | st.sampled_from([(1 << 63) - 1, -(1 << 63)]), max_size=8),
            "hash_space": st.sampled_from(["a", "b", None]),
            "model": st.sampled_from(["m", None]),
            "arrival_ns": st.integers(0, 5),
        }
    ),
    min_size=1,
    max_size=25,
)


@given(drawn, st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_as_a_plain_cache_does(found: list[dict[str, Any]], capacity: int) -> None:
    rows = [{"request": i, "block_size": 4, "block_unit": "tokens", **r} for i, r in enumerate(found)]
    r = reusable(MemoryTrace({"requests": rows}), (capacity,))
    if r is None:
        assert not any(x["prefix_blocks"] for x in rows)
        return
    assert r.unlimited.hit_blocks == played(rows, None)
    assert r.unlimited.blocks == sum(len(x["prefix_blocks"]) for x in rows)
    assert [p.hit_blocks for p in r.curve] == [played(rows, p.capacity_blocks) for p in r.curve]
    assert all(p.hit_blocks <= r.unlimited.hit_blocks for p in r.curve)


def test_a_hit_ends_at_the_first_miss_and_looks_up_before_it_inserts() -> None:
    # 9 breaks the prefix: 3 is in the cache and counts for nothing. A block twice in one prompt is no hit of its own.
    r = reusable(MemoryTrace({"requests": requests([[1, 2, 3], [1, 9, 3], [7, 7]])}))
    assert r is not None and r.unlimited.hit_blocks == 1 and r.unlimited.hit_tokens == 4
    # Other models and other hash spaces share nothing.
    two = requests([[1, 2]]) + [x | {"request": 1, "hash_space": "other"} for x in requests([[1, 2]])]
    r = reusable(MemoryTrace({"requests": two + [x | {"request": 2, "model": "b"} for x in requests([[1, 2]])]}))
    assert r is not None and (r.unlimited.hit_blocks, r.spaces, r.distinct_blocks) == (0, 3, 6)


def test_tokens_of_a_hit() -> None:
    # The last block is not full: its hit gives what the prompt has.
    r = reusable(MemoryTrace({"requests": requests([[1, 2], [1, 2]], prompt_tokens=7)}))
    assert r is not None and (r.unlimited.hit_tokens, r.unlimited.prompt_tokens) == (7, 14)
    # 64 of 128 characters of a prompt of 40 tokens are 20 tokens.
    text = {"block_unit": "characters", "block_size": 64, "prompt_tokens": 40, "prompt_chars": 128}
    r = reusable(MemoryTrace({"requests": requests([[1, 2], [1, 3]], **text)}))
    assert r is not None and (r.unlimited.hit_blocks, r.unlimited.hit_tokens) == (1, 20) and r.block_sizes == ["64 characters"]
    # Sizes that nobody tells leave the tokens unknown, not 0.
    r = reusable(MemoryTrace({"requests": requests([[1, 2], [1, 2]], prompt_tokens=None)}))
    assert r is not None and r.unlimited.hit_blocks == 2 and r.unlimited.token_share is None
    assert reusable(MemoryTrace({"requests": [{"request": 0, "arrival_ns": 0}]})) is None
    assert reusable(MemoryTrace({})) is None
