"""Both engines against what can be written down of caches and tiers: stack laws, break-even, hand-over to nobody."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from support.vllm_reference import ENGINES, Simulate, work_of

from hoptrace.replay import outcome
from hoptrace.replay.outcome import REQUEST, Kept
from hoptrace.replay.plan import EngineSpec, Handover, LinkSpec, Plan, Routing, TierSpec, Way
from hoptrace.stepcost import StepCost, fixed

engines = pytest.mark.parametrize("simulate", ENGINES.values(), ids=ENGINES.keys())

MS = 1_000_000
COST = fixed(any_prefill_ns=10e6, any_decode_ns=4e6)
HITS = ("cached_tokens", *(f"cached_tier{t}_tokens" for t in range(4)))


def mooncake(n: int = 400, gap_ns: int = 100 * MS) -> Any:
    """The Mooncake slice, one request after another, one output token; full blocks of 512 only."""
    path = Path(__file__).parent / "data" / "reference" / "mooncake_slice.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines()[:n]]
    return work_of(
        [
            {
                "arrival_ns": i * gap_ns, "prompt": q["input_length"], "output": 1,
                "blocks": q["hash_ids"][: (q["input_length"] - 1) // 512],
            }
            for i, q in enumerate(lines)
        ],
        512,
    )  # fmt: skip


def once_seen(work: Any) -> list[int]:
    """Tokens of each prompt's leading blocks that an earlier request had: what a cache without end gives."""
    seen: set[int] = set()
    found = []
    for r in range(work.n):
        ids = work.block_id[work.block_ptr[r] : work.block_ptr[r + 1]].tolist()
        hits = 0
        while hits < len(ids) and ids[hits] in seen:
            hits += 1
        found.append(hits * 512)
        seen.update(ids)
    return found


def engine(name: str = "e", blocks: int | None = 260, **more: Any) -> EngineSpec:
    """An engine with so many blocks of 512."""
    capacity = None if blocks is None else blocks * 512
    return EngineSpec(name, capacity_tokens=capacity, block_size_tokens=512, cache="pool", **more)


def tier(name: str, blocks: int | None, engines_: int, policy: Any, *, demote: int = -1, shared: bool = False) -> TierSpec:
    """A tier at no cost."""
    way, capacity = (0,) * engines_, None if blocks is None else blocks * 512
    return TierSpec(name, "host", capacity, shared, read=way, write=way, demote=(demote,) * engines_, policy=policy)


def hits(simulate: Simulate, work: Any, plan: Plan) -> np.ndarray[Any, Any]:
    """Cached tokens of each request, on the device and in tiers: [n, 5]."""
    rows = simulate(work, plan, Kept()).requests
    return rows[:, [REQUEST.index(c) for c in HITS]]


@engines
def test_a_tier_without_end_gives_what_a_cache_without_end_gives(simulate: Simulate) -> None:
    work = mooncake()
    expected = once_seen(work)
    alone = Plan((engine(blocks=None),), (COST,))
    assert hits(simulate, work, alone)[:, 0].tolist() == expected
    one = Plan((engine(),), (COST,), ways=(Way(),), kv_token_bytes=1)
    two = Plan((engine("a"), engine("b")), (COST,), ways=(Way(),), routing=Routing("random"), kv_token_bytes=1)
    for plan in (
        replace(one, tiers=(tier("host", None, 1, "through"),)),
        replace(one, tiers=(tier("host", None, 1, "back"),)),
        replace(one, tiers=(tier("host", 3000, 1, "back", demote=0), tier("disk", None, 1, "back"))),
        replace(one, tiers=(tier("host", 3000, 1, "through", demote=0), tier("disk", None, 1, "back"))),
        replace(two, tiers=(tier("pool", None, 2, "through", shared=True),)),
    ):
        found = hits(simulate, work, plan)
        assert found.sum(axis=1).tolist() == expected
        assert (found[:, 1:].sum(axis=0) > 0).tolist()[: len(plan.tiers)] == [True] * len(plan.tiers)


@engines
@pytest.mark.parametrize(("blocks", "published"), [(1000, 0.0445), (10_000, 0.2112), (50_000, 0.3546), (None, 0.3664)])
def test_hit_rates_of_the_mooncake_trace(simulate: Simulate, blocks: int | None, published: float) -> None:
    # Published check X1: one LRU cache, requests one after another. There a request's last block is the youngest when it has
    # left, here its first: 0.2116 with 10 000 blocks. A token more to a prompt, so that its last block may be found too.
    rows = pl.read_parquet(Path(__file__).parent / "data" / "requests" / "mooncake_conversation.parquet")
    ids = rows["hash_ids"].to_list()
    asked = [{"arrival_ns": i * 100 * MS, "prompt": 512 * len(b) + 1, "output": 1, "blocks": b} for i, b in enumerate(ids)]
    found = hits(simulate, work_of(asked, 512), Plan((engine(blocks=blocks),), (COST,)))
    assert found.sum() / (512 * sum(map(len, ids))) == pytest.approx(published, abs=0.0005)


@engines
def test_own_tiers_of_two_engines_give_less_than_a_shared_one(simulate: Simulate) -> None:
    work = mooncake()
    two = Plan((engine("a"), engine("b")), (COST,), ways=(Way(),), routing=Routing("random"), kv_token_bytes=1)
    own = hits(simulate, work, replace(two, tiers=(tier("host", None, 2, "through"),))).sum()
    assert 0 < own < sum(once_seen(work))


@engines
@pytest.mark.parametrize("kind", ["prefix_aware", "session"])
def test_routing_that_keeps_like_with_like_loses_no_hit(simulate: Simulate, kind: Any) -> None:
    # 40 conversations of ten turns, each turn the prompt of the one before and more; nothing in common with others.
    asked, session = [], []
    for turn in range(10):
        for c in range(40):
            ids = [c * 100 + j for j in range(2 * (turn + 1))]
            at = (turn * 40 + c) * 20 * MS
            asked.append({"arrival_ns": at, "prompt": 512 * len(ids) + 7, "output": 1, "blocks": ids})
            session.append(c)
    work = replace(work_of(asked, 512), session_id=np.array(session, dtype=np.int64))
    plan = Plan(tuple(engine(f"e{i}", None) for i in range(4)), (COST,), routing=Routing(kind))
    expected = once_seen(work)
    assert hits(simulate, work, plan)[:, 0].tolist() == expected
    assert sum(expected) > 0
    assert hits(simulate, work, replace(plan, routing=Routing("random")))[:, 0].sum() < 0.7 * sum(expected)


@engines
def test_reuse_or_recompute_turns_where_the_link_is_as_fast_as_the_prompt(simulate: Simulate) -> None:
    # A prompt token costs 1000 ns and has 1000 bytes: loading pays above 1 GB/s (Mooncake's equation 2 in these numbers).
    cost = StepCost({"prefill_tokens": 1_000_000}, "fixed")
    asked = [{"arrival_ns": i * 100 * MS, "prompt": 5 * 512 + 1, "output": 1, "blocks": b} for i, b in enumerate(
        ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 1, 2, 3, 4])
    )]  # fmt: skip
    work = work_of(asked, 512)
    host = replace(tier("host", None, 1, "through"), read=(1,))
    for rate, loads in ((900_000_000, False), (1_100_000_000, True)):
        plan = Plan(
            (engine(blocks=6),), (cost,), links=(LinkSpec("pcie", rate),), ways=(Way(), Way(links=(0,))), tiers=(host,),
            reuse="break_even", kv_token_bytes=1000,
        )  # fmt: skip
        assert hits(simulate, work, plan).sum(axis=0)[1] == (5 * 512 if loads else 0)
        assert hits(simulate, work, replace(plan, reuse="always")).sum(axis=0)[1] == 5 * 512


@engines
def test_a_split_that_keeps_all_prompts_local_is_no_split(simulate: Simulate) -> None:
    asked = [{"arrival_ns": i * 7 * MS, "prompt": 50 + i % 30, "output": 1 + i % 9} for i in range(60)]
    work = work_of(asked, 16)
    sides = (EngineSpec("p", role="prefill"), EngineSpec("d", role="decode"))
    plan = Plan(sides, (COST,), ways=(Way(),), handover=Handover(((0,),), local_below_tokens=1000), kv_token_bytes=1)
    split, whole = Kept(), Kept()
    one = simulate(work, plan, split).requests
    other = simulate(work, Plan((EngineSpec("d"),), (COST,)), whole).requests
    times = [REQUEST.index(c) for c in ("first_token_ns", "last_token_ns", "scheduled_ns", "prefill_end_ns")]
    assert one[:, times].tolist() == other[:, times].tolist()
    assert not len(split.rows("move"))
    remote = simulate(work, replace(plan, handover=Handover(((0,),))), Kept()).requests
    sent = remote[:, REQUEST.index("handover_tokens")]
    assert sent.tolist() == [q["prompt"] if q["output"] > 1 else -1 for q in asked]


@engines
def test_speculation_is_off_in_larger_batches(simulate: Simulate) -> None:
    from hoptrace.replay.plan import Speculation

    asked = [{"arrival_ns": 0, "prompt": 1, "output": 40} for _ in range(4)]
    plan = Plan((EngineSpec("e"),), (COST,), speculation=Speculation(3, 500_000, off_above=3))
    sink = Kept()
    simulate(work_of(asked, 1), plan, sink)
    steps = sink.rows("step")
    batch, proposed = (steps[:, outcome.STEP.index(c)] for c in ("decode_requests", "draft_proposed"))
    assert (proposed[batch == 4] == 0).all()
    assert (steps[batch == 4].shape[0], set(proposed.tolist())) == (39, {0})
    on = Kept()
    simulate(work_of(asked, 1), replace(plan, speculation=Speculation(3, 500_000, off_above=4)), on)
    later = on.rows("step")
    assert (later[1:, outcome.STEP.index("draft_proposed")] == 3 * later[1:, outcome.STEP.index("decode_requests")]).all()


@engines
def test_a_closed_loop_of_one_client_takes_turns(simulate: Simulate) -> None:
    work = work_of([{"arrival_ns": 0, "prompt": 1, "output": 3} for _ in range(5)], 1)
    plan = Plan((EngineSpec("e"),), (COST,), clients=1, think_ns=50 * MS, before_ns=MS, after_ns=2 * MS)
    rows = simulate(work, plan, Kept()).requests
    # 1 before, 10 + 4 + 4 in the engine, 2 after, 50 to think.
    assert rows[:, REQUEST.index("arrival_ns")].tolist() == [i * 71 * MS for i in range(5)]
